"""Directory trees that look like another machine's /sys and /proc, as far as hwloc reads them (HWLOC_FSROOT).

The machines with Superchips are made after the published descriptions of their NUMA nodes; nobody has published a dump.
"""

import dataclasses
import pathlib


@dataclasses.dataclass
class Node:
    cpus: range = range(0)  # none: memory of a GPU
    gib: int = 0


@dataclasses.dataclass
class Gpu:
    address: str  # PCI
    node: int  # with the CPUs it belongs to
    memory_node: int | None = None  # where its own memory is a NUMA node


@dataclasses.dataclass
class Machine:
    nodes: dict[int, Node]
    gpus: list[Gpu] = dataclasses.field(default_factory=list)
    threads_per_core: int = 1
    l3_kib: int = 32768


def _cpumap(cpus, count):
    mask = sum(1 << cpu for cpu in cpus)
    words = [(mask >> shift) & 0xFFFFFFFF for shift in range(0, max(count, 1), 32)]
    return ",".join(f"{word:08x}" for word in reversed(words)) + "\n"


def _write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def write(machine: Machine, root: pathlib.Path) -> None:
    cpus = [cpu for node in machine.nodes.values() for cpu in node.cpus]
    count = max(cpus) + 1
    _write(root, "sys/devices/system/cpu/online", f"0-{count - 1}\n")
    _write(root, "sys/devices/system/cpu/possible", f"0-{count - 1}\n")
    _write(root, "proc/cpuinfo", "".join(f"processor\t: {cpu}\n\n" for cpu in cpus))
    _write(root, "proc/meminfo", f"MemTotal: {sum(n.gib for n in machine.nodes.values()) << 20} kB\n")
    _write(root, "sys/devices/system/node/online", ",".join(map(str, machine.nodes)) + "\n")
    for package, (number, node) in enumerate(machine.nodes.items()):
        base = f"sys/devices/system/node/node{number}"
        _write(root, f"{base}/cpumap", _cpumap(node.cpus, count))
        _write(root, f"{base}/meminfo", f"Node {number} MemTotal: {node.gib << 20} kB\n")
        distances = (10 if other == number else 40 for other in machine.nodes)
        _write(root, f"{base}/distance", " ".join(map(str, distances)) + "\n")
        for position, cpu in enumerate(node.cpus):
            core = position // machine.threads_per_core
            first = node.cpus.start + core * machine.threads_per_core
            siblings = range(first, first + machine.threads_per_core)
            topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
            _write(root, f"{topology}/physical_package_id", f"{package}\n")
            _write(root, f"{topology}/core_id", f"{core}\n")
            _write(root, f"{topology}/thread_siblings", _cpumap(siblings, count))
            _write(root, f"{topology}/core_siblings", _cpumap(node.cpus, count))
            cache = f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
            _write(root, f"{cache}/level", "3\n")
            _write(root, f"{cache}/type", "Unified\n")
            _write(root, f"{cache}/size", f"{machine.l3_kib}K\n")
            _write(root, f"{cache}/shared_cpu_map", _cpumap(node.cpus, count))
    for gpu in machine.gpus:
        _write_gpu(machine, gpu, root, count)


def _write_gpu(machine, gpu, root, count):
    base = f"sys/bus/pci/devices/{gpu.address}"
    _write(root, f"{base}/class", "0x030200\n")
    _write(root, f"{base}/vendor", "0x10de\n")
    _write(root, f"{base}/device", "0x2342\n")
    _write(root, f"{base}/numa_node", f"{gpu.node}\n")
    _write(root, f"{base}/local_cpus", _cpumap(machine.nodes[gpu.node].cpus, count))
    config = bytearray(256)
    config[0:4] = bytes([0xDE, 0x10, 0x42, 0x23])
    config[0x0A:0x0C] = bytes([0x02, 0x03])
    (root / base / "config").write_bytes(config)
    if gpu.memory_node is not None:
        information = f"Node: {gpu.memory_node}\nNUMA initialization status: online\n"
        _write(root, f"proc/driver/nvidia/gpus/{gpu.address}/numa_status", information)


def _superchips(chips, gpus_per_chip, cores, gib, first_gpu_node, gpu_node_stride):
    """Nodes with CPUs first, then eight nodes per GPU, of which the first one holds its memory."""
    machine = Machine({chip: Node(range(chip * cores, (chip + 1) * cores), gib) for chip in range(chips)})
    for index in range(chips * gpus_per_chip):
        first = first_gpu_node + index * gpu_node_stride
        for node in range(first, first + gpu_node_stride):
            machine.nodes[node] = Node(gib=96 if node == first else 0)
        chip = index // gpus_per_chip
        machine.gpus.append(Gpu(f"{8 * index + 1:04x}:01:00.0", chip, first))
    return machine


MACHINES = {
    "gh200": _superchips(1, 1, 72, 480, 1, 8),
    "quad-gh200": _superchips(4, 1, 72, 120, 4, 8),
    "gb200": _superchips(2, 2, 72, 480, 2, 8),
    "dual-x86-with-gpus": Machine(
        {0: Node(range(0, 64), 256), 1: Node(range(64, 128), 256)},
        [Gpu("0000:17:00.0", 0), Gpu("0000:65:00.0", 0), Gpu("0000:ca:00.0", 1)],
        threads_per_core=2,
    ),
    "laptop": Machine({0: Node(range(0, 8), 16)}, threads_per_core=2),
}
