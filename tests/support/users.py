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
    message = pb.CreateOptimizerRequest(name=name)
    message.groups.add(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8)
    message.parameters.add(name="w", shape=[elements], dtype=pb.DATA_TYPE_BFLOAT16)
    return message


def ctl(daemon, *words, user=None):
    os.chmod(daemon.directory.name, 0o755)
    return subprocess.run(
        [CTL, f"--endpoint={daemon.endpoint}", *words], capture_output=True, text=True, timeout=60, user=user
    )
