"""How a HyperPyYAML file and overrides become hyperparameters: read and check, seed, resolve, instantiate.

A YAML file can name any importable class or function, and loading the file calls it: load only files that you
would run as a program.
"""

from __future__ import annotations

import copy
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any

import ruamel.yaml
import torch
import yaml as pyyaml
from hyperpyyaml import load_hyperpyyaml, resolve_references
from ruamel.yaml import YAML
from ruamel.yaml.scalarfloat import ScalarFloat

from amp_recipes.config.checking import as_mapping, explicit_options, read_and_check, run_options_in
from amp_recipes.config.document import NOT_PLAIN, Document, KeyPath, plain, words_of
from amp_recipes.config.run_options import MAX_SEED, join_mistakes
from amp_recipes.errors import AmpRecipesError, ConfigError


class Hparams(dict[str, Any]):
    """A dict of hyperparameters that remembers what they were loaded from.

    path: the YAML file, absolute; overrides: what `load_hparams` was given beside it. A Brain that is given one writes
    both into its output folder. Copies made with `{**hparams}` or `hparams.copy()` are plain dicts.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        path: str | os.PathLike[str],
        overrides: Mapping[str, Any] | str | None = None,
    ) -> None:
        super().__init__(values)
        self.path = os.path.abspath(path)  # it holds wherever the process goes
        self.overrides = overrides


def load_hparams(
    path: str | os.PathLike[str],
    overrides: Mapping[str, Any] | str | None = None,
    trust: Iterable[str] = (),
) -> Hparams:
    """The hyperparameters of the YAML at `path`, its objects instantiated: a dict that knows where it is from.

    overrides: what `parse_arguments` returned, or a mapping (nested, or with dots in its keys), or YAML text.
        With the first, run options that were set also override the YAML's keys of the same name. A key must
        be in the YAML, or be a run option (which is then added to the hyperparameters).
    trust: names of packages that the YAML may use. At this stage it may use every importable one, so the
        file itself must be trusted: it executes what it names.

    A `seed` among the run options, else in the YAML, seeds the global generators before anything is
    instantiated. Keys that begin with `__` are not in the result.
    Raises ConfigError that names all mistakes together, with file and line, before anything is instantiated;
    or one that names the key whose object could not be built.
    """
    _check_trust(trust)
    document, options = read_and_check(path, overrides)
    _seed_if_set(options)
    text = resolve(document)
    if "seed" in document.tree and "seed" not in options:  # it came from an include
        _seed_if_set(_options_of_text(text, document))
    return Hparams(instantiate(text, document), path, copy.deepcopy(overrides))


def seed_everything(seed: int) -> None:
    """Seed the global generators of Python, NumPy (where installed) and torch, on all devices.

    seed: from 0 to 2**32 - 1, which all of them take. Raises ConfigError for anything else.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed is {seed!r}, but must be a whole number from 0 to {MAX_SEED}.")
    torch.manual_seed(seed)
    _seed_host(seed)


def _seed_host(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


def resolve(document: Document) -> str:
    """The document as YAML text without references and includes: what is left is to instantiate.

    Calls the functions that `!applyref:` names. Raises ConfigError.
    """
    text = _NamedText()
    text.name = document.file  # HyperPyYAML looks for included files beside it
    try:
        with _hyperpyyaml_globals_restored():
            YAML().dump(document.tree, text)
            text.seek(0)
            return resolve_references(text).getvalue()
    except Exception as error:  # a function that !applyref: names may raise anything
        raise ConfigError(f"{document.file}: cannot be resolved: {words_of(error)}") from error


def instantiate(text: str, document: Document) -> dict[str, Any]:
    """The objects of a resolved text; `document` tells file and line of one that cannot be built."""

    class Loader(_Loader):
        """A class of its own for each call: HyperPyYAML registers its tags on the class that it is given."""

        failed = None

    try:
        with _hyperpyyaml_globals_restored():
            return load_hyperpyyaml(text, loader=Loader)
    except Exception as error:  # the constructors that the YAML names may raise anything
        path, tag = Loader.failed or ((), "")
        what = f"{tag} cannot be built" if tag.startswith("!") else "cannot be built"
        place = ": ".join([document.where(path), *([".".join(path)] if path else [])])
        # What the framework says is for people already: the way there would only hide it.
        cause = None if isinstance(error, AmpRecipesError) else error
        raise ConfigError(f"{place}: {what}: {words_of(error)}") from cause


def resolved_text(path: str | os.PathLike[str], overrides: Mapping[str, Any] | str | None) -> str:
    """YAML text that gives, on its own, what the YAML at `path` gives with `overrides`.

    Run options that were set and that the YAML does not have are added, so that the text reproduces the run.
    Functions that `!applyref:` names are called again, with the seed of the run; the generators are left as they were.
    """
    document, options = read_and_check(path, overrides)
    for name, value in explicit_options(overrides).items():
        document.tree.setdefault(name, value)
    with _host_generators_restored():
        if options.get("seed") is not None:
            _seed_host(options["seed"])
        return resolve(document)


def overrides_text(overrides: Mapping[str, Any] | str | None) -> str:
    """Overrides and the run options that were set, as YAML text that `load_hparams` takes as overrides."""
    if isinstance(overrides, str):
        return overrides
    values = plain({**as_mapping(overrides), **explicit_options(overrides)})
    if values is NOT_PLAIN:
        raise ConfigError(f"overrides have a value that YAML text cannot hold: {overrides!r}.")
    text = StringIO()
    YAML().dump(values, text)
    return text.getvalue()


@contextmanager
def _host_generators_restored() -> Iterator[None]:
    """Put back the global generators of the host: to write down a run's settings must not change its random draws."""
    numpy = sys.modules.get("numpy")  # if nobody imported it, nobody draws from it
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy:
                numpy.random.set_state(numpy_state)


class _NamedText(StringIO):
    name: str


class _Loader(ruamel.yaml.Loader):
    """Remembers which node could not be constructed."""

    failed: tuple[KeyPath, str] | None = None
    root: Any = None

    def construct_object(self, node: Any, *args: Any, **kwargs: Any) -> Any:
        # HyperPyYAML changes the default of `deep` for the base class: pass on only what was given.
        self.root = node if self.root is None else self.root
        try:
            return super().construct_object(node, *args, **kwargs)
        except Exception:
            if self.failed is None:  # the innermost node, where the exception came from
                type(self).failed = (_path_to(self.root, node), str(node.tag))
            raise


@contextmanager
def _hyperpyyaml_globals_restored() -> Iterator[None]:
    """Put back what HyperPyYAML changes for the whole process, also where loading fails; keep floats exact.

    It makes deep construction the default of PyYAML and ruamel, and each call adds a resolver for tuples to
    the list that every ruamel loader reads (which then cannot read the string `(1, 2)`).
    It writes the tree out and reads it again, where ruamel cuts the last digit off some floats
    (4.697088225979121e+16), so inside they are written as Python does.
    """
    representers = ruamel.yaml.RoundTripRepresenter.yaml_representers
    cutting = representers[ScalarFloat]
    functions = [
        pyyaml.constructor.BaseConstructor.construct_object,
        ruamel.yaml.constructor.BaseConstructor.construct_object,
    ]
    defaults = [function.__defaults__ for function in functions]
    resolvers = list(ruamel.yaml.resolver.implicit_resolvers)
    representers[ScalarFloat] = _represent_exactly
    try:
        yield
    finally:
        representers[ScalarFloat] = cutting
        for function, default in zip(functions, defaults, strict=True):
            function.__defaults__ = default
        ruamel.yaml.resolver.implicit_resolvers[:] = resolvers


def _represent_exactly(representer: Any, value: ScalarFloat) -> Any:
    text = representer.represent_float(float(value)).value
    anchor = value.yaml_anchor(any=True)
    return representer.represent_scalar("tag:yaml.org,2002:float", text, anchor=anchor)


def _path_to(root: Any, wanted: Any) -> KeyPath:
    """The keys that lead from the root of a composed tree to one of its nodes."""
    seen: set[int] = set()
    pending: list[tuple[KeyPath, Any]] = [((), root)]
    while pending:
        path, node = pending.pop()
        if node is wanted:
            return path
        if id(node) in seen:
            continue
        seen.add(id(node))
        below: list[tuple[KeyPath, Any]] = []
        if isinstance(node, ruamel.yaml.MappingNode):
            below = [((*path, str(key.value)), value) for key, value in node.value]
        elif isinstance(node, ruamel.yaml.SequenceNode):
            below = [((*path, str(index)), value) for index, value in enumerate(node.value)]
        pending += reversed(below)
    return ()


def _options_of_text(text: str, document: Document) -> dict[str, Any]:
    """The run options of a resolved text. Raises ConfigError with the lines of the original document."""
    resolved = Document(document.file, YAML().load(text))
    resolved.lines = document.lines
    options, mistakes = run_options_in(resolved)
    if mistakes:
        raise ConfigError(join_mistakes(mistakes, document.file))
    return options


def _seed_if_set(options: Mapping[str, Any]) -> None:
    if options.get("seed") is not None:
        seed_everything(options["seed"])


def _check_trust(trust: Iterable[str]) -> None:
    if isinstance(trust, str) or not isinstance(trust, Sequence | set | frozenset):
        raise ConfigError(f"trust is {trust!r}, but must be a list of package names.")
    if wrong := [name for name in trust if not isinstance(name, str)]:
        raise ConfigError(f"trust must hold package names, but has {wrong!r}.")
