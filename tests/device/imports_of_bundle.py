"""Imports what is in an unpacked bundle with a Python that has nothing else, and refuses a bundle that lacks something.

Usage: PYTHON imports_of_bundle.py FOLDER. What the machine brings (PyTorch, JAX and their like) may be missing. So what
a module imports is looked up as well, also what it imports inside of functions.
"""

import ast
import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator

MACHINES = {
    "torch",
    "jax",
    "jaxlib",
    "numpy",
    "transformers",
    "torchao",
    "deepspeed",
    "safetensors",
    "accelerate",
    "yaml",
    "tqdm",
    "datasets",
    "peft",
    "matplotlib",
    "axolotl",
    "pydantic",
    "huggingface_hub",
}
HANDLERS = (("step", "cpu"), ("publish", "cuda"))  # that XLA calls; a library built without XLA's headers has none


def modules(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    for root, package in ((folder / "python", "superoffload"), (folder, "tests")):
        for path in sorted((root / package).rglob("*.py")):
            yield ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), path


def missing_when_imported(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in MACHINES:
            return f"{name} needs {error.name}"
    except Exception as error:
        return f"{name} cannot be imported: {error!r}"
    return None


def named_imports(path: pathlib.Path) -> Iterator[tuple[str, list[str]]]:
    """Modules, and what is taken from each."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, [alias.name for alias in node.names]


def missing_when_read(name: str, path: pathlib.Path, own: dict[str, pathlib.Path]) -> Iterator[str]:
    for module, taken in named_imports(path):
        top = module.partition(".")[0]
        if top in MACHINES or top in sys.stdlib_module_names:
            continue
        if top not in ("superoffload", "tests"):
            if importlib.util.find_spec(top) is None:
                yield f"{name} needs {module}"
        elif module in own:
            if own[module].name == "__init__.py":
                text = own[module].read_text()
                lacks = [word for word in taken if f"{module}.{word}" not in own and word not in text]
                yield from (f"{name} needs {module}.{word}" for word in lacks)
        elif not any(other.startswith(module + ".") for other in own):
            yield f"{name} needs {module}"


def missing_handlers(folder: pathlib.Path) -> Iterator[str]:
    import ctypes

    os.environ["SUPEROFFLOAD_LIBRARY"] = str(folder / "lib" / "libsuperoffload.so.0")
    from superoffload._core import library

    for name, platform in HANDLERS:
        try:
            library.call("xla_handler", name.encode(), platform.encode(), ctypes.byref(ctypes.c_void_p()))
        except Exception as error:
            yield f"the library has no handlers for JAX: {error}"
            return


def main(folder: pathlib.Path) -> int:
    sys.path[:0] = [str(folder), str(folder / "python"), str(folder / "dry")]
    os.environ["SUPEROFFLOAD_BUILD"] = str(folder)
    own = dict(modules(folder))
    found = [missing_when_imported(name) for name in own if not name.endswith("__main__")]
    for name, path in own.items():
        found += missing_when_read(name, path, own)
    if not any(found):
        found += missing_handlers(folder)
    refusals = list(dict.fromkeys(text for text in found if text))
    for text in refusals:
        print(f"refused: {text}", file=sys.stderr)
    return 1 if refusals else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
