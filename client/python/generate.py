"""Makes superoffload/v1 from the .proto files, for every protobuf and grpcio in the bounds of pyproject.toml.

What protoc and grpcio-tools generate refuses runtimes older than themselves. Only protoc's compiled descriptors and
type stubs (.pyi) are used; the modules around them are written here.
"""

import pathlib
import tempfile

from google.protobuf import descriptor_pb2
from grpc_tools import protoc

PROTOS = ("superoffload/v1/optimizer.proto", "superoffload/v1/plan.proto")

_MESSAGES = '''"""Generated from {name}."""

from google.protobuf import descriptor_pool
from google.protobuf.internal import builder
{imports}
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile({bytes!r})
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, {module!r}, globals())
'''
_SERVICES = '''"""Generated from {name}."""

import grpc

from {package} import {messages} as messages
'''
_STUB = """

class {service}Stub:
    def __init__(self, channel: grpc.Channel) -> None:
"""
_METHOD = """        self.{method} = channel.{kind}(
            "/{package}.{service}/{method}",
            request_serializer=messages.{request}.SerializeToString,
            response_deserializer=messages.{response}.FromString,
        )
"""


def _compile(proto: pathlib.Path, stubs: pathlib.Path) -> descriptor_pb2.FileDescriptorSet:
    with tempfile.NamedTemporaryFile() as compiled:
        includes = [f"-I{proto}", f"-I{pathlib.Path(protoc.__file__).parent / '_proto'}"]
        if protoc.main(["protoc", *includes, f"--descriptor_set_out={compiled.name}", f"--pyi_out={stubs}", *PROTOS]):
            raise SystemExit("compiling the .proto files failed")
        return descriptor_pb2.FileDescriptorSet.FromString(pathlib.Path(compiled.name).read_bytes())


def _import(dependency: str) -> str:
    """What it defines must be known before what uses it."""
    package, _, name = dependency.removesuffix(".proto").rpartition("/")
    return f"import {package.replace('/', '.')}.{name}_pb2\n"


def _services(file: descriptor_pb2.FileDescriptorProto, package: str, messages: str) -> str:
    text = _SERVICES.format(name=file.name, package=package, messages=messages)
    for service in file.service:
        text += _STUB.format(service=service.name)
        for method in service.method:
            sides = (method.client_streaming, method.server_streaming)
            text += _METHOD.format(
                package=file.package,
                service=service.name,
                method=method.name,
                kind="_".join("stream" if streaming else "unary" for streaming in sides),
                request=method.input_type.rpartition(".")[2],
                response=method.output_type.rpartition(".")[2],
            )
    return text


def generate(proto: pathlib.Path, output: pathlib.Path) -> None:
    """Writes *_pb2.py, *_pb2.pyi and, where there are services, *_pb2_grpc.py below ``output``."""
    for file in _compile(proto, output).file:
        path = pathlib.PurePosixPath(file.name)
        package, messages = ".".join(path.parts[:-1]), f"{path.stem}_pb2"
        written = output / path.parent
        module = _MESSAGES.format(
            name=file.name,
            imports="".join(_import(dependency) for dependency in file.dependency),
            bytes=file.SerializeToString(),
            module=f"{package}.{messages}",
        )
        (written / f"{messages}.py").write_text(module)
        if file.service:
            (written / f"{messages}_grpc.py").write_text(_services(file, package, messages))
