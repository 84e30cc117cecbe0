"""What the driver, nvidia-smi and the kernel say about the machine: what can be shared, and who else is there.

Asks the driver itself, so that it works without PyTorch.
"""

import ctypes
import pathlib
import shutil
import subprocess

# enum CUdevice_attribute.
ATTRIBUTES = {
    "pageable memory access": 88,
    "... through the host's page tables": 100,
    "host NUMA id": 134,
    "copy engines": 40,
    "concurrent kernels": 31,
    "concurrent managed access": 89,
    "can map host memory": 19,
    "registered host pointers are the GPU's": 91,
    "host memory can be registered": 99,
    "IPC events": 125,
    "virtual memory management": 102,
    "... exported as a descriptor": 103,
    "compute mode": 20,
    "multiprocessors": 16,
    "compute capability, major": 75,
    "compute capability, minor": 76,
    "PCI bus": 33,
}
LEAST_DRIVER = 13000  # CUDA's, that of driver 580: kernels here were compiled with CUDA 13
# Of what `nvidia-smi -q` prints, with the headings above a line.
SMI_LINES = (
    "Driver Version",
    "CUDA Version",
    "Product Name",
    "Addressing Mode",
    "MIG Mode/Current",
    "Compute Mode",
    "Persistence Mode",
    "C2C Mode",
    "Virtualization Mode",
    "PCIe Generation/Current",
    "Link Width/Current",
    "FB Memory Usage/Total",
    "FB Memory Usage/Used",
)


class Driver:
    """The few calls that smoke needs. Raises OSError where there is no driver."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        self._device = self._integer("cuDeviceGet", 0)

    def call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} answers CUDA error {result}")

    def _integer(self, name: str, *arguments: object) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def version(self) -> int:
        return self._integer("cuDriverGetVersion")

    def name(self) -> str:
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode()

    def count(self) -> int:
        return self._integer("cuDeviceGetCount")

    def attribute(self, number: int) -> int:
        return self._integer("cuDeviceGetAttribute", number, self._device)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes; needs the context that it makes."""
        context, free, total = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value


def _answer(ask: object, *arguments: object) -> object:
    """One question that this driver refuses is no reason to ask no more."""
    try:
        return ask(*arguments)
    except (RuntimeError, AttributeError) as error:
        return f"? {error}"


def of_the_driver() -> dict[str, object]:
    driver = Driver()
    facts = {"GPU": driver.name(), "GPUs visible": driver.count(), "CUDA of the driver": driver.version()}
    facts |= {f"{name} ({number})": _answer(driver.attribute, number) for name, number in ATTRIBUTES.items()}
    facts["free and total bytes"] = _answer(driver.memory)
    if driver.version() < LEAST_DRIVER:
        facts["TOO OLD"] = (
            f"the driver speaks CUDA {driver.version() / 1000:.1f}; the kernels here need 13.0, which is driver 580: "
            "they will not load"
        )
    return facts


def _text(path: str) -> str:
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError as error:
        return f"? {error.strerror}"


def _said_by(*argv: str) -> str:
    if shutil.which(argv[0]) is None:
        return f"? no {argv[0]}"
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=20).stdout
    except subprocess.TimeoutExpired:
        return "? no answer in 20 s"


def of_smi(text: str) -> dict[str, str]:
    """The values of SMI_LINES, of the first GPU. Headings are known by their indentation."""
    found: dict[str, str] = {}
    headings: list[tuple[int, str]] = []
    for line in text.splitlines():
        name, colon, value = (word.strip() for word in line.partition(" : "))
        depth = len(line) - len(line.lstrip())
        headings = [heading for heading in headings if heading[0] < depth]
        if not colon:
            headings.append((depth, name))
            continue
        for wanted in SMI_LINES:
            if wanted == name or (headings and wanted == f"{headings[-1][1]}/{name}"):
                found.setdefault(wanted, value)
    return found


def of_the_machine() -> dict[str, object]:
    smi = _said_by("nvidia-smi", "-q")
    print(smi)  # all of it, for the log
    print(_said_by("nvidia-smi", "topo", "-m"), _said_by("lscpu"), _text("/proc/meminfo"), sep="\n")
    facts: dict[str, object] = {f"nvidia-smi: {name}": value for name, value in of_smi(smi).items()}
    memory = dict(line.split(":", 1) for line in _text("/proc/meminfo").splitlines())
    processes = pathlib.Path("/proc").glob("[0-9]*/comm")
    mps = [path.parent.name for path in processes if "nvidia-cuda-mps" in _text(str(path))]
    facts |= {
        "MPS": f"process {', '.join(mps)}" if mps else "not running",
        "kernel": _text("/proc/sys/kernel/osrelease"),
        "kernel module": _text("/proc/driver/nvidia/version").split("\n")[0],
        "MemTotal": memory["MemTotal"].strip(),
        "huge pages": f"{memory['HugePages_Total'].strip()} of {memory['Hugepagesize'].strip()}",
        "transparent huge pages": _text("/sys/kernel/mm/transparent_hugepage/enabled"),
        "memory nodes": _text("/sys/devices/system/node/has_memory"),
        "locked memory": next((x for x in _text("/proc/self/limits").splitlines() if x.startswith("Max locked")), "?"),
        "memory of the cgroup": _text("/sys/fs/cgroup/memory.max"),
        "glibc": _said_by("getconf", "GNU_LIBC_VERSION").strip(),
    }
    return facts
