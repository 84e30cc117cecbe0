"""Steps torch.optim.AdamW on another process's arrays: FD ELEMENTS THREADS and the byte offsets of p, m, v, gradient.

Reads "fused" or "foreach" lines, answers each with the seconds of one step.
"""

import mmap
import sys
import time

import torch

fd, elements, threads, *offsets = map(int, sys.argv[1:])
torch.set_num_threads(threads)
memory = mmap.mmap(fd, 0)
p, m, v, gradient = (torch.frombuffer(memory, dtype=torch.float32, count=elements, offset=o) for o in offsets)

# Parameters of a transformer's size each, so that foreach has lists to work on.
PARAMETER_ELEMENTS = 1 << 22


def make(**how) -> torch.optim.AdamW:
    parameters = []
    for first in range(0, elements, PARAMETER_ELEMENTS):
        part = slice(first, min(first + PARAMETER_ELEMENTS, elements))
        parameter = torch.nn.Parameter(p[part])
        parameter.grad = gradient[part]
        parameters.append((parameter, part))
    optimizer = torch.optim.AdamW([parameter for parameter, _ in parameters], lr=1e-5, **how)
    for parameter, part in parameters:
        optimizer.state[parameter] = {"step": torch.tensor(100.0), "exp_avg": m[part], "exp_avg_sq": v[part]}
    return optimizer


optimizers = {"fused": make(fused=True), "foreach": make(foreach=True)}
for line in sys.stdin:
    begin = time.perf_counter()
    optimizers[line.strip()].step()
    print(time.perf_counter() - begin, flush=True)
