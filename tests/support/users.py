"""Users other than the one who runs the tests, and what they do to a daemon."""

import os
import pathlib
import subprocess
import textwrap

from tests.conftest import Daemon

from superoffload.v1 import optimizer_pb2 as pb

CTL = pathlib.Path(os.environ["SUPEROFFLOAD_BUILD"]) / "client" / "superoffloadctl"
TRAINER = CTL.with_name("train_bigram")
STRANGER, FRIEND = 54321, 54322


def configured(tmp_path, text, *flags):
    """A daemon with this configuration."""
    config = tmp_path / "superoffloadd.textproto"
    config.write_text(textwrap.dedent(text))
    return Daemon(f"--config={config}", "--metrics_address=off", *flags)


def request(name="o", elements=64):
    message = pb.CreateOptimizerRequest(name=name, algorithm="adamw")
    message.groups.add()
    message.parameters.add(name="w", shape=[elements], dtype=pb.DATA_TYPE_BFLOAT16)
    return message


def become(user, *options):
    """Not subprocess's user=, which forks a process that may have threads of gRPC: its child may crash in them."""
    return ["setpriv", f"--reuid={user}", *options]


def ctl(daemon, *words, user=None):
    os.chmod(daemon.directory.name, 0o755)
    command = [*([] if user is None else become(user)), CTL, f"--endpoint={daemon.endpoint}", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
