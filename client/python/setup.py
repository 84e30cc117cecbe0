"""Generates the gRPC modules from the .proto files of this repository, then builds as pyproject.toml says."""

import pathlib

from grpc_tools import protoc
from setuptools import setup

HERE = pathlib.Path(__file__).parent.resolve()
PROTO = HERE.parent.parent / "proto"

status = protoc.main(
    [
        "protoc",
        f"-I{PROTO}",
        f"-I{pathlib.Path(protoc.__file__).parent / '_proto'}",
        f"--python_out={HERE}",
        f"--grpc_python_out={HERE}",
        str(PROTO / "superoffload/v1/optimizer.proto"),
    ]
)
if status != 0:
    raise SystemExit("generating the gRPC modules failed")

setup()
