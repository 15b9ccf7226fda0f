"""Analyses a batch: the number of its samples, the names of its tensors, and batches of some samples only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from amp_recipes.data import batch_length
from amp_recipes.modules.nested import parts_of

_MAX_DEPTH = 6  # of containers in a batch


class Inseparable(Exception):
    """A batch that cannot be taken apart into samples."""


def samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the items of a list of samples, else its leading dimension."""
    return len(batch) if is_list_of_samples(batch) else batch_length(batch)


def is_list_of_samples(batch: Any) -> bool:
    """Whether it is a list of dicts or objects that are all alike: what a collate function leaves that does nothing."""
    if not isinstance(batch, list | tuple) or len(batch) < 2 or hasattr(batch, "_fields"):
        return False
    first = batch[0]
    if isinstance(first, Mapping):
        return all(type(sample) is type(first) and sample.keys() == first.keys() for sample in batch)
    is_record = is_dataclass(first) or hasattr(first, "_fields")
    return is_record and all(type(sample) is type(first) for sample in batch)


def tensors_by_path(value: Any, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor | np.ndarray]]:
    """The tensors and arrays in a batch, each with its way as Python writes it: `batch['image']`, `batch.image[0]`."""
    if isinstance(value, Tensor | np.ndarray):
        yield path, value
    elif depth < _MAX_DEPTH:
        for step, inner in _children(value):
            yield from tensors_by_path(inner, f"{path}{step}", depth + 1)


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", inner) for key, inner in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _attributes(value, value._fields)
    if isinstance(value, list | tuple):
        return [(f"[{index}]", inner) for index, inner in enumerate(value)]
    if isinstance(value, type | nn.Module):
        return []
    if is_dataclass(value):
        return _attributes(value, [field.name for field in fields(value)])
    return _attributes(value, getattr(value, "__dict__", ()))


def _attributes(value: Any, names: Iterable[str]) -> list[tuple[str, Any]]:
    return [(f".{name}", getattr(value, name, None)) for name in names]


def take_samples(batch: Any, samples: Sequence[int], length: int) -> Any:
    """The same batch with these samples only. Raises Inseparable for what has no leading dimension of `length`."""
    if isinstance(batch, Tensor):
        return _take_rows(batch, samples, length)
    if isinstance(batch, str | bytes | int | float | bool | None):
        return batch
    if _has_an_item_per_sample(batch, length):
        return type(batch)(batch[sample] for sample in samples)
    parts = parts_of(batch)
    if parts is None:
        raise Inseparable
    items, rebuild = parts
    return rebuild([take_samples(item, samples, length) for item in items])


def _take_rows(tensor: Tensor, samples: Sequence[int], length: int) -> Tensor:
    if tensor.ndim == 0:
        return tensor
    if tensor.shape[0] != length:
        raise Inseparable
    return tensor[torch.as_tensor(samples, device=tensor.device)]


def _has_an_item_per_sample(batch: Any, length: int) -> bool:
    """Whether it is a list of so many texts or numbers, or of so many dicts or records that are all alike."""
    if type(batch) in (list, tuple) and len(batch) == length and not any(map(_is_whole, batch)):
        return True
    return is_list_of_samples(batch) and len(batch) == length


def _is_whole(value: Any) -> bool:
    return isinstance(value, torch.Tensor | list | tuple | dict) or is_dataclass(value)
