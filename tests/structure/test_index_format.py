"""The index of a checkpoint is written and read by server/checkpoint alone, but for a file that writes it for others.

Nobody else spells its JSON.
"""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = ("weight_map", "parameter_groups", "index.json")
HOMES = ("server/checkpoint/", "client/python/superoffload/_core/checkpoint_files.py")


def spelled(root: pathlib.Path) -> list[str]:
    return [
        f"{path.relative_to(root)}:{at}: {line.strip()}"
        for folder in ("client", "server", "kernels")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in {".py", ".cc", ".h", ".hpp"} and not path.relative_to(root).as_posix().startswith(HOMES)
        for at, line in enumerate(path.read_text().splitlines(), 1)
        if any(f'"{word}"' in line or f'{word}"' in line for word in WORDS)
    ]


def test_only_its_homes_spell_the_index():
    assert not spelled(ROOT)


def test_a_client_that_writes_one_is_found(tmp_path):
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "checkpoint.py").write_text('open(path / "model.safetensors.index.json", "w")\n')
    (tmp_path / "server" / "checkpoint").mkdir(parents=True)
    (tmp_path / "server" / "checkpoint" / "index.cc").write_text('json["weight_map"]\n')
    assert spelled(tmp_path) == ['client/checkpoint.py:1: open(path / "model.safetensors.index.json", "w")']
