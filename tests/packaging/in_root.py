"""What roots.sh runs inside of a root: trains, is killed, is upgraded. Usage: in_root.py NEWER.whl"""

import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

BIN = pathlib.Path(sys.executable).parent
RUN = "/tmp/superoffloadd-root"
TRAIN = """
import os, signal, sys, torch, superoffload.torch
torch.manual_seed(0)
model = torch.nn.Linear(64, 64).bfloat16()
optimizer = superoffload.torch.AdamW(model.named_parameters(), lr=1e-2, name="run", sync="pull_params")
for _ in range(int(sys.argv[1])):
    model(torch.ones(2, 64).bfloat16()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(optimizer.last_result.step, flush=True)
if sys.argv[2] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def wait(condition):
    deadline = time.monotonic() + 120
    while not (result := condition()):
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.02)
    return result


def train(steps, then):
    environment = {**os.environ, "SUPEROFFLOAD_ENDPOINT": f"unix:{RUN}/control.sock"}
    words = [sys.executable, "-W", "ignore", "-c", TRAIN, str(steps), then]
    done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.returncode == (-signal.SIGKILL if then == "die" else 0), done.returncode
    return int(done.stdout)


def ctl(*words):
    return subprocess.run(
        [BIN / "superoffloadctl", f"--endpoint=unix:{RUN}/control.sock", *words],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def children(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_daemon(keeper):
    (victim,) = wait(lambda: children(keeper.pid))
    os.kill(victim, signal.SIGKILL)
    (successor,) = wait(lambda: [child for child in children(keeper.pid) if child != victim])
    return successor


def main():
    os.makedirs(RUN, exist_ok=True)
    command = [BIN / "superoffloadd", "--keeper", f"--runtime_directory={RUN}", "--metrics_address=off"]
    keeper = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    wait(lambda: os.path.exists(f"{RUN}/control.sock"))
    before = importlib.metadata.version("superoffload")
    assert train(5, "die") == 5
    assert train(5, "leave") == 10
    kill_daemon(keeper)
    assert train(5, "leave") == 15
    upgrade = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", sys.argv[1]]
    subprocess.run(upgrade, check=True)
    assert train(5, "leave") == 20  # a new trainer with the old daemon
    assert "it will recover them" in ctl("check-upgrade")
    successor = kill_daemon(keeper)
    assert train(5, "leave") == 25
    assert not os.readlink(f"/proc/{successor}/exe").endswith("(deleted)")
    said = json.loads(ctl("version", "--json"))
    after = subprocess.check_output(
        [sys.executable, "-c", "import superoffload; print(superoffload.__version__)"], text=True
    )
    keeper.terminate()
    assert keeper.wait() == 0
    print(f"trained, killed, upgraded {before} -> {after.strip()}, wire version {said['wire_version']}")


if __name__ == "__main__":
    main()
