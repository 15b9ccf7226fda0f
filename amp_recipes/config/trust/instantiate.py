"""Builds the objects of a checked tree, each from the arguments below it: by the rules of HyperPyYAML.

HyperPyYAML itself is not called. It would look each name up again, which need not find what was checked, read text in
parentheses with an unsafe loader, and change defaults of PyYAML and ruamel for the whole process.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from amp_recipes.config.trust.late_building import LateClass, raise_unbuilt
from amp_recipes.config.trust.trust import Trust
from amp_recipes.config.yaml.nodes import (
    KeyPath,
    Mapping,
    Node,
    Scalar,
    Sequence,
    Unknown,
    attribute_name,
    dotted,
    is_plain_scalar,
)
from amp_recipes.config.yaml.tags import TUPLE


def build(root: Mapping, trust: Trust) -> dict[str, Any]:
    """The values and objects of a resolved and checked tree, without the keys that begin with `__`.

    Objects are built in the order of the file, arguments before the object that takes them. A node that several keys
    share is built once.
    Raises ConfigError that names the place and the key of an object that cannot be built; the exception of the
    object's own code is its cause.
    """
    values = _Builder(trust).value_of(root, ())
    return {key: value for key, value in values.items() if not (isinstance(key, str) and key.startswith("__"))}


class _Builder:
    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._built: dict[Node, Any] = {}

    def value_of(self, node: Node, path: KeyPath) -> Any:
        if is_plain_scalar(node):
            return node.value
        if node not in self._built:
            self._built[node] = self._build(node, path)
        return self._built[node]

    def _build(self, node: Node, path: KeyPath) -> Any:
        assert not isinstance(node, Unknown), f"{node.source}: {node.tag} has not been called"
        values = self._values_below(node, path)
        if not node.tag:
            return values
        if node.tag == TUPLE:
            return tuple(values)
        start = f"{node.source}: {dotted(path)}: " if path else f"{node.source}: "
        is_attribute = attribute_name(node) is not None
        try:
            if is_attribute:
                return self._trust.attribute(*values)
            return self._construct(node.tag, values, f"{start}{node.tag}")
        except Exception as error:  # the code that the YAML names may raise anything
            if is_attribute:
                raise_unbuilt(f"{start}attribute {values[1]!r}", error, "cannot be read")
            raise_unbuilt(f"{start}{node.tag}", error)

    def _values_below(self, node: Scalar | Sequence | Mapping, path: KeyPath) -> Any:
        if isinstance(node, Mapping):
            return {key: self.value_of(item, (*path, str(key))) for key, item in node.items.items()}
        if isinstance(node, Sequence):
            return [self.value_of(item, (*path, str(index))) for index, item in enumerate(node.items)]
        return None

    def _construct(self, tag: str, arguments: Any, place: str) -> Any:
        kind, _, name = tag.partition(":")
        if kind == "!module":
            return self._trust.module(name)
        target = self._trust.locate(name)
        positional = arguments if isinstance(arguments, list) else ()
        named = arguments if isinstance(arguments, dict) else {}
        if kind in ("!new", "!apply"):
            return target(*positional, **named)
        if not arguments:
            return target
        if not inspect.isclass(target):
            return functools.partial(target, *positional, **named)
        late = LateClass(target, *positional, **named)
        late.place = place
        return late
