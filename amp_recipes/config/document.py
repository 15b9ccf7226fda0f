"""How a HyperPyYAML file is read as a tree that keeps its tags and the line of each key."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyperpyyaml.core import recursive_update
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from amp_recipes.config.run_options import did_you_mean
from amp_recipes.errors import ConfigError

INCLUDE = "!include:"
REFERENCES = ("!ref", "!copy")
PLACEHOLDER = "!PLACEHOLDER"
NOT_PLAIN = object()  # what `plain` returns for a value that YAML text cannot hold

KeyPath = tuple[str, ...]


class Document:
    """A YAML file as a tree that keeps tags, and the line of each of its keys."""

    def __init__(self, file: str, tree: CommentedMap) -> None:
        self.file = file
        self.tree = tree
        self.lines: dict[KeyPath, int] = {}
        for path, parent, key in walk(tree):
            # A key that comes in by a merge (<<) has no line of its own.
            if key in (parent.lc.data or {}):
                self.lines[path] = parent.lc.data[key][0] + 1

    def where(self, path: KeyPath) -> str:
        """`file:line` of the key at `path`, or of the nearest key above it that has a line."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines[path]}" if path else self.file

    def included(self, node: Any) -> Document:
        """The file that an `!include:` node names, with the values that stand below the node in the YAML.

        References below the node belong to this document: the included one gets None in their place.
        Raises ConfigError for a file that cannot be read, or values that do not fit it.
        """
        # HyperPyYAML looks beside the file itself, not beside a link to it.
        beside = os.path.realpath(self.file) if os.path.islink(self.file) else self.file
        child = read_document(os.path.join(os.path.dirname(beside), tag_of(node)[len(INCLUDE) :]))
        if isinstance(node, CommentedMap):
            try:
                recursive_update(child.tree, {key: _without_tags(item) for key, item in node.items()})
            except TypeError as error:
                raise ConfigError(f"the values given here do not fit {child.file}: {error}.") from error
        return child


def read_document(path: str | os.PathLike[str]) -> Document:
    """The YAML file at `path` as it stands; nothing is resolved or instantiated. Raises ConfigError."""
    file = os.fspath(path)
    try:
        with open(file, "rb") as stream:
            tree = YAML().load(stream)
    except OSError as error:
        siblings = [str(found) for found in Path(file).parent.glob("*.y*ml")]
        hint = did_you_mean(file, siblings) if isinstance(error, FileNotFoundError) else ""
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.{hint}") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else file
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}.") from error
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid YAML: {words_of(error)}") from error
    if not isinstance(tree, CommentedMap) or tag_of(tree):
        found = "empty" if tree is None else f"a {tag_of(tree) or type(tree).__name__}"
        raise ConfigError(f"{file}: the top level must be a mapping of names to values, but is {found}.")
    return Document(file, tree)


def walk(tree: Any) -> Iterator[tuple[KeyPath, Any, Any]]:
    """Every key below `tree` as (path, mapping or list that holds it, key).

    A node that several keys share through anchors is entered once.
    """
    seen: set[int] = set()
    pending: list[tuple[KeyPath, Any]] = [((), tree)]
    while pending:
        path, node = pending.pop()
        if not isinstance(node, CommentedMap | CommentedSeq) or id(node) in seen:
            continue
        seen.add(id(node))
        keys = list(node) if isinstance(node, CommentedMap) else range(len(node))
        below = [((*path, str(key)), node, key) for key in keys]
        yield from below
        pending += [(key_path, parent[key]) for key_path, parent, key in reversed(below)]


def tag_of(node: Any) -> str:
    """The tag that stands at a node in the YAML; empty for plain values."""
    if not isinstance(node, CommentedMap | CommentedSeq | TaggedScalar) or node.tag is None:
        return ""
    return str(node.tag.value or "")


def is_mapping(value: Any) -> bool:
    """Whether `value` is a mapping of keys, not the description of an object."""
    return isinstance(value, Mapping) and not tag_of(value)


def has_tags(value: Any) -> bool:
    """Whether `value` has a tag, at any depth."""
    if isinstance(value, Mapping):
        return bool(tag_of(value)) or any(map(has_tags, value.values()))
    return bool(tag_of(value)) or (isinstance(value, list) and any(map(has_tags, value)))


def plain(value: Any) -> Any:
    """`value` in types that YAML text can hold, as a copy; `NOT_PLAIN` where it has others.

    Nodes with a tag, which come from YAML text, stay as they are.
    """
    if value is None or isinstance(value, bool | datetime.date) or tag_of(value):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    for kind in (str, int, float):  # ruamel's and NumPy's scalars are subclasses
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        mapping = {plain(key): plain(item) for key, item in value.items()}
        return NOT_PLAIN if any(part is NOT_PLAIN for item in mapping.items() for part in item) else mapping
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return NOT_PLAIN if any(item is NOT_PLAIN for item in items) else items
    return NOT_PLAIN


def words_of(error: BaseException) -> str:
    """What an exception says, with its type where that is not our own."""
    text = ": ".join(str(part) for part in error.args) if len(error.args) > 1 else str(error)
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"


def _without_tags(value: Any) -> Any:
    if tag_of(value):
        return None
    return {key: _without_tags(item) for key, item in value.items()} if is_mapping(value) else value
