"""Files of torch.save that are damaged or hostile: nothing they name is called, and each is an Error."""

import collections
import math
import os
import pathlib
import pickle
import random
import subprocess
import sys
import zipfile
from typing import Any

import grpc
import pytest
import torch
from tests.support import deepspeed_checkpoints as written

from superoffload._core.error import Error
from superoffload.import_checkpoint import torch_file
from superoffload.import_checkpoint.command import import_checkpoint
from superoffload.import_checkpoint.inert_pickle import Inert
from superoffload.import_checkpoint.torch_file import StoredTensor

SEED = 20261128


def saved(directory: pathlib.Path, value: object) -> str:
    path = directory / "file.pt"
    torch.save(value, path)
    return str(path)


def numbers(tensor: StoredTensor) -> torch.Tensor:
    data = b"".join(tensor.floats(0, tensor.elements))
    return torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(tensor.shape)


def test_containers_and_tensors_are_what_was_saved(tmp_path):
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    value = {
        "view": whole[1:3],
        "parameter": torch.nn.Parameter(whole),
        "bf16": whole.bfloat16(),
        "count": torch.tensor(41),
        "size": whole.shape,
        "list": [1, 2.5, None, "text", (True,), {3}, b"bytes"],
        "ordered": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, {"a": [1]}),
        "transposed": whole.T,
        "empty": torch.zeros(0, 3),
        "dtype": torch.float16,
    }
    loaded = torch_file.load(saved(tmp_path, value))
    assert torch.equal(numbers(loaded["view"]), whole[1:3])
    assert torch.equal(numbers(loaded["parameter"]), whole) and torch.equal(numbers(loaded["bf16"]), whole)
    assert loaded["count"].number() == 41 and loaded["view"].number() is None
    assert loaded["size"] == (4, 6) and loaded["list"] == value["list"]
    assert loaded["ordered"] == value["ordered"] and loaded["default"] == {"a": [1]}
    assert not loaded["transposed"].contiguous and loaded["empty"].contiguous
    assert loaded["dtype"] == "float16"


def test_numbers_come_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(torch_file, "_READ_BYTES", 16)
    loaded = torch_file.load(saved(tmp_path, torch.arange(11, dtype=torch.float32)))
    assert [len(piece) for piece in loaded.floats(2, 9)] == [16, 16, 4]


class Hostile:
    """Its pickle calls a function."""

    def __init__(self, function, *arguments: object) -> None:
        self.called = function, arguments

    def __reduce__(self):
        return self.called


@pytest.mark.parametrize("where", ["value", "state"])
def test_what_a_pickle_names_is_not_called(tmp_path, where):
    mark = tmp_path / "called"
    hostile = Hostile(os.system, f"touch {mark}")
    values = {
        "value": hostile,
        "state": {"state": Hostile(eval, f"open({str(mark)!r}, 'w')"), 3: [torch.ones(3), hostile]},
    }
    path = saved(tmp_path, values[where])
    loaded = torch_file.load(path)
    assert isinstance(loaded, Inert) or where != "value"
    assert not mark.exists()
    torch.load(path, weights_only=False)  # that it would be
    assert mark.exists()


def test_a_hostile_checkpoint_is_refused(tmp_path):
    written.write_stage_1(tmp_path / "in", written.make([{"w": (5,)}]), 1)
    mark = tmp_path / "called"
    torch.save(Hostile(os.system, f"touch {mark}"), tmp_path / "in" / "mp_rank_00_model_states.pt")
    with pytest.raises(Error, match="has nothing as 'param_shapes'") as raised:
        import_checkpoint(tmp_path / "in", tmp_path / "out")
    assert raised.value.code == grpc.StatusCode.DATA_LOSS and not mark.exists()


def rewritten(path: str, change) -> None:
    """``change``: of the bytes of the pickle."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, change(data) if name.endswith("data.pkl") else data)


def test_a_pickle_cannot_take_memory_without_end(tmp_path):
    path = saved(tmp_path, {})
    rewritten(path, lambda _: pickle.PROTO + b"\2}r\xff\xff\xff\xff.")
    with pytest.raises(Error, match="does not say what tensors it has"):
        torch_file.load(path)


def test_a_tensor_that_reaches_beyond_its_storage(tmp_path):
    path = saved(tmp_path, torch.ones(5, 7))
    rewritten(path, lambda data: data.replace(b"K\5K\7\x86", b"K\6K\7\x86"))
    with pytest.raises(Error, match=r"a tensor of shape \[6, 7\] does not lie in its 140 bytes"):
        torch_file.load(path)


def test_compressed_and_old_files_are_refused(tmp_path):
    path = saved(tmp_path, torch.ones(3))
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(Error, match="is compressed"):
        torch_file.load(path)
    torch.save(torch.ones(3), path, _use_new_zipfile_serialization=False)
    with pytest.raises(Error, match=r"no ZIP archive, as torch.save writes since PyTorch 1.6"):
        torch_file.load(path)


def test_files_that_cannot_be_opened(tmp_path):
    with pytest.raises(Error, match="No such file") as raised:
        torch_file.load(str(tmp_path / "gone.pt"))
    assert raised.value.code == grpc.StatusCode.NOT_FOUND
    with pytest.raises(Error, match="Is a directory"):
        torch_file.load(str(tmp_path))


def test_every_truncation_is_an_error(tmp_path):
    source = tmp_path / "in"
    written.write_stage_3(source, written.make([{"a": (9, 3), "b": (5,)}]), 2)
    for path in sorted(source.glob("*rank_0_*")):
        data = path.read_bytes()
        for length in {*range(0, len(data), 97), len(data) - 1, len(data) - 22}:
            path.write_bytes(data[:length])
            with pytest.raises(Error):
                import_checkpoint(source, tmp_path / "out")
        path.write_bytes(data)
    import_checkpoint(source, tmp_path / "out")


def is_refused(source: pathlib.Path, output: pathlib.Path) -> bool:
    """Whether it is no checkpoint any more; else it is imported."""
    try:
        import_checkpoint(source, output)
    except Error:
        return True
    return False


def test_flipped_bytes_are_an_error_or_other_numbers(tmp_path):
    random_of = random.Random(SEED)
    source = tmp_path / "in"
    written.write_stage_1(source, written.make([{"a": (9, 3), "b": (5,)}, {"c": (2,)}]), 2)
    paths = sorted(source.iterdir())
    refusals = 0
    for attempt in range(400):
        path = random_of.choice(paths)
        data = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as archive:
            info = next(info for info in archive.infolist() if info.filename.endswith("data.pkl"))
        within = (info.header_offset, info.header_offset + info.file_size) if attempt % 2 else (0, len(data))
        was = bytes(data)
        for _ in range(random_of.randint(1, 3)):
            data[random_of.randrange(*within)] = random_of.randrange(256)
        path.write_bytes(data)
        refusals += is_refused(source, tmp_path / f"out-{attempt}")
        path.write_bytes(was)
    assert 50 < refusals < 400, f"seed {SEED}"


ODD = (None, True, -1, 0, 1 << 70, 2.5, math.nan, "text", "a", b"", (), (3,), [], [[]], {}, {"a": 1}, torch.ones(2))


def change_somewhere(random_of: random.Random, value: Any) -> None:
    """Replaces or removes a member of a member of ``value``."""
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = random_of.choice(keys)
        below = value[key]
        if not (isinstance(below, dict | list) and below) or random_of.random() < 0.1:
            break
        value = below
    if random_of.random() < 0.2:
        del value[key]
    else:
        value[key] = random_of.choice(ODD)


@pytest.mark.parametrize("kind", ["stage 1", "stage 3", "universal", "universal of stage 3"])
def test_members_of_any_kind_are_an_error_or_do_not_matter(tmp_path, kind):
    random_of = random.Random(SEED)
    source = tmp_path / "in"
    made = written.make([{"a": (9, 3), "b": (5,)}, {"c": (2,)}])
    {
        "stage 1": lambda: written.write_stage_1(source, made, 2),
        "stage 3": lambda: written.write_stage_3(source, made, 2),
        "universal": lambda: written.write_universal(source, made),
        "universal of stage 3": lambda: written.write_universal(source, made, of_stage_3=True),
    }[kind]()
    paths = [path for path in sorted(source.rglob("*.pt")) if isinstance(written.load(path), dict)]
    refusals = 0
    for attempt in range(150):
        path = random_of.choice(paths)
        was = path.read_bytes()
        changed = written.load(path)
        change_somewhere(random_of, changed)
        written.save(path, changed)
        refusals += is_refused(source, tmp_path / f"out-{attempt}")
        path.write_bytes(was)
    assert 20 < refusals < 150, f"seed {SEED}"


def test_memory_does_not_grow_with_the_tensors(tmp_path):
    written.write_stage_3(tmp_path / "in", written.make([{"a": (4096, 4096)}]), 2)
    script = (
        "import resource, sys\nfrom superoffload.import_checkpoint.command import import_checkpoint\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nbefore = peak()\n"
        "import_checkpoint(*sys.argv[1:])\nprint(peak() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "in", tmp_path / "out"], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 24 << 10  # KiB; the checkpoint has 192 MiB
