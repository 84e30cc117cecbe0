"""Subcommands that check: smoke, bits, kills and sanitize. Each takes a session and adds steps to it."""

import shutil
import subprocess

from tests.device import attributes, machine
from tests.device.session import Session, Step

DTYPES = ("bfloat16",) if machine.DRY_RUN else ("bfloat16", "float16", "float32")
ELEMENTS = 1 << 16 if machine.DRY_RUN else 256 << 20
# State in fewer bits, and rooms for gradients: algorithm, its dtypes by option, GpuOptions.gradient_slots.
NARROWER: tuple[tuple[str, dict[str, str], int | str], ...] = (
    ("AdamW", {"state_dtype": "bfloat16"}, "auto"),
    ("AdamW", {"master_dtype": "bfloat16"}, "auto"),
    ("AdamW", {"state_dtype": "bfloat16", "master_dtype": "bfloat16"}, 1),
    ("AdamW8bit", {}, "auto"),
    ("Lion8bit", {}, 1),
    ("AdamW", {}, "in_place"),
    ("AdamW8bit", {"master_dtype": "bfloat16"}, "in_place"),
)
# Of loops_check.py.
LOOPS = (
    "memory nearly full",
    "memory nearly full, expandable segments",
    "averages of weights",
    "make_graphed_callables",
    "reduce-overhead",
    "blocks that stream",
    "blocks that stay as there is room",
    "parameters twice as large as their memory",
    "frozen blocks that stream, twice as large as their memory",
    "activations that leave, for half of which there is memory",
    "gradients of several passes, for half of which there is memory",
)
SANITIZED_ELEMENTS = 1 << 16 if machine.DRY_RUN else 1 << 20
MOVERS = ("direct", "auto") if machine.DRY_RUN else (*machine.MOVERS, "auto")  # smoke tries each
# Of gpu_test: those that kill are for `kills`, and one of each kind is enough for a dry run.
KILLING = ("ATrainerThatIsKilledLeavesAHealthyDaemon", "ADaemonThatIsKilledLeavesAHealthyTrainer")
DRY_TESTS = ("DaemonDescriptor", "MeasuresWhatWorksAndTakesTheBest")
SANITIZED_TESTS = ("Trainer",) if machine.DRY_RUN else ("DaemonResident", "Trainer", "Direct", "DaemonStreams")
SANITIZER = shutil.which("compute-sanitizer") or shutil.which(
    "compute-sanitizer", path="/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
)


def _attributes() -> dict[str, object]:
    # How large everything else may be, so it comes first.
    facts = {"MemAvailable, within the control group": f"{machine.available_host_bytes() / machine.GIB:.1f} GiB"}
    print(facts)
    about = attributes.of_the_machine()
    try:
        facts |= attributes.of_the_driver()
    except OSError as error:
        raise RuntimeError(f"no NVIDIA driver: {error}") from error
    return facts | about


def _three_steps(mover: str) -> dict[str, object]:
    from tests.device import torch_check

    return torch_check.check("bfloat16", mover, steps=3, overlap=True)


def _attachment() -> dict[str, object]:
    """What `auto` measures, and takes."""
    import dataclasses

    from tests.device import probe

    return dataclasses.asdict(probe.attach_once())


def smoke(session: Session) -> None:
    step = session.call("attributes", 45, _attributes)
    for name, value in (step.result or {}).items():
        session.table.append(f"{name:44} {value}"[:140])
    if step.outcome == "passed" and "TOO OLD" in step.result:
        session.leave_out("everything else", step.result["TOO OLD"])
        return
    found = session.call("versions of Python, PyTorch and the client", 60, _versions).result or {}
    session.table += [f"{name:44} {value}" for name, value in found.items()]
    for mover in machine.MOVERS:
        session.call(f"three steps, mover {mover}: bits equal the host's", 40, _three_steps, mover)
    found = session.call("what attaching measures", 40, _attachment).result or {}
    session.table += [f"attached: {name:34} {value}"[:140] for name, value in found.items()]
    found = session.call("GPU memory while attaching: parameters exist once", 90, _memory_of_attaching).result or []
    session.table += found
    session.facts["table"] = session.table


def _memory_of_attaching() -> list[str]:
    from tests.device import probe

    return probe.memory_of_attaching()


def _versions() -> dict[str, str]:
    import sys

    import grpc
    import torch
    from google import protobuf

    import superoffload._core.library

    superoffload._core.library.function("last_error")  # loads it
    found = {"python": sys.version.split()[0], "torch": torch.__version__, "CUDA of torch": str(torch.version.cuda)}
    found |= {"grpc": grpc.__version__, "protobuf": protobuf.__version__}
    print(found)
    return found


def tests_of_gpu_test() -> list[str]:
    listed = subprocess.run([machine.GPU_TEST, "--gtest_list_tests"], capture_output=True, text=True, check=True)
    names, suite = [], ""
    for line in listed.stdout.splitlines():
        if line.startswith("  "):
            names.append(suite + line.split("#")[0].strip())
        elif line.split("#")[0].strip().endswith("."):
            suite = line.split("#")[0].strip()
    return [name for name in names if ".DISABLED_" not in name]


def _gpu_tests(session: Session, wanted: object, limit_seconds: float, *prefix: str) -> None:
    """Each in a process of its own, so that a crash or a hang costs one."""
    try:
        names = [name for name in tests_of_gpu_test() if wanted(name)]
    except (OSError, subprocess.CalledProcessError) as error:
        session.leave_out("movers and residents", f"{machine.GPU_TEST} does not start: {error}")
        return
    for name in names:
        test = [machine.GPU_TEST, "--gtest_brief=1", f"--gtest_filter={name}"]
        title = " ".join([*prefix[2:3], name])
        session.program(title, [*prefix, *test], limit_seconds, did_nothing="[  PASSED  ] 0 tests.")


def _last_word(name: str) -> str:
    return name.rsplit("/", 1)[-1].rsplit(".", 1)[-1]


def _table_of(session: Session, step: Step) -> None:
    session.table += [line for line in step.tail if "GB/s" in line]


def bits(session: Session) -> None:
    _table_of(session, session.program("kernels", [machine.KERNEL_CHECK, "--elements", str(ELEMENTS)], 60))
    for dtype in DTYPES:
        for mover in MOVERS:
            session.call(f"PyTorch, {dtype}, mover {mover}", 40, _torch_check, dtype, mover)
        session.call(f"JAX, {dtype}, plain, overlapped, inside of jit and streamed", 80, _jax_check, dtype)
    for algorithm, dtypes, slots in NARROWER[-1:] if machine.DRY_RUN else NARROWER:
        words = "".join(f", {option} {dtype}" for option, dtype in dtypes.items())
        title = f"PyTorch, {algorithm}{words}, gradient slots {slots}"
        session.call(title, 40, _torch_check, "bfloat16", "trainer", slots, algorithm, dtypes)
    session.call("PyTorch, two ranks on one GPU", 60, _ranks_check)
    for way in LOOPS:
        session.call(f"PyTorch, {way}: as the loop that waits", 60, _loops_check, way)
    wanted = DRY_TESTS if machine.DRY_RUN else None
    _gpu_tests(
        session, lambda name: _last_word(name) not in KILLING and (wanted is None or _last_word(name) in wanted), 30
    )


def _torch_check(*arguments: object) -> dict[str, int]:
    from tests.device import torch_check

    return torch_check.check(*arguments)


def _loops_check(way: str) -> dict[str, int]:
    from tests.device import loops_check

    return loops_check.check(way)


def _ranks_check() -> dict[str, str]:
    from tests.device import ranks_check

    return ranks_check.check()


def _jax_check(dtype: str) -> dict[str, int]:
    from tests.device import jax_check

    return jax_check.check(dtype)


def kills(session: Session) -> None:
    for mover in machine.MOVERS:
        session.call(f"trainers killed, mover {mover}: bits", 40, _kill, "kill_trainers", mover)
        session.call(f"daemons killed, mover {mover}: bits", 40, _kill, "kill_daemons", mover)
    if not machine.DRY_RUN:
        _gpu_tests(session, lambda name: _last_word(name) in KILLING, 60)


def _kill(whom: str, mover: str) -> dict[str, int]:
    from tests.device import kill_check

    return getattr(kill_check, whom)(mover)


def sanitize(session: Session) -> None:
    if SANITIZER is None:
        session.skip("memcheck, racecheck, initcheck", "there is no compute-sanitizer here")
        return
    kernels = [machine.KERNEL_CHECK, "--elements", str(SANITIZED_ELEMENTS)]
    for tool in ("memcheck", "racecheck", "initcheck"):
        session.program(f"{tool}: kernels", [*_sanitizer(tool), *kernels], 60)
    for tool in ("memcheck",) if machine.DRY_RUN else ("memcheck", "initcheck", "racecheck"):
        _gpu_tests(session, lambda name: _last_word(name) in SANITIZED_TESTS, 60, *_sanitizer(tool))


def _sanitizer(tool: str) -> tuple[str, ...]:
    """Also of the daemon, which is a child of the test."""
    return (SANITIZER, "--tool", tool, "--error-exitcode", "1", "--target-processes", "all")
