"""Imports the public names of a package when they are first asked for."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` (PEP 562) for a package that imports its public names under `if TYPE_CHECKING:`.

    Checkers of types read those imports. At run time they are made all together, in their order, when the first of the
    names is asked for: torch takes seconds, and the options of a room are read without it. A submodule is imported when
    it is asked for, too.
    """
    homes = _imports_for_checkers(Path(str(sys.modules[package].__file__)))
    public = {name for names in homes.values() for name in names}

    def get(name: str) -> Any:
        if name not in public:
            return _submodule(package, name)
        values = vars(sys.modules[package])
        for home, names in homes.items():
            module = importlib.import_module(home)
            for each in names:
                values.setdefault(each, getattr(module, each))
        return values[name]

    return get, lambda: sorted({*vars(sys.modules[package]), *public})


def from_commands(module: str, name: str) -> Any:
    """A name of a module of `commands`: it imports all other rooms, and none of them imports it.

    So this is the one way to it, for what a script's command line asks for in place of a run.
    """
    return getattr(importlib.import_module(f"amp_recipes.commands.{module}"), name)


def _imports_for_checkers(file: Path) -> dict[str, list[str]]:
    """The names that a file imports under `if TYPE_CHECKING:`, by the module that has them."""
    homes: dict[str, list[str]] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            imports = [node for node in statement.body if isinstance(node, ast.ImportFrom)]
            homes |= {str(node.module): [alias.name for alias in node.names] for node in imports}
    return homes


def _submodule(package: str, name: str) -> Any:
    full_name = f"{package}.{name}"
    try:
        return importlib.import_module(full_name)
    except ModuleNotFoundError as error:
        if error.name != full_name:
            raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}") from None
