"""What training a model on a machine would take, and how fast it would be, without either.

``superoffload plan --model=config.json --machine=gh200-96-480 --batch=4 --sequence=4096`` makes the model that a
Hugging Face configuration describes, without memory (torch's "meta" device), and asks ``superoffload-plan``. Neither
a daemon nor a GPU is needed, nor a network.
"""

import argparse
import contextlib
import inspect
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import grpc
from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError

from superoffload._core import programs
from superoffload._core.error import Error
from superoffload.v1 import optimizer_pb2, plan_pb2

_TIMELINES = {".svg": plan_pb2.TIMELINE_FORMAT_SVG, ".json": plan_pb2.TIMELINE_FORMAT_TRACE}
_FIELDS = plan_pb2.PlanRequest.DESCRIPTOR.fields_by_name
DOES_NOT_FIT = 3  # exit status
# What a configuration must say itself: transformers' defaults are often another model of the family.
_STATED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "experts_per_token")
_FEED_FORWARD = ("ffn_hidden_size", "intermediate_size", "n_inner")


def ask(request: plan_pb2.PlanRequest) -> plan_pb2.PlanResponse:
    """Answers a request; raises Error: INVALID_ARGUMENT with a sentence when it is wrong, UNAVAILABLE."""
    program = programs.planner()
    if program is None:
        raise Error(
            grpc.StatusCode.UNAVAILABLE,
            "no superoffloadd is installed, which brings superoffload-plan: install it, or point $SUPEROFFLOAD_DAEMON "
            "at the binary",
        )
    try:
        run = subprocess.run([program], input=request.SerializeToString(), capture_output=True)
    except OSError as error:
        raise Error(
            grpc.StatusCode.UNAVAILABLE,
            f"cannot run {program}: {error.strerror}; install superoffloadd of this release, which brings it, or point "
            "$SUPEROFFLOAD_DAEMON at a superoffloadd that lies beside one",
        ) from error
    if run.returncode != 0:
        code = grpc.StatusCode.INVALID_ARGUMENT if run.returncode == 2 else grpc.StatusCode.UNAVAILABLE
        message = run.stderr.decode(errors="replace").strip().removeprefix("superoffload-plan: ")
        raise Error(code, message or f"{program} ended with status {run.returncode}; is it superoffload-plan?")
    response = plan_pb2.PlanResponse()
    with contextlib.suppress(DecodeError):
        response.ParseFromString(run.stdout)
    if not response.report:
        message = f"{program} gives no PlanResponse; is it superoffload-plan of this release?"
        raise Error(grpc.StatusCode.UNAVAILABLE, message)
    return response


def describe(model: Any, config: Any, name: str = "") -> plan_pb2.ModelDescription:
    """The description of a Hugging Face causal language model; its parameters may be on the meta device."""
    text = config.get_text_config()
    description = plan_pb2.ModelDescription(name=name or config.model_type)
    blocks = _blocks(model, text.num_hidden_layers)
    seen_block = False
    for parameter_name, parameter in model.named_parameters():  # tied ones once
        inside = parameter_name.startswith(blocks)
        seen_block = seen_block or inside
        unit = text.num_hidden_layers + 1 if seen_block else 0
        if inside:
            unit = int(parameter_name.removeprefix(blocks).split(".", 1)[0]) + 1
        dtype = optimizer_pb2.DataType.Value(f"DATA_TYPE_{str(parameter.dtype).removeprefix('torch.').upper()}")
        description.parameters.add(name=parameter_name, shape=parameter.shape, dtype=dtype, unit=unit)
    _set_architecture(description, model, text)
    return description


def _blocks(model: Any, layers: int) -> str:
    """What the names of the blocks' parameters begin with: the largest list of as many modules as there are layers."""
    import torch

    lists = [
        (sum(parameter.numel() for parameter in module.parameters()), name)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == layers
    ]
    if not lists:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{type(model).__name__} has no list of {layers} blocks; describe the model as plan.proto's "
            "ModelDescription in a .textproto file",
        )
    return f"{max(lists)[1]}."


def _first(config: Any, names: tuple[str, ...]) -> int:
    return next((value for name in names if (value := getattr(config, name, None))), 0)


def _heads(config: Any) -> dict[str, Any]:
    """The shape of attention, in the fields of Architecture."""
    heads = config.num_attention_heads
    rank = getattr(config, "kv_lora_rank", None)
    if rank and getattr(config, "qk_nope_head_dim", None):  # latent attention: `head_dim` is a part of a head
        return {
            "query_heads": heads,
            "key_value_heads": heads,
            "head_dimension": config.qk_nope_head_dim + config.qk_rope_head_dim,
            "value_head_dimension": config.v_head_dim,
            "query_latent": config.q_lora_rank or 0,
            "key_value_latent": rank,
        }
    key_value_heads = _first(config, ("num_kv_heads", "num_key_value_heads")) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        key_value_heads = 1  # Falcon's first architecture, which does not read num_kv_heads then
    return {
        "query_heads": heads,
        "key_value_heads": key_value_heads,
        "head_dimension": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }


def _windows(config: Any) -> dict[str, Any]:
    """The window of attention, and the number of layers that have it: all, where a configuration has no layer_types."""
    known = inspect.signature(type(config).__init__).parameters  # others a configuration may have, and no model reads
    window = (getattr(config, "sliding_window", None) or 0) if "sliding_window" in known else 0
    kinds = getattr(config, "layer_types", None) if "layer_types" in known else None
    layers = config.num_hidden_layers if kinds is None else kinds.count("sliding_attention")
    return {"window": window, "windowed_layers": layers} if window and layers else {}


def _set_architecture(description: plan_pb2.ModelDescription, model: Any, config: Any) -> None:
    names = [parameter.name for parameter in description.parameters]
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    experts = _first(config, _EXPERTS)
    feed_forward = experts and getattr(config, "moe_intermediate_size", None)
    feed_forward = feed_forward or _first(config, _FEED_FORWARD)
    learned = (".wpe.weight", ".embed_positions.weight")
    positions = [parameter.shape[0] for parameter in description.parameters if parameter.name.endswith(learned)]
    description.architecture.MergeFrom(
        plan_pb2.Architecture(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            feed_forward=feed_forward or 4 * config.hidden_size,
            vocabulary=embedding.shape[0],
            gated_feed_forward=any(".gate_proj" in name or ".gate_up_proj" in name for name in names),
            experts=experts,
            experts_per_token=_first(config, _EXPERTS_PER_TOKEN),
            tied_embeddings=head is not None and head.weight is embedding,
            shared_experts=(experts and getattr(config, "n_shared_experts", None)) or 0,
            learned_positions=positions[0] if positions else 0,
            **_heads(config),
            **_windows(config),
        )
    )


def describe_config(path: str | os.PathLike, dtype: str = "") -> plan_pb2.ModelDescription:
    """The description of the model that a config.json, or the directory that has one, describes.

    ``dtype``: of its parameters, as torch names it; default: the configuration's, else bfloat16.
    """
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise Error(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"{error.name} reads a Hugging Face configuration and is not installed: pip install 'superoffload[hf]', or "
            "describe the model as plan.proto's ModelDescription in a .textproto file",
        ) from None

    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    try:
        stated = json.loads(path.read_text())
        config = transformers.AutoConfig.for_model(**stated)
    except (OSError, ValueError, TypeError) as error:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT, f"{path} is no configuration of a Hugging Face model: {error}"
        ) from error
    _check_stated(path, stated, config)
    for ours in (config, config.get_text_config()):
        if hasattr(ours, "quantization_config"):
            del ours.quantization_config  # it is trained in full precision
    wanted = getattr(torch, dtype) if dtype else (getattr(config, "dtype", None) or torch.bfloat16)
    wanted = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=wanted)
    except (ValueError, TypeError, ImportError) as error:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT, f"no causal language model can be made of {path}: {error}"
        ) from error
    return describe(model, config, path.parent.name or config.model_type)


def _check_stated(path: pathlib.Path, stated: dict[str, Any], config: Any) -> None:
    text = config.get_text_config()
    known = {**stated, **(stated.get("text_config") or {})}
    missing = [name for name in _STATED if name not in known and text.attribute_map.get(name) not in known]
    if not any(name in known for name in _EXPERTS):
        missing += [name for name in _EXPERTS if name in text.to_dict()]
    if missing:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{path} does not say {', '.join(missing)}; transformers' defaults may be those of another model",
        )


def fits(response: plan_pb2.PlanResponse) -> bool:
    """Whether all ranks have the memory."""
    return all(rank.gpu.fits and rank.host.fits for rank in response.memory)


def _word(enum: Any, number: int) -> str:
    prefix = len(enum.values_by_number[0].name) - len("UNSPECIFIED")
    return enum.values_by_number[number].name[prefix:].lower()


def _parser() -> argparse.ArgumentParser:
    """Its flags are the scalar fields of PlanRequest, as those of superoffloadctl plan are."""
    parser = argparse.ArgumentParser(
        prog="superoffload plan",
        description="What training a model on a machine would take, and how fast it would be; neither is needed. Flags "
        "are the fields of PlanRequest in plan.proto, which describes them.",
        epilog="Exit status: 0; 1 when superoffload-plan cannot be asked, or there is no step to draw; 2 when the "
        "request is wrong; 3 when the answer is that it does not fit, in HBM or in the daemon's budget.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        default="",
        help="a name, a Hugging Face config.json or its directory, or a ModelDescription (.textproto)",
    )
    parser.add_argument("--machine", default="", help="a name, or a MachineDescription (.textproto)")
    parser.add_argument("--timeline", metavar="FILE", help="write two simulated steps: .svg, or .json for Perfetto")
    parser.add_argument("--json", action="store_true", help="print the whole PlanResponse as JSON")
    for name, field in _FIELDS.items():
        if field.message_type is not None or name in ("model_name", "machine_name", "timeline"):
            continue
        kind: dict[str, Any] = {"type": int}
        if field.enum_type is not None:
            kind = {"choices": [_word(field.enum_type, value.number) for value in field.enum_type.values[1:]]}
        elif field.cpp_type == field.CPPTYPE_BOOL:
            kind = {"action": "store_true"}
        elif field.cpp_type == field.CPPTYPE_DOUBLE:
            kind = {"type": float}
        elif field.cpp_type == field.CPPTYPE_STRING:
            kind = {"type": str}
        parser.add_argument(*dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")), dest=name, **kind)
    return parser


def _set_field(request: plan_pb2.PlanRequest, name: str, value: Any) -> None:
    field = _FIELDS[name]
    if field.enum_type is not None:
        value = next(v.number for v in field.enum_type.values[1:] if _word(field.enum_type, v.number) == value)
    try:
        setattr(request, name, value)
    except ValueError as error:
        raise Error(grpc.StatusCode.INVALID_ARGUMENT, f"--{name} is {value}: {error}") from error


def _read(path: str, message: Any) -> None:
    try:
        text_format.Parse(pathlib.Path(path).read_text(), message)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise Error(
            grpc.StatusCode.INVALID_ARGUMENT, f"cannot read {path}: {error} (fields are described in plan.proto)"
        ) from error


def set_machine(request: plan_pb2.PlanRequest, machine: str) -> None:
    """A machine's name, or a MachineDescription in a .textproto file. Raises Error: INVALID_ARGUMENT."""
    if machine.endswith(".textproto") or os.sep in machine:
        _read(machine, request.machine)
    else:
        request.machine_name = machine


def _describe(path: str, dtype: str) -> plan_pb2.ModelDescription:
    """As describe_config; what a configuration's sizes make transformers raise is an Error, too."""
    try:
        return describe_config(path, dtype)
    except Error:
        raise
    except Exception as error:  # a size that is negative or a text ends somewhere in the model's own code
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Error(grpc.StatusCode.INVALID_ARGUMENT, f"no model can be made of {path}: {reason}") from error


def _request(arguments: argparse.Namespace) -> plan_pb2.PlanRequest:
    request = plan_pb2.PlanRequest()
    if arguments.model.endswith(".textproto"):
        _read(arguments.model, request.model)
    elif arguments.model.endswith(".json") or os.sep in arguments.model or os.path.isdir(arguments.model):
        request.model.CopyFrom(_describe(arguments.model, arguments.dtype or ""))
    else:
        request.model_name = arguments.model
    set_machine(request, arguments.machine)
    for name in _FIELDS:
        value = getattr(arguments, name, None)
        if value is not None and value is not False and name not in ("model", "machine", "timeline"):
            _set_field(request, name, value)
    if arguments.timeline is not None:
        ending = pathlib.Path(arguments.timeline).suffix
        if ending not in _TIMELINES:
            raise Error(
                grpc.StatusCode.INVALID_ARGUMENT,
                f'--timeline is "{arguments.timeline}" but must end with .svg or .json',
            )
        request.timeline = _TIMELINES[ending]
    return request


def main(words: list[str]) -> int:
    """The exit status: 1 when superoffload-plan cannot be asked or has no step to draw, 2 when the request is wrong, 3
    when what is planned does not fit.
    """
    arguments = _parser().parse_args(words)
    try:
        response = ask(_request(arguments))
        if response.timeline_file:
            pathlib.Path(arguments.timeline).write_bytes(response.timeline_file)
    except Error as error:
        print(f"superoffload: {error.message}", file=sys.stderr)
        return 2 if error.code == grpc.StatusCode.INVALID_ARGUMENT else 1
    except OSError as error:
        print(f"superoffload: cannot write {arguments.timeline}: {error}", file=sys.stderr)
        return 1
    report = response.report
    drawn = bool(response.timeline_file)
    response.ClearField("report")
    response.ClearField("timeline_file")
    print(json_format.MessageToJson(response, preserving_proto_field_name=True) if arguments.json else report, end="")
    status = 0 if fits(response) else DOES_NOT_FIT
    if arguments.timeline is None or drawn:
        return status
    sys.stdout.flush()
    why = f"{arguments.timeline} is not written, there is no step to draw: {response.performance_unknown}"
    print(f"superoffload: {why}", file=sys.stderr)
    return max(status, 1)
