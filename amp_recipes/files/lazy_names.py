"""Imports the public names of a package when they are first asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package (PEP 562) whose submodules, by name, hold these public names.

    The first name that is asked for brings all of them, in the order of the submodules; a submodule is imported, too.
    """
    public = {name for names in homes.values() for name in names}

    def get(name: str) -> Any:
        if name in public:
            values = vars(sys.modules[package])
            for home, names in homes.items():
                module = importlib.import_module(f"{package}.{home}")
                for each in names:
                    values.setdefault(each, getattr(module, each))
            return values[name]
        submodule = f"{package}.{name}"
        try:
            return importlib.import_module(submodule)
        except ModuleNotFoundError as error:
            if error.name != submodule:
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    return get, lambda: sorted({*vars(sys.modules[package]), *public})
