"""Weights of a Hugging Face model that is on meta, each read from its directory when it is asked for."""

import copy
import dataclasses
import functools
import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import torch

from superoffload._core.error import Error

_OPEN_FILES = 4  # a parameter that is in parts may have them in several
# 32 values of 4 bits and their exponent, as GPT-OSS has its experts.
_MXFP4, _BLOCKS, _SCALES = "mxfp4", "_blocks", "_scales"


def pretrained_weights(model: torch.nn.Module, directory: str | os.PathLike[str]) -> Mapping[str, torch.Tensor]:
    """Returns the values of a model's parameters, by name, as transformers' ``from_pretrained`` loads them.

    Nothing is read before it is asked for, and nothing is kept: for ``GpuOptions(weights=)``, so that a model larger
    than a GPU's memory goes into the daemon's shard by shard, and never exists in this process. Parameters that the
    files have in parts (experts one by one, projections apart) are put together, and those in MXFP4 are made bf16.
    ``model``: on meta, with the dtypes
    that it is to have, as of ``accelerate.init_empty_weights()``.

    Args:
        model: the model, or one with the same names that is not transformers' and is as the files are.
        directory: has safetensors files, as ``save_pretrained`` writes them and ``huggingface_hub.snapshot_download``
            fetches them.

    Raises:
        Error: INVALID_ARGUMENT, for a directory that does not hold such files, or quantized ones.
    """
    return _Pretrained(model, _Files(os.fspath(directory)))


class _Files:
    """Tensors in safetensors files."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._open = functools.lru_cache(maxsize=_OPEN_FILES)(self._open_anew)
        config = _read_json(os.path.join(directory, "config.json")) or {}
        quantization = config.get("quantization_config")
        if quantization is not None and quantization.get("quant_method") != _MXFP4:
            raise _refused(
                f"{directory} holds quantized weights; load them with from_pretrained and a configuration that "
                "dequantizes them, and save_pretrained() them"
            )
        self._file_of = {name: file for file in self._find() for name in list(self._open(file).keys())}
        if not self._file_of:
            raise _refused(
                f"{directory} has no safetensors files; save_pretrained() writes them, and snapshot_download() of "
                "huggingface_hub fetches them"
            )

    def _find(self) -> list[str]:
        """Those that are named as transformers names them, if there are some: others may hold the same otherwise."""
        every = sorted(map(os.path.basename, glob.glob(os.path.join(glob.escape(self._directory), "*.safetensors"))))
        return [file for file in every if file.startswith("model")] or every

    def names(self) -> list[str]:
        """Of values in MXFP4, which are two tensors, the one that they are of."""
        return [name.removesuffix(_BLOCKS) for name in self._file_of if not self._is_scale(name)]

    def _is_scale(self, name: str) -> bool:
        return name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS in self._file_of

    def read(self, name: str) -> torch.Tensor:
        if name + _BLOCKS in self._file_of:
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            values: torch.Tensor = convert_moe_packed_tensors(self._read(name + _BLOCKS), self._read(name + _SCALES))
            return values
        return self._read(name)

    def _read(self, name: str) -> torch.Tensor:
        from safetensors import SafetensorError

        file = self._file_of[name]
        try:
            value: torch.Tensor = self._open(file).get_tensor(name)
            return value
        except SafetensorError as error:
            raise self._unreadable(file, error) from error

    def _open_anew(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open  # only here: training does without it

        try:
            return safe_open(os.path.join(self._directory, file), "pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise self._unreadable(file, error) from error

    def _unreadable(self, file: str, error: Exception) -> Error:
        return _refused(f"{file} of {self._directory} cannot be read: {error}; fetch it again")


@dataclasses.dataclass
class _Source:
    """What parameters are made of."""

    target: str  # the first of them
    converter: Any  # transformers'; None: the only tensor is the parameter
    # In the files, each with the pattern that it matches.
    tensors: list[tuple[str, str]] = dataclasses.field(default_factory=list)


class _Pretrained(Mapping[str, torch.Tensor]):
    def __init__(self, model: torch.nn.Module, files: _Files) -> None:
        self._model, self._files = model, files
        self._sources = self._find_sources()
        self._last: tuple[_Source, dict[str, torch.Tensor]] | None = None  # of several parameters
        self._dtypes: dict[str, torch.dtype] = {}
        self._names: dict[str, str] = {}  # of those that have a source, and which of their names has it
        named = dict(model.named_parameters(remove_duplicate=False))
        with_source = {id(parameter): name for name, parameter in named.items() if name in self._sources}
        for name, parameter in named.items():
            if id(parameter) in with_source:
                self._dtypes[name] = parameter.dtype
                self._names[name] = name if name in self._sources else with_source[id(parameter)]

    def _find_sources(self) -> dict[str, _Source]:
        """By a parameter's name. As transformers' convert_and_load_state_dict_in_model gathers them, unread."""
        conversions = _Conversions(self._model)
        by_target: dict[str, _Source] = {}
        sources: dict[str, _Source] = {}
        for name in conversions.in_order(self._files.names()):
            target, pattern = conversions.target_of(name)
            source = by_target.setdefault(target, _Source(target, conversions.converter(pattern)))
            source.tensors.append((name, pattern or name))
            sources.update(dict.fromkeys(conversions.targets(target, pattern), source))
        return sources

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._names[name]
        source, dtype = self._sources[found], self._dtypes[name]
        if source.converter is None:
            return self._files.read(source.tensors[0][0]).to(dtype)
        if self._last is None or self._last[0] is not source or found not in self._last[1]:
            self._last = source, self._convert(source, dtype)
        value = self._last[1].pop(found)
        if not self._last[1]:
            self._last = None
        return value

    def _convert(self, source: _Source, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(source.converter)
        for tensor, pattern in source.tensors:
            converter.add_tensor(source.target, tensor, pattern, self._files.read(tensor).to(dtype))
        made = converter.convert(source.target, model=self._model, config=getattr(self._model, "config", None))
        return {target: value[0] if isinstance(value, list) else value for target, value in made.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Conversions:
    """What transformers makes of the names in files of a model. Of other models, and older releases: nothing."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._loading: Any = None
        if not hasattr(model, "base_model_prefix"):
            return
        try:
            from transformers import core_model_loading
            from transformers.conversion_mapping import get_model_conversion_mapping
        except ImportError:
            return
        self._loading, self._prefix = core_model_loading, model.base_model_prefix
        self._state = model.state_dict()
        every = get_model_conversion_mapping(model)
        self._renamings = [each for each in every if isinstance(each, core_model_loading.WeightRenaming)]
        self._converters = [each for each in every if isinstance(each, core_model_loading.WeightConverter)]
        self._by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def in_order(self, names: Sequence[str]) -> list[str]:
        return sorted(names) if self._loading is None else sorted(names, key=self._loading.dot_natural_key)

    def target_of(self, name: str) -> tuple[str, str | None]:
        """The parameter that it is of, and the pattern of the conversion that makes it; None: it is the parameter."""
        if self._loading is None:
            return name, None
        renamed = self._rename(name, self._renamings, self._converters)
        if renamed[0] not in self._state and name in self._state:
            return self._rename(name, [], [])
        return renamed

    def _rename(self, name: str, renamings: list[Any], converters: list[Any]) -> tuple[str, str | None]:
        target, pattern = self._loading.rename_source_key(name, renamings, converters, self._prefix, self._state)
        return target, pattern

    def converter(self, pattern: str | None) -> Any:
        return None if pattern is None else self._by_pattern[pattern]

    def targets(self, target: str, pattern: str | None) -> list[str]:
        """All parameters that the conversion makes, of which ``target`` is the first."""
        if pattern is None:
            return [target]
        first, *others = self._by_pattern[pattern].target_patterns
        return [target, *(target.replace(first, other) for other in others)]


def _read_json(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            content: dict[str, Any] = json.load(file)
            return content
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _refused(f"{path} is not JSON: {error}") from error


def _refused(what: str) -> Error:
    return Error(grpc.StatusCode.INVALID_ARGUMENT, what)
