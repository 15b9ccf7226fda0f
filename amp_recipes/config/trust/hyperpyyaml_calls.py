"""Calls what a YAML names as HyperPyYAML does, so that `!new:`, `!name:`, `!apply:` and `!module:` mean the same here.

This is all that is used of HyperPyYAML. It registers a function for each of these tags at the YAML loader that it is
given; a loader that reads nothing collects them, and each is called with a name that has been checked and arguments
that are built. It gets no text, so nothing can come between check and build. The rest of it cannot be made safe: its
reading of YAML (text in parentheses goes through an unsafe loader), its references and includes (they run before its
loader is asked for anything), and the deep construction that it switches on in PyYAML and ruamel for the whole process.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import ruamel.yaml
import yaml as pyyaml
from hyperpyyaml import load_hyperpyyaml

_one_at_a_time = threading.Lock()


def call(kind: str, name: str, arguments: dict[str, Any] | list[Any] | None) -> Any:
    """Return what HyperPyYAML builds for a tag such as `!new:torch.nn.Linear`: kind `!new`, and the name.

    arguments: built already; a dict by name, a list by position, None: there are none.
    """
    constructor = _constructors()[f"{kind}:"]
    try:
        return constructor(_BuiltArguments, name, _node_of(f"{kind}:{name}", arguments))
    except TypeError as error:
        added = [f"Invalid argument to {what} {name}" for what in ("class", "callable")]
        if error.args and error.args[0] in added:
            error.args = error.args[1:]  # HyperPyYAML's addition turns the message into a tuple
        raise


class _BuiltArguments:
    """Stands where HyperPyYAML's constructors expect a YAML loader: gives them arguments that are built already."""

    @staticmethod
    def construct_mapping(node: Any, deep: bool = False) -> dict[str, Any]:
        return node.value

    @staticmethod
    def construct_sequence(node: Any, deep: bool = False) -> list[Any]:
        return node.value


def _node_of(tag: str, arguments: dict[str, Any] | list[Any] | None) -> ruamel.yaml.Node:
    """Return an object that HyperPyYAML accepts as the node of a YAML."""
    if isinstance(arguments, dict):
        return ruamel.yaml.MappingNode(tag, arguments)
    if isinstance(arguments, list):
        return ruamel.yaml.SequenceNode(tag, arguments)
    return ruamel.yaml.ScalarNode(tag, "")


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
def _constructors() -> dict[str, Callable[..., Any]]:
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
