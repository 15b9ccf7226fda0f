"""Reads the code of the package, without running it: who inherits from whom, who sets and reads what, who imports whom.

`amp_recipes/templates`, which is code of recipes, is left out. Objects are told apart by the names of their attributes
alone, and what `setattr` or `vars(...)` sets is not seen: the numbers are for a comparison with an earlier commit.
"""

from __future__ import annotations

import ast
from collections import defaultdict, namedtuple
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "amp_recipes"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "templates" not in path.relative_to(PACKAGE).parts)
TREES = {path: ast.parse(path.read_text()) for path in FILES}


class Measure(NamedTuple):
    """One row of the table, and what it counts."""

    name: str
    value: str
    counted: list[str]


def shown(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def listed(places: dict[str, set[str]]) -> list[str]:
    return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(places.items())]


# ------------------------------------------------------------------ classes


class Class(NamedTuple):
    """A class of the package, with its bases as they are written."""

    path: Path
    name: str
    node: ast.ClassDef

    def __str__(self) -> str:
        return f"{self.name} ({shown(self.path)})"


def for_checkers(tree: ast.AST) -> Iterator[ast.AST]:
    """What stands under `if TYPE_CHECKING:`, and so is not there when the code runs."""
    for branch in ast.walk(tree):
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test):
            for statement in branch.body:
                yield from ast.walk(statement)


CLASSES = [
    Class(path, node.name, node)
    for path, tree in TREES.items()
    for node in {*ast.walk(tree)} - {*for_checkers(tree)}
    if isinstance(node, ast.ClassDef)
]


def base_names(found: Class) -> list[str]:
    """The last part of each base's name, without what stands in brackets after it."""
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in found.node.bases]
    return [ast.unparse(base).split(".")[-1] for base in bases]


@cache
def modules_imported(path: Path) -> dict[str, str]:
    """The names that a file imports when it runs, each with the module that it comes from."""
    types_only = [*for_checkers(TREES[path])]
    found = {}
    for node in ast.walk(TREES[path]):
        if node not in types_only and isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                module = node.module if isinstance(node, ast.ImportFrom) else alias.name
                found[alias.asname or alias.name.split(".")[0]] = module or ""
    return found


@cache
def package_bases(found: Class) -> list[Class]:
    """The classes of the package that a class inherits from; Protocols and exceptions are left out."""
    bases = []
    for name in base_names(found):
        module = modules_imported(found.path).get(name, "")
        for other in CLASSES:
            dotted = ".".join(other.path.relative_to(REPOSITORY).with_suffix("").parts)
            here = other.path == found.path and other.node is not found.node
            if other.name == name and (here or (module.startswith("amp_recipes") and dotted.startswith(module))):
                bases.append(other)
    return [base for base in bases if "Protocol" not in base_names(base) and not is_exception(base)]


def is_exception(found: Class) -> bool:
    """Whether a base is an exception of Python's, or has the name of one."""
    return any(
        name.endswith(("Error", "Exception")) or name in ("SystemExit", "KeyboardInterrupt")
        for name in base_names(found)
    )


@cache
def chain_of(found: Class) -> tuple[Class, ...]:
    """The class and the classes of the package above it, along the longest way."""
    return (found, *max(map(chain_of, package_bases(found)), key=len, default=()))


def measure_classes() -> Iterator[Measure]:
    longest = max(map(chain_of, CLASSES), key=len)
    inheriting = [" <- ".join(map(str, chain_of(found))) for found in CLASSES if package_bases(found)]
    yield Measure("longest chain of package classes", str(len(longest)), [" <- ".join(c.name for c in longest)])
    yield Measure("classes of the package that inherit from one of the package", str(len(inheriting)), inheriting)


# ------------------------------------------------------------------ attributes


def set_on_self(found: Class) -> set[str]:
    """The attributes that the methods of a class set or delete on `self`."""
    return {node.attr for node in attributes(found.node) if is_self(node.value) and not isinstance(node.ctx, ast.Load)}


def declared_in(found: Class) -> set[str]:
    """The fields of a dataclass or NamedTuple, and other names that the class body annotates."""
    statements = [node for node in found.node.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id for node in statements if isinstance(node.target, ast.Name)}


@cache
def names_of_others() -> frozenset[str]:
    """Attributes of torch's and Python's objects, which a class of the package may have as well."""
    examples = [torch.zeros(1), nn.Module(), torch.UntypedStorage(), namedtuple("Row", "x")]
    return frozenset(name for example in examples for name in dir(example))


def measure_attributes() -> Iterator[Measure]:
    brain = next(found for found in CLASSES if found.name == "Brain")
    setters: dict[str, set[str]] = defaultdict(set)
    owners: dict[str, set[str]] = defaultdict(set)
    for found in CLASSES:
        for name in set_on_self(found):
            owners[name].add(shown(found.path))
            if found in chain_of(brain):
                setters[name].add(shown(found.path))
        for name in declared_in(found):
            owners[name].add(shown(found.path))
    several = {name: places for name, places in setters.items() if len(places) > 1}
    yield Measure("attributes of a Brain that several files set on `self`", str(len(several)), listed(several))
    outside: dict[str, set[str]] = defaultdict(set)
    for path, tree in TREES.items():
        for node in attributes(tree):
            if is_self(node.value) or not isinstance(node.ctx, ast.Store) or node.attr in names_of_others():
                continue
            if node.attr in owners and shown(path) not in owners[node.attr]:
                outside[f"{ast.unparse(node)} (of {', '.join(sorted(owners[node.attr]))})"].add(shown(path))
    yield Measure("attributes that a file sets on an object of another file", str(len(outside)), listed(outside))


def defined_in(tree: ast.Module) -> set[str]:
    """The private names that a file defines: functions, classes, variables of modules and classes, attributes."""
    found = {node.attr for node in attributes(tree) if is_self(node.value) and isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, (ast.ClassDef, ast.Module)):
            stored = [name for statement in node.body for name in ast.walk(statement) if isinstance(name, ast.Name)]
            found |= {name.id for name in stored if isinstance(name.ctx, ast.Store)}
    return {name for name in found if is_private(name)}


def private_uses(path: Path) -> Iterator[tuple[str, str]]:
    """Each private name that a file uses of something else than `self`, with the expression."""
    imported = modules_imported(path)
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute) and not is_self(node.value):
            root = ast.unparse(node).split(".")[0]
            if imported.get(root, "amp_recipes").startswith("amp_recipes") and "super()" not in root:
                yield node.attr, f"{ast.unparse(node)}, line {node.lineno}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "delattr", "hasattr"):
            for name in node.args[1:2]:
                if isinstance(name, ast.Constant):
                    yield name.value, f"{ast.unparse(node)}, line {node.lineno}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("amp_recipes"):
            for alias in node.names:
                yield alias.name, f"{ast.unparse(node)}, line {node.lineno}"


def measure_private_names() -> Iterator[Measure]:
    homes: dict[str, set[Path]] = defaultdict(set)
    for path, tree in TREES.items():
        for name in defined_in(tree) - names_of_others():
            homes[name].add(path)
    used: dict[str, set[str]] = defaultdict(set)
    for path in FILES:
        for name, expression in private_uses(path):
            if name in homes and path not in homes[name]:
                used[name].add(f"{shown(path)} ({expression})")
    uses = sum(map(len, used.values()))
    yield Measure("private names of another file that are used (places)", f"{len(used)} ({uses})", listed(used))


# ------------------------------------------------------------------ rooms


def measure_rooms() -> Iterator[Measure]:
    """Rooms are what stands directly in the package; an arrow is an import; a floor imports from lower floors alone."""
    arrows: dict[str, set[str]] = {shown(path).split("/")[0].removesuffix(".py"): set() for path in FILES}
    for path, tree in TREES.items():
        room = shown(path).split("/")[0].removesuffix(".py")
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                names = [f"{module}{alias.name}".split(".") for alias in node.names]
                arrows[room] |= {name[1] for name in names if name[0] == "amp_recipes" and name[1] in arrows} - {room}
    left, floors = dict(arrows), []
    while lowest := sorted(room for room, imports in left.items() if not imports & left.keys()):
        floors.append(" ".join(lowest))
        left = {room: imports for room, imports in left.items() if room not in lowest}
    circles = f"; {len(left)} rooms in or above a circle" if left else ""
    count = sum(map(len, arrows.values()))
    yield Measure("rooms, floors, arrows between rooms", f"{len(arrows)}, {len(floors)}, {count}{circles}", floors)
