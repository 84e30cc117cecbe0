"""`superoffload run`: scripts that know nothing of superoffload, whose optimizers are ours."""

import os
import pathlib
import subprocess
import sys

import pytest
import torch

from superoffload import run as program

OURS = f"{pathlib.Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}"  # where scripts find tests.support

# What each script below trains; it saves weights, and what it has seen, to the path that it gets.
MODEL = """
import sys
import torch

def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(),
                               torch.nn.Linear(64, 8))

def train(model, optimizer, steps=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(50, (4, 4), generator=generator)
        loss = model(tokens).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
        optimizer.step()
        optimizer.zero_grad()

def save(model, **seen):
    torch.save({"weights": model.state_dict(), **seen}, sys.argv[1])
"""
PLAIN = """
model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
train(model, optimizer)
scheduler.step()
train(model, optimizer)
save(model, isinstance=isinstance(optimizer, torch.optim.AdamW) and isinstance(optimizer, torch.optim.Adam),
     name=type(optimizer).__name__, ours=hasattr(optimizer, "last_result"), keys=sorted(optimizer.param_groups[0]))
"""

DIRECT = "import superoffload.torch" + PLAIN.replace("torch.optim.AdamW(", "superoffload.torch.AdamW(")
PROGRAM = (sys.executable, "-m", "superoffload", "run")


class Script:
    """Runs text after that of MODEL, and has what it saved."""

    def __init__(self, directory: pathlib.Path, endpoint: str) -> None:
        self._directory = directory
        self._environment = {**os.environ, "SUPEROFFLOAD_ENDPOINT": endpoint}
        self._runs = 0

    def __call__(self, text, *options, python=(sys.executable,), code=0, plainly=False, **environment):
        self._runs += 1
        path, saved = self._directory / f"script{self._runs}.py", self._directory / f"saved{self._runs}"
        path.write_text(MODEL + text)
        words = [] if plainly else [*PROGRAM, *options, "--"]
        done = subprocess.run(
            [*words, *python, path, saved], env={**self._environment, **environment}, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        self.lines = [line for line in done.stderr.splitlines() if line.startswith("superoffload: ")]
        self.errors = done.stderr
        return torch.load(saved, weights_only=False) if saved.exists() else None


@pytest.fixture
def run(tmp_path, daemons):
    return Script(tmp_path, daemons[0].endpoint)


def equal(one, other):
    return all(torch.equal(one["weights"][name], weight) for name, weight in other["weights"].items())


@pytest.fixture(scope="module")
def plain(tmp_path_factory, daemons):
    """What PLAIN saves when its optimizer is ours, when nobody stands in, and when the line is changed instead."""
    run = Script(tmp_path_factory.mktemp("plain"), daemons[0].endpoint)
    ours = run(PLAIN)
    assert run.lines == ["superoffload: torch.optim.AdamW is superoffload's AdamW, with 5 parameters"]
    return ours, run(PLAIN, plainly=True), run(DIRECT, plainly=True)


def test_a_plain_loop_trains_in_the_daemon_to_the_bits_of_the_changed_line(plain):
    ours, torchs, direct = plain
    assert ours["ours"] and ours["isinstance"] and ours["name"] == "AdamW"
    assert set(torchs["keys"]) <= set(ours["keys"])
    assert equal(ours, direct)
    torch.testing.assert_close(ours["weights"], torchs["weights"], rtol=1e-5, atol=1e-6)


def test_a_variable_turns_it_off(run, plain):
    off = run(PLAIN, SUPEROFFLOAD_STAND_INS="0")
    assert not run.lines and not off["ours"]
    assert equal(off, plain[1])


def test_an_optimizer_for_the_engine_of_deepspeed_stays(run, plain):
    """accelerate's launcher says that there is going to be one."""
    assert equal(run(PLAIN, ACCELERATE_USE_DEEPSPEED="true"), plain[1])
    assert run.lines == ["superoffload: torch.optim.AdamW stays as it is: DeepSpeed's engine has weights of its own"]


def test_a_script_that_derives_a_class_or_asks_for_another_keeps_it(run):
    text = """
class Mine(torch.optim.AdamW):
    pass

for make in (Mine, torch.optim.SGD, torch.optim.NAdam):
    optimizer = make(build().parameters(), lr=1e-2)
    assert type(optimizer) is make and not hasattr(optimizer, "last_result")
    train(build(), optimizer, 1)
"""
    run(text)
    assert not run.lines


CANNOT = """
cases = {
    "double": (build().double(), {}),
    "amsgrad": (build(), {"amsgrad": True}),
    "frozen": (build().requires_grad_(False), {}),
}
names, weights = {}, {}
for case, (model, arguments) in cases.items():
    optimizer = torch.optim.AdamW((parameter for parameter in model.parameters()), lr=1e-2, **arguments)
    assert type(optimizer) is torch.optim.AdamW
    assert len(optimizer.param_groups[0]["params"]) == 5
    if case != "frozen":
        train(model, optimizer)
    names[case] = sorted(vars(optimizer))
    weights |= {f"{case}.{name}": weight for name, weight in model.state_dict().items()}
torch.save({"weights": weights, "names": names}, sys.argv[1])
"""


def test_what_the_daemon_cannot_host_is_torchs_and_a_line_says_why(run):
    kept = run(CANNOT)
    reasons = ("float64", "amsgrad=True is not supported", "no parameter requires gradients")
    for line, reason in zip(run.lines, reasons, strict=True):
        assert line.startswith("superoffload: torch.optim.AdamW stays as it is: ") and reason in line
    plain = run(CANNOT, plainly=True)
    assert equal(kept, plain) and kept["names"] == plain["names"]


def test_a_mistake_is_torchs_own(run):
    text = """
for parameters, arguments, error in (([], {}, ValueError), (build().parameters(), {"learning_rate": 1}, TypeError),
                                     (torch.ones(2), {}, TypeError), ([{"params": {torch.ones(2)}}], {}, TypeError)):
    try:
        torch.optim.AdamW(parameters, **arguments)
    except error as raised:
        print(raised)
    else:
        raise AssertionError("it was taken")
"""
    run(text)
    assert not run.lines


def test_groups_of_iterators_pairs_and_what_is_added_later(run):
    text = """
if "superoffload.stand_ins.imports" in sys.modules:
    import superoffload.torch
    superoffload.torch.Adam(build().parameters())  # torch puts hooks into the class of the first one that is built
model = build()
first, last = model[2], model[4]
groups = [{"params": first.parameters(), "lr": 1e-3}, {"params": (p for p in last.parameters()), "weight_decay": 0.0}]
optimizer = torch.optim.Adam(groups, lr=1e-2)
steps = []
optimizer.register_step_post_hook(lambda *_: steps.append(1))
train(model, optimizer)
assert len(steps) == 4
optimizer.add_param_group({"params": model[0].parameters()})
train(model, optimizer)
assert optimizer.param_groups[2].get("param_names", ["0.weight"]) == ["0.weight"]
loose = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
unnamed = torch.optim.AdamW(loose[:1])
unnamed.add_param_group({"params": iter(loose[1:])})
assert unnamed.param_groups[1]["params"][0] is loose[1]
named = torch.optim.AdamW(build().named_parameters(), lr=1e-2)
assert named.param_groups[0]["param_names"][0] == "0.weight"
save(model, ours=hasattr(optimizer, "last_result"))
"""
    ours = run(text)
    assert ours["ours"]
    torch.testing.assert_close(ours["weights"], run(text, plainly=True)["weights"], rtol=1e-5, atol=1e-6)


def test_parameters_have_the_names_of_the_innermost_module_that_has_them(run):
    text = """
class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wrapped = build()

larger = torch.nn.ModuleDict({"a": build(), "b": build()})
model = Wrapped()
optimizer = torch.optim.AdamW(model.parameters())
assert optimizer.param_groups[0]["param_names"] == ["0.weight", "2.weight", "2.bias", "4.weight", "4.bias"]
optimizer = torch.optim.AdamW([larger["a"][0].weight, larger["b"][0].weight])
assert optimizer.param_groups[0]["param_names"] == ["a.0.weight", "b.0.weight"]
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(4))])
assert "param_names" not in optimizer.param_groups[0]
"""
    run(text)


def test_the_state_is_saved_and_resumed_as_torchs_loops_do_it(run, tmp_path):
    text = f"""
def begin():
    model = build()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

model, optimizer = begin()
train(model, optimizer)
torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict()}}, "{tmp_path}/checkpoint.pt")
train(model, optimizer)
resumed, optimizer = begin()
saved = torch.load("{tmp_path}/checkpoint.pt", weights_only=False)
resumed.load_state_dict(saved["model"])
optimizer.load_state_dict(saved["optimizer"])
train(resumed, optimizer)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
"""
    run(text)


BITSANDBYTES = {
    "AdamW8bit": "AdamW8bit",
    "PagedAdamW8bit": "AdamW8bit",
    "PagedAdamW32bit": "AdamW",
    "Lion8bit": "Lion8bit",
}


def test_of_bitsandbytes_each_has_a_counterpart_of_its_width(run):
    text = """
import bitsandbytes
import superoffload.torch

def trained(make, **more):
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 256).bfloat16()
    optimizer = make(model.named_parameters(), lr=1e-2, **more)
    for _ in range(3):
        model(torch.ones(2, 64).bfloat16().cumsum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, model.weight

for cls, ours in PAIRS.items():
    optimizer, weight = trained(getattr(bitsandbytes.optim, cls), weight_decay=0.1)
    assert isinstance(optimizer, getattr(bitsandbytes.optim, cls))
    assert torch.equal(weight, trained(getattr(superoffload.torch, ours), weight_decay=0.1)[1])
assert isinstance(trained(bitsandbytes.optim.AdamW, optim_bits=8)[0], superoffload.torch.AdamW8bit)
"""
    run(text.replace("PAIRS", repr(BITSANDBYTES)))
    assert run.lines == [
        f"superoffload: bitsandbytes.optim.{cls} is superoffload's {ours}, with 2 parameters"
        for cls, ours in {**BITSANDBYTES, "AdamW": "AdamW8bit"}.items()
    ]


def test_of_bitsandbytes_what_has_no_counterpart_stays(run):
    text = """
import bitsandbytes
optimizer = bitsandbytes.optim.AdamW8bit(build().parameters(), min_8bit_size=16384)
assert type(optimizer) is bitsandbytes.optim.AdamW8bit and optimizer.args.min_8bit_size == 16384
"""
    run(text)
    assert run.lines == [
        "superoffload: bitsandbytes.optim.AdamW8bit stays as it is: min_8bit_size=16384 has no counterpart"
    ]


def test_options_of_a_file_are_those_of_our_optimizers(run, plain, tmp_path):
    (tmp_path / "options.yaml").write_text("state_dtype: bfloat16\nseed: 3\ngpu: {stream_slots: 4}\n")
    chosen = run(PLAIN, "--config", tmp_path / "options.yaml")
    direct = DIRECT.replace("model.parameters(), ", "model.named_parameters(), state_dtype=torch.bfloat16, seed=3, ")
    assert equal(chosen, run(direct, plainly=True)) and not equal(chosen, plain[0])


WRITES = """
def closure():
    loss = model(torch.zeros(1, 4, dtype=torch.long)).square().mean()
    loss.backward()
    return loss

model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaled = {name: 2 * value for name, value in model.state_dict().items()}
model.load_state_dict(scaled)
train(model, optimizer)
with torch.no_grad():
    model[2].weight.mul_(0.5)
train(model, optimizer)
optimizer.zero_grad()
model[4].weight.data = model[4].weight.data.clamp(-0.1, 0.1)
loss = optimizer.step(closure)
optimizer.zero_grad()
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
scaler.scale(model(torch.ones(1, 4, dtype=torch.long)).square().mean()).backward()
with torch.no_grad():
    model[2].bias.add_(0.5)
scaler.step(optimizer)
scaler.update()
save(model, loss=loss.item())
"""


def test_what_a_script_writes_to_parameters_counts_as_with_torch(run):
    ours = run(WRITES)
    assert len(run.lines) == 5 and "parameter 2.weight was changed by somebody else" in run.lines[2]
    torchs = run(WRITES, plainly=True)
    torch.testing.assert_close(ours["weights"], torchs["weights"], rtol=1e-5, atol=1e-6)
    assert ours["loss"] == pytest.approx(torchs["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "text, words",
    [
        ("wieghts: auto", "wieghts is no option; there are bucket_bytes, "),
        ("weights: none", "weights is 'none' but must be"),
        ("state_dtype: int8", "state_dtype is 'int8' but must be one of float32, bfloat16"),
        ("gpu: 3", "gpu is 3 but must have some of device, "),
        ("gpu: {stream_slots: 0}", "stream_slots is 0 but must be at least 1"),
        ("checkpoint: {directory: /tmp}", "checkpoint: "),
        ("- weights", "has list but must have options by name"),
        ("a: [", "while parsing"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_told_before_the_command_begins(capsys, tmp_path, text, words):
    if text is not None:
        (tmp_path / "options.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        program.main(["--config", f"{tmp_path}/options.yaml", "--", "false"])
    assert ended.value.code == 2
    assert f"superoffload run: error: {tmp_path}/options.yaml: {words}" in capsys.readouterr().err


def test_the_command_line_and_exit_statuses(run):
    run("sys.exit(7)", code=7)
    run("", python=["no-such-program"], code=127)
    assert "superoffload run: cannot run no-such-program: No such file or directory" in run.errors
    run("", python=["/etc/passwd"], code=126)
    none = subprocess.run(PROGRAM, capture_output=True, text=True)
    assert none.returncode == 2 and "there is no command, as in: superoffload run -- python train.py" in none.stderr
    words = [*PROGRAM, sys.executable, "-c", "import sys; print(sys.argv[1:])", "--config", "theirs"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "['--config', 'theirs']\n"


def test_the_sitecustomize_that_it_hides_runs(run, tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("import builtins\nbuiltins.seen = __name__\n")
    run("assert seen == 'sitecustomize' == sys.modules['sitecustomize'].__name__", PYTHONPATH=str(tmp_path / "site"))


def test_a_python_without_superoffload_says_so_and_goes_on(run, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    done = subprocess.run([*PROGRAM, tmp_path / "bare/bin/python", "-c", "print(1)"], capture_output=True, text=True)
    assert done.stdout == "1\n" and f"superoffload: {tmp_path}/bare/bin/python keeps its optimizers: " in done.stderr


# The script's own model, of blocks, is on the fake GPU.
GPU = """
import collections
import pytest
from tests.support import fake_torch_gpu

with pytest.MonkeyPatch.context() as patch:
    fake_torch_gpu.install(patch)
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(64, 64) for _ in range(6)]
    parts = {"embedding": torch.nn.Embedding(50, 16), "flatten": torch.nn.Flatten()}
    parts["layers"] = torch.nn.Sequential(*blocks)
    model = torch.nn.Sequential(collections.OrderedDict(parts)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 8)
    second = torch.optim.AdamW(build().parameters(), lr=1e-2)
    seen = [each.gpu_report.weights for each in (optimizer, second) if hasattr(each, "gpu_report")]
    save(model, seen=seen)
    optimizer.close()
"""


def test_on_a_gpu_blocks_are_known_whose_names_the_script_has_not_passed(run, tmp_path):
    resident = run(GPU, PYTHONPATH=OURS)
    assert resident["seen"] == ["", ""]
    (tmp_path / "options.yaml").write_text("weights: auto\ngpu: {stream_slots: 2}\n")
    automatic = run(GPU, "--config", tmp_path / "options.yaml", PYTHONPATH=OURS)
    assert equal(automatic, resident)
    assert automatic["seen"][0].startswith("6 of 6 blocks stay on the GPU and 0 stream")
    assert "no blocks are found" in automatic["seen"][1]


RANKS = """
import torch.distributed

torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(build())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
train(model, optimizer)
if torch.distributed.get_rank() == 0:
    save(model.module, ours=hasattr(optimizer, "last_result"), divided=getattr(optimizer, "is_divided", bool)())
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def test_processes_that_a_launcher_starts(run, tmp_path):
    whole = run(RANKS, python=TORCHRUN)
    assert whole["ours"] and not whole["divided"]
    assert run.lines == ["superoffload: torch.optim.AdamW is superoffload's AdamW, with 5 parameters"]  # one rank's
    (tmp_path / "options.json").write_text('{"replicas": true}')
    divided = run(RANKS, "--config", tmp_path / "options.json", python=TORCHRUN)
    assert divided["divided"] and equal(divided, whole)


TRAINER = """
import transformers
from tests.support import small_llama

def trained(directory, steps, resume=False):
    model = small_llama.build()
    arguments = small_llama.arguments(
        directory, max_steps=steps, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_grad_norm=0.5,
        learning_rate=1e-2, save_steps=2, lr_scheduler_type="constant")
    trainer = transformers.Trainer(model, arguments, train_dataset=small_llama.Tokens())
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer.optimizer.optimizer

model, optimizer = trained(sys.argv[1] + ".whole", 4)
trained(sys.argv[1] + ".parts", 2)
resumed, _ = trained(sys.argv[1] + ".parts", 4, resume=True)
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))
names = optimizer.param_groups[0].get("param_names")
save(model, ours=hasattr(optimizer, "last_result"), names=names)
"""


def test_the_hugging_face_trainer_trains_saves_and_resumes(run):
    ours = run(TRAINER, PYTHONPATH=OURS)
    assert ours["ours"] and "model.layers.1.mlp.down_proj.weight" in ours["names"]
    torch.testing.assert_close(
        ours["weights"], run(TRAINER, plainly=True, PYTHONPATH=OURS)["weights"], rtol=1e-4, atol=1e-5
    )
