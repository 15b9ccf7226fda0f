"""Builds the objects of a checked tree, each from the arguments below it.

What is called is what the check looked up; HyperPyYAML decides how (`hyperpyyaml_calls`).
"""

from __future__ import annotations

import functools
import inspect
import pydoc
import sys
from types import BuiltinMethodType, MethodType
from typing import Any

from amp_recipes.config.trust.hyperpyyaml_calls import call
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
from amp_recipes.errors import ConfigError


def build(root: Mapping, trust: Trust) -> dict[str, Any]:
    """Build the values and objects of a resolved and checked tree, without the keys that begin with `__`.

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
        is_attribute = attribute_name(node) is not None
        try:
            if is_attribute:
                return self._trust.attribute(*values)
            found = self._construct(node, values)
        except Exception as error:  # the code that the YAML names may raise anything
            if is_attribute:
                raise_unbuilt(f"{_place(node, path)}attribute {values[1]!r}", error, "cannot be read")
            raise_unbuilt(f"{_place(node, path)}{node.tag}", error)
        if type(found) is functools.partial and inspect.isclass(found.func):
            found = LateClass(found.func, *found.args, **found.keywords)
            found.place = f"{_place(node, path)}{node.tag}"
        return found

    def _values_below(self, node: Scalar | Sequence | Mapping, path: KeyPath) -> Any:
        if isinstance(node, Mapping):
            return {key: self.value_of(item, (*path, str(key))) for key, item in node.items.items()}
        if isinstance(node, Sequence):
            return [self.value_of(item, (*path, str(index))) for index, item in enumerate(node.items)]
        return None

    def _construct(self, node: Scalar | Sequence | Mapping, arguments: Any) -> Any:
        kind, _, name = node.tag.partition(":")
        target = self._trust.module(name) if kind == "!module" else self._trust.locate(name)
        # HyperPyYAML looks the name up again, with pydoc: what has been checked must be what it calls.
        found = pydoc.locate(name)
        if _is_same(found, target):
            return call(kind, name, arguments)
        own_name = _name_in_own_module(target)
        if own_name and pydoc.locate(own_name) is target:
            return call(kind, own_name, arguments)
        raise ConfigError(f"{name} is ambiguous: the check found {target!r}, Python {found!r}; rename one.")


def _is_same(found: Any, target: Any) -> bool:
    if isinstance(found, MethodType | BuiltinMethodType) and type(found) is type(target):
        return found == target  # a method is a new object each time it is looked up
    return found is target


def _name_in_own_module(target: Any) -> str:
    """Return the name of a class or function in the module that defines it; empty if it has none that is safe.

    From Python 3.12 on, pydoc takes the module `torch.nn.utils.spectral_norm` for the function of that name. The module
    must be imported already, and must be no package: then pydoc imports nothing to find the name.
    """
    home = getattr(target, "__module__", None)
    module = sys.modules.get(home) if isinstance(home, str) else None
    if module is None or hasattr(module, "__path__") or not (inspect.isclass(target) or inspect.isfunction(target)):
        return ""
    return f"{home}.{target.__qualname__}"


def _place(node: Node, path: KeyPath) -> str:
    return f"{node.source}: {dotted(path)}: " if path else f"{node.source}: "
