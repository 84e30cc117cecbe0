"""The pack kernel beside a matrix product, each on a stream of its own: how much longer each takes than alone.

No optimizer, no copies and no daemon are there, so nothing else slows either down. The product is torch's, of cuBLAS.
libpack_alone.so launches the kernel, on a bucket of the default size.
"""

import ctypes
import dataclasses
import itertools
import statistics
from collections.abc import Callable

import torch
from tests.device import machine, rows
from tests.device.probe import MATRIX

ELEMENTS = 1 << 16 if machine.DRY_RUN else 32 << 20  # a bucket of 64 MiB
ALONE = 3 if machine.DRY_RUN else 20  # launches
BESIDE_MILLISECONDS = 1 if machine.DRY_RUN else 100  # that each would take alone
MOST_LAUNCHES = 400  # of a stream: the driver's queue holds about a thousand, and then the host waits
SLOTS = {"bfloat16": 2, "float32": 4}  # and the bytes of an element


@dataclasses.dataclass
class Launches:
    """Milliseconds between the ends of launches that follow each other, and when each ended, from a common origin."""

    alone: list[float]
    ends: list[float]  # beside the other one; the first is where the first launch began

    def beside(self, other: "Launches") -> list[float]:
        """How long those took during which the other one was there all the time."""
        spans = itertools.pairwise(self.ends)
        return [end - begin for begin, end in spans if other.ends[0] <= begin and end <= other.ends[-1]]


def line(slot: str, pack: Launches, product: Launches) -> str:
    return f"bfloat16 to {slot:8} {_times('pack', pack, product)}; {_times('product', product, pack)}"


def _times(name: str, launches: Launches, other: Launches) -> str:
    alone, beside = statistics.median(launches.alone), launches.beside(other)
    found = f"{statistics.median(beside) / alone:.2f} times that" if beside else "never wholly"
    return f"{name} {alone:.3f} ms alone, {found} beside the other ({len(beside)} of {len(launches.ends) - 1})"


def in_turn(first: int, second: int) -> list[bool]:
    """In which order so many launches of two streams are issued, so that both end at about the same time; True: of the
    first."""
    places = [((i + 0.5) / first, True) for i in range(first)] + [((i + 0.5) / second, False) for i in range(second)]
    return [is_first for _, is_first in sorted(places, key=lambda place: (place[0], not place[1]))]


class PackKernel:
    """libpack_alone.so's."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(machine.PACK_ALONE))
        self._library.pack_open.restype = self._library.pack_launch.restype = ctypes.c_char_p
        _check(self._library.pack_open(ctypes.c_uint64(ELEMENTS)))

    def launch(self, width: int) -> None:
        """On torch's current stream."""
        stream = 0 if machine.DRY_RUN else torch.cuda.current_stream().cuda_stream
        _check(self._library.pack_launch(ctypes.c_uint(width), ctypes.c_void_p(stream)))

    def close(self) -> None:
        machine.synchronize()
        self._library.pack_close()


def _check(message: bytes | None) -> None:
    if message is not None:
        raise RuntimeError(message.decode())


def pack_beside_a_product() -> list[str]:
    """Lines of a table, one per dtype of the slot."""
    machine.use_gpu()
    matrix = torch.randn(MATRIX, MATRIX, device=machine.DEVICE).to(torch.bfloat16)
    result = torch.empty_like(matrix)
    kernel = PackKernel()
    lines = []
    for slot, width in SLOTS.items():
        launches = _measure(lambda width=width: kernel.launch(width), lambda: torch.mm(matrix, matrix, out=result))
        lines.append(line(slot, *launches))
    kernel.close()
    print("\n".join(lines))
    return lines


def _measure(*launch: Callable[[], object]) -> tuple[Launches, Launches]:
    streams = [machine.side_stream() for _ in launch]
    alone = [_alone(stream, one) for stream, one in zip(streams, launch, strict=True)]
    counts = [_count(statistics.median(times)) for times in alone]
    origin = rows.mark()
    machine.synchronize()
    marks: tuple[list[object], list[object]] = ([], [])
    for stream, own in zip(streams, marks, strict=True):
        with stream:
            own.append(rows.mark())
    for is_first in in_turn(*counts):
        which = 0 if is_first else 1
        with streams[which]:
            launch[which]()
            marks[which].append(rows.mark())
    machine.synchronize()
    ends = [[rows.between(origin, mark) for mark in own] for own in marks]
    return Launches(alone[0], ends[0]), Launches(alone[1], ends[1])


def _count(milliseconds: float) -> int:
    return max(1, min(MOST_LAUNCHES, round(BESIDE_MILLISECONDS / milliseconds)))


def _alone(stream: object, launch: Callable[[], object]) -> list[float]:
    with stream:
        launch()  # what is loaded and chosen at the first one
        marks = [rows.mark()]
        for _ in range(ALONE):
            launch()
            marks.append(rows.mark())
    machine.synchronize()
    return [rows.between(begin, end) for begin, end in itertools.pairwise(marks)]
