"""Decides which objects a YAML may name: the recipe's own, those on the lists, and what the user trusts.

What counts is the object that a name leads to, not the name: `data.os.system`, a recipe's `from os import system` and
an inherited `Module.apply` are refused. No module is imported before it is known to be allowed.
"""

from __future__ import annotations

import builtins
import copy
import difflib
import importlib
import importlib.metadata
import inspect
import os
import re
import sys
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import numpy as np

from amp_recipes.config.trust.entry_points import reads_command_line
from amp_recipes.config.trust.module_files import (
    bare_folder,
    comes_along,
    files_of,
    is_below,
    module_exists,
    spec_of,
    submodule_exists,
)
from amp_recipes.config.trust.trusted_names import (
    STANDARD,
    amp_recipes_objects,
    key_of,
    listed_elsewhere,
    listed_keys,
    listed_names,
    nearest_listed,
    parents,
    standard_objects,
    walkable_modules,
)
from amp_recipes.config.trust.values import description_of, held_by, home_of, is_container, is_harmless, subject_of
from amp_recipes.config.yaml.mistakes import did_you_mean, join_mistakes
from amp_recipes.config.yaml.nodes import COMMAND_LINE
from amp_recipes.errors import ConfigError

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_LISTED_PACKAGES = frozenset({"amp_recipes", "torch"})  # judged by their lists even where they lie in a recipe's folder
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_STANDARD_LIBRARY = tuple({os.path.realpath(sysconfig.get_paths()[key]) for key in ("stdlib", "platstdlib")})
_NAME_CHARACTERS = 500
_SUGGESTIONS = 20  # for one load: each takes milliseconds, and nobody reads more
_MISSING = object()


class NotTrusted(ConfigError):
    """A YAML names something that it may not use."""


class NotFound(ConfigError):
    """A YAML names something that does not exist, or that cannot be imported."""


class _NotImported(Exception):
    """Raised where a module would have to be imported to know more."""


class Trust:
    """The names that one load may use.

    packages: names beside the defaults: a package with all below it (`sklearn`), a module, or one object
        (`sklearn.svm.SVC`); an entry that has a `/` or begins with a `.` is a folder for `!include:`.
    recipe_folders: folders whose Python files are the recipe's own, but for installed ones (in `site-packages`).
    Raises ConfigError for an entry that is neither a dotted name nor a folder.
    """

    def __init__(self, packages: Iterable[str] = (), recipe_folders: Iterable[str | Path] = ()) -> None:
        names, folders = [], []
        for entry in checked_entries(packages):
            if is_folder(entry):
                folders.append(_existing_folder(entry))
            else:
                _parts_of(entry)
                names += [entry, entry.removeprefix("builtins.")]
        self.folders: tuple[str, ...] = tuple(folders)
        self.names = frozenset(names)
        self._recipe_folders = tuple(os.path.realpath(folder) for folder in recipe_folders)
        self._recipe_modules: dict[str, bool] = {}
        self._suggestions_left = _SUGGESTIONS
        self.rehearses = False  # whether this only tries what one more trusted name would admit

    def locate(self, name: str) -> Any:
        """The object that a dotted name leads to. Raises NotTrusted or NotFound."""
        parts = _parts_of(name)
        top = parts[0]
        if name in standard_objects() and not (len(parts) == 1 and module_exists(name)):
            return standard_objects()[name]
        if not module_exists(top) and hasattr(builtins, top):  # else Python would import the file `max.py`, say
            value: Any = self._judged(getattr(builtins, top), top, "builtins", name)
        else:
            value = self._entered(top, name)
        module = top
        for depth in range(2, len(parts) + 1):
            walked = ".".join(parts[:depth])
            value = self._step(value, parts[depth - 1], walked, name)
            if isinstance(value, ModuleType):
                module = walked
            else:
                self._judged(value, walked, module, name)
        return value

    def module(self, name: str) -> ModuleType:
        """The module of that name. Raises NotTrusted or NotFound, also where the name leads to something else."""
        found = self.locate(name)
        if not isinstance(found, ModuleType):
            raise NotFound(f"{name} is not a module, but {description_of(found)}.")
        return found

    def attribute(self, owner: Any, name: str) -> Any:
        """`owner.name`, if that is data or something that a YAML may name. Raises NotTrusted or NotFound."""
        _parts_of(name)
        what = f"{owner.__name__ if inspect.isclass(owner) or inspect.ismodule(owner) else type(owner).__name__}.{name}"
        if "." in name or name == "__main__":
            raise NotFound(f"{name!r} is not the name of an attribute: expected one name without dots.")
        if isinstance(owner, ModuleType):
            return self._attribute_of_module(owner, name, what)
        self.check_value(owner, what)
        try:
            value = getattr(owner, name)
        except AttributeError as error:
            known = [known for known in dir(owner) if not known.startswith("_")]
            hint = did_you_mean(name, known)
            raise NotFound(f"{description_of(owner)} has no attribute {name!r}.{hint}") from error
        self.check_value(value, what)
        return value

    def check_value(self, value: Any, what: str) -> None:
        """Raise NotTrusted unless a YAML may read this attribute of an object, or read attributes of this object."""
        if problem := self._problem(value, None, of_an_object=True):
            reason, home = problem
            raise self._refusal(what, reason, [_entry_for_home(home)], lambda trust: trust.check_value(value, what))

    def _attribute_of_module(self, owner: ModuleType, name: str, what: str) -> Any:
        if sys.modules.get(owner.__name__) is not owner:
            raise NotTrusted(f"{what} is not trusted: {owner.__name__} is not a module that can be named.")
        value = self.locate(f"{owner.__name__}.{name}")
        if isinstance(value, ModuleType):
            raise NotTrusted(f"{what} is a module; a reference may not lead from one module to another.")
        return value

    def _entered(self, top: str, wanted: str) -> ModuleType:
        """The module that a name begins with, imported if a YAML may use it."""
        if not module_exists(top) and not self._is_named(top):
            hint = self._near_top(wanted) or f" If it is a package: install it, and trust it (--trust {top})."
            raise NotFound(f"{wanted}: there is no module {top}.{hint}")
        module, _, name = wanted.rpartition(".")
        if module in STANDARD and module in sys.modules and not hasattr(sys.modules[module], name):
            near = did_you_mean(name, STANDARD[module].split(), f"{module}.")
            raise NotFound(f"{wanted}: {module} has no {name!r}.{near}")
        return self._imported(top, wanted)

    def _step(self, owner: Any, part: str, walked: str, wanted: str) -> Any:
        """Return the member `part` of `owner`, one step of a dotted name; a module must be allowed."""
        value = self._member(owner, part, walked, wanted)
        if value is _MISSING:
            place, _, _ = walked.rpartition(".")
            raise NotFound(f"{wanted}: {place} has no {part!r}.{self._near_member(owner, part, walked)}")
        if isinstance(value, ModuleType):
            if value.__name__ != walked and sys.modules.get(walked) is not value:  # os.path is posixpath
                own = f"{value.__name__}{wanted.removeprefix(walked)}"
                reason = f"{walked} is the module {value.__name__}; write {own}"
                raise NotTrusted(f"{wanted} is not trusted: {reason}.")
            self._check_module(walked, wanted)
        return value

    def _member(self, owner: Any, part: str, walked: str, wanted: str) -> Any:
        """Return the member `part` of `owner`, or `_MISSING`; import a submodule if it is allowed."""
        if not isinstance(owner, ModuleType):
            # A trial continues where the walk has ended, so it must not run an object's own code.
            get = inspect.getattr_static if self.rehearses and not inspect.isclass(owner) else getattr
            return get(owner, part, _MISSING)
        if walked not in sys.modules and submodule_exists(owner, walked):
            self._imported(walked, wanted)
            return getattr(owner, part, _MISSING)
        is_of_lists = walked.partition(".")[0] in _LISTED_PACKAGES and not self._is_named(walked)
        if not self.rehearses and not is_of_lists:
            return getattr(owner, part, _MISSING)
        value = vars(owner).get(part, _MISSING)  # torch imports what it is asked for and has not yet
        if value is _MISSING and self.rehearses and "__getattr__" in vars(owner):
            raise _NotImported
        return value

    def _imported(self, module_name: str, wanted: str) -> ModuleType:
        self._check_module(module_name, wanted)
        if module_name not in sys.modules and self.rehearses:
            raise _NotImported
        try:
            importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}"
            raise NotFound(f"{wanted}: the module {module_name} cannot be imported: {reason}") from error
        module = sys.modules[module_name]
        if not isinstance(module, ModuleType):
            raise NotTrusted(f"{wanted}: the module {module_name} replaces itself by another object.")
        self._recipe_modules.pop(module_name, None)
        self._check_module(module_name, wanted)
        return module

    def _check_module(self, module_name: str, wanted: str) -> None:
        """Raise NotTrusted unless a YAML may go through this module, or import it, to reach `wanted`."""
        named = self._is_named(module_name) or (self._is_named(wanted) and module_name in parents(self.names))
        if named or module_name in walkable_modules() or self._is_recipe(module_name):
            return
        folder = next((bare for file in files_of(module_name) for bare in self._bare_folders(file) if bare), "")
        reason = f"{folder} has no __init__.py: add one, or trust it" if folder else ""
        raise self._refusal(wanted, reason, [_entry_for(wanted), wanted], lambda trust: trust.locate(wanted))

    def _judged(self, value: Any, walked: str, module: str, wanted: str) -> Any:
        """`value`, which a walk to `wanted` found in `module`. Raises NotTrusted."""
        exact = {walked, wanted, walked.removeprefix("builtins."), wanted.removeprefix("builtins.")}
        if self.names.isdisjoint(exact) and (problem := self._problem(value, module)):
            reason, home = problem
            is_at_home = walked.partition(".")[0] in (walked, home.partition(".")[0])
            entries = [_entry_for(wanted) if is_at_home else _entry_for_home(home), wanted]
            reason = "" if reason == f"it is {walked}" else reason
            raise self._refusal(walked, reason, entries, lambda trust: trust.locate(wanted))
        return value

    def _refusal(self, what: str, reason: str, entries: Iterable[str], attempt: Callable[[Trust], Any]) -> NotTrusted:
        """The error with what, why, and the first of the entries for `trust` with which the attempt would succeed."""
        usual = "a YAML may use only harmless names of torch, amp_recipes and Python, and none of other packages"
        entry = next((entry for entry in entries if self._is_enough(entry, attempt)), "")
        allow = f' To allow it: trust=("{entry}",) in load_hparams, or --trust {entry}.' if entry else ""
        return NotTrusted(f"{what} is not trusted: {reason or usual}.{allow}")

    def _is_enough(self, entry: str, attempt: Callable[[Trust], Any]) -> bool:
        """Whether an attempt would succeed with one more trusted name, as far as can be known without an import."""
        if self.rehearses or entry in ("", "builtins", *_LISTED_PACKAGES):
            return False
        rehearsal = copy.copy(self)
        rehearsal.names, rehearsal.rehearses = self.names | {entry, entry.removeprefix("builtins.")}, True
        try:
            attempt(rehearsal)
        except _NotImported:
            return True
        except ConfigError:
            return False
        return True

    def _problem(self, value: Any, module: str | None, of_an_object: bool = False) -> tuple[str, str] | None:
        """Why a YAML may not use a value, and the full name of what it is; None if it may.

        module: where a walk found it, which decides about a C function that does not know its home.
        of_an_object: it is an attribute of an allowed object: then instances of any class will do, as long as they are
            not callable and not of the interpreter's own kinds, such as frames, which lead to everything.
        """
        pending, seen = [value], set()
        while pending:
            item = pending.pop()
            if type(item) in _PLAIN or id(item) in seen:
                continue
            seen.add(id(item))
            pending += held_by(item)
            if not is_container(item) and (problem := self._problem_of_one(item, module, of_an_object)):
                return problem
        return None

    def _problem_of_one(self, item: Any, module: str | None, of_an_object: bool) -> tuple[str, str] | None:
        """The same for a value, whatever it holds."""
        subject = subject_of(item)
        home, qualified = home_of(subject)
        is_instance = subject is type(item)
        if is_instance and of_an_object and is_harmless(item, home):
            return None
        what = f"it is {'an instance of ' if is_instance else ''}{qualified}"
        if not self._is_allowed(subject, home, qualified, module):
            return what, qualified
        called = item if type(item) is MethodType else subject
        if reader := self._command_line_reader(called, home, qualified):
            return f"{what}, which starts a script: it reads a command line ({reader})", qualified
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

    def _command_line_reader(self, subject: Any, home: str | None, qualified: str) -> str:
        """Return the name of the recipe's code that would read a command line, as the YAML writes it; empty if none."""
        if home is None or self._is_named(qualified) or not self._is_recipe(home):
            return ""
        return reads_command_line(subject, self._is_recipe)

    def _is_named(self, name: str) -> bool:
        """Whether the user trusts this name, or a package or module above it."""
        return not self.names.isdisjoint({name, name.removeprefix("builtins."), *parents([name])})

    def _is_recipe(self, module_name: str) -> bool:
        """Whether a module's file lies in one of the recipe's folders."""
        if module_name not in self._recipe_modules:
            self._recipe_modules[module_name] = self._lies_in_recipe(module_name)
        return self._recipe_modules[module_name]

    def _lies_in_recipe(self, module_name: str) -> bool:
        is_name = all(map(_IDENTIFIER.fullmatch, module_name.split(".")))
        if not is_name or module_name.partition(".")[0] in _LISTED_PACKAGES:
            return False
        if module_name == "__main__":
            return self._is_recipe_script(sys.modules.get(module_name))
        spec = spec_of(module_name)
        if spec is not None and spec.origin is not None and not spec.has_location:
            return False  # of the interpreter itself: its origin is `built-in` or `frozen`, which is no file
        files = files_of(module_name)
        return bool(files) and all(map(self._is_recipe_file, files))

    def _is_recipe_script(self, main: ModuleType | None) -> bool:
        spec = getattr(main, "__spec__", None)
        if spec is not None and spec.name.partition(".")[0] in _LISTED_PACKAGES:
            return False
        file = getattr(main, "__file__", None)
        return file is None or self._is_recipe_file(file)  # without a file, a person types it

    def _is_recipe_file(self, file: str) -> bool:
        real = os.path.realpath(file)
        is_installed = not _INSTALLED.isdisjoint(Path(real).parts)
        is_installed = is_installed or any(is_below(real, folder) for folder in _STANDARD_LIBRARY)
        if not os.path.isabs(file) or (is_installed and not comes_along(real)):
            return False
        return "" in self._bare_folders(real)

    def _bare_folders(self, file: str) -> list[str]:
        """For each recipe folder above a file: the first folder between the two that is no regular package, or ""."""
        real = os.path.realpath(file)
        return [bare_folder(real, folder) for folder in self._recipe_folders if is_below(real, folder)]

    def _may_suggest(self) -> bool:
        """Whether a name may be looked for that is near to a wrong one."""
        self._suggestions_left -= 1
        return not self.rehearses and self._suggestions_left >= 0

    def _near_top(self, wanted: str) -> str:
        """The nearest of the names that a YAML may use to one whose first part does not exist."""
        if not self._may_suggest():
            return ""
        near = self._nearest_name(wanted)
        return f" Did you mean {near}?" if near else ""

    def _nearest_name(self, wanted: str) -> str:
        top, _, rest = wanted.partition(".")
        own = self._own_tops()
        listed = {name.partition(".")[0] for name in listed_names() if "." in name}
        nearest = next(iter(difflib.get_close_matches(top, sorted(own | listed), 1)), "")
        corrected = f"{nearest}.{rest}"
        if nearest in own and rest and _is_findable(corrected):
            return corrected
        if nearest in listed and (near := nearest_listed(corrected)):
            return near
        # `nn.Linear` and `Linear` lack their module; `speechbrain.nnet.linear.Linear` is another one.
        if nearest or "." not in rest:
            return listed_elsewhere(wanted) or nearest
        return ""

    def _own_tops(self) -> set[str]:
        """The first parts of the names that the recipe defines and the user trusts."""
        own = {name.partition(".")[0] for name in self.names}
        for folder in filter(os.path.isdir, self._recipe_folders):
            paths = Path(folder).iterdir()
            own |= {path.stem for path in paths if path.suffix == ".py" or (path / "__init__.py").is_file()}
        return own

    def _near_member(self, owner: Any, part: str, walked: str) -> str:
        """The nearest name that a YAML may use in `owner`, or the same name in another of torch's modules."""
        if not self._may_suggest():
            return ""
        place = walked.rpartition(".")[0]
        known = self._known_members(owner, place)
        if same := [name for name in known if name.lower() == part.lower()]:
            return f" Did you mean {place}.{same[0]}?"
        if near := did_you_mean(part, known, f"{place}."):
            return near
        elsewhere = listed_elsewhere(walked)
        return f" Did you mean {elsewhere}?" if elsewhere else ""

    def _known_members(self, owner: Any, place: str) -> set[str]:
        """The names in the module or class at `place` that a YAML may use."""
        start = f"{place}."
        known = {name.removeprefix(start).partition(".")[0] for name in listed_names() if name.startswith(start)}
        if not isinstance(owner, ModuleType):
            return known | set(filter(_is_public, dir(owner)))
        if place.partition(".")[0] in _LISTED_PACKAGES and not self._is_named(place):
            return known
        public = filter(_is_public, vars(owner))
        return known | {name for name in public if not self._problem(vars(owner)[name], place)}


def _is_public(name: str) -> bool:
    return not name.startswith("_")


def _parts_of(name: str) -> list[str]:
    """The parts of a dotted name. Raises NotFound for one that no YAML may write."""
    if len(name) > _NAME_CHARACTERS:
        raise NotFound(f"{name[:40]!r}... is longer than {_NAME_CHARACTERS} characters, too long for a dotted name.")
    for character in name:
        if not character.isascii():
            words = unicodedata.name(character, f"U+{ord(character):04X}")
            raise NotFound(f"{name!r} has the character {character!r} ({words}), which is not ASCII.")
    parts = name.split(".")
    for part in parts:
        if not _IDENTIFIER.fullmatch(part):
            raise NotFound(f"{name!r} is not a dotted name of letters, digits and underscores.")
    for depth, part in enumerate(parts):
        if part.startswith("_") and (depth or part != "__main__"):
            raise NotTrusted(f"{name!r}: {part!r} begins with an underscore, which makes it private to Python code.")
    return parts


def checked_entries(entries: Iterable[str]) -> tuple[str, ...]:
    """The entries of a `trust`. Raises ConfigError where they are no texts."""
    if isinstance(entries, str | Mapping) or not isinstance(entries, Iterable):
        raise ConfigError(f'trust is {entries!r}, but must be a list of names, such as trust=("sklearn",).')
    checked = tuple(entries)
    for entry in checked:
        if not isinstance(entry, str) or not entry:
            raise ConfigError(f"trust must hold names of packages, modules or folders, but has {entry!r}.")
    return checked


def check_installed(entries: Iterable[str]) -> None:
    """Raise ConfigError for names of packages and modules to trust that Python does not find."""
    mistakes = []
    for entry in entries:
        top = entry.partition(".")[0]
        if not (is_folder(entry) or module_exists(top) or hasattr(builtins, top)):
            hint = did_you_mean(top, importlib.metadata.packages_distributions())
            mistakes.append(f"{COMMAND_LINE}: --trust {entry}: no package or module of that name is installed.{hint}")
    if mistakes:
        raise ConfigError(join_mistakes(mistakes, "the command line"))


def is_folder(entry: str) -> bool:
    """Whether an entry of a `trust` is a folder for `!include:`, rather than a name."""
    return "/" in entry or entry.startswith(".")


def _existing_folder(entry: str) -> str:
    real = os.path.realpath(os.path.expanduser(entry))
    if not os.path.isdir(real):
        raise ConfigError(f"trust names the folder {entry!r}, which does not exist.")
    return real


def _entry_for(name: str) -> str:
    """Return the entry to trust for a name: the object itself for Python and torch, else the package."""
    top, dot, _ = name.partition(".")
    return name if _is_of_lists(name) or (not dot and hasattr(builtins, name)) else top


def _entry_for_home(name: str) -> str:
    """The same for the full name of a class or function; empty if it cannot be found or given by that name."""
    entry = _entry_for(name)
    is_private = any(part.startswith("_") for part in entry.split("."))
    return entry if not is_private and _is_findable(entry) else ""


def _is_findable(name: str) -> bool:
    """Whether a dotted name leads to something, by the modules that are imported."""
    parts = name.split(".")
    value = None
    for depth, part in enumerate(parts, start=1):
        value = sys.modules.get(".".join(parts[:depth])) or inspect.getattr_static(value, part, None)
    return value is not None


def _is_of_lists(name: str) -> bool:
    """Whether a name is of Python, torch or amp_recipes, of which only single objects are trusted."""
    top = name.partition(".")[0]
    return top in _LISTED_PACKAGES or top in sys.stdlib_module_names
