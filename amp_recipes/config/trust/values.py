"""Describes the value that a name leads to: the object to judge it by, its contents, and where it is defined."""

from __future__ import annotations

import collections
import datetime
import functools
import inspect
import pathlib
from types import MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from amp_recipes.config.trust.late_building import LateClass

_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
# Values that hold no code: an attribute may be one, whatever object has it.
_VALUE_TYPES: tuple[type, ...] = (
    np.ndarray,
    np.generic,
    torch.Tensor,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    datetime.tzinfo,
    pathlib.PurePath,
)


def subject_of(value: Any) -> Any:
    """Return the object to judge a value by: itself if it is a class or function, what it binds, or else its class."""
    while True:
        if type(value) is MethodType:
            value = value.__func__
        elif type(value) in (functools.partial, LateClass):
            value = value.func
        else:
            # A cached_property counts as a routine, and Python 3.13 gives it its function's `__module__`.
            is_function = inspect.isroutine(value) and callable(value)
            return value if inspect.isclass(value) or is_function else type(value)


def is_container(value: Any) -> bool:
    """Whether a value is judged by its contents. Not by isinstance: `__class__` can be false."""
    kind = type(value)
    return kind in (dict, *_CONTAINERS) or issubclass(kind, _VALUE_TYPES)


def held_by(value: Any) -> list[Any]:
    """Return the contents of a container: `random.choice` can return a function in it, `max(key=...)` can call one."""
    kind = type(value)
    if issubclass(kind, dict):
        return [*dict.keys(value), *dict.values(value)]
    if issubclass(kind, np.ndarray):
        return value.ravel().tolist() if value.dtype.hasobject else []
    base = next((base for base in _CONTAINERS if issubclass(kind, base)), None)
    return list(base.__iter__(value)) if base else []


def is_harmless(value: Any, home: str | None) -> bool:
    """Whether an attribute's value, an instance of a class that nobody listed, is data: nothing to call or go through.

    Frames, generators and other kinds of the interpreter lead to `__builtins__`.
    """
    if issubclass(type(value), torch.nn.Module):
        return True
    if home in (None, "builtins") or issubclass(type(value), ModuleType):
        return False
    return not callable(value) and not inspect.isroutine(value)


def home_of(subject: Any) -> tuple[str | None, str]:
    """The module that defines a class or function (None where it does not say), and its full name."""
    name = getattr(subject, "__qualname__", None) or getattr(subject, "__name__", repr(subject))
    home = getattr(subject, "__module__", None)
    if not isinstance(home, str):  # a method of C: the class that defines it decides, not the one that inherits it
        owner = getattr(subject, "__objclass__", getattr(subject, "__self__", None))
        if owner is None or isinstance(owner, ModuleType):
            return None, str(name)
        classes = [*owner.__mro__, *type(owner).__mro__] if inspect.isclass(owner) else type(owner).__mro__
        home = next((known.__module__ for known in classes if subject.__name__ in vars(known)), None)
    return home, f"{home}.{name}"


def description_of(value: Any) -> str:
    """Return a short description of a value."""
    if inspect.isclass(value):
        return f"the class {value.__name__}"
    return f"the function {value.__name__}" if inspect.isroutine(value) else f"a {type(value).__name__}"
