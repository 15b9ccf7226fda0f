"""Checks that arguments of a YAML fit the class or function that it names: by name, by number, by type.

Only what is certain is a mistake: a signature that cannot be read accepts everything, and so does an annotation that
says nothing of plain data. Where Python itself is lenient (a list for a tuple, 1 for 1.0 or true) so are we.
"""

from __future__ import annotations

import collections.abc
import enum
import functools
import inspect
import os
import pathlib
import reprlib
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch

from amp_recipes.config.yaml.mistakes import did_you_mean
from amp_recipes.config.yaml.nodes import Mapping, Node, Scalar, Sequence, Source, is_plain_scalar
from amp_recipes.config.yaml.tags import TUPLE

_UNREADABLE = (ValueError, TypeError, AttributeError)
# Wrappers of these modules pass on what they are given; of any other, the arguments may be its own.
_TRANSPARENT_WRAPPERS = frozenset({"contextlib", "torch.utils._contextlib", "torch.amp.autocast_mode"})
_LISTS = (list, tuple, collections.abc.Sequence, collections.abc.MutableSequence)
_ANY_ITERABLE = (collections.abc.Iterable, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_NOT_PLAIN = {torch.dtype: "a dtype, as in !name:torch.float32", torch.nn.Module: "a module, as !new: makes one"}
_CONVERTING = ("__post_init__", "__attrs_post_init__")  # after which a field need not be what its annotation says
_SHOWN_ITEMS = 6
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    torch.Tensor: "a tensor",
}
_GUESSES = 20  # misspelt names that are compared with what is missing
_OLD_BOOLEANS = frozenset({"yes", "no", "on", "off", "true", "false"})
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Callee:
    """A class or function as its caller sees it, read once: its name, parameters and annotations.

    parameters: None where they are not known for certain.
    hints: the annotations that can be resolved and are certain, of the parameters and of what it returns.
    """

    def __init__(self, target: Any) -> None:
        signature = _signature_of(target)
        self.name: str = getattr(target, "__qualname__", None) or type(target).__name__
        self.parameters = None if signature is None else signature.parameters
        self.hints = {} if signature is None else _hints_of(target)

    def check(
        self, node: Node, partial: bool, origin: Callable[[Node], str] = lambda item: ""
    ) -> Iterator[tuple[Source, str]]:
        """Yield the mistakes in the arguments at `node`: the source of each, and its text.

        partial: for `!name:`, whose caller gives the arguments that are missing; origin: says of a value where it came
        from, as a sentence after a space.
        """
        if self.parameters is None:
            return
        given: dict[str, Node] = {}
        if isinstance(node, Mapping):
            yield from _wrong_names(self.name, self.parameters, node)
            given = {key: item for key, item in node.items.items() if isinstance(key, str)}
        elif isinstance(node, Sequence):
            by_position = [parameter.name for parameter in self.parameters.values() if parameter.kind in _POSITIONAL]
            yield from self._too_many(by_position, node)
            given = dict(zip(by_position, node.items, strict=False))
        missing = [] if partial else _missing(self.parameters, given)
        if missing:
            them = "it" if len(missing) == 1 else "them"
            yield node.source, f"{self.name} needs {', '.join(missing)}: give {them} below."
        yield from self._wrong_types(given, origin)

    def _too_many(self, by_position: list[str], node: Sequence) -> Iterator[tuple[Source, str]]:
        """Yield the mistake of too many positional arguments, at the first one that is too many."""
        if len(node.items) > len(by_position) and not _has(self.parameters, inspect.Parameter.VAR_POSITIONAL):
            count = f"{len(by_position)} positional argument{'' if len(by_position) == 1 else 's'}"
            names = f" ({', '.join(by_position)})" if by_position else ""
            first = node.items[len(by_position)]
            yield first.source, f"{self.name} takes {count}{names}, but got {len(node.items)}."

    def _wrong_types(self, given: dict[str, Node], origin: Callable[[Node], str]) -> Iterator[tuple[Source, str]]:
        for argument, item in given.items():
            parameter = (self.parameters or {}).get(argument)
            if parameter is None or parameter.kind not in (*_POSITIONAL, *_NAMED) or argument not in self.hints:
                continue
            hint = self.hints[argument]
            if _fits(item, hint) or (parameter.default is None and _is_null(item)):
                continue
            must = f"must be {_words(hint)}.{_hint(item, hint)}"
            yield item.source, f"{argument} of {self.name} is {_shown(item)}, but {must}{origin(item)}"


def _wrong_names(name: str, parameters: Any, node: Mapping) -> Iterator[tuple[Source, str]]:
    """Yield the keywords that the target does not accept, each with those that it does."""
    accepted = _accepted(parameters)
    by_position = {p.name for p in parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY}
    takes_any = _has(parameters, inspect.Parameter.VAR_KEYWORD)
    for key in node.items:
        where = node.key_sources.get(key, node.source)
        if not isinstance(key, str):
            yield where, f"{name} has an argument named {key!r}; the name of an argument must be a string."
        elif key in accepted or takes_any:
            continue
        elif key in by_position:
            yield where, f"{name} takes {key} by position only: give its arguments as a list."
        else:
            takes = f"It takes {', '.join(accepted)}." if accepted else "It takes no named arguments."
            yield where, f"{name} has no argument {key!r}.{did_you_mean(key, accepted)} {takes}"


def _missing(parameters: Any, given: dict[str, Node]) -> list[str]:
    """Return the missing arguments without a default, but for those that were reported as misspelt."""
    unknown = [key for key in given if key not in parameters][:_GUESSES]
    guessed = {did_you_mean(key, _accepted(parameters)) for key in unknown}
    return [
        parameter.name
        for parameter in parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (*_POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
        and parameter.name not in given
        and did_you_mean(parameter.name, [parameter.name]) not in guessed
    ]


def _accepted(parameters: Any) -> list[str]:
    return [parameter.name for parameter in parameters.values() if parameter.kind in _NAMED]


def _has(parameters: Any, kind: Any) -> bool:
    return any(parameter.kind is kind for parameter in parameters.values())


def _signature_of(target: Any) -> inspect.Signature | None:
    """The signature of a class or function; None where it is not known for certain."""
    if not (inspect.isclass(target) or inspect.isroutine(target) or isinstance(target, functools.partial)):
        return None
    try:
        return inspect.signature(_unwrapped(target), follow_wrapped=False)
    except _UNREADABLE:
        return None


def _unwrapped(target: Any) -> Any:
    """A function below decorators that take the same arguments as it does."""
    while not inspect.isclass(target) and hasattr(target, "__wrapped__") and not hasattr(target, "__signature__"):
        is_cache = isinstance(target, functools._lru_cache_wrapper)
        if not is_cache and getattr(target, "__globals__", {}).get("__name__") not in _TRANSPARENT_WRAPPERS:
            break
        target = target.__wrapped__
    return target


def _hints_of(target: Any) -> dict[str, Any]:
    """The annotations that can be resolved, where they say what the code that runs takes and returns."""
    function = _called(target)
    if function is None or hasattr(function, "__wrapped__") or hasattr(function, "__signature__"):
        return {}  # copied by functools.wraps from a function that may be called with other arguments
    function = getattr(function, "__func__", function)
    annotations, namespace = getattr(function, "__annotations__", {}), getattr(function, "__globals__", {})
    hints: dict[str, Any] = {}
    for name, annotation in annotations.items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:  # one by one: a name that exists only for a type checker must not hide the others
            hints.update(typing.get_type_hints(holder, namespace))
        except Exception:  # an annotation as text is an expression that may raise anything
            continue
    return {name: hint for name, hint in hints.items() if isinstance(hint, collections.abc.Hashable)}


def _called(target: Any) -> Any:
    """The function that runs when a class or function is called; None where that is not certain."""
    if not inspect.isclass(target):
        return _unwrapped(target)
    if any(hasattr(target, name) for name in _CONVERTING) or type(target).__call__ is not type.__call__:
        return None
    # What a class takes is said by the first of the two that it, or the nearest class above it, defines.
    definer = next((base for base in target.__mro__ if {"__init__", "__new__"} & vars(base).keys()), object)
    return _unwrapped(vars(definer).get("__init__") or definer.__new__)


def _fits(node: Node, hint: Any) -> bool:
    """Whether a node may have the type of an annotation; true if that cannot be known."""
    if not isinstance(node, Scalar | Sequence | Mapping) or node.tag not in ("", TUPLE):
        return True  # what a call gives is known once it is called
    return any(_fits_kind(node, *kind) for kind in _kinds(hint))


def _kinds(hint: Any) -> list[tuple[Any, tuple[Any, ...]]]:
    """Each class (or `Literal`) that an annotation allows, with its parameters: dict, (str, int)."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for option in inner for kind in _kinds(option)]
    return _kinds(inner[0]) if origin is typing.Annotated else [(origin or hint, inner)]


def _fits_kind(node: Scalar | Sequence | Mapping, kind: Any, inner: tuple[Any, ...]) -> bool:
    if kind is typing.Literal:
        return isinstance(node, Scalar) and _is_choice(node.value, inner)
    if kind in (None, type(None)):
        return _is_null(node)
    if kind in _NOT_PLAIN:
        return False
    if kind is collections.abc.Callable:
        return not isinstance(node, Scalar)
    if kind in _MAPPINGS:
        return isinstance(node, Mapping) and _values_fit(node, inner)
    if kind in _LISTS or kind in _ANY_ITERABLE:
        return _fits_list(node, kind, inner)
    if isinstance(node, Scalar):
        return _scalar_fits(node.value, kind)
    return kind not in (bool, int, float, complex, str) and not _takes_path(kind)


def _is_choice(value: Any, choices: tuple[Any, ...]) -> bool:
    if isinstance(value, str) and any(isinstance(choice, enum.Enum) for choice in choices):
        return True  # perhaps by its text
    return any(type(choice) is type(value) and choice == value for choice in choices)


def _values_fit(node: Mapping, inner: tuple[Any, ...]) -> bool:
    return len(inner) != 2 or all(_fits(item, inner[1]) for item in node.items.values())


def _fits_list(node: Scalar | Sequence | Mapping, kind: Any, inner: tuple[Any, ...]) -> bool:
    if isinstance(node, Mapping):
        return kind in _ANY_ITERABLE
    if isinstance(node, Scalar):
        return isinstance(node.value, str) and kind not in (list, tuple)  # text is a sequence of its characters
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return len(inner) == len(node.items) and all(map(_fits, node.items, inner))
    return not inner or all(_fits(item, inner[0]) for item in node.items)


def _scalar_fits(value: Any, kind: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool) or value in (0, 1)
    if kind is torch.Tensor:  # many make one of a number or a list, but none of text
        return not isinstance(value, str)
    if kind is int:
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind in (float, complex):
        return isinstance(value, int | float)
    if kind is str or _takes_path(kind):
        return isinstance(value, str)
    return True


def _takes_path(kind: Any) -> bool:
    return inspect.isclass(kind) and (kind is os.PathLike or issubclass(kind, pathlib.PurePath))


def _is_null(node: Node) -> bool:
    return is_plain_scalar(node) and node.value is None


def _shown(node: Node) -> str:
    """A plain value as it is written, or what it is."""
    if isinstance(node, Scalar):
        return "null" if node.value is None else reprlib.repr(node.value)
    if isinstance(node, Mapping):
        return "a mapping"
    values = [item for item in node.items if is_plain_scalar(item)]
    if len(values) == len(node.items) <= _SHOWN_ITEMS:
        return f"[{', '.join(map(_shown, values))}]"
    return f"a list of {len(node.items)}"


def _words(hint: Any) -> str:
    """An annotation in words."""
    return " or ".join(dict.fromkeys(_kind_words(*kind) for kind in _kinds(hint)))


def _kind_words(kind: Any, inner: tuple[Any, ...]) -> str:
    if kind is typing.Literal:
        return " or ".join(map(repr, inner))
    if kind in _NOT_PLAIN:
        return _NOT_PLAIN[kind]
    if kind in _LISTS or kind in _ANY_ITERABLE:
        return _list_words(kind, inner)
    if kind in _MAPPINGS:
        return "a mapping"
    if kind is collections.abc.Callable:
        return "a function, as in !name:torch.nn.functional.relu"
    return _WORDS.get(kind) or ("a path" if _takes_path(kind) else f"a {getattr(kind, '__name__', kind)}")


def _list_words(kind: Any, inner: tuple[Any, ...]) -> str:
    if kind is tuple and inner and inner[-1] is not Ellipsis:
        return f"a list of {len(inner)}: {', '.join(map(_words, inner))}"
    return f"a list (of each {_words(inner[0])})" if inner and not isinstance(inner[0], typing.TypeVar) else "a list"


def _hint(node: Node, hint: Any) -> str:
    """Return a hint at the value that was probably meant: the nearest of a list, or a boolean of older YAML."""
    if not isinstance(node, Scalar) or not isinstance(node.value, str):
        return ""
    kinds = _kinds(hint)
    if (bool, ()) in kinds and node.value.lower() in _OLD_BOOLEANS:
        return f" In YAML 1.2 this is text: write {str(node.value.lower() in ('yes', 'on', 'true')).lower()}."
    return did_you_mean(node.value, [choice for kind, inner in kinds if kind is typing.Literal for choice in inner])
