"""superoffload.torch is made of parts: objects that are given what they need, in few floors of imports.

One class is a torch.optim.Optimizer; what it does is done by parts that it holds. No file reads a private name that a
class or a module of another file defines. layers.toml says which folder may know which.
"""

import ast
import dataclasses
import graphlib
import pathlib
import tomllib
from collections.abc import Callable, Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "client/python/superoffload"
FOLDER = f"{PACKAGE}/torch"
TABLE = tomllib.loads((pathlib.Path(__file__).parent / "layers.toml").read_text())["torch"]
FLOORS = 6  # of files that import one another; a package's __init__.py is its face, and no floor
FACE = "__init__.py"


def read(root: pathlib.Path) -> dict[str, ast.Module]:
    """The files of the folder, by path in it."""
    top = root / FOLDER
    return {path.relative_to(top).as_posix(): ast.parse(path.read_text()) for path in sorted(top.rglob("*.py"))}


def imported(tree: ast.Module, names: set[str]) -> set[str]:
    """The files among ``names`` that a module imports, wherever in it; those that only type checkers read as well."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    paths = {f"{module.removeprefix('superoffload.torch.').replace('.', '/')}.py" for module in modules}
    return paths & names


def itself(name: str) -> str:
    return name


def floors(trees: dict[str, ast.Module], room: Callable[[str], str] = itself) -> dict[str, int]:
    """How many files are below each, itself included; raises CycleError. ``room``: what counts as one, by file."""
    names = {name for name in trees if not name.endswith(FACE)}
    below: dict[str, set[str]] = {}
    for name in names:
        below.setdefault(room(name), set()).update(map(room, imported(trees[name], names)))
    below = {name: others - {name} for name, others in below.items()}
    result: dict[str, int] = {}
    for name in graphlib.TopologicalSorter(below).static_order():
        result[name] = 1 + max((result[other] for other in below[name]), default=0)
    return result


def row_of(name: str, table: dict[str, list[str]]) -> str:
    """The longest row of the table that holds a file; "." holds those of the folder itself."""
    return max((row for row in table if f"{name}/".startswith(row + "/")), key=len, default=".")


def folder_faults(trees: dict[str, ast.Module], table: dict[str, list[str]]) -> list[tuple[str, str]]:
    names = {name for name in trees if not name.endswith(FACE)}
    return [
        (name, other)
        for name in sorted(names)
        for other in sorted(imported(trees[name], names))
        if row_of(other, table) not in (row_of(name, table), *table[row_of(name, table)])
    ]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_by(node: ast.ClassDef) -> set[str]:
    """Private names that a class defines: methods, attributes with a value, and what it sets of itself."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            found.add(inner.name)
        elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and of_itself(inner):
            found.add(inner.attr)
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            found |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and (statement.value is not None or is_dataclass(node)):
            found |= {statement.target.id} if isinstance(statement.target, ast.Name) else set()
    return set(filter(is_private, found))


def is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def of_itself(node: ast.Attribute) -> bool:
    """Whether it is an attribute of ``self``, ``cls`` or ``super()``."""
    value = node.value
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def defined_in(tree: ast.Module) -> set[str]:
    """Private names of a file's classes and of itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found |= defined_by(node)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return set(filter(is_private, found))


@dataclasses.dataclass(frozen=True)
class Use:
    """A file reads a name of another one's."""

    name: str
    line: int
    attribute: str


def foreign_names(name: str, tree: ast.Module, everybodys: set[str]) -> Iterator[Use]:
    """Private names that a file uses and does not define; ``everybodys``: those of all of our own files."""
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    own = defined_in(tree)

    def known_to(node: ast.ClassDef) -> set[str]:
        bases = [classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes]
        return defined_by(node).union(*map(known_to, bases))

    seen = set()
    for node in classes.values():
        known = known_to(node)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and is_private(inner.attr) and of_itself(inner):
                seen.add(inner)
                if inner.attr in everybodys and inner.attr not in known:
                    yield Use(name, inner.lineno, inner.attr)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Attribute) and is_private(inner.attr) and inner not in seen:
            if inner.attr in everybodys and inner.attr not in own:
                yield Use(name, inner.lineno, inner.attr)
        elif isinstance(inner, ast.ImportFrom) and (inner.module or "").startswith("superoffload.torch"):
            yield from (Use(name, inner.lineno, alias.name) for alias in inner.names if is_private(alias.name))


def private_uses(root: pathlib.Path) -> list[Use]:
    everybodys = {
        private for path in (root / PACKAGE).rglob("*.py") for private in defined_in(ast.parse(path.read_text()))
    }
    return [use for name, tree in read(root).items() for use in foreign_names(name, tree, everybodys)]


def optimizers(trees: dict[str, ast.Module]) -> tuple[list[str], dict[str, ast.ClassDef]]:
    """The classes whose base is torch.optim's, and all that derive from them, by ``file:class``."""
    classes = {f"{name}:{node.name}": node for name, tree in trees.items() for node in ast.walk(tree) if is_class(node)}
    direct = [key for key, node in classes.items() if "torch.optim.Optimizer" in map(ast.unparse, node.bases)]
    found: dict[str, ast.ClassDef] = {key: classes[key] for key in direct}
    while True:
        bases = {node.name for node in found.values()}
        more = {
            key: node
            for key, node in classes.items()
            if key not in found and bases & {ast.unparse(base) for base in node.bases}
        }
        if not more:
            return direct, found
        found |= more


def is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def test_one_class_is_an_optimizer_of_torch_and_those_below_it_only_begin_it():
    direct, found = optimizers(read(ROOT))
    assert direct == ["optimizer.py:Optimizer"]
    below = {key: node for key, node in found.items() if key not in direct}
    own = {"adam.py:Adam", "adam.py:AdamW", "lion.py:Lion"}
    assert set(below) == own | {f"{key}8bit" for key in own}
    for key, node in below.items():
        methods = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)]
        assert methods == (["__init__"] if key in own else []), key
    assert [ast.unparse(base) for base in found["optimizer.py:Optimizer"].bases] == ["torch.optim.Optimizer"]


def test_no_file_uses_a_private_name_of_another():
    found = private_uses(ROOT)
    assert not found, "\n".join(f"{use.name}:{use.line}: {use.attribute}" for use in found)


@pytest.mark.parametrize("room", [itself, lambda name: name.split("/")[0]], ids=["files", "folders"])
def test_imports_have_few_floors_and_no_circle(room):
    found = floors(read(ROOT), room)
    assert max(found.values()) <= FLOORS, {name: floor for name, floor in found.items() if floor > FLOORS}


def test_folders_know_only_what_they_may():
    assert not folder_faults(read(ROOT), TABLE)


def plant(root: pathlib.Path, files: dict[str, str]) -> dict[str, ast.Module]:
    for name, text in files.items():
        path = root / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read(root)


def test_planted_uses_of_private_names_are_found(tmp_path):
    plant(
        tmp_path,
        {
            "base.py": "class Base:\n    def __init__(self):\n        self._x = self.y = 0\n    def _do(self): ...\n",
            "mixed.py": "class Mixed(Base):\n    _x: int\n    def use(self):\n        self._x()\n",
            "above.py": "class Above(Base):\n    def use(self):\n        super()._do()\n        self.y\n",
            "other.py": "def use(base):\n    base._do()\n    base._version\n",
            "own.py": "class Own:\n    def __init__(self, own):\n        self._x = own._x\n",
            "imports.py": "from superoffload.torch.base import _private, public\n",
        },
    )
    assert [(use.name, use.attribute) for use in private_uses(tmp_path)] == [
        ("above.py", "_do"),
        ("imports.py", "_private"),
        ("mixed.py", "_x"),
        ("other.py", "_do"),
    ]


def test_planted_mixins_are_found(tmp_path):
    trees = plant(
        tmp_path,
        {
            "saving.py": "class Saving(torch.optim.Optimizer): ...\n",
            "optimizer.py": "class Optimizer(Saving): ...\n",
            "adam.py": "class Adam(Optimizer): ...\n",
        },
    )
    direct, found = optimizers(trees)
    assert direct == ["saving.py:Saving"]
    assert set(found) == {"saving.py:Saving", "optimizer.py:Optimizer", "adam.py:Adam"}


def test_planted_imports_are_found(tmp_path):
    trees = plant(
        tmp_path,
        {
            "__init__.py": "from superoffload.torch import a\n",
            "a.py": "def late():\n    from superoffload.torch.gpu import live\n",
            "gpu/live.py": "from superoffload.torch.ranks.shards import local\nimport superoffload.torch.gpu.memory\n",
            "gpu/memory.py": "",
            "ranks/shards.py": "from superoffload.torch.gpu import memory\n",
        },
    )
    assert floors(trees) == {"gpu/memory.py": 1, "ranks/shards.py": 2, "gpu/live.py": 3, "a.py": 4}
    assert folder_faults(trees, {".": ["gpu"], "gpu": ["ranks"], "ranks": []}) == [("ranks/shards.py", "gpu/memory.py")]
    with pytest.raises(graphlib.CycleError):
        floors(trees, lambda name: name.split("/")[0])
