"""Defines the nodes of a YAML before anything is built: each knows its tag and where it came from."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard

from amp_recipes.config.yaml.mistakes import join_mistakes
from amp_recipes.config.yaml.tags import ATTRIBUTE, TUPLE
from amp_recipes.errors import ConfigError

COMMAND_LINE = "command line"
NOT_PLAIN = object()  # what `plain_data` returns for a node that describes an object

# The types of a key: YAML's plain scalars.
Key: TypeAlias = "str | int | float | bool | None"
KeyPath: TypeAlias = "tuple[str, ...]"


@dataclass(frozen=True, slots=True, order=True)
class Source:
    """The source of a value. file: a path, or words (`command line`); line, column: from 1, or 0 for none."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return ":".join([self.file, *(str(number) for number in (self.line, self.column) if number)])


@dataclass(eq=False, slots=True)
class Scalar:
    """A single value. Two keys share a node where an alias or a `!ref` says so: they then get the same object.

    tag: empty for plain data, else as written (`!ref`, `!new:torch.nn.ReLU`).
    value: plain data (None, bool, int, float, str, date or datetime); with a tag: the text after it.
    text: as it was written, for messages.
    scope: for a reference, the root of its file, in which its `<key>` is looked up.
    """

    tag: str
    value: Any
    source: Source
    text: str = ""
    scope: Mapping | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """A list, a tuple (tag `!tuple`), or a call with positional arguments (tag `!new:...`)."""

    tag: str
    items: list[Node]
    source: Source


@dataclass(eq=False, slots=True)
class Mapping:
    """A mapping of keys to nodes, or a call with keyword arguments (tag `!new:...`).

    key_sources: the source of each key; comments: the text after `#` on the line of each key.
    """

    tag: str
    items: dict[Key, Node]
    source: Source
    key_sources: dict[Key, Source] = field(default_factory=dict)
    comments: dict[Key, str] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Unknown:
    """A value that is known only once a function is called (`!applyref:`), in a check that calls none."""

    tag: str
    source: Source


Node: TypeAlias = "Scalar | Sequence | Mapping | Unknown"


def is_plain_mapping(node: Any) -> TypeGuard[Mapping]:
    """Whether a node is a mapping of keys, not the description of an object."""
    return isinstance(node, Mapping) and not node.tag


def is_plain_scalar(node: Any) -> TypeGuard[Scalar]:
    """Whether a node is a single value, not a reference or the description of an object."""
    return isinstance(node, Scalar) and not node.tag


def is_plain_sequence(node: Any) -> TypeGuard[Sequence]:
    """Whether a node is a list or a tuple of values, not the description of an object."""
    return isinstance(node, Sequence) and node.tag in ("", TUPLE)


def attribute_name(node: Node) -> str | None:
    """The name in what a reference to an attribute (`!ref <model.weight>`) was resolved to; None for another node."""
    if not isinstance(node, Sequence) or node.tag != ATTRIBUTE or len(node.items) != 2:
        return None
    name = node.items[1]
    return name.value if is_plain_scalar(name) and isinstance(name.value, str) else None


def children(node: Node) -> list[tuple[Key, Node]]:
    """The nodes directly below one, each with its key, or its index as an int."""
    if isinstance(node, Mapping):
        return list(node.items.items())
    if isinstance(node, Sequence):
        return list(enumerate(node.items))
    return []


def walk(root: Node) -> Iterator[tuple[KeyPath, Node]]:
    """Every node below `root` with its path, in the order of the file; a node that several keys share comes once."""
    seen: set[Node] = {root}
    pending: list[tuple[KeyPath, Node]] = [((), root)]
    while pending:
        path, node = pending.pop()
        if path:
            yield path, node
        fresh = []
        for key, child in children(node):
            if child not in seen:
                seen.add(child)
                fresh.append(((*path, str(key)), child))
        pending += reversed(fresh)


def plain_data(node: Node) -> Any:
    """The data of a resolved node, as new lists and dicts; NOT_PLAIN if there is a call in it."""
    if isinstance(node, Scalar):
        return NOT_PLAIN if node.tag else node.value
    if isinstance(node, Unknown) or node.tag not in ("", TUPLE):
        return NOT_PLAIN
    values = [plain_data(child) for _, child in children(node)]
    if any(value is NOT_PLAIN for value in values):
        return NOT_PLAIN
    if isinstance(node, Mapping):
        return dict(zip(node.items, values, strict=True))
    return tuple(values) if node.tag == TUPLE else values


def scalar_text(value: Any) -> str:
    """A plain value other than text, as a YAML has it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, datetime.date):
        return value.isoformat()
    return repr(value).replace("inf", ".inf").replace("nan", ".nan")


def dotted(path: KeyPath) -> str:
    """A path as it is typed on the command line."""
    return ".".join(path)


class Mistakes:
    """Collects the mistakes in a YAML and its overrides, to report them all together."""

    def __init__(self) -> None:
        self._found: dict[tuple[Source, str], None] = {}

    def add(self, source: Source, text: str) -> None:
        """Add one mistake; the same one twice is reported once."""
        self._found[source, text] = None

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[str]:
        """Each as `file:line:column: text`, in the order of the lines of each file; files as they were met."""
        files = list(dict.fromkeys(source.file for source, _ in self._found))
        ordered = sorted(self._found, key=lambda found: (files.index(found[0].file), found[0].line, found[0].column))
        return iter([f"{source}: {text}" for source, text in ordered])

    def raise_if_any(self, where: str) -> None:
        """Raise ConfigError with all of them; `where` is named above more than one."""
        if self._found:
            raise ConfigError(join_mistakes(list(self), where))
