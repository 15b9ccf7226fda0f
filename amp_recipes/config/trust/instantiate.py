"""How checked nodes become objects: by HyperPyYAML's own constructors, given only what the check let pass.

HyperPyYAML decides what `!new:`, `!name:`, `!apply:` and `!module:` do, and does it. It gets no text, so nothing can
come between check and build. Replaced, because it cannot be made safe: its reading of YAML (text in parentheses goes
through an unsafe loader), its references and includes (they run before its loader is asked for anything), and the
deep construction that it switches on in PyYAML and ruamel for the whole process.
"""

from __future__ import annotations

import functools
import inspect
import pydoc
import threading
from collections.abc import Callable
from types import BuiltinMethodType, MethodType
from typing import Any

import ruamel.yaml
import yaml as pyyaml
from hyperpyyaml import load_hyperpyyaml

from amp_recipes.config.trust.late_building import LateClass, raise_unbuilt
from amp_recipes.config.trust.trust import Trust
from amp_recipes.config.yaml.nodes import KeyPath, Mapping, Node, Scalar, Sequence, Unknown, dotted
from amp_recipes.config.yaml.tags import ATTRIBUTE, TUPLE
from amp_recipes.errors import ConfigError

_one_at_a_time = threading.Lock()


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
        self._built: dict[int, Any] = {}  # by the identity of the node

    def value_of(self, node: Node, path: KeyPath) -> Any:
        if isinstance(node, Scalar) and not node.tag:
            return node.value
        if id(node) not in self._built:
            self._built[id(node)] = self._build(node, path)
        return self._built[id(node)]

    def _build(self, node: Node, path: KeyPath) -> Any:
        assert not isinstance(node, Unknown), f"{node.source}: {node.tag} has not been called"
        values = self._values_below(node, path)
        if not node.tag:
            return values
        if node.tag == TUPLE:
            return tuple(values)
        try:
            if _is_attribute(node):
                return self._trust.attribute(*values)
            found = self._construct(node, values)
        except Exception as error:  # the code that the YAML names may raise anything
            if _is_attribute(node):
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
        constructor = _hyperpyyaml_constructors()[f"{kind}:"]
        target = self._trust.module(name) if kind == "!module" else self._trust.locate(name)
        # HyperPyYAML looks the name up again, with pydoc: what has been checked must be what it calls.
        found = pydoc.locate(name)
        if not _is_same(found, target):
            raise ConfigError(f"{name} is ambiguous: {found!r} is found where {target!r} was checked; rename one.")
        try:
            return constructor(_BuiltArguments, name, _node_with(node, arguments))
        except TypeError as error:
            if error.args and error.args[0] in (
                f"Invalid argument to class {name}",
                f"Invalid argument to callable {name}",
            ):
                error.args = error.args[1:]  # HyperPyYAML's addition, which turns the message into a tuple
            raise


class _BuiltArguments:
    """Stands where HyperPyYAML's constructors expect a YAML loader: gives them arguments that are built already."""

    @staticmethod
    def construct_mapping(node: Any, deep: bool = False) -> dict[str, Any]:
        return node.value

    @staticmethod
    def construct_sequence(node: Any, deep: bool = False) -> list[Any]:
        return node.value


def _node_with(node: Scalar | Sequence | Mapping, arguments: Any) -> ruamel.yaml.Node:
    """What HyperPyYAML takes for the node of a YAML: keyword arguments, positional ones, or none."""
    if isinstance(node, Mapping):
        return ruamel.yaml.MappingNode(node.tag, arguments)
    if isinstance(node, Sequence):
        return ruamel.yaml.SequenceNode(node.tag, arguments)
    return ruamel.yaml.ScalarNode(node.tag, "")


def _is_attribute(node: Node) -> bool:
    """Whether a node is what a reference to an attribute (`!ref <model.weight>`) was resolved to."""
    if not (isinstance(node, Sequence) and node.tag == ATTRIBUTE and len(node.items) == 2):
        return False
    name = node.items[1]
    return isinstance(name, Scalar) and not name.tag and isinstance(name.value, str)


def _is_same(found: Any, target: Any) -> bool:
    if isinstance(found, MethodType | BuiltinMethodType) and type(found) is type(target):
        return found == target  # a method is a new object each time it is looked up
    return found is target


def _place(node: Node, path: KeyPath) -> str:
    return f"{node.source}: {dotted(path)}: " if path else f"{node.source}: "


class _Collector:
    """Stands where HyperPyYAML expects a class of YAML loaders: keeps its constructors and reads nothing."""

    def __init__(self) -> None:
        self.constructors: dict[str, Callable[..., Any]] = {}

    def __call__(self, stream: Any) -> _Collector:
        return self

    def add_multi_constructor(self, prefix: str, constructor: Callable[..., Any]) -> None:
        self.constructors[prefix] = constructor

    def add_constructor(self, tag: str, constructor: Callable[..., Any]) -> None:
        """Not kept: `!tuple` would read its text with an unsafe loader."""

    def add_implicit_resolver(self, tag: str, regexp: Any, first: Any) -> None:
        """Not kept: tuples have been read."""

    def get_single_data(self) -> dict[str, Any]:
        return {}

    def dispose(self) -> None:
        pass


@functools.cache
def _hyperpyyaml_constructors() -> dict[str, Callable[..., Any]]:
    """HyperPyYAML's constructors by the prefix of their tags (`!new:`), as it registers them on any loader.

    While it runs it makes deep construction the default of PyYAML and ruamel for the whole process. That is put back
    before anything is built, so no object's own code that reads YAML meets it.
    """
    functions = [
        pyyaml.constructor.BaseConstructor.construct_object,
        ruamel.yaml.constructor.BaseConstructor.construct_object,
    ]
    collector = _Collector()
    with _one_at_a_time:
        defaults = [function.__defaults__ for function in functions]
        try:
            load_hyperpyyaml("{}", loader=collector)
        finally:
            for function, default in zip(functions, defaults, strict=True):
                function.__defaults__ = default
    return collector.constructors
