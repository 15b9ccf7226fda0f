"""Which objects a YAML may name: what the recipe's own folders define, positive lists, and what the user trusts.

What counts is the object that a name leads to, not the name: `data.os.system`, a recipe's `from os import system` and
an inherited `Module.apply` are refused. No module is imported before it is known to be allowed.
"""

from __future__ import annotations

import builtins
import collections
import functools
import importlib
import importlib.machinery
import inspect
import os
import re
import sys
import sysconfig
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from amp_recipes.config.run_options import did_you_mean
from amp_recipes.config.trusted_names import (
    AMP_RECIPES,
    STANDARD,
    VALUE_TYPES,
    amp_recipes_objects,
    key_of,
    listed_keys,
    parents,
    standard_objects,
    torch_objects,
    walkable_modules,
)
from amp_recipes.errors import ConfigError

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_LISTED_PACKAGES = frozenset({"amp_recipes", "torch"})  # judged by their lists even where they lie in a recipe's folder
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD_LIBRARY = tuple({os.path.realpath(sysconfig.get_paths()[key]) for key in ("stdlib", "platstdlib")})
_NAME_CHARACTERS = 500
_MISSING = object()


class NotTrusted(ConfigError):
    """A YAML names something that it may not use."""


class NotFound(ConfigError):
    """A YAML names something that does not exist, or that cannot be imported."""


class Trust:
    """What one load may name.

    packages: names beside the defaults: a package with all below it (`sklearn`), a module, or one object
        (`sklearn.svm.SVC`); an entry that has a `/` or begins with a `.` is a folder for `!include:`.
    recipe_folders: folders whose Python files are the recipe's own, but for installed ones (in `site-packages`).
    Raises ConfigError for an entry that is neither a dotted name nor a folder.
    """

    def __init__(self, packages: Iterable[str] = (), recipe_folders: Iterable[str | Path] = ()) -> None:
        if isinstance(packages, str) or not isinstance(packages, Iterable):
            raise ConfigError(f'trust is {packages!r}, but must be a list of names, such as trust=("sklearn",).')
        names, folders = [], []
        for entry in packages:
            if not isinstance(entry, str) or not entry:
                raise ConfigError(f"trust must hold names of packages, modules or folders, but has {entry!r}.")
            if "/" in entry or entry.startswith("."):
                folders.append(_existing_folder(entry))
            else:
                _parts_of(entry)
                names += [entry, entry.removeprefix("builtins.")]
        self.folders: tuple[str, ...] = tuple(folders)
        self._names = frozenset(names)
        self._recipe_folders = tuple(os.path.realpath(folder) for folder in recipe_folders)
        self._recipe_modules: dict[str, bool] = {}

    def locate(self, name: str) -> Any:
        """The object that a dotted name leads to. Raises NotTrusted or NotFound."""
        parts = _parts_of(name)
        top = parts[0]
        if name in standard_objects() and not (len(parts) == 1 and _module_exists(name)):
            return standard_objects()[name]
        if not _module_exists(top) and hasattr(builtins, top):  # else Python would import the file `max.py`, say
            value: Any = self._judged(getattr(builtins, top), top, "builtins")
        else:
            value = self._entered(top, name)
        module = top
        for depth in range(2, len(parts) + 1):
            walked = ".".join(parts[:depth])
            value = self._step(value, parts[depth - 1], walked, name)
            if isinstance(value, ModuleType):
                module = walked
            else:
                self._judged(value, walked, module)
        return value

    def module(self, name: str) -> ModuleType:
        """The module of that name. Raises NotTrusted or NotFound, also where the name leads to something else."""
        found = self.locate(name)
        if not isinstance(found, ModuleType):
            raise NotFound(f"{name} is no module, but {_description(found)}.")
        return found

    def attribute(self, owner: Any, name: str) -> Any:
        """`owner.name`, if that is data or something that a YAML may name. Raises NotTrusted or NotFound."""
        _parts_of(name)
        what = f"{owner.__name__ if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner).__name__}.{name}"
        if "." in name or name == "__main__":
            raise NotFound(f"{name!r} is no attribute: expected one name without dots.")
        if isinstance(owner, ModuleType):
            return self._attribute_of_module(owner, name, what)
        if problem := self._problem(owner, None, of_an_object=True):
            raise _not_trusted(what, *problem)
        try:
            value = getattr(owner, name)
        except AttributeError as error:
            known = [known for known in dir(owner) if not known.startswith("_")]
            hint = did_you_mean(name, known)
            raise NotFound(f"{_description(owner)} has no attribute {name!r}.{hint}") from error
        if problem := self._problem(value, None, of_an_object=True):
            raise _not_trusted(what, *problem)
        return value

    def _attribute_of_module(self, owner: ModuleType, name: str, what: str) -> Any:
        if sys.modules.get(owner.__name__) is not owner:
            raise _not_trusted(what, f"{owner.__name__} is not a module that can be named", owner.__name__)
        value = self.locate(f"{owner.__name__}.{name}")
        if isinstance(value, ModuleType):
            raise NotTrusted(f"{what} is a module, and a reference does not go from one module to another.")
        return value

    def _entered(self, top: str, wanted: str) -> ModuleType:
        """The module that a name begins with, imported if a YAML may use it."""
        if not _module_exists(top) and not self._is_named(top):
            raise NotFound(f"{wanted}: there is no module {top}.{self._near_top(wanted)}")
        module, _, name = wanted.rpartition(".")
        if module in STANDARD and not hasattr(sys.modules.get(module), name):
            near = did_you_mean(name, STANDARD[module].split(), f"{module}.")
            raise NotFound(f"{wanted}: {module} has no {name!r}.{near}")
        return self._imported(top, wanted)

    def _step(self, owner: Any, part: str, walked: str, wanted: str) -> Any:
        """What `part` is in `owner`, one step of a walk; a module must be what its name says, and allowed."""
        if not isinstance(owner, ModuleType):
            value = getattr(owner, part, _MISSING)
        elif walked not in sys.modules and _submodule_exists(owner, walked):
            self._imported(walked, wanted)
            value = getattr(owner, part, _MISSING)
        elif walked.partition(".")[0] in _LISTED_PACKAGES and not self._is_named(walked):
            value = vars(owner).get(part, _MISSING)  # torch imports what it is asked for and has not yet
        else:
            value = getattr(owner, part, _MISSING)
        if value is _MISSING:
            place, _, _ = walked.rpartition(".")
            raise NotFound(f"{wanted}: {place} has no {part!r}.{self._near_member(owner, part, walked)}")
        if isinstance(value, ModuleType):
            if value.__name__ != walked and sys.modules.get(walked) is not value:  # os.path is posixpath
                own = f"{value.__name__}{wanted.removeprefix(walked)}"
                allow = "" if own in {*torch_objects(), *standard_objects()} else own
                raise _not_trusted(wanted, f"{walked} is the module {value.__name__}; its own name is {own}", allow)
            self._check_module(walked, wanted)
        return value

    def _imported(self, module_name: str, wanted: str) -> ModuleType:
        self._check_module(module_name, wanted)
        try:
            importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise NotFound(f"{wanted}: the module {module_name} cannot be imported: {reason}") from error
        module = sys.modules[module_name]
        if not isinstance(module, ModuleType):
            raise _not_trusted(wanted, f"{module_name} puts something else in its place when it is imported", "")
        self._recipe_modules.pop(module_name, None)
        self._check_module(module_name, wanted)
        return module

    def _check_module(self, module_name: str, wanted: str) -> None:
        """Raise NotTrusted unless a YAML may go through this module, or import it, to reach `wanted`."""
        named = self._is_named(module_name) or (self._is_named(wanted) and module_name in parents(self._names))
        if named or module_name in walkable_modules() or self._is_recipe(module_name):
            return
        raise _not_trusted(wanted, "", wanted)

    def _judged(self, value: Any, walked: str, module: str) -> Any:
        """`value`, which a walk found in `module`. Raises NotTrusted."""
        if walked.removeprefix("builtins.") not in self._names and (problem := self._problem(value, module)):
            reason, home = problem
            same_package = walked.partition(".")[0] in (walked, home.partition(".")[0])
            by_itself = same_package or (_is_of_lists(home) and "._" in f".{home}")  # a private name cannot be given
            raise _not_trusted(walked, "" if reason == f"it is {walked}" else reason, walked if by_itself else home)
        return value

    def _problem(self, value: Any, module: str | None, of_an_object: bool = False) -> tuple[str, str] | None:
        """Why a YAML may not use a value, and the full name of what it is; None if it may.

        module: where a walk found it, which decides about a C function that does not know its home.
        of_an_object: it is an attribute of an allowed object: then instances of any class will do, as long as they are
            not callable and not of the interpreter's own kinds, such as frames, which lead to everything.
        """
        pending, seen = [value], set()
        while pending:
            item = pending.pop()
            kind = type(item)
            if kind in _PLAIN or id(item) in seen:
                continue
            seen.add(id(item))
            pending += _held_by(item)
            if kind in (dict, *_CONTAINERS) or issubclass(kind, VALUE_TYPES):  # not isinstance: `__class__` can lie
                continue
            subject = _subject(item)
            home, qualified = _home(subject)
            is_instance = subject is kind
            if is_instance and of_an_object and _is_harmless(item, home):
                continue
            if not self._is_allowed(subject, home, qualified, module):
                return f"it is {'an instance of ' if is_instance else ''}{qualified}", qualified
        return None

    def _is_allowed(self, subject: Any, home: str | None, qualified: str, module: str | None) -> bool:
        """Whether a class or function may be used: it is on a list, trusted by name, or the recipe's own."""
        if key_of(subject) in listed_keys():
            return True
        is_shown = module is not None and self._is_named(module)
        if home is None or subject is np.ufunc:
            return is_shown
        # Python's own modules show functions of its C modules: `os.system` lives in `posix`.
        if is_shown and {module.partition(".")[0], home.partition(".")[0]} <= sys.stdlib_module_names:
            return True
        if home.startswith("amp_recipes.") and key_of(subject) in map(key_of, amp_recipes_objects().values()):
            return True
        return self._is_named(qualified) or self._is_recipe(home)

    def _is_named(self, name: str) -> bool:
        """Whether the user trusts this name, or a package or module above it."""
        return not self._names.isdisjoint({name, name.removeprefix("builtins."), *parents([name])})

    def _is_recipe(self, module_name: str) -> bool:
        """Whether a module's file lies in one of the recipe's folders."""
        if module_name not in self._recipe_modules:
            self._recipe_modules[module_name] = self._lies_in_recipe(module_name)
        return self._recipe_modules[module_name]

    def _lies_in_recipe(self, module_name: str) -> bool:
        is_name = all(map(_IDENTIFIER.fullmatch, module_name.split(".")))
        if not is_name or module_name.partition(".")[0] in _LISTED_PACKAGES:
            return False
        module = sys.modules.get(module_name)
        if module_name == "__main__":
            spec = getattr(module, "__spec__", None)
            if spec is not None and spec.name.partition(".")[0] in _LISTED_PACKAGES:
                return False
            file = getattr(module, "__file__", None)
            return file is None or self._is_recipe_file(file)  # without a file, a person types it
        spec = _spec_of(module_name)
        if spec is not None and spec.origin is not None and not spec.has_location:
            return False  # of the interpreter itself: its origin is `built-in` or `frozen`, which is no file
        files = {getattr(spec, "origin", None), getattr(module, "__file__", None)} - {None}
        if files:
            return all(self._is_recipe_file(file) for file in files)
        # A folder without __init__.py: it holds no code itself.
        locations = getattr(spec, "submodule_search_locations", None) or ()
        return any(self._is_recipe_file(location) for location in locations)

    def _is_recipe_file(self, file: str) -> bool:
        real = os.path.realpath(file)
        is_installed = not _INSTALLED.isdisjoint(Path(real).parts)
        if is_installed or not os.path.isabs(file) or any(_is_below(real, folder) for folder in _STANDARD_LIBRARY):
            return False
        return any(_is_below(real, folder) for folder in self._recipe_folders)

    def _near_top(self, wanted: str) -> str:
        """The nearest of the names that a YAML may begin with, and of the listed objects with the same last part."""
        top, leaf = wanted.partition(".")[0], wanted.rpartition(".")[2]
        if same := [name for name in _listed_names() if name.rpartition(".")[2].lower() == leaf.lower()]:
            return f" Did you mean {min(same, key=len)}?"
        folders = [Path(folder) for folder in self._recipe_folders if os.path.isdir(folder)]
        files = [path for folder in folders for path in folder.iterdir()]
        own = {path.stem for path in files if path.suffix == ".py" or (path / "__init__.py").is_file()}
        return did_you_mean(top, own | _LISTED_PACKAGES | {name.partition(".")[0] for name in self._names})

    def _near_member(self, owner: Any, part: str, walked: str) -> str:
        """The nearest name that a YAML may use in `owner`, or the same name in another of torch's modules."""
        place = walked.rpartition(".")[0]
        below = [name.removeprefix(f"{place}.") for name in _listed_names() if name.startswith(f"{place}.")]
        known = {name.partition(".")[0] for name in below}
        if not isinstance(owner, ModuleType):
            known |= {name for name in dir(owner) if not name.startswith("_")}
        elif place.partition(".")[0] not in _LISTED_PACKAGES or self._is_named(place):
            public = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
            known |= {name for name, value in public.items() if not self._problem(value, place)}
        if same := [name for name in known if name.lower() == part.lower()]:
            return f" Did you mean {place}.{same[0]}?"
        if near := did_you_mean(part, known, f"{place}."):
            return near
        elsewhere = [name for name in _listed_names() if name.rpartition(".")[2] == part]
        return f" Did you mean {min(elsewhere, key=len)}?" if elsewhere else ""


def _parts_of(name: str) -> list[str]:
    """The parts of a dotted name. Raises NotFound for one that no YAML may write."""
    if len(name) > _NAME_CHARACTERS:
        raise NotFound(f"{name[:40]!r}... is longer than {_NAME_CHARACTERS} characters: no dotted name.")
    for character in name:
        if not character.isascii():
            words = unicodedata.name(character, f"U+{ord(character):04X}")
            raise NotFound(f"{name!r} has the character {character!r} ({words}), which is not ASCII.")
    parts = name.split(".")
    for part in parts:
        if not _IDENTIFIER.fullmatch(part):
            raise NotFound(f"{name!r} is no dotted name of letters, digits and underscores.")
    for depth, part in enumerate(parts):
        if part.startswith("_") and (depth or part != "__main__"):
            raise NotTrusted(f"{name!r}: {part!r} begins with an underscore, which makes it private to Python code.")
    return parts


def _existing_folder(entry: str) -> str:
    real = os.path.realpath(os.path.expanduser(entry))
    if not os.path.isdir(real):
        raise ConfigError(f"trust names the folder {entry!r}, which does not exist.")
    return real


def _not_trusted(wanted: str, reason: str, name: str) -> NotTrusted:
    """The error with what, why, and how to allow it: by the name of the object, or of the package that it is in."""
    why = reason or "of torch, amp_recipes and Python, a YAML may name only what can do no harm; of others, nothing"
    entry = _suggestion(name)
    allow = f' To allow it: trust=("{entry}",) in load_hparams, or --trust {entry}.' if entry else ""
    return NotTrusted(f"{wanted} is not trusted: {why}.{allow}")


def _suggestion(name: str) -> str:
    """What to trust for a name: of Python and torch the one object, of anything else the package."""
    parts = name.split(".")
    public = parts[: next((depth for depth, part in enumerate(parts) if part.startswith("_")), len(parts))]
    builtin = len(parts) == 1 and hasattr(builtins, name)
    return ".".join(public if builtin or _is_of_lists(name) else public[:1])


def _is_of_lists(name: str) -> bool:
    """Whether a name is of Python, torch or amp_recipes, of which only single objects are trusted."""
    top = name.partition(".")[0]
    return top in _LISTED_PACKAGES or top in sys.stdlib_module_names


def _subject(value: Any) -> Any:
    """What decides about a value: itself if it is a class or function, what it binds, or else its class."""
    while True:
        if type(value) is MethodType:
            value = value.__func__
        elif type(value) is functools.partial:
            value = value.func
        else:
            return value if inspect.isclass(value) or inspect.isroutine(value) else type(value)


def _held_by(value: Any) -> list[Any]:
    """What a container holds: a function in it can be had with `random.choice`, and called with `max(key=...)`."""
    kind = type(value)
    if issubclass(kind, dict):
        return [*dict.keys(value), *dict.values(value)]
    if issubclass(kind, np.ndarray):
        return value.ravel().tolist() if value.dtype.hasobject else []
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    return list(base.__iter__(value)) if base else []


def _is_harmless(value: Any, home: str | None) -> bool:
    """Whether an attribute's value, an instance of a class that nobody listed, is data: nothing to call or go through.

    Frames, generators and other kinds of the interpreter lead to `__builtins__`.
    """
    if issubclass(type(value), torch.nn.Module):
        return True
    return home not in (None, "builtins") and not callable(value) and not issubclass(type(value), ModuleType)


def _home(subject: Any) -> tuple[str | None, str]:
    """The module that defines a class or function (None where it does not say), and its full name."""
    name = getattr(subject, "__qualname__", None) or getattr(subject, "__name__", repr(subject))
    home = getattr(subject, "__module__", None)
    if not isinstance(home, str):  # a method of C: the class that defines it tells, not the one that inherits it
        owner = getattr(subject, "__objclass__", getattr(subject, "__self__", None))
        if owner is None or isinstance(owner, ModuleType):
            return None, str(name)
        classes = [*owner.__mro__, *type(owner).__mro__] if inspect.isclass(owner) else type(owner).__mro__
        home = next((known.__module__ for known in classes if subject.__name__ in vars(known)), None)
    return home, f"{home}.{name}"


def _description(value: Any) -> str:
    """What a value is, in a few words."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return f"the function {value.__name__}" if inspect.isroutine(value) else f"a {type(value).__name__}"


def _module_exists(top: str) -> bool:
    """Whether Python has, or would find, a module of that name; nothing is imported."""
    return top in sys.modules or _spec_of(top) is not None


def _submodule_exists(owner: ModuleType, name: str) -> bool:
    """Whether a package would import a module of that name; nothing is imported."""
    path = getattr(owner, "__path__", None)
    return path is not None and importlib.machinery.PathFinder.find_spec(name, path) is not None


def _spec_of(module_name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module comes from, or would come from; those above it must be imported."""
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


def _is_below(path: str, folder: str) -> bool:
    return os.path.commonpath([path, folder]) == folder


def _listed_names() -> list[str]:
    declared = [f"{module}.{name}" for module, names in AMP_RECIPES.items() for name in names.split()]
    return [*torch_objects(), *declared, *standard_objects()]
