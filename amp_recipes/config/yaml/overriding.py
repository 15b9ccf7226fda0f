"""Writes overrides into the tree of a YAML; refuses those that do not fit, or are not plain data."""

from __future__ import annotations

import datetime
import difflib
import os
import re
from collections import deque
from collections.abc import Mapping as AnyMapping
from typing import Any

from amp_recipes.config.options.other_names import instead_of
from amp_recipes.config.options.run_options import OPTION_NAMES
from amp_recipes.config.yaml.limits import DEPTH, NUMBER_BITS, TEXT_CHARACTERS, Budget
from amp_recipes.config.yaml.mistakes import shown
from amp_recipes.config.yaml.nodes import (
    NOT_PLAIN,
    Key,
    KeyPath,
    Mapping,
    Mistakes,
    Node,
    Scalar,
    Sequence,
    Source,
    Unknown,
    children,
    dotted,
    is_plain_mapping,
    is_plain_sequence,
    scalar_text,
)
from amp_recipes.config.yaml.reading import read_text
from amp_recipes.config.yaml.tags import PLACEHOLDER, REFERENCES, TUPLE

OVERRIDES = "overrides"  # the source of overrides that are not from the command line

_OBJECTS = ("!new:", "!name:", "!module:")  # what `!apply:` gives may as well be a number
_PLAIN_VALUES = "null, true or false, a number, a string, or lists and mappings of these"
# Each key is compared with each unknown override, which takes up to 25 microseconds a pair.
_SUGGESTED_KEYS = 1_000
_SUGGESTED_ITEMS = 10  # of one list
_SUGGESTED_LEAVES = 100  # keys of the same last part
_SUGGESTIONS = 10
_NAME_CHARACTERS = 200
_KeyTypes = str | int | float | None


def apply_overrides(
    root: Mapping, overrides: AnyMapping[Any, Any], mistakes: Mistakes, source_name: str, dashes: str
) -> None:
    """Write the overrides that fit into the tree below `root`; what is wrong with the others goes to `mistakes`.

    overrides: nested as the YAML is, or with dots in its keys. A key must be in the tree, or be a run option, which
        then becomes a new key at the top. A mapping changes single keys of a mapping, or arguments of a call, and
        replaces only what holds nothing; every other value replaces the old one.
    source_name: the source of the new values, also in messages about their mistakes; dashes: the prefix
        of a key as it is typed.
    Raises LimitError.
    """
    if not isinstance(overrides, AnyMapping):
        mistakes.add(Source(source_name), _no_mapping(overrides))
        return
    overriding = _Overriding(root, mistakes, Source(source_name), dashes)
    overriding.below(root, overriding.split_keys(overrides, ()), (), Source(root.source.file))


def overrides_from_text(text: str, mistakes: Mistakes, budget: Budget) -> dict[Any, Any]:
    """The plain data of overrides that are given as YAML text; a tag is a mistake. Raises LimitError."""
    if not text.strip():
        return {}
    node = read_text(text, OVERRIDES, mistakes, budget)
    if node is None:
        return {}
    values = _written_out(node, (), mistakes, budget)
    if values is None:  # nothing but comments
        return {}
    if not isinstance(values, dict):
        mistakes.add(node.source, _no_mapping(values))
        return {}
    return values


def to_nodes(value: Any, source: Source, mistakes: Mistakes, name: str) -> Node:
    """`value` as nodes from `source`; what is not plain data is a mistake that begins with `name`, and null.

    Numbers and strings of other libraries, and paths, become Python's own; a tuple stays one. Raises LimitError.
    """
    return _node(value, source, mistakes, name, Budget(), 0) or Scalar("", None, source)


class _Overriding:
    """One set of overrides on its way into one tree."""

    def __init__(self, root: Mapping, mistakes: Mistakes, source: Source, dashes: str) -> None:
        self.root = root
        self.mistakes = mistakes
        self.source = source
        self.dashes = dashes
        self.budget = Budget()
        self.suggestions_left = _SUGGESTIONS
        self.known: list[str] = []

    def split_keys(self, overrides: AnyMapping[Any, Any], path: KeyPath) -> dict[Any, Any]:
        """Overrides with a level for each dot in a key."""
        nested: dict[Any, Any] = {}
        for key, value in overrides.items():
            self.budget.take_nodes(1, self.source)
            head, dot, below = key.partition(".") if isinstance(key, str) else (key, "", "")
            value, key_path = {below: value} if dot else value, (*path, str(head))
            if isinstance(value, AnyMapping):
                if len(key_path) >= DEPTH:
                    name = f"{self._name(key_path[:3])}..."
                    self.mistakes.add(self.source, f"{name} has more than {DEPTH} levels.")
                    continue
                value = self.split_keys(value, key_path)
            self._combine(nested, head, value, key_path)
        return nested

    def _combine(self, nested: dict[Any, Any], key: Any, value: Any, path: KeyPath) -> None:
        """Add one entry to what is given for the same keys already; the last of two values wins."""
        if key in nested and isinstance(nested[key], dict) != isinstance(value, dict):
            self.mistakes.add(self.source, f"{self._name(path)} is given both a value and values for keys below it.")
        elif isinstance(value, dict) and key in nested:
            for below, item in value.items():
                self._combine(nested[key], below, item, (*path, str(below)))
        else:
            nested[key] = value

    def below(self, node: Mapping | Sequence, overrides: dict[Any, Any], path: KeyPath, where: Source) -> None:
        """Write overrides below `node`, which is at `path`, and at the line `where` of the YAML."""
        for given, value in overrides.items():
            key = _find_key(node, given)
            if key is not None:
                self._write(node, key[0], value, (*path, str(key[0])), where)
            elif not path and given in OPTION_NAMES and not isinstance(value, dict):
                self._replace(node, given, value, (given,))  # its value is checked with all other run options
            elif isinstance(value, dict) and value and isinstance(node, Mapping):
                # No such key: a name with a dot in it may be one key of the YAML.
                joined = {f"{given}.{deeper}": item for deeper, item in value.items()}
                self.below(node, joined, path, where)
            else:
                self.mistakes.add(self.source, self._no_such_key(node, (*path, str(given)), where))

    def _no_such_key(self, node: Mapping | Sequence, path: KeyPath, where: Source) -> str:
        """Return the mistake that `node`, at the line `where`, lacks the last key or index of the path."""
        above = path[:-1]
        if isinstance(node, Sequence):
            text = f"{_standing(above, where)} is a list of {len(node.items)}; expected one of its indices, from 0."
            return f"{self._name(path)}: {text}"
        text = f"{self._name(path)} is neither a key of the YAML nor a run option."
        hint = instead_of(dotted(path)) or self._suggestion(dotted(path))
        if above and node.tag.startswith(_OBJECTS):
            text += f" To give {_standing(above, where)} another argument, add it to the YAML first."
        return text + hint

    def _write(self, parent: Mapping | Sequence, key: Any, value: Any, path: KeyPath, where: Source) -> None:
        """Write one override over the value at `key`, or below it."""
        old = parent.items[key]
        where = parent.key_sources.get(key, where) if isinstance(parent, Mapping) else old.source
        if not isinstance(value, dict) or _takes_a_mapping(old):
            if wrong := _wrong_replacement(old, value, where):
                self.mistakes.add(self.source, f"{self._name(path)} {wrong}")
            else:
                self._replace(parent, key, value, path)
        elif isinstance(old, Mapping | Sequence):
            self.below(old, value, path, where)
        elif not isinstance(old, Unknown):  # nothing is known of those, and their mistake has been reported
            given = self._name((*path, *map(str, list(value)[:1])))
            written = f"{old.tag} {old.value}".strip() if old.tag else shown(old.value)
            known = "; override what it refers to" if old.tag in REFERENCES else ", which has no keys"
            self.mistakes.add(self.source, f"{given}: {_standing(path, where)} is {written}{known}.")

    def _replace(self, parent: Mapping | Sequence, key: Any, value: Any, path: KeyPath) -> None:
        node = _node(value, self.source, self.mistakes, self._name(path), self.budget, len(path))
        if node is not None:
            parent.items[key] = node
            if isinstance(parent, Mapping):
                parent.key_sources.setdefault(key, self.source)

    def _name(self, path: KeyPath) -> str:
        name = self.dashes + dotted(path)
        return name if len(name) <= _NAME_CHARACTERS else f"{name[:_NAME_CHARACTERS]}..."

    def _suggestion(self, wanted: str) -> str:
        """` Did you mean --model.hidden?` for the nearest key or run option; the same last part at any depth is near.

        The first few only: a list of hundreds of wrong keys needs none, and comparing names takes time.
        """
        self.suggestions_left -= 1
        if self.suggestions_left < 0:
            return ""
        self.known = self.known or [*OPTION_NAMES, *_dotted_keys(self.root)]
        spelt = {_plain_spelling(name): name for name in reversed(self.known)}
        near = _nearest_of(_plain_spelling(wanted[:_NAME_CHARACTERS]), list(spelt))
        return f" Did you mean {self.dashes}{spelt[near]}?" if near else ""


def _nearest_of(wanted: str, names: list[str]) -> str:
    """The name of the same last part, else the nearest, else that of the nearest last part; empty if none is near."""
    leaves = {name: name.rpartition(".")[2] for name in names}
    leaf = wanted.rpartition(".")[2]
    same_leaf = [] if leaf.isdecimal() else [name for name in names if leaves[name] == leaf]
    if near := difflib.get_close_matches(wanted, same_leaf[:_SUGGESTED_LEAVES], n=1, cutoff=0.0):
        return near[0]
    if near := difflib.get_close_matches(wanted, names, n=1):
        return near[0]
    by_leaf = {leaves[name]: name for name in reversed(names)}
    near = difflib.get_close_matches(leaf, by_leaf, n=1)
    return by_leaf[near[0]] if near else ""


def _wrong_replacement(old: Node, value: Any, where: Source) -> str:
    """Return why a value cannot replace the one at the line `where`; empty if it can."""
    if old.tag.startswith(_OBJECTS) and not (value is None or value is False):
        text = f"would replace the object {old.tag} at {_line(where)} by {shown(value)}, which is plain data"
        return f"{text}. To leave the object out, give null or false."
    if isinstance(old, Sequence) and isinstance(value, str) and re.fullmatch(r"\(.*\)", value):
        # On a command line this is text, which no call that wants two numbers would understand.
        return f"is the text {shown(value)}, but would replace the list at {_line(where)}; give a list, such as [1, 2]."
    return ""


def _standing(path: KeyPath, where: Source) -> str:
    """A key of the YAML for a message, with its line."""
    return f"{dotted(path)} ({_line(where)})"


def _line(where: Source) -> str:
    return str(Source(where.file, where.line))


def _find_key(node: Mapping | Sequence, given: Any) -> tuple[Key] | None:
    """The key of a mapping, or the index in a list, that `given` names; alone in a tuple, since null is a key too."""
    text = str(given)
    if isinstance(node, Sequence):
        is_index = text.isascii() and text.isdecimal() and len(text) < 10
        return (int(text),) if is_index and int(text) < len(node.items) else None
    for key in (given, text):
        if key in node.items:
            return (key,)
    # A command line gives text where the YAML may have a number for a key.
    return next(((key,) for key in node.items if not isinstance(key, str) and str(key) == text), None)


def _takes_a_mapping(node: Node) -> bool:
    """Whether a mapping may replace this node: it has no keys that a typo could miss.

    Not the rule of an include, in whose file new keys are allowed: there only null and a placeholder give way.
    """
    if isinstance(node, Scalar):
        return node.tag == PLACEHOLDER or (not node.tag and node.value is None)
    return is_plain_mapping(node) and not children(node)


def _node(value: Any, source: Source, mistakes: Mistakes, name: str, budget: Budget, depth: int) -> Node | None:
    """`value` as nodes; None, with a mistake, where it is not plain data."""
    if not isinstance(value, AnyMapping | list | tuple):
        return _scalar_node(value, source, mistakes, name)
    keys = _plain_keys(value)
    wrong = [key for key in keys if not isinstance(key, _KeyTypes)]
    if wrong:
        mistakes.add(source, f"{name} has the key {shown(wrong[0])}; expected a string, a number, true or false.")
        return None
    if depth >= DEPTH:
        mistakes.add(source, f"{name} has more than {DEPTH} levels.")
        return None
    items: dict[Any, Node] = {}
    for key, item in zip(keys, value.values() if isinstance(value, AnyMapping) else value, strict=True):
        budget.take_nodes(1, source)
        node = _node(item, source, mistakes, f"{name}.{key}", budget, depth + 1)
        if node is not None:
            items[key] = node
    if len(items) < len(set(keys)):
        return None
    if isinstance(value, AnyMapping):
        return Mapping("", items, source, dict.fromkeys(items, source))
    return Sequence(TUPLE if isinstance(value, tuple) else "", list(items.values()), source)


def _plain_keys(value: AnyMapping[Any, Any] | list[Any] | tuple[Any, ...]) -> list[Any]:
    """The keys of a mapping, or the indices of a list; a key that a YAML cannot have as it is."""
    if not isinstance(value, AnyMapping):
        return list(range(len(value)))
    plain = [_scalar_value(key) for key in value]
    return [key if found is NOT_PLAIN else found for key, found in zip(value, plain, strict=True)]


def _scalar_node(value: Any, source: Source, mistakes: Mistakes, name: str) -> Scalar | None:
    plain = _scalar_value(value)
    if plain is NOT_PLAIN:
        mistakes.add(source, f"{name} is {shown(value)}, a {type(value).__name__}; expected {_PLAIN_VALUES}.")
    elif isinstance(plain, str) and (wrong := _wrong_text(plain)):
        mistakes.add(source, f"{name} {wrong}.")
    elif isinstance(plain, int) and plain.bit_length() > NUMBER_BITS:
        mistakes.add(source, f"{name} has {plain.bit_length():,} bits; a whole number has at most {NUMBER_BITS:,}.")
    else:
        return Scalar("", plain, source, plain if isinstance(plain, str) else scalar_text(plain))
    return None


def _scalar_value(value: Any) -> Any:
    """A single value as Python's own type; `NOT_PLAIN` for every other object."""
    if value is None or isinstance(value, bool) or type(value) in (datetime.date, datetime.datetime):
        return value
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    # NumPy's float64 and the members of an enumeration are subclasses.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, float) else NOT_PLAIN


def _wrong_text(text: str) -> str:
    if len(text) > TEXT_CHARACTERS:
        return f"has {len(text):,} characters; expected at most {TEXT_CHARACTERS:,}"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"is {shown(text)}, which holds a byte that is not UTF-8"
    return ""


def _written_out(node: Node, path: KeyPath, mistakes: Mistakes, budget: Budget) -> Any:
    """Return the plain data of nodes; each alias is written out and counted. A tag is a mistake, and becomes null."""
    budget.take_nodes(1, node.source)
    if is_plain_sequence(node):
        items = [_written_out(item, (*path, str(at)), mistakes, budget) for at, item in enumerate(node.items)]
        return tuple(items) if node.tag else items
    if node.tag:
        start = f"{dotted(path)}: " if path else ""
        mistakes.add(node.source, f"{start}an override must be plain data, but this one has the tag {node.tag}.")
        return None
    if isinstance(node, Mapping):
        return {key: _written_out(item, (*path, str(key)), mistakes, budget) for key, item in node.items.items()}
    return node.value if isinstance(node, Scalar) else None


def _dotted_keys(root: Mapping) -> list[str]:
    """The keys of a tree as they are typed, upper ones first; through aliases too, so at most so many.

    Long ones are left out, as to compare them takes time.
    """
    names: list[str] = []
    pending: deque[tuple[KeyPath, Node]] = deque([((), root)])
    while pending and len(names) < _SUGGESTED_KEYS:
        path, node = pending.popleft()
        count = _SUGGESTED_ITEMS if isinstance(node, Sequence) else _SUGGESTED_KEYS - len(names)
        below = [((*path, str(key)[: _NAME_CHARACTERS + 1]), child) for key, child in children(node)[:count]]
        names += [dotted(key_path) for key_path, _ in below]
        pending += below
    return [name for name in names if len(name) <= _NAME_CHARACTERS]


def _plain_spelling(name: str) -> str:
    """A name without what people confuse: `Model[max-len]` as `model.max_len`."""
    return re.sub(r"\[([^][]*)\]", r".\1", name).replace("-", "_").lower()


def _no_mapping(values: Any) -> str:
    return f"overrides must be a mapping of keys to values, but are {shown(values)}."
