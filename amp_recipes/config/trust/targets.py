"""Checks every object that a resolved YAML names before any is built: its kind, its trust and its arguments."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from amp_recipes.config.trust.signatures import Callee
from amp_recipes.config.trust.trust import Trust
from amp_recipes.config.yaml.mistakes import did_you_mean
from amp_recipes.config.yaml.nodes import (
    COMMAND_LINE,
    KeyPath,
    Mapping,
    Mistakes,
    Node,
    Scalar,
    Sequence,
    Unknown,
    attribute_name,
    dotted,
    walk,
)
from amp_recipes.config.yaml.tags import ATTRIBUTE
from amp_recipes.errors import ConfigError

_ENOUGH_MISTAKES = 300  # only the first are shown; a file of nothing but mistakes must not take minutes
_OBJECTS = ("!new", "!name", "!apply")
_KINDS = (*_OBJECTS, "!module", "!applyref")
# What a tag must name: as a test, and in words.
_MUST_BE: dict[str, tuple[Callable[[Any], bool], str]] = {
    "!new": (inspect.isclass, "makes an object of a class"),
    "!apply": (inspect.isroutine, "calls a function"),
    "!applyref": (inspect.isroutine, "calls a function"),
}


def check_targets(root: Mapping, trust: Trust, mistakes: Mistakes) -> int:
    """Return the number of objects that a resolved tree would build; add their mistakes to `mistakes`.

    Imports the modules that the tree names, if `trust` allows them; calls nothing. Ends early after hundreds of
    mistakes.
    """
    count = 0
    checking = _Checking(root, trust, mistakes)
    for _, node in walk(root):
        if len(mistakes) > _ENOUGH_MISTAKES:
            break
        kind, colon, name = node.tag.partition(":")
        if node.tag == ATTRIBUTE:
            checking.check_attribute(node)
        elif colon and kind in _KINDS:
            count += kind in _OBJECTS
            try:
                checking.check_object(kind, name, node)
            except ConfigError as error:
                mistakes.add(node.source, str(error))
    return count


class _Checking:
    """One check of one YAML: what its names lead to, each looked up and read once."""

    def __init__(self, root: Mapping, trust: Trust, mistakes: Mistakes) -> None:
        self._root = root
        self._trust = trust
        self._mistakes = mistakes
        self._targets: dict[str, Any] = {}
        self._errors: dict[str, ConfigError] = {}
        self._callees: dict[str, Callee] = {}
        self._attributes: dict[str, set[str]] = {}

    def check_object(self, kind: str, name: str, node: Node) -> None:
        """Note what is wrong with `!new:`, `!name:`, ... of a name. Raises ConfigError if it may not be named."""
        if kind == "!module":
            self._trust.module(name)
            if _has_arguments(node):
                self._mistakes.add(node.source, f"!module:{name} takes no arguments.")
        elif wrong := _wrong_kind(kind, name, self._target(name)):
            self._mistakes.add(node.source, wrong)
        elif kind in ("!new", "!apply") or (kind == "!name" and _has_arguments(node)):
            self._check_arguments(name, node, partial=kind == "!name")

    def check_attribute(self, node: Node) -> None:
        """Check `!ref <key.attribute>`, which was resolved to a call of getattr; nobody else may call it."""
        name = attribute_name(node)
        if name is None:
            text = "getattr takes an object and the name of an attribute; write !ref <key.attribute>."
            self._mistakes.add(node.source, text)
        elif not (name.isascii() and name.isidentifier()) or name.startswith("_"):
            text = f"{name!r} is not a public attribute: expected one name that begins with a letter."
            self._mistakes.add(node.source, text)
        else:
            assert isinstance(node, Sequence)  # as `attribute_name` says
            self._check_attribute_of(node.items[0].tag, name, node)

    def _check_attribute_of(self, tag: str, name: str, node: Node) -> None:
        kind, _, owner = tag.partition(":")
        with suppress(ConfigError):  # reported where the object itself is checked
            if kind == "!module":
                self._check_member(self._trust.module(owner), name, node)
            elif kind in ("!new", "!apply"):
                known = self._attributes_of(tag)
                public = [attribute for attribute in known if not attribute.startswith("_")]
                if known and name not in known:
                    self._mistakes.add(
                        node.source, f"the object of {tag} has no attribute {name!r}.{did_you_mean(name, public)}"
                    )

    def _check_member(self, module: ModuleType, name: str, node: Node) -> None:
        try:
            self._trust.attribute(module, name)
        except ConfigError as error:
            self._mistakes.add(node.source, str(error))

    def _check_arguments(self, name: str, node: Node, partial: bool) -> None:
        target = self._target(name)
        if not (inspect.isclass(target) or inspect.isroutine(target)):
            text = f"only a class or function takes arguments, but {name} is {_what(target)}."
            self._mistakes.add(node.source, text)
            return
        for source, text in self._callee(name).check(node, partial, functools.partial(self._origin, node)):
            self._mistakes.add(source, text)
            if len(self._mistakes) > _ENOUGH_MISTAKES:
                return

    @functools.cached_property
    def _paths(self) -> dict[Node, KeyPath]:
        return {node: path for path, node in walk(self._root)}

    def _origin(self, call: Node, value: Node) -> str:
        """Say which option, or which key, gave an argument of `call` its value; empty for the argument itself."""
        path = self._paths.get(value)
        if path is None:
            return ""
        if value.source.file == COMMAND_LINE:
            return f" It was given as --{dotted(path)}."
        return "" if path[:-1] == self._paths.get(call) else f" It is the value of the key {dotted(path)}."

    def _target(self, name: str) -> Any:
        """The object that a name leads to. Raises ConfigError, the same one each time."""
        if name in self._errors:
            raise self._errors[name]
        if name not in self._targets:
            try:
                self._targets[name] = self._trust.locate(name)
            except ConfigError as error:
                self._errors[name] = error
                raise
        return self._targets[name]

    def _callee(self, name: str) -> Callee:
        if name not in self._callees:
            self._callees[name] = Callee(self._target(name))
        return self._callees[name]

    def _attributes_of(self, tag: str) -> set[str]:
        """All attributes of what `!new:` or `!apply:` of a name gives; empty where only the object itself knows."""
        if tag not in self._attributes:
            kind, _, name = tag.partition(":")
            made = self._target(name)
            if kind == "!apply":
                returned = None if inspect.iscoroutinefunction(made) else self._callee(name).hints.get("return")
                made = returned if _has_no_other_kind(returned) else None
            self._attributes[tag] = set(dir(made)) | _fields_of(made) if _has_only_fields(made) else set()
        return self._attributes[tag]


def _wrong_kind(kind: str, name: str, target: Any) -> str:
    """Why a tag cannot be that of an object, and which one can; empty if nothing is wrong."""
    fits, does = _MUST_BE.get(kind, (None, ""))
    if fits is not None and not fits(target):
        use = f"!apply:{name} calls it" if inspect.isroutine(target) else f"!name:{name} gives it"
        use = f"!new:{name} makes an object of it" if inspect.isclass(target) else use
        return f"{kind}: {does}, but {name} is {_what(target)}; {use}."
    if kind == "!new" and inspect.isabstract(target):
        methods = ", ".join(sorted(target.__abstractmethods__))
        return f"{name} is abstract: name a class that also defines {methods}."
    return ""


def _has_arguments(node: Node) -> bool:
    return not isinstance(node, Scalar | Unknown) and bool(node.items)


def _what(target: Any) -> str:
    if inspect.isclass(target):
        return "a class"
    if inspect.isroutine(target):
        return "a function"
    return "a module" if isinstance(target, ModuleType) else f"a {type(target).__name__}"


def _has_only_fields(made: Any) -> bool:
    """Whether the objects of a class have certainly no attributes but its fields and what the class shows.

    That is so for a named tuple, and for a dataclass that is built by nothing but its generated `__init__`.
    """
    if not inspect.isclass(made) or hasattr(made, "__getattr__"):
        return False
    if made.__bases__ == (tuple,):
        return "_fields" in vars(made)
    is_looked_up, is_made = made.__getattribute__ is object.__getattribute__, made.__new__ is object.__new__
    if "__dataclass_fields__" not in vars(made) or hasattr(made, "__post_init__") or not (is_looked_up and is_made):
        return False
    code = getattr(vars(made).get("__init__"), "__code__", None)
    return code is not None and code.co_filename == "<string>"  # written by `dataclasses`, not in a file


def _has_no_other_kind(returned: Any) -> bool:
    """Whether a function certainly returns an unchanged object of the class in its annotation."""
    if not inspect.isclass(returned) or "__final__" in vars(returned):
        return inspect.isclass(returned)
    parameters = vars(returned).get("__dataclass_params__")
    is_fixed = parameters.frozen if parameters else returned.__bases__ == (tuple,)
    return is_fixed and not returned.__subclasses__()


def _fields_of(made: type) -> set[str]:
    return {field.name for field in dataclasses.fields(made)} if dataclasses.is_dataclass(made) else set()
