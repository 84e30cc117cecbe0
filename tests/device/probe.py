"""How the movers and a trainer's kernels get along: copies beside kernels, and kernels beside copies."""

import os
import shutil
import subprocess
import threading
import time

import torch
from tests.device import machine, models, rows
from tests.device.bench import MPS

import superoffload.torch
from superoffload.torch import GpuOptions, GpuReport

ROUNDS = 8
PROBE_ELEMENTS = 4096 if machine.DRY_RUN else 32 << 20
PARAMETERS = min(machine.BILLION, 200_000_000)
ATTACHED_PARAMETERS = machine.BILLION
CONTEXT_BYTES = 1 << 30  # of contexts and kernels that are loaded meanwhile
MATRIX = 64 if machine.DRY_RUN else 8192
PRODUCTS = 500


def attach_once() -> GpuReport:
    """What an attachment finds out, and takes."""
    machine.use_gpu()
    model = models.build(PARAMETERS)
    with machine.daemon(machine.daemon_budget(models.count(model)) + 8 * PROBE_ELEMENTS):
        optimizer = superoffload.torch.AdamW(model.named_parameters(), gpu=GpuOptions(resident_buckets=0))
        optimizer.close()
        return optimizer.gpu_report


def memory_of_attaching() -> list[str]:
    """Lines of a table: GPU memory while optimizers are built, of models that are on the GPU, on the CPU and on meta.

    Raises RuntimeError where more was used at once than the parameters, the slots, a piece and what torch's allocator
    could not give back.
    """
    machine.use_gpu()
    lines = []
    for origin in ("GPU", "CPU", "meta"):
        model = models.build(ATTACHED_PARAMETERS)
        values = {name: tensor.detach().cpu() for name, tensor in model.named_parameters()}
        if origin != "GPU":
            model.to({"CPU": "cpu", "meta": "meta"}[origin])
        parameters_bytes = sum(parameter.nbytes for parameter in model.parameters())
        largest = max(parameter.nbytes for parameter in model.parameters())
        machine.release_cached()
        before = machine.used_gpu_bytes() - (parameters_bytes if origin == "GPU" else 0)
        with machine.daemon(machine.daemon_budget(models.count(model))):
            optimizer = superoffload.torch.AdamW(
                model.named_parameters(),
                gpu=GpuOptions(device=None if origin == "GPU" else "cuda", weights=values, resident_buckets=0),
            )
            report = optimizer.gpu_report
            after = machine.used_gpu_bytes()
            optimizer.close()
        piece = max(8 << 20, report.gpu_bytes // 128)
        most = parameters_bytes + largest + 2 * piece + report.unreturned_bytes + CONTEXT_BYTES
        used = report.attach_peak_bytes - before
        lines.append(
            f"parameters from {origin:4} {parameters_bytes / 2**20:9.1f} MiB, at most {used / 2**20:9.1f} as they "
            f"moved, {(after - before) / 2**20:9.1f} afterwards, {report.unreturned_bytes / 2**20:.1f} kept by torch"
        )
        if used > most and not machine.DRY_RUN:
            raise RuntimeError(f"{lines[-1]}: more than {most / 2**20:.1f} MiB")
    print("\n".join(lines))
    return lines


def memory_by_mover() -> list[str]:
    """Lines of a table: what an attachment takes of the GPU's memory beyond the parameters, in all processes. "auto"
    has tried them all, and is to take no more than the mover that it has chosen."""
    machine.use_gpu()
    model = models.build(PARAMETERS)
    machine.release_cached()
    before = machine.used_gpu_bytes()  # the parameters, where torch has put them

    def describe(optimizer: superoffload.torch.AdamW) -> str:
        machine.release_cached()
        taken, report = machine.used_gpu_bytes() - before, optimizer.gpu_report
        return (
            f"{taken / 2**20:9.1f} MiB more than before, {report.gpu_bytes / 2**20:.1f} of them slots and parameters; "
            f"took {report.mover}"
        )

    return rows.line_per_mover((*machine.MOVERS, "auto"), model, describe)


def both_directions() -> list[str]:
    """Lines of a table: plain pinned copies down, up, and at once."""
    machine.use_gpu()
    pairs = [
        (
            torch.empty(PROBE_ELEMENTS, dtype=torch.bfloat16, device=machine.DEVICE),
            torch.empty(PROBE_ELEMENTS, dtype=torch.bfloat16, pin_memory=not machine.DRY_RUN),
            machine.side_stream(),
        )
        for _ in range(2)
    ]
    lines = []
    for title, ways in (("down", (0,)), ("up", (1,)), ("both at once", (0, 1))):
        begin = 0.0
        for number in range(-1, ROUNDS):
            if number == 0:
                machine.synchronize()
                begin = time.perf_counter()
            for way in ways:
                there, here, stream = pairs[way]
                with stream:
                    (there if way else here).copy_(here if way else there, non_blocking=True)
        machine.synchronize()
        moved = len(ways) * ROUNDS * pairs[0][0].nbytes
        lines.append(f"{title:12} {moved / (time.perf_counter() - begin) / 1e9:7.1f} GB/s")
    print("\n".join(lines))
    return lines


def movers_beside_kernels() -> list[str]:
    """Lines of a table: what an attachment found that each mover's copies cost kernels beside them, and plain copies
    alone; then how much longer a trainer's matrix products take while each mover works."""
    machine.use_gpu()
    model = models.build(PARAMETERS)
    lines = []
    with machine.daemon(machine.daemon_budget(models.count(model)) + 8 * PROBE_ELEMENTS):
        gpu = GpuOptions(cast="fused", resident_buckets=0)
        optimizer = superoffload.torch.AdamW(model.named_parameters(), gpu=gpu, bucket_bytes=PROBE_ELEMENTS * 2)
        report = optimizer.gpu_report
        optimizer.close()
        plain = _plain_copy_seconds(PROBE_ELEMENTS)
        lines.append(f"{'plain copies alone':26} {plain * 1e3:9.3f} ms per round")
        for mover, seconds in sorted(report.seconds.items()):
            taken = "  <- taken" if mover == report.mover else ""
            lines.append(
                f"{mover + ' beside products':26} {seconds * 1e3:9.3f} ms of them lost per round, "
                f"{seconds / plain:5.2f} of plain copies{taken}"
            )
        alone = _products_seconds()
        for mover in sorted(report.seconds):
            beside, steps = _products_beside_steps(model, mover)
            lines.append(
                f"{mover + ' under products':26} {beside / alone:9.2f} times their duration alone, beside {steps} steps"
            )
    print("\n".join(lines))
    return lines


def movers_beside_kernels_with_mps(directory: str) -> list[str]:
    """Whoever calls ends MPS, with `quit_mps`, whatever became of this."""
    if shutil.which(MPS) is None:
        raise machine.Unavailable(f"there is no {MPS} here")
    os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": directory, "CUDA_MPS_LOG_DIRECTORY": directory}
    if subprocess.run([MPS, "-d"]).returncode != 0:
        raise machine.Unavailable(f"{MPS} does not start here")
    return movers_beside_kernels()


def _plain_copy_seconds(elements: int) -> float:
    """Of one round, there and back, in bf16, with nothing else on the GPU."""
    there = torch.empty(elements, dtype=torch.bfloat16, device=machine.DEVICE)
    here = torch.empty(elements, dtype=torch.bfloat16, pin_memory=not machine.DRY_RUN)
    begin = 0.0
    for number in range(-1, ROUNDS):
        if number == 0:
            machine.synchronize()
            begin = time.perf_counter()
        here.copy_(there, non_blocking=True)
        there.copy_(here, non_blocking=True)
        machine.synchronize()
    return (time.perf_counter() - begin) / ROUNDS


def _products_seconds() -> float:
    """Of matrix products on a stream of their own."""
    matrix = torch.randn(MATRIX, MATRIX, device=machine.DEVICE).to(torch.bfloat16)
    with machine.side_stream():
        machine.synchronize()
        begin = time.perf_counter()
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)
        if not machine.DRY_RUN:
            torch.cuda.current_stream().synchronize()
        return time.perf_counter() - begin


def _products_beside_steps(model: torch.nn.Module, mover: str) -> tuple[float, int]:
    """How long the products take a trainer while the daemon works for it all the time, and how many steps that was."""
    optimizer = superoffload.torch.AdamW(
        model.named_parameters(), overlap=False, gpu=GpuOptions(mover=mover, resident_buckets=0, cast="fused")
    )
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    done = threading.Event()
    steps = 0

    def step() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()

    def step_until_done() -> None:
        nonlocal steps
        while not done.is_set():
            step()
            steps += 1

    step()
    worker = threading.Thread(target=step_until_done)
    worker.start()
    try:
        return _products_seconds(), steps
    finally:
        done.set()
        worker.join()
        optimizer.close()
