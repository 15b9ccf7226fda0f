"""Loads a YAML: reads and checks it, seeds, calls the functions of `!applyref:`, and builds its objects."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from amp_recipes.config.options.arguments import AnyOverrides, Overrides, explicit_options, loading
from amp_recipes.config.options.run_options import OPTION_NAMES
from amp_recipes.config.trust.checking import Call, Settings, as_mapping, check_settings, read_settings, resolve_all
from amp_recipes.config.trust.instantiate import build
from amp_recipes.config.trust.module_files import comes_along
from amp_recipes.config.trust.trust import Trust, check_installed, checked_entries
from amp_recipes.config.yaml.limits import FILE_BYTES, Budget
from amp_recipes.config.yaml.mistakes import did_you_mean
from amp_recipes.config.yaml.nodes import COMMAND_LINE, Mistakes, Source
from amp_recipes.config.yaml.nodes import Mapping as MappingNode
from amp_recipes.config.yaml.overriding import to_nodes
from amp_recipes.config.yaml.reading import read_text
from amp_recipes.config.yaml.writing import to_yaml
from amp_recipes.errors import ConfigError
from amp_recipes.files.lazy_names import from_commands
from amp_recipes.options import MAX_SEED
from amp_recipes.state.randomness import random_state, set_random_state

logger = logging.getLogger(__name__)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


class MissingKeyError(ConfigError, KeyError):
    """A recipe reads a key of its hyperparameters that the YAML does not have."""

    __str__ = ConfigError.__str__  # a KeyError would show its message in quotes


class Hparams(dict[str, Any]):
    """A dict of hyperparameters that remembers what they were loaded from.

    path: the YAML file, absolute; overrides: what `load_hparams` was given beside it; trust: what the YAML may name
    beside the defaults; sources: where each value was written, by its dotted key (`configs/x.yaml:12`,
    `command line`). A Brain that is given one writes YAML and overrides into its output folder. Copies made with
    `{**hparams}` or `hparams.copy()` are plain dicts.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str | os.PathLike[str],
        overrides: AnyOverrides = None,
        trust: tuple[str, ...] = (),
        sources: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(values)
        self.path = os.path.abspath(path)  # it holds wherever the process goes
        self.overrides = overrides
        self.trust = trust
        self.sources = dict(sources or {})

    def __missing__(self, key: Any) -> Any:
        raise MissingKeyError(
            f"{self.path} has no key {key!r}.{did_you_mean(str(key), [str(known) for known in self])}"
        )

    def place_of(self, name: str, value: Any) -> str:
        """Return the place of an argument in the YAML, `x.yaml:12: loader_kwargs.batch_size: `, or an empty string.

        The line is that of the mapping that holds it.
        """
        found = [key for key in self.sources if key.rpartition(".")[2] == name and self._value_at(key) == value]
        if not found:
            return ""
        key = max(found, key=lambda key: key.count("."))  # others are what it refers to
        return f"{self.sources[key.rpartition('.')[0] or key]}: {key}: "

    def _value_at(self, key: str) -> Any:
        value: Any = self
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value


@dataclass
class Loaded:
    """The results of one load, so that saving its settings does not repeat the work.

    original: the YAML file, byte for byte; tree: as it was read with its includes; names: what was trusted beside the
    defaults; results: what each `!applyref:` function returned, in the order of the calls.
    """

    original: bytes
    tree: MappingNode | None
    names: tuple[str, ...]
    results: list[Any] = field(default_factory=list)


RESOLVED_HEADER = "Resolved settings of a run: each reference is replaced by its value"

# The newest loads, each by the YAML and the text of its overrides: for `create_experiment_directory`, which gets those.
_loaded: dict[tuple[str, str], Loaded] = {}
_REMEMBERED_LOADS = 16


def load_hparams(path: str | os.PathLike[str], overrides: AnyOverrides = None, trust: Iterable[str] = ()) -> Hparams:
    """The hyperparameters of the YAML at `path`, its objects instantiated: a dict that knows where it is from.

    overrides: what `parse_arguments` returned, or a mapping (nested, or with dots in its keys), or YAML text; plain
        data only. With the first, run options that were set also override the YAML's keys of the same name. A key
        must be in the YAML, or be a run option (which is then added to the hyperparameters).
    trust: what the YAML may name beside the recipe's own folder and the known names of amp_recipes, torch and the
        standard library: packages (`sklearn`), modules or single functions (`scipy.signal.windows.hann`); and folders
        outside the YAML's own (`../common`) from where it may include files. `--trust` adds to it.

    A `seed` among the run options, else in the YAML, seeds the global generators before anything is instantiated.
    Keys that begin with `__` are not in the result. With `--check`, `--show-config` or `--sweep` on the command line
    this does what they say and ends the script (SystemExit).
    Raises ConfigError that names all mistakes together, with file, line and column, before anything is instantiated;
    or one that names the key whose object could not be built.
    """
    return load_called_from(caller_file(), path, overrides, trust)


def load_called_from(
    caller: str | None, path: str | os.PathLike[str], overrides: AnyOverrides = None, trust: Iterable[str] = ()
) -> Hparams:
    """`load_hparams` as if the file `caller` had called it: that file's folder is the recipe's."""
    names = _names_to_trust(trust, overrides)
    check_installed(_granted(overrides))
    trusted = Trust(names, recipe_folders(caller))
    if isinstance(overrides, Overrides) and overrides.request.action != "run":
        raise SystemExit(_run_request(path, overrides, trusted, _code_folder(caller)))
    original = _bytes_of(path)
    with loading():  # what the YAML names is imported
        settings = check_settings(path, overrides, trusted, _code_folder(caller), for_run=True)
    _warn_of_resolved(path, original, overrides)
    loaded = Loaded(original, settings.tree, names)
    _seed_if_set(settings.options)
    with loading():
        if settings.has_unknown:
            settings = resolve_all(settings, trusted, _calling(trusted, loaded.results))
            # Again, since the functions may have drawn: the resolved YAML, which calls none, gives the same objects.
            _seed_if_set(settings.options)
        values = build(settings.resolved, trusted)
    identity = _identity(path, overrides)
    _loaded.pop(identity, None)  # so that it is the newest
    _loaded[identity] = loaded
    while len(_loaded) > _REMEMBERED_LOADS:
        del _loaded[next(iter(_loaded))]
    return Hparams(values, path, copy.deepcopy(overrides), names, settings.sources)


def check(
    path: str | os.PathLike[str],
    overrides: AnyOverrides = None,
    trust: Iterable[str] = (),
    recipe_folder: str | os.PathLike[str] | None = None,
) -> Settings:
    """Check a YAML as `load_hparams` does, and return its settings; build nothing and call no function.

    recipe_folder: where the recipe's own Python files are; default: the folder of the file that calls this.
    Imports the modules that the YAML names and may name. Raises ConfigError that names all mistakes together.
    """
    names = _names_to_trust(trust, overrides)
    if recipe_folder is None:
        caller = caller_file()
        with loading():
            return check_settings(path, overrides, Trust(names, recipe_folders(caller)), _code_folder(caller))
    folder = os.path.realpath(recipe_folder)
    with loading(), _as_script_folder(folder):
        return check_settings(path, overrides, Trust(names, [folder]), folder)


def _run_request(path: str | os.PathLike[str], overrides: Overrides, trust: Trust, code_folder: str | None) -> int:
    """Do what the command line asks for instead of a run; the exit status."""

    def check_with(given: Overrides) -> Settings:
        with loading():
            return check_settings(path, given, trust, code_folder)

    return from_commands("requests", "run_request")(overrides, os.fspath(path), check_with)


@contextmanager
def _as_script_folder(folder: str) -> Iterator[None]:
    """Let Python find the modules of a recipe that is not running, and forget them afterwards: each has its `data`."""
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and os.path.realpath(file).startswith(folder + os.sep):
                del sys.modules[name]


def recipe_folders(caller: str | None) -> list[str]:
    """The folders whose Python files are the recipe: that of the file that loads the YAML, and that of the script."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None and caller is None:  # a notebook, or an interactive Python
        return [os.path.realpath(os.getcwd())]
    files = [file for file in (caller, main) if file and not _is_ours(file)]
    return list(dict.fromkeys(os.path.dirname(os.path.realpath(file)) for file in files))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy and torch, on all devices.

    seed: from 0 to 2**32 - 1, which all of them take. Raises ConfigError for anything else.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed is {seed!r}, but must be a whole number from 0 to {MAX_SEED}.")
    torch.manual_seed(seed)
    _seed_host(seed)


def _seed_host(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


def find_loaded(path: str | os.PathLike[str], overrides: AnyOverrides) -> Loaded | None:
    """Return the earlier load of the YAML with these overrides in this process; None if there is none."""
    return _loaded.get(_identity(path, overrides))


def settings_again(path: str | os.PathLike[str], overrides: AnyOverrides, loaded: Loaded | None) -> Settings:
    """Return the settings of the YAML as it was loaded; if it was not loaded, as the file is now."""
    return read_settings(path, overrides, tree=copy.deepcopy(loaded.tree) if loaded else None)


def resolved_text(path: str | os.PathLike[str], overrides: AnyOverrides, loaded: Loaded | None = None) -> str:
    """YAML text that gives, on its own, what the YAML at `path` gives with `overrides`.

    Run options that were set and that the YAML does not have are added, so that the text reproduces the run.
    What the functions of `!applyref:` returned is taken from `loaded`. Without it they are called, with the seed of
    the run, and the generators are left as they were.
    """
    settings = settings_again(path, overrides, loaded)
    if settings.has_unknown and loaded:
        settings = resolve_all(settings, None, _replaying(loaded.results))
    elif settings.has_unknown:
        trust = Trust((), recipe_folders(None))
        generators = random_state(torch.device("cpu"))
        try:
            if settings.options.get("seed") is not None:
                _seed_host(settings.options["seed"])
            settings = resolve_all(settings, None, _calling(trust, []))
        finally:
            set_random_state(generators)
    root = settings.resolved
    for name, value in explicit_options(overrides).items():
        if name not in root.items:
            root.items[name] = to_nodes(value, Source(COMMAND_LINE), Mistakes(), name)
    names = loaded.names if loaded else ()
    return to_yaml(root, [RESOLVED_HEADER, *([f"Loads with --trust {','.join(names)}"] if names else [])])


def with_option(text: str, name: str, value: Any) -> str:
    """The text of resolved settings with another value of a run option."""
    mistakes = Mistakes()
    root = read_text(text, RESOLVED_HEADER, mistakes, Budget())
    mistakes.raise_if_any(RESOLVED_HEADER)
    assert isinstance(root, MappingNode)
    root.items[name] = to_nodes(value, Source(COMMAND_LINE), mistakes, name)
    header = itertools.takewhile(lambda line: line.startswith("# "), text.splitlines())
    return to_yaml(root, [line.removeprefix("# ") for line in header])


def overrides_text(overrides: AnyOverrides) -> str:
    """Overrides and the run options that were set, as YAML text that `load_hparams` takes as overrides."""
    if isinstance(overrides, str):
        return overrides
    mistakes = Mistakes()
    given = {**as_mapping(overrides, mistakes), **explicit_options(overrides)}
    root = to_nodes(given, Source("overrides"), mistakes, "overrides")
    mistakes.raise_if_any("overrides")
    return to_yaml(root) if given else "{}\n"


def _calling(trust: Trust, results: list[Any]) -> Call:
    """Calls the functions of `!applyref:` that may be named, and keeps what they return."""

    def call(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        function = trust.locate(name)
        if not inspect.isroutine(function):
            raise ConfigError(f"!applyref:{name} must name a function, but is {function!r}.")
        result = function(*args, **kwargs)
        results.append(copy.deepcopy(result))
        return result

    return call


def _replaying(results: Iterable[Any]) -> Call:
    remembered = iter(results)

    def call(name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return copy.deepcopy(next(remembered))

    return call


def _warn_of_resolved(path: str | os.PathLike[str], original: bytes, overrides: AnyOverrides) -> None:
    """Warn that an override of a resolved file changes only its own key, since the file has no references."""
    keys = [key for key in as_mapping(overrides, Mistakes()) if key not in OPTION_NAMES]
    if keys and original.startswith(f"# {RESOLVED_HEADER}".encode()):
        logger.warning(
            "%s holds resolved settings, without references: an override (%s) changes only that key. To change the "
            "values that referred to it too, load the original YAML (hyperparams_original.yaml in the same folder).",
            os.fspath(path),
            ", ".join(map(str, keys)),
        )


def _bytes_of(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that is about to be checked; empty where that will say what is wrong with it."""
    try:
        return Path(path).read_bytes() if Path(path).is_file() and os.stat(path).st_size <= FILE_BYTES else b""
    except (OSError, ValueError):
        return b""


def _identity(path: str | os.PathLike[str], overrides: AnyOverrides) -> tuple[str, str]:
    return os.path.realpath(path), overrides_text(overrides)


def caller_file() -> str | None:
    """The file whose code called the function that calls this; None in a notebook."""
    return sys._getframe(2).f_globals.get("__file__")


def _code_folder(caller: str | None) -> str | None:
    """The folder of the file that loads a YAML, whose code says which keys it reads."""
    return os.path.dirname(os.path.realpath(caller)) if caller and not _is_ours(caller) else None


def _is_ours(file: str) -> bool:
    real = os.path.realpath(file)
    return real.startswith(_PACKAGE + os.sep) and not comes_along(real)


def _seed_if_set(options: Mapping[str, Any]) -> None:
    if options.get("seed") is not None:
        seed_everything(options["seed"])


def _names_to_trust(trust: Iterable[str], overrides: AnyOverrides) -> tuple[str, ...]:
    return (*checked_entries(trust), *_granted(overrides))


def _granted(overrides: AnyOverrides) -> tuple[str, ...]:
    """The names that the command line trusts."""
    return overrides.request.trust if isinstance(overrides, Overrides) else ()
