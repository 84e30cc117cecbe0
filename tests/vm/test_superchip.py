"""The arm64 daemon on a virtual machine shaped like a GH200: node 0 has the cores, node 1 is memory without cores, as
HBM is. Emulated in software; the kernel and its memory management are real."""

import json
import os
import pathlib
import pydoc_data.topics
import re
import shutil
import subprocess

import pytest

BUILD = pathlib.Path(__file__).parents[2] / "build"
ARM64, SYSROOT, KERNEL = BUILD / "arm64", BUILD / "arm64-sysroot", BUILD / "arm64-vm"
PROGRAMS = [ARM64 / "server/superoffloadd", ARM64 / "client/superoffloadctl", ARM64 / "client/train_bigram"]
LIBRARY_PATHS = [ARM64 / "client", SYSROOT / "usr/lib/aarch64-linux-gnu", SYSROOT / "lib/aarch64-linux-gnu"]
TEXT = pathlib.Path(pydoc_data.topics.__file__).read_bytes()[:200_000]

pytestmark = pytest.mark.skipif(not PROGRAMS[0].exists(), reason="tests/arm64.sh builds what runs here")


def needed(binary):
    dynamic = subprocess.run(["aarch64-linux-gnu-readelf", "-d", binary], check=True, capture_output=True, text=True)
    return re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic.stdout)


def libraries(programs):
    found, waiting = {}, [name for program in programs for name in needed(program)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = next(path / name for path in LIBRARY_PATHS if (path / name).exists())
        waiting += needed(found[name])
    return found


def make_initramfs(root):
    for directory in ("bin", "lib", "proc", "sys", "dev", "etc"):
        (root / directory).mkdir(parents=True)
    shutil.copy(KERNEL / "bin/busybox", root / "bin")
    for program in PROGRAMS:
        shutil.copy(program, root / "bin")
    for name, path in libraries(PROGRAMS).items():
        shutil.copy(path, root / "lib" / name)
    shutil.copy(SYSROOT / "lib/ld-linux-aarch64.so.1", root / "lib")
    (root / "text").write_bytes(TEXT)
    shutil.copy(pathlib.Path(__file__).with_name("init.sh"), root / "init")
    (root / "init").chmod(0o755)
    names = "\n".join(str(path.relative_to(root)) for path in root.rglob("*"))
    image = root.with_suffix(".cpio")
    with image.open("wb") as out:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=root, input=names.encode(), stdout=out, check=True)
    return image


def boot(image):
    machine = ["qemu-system-aarch64", "-M", "virt,gic-version=3", "-accel", "tcg,thread=multi", "-nographic"]
    machine += ["-cpu", "max,sve-max-vq=1,pauth-impdef=on", "-smp", "4", "-m", "3G", "-no-reboot", "-net", "none"]
    for node, cpus in ((0, ",cpus=0-3"), (1, "")):
        machine += [
            "-object",
            f"memory-backend-ram,id=m{node},size=1536M",
            "-numa",
            f"node,nodeid={node},memdev=m{node}{cpus}",
        ]
    machine += ["-numa", "dist,src=0,dst=1,val=40", "-numa", "dist,src=1,dst=0,val=40"]
    (kernel,) = (KERNEL / "boot").glob("vmlinuz-*")
    machine += ["-kernel", kernel, "-initrd", image, "-append", "console=ttyAMA0 quiet panic=-1"]
    return subprocess.run(machine, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=420).stdout


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the machine printed, by section."""
    if not (KERNEL / ".complete").exists():
        shutil.rmtree(KERNEL, ignore_errors=True)
        packages = "--include=linux-image-arm64,busybox-static"
        subprocess.run(
            ["mmdebstrap", "--quiet", "--arch=arm64", "--variant=extract", packages, "bookworm", KERNEL], check=True
        )
        (KERNEL / ".complete").touch()
    text = boot(make_initramfs(tmp_path_factory.mktemp("vm") / "root")).replace("\r", "")
    assert "== end" in text, text[-4000:]
    parts = re.split(r"^== (\w+)\n", text, flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_machine_is_shaped_like_a_superchip(seen):
    assert seen["nodes"].split("\n")[:2] == ["node0 cpus 0-3", "node1 cpus "]
    assert "SVE2FIXED128" in seen["info"]


def test_the_daemon_takes_node_0_and_leaves_trainers_a_core(seen):
    topology = json.loads(seen["topology"])
    assert [s["memory_node"] for s in topology["superchips"]] == [0]
    assert topology["nodes_without_cpus"] == [1]
    assert topology["trainer_cpus"] == [0]
    pinned = sorted(int(cpu) for cpu in re.findall(r"Cpus_allowed_list:\s*(\d+)\n", seen["workers"]))
    assert pinned == topology["optimizer_cpus"] == [1, 2, 3]


def test_not_one_page_lies_in_memory_without_cores(seen):
    lines = seen["pages"].strip().splitlines()
    assert {re.search(r"memfd:superoffload-(\w+)", line)[1] for line in lines} >= {"state", "gradients", "parameters"}
    for line in lines:
        assert " N0=" in line and " N1=" not in line, line
    assert re.fullmatch(
        r'superoffload_memory_node_bytes\{node="0"\} \S+\n', seen["metrics"].split("# ")[-1].split("gauge\n")[-1]
    )


def test_it_trains_the_same_as_x86(seen, daemon):
    path = pathlib.Path(daemon.directory.name) / "text"
    path.write_bytes(TEXT)
    trainer = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client/train_bigram"
    here = subprocess.run(
        [trainer, f"--text={path}", "--steps=60", f"--endpoint={daemon.endpoint}"], capture_output=True, text=True
    )
    assert here.returncode == 0
    assert seen["train"] == here.stdout


def test_it_stops_as_it_should(seen):
    assert "exit 0" in seen["log"]
    assert "settled" in seen["log"]
