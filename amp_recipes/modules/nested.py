"""Splits nested values one level at a time, and rebuilds the same containers with other contents.

Who walks tries what is most common itself (a tensor, an exact dict, list or tuple), then asks `parts_of`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch

from amp_recipes.modules.torch_private import pytree_parts, tree_leaves

Parts: TypeAlias = tuple[Iterable[Any], Callable[[list[Any]], Any]]


def parts_of(value: Any) -> Parts | None:
    """Return a container's contents one level down, and a function that rebuilds it; None for any other value.

    Containers are dict, list and tuple (named or not), their subclasses, registered pytrees and dataclasses. What is
    made is always a new object of the same class; no `__init__` or `__post_init__` of the user's runs.
    """
    kind = type(value)
    if kind is dict:
        return value.values(), lambda items: dict(zip(value, items, strict=True))
    if kind is list or kind is tuple:
        return value, kind
    if isinstance(value, tuple) and hasattr(kind, "_make"):
        # _make skips __new__: a PackedSequence is a namedtuple whose __new__ takes other arguments.
        return value, kind._make
    return pytree_parts(value) or _parts_of_users(value)


def tensors_in(*values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists, dicts and registered pytrees, in order."""
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _parts_of_users(value: Any) -> Parts | None:
    """Handle classes that nobody registered: subclasses of Python's containers, and dataclasses."""
    if isinstance(value, dict):
        return value.values(), lambda items: _dict_like(value, items)
    if isinstance(value, (list, tuple)):
        return value, lambda items: _sequence_like(value, items)
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return [getattr(value, name) for name in names], lambda items: _dataclass_like(value, names, items)
    return None


def _dict_like(value: dict, items: list) -> dict:
    result = copy.copy(value)  # keeps what a subclass carries besides its items
    if getattr(value, "__dict__", None) is value:  # the idiom `self.__dict__ = self`
        result.__dict__ = result
    for key, item in zip(value, items, strict=True):
        result[key] = item
    return result


def _sequence_like(value: Any, items: list) -> Any:
    if isinstance(value, list):
        result = copy.copy(value)
        result[:] = items
        return result
    result = tuple.__new__(type(value), items)
    if hasattr(value, "__dict__"):
        result.__dict__.update(value.__dict__)
    return result


def _dataclass_like(value: Any, names: list[str], items: list) -> Any:
    # Not dataclasses.replace: it cannot set init=False fields, and it runs __post_init__ again.
    result = copy.copy(value) if hasattr(value, "__dict__") else object.__new__(type(value))
    for name, item in zip(names, items, strict=True):
        object.__setattr__(result, name, item)  # also into a frozen one
    return result
