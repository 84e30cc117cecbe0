"""The tables of server/engine/README.md are what its example comes to: the same steps, computed here.

Run as a program it prints them.
"""

import math
import pathlib

README = pathlib.Path(__file__).resolve().parents[2] / "server" / "engine" / "README.md"

BETA, MAX_NORM = 0.5, 4.0
W, E = 0, 1  # parameters, in the order of their creation
ELEMENTS = [("E[0]", E), ("W[0]", W), ("W[1]", W)]  # as they lie in memory: the last created comes first
CHUNKS = [slice(0, 1), slice(1, 3)]  # a bucket each
NEVER = "-"


def slot_of(t: int) -> int:
    return (t - 1) % 2


def updated(p: float, m: float, gradient: float, lr: float, scale: float) -> tuple[float, float]:
    """SGD with momentum, the algorithm of the example."""
    m = BETA * m + scale * gradient
    return p - lr * m, m


class Optimizer:
    def __init__(self, p: list[float]):
        self.p, self.m, self.theta = list(p), [0.0] * 3, list(p)
        self.gradients = [[NEVER] * 3, [NEVER] * 3]
        self.committed, self.absorbed, self.undo = 0, [0, 0], "free"
        self.lr, self.scale, self.steps = [NEVER, NEVER], [NEVER, NEVER], [[0, 0], [0, 0]]

    def arrive(self, chunk: int, gradient: list[float]) -> None:
        self.gradients[slot_of(self.committed + 1)][CHUNKS[chunk]] = gradient

    def absorb(self, chunk: int, first: int = 0) -> None:
        """What the chunk lacks, a step at a time, from element `first` of it on."""
        while self.absorbed[chunk] < self.committed:
            t = self.absorbed[chunk] + 1
            for i in range(CHUNKS[chunk].start + first, CHUNKS[chunk].stop):
                if self.steps[t % 2][ELEMENTS[i][1]] & 1:
                    self.p[i], self.m[i] = self.next(i, t, self.lr[t % 2], self.scale[t % 2])
            self.absorbed[chunk], first = t, 0

    def next(self, i: int, t: int, lr: float, scale: float) -> tuple[float, float]:
        return updated(self.p[i], self.m[i], self.gradients[slot_of(t)][i], lr, scale)

    def publish(self, chunk: int, t: int, lr: float, scale: float, absent=()) -> None:
        for i in range(CHUNKS[chunk].start, CHUNKS[chunk].stop):
            if ELEMENTS[i][1] not in absent:
                self.theta[i] = self.next(i, t, lr, scale)[0]

    def publish_masters(self, chunk: int) -> None:
        self.theta[CHUNKS[chunk]] = self.p[CHUNKS[chunk]]

    def speculate(self, chunk: int, lr: float, absent=()) -> None:
        self.absorb(chunk)
        self.publish(chunk, self.committed + 1, lr, 1.0, absent)

    def commit(self, lr: float, scale: float, absent=()) -> None:
        t = self.committed + 1
        self.lr[t % 2], self.scale[t % 2] = lr, scale
        for parameter in (W, E):
            counted = self.steps[(t - 1) % 2][parameter] & ~1
            self.steps[t % 2][parameter] = counted if parameter in absent else counted + 3
        self.committed = t

    def norm(self, absent=()) -> float:
        gradient = self.gradients[slot_of(self.committed + 1)]
        return math.sqrt(sum(gradient[i] ** 2 for i in range(3) if ELEMENTS[i][1] not in absent))

    def show(self) -> str:
        arrays = [
            ("", [name for name, _ in ELEMENTS]),
            ("state p", self.p),
            ("state m", self.m),
            ("gradient slot 0", self.gradients[0]),
            ("gradient slot 1", self.gradients[1]),
            ("published", self.theta),
        ]
        lines = [f"{name:<18}" + "".join(f"{text(value):>8}" for value in values) for name, values in arrays]
        lines += ["", f"record            committed {self.committed}"]
        for parity, steps in enumerate(("even steps", "odd steps")):
            lr, scale = self.lr[parity], self.scale[parity]
            scalars = NEVER if lr == NEVER else f"{text(lr)}, {text(BETA)}"
            counts = f"steps E {self.steps[parity][E]}, W {self.steps[parity][W]}"
            lines.append(f"  of {steps:<13}scalars {scalars:<12}scale {text(scale):<6}{counts}")
        lines.append(f"  absorbed        chunk 0 (E) {self.absorbed[0]}, chunk 1 (W) {self.absorbed[1]}")
        return "\n".join([*lines, f"  undo slot       {self.undo}"])


def text(value) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else value


def play() -> dict[str, str]:
    """The moments of the example, in order, as they look."""
    shown = {}
    x = Optimizer([1.0, 4.0, -2.0])
    shown["pushed"] = x.show()

    x.arrive(0, [2.0]), x.speculate(0, 0.5)
    x.arrive(1, [1.0, 2.0]), x.speculate(1, 0.5)
    shown["attempt 1 speculated"] = x.show()
    assert x.norm() == 3 <= MAX_NORM
    x.commit(0.5, 1.0)
    shown["attempt 1 committed"] = x.show()

    x.speculate(0, 0.25, absent=[E])
    x.arrive(1, [0.0, 8.0]), x.speculate(1, 0.25)
    shown["attempt 2 speculated"] = x.show()
    coefficient = MAX_NORM / x.norm(absent=[E])
    assert coefficient == 0.5
    x.commit(0.25, coefficient, absent=[E])
    x.publish(1, 2, 0.25, coefficient)
    shown["attempt 2 clipped"] = x.show()

    x.arrive(0, [4.0]), x.speculate(0, 0.25)
    x.arrive(1, [math.nan, 1.0])
    shown["attempt 3 speculated"] = x.show()
    assert math.isnan(x.norm())
    x.publish_masters(0)
    shown["attempt 3 skipped"] = x.show()

    x.arrive(0, [2.0]), x.speculate(0, 0.25)
    x.arrive(1, [2.0, 0.0])
    before = x.p[1:], x.m[1:]
    x.p[1], x.m[1] = x.next(1, 2, 0.25, 0.5)
    x.p[2] = x.next(2, 2, 0.25, 0.5)[0]
    old_p, old_m = (", ".join(map(text, old)) for old in before)
    x.undo = f"step 2, chunk 1; torn: element 1; old p: {old_p}; old m: {old_m}"
    shown["attempt 4 killed"] = x.show()

    x.p[2], x.m[2] = before[0][1], before[1][1]  # the torn element
    x.absorb(1, first=1)
    x.undo = "free"
    shown["recovered"] = x.show()

    whole = Optimizer([1.0, 4.0, -2.0])  # without speculation, in place, undisturbed
    for gradient, lr, scale in [([2.0, 1.0, 2.0], 0.5, 1.0), ([None, 0.0, 8.0], 0.25, 0.5)]:
        for i in range(3):
            if gradient[i] is not None:
                whole.p[i], whole.m[i] = updated(whole.p[i], whole.m[i], gradient[i], lr, scale)
    assert (x.p, x.m) == (whole.p, whole.m)
    return shown


def test_every_table_of_the_example_is_in_the_readme():
    readme = README.read_text()
    missing = [f"{name}:\n{table}" for name, table in play().items() if table not in readme]
    assert not missing, "server/engine/README.md lacks\n" + "\n\n".join(missing)


if __name__ == "__main__":
    for name, table in play().items():
        print(f"### {name}\n\n```text\n{table}\n```\n")
