"""Checks every object that a resolved YAML names, before one of them is built: what it is, may be, and is given."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType
from typing import Any

from amp_recipes.config.nodes import Mapping, Mistakes, Node, Scalar, Sequence, Unknown, walk
from amp_recipes.config.run_options import did_you_mean
from amp_recipes.config.signatures import check_call, return_type
from amp_recipes.config.tags import ATTRIBUTE
from amp_recipes.config.trust import Trust
from amp_recipes.errors import ConfigError


def check_targets(root: Mapping, trust: Trust, mistakes: Mistakes) -> int:
    """How many objects a resolved tree would build; what is wrong with any of them is added to `mistakes`.

    Imports the modules that the tree names, if `trust` allows them; calls nothing.
    """
    count = 0
    for _, node in walk(root):
        kind, colon, name = node.tag.partition(":")
        if node.tag == ATTRIBUTE:
            _check_attribute(node, trust, mistakes)
        elif colon and kind in _CHECKS:
            count += kind in ("!new", "!name", "!apply")
            try:
                _CHECKS[kind](name, node, trust, mistakes)
            except ConfigError as error:
                mistakes.add(node.source, str(error))
    return count


def _check_attribute(node: Node, trust: Trust, mistakes: Mistakes) -> None:
    """`!ref <key.attribute>`, which was resolved to a call of getattr; nobody else may call it."""
    items = node.items if isinstance(node, Sequence) else []
    name = items[1].value if len(items) == 2 and isinstance(items[1], Scalar) and not items[1].tag else None
    if not isinstance(name, str):
        mistakes.add(node.source, "getattr takes an object and the name of an attribute; write !ref <key.attribute>.")
    elif not (name.isascii() and name.isidentifier()) or name.startswith("_"):
        mistakes.add(node.source, f"{name!r} is no public attribute: expected one name that begins with a letter.")
    else:
        known = _attributes(items[0], trust)
        if known and name not in known:
            public = [attribute for attribute in known if not attribute.startswith("_")]
            mistakes.add(node.source, f"{items[0].tag} gives no {name!r}.{did_you_mean(name, public)}")


def _attributes(node: Node, trust: Trust) -> set[str]:
    """All attributes of the object at a node; empty where they are known only once it is built.

    They are known of dataclasses and named tuples that have no `__getattr__`: by the class that is named, or that a
    function says it returns.
    """
    kind, _, name = node.tag.partition(":")
    if kind not in ("!new", "!apply"):
        return set()
    try:
        target = trust.locate(name)
    except ConfigError:  # told where the node itself is checked
        return set()
    made = target if kind == "!new" else return_type(target)
    if not inspect.isclass(made) or hasattr(made, "__getattr__"):
        return set()
    if dataclasses.is_dataclass(made):
        return {field.name for field in dataclasses.fields(made)} | set(dir(made))
    return set(dir(made)) if hasattr(made, "_fields") and issubclass(made, tuple) else set()


def _check_new(name: str, node: Node, trust: Trust, mistakes: Mistakes) -> None:
    target = trust.locate(name)
    if not inspect.isclass(target):
        use = f"!apply:{name} calls it" if inspect.isroutine(target) else f"!name:{name} gives it"
        mistakes.add(node.source, f"!new: makes an object of a class, but {name} is {_what(target)}; {use}.")
    elif inspect.isabstract(target):
        methods = ", ".join(sorted(target.__abstractmethods__))
        mistakes.add(node.source, f"{name} is abstract: name a class that also defines {methods}.")
    else:
        _add_all(check_call(target, node, partial=False), mistakes)


def _check_apply(name: str, node: Node, trust: Trust, mistakes: Mistakes) -> None:
    target = trust.locate(name)
    if inspect.isroutine(target):
        _add_all(check_call(target, node, partial=False), mistakes)
    else:
        use = f"!new:{name} makes an object of it" if inspect.isclass(target) else f"!name:{name} gives it"
        mistakes.add(node.source, f"!apply: calls a function, but {name} is {_what(target)}; {use}.")


def _check_name(name: str, node: Node, trust: Trust, mistakes: Mistakes) -> None:
    target = trust.locate(name)
    if inspect.isclass(target) or inspect.isroutine(target):
        if _has_arguments(node):
            _add_all(check_call(target, node, partial=True), mistakes)
    elif _has_arguments(node):
        mistakes.add(node.source, f"only a class or function takes arguments, but {name} is {_what(target)}.")


def _check_module(name: str, node: Node, trust: Trust, mistakes: Mistakes) -> None:
    trust.module(name)
    if _has_arguments(node):
        mistakes.add(node.source, f"!module:{name} takes no arguments.")


def _check_applied_reference(name: str, node: Node, trust: Trust, mistakes: Mistakes) -> None:
    target = trust.locate(name)
    if not inspect.isroutine(target):
        mistakes.add(node.source, f"!applyref: calls a function, but {name} is {_what(target)}.")


_CHECKS = {
    "!new": _check_new,
    "!apply": _check_apply,
    "!name": _check_name,
    "!module": _check_module,
    "!applyref": _check_applied_reference,
}


def _has_arguments(node: Node) -> bool:
    return not isinstance(node, Scalar | Unknown) and bool(node.items)


def _add_all(found: Any, mistakes: Mistakes) -> None:
    for source, text in found:
        mistakes.add(source, text)


def _what(target: Any) -> str:
    if inspect.isclass(target):
        return "a class"
    if inspect.isroutine(target):
        return "a function"
    return "a module" if isinstance(target, ModuleType) else f"a {type(target).__name__}"
