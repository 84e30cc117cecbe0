"""An algorithm's name, arrays and scalars are spelled in its own folder; everybody else loops over what it declares.

A second algorithm then changes nothing but its own folder, and a mistake in one cannot hide in another's special case.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDERS = ("proto", "kernels", "server", "client")
SUFFIXES = {".h", ".hpp", ".cc", ".cu", ".cuh", ".proto", ".py", ".map", ".txt"}

WORDS = re.compile(
    r"(?i:adam(?!_bench)|\blion\b|weight_?decay|decay_form|exp_avg|amsgrad)"
    r"|\b(?:beta1|beta2|betas|eps)\b"
    r"|(?:\.|->)[mv]\b",
)

# Where an algorithm is at home, and why.
HOMES = {
    "kernels/adam/": "its arithmetic",
    "kernels/lion/": "its arithmetic",
    "kernels/CMakeLists.txt": "the list of its sources",
    "kernels/algorithms.inc": "the list of algorithms",
    "kernels/bench/": "measures it",
    "kernels/cuda/resident.cu": "its arithmetic on the GPU",
    "client/examples/": "use it",
    "client/bench/": "measure it",
    "client/python/superoffload/axolotl.py": "optimizers of a YAML file, by the names that they have",
    "client/python/superoffload/deepspeed/": "DeepSpeed's fields and optimizers, by the names that they have",
    "client/python/superoffload/import_checkpoint/": "DeepSpeed's files, by the names that they have",
    "client/python/superoffload/finetune/recipe.py": "the optimizer of recipes that name none",
    "client/python/superoffload/jax/__init__.py": "the names that users import",
    "client/python/superoffload/jax/adam.py": "its Optax façade",
    "client/python/superoffload/jax/lion.py": "its Optax façade",
    "client/python/superoffload/stand_ins/": "others' optimizers, by the names that they have",
    "client/python/superoffload/torch/__init__.py": "the names that users import",
    "client/python/superoffload/torch/adam.py": "its torch.optim façade",
    "client/python/superoffload/torch/lion.py": "its torch.optim façade",
}


def named(root: pathlib.Path) -> dict[str, list[str]]:
    """The files outside the homes that spell an algorithm, with the lines in which they do."""
    found: dict[str, list[str]] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix not in SUFFIXES or name.endswith("_pb2.py") or name.startswith(tuple(HOMES)):
                continue
            lines = path.read_text().splitlines()
            spelled = [f"{name}:{at}: {line.strip()}" for at, line in enumerate(lines, 1) if WORDS.search(line)]
            if spelled:
                found[name] = spelled
    return found


def test_only_its_own_folder_spells_an_algorithm():
    found = [line for lines in named(ROOT).values() for line in lines]
    assert not found, "loop over the algorithm's arrays and scalars instead:\n" + "\n".join(found)


def test_a_planted_name_is_found(tmp_path):
    engine = tmp_path / "server" / "engine"
    engine.mkdir(parents=True)
    (engine / "record.h").write_text("struct State { float* p; };\nfloat First(State& s) { return s.m[0]; }\n")
    (engine / "spec.cc").write_text('Out("beta1", h.first);\n')
    (engine / "layout.h").write_text("uint64_t parameter_elements;  // memory, moment, p\n")
    home = tmp_path / "kernels" / "adam"
    home.mkdir(parents=True)
    (home / "adam.h").write_text("struct AdamStep { double beta1; };\n")
    assert list(named(tmp_path)) == ["server/engine/record.h", "server/engine/spec.cc"]
