"""Checks a YAML and what was given beside it: all mistakes at once, before anything is built."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amp_recipes.config.options.arguments import AnyOverrides, Overrides, explicit_options
from amp_recipes.config.options.run_options import OPTION_NAMES, validate_options
from amp_recipes.config.trust.targets import check_targets
from amp_recipes.config.trust.trust import Trust
from amp_recipes.config.trust.usage import find_misspelt_options, find_unread_keys
from amp_recipes.config.yaml.including import expand_includes
from amp_recipes.config.yaml.limits import Budget
from amp_recipes.config.yaml.nodes import (
    COMMAND_LINE,
    NOT_PLAIN,
    KeyPath,
    Mistakes,
    Node,
    Source,
    Unknown,
    children,
    dotted,
    plain_data,
    walk,
)
from amp_recipes.config.yaml.nodes import Mapping as MappingNode
from amp_recipes.config.yaml.overriding import apply_overrides, overrides_from_text, to_nodes
from amp_recipes.config.yaml.reading import read_file
from amp_recipes.config.yaml.references import resolve
from amp_recipes.config.yaml.tags import ATTRIBUTE
from amp_recipes.errors import ConfigError

# Calls the function that an `!applyref:` names: (its name, positional arguments, keyword arguments) -> its result.
Call = Callable[[str, "list[Any]", "dict[str, Any]"], Any]


@dataclass(frozen=True)
class Settings:
    """A YAML with its includes and overrides, read as data: no object is built, no function called.

    root: the tree with overrides; resolved: without references, values of `!applyref:` unknown; options: the run
    options that the YAML and the overrides set, as their types; objects: how many objects the YAML describes; tree: as
    it was read, without overrides, where it has been checked; unread: top-level keys that neither the YAML, the
    framework nor the recipe's code reads, as far as that is known.
    """

    file: str
    root: MappingNode
    resolved: MappingNode
    options: dict[str, Any]
    objects: int = 0
    tree: MappingNode | None = None
    unread: tuple[str, ...] = ()

    @property
    def has_unknown(self) -> bool:
        """Whether a value is known only when a function is called (`!applyref:`)."""
        return any(isinstance(node, Unknown) for _, node in walk(self.resolved))

    @property
    def sources(self) -> dict[str, str]:
        """Return the source of each value by its dotted key; for a reference, the source of its target."""
        found: dict[str, str] = {}
        pending: list[tuple[KeyPath, Node]] = [((), self.resolved)]
        while pending:  # aliases are followed each time: `limits.EXPANDED_NODES` bounds it
            path, node = pending.pop()
            if path:
                found[dotted(path)] = str(Source(node.source.file, node.source.line))
            if node.tag != ATTRIBUTE:
                pending += [((*path, str(key)), child) for key, child in reversed(children(node))]
        return found


def read_settings(
    path: str | os.PathLike[str],
    overrides: AnyOverrides = None,
    folders: Iterable[str] = (),
    tree: MappingNode | None = None,
) -> Settings:
    """The YAML at `path` with its includes and overrides, without a look at the objects that it names.

    folders: from where it may include files, beside its own; tree: of an earlier check, which is changed; None: read
    the file. Raises ConfigError that names every mistake.
    """
    mistakes, budget = Mistakes(), Budget()
    settings = _settings(tree or _tree(path, folders, mistakes, budget), path, overrides, mistakes, budget)
    mistakes.raise_if_any(os.fspath(path))
    return settings


def check_settings(
    path: str | os.PathLike[str],
    overrides: AnyOverrides,
    trust: Trust,
    recipe_folder: str | None = None,
    for_run: bool = False,
) -> Settings:
    """Read the settings, look up the objects that the YAML names, and compare their arguments with the signatures.

    recipe_folder: with the recipe's Python files, which are read to find keys of the YAML that nothing reads; None:
    they are not read. for_run: read them only for a key that may be a slip of a run option, to lose no time. Raises
    ConfigError that names every mistake in the YAML, in what it includes, in the overrides and in the arguments of
    objects; builds nothing.
    """
    mistakes, budget = Mistakes(), Budget()
    root = _tree(path, trust.folders, mistakes, budget)
    tree = copy.deepcopy(root)
    settings = _settings(root, path, overrides, mistakes, budget)
    objects = check_targets(settings.resolved, trust, mistakes)
    unread: tuple[str, ...] = ()
    if recipe_folder is not None and for_run:
        find_misspelt_options(settings.root, recipe_folder, mistakes)
    elif recipe_folder is not None:
        unread = find_unread_keys(settings.root, recipe_folder, mistakes)
    mistakes.raise_if_any(settings.file)
    return dataclasses.replace(settings, tree=tree, objects=objects, unread=unread)


def resolve_all(settings: Settings, trust: Trust | None, call: Call) -> Settings:
    """The settings with the values that `!applyref:` functions give. Raises ConfigError.

    trust: look at the objects again, whose arguments are known only now; None: they are not to be built.
    """
    mistakes = Mistakes()
    resolved = resolve(settings.root, mistakes, Budget(), call)
    options = run_options_in(resolved, mistakes)
    objects = check_targets(resolved, trust, mistakes) if trust is not None and not mistakes else settings.objects
    mistakes.raise_if_any(settings.file)
    return dataclasses.replace(settings, resolved=resolved, options=options | settings.options, objects=objects)


def as_mapping(overrides: AnyOverrides, mistakes: Mistakes) -> Mapping[str, Any]:
    """Overrides in any of the forms that `load_hparams` takes, as a mapping. Raises ConfigError."""
    if isinstance(overrides, str):
        return overrides_from_text(overrides, mistakes, Budget())
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping):
        raise ConfigError(f"overrides must be a mapping of keys to values, but are {overrides!r}.")
    return overrides


def run_options_in(resolved: MappingNode, mistakes: Mistakes) -> dict[str, Any]:
    """The run options among the top-level keys, as their types."""
    given = {name: plain_data(node) for name, node in resolved.items.items() if name in OPTION_NAMES}
    found = {name: value for name, value in given.items() if value is not NOT_PLAIN}
    options, wrong = validate_options(found)
    for name, text in wrong.items():
        node = resolved.items.get(name)
        mistakes.add(node.source if node else resolved.source, text)
    return {name: options[name] for name in found}


def _tree(path: str | os.PathLike[str], folders: Iterable[str], mistakes: Mistakes, budget: Budget) -> MappingNode:
    """The YAML at `path` with the files that it includes. Raises ConfigError where it cannot be read."""
    root = read_file(os.fspath(path), mistakes, budget)
    if root is None:
        mistakes.raise_if_any(os.fspath(path))
    assert root is not None  # a file that cannot be read is a mistake
    expand_includes(root, tuple(folders), mistakes, budget)
    return root


def _settings(
    root: MappingNode, path: str | os.PathLike[str], overrides: AnyOverrides, mistakes: Mistakes, budget: Budget
) -> Settings:
    of_command_line = isinstance(overrides, Overrides)
    source = COMMAND_LINE if of_command_line else "overrides"
    apply_overrides(root, as_mapping(overrides, mistakes), mistakes, source, "--" if of_command_line else "")
    explicit = explicit_options(overrides)
    for name, value in explicit.items():
        if name in root.items:
            root.items[name] = to_nodes(value, Source(source), mistakes, name)
    resolved = resolve(root, mistakes, budget)
    return Settings(os.fspath(path), root, resolved, run_options_in(resolved, mistakes) | explicit)
