"""Who owns an optimizer and a private daemon: forked children, killed daemons, ranks of one launch, exits."""

import hashlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
import torch
from tests.support.users import STRANGER

import superoffload.torch
from superoffload._core import daemon as daemons
from superoffload._core import private_daemon

ROOT = pathlib.Path(__file__).parents[2]
BUILD = """
import os, signal, sys, torch, superoffload.torch
from superoffload._core import daemon
model = torch.nn.Linear(8, 8)
optimizer = superoffload.torch.AdamW(model.parameters())
def train():
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
train()
"""


def run(script, timeout=100, **environment):
    """Standard output of a trainer of its own, which must end by itself."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def directories(base):
    return [path for path in pathlib.Path(base).iterdir() if path.name.startswith("superoffloadd-")]


@pytest.fixture
def base():
    with tempfile.TemporaryDirectory(prefix="so-own-", dir="/tmp") as path:
        yield path


def test_a_forked_child_uses_and_ends_nothing_of_its_parents(base):
    out = run(
        BUILD
        + """
import gc
child = os.fork()
if child == 0:
    before = model.weight.detach().clone()
    model(torch.ones(2, 8)).square().mean().backward()
    try:
        optimizer.step()
    except superoffload.Error as error:
        assert "belongs to process" in str(error), error
        print("refused", flush=True)
    del optimizer, model
    gc.collect()
    sys.exit(0)  # with its exit handlers
assert os.waitpid(child, 0)[1] == 0
train()
print(optimizer.last_result.committed_steps)
""",
        TMPDIR=base,
    )
    assert out.split() == ["refused", "2"]
    assert not directories(base)


def test_persistent_data_loader_workers_do_not_keep_the_daemon(base):
    """A daemon that the workers kept alive would be killed when the trainer has waited for it in vain."""
    out = run(
        BUILD
        + """
from superoffload._core import private_daemon
data = torch.utils.data.DataLoader(torch.zeros(8), num_workers=2, persistent_workers=True)
for _ in data:
    train()
workers = iter(data)
def killed(*_):
    print("killed", flush=True)
kill = os.kill
private_daemon.os.kill = lambda pid, number: killed() if number == signal.SIGKILL else kill(pid, number)
print(optimizer.last_result.committed_steps)
""",
        TMPDIR=base,
    )
    assert out.split() == ["9"]
    assert not directories(base)


def test_a_killed_private_daemon_is_said_at_once_and_the_next_optimizer_has_another():
    model = torch.nn.Linear(8, 8)

    def train(optimizer):
        model(torch.ones(2, 8)).square().mean().backward()
        optimizer.step()

    optimizer = superoffload.torch.AdamW(model.parameters())
    train(optimizer)
    process = daemons._private._process
    process.kill()
    with pytest.raises(superoffload.Error, match=f"killed by signal {int(signal.SIGKILL)}") as raised:
        train(optimizer)
    assert "build another" in str(raised.value)
    optimizer.close()
    weight = model.weight.detach().clone()
    again = superoffload.torch.AdamW(model.parameters())
    train(again)
    assert again.last_result.committed_steps == 1
    assert not torch.equal(model.weight, weight)
    assert daemons._private._process.pid != process.pid


FIND = """
import os, signal, sys
from superoffload._core import daemon
endpoint = daemon.resolve_endpoint(None)
"""
RANK = (
    FIND
    + """
print(endpoint, flush=True)
sys.stdin.readline()
print(daemon._answers(endpoint), flush=True)
"""
)


def start_rank(rank, base, port="29871", script=RANK, **environment):
    launch = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        cwd=ROOT,
        env={**os.environ, **launch, "RANK": str(rank), "LOCAL_RANK": str(rank), "TMPDIR": base, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def end(rank):
    out, _ = rank.communicate("go\n", timeout=100)
    assert rank.returncode == 0
    return out.strip()


def test_ranks_of_one_launch_share_a_daemon_that_ends_with_the_last(base):
    ranks = [start_rank(rank, base) for rank in range(2)]
    other = start_rank(0, base, port="29872")
    endpoints = [rank.stdout.readline().strip() for rank in (*ranks, other)]
    assert endpoints[0] == endpoints[1] != endpoints[2]
    assert len(directories(base)) == 2
    assert end(other) == "True"
    assert end(ranks[0]) == "True"  # one of the two has started the daemon: it goes on for the other
    assert len(directories(base)) == 1
    assert end(ranks[1]) == "True"
    assert not directories(base)


@pytest.mark.skipif(os.geteuid() != 0, reason="acting as another user needs root")
def test_nobody_else_can_make_the_directory_of_a_launch_first(base, tmp_path):
    """Whoever sees the launch knows all that its name would be made of."""
    os.chmod(base, 0o1777)
    launch = ["localhost", "29876", "", "", os.environ.get("SLURM_JOB_ID", "")]
    for secret in ([], [""]):
        words = [*secret, str(os.geteuid()), os.environ["SUPEROFFLOAD_DAEMON"], *launch]
        digest = hashlib.sha256("\0".join(words).encode()).hexdigest()
        squatted = pathlib.Path(base, f"superoffloadd-{digest[:16]}")
        squatted.mkdir(mode=0o755)
        os.chown(squatted, STRANGER, STRANGER)
    ranks = [start_rank(rank, base, port="29876", XDG_CACHE_HOME=str(tmp_path)) for rank in range(2)]
    first, second = (rank.stdout.readline().strip() for rank in ranks)
    assert first == second != ""
    assert [end(rank) for rank in ranks] == ["True", "True"]
    (secret,) = (tmp_path / "superoffload").iterdir()
    assert secret.stat().st_mode & 0o777 == 0o600 and secret.read_text()
    without = start_rank(0, base, port="29876", XDG_CACHE_HOME="/proc/nowhere")  # told, as it cannot be helped
    assert without.communicate(timeout=100)[0] == ""
    assert without.returncode == 1


def test_a_daemon_of_ranks_that_are_bound_to_cores_has_those_of_their_launcher(base):
    mine = os.sched_getaffinity(0)
    bound = f"import os; os.sched_setaffinity(0, {{{min(mine)}}})\n"
    ranks = [start_rank(rank, base, port="29873", script=bound + RANK) for rank in range(2)]
    for rank in ranks:
        rank.stdout.readline()
    (directory,) = directories(base)
    assert os.sched_getaffinity(int((directory / "pid").read_text())) == mine
    assert [os.sched_getaffinity(rank.pid) for rank in ranks] == [{min(mine)}] * 2
    assert [end(rank) for rank in ranks] == ["True"] * 2


def test_the_start_of_a_private_daemon_is_one_line_that_says_how_to_keep_its_state(base):
    started = subprocess.run(
        [sys.executable, "-c", FIND + "daemon.resolve_endpoint(None)"],
        env={**os.environ, "TMPDIR": base},
        capture_output=True,
        text=True,
    )
    (line,) = started.stderr.splitlines()
    assert "private superoffloadd" in line and "superoffloadd --keeper" in line and "install-service" in line


def test_what_a_killed_trainer_left_is_removed_by_the_next(base):
    environment = {**os.environ, "TMPDIR": base}
    killed = subprocess.run([sys.executable, "-c", FIND + "os.kill(os.getpid(), signal.SIGKILL)"], env=environment)
    assert killed.returncode == -signal.SIGKILL
    (left,) = directories(base)
    run(FIND + f"assert not os.path.exists({str(left)!r})", TMPDIR=base)
    assert not directories(base)


def test_a_private_daemon_that_starts_late_does_not_make_its_directory_again(base):
    late = subprocess.run(
        [os.environ["SUPEROFFLOAD_DAEMON"], f"--runtime_directory={base}/superoffloadd-gone", "--exit_on_stdin_eof"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert late.returncode == 1 and "superoffloadd-gone" in late.stderr
    assert not directories(base)


KILLED_AT_LINE = """
import os, signal, sys
from superoffload._core import daemon, private_daemon

left = int(sys.argv[1])  # lines until death

def trace(frame, event, _):
    global left
    if frame.f_code.co_filename != private_daemon.__file__:
        return None
    left -= event == "line"
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return trace

sys.settrace(trace)
daemon.resolve_endpoint(None)
daemon._private.leave()
"""


@pytest.mark.parametrize("launched", [False, True], ids=["alone", "a rank"])
def test_wherever_a_process_is_killed_the_next_one_leaves_nothing(base, launched):
    environment = {**os.environ, "TMPDIR": base}
    if launched:
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29874", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    line, status = 3, -signal.SIGKILL
    while status == -signal.SIGKILL:
        status = subprocess.run([sys.executable, "-c", KILLED_AT_LINE, str(line)], env=environment).returncode
        run(FIND + "daemon.resolve_endpoint(None)", TMPDIR=base)
        deadline = time.monotonic() + 60
        while directories(base):  # a daemon that was starting has yet to see that nobody is there
            private_daemon.remove_leftovers(base)
            assert time.monotonic() < deadline, (line, [list(left.iterdir()) for left in directories(base)])
            time.sleep(0.01)
        line += 10
    assert status == 0 and line > 150


CRASHED = FIND + "os.kill(os.getpid(), signal.SIGKILL)"


def test_a_rank_that_still_removes_a_crashed_launch_joins_the_daemon_that_others_started_meanwhile(base):
    start_rank(0, base, script=CRASHED).communicate(timeout=100)
    slow = """
import os, sys
unlink = os.unlink
def wait_at_door(path, **arguments):
    unlink(path, **arguments)
    if os.path.basename(path) == "door":
        os.unlink = unlink
        print("removed", flush=True)
        sys.stdin.readline()
os.unlink = wait_at_door
"""
    started = "print(daemon._private._process is not None, flush=True)\nsys.stdin.readline()"
    first = start_rank(0, base, script=slow + FIND + started)
    assert first.stdout.readline() == "removed\n"
    second = start_rank(1, base, script=FIND + started)
    assert second.stdout.readline() == "True\n"
    first.stdin.write("go\n")
    first.stdin.flush()
    assert first.stdout.readline() == "False\n"
    end(first)
    end(second)
    assert not directories(base)


def test_a_launch_does_not_join_the_daemon_that_a_crashed_one_has_not_ended_yet(base):
    stopped = FIND + "os.kill(daemon._private._process.pid, signal.SIGSTOP)\nprint(daemon._private._process.pid)\n"
    out, _ = start_rank(0, base, script=stopped + "sys.stdout.flush()\n" + CRASHED).communicate(timeout=100)
    found = "from superoffload._core import private_daemon\nprivate_daemon.remove_leftovers = lambda base: None\n"
    try:
        assert end(start_rank(0, base, script=found + RANK)).endswith("True")
    finally:
        os.kill(int(out), signal.SIGCONT)


def test_a_long_TMPDIR_is_no_obstacle(base):
    long = os.path.join(base, "x" * 100)
    os.mkdir(long)
    assert run(FIND + "print(daemon._answers(endpoint))", TMPDIR=long).strip() == "True"


def refusal(monkeypatch, daemon, library=None):
    monkeypatch.setattr(daemons, "_private", None)
    monkeypatch.setenv("SUPEROFFLOAD_DAEMON", daemon)
    if library is not None:
        monkeypatch.setenv("SUPEROFFLOAD_LIBRARY", library)
        monkeypatch.setattr(private_daemon.library, "_library", private_daemon.library._library.__wrapped__)
    with pytest.raises(superoffload.Error) as raised:
        superoffload.torch.AdamW(torch.nn.Linear(2, 2).parameters())
    return str(raised.value)


def test_a_wrong_binary_is_named_with_the_variable_that_names_it(monkeypatch):
    for wrong in ("/nonexistent/superoffloadd", "/etc/passwd", "/"):
        text = refusal(monkeypatch, wrong)
        assert wrong in text and "SUPEROFFLOAD_DAEMON" in text
    assert "exited with status 0" in refusal(monkeypatch, "/bin/true")


def test_both_missing_files_are_named_at_once(monkeypatch):
    text = refusal(monkeypatch, "/nonexistent/superoffloadd", library="/nonexistent/library.so")
    assert "/nonexistent/superoffloadd" in text and "/nonexistent/library.so" in text


DISTRIBUTED = """
import os, sys, torch, superoffload.torch
from tests.support import process_group
torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=2)
torch.set_num_threads(1)
def train(make, wrap_first):
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 8)
    if wrap_first:
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = make(model.parameters())
    else:
        optimizer = make(model.parameters())
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(5):
        seed = 2 * step + int(os.environ["RANK"])
        wrapped(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach().clone()
theirs = train(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), True)
for wrap_first in (True, False):
    ours = train(lambda parameters: superoffload.torch.AdamW(parameters, lr=1e-2), wrap_first)
    print((ours - theirs).abs().max().item() < 1e-6, flush=True)
process_group.leave()
"""


def test_an_optimizer_may_be_built_before_the_model_is_wrapped_for_ranks(base):
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    ranks = [start_rank(rank, base, str(port), DISTRIBUTED) for rank in range(2)]
    assert [end(rank).split() for rank in ranks] == [["True", "True"]] * 2
    assert not directories(base)
