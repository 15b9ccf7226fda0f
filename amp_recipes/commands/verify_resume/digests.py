"""Computes digests that are equal only if two values are equal bit for bit: one for each part with data."""

from __future__ import annotations

import hashlib
from collections import UserList, deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from amp_recipes.state.randomness import GENERATORS, generator_state

SEQUENCES = (list, tuple, deque, UserList)

_SCALARS = (type(None), bool, int, float, complex, str, bytes, bytearray, np.generic)
_SETS = (set, frozenset)
_SETTINGS = (torch.dtype, torch.device, torch.Size, torch.layout, type, range, slice)
_MAX_DEPTH = 12  # of containers in containers; what is deeper refers back to itself
_DIGEST_BYTES = 12


class Digests(dict[str, str]):
    """Digest by path (`image`, `0.lengths`) of every tensor, array and plain value that was added.

    bytes: how many bytes of tensors and arrays were read; tensors: of how many; unread: names of the types in whose
    objects nothing could be read, so that they were not compared.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.tensors = 0
        self.unread: set[str] = set()

    def add(self, value: Any, path: str = "") -> None:
        """Enter every leaf of `value`, a tree of containers, under paths that begin with `path`."""
        self._add(value, path, 0)

    def _add(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, (Tensor, np.ndarray)):
            data = array_bytes(value)
            if data is None:
                self.unread.add(type(value).__name__)
                return
            self.tensors += 1
            self.bytes += data.nbytes
            self[path] = _digest(str(value.dtype), str(tuple(value.shape)), data)
        elif is_flat(value):
            self[path] = _digest(_text(value))
        elif isinstance(value, GENERATORS):
            self[path] = digest_of_tree(generator_state(value))
        elif depth < _MAX_DEPTH and (children := _children(value)) is not None:
            for name, child in children:
                self._add(child, f"{path}.{name}" if path else str(name), depth + 1)
        else:
            self.unread.add(type(value).__name__)


def is_flat(value: Any) -> bool:
    """Whether `value` is a scalar, or a container of nothing but scalars, which is one leaf."""
    if isinstance(value, (*_SCALARS, *_SETTINGS)):
        return True
    if isinstance(value, (*SEQUENCES, *_SETS)):
        return all(isinstance(item, (*_SCALARS, *_SETTINGS)) for item in value)
    return False


def is_scalar(value: Any) -> bool:
    """Whether `value` is one number, string, or nothing."""
    return isinstance(value, _SCALARS)


def digest_of_tree(value: Any) -> str:
    """One digest for all leaves of `value`."""
    leaves = Digests()
    leaves.add(value)
    return _digest(*(f"{path}={digest}" for path, digest in leaves.items()))


def array_bytes(value: Tensor | np.ndarray) -> np.ndarray | None:
    """The values of a tensor or an array as they lie in memory (uint8); None where they cannot be had."""
    try:
        if isinstance(value, Tensor):
            tensor = value.detach()
            if tensor.layout is not torch.strided:
                tensor = tensor.to_dense()
            tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
            return tensor.reshape(-1).view(torch.uint8).numpy()
        if value.dtype.hasobject:
            return None
        return np.frombuffer(np.ascontiguousarray(value).tobytes(), dtype=np.uint8)
    except (RuntimeError, NotImplementedError, TypeError):  # a layout or a dtype that has no plain form
        return None


def _children(value: Any) -> Iterator[tuple[Any, Any]] | None:
    """The parts of a container, or of an object that keeps them in `__dict__`; None for what has none."""
    if isinstance(value, Mapping):
        return iter(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return zip(value._fields, value, strict=True)
    if isinstance(value, SEQUENCES):
        return enumerate(value)
    if isinstance(value, nn.Module) or callable(value):
        return None
    if is_dataclass(value):
        return ((field.name, getattr(value, field.name, None)) for field in fields(value))
    return iter(vars(value).items()) if getattr(value, "__dict__", None) else None


def _text(value: Any) -> str:
    """`value` as text that differs if any bit of it does."""
    if isinstance(value, float):
        return f"{type(value).__name__} {value.hex()}"
    if isinstance(value, _SETS):
        return f"{type(value).__name__} {sorted(map(_text, value))}"  # their own order changes from start to start
    if isinstance(value, SEQUENCES):
        return f"{type(value).__name__} {[_text(item) for item in value]}"
    if isinstance(value, np.generic):
        return f"{value.dtype} {value.tobytes().hex()}" if not value.dtype.hasobject else repr(value)
    return f"{type(value).__name__} {value!r}"


def _digest(*parts: str | np.ndarray) -> str:
    made = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        data = part.encode(errors="surrogatepass") if isinstance(part, str) else memoryview(part)
        made.update(len(data).to_bytes(8, "little"))
        made.update(data)
    return made.hexdigest()
