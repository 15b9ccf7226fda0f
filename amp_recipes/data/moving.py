"""Moves a batch of any structure to the device, and counts its samples.

Both run once per step, so tensors and the plain containers that loaders yield come before every general case.
"""

from __future__ import annotations

import copy
import inspect
from collections import UserDict, UserList
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import fields, is_dataclass
from functools import lru_cache
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from amp_recipes.modules.nested import parts_of

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.Size)


def to_device(batch: Any, device: torch.device | str, non_blocking: bool = False) -> Any:
    """`batch` with its tensors on `device`; a tensor that is there already comes back as the same object.

    Goes into dict, list, tuple (named or not), their subclasses, dataclasses and registered pytrees, which
    come back as new containers of the same type: a step that puts something into its batch must not change
    the dataset's. An object with a `to` method moves itself. Everything else passes as it is.
    non_blocking: for copies from pinned memory; ignored towards the CPU, where the host could read the copy
        before it has arrived.
    """
    if non_blocking and torch.device(device).type == "cpu":
        non_blocking = False
    return _move(batch, device, non_blocking)


def batch_length(batch: Any) -> int:
    """Return the number of samples in `batch`: the leading dimension of its first tensor or array that has one.

    The `batchsize` or `batch_size` of an object is used if it has one; else its attributes are searched. With
    only 0-d tensors: 1. Without any tensor: the length of the container (of a mapping: of its first value
    that has one); 1 if the size is unknown.
    """
    first = batch
    if batch.__class__ in (tuple, list) and batch:
        first = batch[0]
    elif batch.__class__ is dict and batch:
        first = next(iter(batch.values()))
    if isinstance(first, Tensor) and first.ndim:
        return first.shape[0]
    found = False
    for length in _leading_lengths(batch):
        if length is not None:
            return length
        found = True
    return 1 if found else _plain_length(batch)


def _move(x: Any, device: torch.device | str, non_blocking: bool) -> Any:
    if isinstance(x, Tensor):
        return x.to(device, non_blocking=non_blocking)
    kind = type(x)
    if kind is tuple or kind is list:
        values = _move_all(x, device, non_blocking)
        return values if kind is list else tuple(values)
    if kind is dict:
        return dict(zip(x, _move_all(x.values(), device, non_blocking), strict=True))
    if isinstance(x, _PLAIN):
        return x
    if callable(getattr(kind, "to", None)):
        moved = x.to(device, non_blocking=non_blocking) if _takes_non_blocking(kind) else x.to(device)
        return x if moved is None else moved  # None: it moved in place
    return _move_container(x, lambda value: _move(value, device, non_blocking))


def _move_all(values: Iterable[Any], device: torch.device | str, non_blocking: bool) -> list[Any]:
    # A tensor is moved here: one more call each would cost as much as `Tensor.to`.
    return [
        value.to(device, non_blocking=non_blocking) if isinstance(value, Tensor) else _move(value, device, non_blocking)
        for value in values
    ]


@lru_cache(maxsize=256)
def _takes_non_blocking(kind: type) -> bool:
    try:
        parameters = inspect.signature(kind.to).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return takes_any or "non_blocking" in parameters


def _move_container(x: Any, move: Callable[[Any], Any]) -> Any:
    """A container that is not just a list, tuple or dict, with its values moved."""
    if isinstance(x, (UserDict, UserList)):
        moved = copy.copy(x)
        moved.data = move(x.data)
        return moved
    parts = parts_of(x)
    if parts is None:
        return x
    items, rebuild = parts
    values = [move(value) for value in items]
    if isinstance(x, tuple) and all(new is old for new, old in zip(values, x, strict=True)):
        return x  # Python's own records, such as time.struct_time, cannot be rebuilt
    return rebuild(values)


def _leading_lengths(x: Any, inside_object: bool = False) -> Iterator[int | None]:
    """Leading dimensions of the arrays in `x`, depth first; None for a 0-d one."""
    if isinstance(x, _PLAIN):
        return
    if isinstance(x, PackedSequence):  # a tuple whose data has a row per time step, not per sample
        yield int(x.batch_sizes[0])  # lies on the CPU
        return
    shape = getattr(x, "shape", None)  # tensors, NumPy arrays and what looks like them
    if isinstance(shape, tuple):
        yield int(shape[0]) if shape else None
    elif isinstance(x, list | tuple | UserList | Mapping):
        for value in x.values() if isinstance(x, Mapping) else x:
            yield from _leading_lengths(value, inside_object)
    elif not inside_object:  # objects in objects are not searched: they may refer back
        yield from _leading_lengths_of_object(x)


def _leading_lengths_of_object(x: Any) -> Iterator[int | None]:
    for name in ("batchsize", "batch_size"):
        size = getattr(x, name, None)
        if isinstance(size, Integral):
            yield int(size)
            return
    values = [getattr(x, field.name, None) for field in fields(x)] if is_dataclass(x) else []
    for value in values or getattr(x, "__dict__", {}).values():
        yield from _leading_lengths(value, inside_object=True)


def _plain_length(batch: Any) -> int:
    if isinstance(batch, _PLAIN):
        return 1
    if isinstance(batch, Mapping):
        sized = [value for value in batch.values() if isinstance(value, Sized) and not isinstance(value, _PLAIN)]
        return (len(sized[0]) or 1) if sized else 1
    return (len(batch) or 1) if isinstance(batch, Sized) else 1
