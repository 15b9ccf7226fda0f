"""Finds the files of a module without importing it, and decides whether they belong to the recipe."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

_COLLECTION = os.path.realpath(Path(__file__).parents[2] / "collection" / "recipes")


def module_exists(top: str) -> bool:
    """Whether Python has, or would find, a module of that name; nothing is imported."""
    return top in sys.modules or spec_of(top) is not None


def submodule_exists(owner: ModuleType, name: str) -> bool:
    """Whether a package would import a module of that name; nothing is imported."""
    path = getattr(owner, "__path__", None)
    # `torch.classes` shows an object of its own there, as for any name.
    return isinstance(path, Iterable) and importlib.machinery.PathFinder.find_spec(name, path) is not None


def spec_of(module_name: str) -> importlib.machinery.ModuleSpec | None:
    """Return the spec of a module without importing it; its parent packages must be imported."""
    if (module := sys.modules.get(module_name)) is not None:
        return getattr(module, "__spec__", None)
    parent, _, _ = module_name.rpartition(".")
    if parent:
        path = getattr(sys.modules.get(parent), "__path__", None)
        return importlib.machinery.PathFinder.find_spec(module_name, path) if path is not None else None
    # The finder of setuptools imports what it is asked for.
    finders = [finder for finder in sys.meta_path if type(finder).__module__ != "_distutils_hack"]
    found = (finder.find_spec(module_name, None) for finder in finders if hasattr(finder, "find_spec"))
    return next((spec for spec in found if spec is not None), None)


def files_of(module_name: str) -> set[str]:
    """The files that a module's code is in; of a folder without `__init__.py`, the one that it would be in."""
    spec = spec_of(module_name)
    files = {getattr(spec, "origin", None), getattr(sys.modules.get(module_name), "__file__", None)} - {None}
    locations = getattr(spec, "submodule_search_locations", None) or ()
    return files or {os.path.join(location, "__init__.py") for location in locations}


def bare_folder(file: str, above: str) -> str:
    """The first folder below `above`, on the way to a file, that has no `__init__.py` of its own; empty if all have.

    What a program writes, or a person unpacks, below a recipe is thereby no code of the recipe.
    """
    folder = Path(above)
    for part in Path(file).relative_to(above).parts[:-1]:
        folder /= part
        init = folder / "__init__.py"
        if not init.is_file() or init.is_symlink():
            return str(folder.relative_to(above))
    return ""


def comes_along(path: str) -> bool:
    """Whether a file is of the recipes that are installed with the package, which are recipes like any other."""
    return is_below(path, _COLLECTION)


def is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder
