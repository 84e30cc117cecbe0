"""superoffloadctl plan and superoffload plan, with the real binaries; no daemon runs."""

import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree

import pytest
import torch
import transformers
from google.protobuf import json_format, text_format

import superoffload.torch
from superoffload import plan
from superoffload._core.error import Error
from superoffload.v1 import plan_pb2

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"
PLANNER = pathlib.Path(os.environ["SUPEROFFLOAD_DAEMON"]).with_name("superoffload-plan")
DOES_NOT_FIT = 3
RUN = ("--machine=gh200-96-480", "--batch=4", "--sequence=2048", "--quick")

# The published configurations, as far as they differ from transformers' defaults.
CONFIGS = {
    "llama-8b": {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    },
    "llama-70b": {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    },
    "phi-4": {
        "model_type": "phi3",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "intermediate_size": 17920,
        "vocab_size": 100352,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "model_type": "qwen3",
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 17408,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "vocab_size": 151936,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "tie_word_embeddings": False,
    },
    "seed-oss-36b": {
        "model_type": "seed_oss",
        "hidden_size": 5120,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 27648,
        "vocab_size": 155136,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 2880,
        "vocab_size": 201088,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "gpt2-1b": {
        "model_type": "gpt2",
        "n_embd": 2048,
        "n_layer": 20,
        "n_head": 32,
        "n_positions": 2048,
        "vocab_size": 50257,
    },
}


def ctl(*words, status: int = 0) -> str:
    run = subprocess.run([CTL, "plan", *map(str, words)], capture_output=True, text=True, timeout=120)
    assert run.returncode == status, run.stdout + run.stderr
    return run.stdout or run.stderr


def write_config(directory: pathlib.Path, config: dict) -> pathlib.Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_without_the_modules_that_read_a_configuration_plan_says_what_to_install(tmp_path, missing):
    config = write_config(tmp_path / "model", CONFIGS["gpt2-1b"])
    code = f"import sys; sys.modules[{missing!r}] = None; from superoffload.__main__ import main; sys.exit(main())"
    words = ["plan", f"--model={config}", "--machine=gh200-96-480", "--batch=1", "--sequence=64"]
    asked = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert asked.returncode == 1
    (line,) = asked.stderr.splitlines()
    assert line.startswith(f"superoffload: {missing} ") and "pip install 'superoffload[hf]'" in line


@pytest.mark.parametrize("name", CONFIGS)
def test_a_known_model_is_the_one_that_transformers_makes(tmp_path, name):
    described = plan.describe_config(write_config(tmp_path / name, CONFIGS[name]))
    request = {"machine_name": "gh200-96-480", "batch": 1, "sequence": 2048, "quick": True}
    known = plan.ask(plan_pb2.PlanRequest(model_name=name, **request))
    made = plan.ask(plan_pb2.PlanRequest(model=described, **request))
    assert made == known  # the same layout, memory, operations, times: and so the same names and shapes


def test_a_config_must_state_its_shape(tmp_path):
    for name, missing in (("seed-oss-36b", "hidden_size"), ("gpt-oss-20b", "num_local_experts")):
        config = {key: value for key, value in CONFIGS[name].items() if key != missing}
        with pytest.raises(Error, match=f"does not say {missing}"):
            plan.describe_config(write_config(tmp_path / name, config))


def test_tied_embeddings_are_counted_once(tmp_path):
    config = {**CONFIGS["qwen3-14b"], "num_hidden_layers": 2, "tie_word_embeddings": True}
    described = plan.describe_config(write_config(tmp_path / "tied", config))
    assert described.architecture.tied_embeddings
    assert not any(parameter.name == "lm_head.weight" for parameter in described.parameters)


def test_both_commands_print_the_same_report(tmp_path):
    by_name = ctl("--model=llama-8b", *RUN)
    assert "fits" in by_name and "master weights" in by_name and "host.bandwidth" not in by_name
    assert "\nperformance: " in by_name and "\nexposed: " in by_name
    assert by_name.startswith("llama-8b on gh200-96-480: 8.03 B parameters")
    directory = write_config(tmp_path / "llama-8b", CONFIGS["llama-8b"])
    run = subprocess.run(
        [sys.executable, "-m", "superoffload", "plan", f"--model={directory}", *RUN],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == by_name


def test_assumptions_come_last_and_on_request():
    answer = ctl("--model=llama-8b", *RUN)
    with_them = ctl("--model=llama-8b", *RUN, "--assumptions")
    words = ["plan", "--model=llama-8b", *RUN, "--assumptions"]
    python = subprocess.run([sys.executable, "-m", "superoffload", *words], capture_output=True, text=True, timeout=300)
    assert python.stdout == with_them
    assert with_them.startswith(answer.removesuffix("--assumptions says what this rests on.\n"))
    assert "host.bandwidth is 348 GB/s (" in with_them.removeprefix(answer[:-40])


def test_both_commands_have_an_exit_status_for_what_does_not_fit(capsys):
    for model, status in (("llama-8b", 0), ("llama-70b", DOES_NOT_FIT)):
        words = [f"--model={model}", *RUN]
        assert ctl(*words, status=status).startswith(f"{model} on gh200-96-480")
        assert plan.main(words) == status
        assert capsys.readouterr().out.startswith(f"{model} on gh200-96-480")
    with pytest.raises(SystemExit):
        plan.main(["--help"])
    for manual in (ctl("--help"), capsys.readouterr().out):
        assert "3 when the answer is that it does not fit" in " ".join(manual.split())


def test_a_reserve_of_zero_is_none():
    for words, bytes_ in ((("--allocator-reserve=0",), 0), ((), 5_100_273_664)):
        words = ["--model=llama-8b", *RUN, "--json", *words]
        python = [sys.executable, "-m", "superoffload", "plan", *words]
        asked = subprocess.run(python, capture_output=True, text=True, check=True).stdout
        for answer in (json.loads(ctl(*words)), json.loads(asked)):
            (reserve,) = (item for item in answer["memory"][0]["gpu"]["items"] if item["purpose"] == "reserve")
            assert int(reserve.get("bytes", 0)) == bytes_


def test_tokens_have_a_price():
    answer = json.loads(ctl("--model=llama-8b", *RUN, "--json", "--price-per-hour=2.5", "--ranks=2"))
    ours = answer["performance"]
    assert ours["price_per_million_tokens"] == pytest.approx(2 * 2.5 / 3600 / ours["tokens_per_second"] * 1e6)
    assert "price of 1M tokens" in ctl("--model=llama-8b", *RUN, "--price-per-hour=2.5")


def test_json_has_everything(tmp_path):
    answer = json.loads(ctl("--model=llama-8b", "--json", *RUN))
    assert answer["parameters"] == "8030261248"
    host = answer["memory"][0]["host"]
    assert sum(int(item["bytes"]) for item in host["items"]) == int(host["total_bytes"])
    assert answer["largest"]["batch"] >= 4 and answer["assumptions"]


def test_a_step_is_simulated():
    answer = json.loads(ctl("--model=llama-8b", "--json", *RUN))
    ours = answer["performance"]
    assert not answer["performance_unknown"]
    assert ours["tokens_per_second"] == pytest.approx(4 * 2048 / ours["step_seconds"])
    assert sum(part["seconds"] for part in ours["exposed"]) == pytest.approx(ours["exposed_seconds"])
    assert 0 < ours["mfu"] < 1
    assert json.loads(ctl("--model=llama-8b", "--json", *RUN)) == answer  # nothing depends on when it runs


def test_a_chunked_loss_makes_room_for_a_long_sequence_on_one_chip():
    words = ("--model=gpt-oss-20b", "--machine=gh200-96-480", "--batch=1", "--sequence=32768", "--quick")
    advice = ctl(*words, status=DOES_NOT_FIT)
    assert "--loss=chunked" in advice and "use_liger_kernel=True" in advice and "--ranks" not in advice
    answer = json.loads(ctl(*words, "--json", "--loss=chunked"))
    assert answer["memory"][0]["gpu"]["fits"] and answer["performance"]["step_seconds"] > 0
    assert answer["recommendation"]["loss"] == "LOSS_CHUNKED" and answer["recommendation"]["ranks"] == 1
    assert "whole, chunked" in ctl(*words, "--loss=some", status=2)


def test_a_machine_of_which_there_is_one_is_not_recommended_twice(tmp_path):
    machine = tmp_path / "workstation.textproto"
    words = ("--model=llama-8b", f"--machine={machine}", "--batch=1", "--sequence=4096", "--quick")
    for network, ranks in (("", "pass --ranks=4"), ("network { most_ranks: 1 }", "workstation comes alone")):
        machine.write_text(f'name: "workstation" like: "h100-pcie" host {{ memory_bytes: 4e10 }} {network}')
        advice = ctl(*words, status=DOES_NOT_FIT)
        assert ranks in advice, advice
    assert "--ranks" not in advice


def test_a_measured_throughput_sets_the_pace():
    words = ("--model=gpt2-2b", "--json", *RUN)
    plain, measured = (json.loads(ctl(*words, *more)) for more in ((), ("--measured_tokens_per_second=10000",)))
    ours = measured["performance"]
    assert ours["step_seconds"] - ours["exposed_seconds"] == pytest.approx(4 * 2048 / 10000)
    assert ours["step_seconds"] > plain["performance"]["step_seconds"]
    assert any("the measured 10000 tokens per second" in sentence for sentence in measured["assumptions"])
    assert "at its peak" in ctl("--model=gpt2-2b", *RUN, "--measured-tokens-per-second=1e9", status=2)


def test_a_run_of_several_ranks_is_simulated(tmp_path):
    trace = tmp_path / "step.json"
    words = ("--model=llama-70b", "--ranks=4", *RUN)
    answer = json.loads(ctl(*words, "--json", f"--timeline={trace}"))
    ours = answer["performance"]
    assert ours["tokens_per_second"] == pytest.approx(4 * 4 * 2048 / ours["step_seconds"])
    assert "gathering parameters from ranks" in {part["cause"] for part in ours["exposed"]}
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["name"].split()[0] for event in spans if event["cat"] == "network"} == {"gather", "reduce"}
    assert "rank 0 of 4, which takes the most" in ctl(*words)


def test_what_does_not_fit_has_no_speed():
    answer = json.loads(ctl("--model=llama-70b", "--json", *RUN, status=DOES_NOT_FIT))
    assert "performance" not in answer and "does not fit" in answer["performance_unknown"]


@pytest.mark.parametrize("command", [[CTL], [sys.executable, "-m", "superoffload"]])
@pytest.mark.parametrize("ending", ["svg", "json"])
def test_a_step_that_cannot_be_drawn_is_planned_and_said_to_be_missing(tmp_path, command, ending):
    drawn = tmp_path / f"step.{ending}"
    words = [*command, "plan", "--model=llama-70b", *RUN, f"--timeline={drawn}"]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert run.returncode == DOES_NOT_FIT and not drawn.exists()
    assert run.stdout == ctl("--model=llama-70b", *RUN, status=DOES_NOT_FIT)  # the plan says what would make it fit
    (sentence,) = run.stderr.splitlines()
    assert f"{drawn} is not written" in sentence and "does not fit in HBM" in sentence


def test_a_timeline_is_a_picture_or_a_trace(tmp_path):
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    ctl("--model=gpt2-1b", *RUN, f"--timeline={picture}")
    assert xml.etree.ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    ctl("--model=gpt2-1b", *RUN, "--resident-buckets=0", f"--timeline={trace}")
    events = json.loads(trace.read_text())["traceEvents"]
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys() and (event["ph"] != "X" or event["dur"] >= 0)
    lanes = {"step", "exposed", "gpu", "h2d", "d2h", "cpu", "verdict"}
    assert {event["cat"] for event in events if event["ph"] == "X"} == lanes


SVG = "{http://www.w3.org/2000/svg}"


def picture(tmp_path, *words):
    drawn = tmp_path / "step.svg"
    answer = json.loads(ctl(*words, "--json", f"--timeline={drawn}"))
    return xml.etree.ElementTree.parse(drawn).getroot(), answer["performance"]


def bars(root, lane):
    """Of a lane: title without times, begin and end in the picture's unit, colour."""
    found = []
    for bar in root.iter(f"{SVG}rect"):
        if bar.get("class") == lane and (title := bar.find(f"{SVG}title")) is not None:
            name, times = title.text.rsplit(": ", 1)
            begin, _, end, unit = times.split()
            found.append((name, float(begin), float(end), bar.get("fill"), unit))
    return found


def test_a_picture_shows_two_steps_and_what_happens_in_them(tmp_path):
    root, ours = picture(tmp_path, "--model=gpt2-2b", *RUN)
    width, height = map(float, root.get("viewBox").split()[2:])
    for rectangle in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rectangle.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
    texts = [text.text for text in root.iter(f"{SVG}text")]
    steps = bars(root, "step")
    assert [name.split(",")[1] for name, *_ in steps] == [" which commits"] * 2
    assert {name for name, *_ in steps} <= set(texts)
    assert steps[0][2] == steps[1][1] and {unit for *_, unit in steps} == {"ms"}
    for _, begin, end, *_ in steps:
        assert end - begin == pytest.approx(1e3 * ours["step_seconds"], rel=1e-3)
    kinds = {}
    for lane in ("gpu", "cpu"):
        for name, _, _, colour, _ in bars(root, lane):
            kinds.setdefault(name.split()[0], set()).add(colour)
    assert {"forward", "backward", "absorb", "speculate"} <= kinds.keys()
    colours = [colour for kind in ("forward", "backward", "absorb", "speculate") for colour in kinds[kind]]
    assert len(set(colours)) == 4
    legend = {entry.get("fill") for entry in root.iter(f"{SVG}rect") if entry.get("class") == "legend"}
    assert set(colours) <= legend
    assert {"forward", "absorb"} <= set(texts)


def test_a_picture_marks_the_time_that_is_exposed(tmp_path):
    root, ours = picture(tmp_path, "--model=gpt2-2b", *RUN)
    exposed = bars(root, "exposed")
    causes = {part["cause"] for part in ours["exposed"]}
    assert {name for name, *_ in exposed} == causes
    milliseconds = sum(end - begin for _, begin, end, *_ in exposed)
    assert milliseconds == pytest.approx(2e3 * ours["exposed_seconds"], rel=1e-2)
    computed = bars(root, "gpu")
    for _, begin, end, *_ in exposed:  # nothing of the model is computed meanwhile
        middle = (begin + end) / 2
        assert not any(first < middle < last for _, first, last, *_ in computed)
    shaded = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "exposed" and r.get("fill-opacity")]
    assert len(shaded) == len(exposed)


@pytest.mark.parametrize(("words", "unit"), [(("--batch=4",), "ms"), (("--batch=32", "--accumulation=16"), "s")])
def test_the_axis_of_a_picture_has_round_ticks_in_one_unit(tmp_path, words, unit):
    root, ours = picture(tmp_path, "--model=gpt2-2b", "--machine=gh200-96-480", "--sequence=2048", "--quick", *words)
    assert [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "unit"] == [f"time, {unit}"]
    labels = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "tick"]
    assert labels == [str(int(label)) for label in labels] and 5 <= len(labels) <= 12
    ticks = [int(label) for label in labels]
    tick = ticks[1]
    assert tick in {factor * 10**power for factor in (1, 2, 5) for power in range(5)}
    assert ticks == [i * tick for i in range(len(ticks))]
    assert ticks[-1] <= 2 * ours["step_seconds"] * {"ms": 1e3, "s": 1}[unit] * 1.001


def test_the_daemon_charges_what_was_planned(daemon):
    model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Linear(500, 7)).bfloat16()
    optimizer = superoffload.torch.AdamW(model.named_parameters(), endpoint=daemon.endpoint, name="planned")
    words = [CTL, f"--endpoint={daemon.endpoint}", "describe", "planned", "--json"]
    described = json.loads(subprocess.run(words, capture_output=True, text=True, timeout=60).stdout)
    optimizer.close()
    request = plan_pb2.PlanRequest(machine_name="laptop", batch=1, sequence=1, quick=True)
    request.model.architecture.MergeFrom(
        plan_pb2.Architecture(layers=1, hidden=500, query_heads=1, feed_forward=500, vocabulary=7)
    )
    for parameter in described["parameters"]:
        json_format.ParseDict(parameter, request.model.parameters.add())
    answer = plan.ask(request)
    assert answer.memory[0].host.total_bytes == int(described["memory_bytes"])
    assert answer.buckets == int(described["bucket_count"])


def test_files_describe_models_and_machines(tmp_path):
    model = tmp_path / "model.textproto"
    model.write_text(
        'name: "small" architecture { layers: 4 hidden: 256 query_heads: 4 feed_forward: 1024 vocabulary: 1000 '
        "gated_feed_forward: true }"
    )
    machine = tmp_path / "machine.textproto"
    machine.write_text('name: "mine" like: "laptop" host { bandwidth: 5e10 }')
    text = ctl(f"--model={model}", f"--machine={machine}", "--batch=1", "--sequence=128", "--assumptions")
    assert text.startswith("small on mine: ") and "host.bandwidth is 50 GB/s (given)." in text


def test_bench_measures_a_machine_that_plan_reads(tmp_path):
    machine = tmp_path / "measured.textproto"
    words = [CTL, "bench", "--elements=262144", "--repetitions=1", "--machine_like=h100-pcie"]
    run = subprocess.run([*words, f"--machine_output={machine}"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    described = text_format.Parse(machine.read_text(), plan_pb2.MachineDescription())
    assert described.host.cores == len(os.sched_getaffinity(0)) and described.host.bandwidth > 0
    if described.host.cores == 1:
        pytest.skip("a machine with one core has none for a trainer")
    text = ctl("--model=gpt2-1b", f"--machine={machine}", "--batch=1", "--sequence=128", "--assumptions")
    assert text.startswith("gpt2-1b on measured: ") and "passes.absorb is " in text and "(given)." in text


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--model=llama-9b", *RUN), 'no model "llama-9b"'),
        (("--model=llama-8b", "--machine=cray", "--batch=1", "--sequence=1"), "cray"),
        (("--model=llama-8b", "--machine=laptop", "--batch=0", "--sequence=1"), "batch is 0 but must be 1 to"),
        (("--model=llama-8b", "--machine=laptop", "--batch=-1", "--sequence=1"), "--batch"),
        (("--model=llama-8b", *RUN, "--checkpointing=some"), "none, selective, full"),
        (("--model=llama-8b", *RUN, "--colour=red"), '"--colour=red"'),
        (("--model=llama-8b", *RUN, "--schedules=ddp"), 'no flag "--schedules=ddp"; see superoffloadctl plan --help'),
        (("--model=llama-8b", *RUN, "--ranks"), "--ranks needs a value"),
        (("--model=./none.textproto", *RUN), "cannot read ./none.textproto"),
        (("--model=llama-8b", *RUN, "--timeline=step.png"), ".svg or .json"),
        (("--model=llama-8b", "--machine=laptop", "--sequence=1"), "batch is missing"),
        (("--model=llama-8b", *RUN, "--price_per_hour=-1"), "price_per_hour is -1"),
        ((), "model, machine, batch, sequence are missing"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(words, sentence):
    error = ctl(*words, status=2)
    assert sentence in error and error.count("\n") == 1, error


# What made the planner fail a check, allocate without end or never come to the end of a step.
EXTREME_MACHINES = {
    "gpu { peak_flops: 5e-324 }": "gpu.peak_flops of machine",
    "gpu { peak_flops: 1 }": "gpu.peak_flops of machine",
    "gpu { matmul_efficiency: 1e-300 }": "gpu.matmul_efficiency of machine",
    "gpu { memory_bandwidth: 1e-300 }": "gpu.memory_bandwidth of machine",
    "gpu { memory_bytes: 1e300 }": "gpu.memory_bytes of machine",
    "gpu { block_overhead: 1.7e308 }": "gpu.block_overhead of machine",
    "host { memory_bytes: inf }": "host.memory_bytes of machine",
    "host { bandwidth: nan }": "host.bandwidth of machine",
    "host { core_bandwidth: -1 }": "host.core_bandwidth of machine",
    "passes { absorb: 1e300 }": "passes.absorb of machine",
    "host_to_device { bytes: 5e-324 bytes_per_second: 1e11 }": "the size of a point of a link",
    "device_to_host { bytes: 1 bytes_per_second: 1e-300 }": "the bandwidth of a point of a link",
}


def planned_in_little_memory(*words, model="gpt2-1b"):
    command = [CTL, "plan", f"--model={model}", "--batch=1", "--sequence=1024", *words]
    if "ASAN_OPTIONS" not in os.environ and "TSAN_OPTIONS" not in os.environ:  # they map terabytes
        command = ["prlimit", f"--as={4 << 30}", "--core=0", *command]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("text", EXTREME_MACHINES)
def test_a_machine_that_nobody_can_build_is_refused(tmp_path, text):
    machine = tmp_path / "machine.textproto"
    machine.write_text(f'like: "gh200-96-480" {text}')
    run = planned_in_little_memory(f"--machine={machine}", "--quick")
    assert run.returncode == 2, run.stdout + run.stderr
    assert EXTREME_MACHINES[text] in run.stderr and " must be " in run.stderr


@pytest.mark.parametrize("words", [[], ["--ranks=4"], ["--clip_rate=0.3"]])
def test_an_accumulation_beyond_what_is_simulated_is_planned_without_speed(words):
    run = planned_in_little_memory("--machine=gh200-96-480", "--accumulation=1048576", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "An accumulation of 1048576 means" in run.stdout and "smaller accumulation" in run.stdout


def test_a_slow_machine_comes_to_the_end_of_its_step(tmp_path):
    """Of a step of weeks, the last moments of a copy are shorter than the time can tell."""
    machine = tmp_path / "machine.textproto"
    machine.write_text('like: "gh200-96-480" gpu { peak_flops: 1e6 }')
    run = planned_in_little_memory(f"--machine={machine}", "--quick")
    assert run.returncode == 0 and "\nperformance: " in run.stdout, run.stdout + run.stderr


def test_more_shards_than_can_be_laid_out_are_refused(tmp_path):
    model = tmp_path / "model.textproto"
    sizes = "hidden: 64 query_heads: 4 feed_forward: 64 vocabulary: 1000"
    model.write_text(f"architecture {{ layers: 16384 {sizes} }}")
    run = planned_in_little_memory("--machine=gh200-96-480", "--ranks=1024", model=model)
    assert run.returncode == 2, run.stdout + run.stderr
    assert "ask with fewer ranks" in run.stderr


def test_a_malformed_file_is_named_with_its_line(tmp_path):
    model = tmp_path / "model.textproto"
    model.write_text('name: "x"\nlayers: 3\n')
    assert f"{model}:2:" in ctl(f"--model={model}", *RUN, status=2)


def test_python_says_what_is_wrong(tmp_path, capsys):
    from superoffload.plan import main

    (tmp_path / "config.json").write_text("{")
    for words, sentence in (
        ([f"--model={tmp_path}", *RUN], "no configuration"),
        (["--model=llama-9b", *RUN], 'no model "llama-9b"'),
        (["--model=llama-8b", *RUN, "--timeline=a.png"], ".svg or .json"),
        (["--model=llama-8b", "--machine=gh200-144", "--batch=-1", "--sequence=1"], "--batch"),
        (["--model=llama-8b", "--machine=gh200-144", "--sequence=1"], "batch is missing"),
        ([], "model, machine, batch, sequence are missing"),
    ):
        assert main(words) == 2
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": -4096},
        {"hidden_size": "large"},
        {"num_attention_heads": 0},
        {"num_attention_heads": "32"},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": "many"},
        {"vocab_size": "128k"},
        {"vocab_size": -1},
        {"intermediate_size": [1]},
        {"num_key_value_heads": -8},
    ],
    ids=str,
)
def test_sizes_that_are_negative_or_texts_are_said_in_a_sentence(tmp_path, capsys, sizes):
    config = {**CONFIGS["llama-8b"], "num_hidden_layers": 2, "hidden_size": 64, **sizes}
    assert plan.main([f"--model={write_config(tmp_path / 'model', config)}", *RUN]) == 2
    error = capsys.readouterr().err
    assert error.startswith("superoffload: ") and error.count("\n") == 1, error
    assert not any(isinstance(size, str) for size in sizes.values()) or next(iter(sizes)) in error, error


@pytest.mark.parametrize(
    "word", ["--batch=four", "--sequence=-1", "--clip-rate=often", "--bucket_bytes=99999999999999999999"]
)
def test_numbers_of_the_command_line_that_are_none_end_without_a_traceback(word):
    words = [sys.executable, "-m", "superoffload", "plan", "--model=llama-8b", *RUN, word]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert run.returncode == 2 and "Traceback" not in run.stderr
    assert word.partition("=")[0].replace("-", "_").strip("_") in run.stderr.replace("-", "_"), run.stderr


DDP = b"\xc2\x01\x03ddp"  # field 24, which was called schedules
LATER = b"\xc2\x3e\x01x"  # field 1000, of a later release


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (b"\xff\xff", "no PlanRequest"),
        (b"", "model, machine, batch, sequence are missing"),
        (DDP, "take it and the program that asks from one release"),
        (b"\x12\x06\x12\x04" + LATER, "one release"),  # in the architecture
    ],
)
def test_a_request_that_is_none_or_of_another_release_is_refused(request_, sentence):
    run = subprocess.run([PLANNER], input=request_, capture_output=True, timeout=60)
    assert run.returncode == 2 and not run.stdout
    (line,) = run.stderr.decode().splitlines()
    assert line.startswith("superoffload-plan: ") and sentence in line


def test_the_program_says_its_version_and_takes_no_flags():
    said = subprocess.run([PLANNER, "--version"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert said.returncode == 0 and said.stdout.startswith("superoffload-plan ") and said.stdout.count(".") == 2
    run = subprocess.run([PLANNER, "--model=llama-8b"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert run.returncode == 2 and 'no argument "--model=llama-8b"; superoffloadctl plan' in run.stderr


@pytest.mark.parametrize(
    ("does", "sentence"),
    [
        (None, "superoffloadd of this release, which brings it"),
        ("exit 0", ""),
        ("echo 'no answer'", ""),
        ("echo superoffload-plan: it broke >&2; exit 1", "it broke"),
        ("kill -SEGV $$", ""),
    ],
    ids=["missing", "silent", "garbled", "broken", "killed"],
)
def test_a_planner_that_gives_no_answer_is_named_in_a_sentence(tmp_path, monkeypatch, does, sentence):
    program = tmp_path / "superoffload-plan"
    if does is not None:
        program.write_text(f"#!/bin/sh\ncat >/dev/null\n{does}\n")
        program.chmod(0o755)
    monkeypatch.setenv("SUPEROFFLOAD_DAEMON", str(tmp_path / "superoffloadd"))
    for command in ([CTL], [sys.executable, "-m", "superoffload"]):
        run = subprocess.run([*command, "plan", "--model=llama-8b", *RUN], capture_output=True, text=True, timeout=120)
        assert run.returncode == 1 and not run.stdout, (command, run)
        assert str(program) in run.stderr or sentence == "it broke", run.stderr
        assert sentence in run.stderr and "Traceback" not in run.stderr, run.stderr


def test_the_planner_of_the_daemon_that_is_named_is_asked(tmp_path, monkeypatch):
    (tmp_path / "superoffload-plan").symlink_to(PLANNER)
    for named in (tmp_path / "superoffloadd", "superoffloadd"):  # a file, and a name in $PATH
        monkeypatch.setenv("SUPEROFFLOAD_DAEMON", str(named))
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert ctl("--model=llama-8b", *RUN).startswith("llama-8b on gh200-96-480")
        request = plan_pb2.PlanRequest(model_name="gpt2-1b", machine_name="laptop", batch=1, sequence=1, quick=True)
        assert plan.ask(request).model == "gpt2-1b"


def test_known_configurations_are_still_transformers_own():
    """The names of the fields above: a release that renames one would fall back to its default."""
    for config in CONFIGS.values():
        made = transformers.AutoConfig.for_model(**config)
        for key, value in config.items():
            assert key == "quantization_config" or getattr(made, key) == value, key
