"""Splits a state into tensors and JSON, as state_format.py describes."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amp_recipes.checkpoint.shards import here, is_first_holder
from amp_recipes.modules.sharded import is_sharded, local
from amp_recipes.modules.torch_private import storage_id, versions_of_state

VERSIONS = "_metadata"  # of the modules whose state an OrderedDict is; as the first files have it
MAX_DEPTH = 100  # far below Python's recursion limit, even if the save is called from deep inside other calls
INT_BOUND = 1 << 63

# The dtypes that every release of the library reads back into torch as what they are.
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
NUMPY_NAMES = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    "bool",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
}
SEQUENCES: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
SEQUENCE_TAGS = {kind: tag for tag, kind in SEQUENCES.items()}
KEYS = (type(None), bool, int, float, str, bytes, tuple)
FACTORIES = {factory.__name__: factory for factory in (bool, int, float, str, list, tuple, set, dict)} | {"None": None}
FACTORY_NAMES = {factory: name for name, factory in FACTORIES.items()}


class Refused(Exception):
    """A file cannot hold it; where: the path of keys to it, as Python writes it; what: kind and name."""

    def __init__(self, path: tuple, what: str) -> None:
        self.where, self.what = "".join(f"[{key!r}]" for key in path), what
        super().__init__(f"{self.where} is {what}")


class Packer:
    """Collects the tensors of a state, and says where they stood; strict: refuse what would come back as another."""

    def __init__(self, strict: bool = False) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.sharded: dict[str, dict[str, Any]] = {}
        self.parts: dict[str, tuple[Tensor, list[int]]] = {}
        self._strict = strict
        self._packed: dict[tuple, str] = {}

    def node(self, value: Any, path: tuple) -> Any:
        """The JSON for `value`."""
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int or kind is float:
            return _number(value)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if len(path) > MAX_DEPTH:
            raise Refused(path[:3], f"nested more than {MAX_DEPTH} levels deep, or contains itself")
        if isinstance(value, dict):
            return self._mapping(value, path)
        if kind is list or kind is deque or kind in SEQUENCE_TAGS:
            return self._sequence(value, path)
        return self._value(value, path)

    def _sequence(self, value: Any, path: tuple) -> Any:
        items = self._items(value, path)
        if type(value) is list:
            return items
        if type(value) is deque:
            return {"$deque": items, "maxlen": value.maxlen}
        return {SEQUENCE_TAGS[type(value)]: items}

    def _items(self, values: Any, path: tuple) -> list[Any]:
        # Generator states are long rows of small integers; looking at each of them in Python takes longer.
        if set(map(type, values)) == {int} and min(values) >= -INT_BOUND and max(values) < INT_BOUND:
            return list(values)
        return [self.node(value, (*path, index)) for index, value in enumerate(values)]

    def _mapping(self, value: dict, path: tuple) -> Any:
        kind = type(value)
        if kind not in (dict, OrderedDict, defaultdict, Counter):
            raise Refused(path, f"a {title(kind)}")
        if kind is defaultdict and not _is_usual(value.default_factory):
            if self._strict:
                raise Refused(path, f"a defaultdict whose factory is {_named(value.default_factory)}")
            kind = dict  # without its factory
        if kind is dict and _has_plain_keys(value):
            return {key: self.node(item, (*path, key)) for key, item in value.items()}
        pairs = [[self._key(key, path), self.node(item, (*path, key))] for key, item in value.items()]
        if kind is defaultdict:
            return {"$defaultdict": pairs, "factory": FACTORY_NAMES[value.default_factory]}
        if kind is OrderedDict:
            return {"$OrderedDict": pairs, VERSIONS: self.node(versions_of_state(value), (*path, VERSIONS))}
        return {"$Counter" if kind is Counter else "$dict": pairs}

    def _key(self, key: Any, path: tuple) -> Any:
        if isinstance(key, np.generic) and key.dtype.name in NUMPY_NAMES:
            key = key.item()  # the Python number that finds the same entry
        if not isinstance(key, KEYS) or isinstance(key, Enum):
            raise Refused(path, f"a dict with a {title(type(key))} as a key")
        return self.node(key, (*path, key))

    def _value(self, value: Any, path: tuple) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic) and value.dtype.name in NUMPY_NAMES:
            return {"$scalar": self.node(value.item(), path), "dtype": value.dtype.name}
        if isinstance(value, torch.Size):
            return {"$Size": list(value)}
        if isinstance(value, complex):
            return {"$complex": [self.node(value.real, path), self.node(value.imag, path)]}
        if isinstance(value, torch.dtype | torch.device):
            return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
        if isinstance(value, bytes):
            return {"$bytes": base64.b64encode(value).decode()}
        base = next((base for base in (str, int, float) if isinstance(value, base)), None)
        if base is None or isinstance(value, Enum):
            raise Refused(path, _named(value))
        return self.node(base(value), path)  # a version that torch wraps as text, say

    def _array(self, value: np.ndarray, path: tuple) -> Any:
        if type(value) is not np.ndarray or value.dtype.name not in NUMPY_NAMES:
            raise Refused(path, f"a {title(type(value))} of {value.dtype}")
        array = value.astype(value.dtype.newbyteorder("="), copy=False)
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()  # torch shares memory with neither
        return {"$array": self._tensor(torch.from_numpy(array), path)}

    def _tensor(self, value: Tensor, path: tuple) -> Any:
        if is_lazy(value):
            raise Refused(path, "a lazy parameter without a shape yet (run a batch before the first save)")
        if is_sharded(value):
            return self._distributed(value, path)
        tensor = _plain_tensor(value, path)
        layout = (tuple(tensor.shape), tensor.stride(), tensor.dtype)
        place = (tensor.device, tensor.data_ptr(), *layout) if tensor.numel() else (path,)
        name = self._packed.get(place)
        if name is None:  # tied tensors are written once
            name = self._packed[place] = self._free_name(path)
            self.tensors[name] = tensor
        node: dict[str, Any] = {"$tensor": name}
        if not tensor.is_contiguous():
            dense = torch.empty_like(tensor, device="meta")
            if not dense.is_contiguous():
                node["stride"] = list(dense.stride())
        if tensor.dtype not in DTYPE_NAMES:
            node.update(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        return node

    def _distributed(self, value: Any, path: tuple) -> Any:
        if any(placement.is_partial() for placement in value.placements):
            raise Refused(path, f"a DTensor whose sum over processes is still pending ({value.placements})")
        part = local(value.detach())
        if all(placement.is_replicate() for placement in value.placements):
            return self._tensor(part, path)
        if value.dtype not in DTYPE_NAMES or part.layout != torch.strided:
            raise Refused(path, f"a sharded tensor of {str(value.dtype).removeprefix('torch.')}")
        place = _place_of_shards(value, part) or (path,)
        name = self._packed.get(place)
        if name is None:
            name = self._packed[place] = self._free_name(path)
            self.sharded[name] = {"dtype": DTYPE_NAMES[value.dtype], "shape": list(value.shape), "pieces": []}
            if part.numel() and is_first_holder(value):
                offsets, sizes = here(value)
                if sizes != list(part.shape):
                    raise Refused(path, f"a sharded tensor whose local part is {list(part.shape)}, expected {sizes}")
                self.parts[name] = (part, offsets)
        return {"$sharded": name}

    def _free_name(self, path: tuple) -> str:
        plain = "/".join(map(str, path)).encode("utf-8", "backslashreplace").decode() or "value"
        name, count = plain, 1
        while name in self.tensors or name in self.sharded or name == "__metadata__":
            count += 1
            name = f"{plain}#{count}"
        return name


def _plain_tensor(value: Tensor, path: tuple) -> Tensor:
    """The values of a tensor, apart from its class and its graph. Raises Refused for what no file holds."""
    tensor = value.detach()
    if type(value) not in (Tensor, nn.Parameter):
        if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise Refused(path, f"a {title(type(value))}")
        tensor = tensor.as_subclass(Tensor)
    what = str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        what = "quantized"
    elif tensor.is_meta:
        what = "meta"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise Refused(path, f"a tensor that is not a plain dense tensor ({what})")
    return tensor.resolve_conj().resolve_neg()


def _place_of_shards(value: Any, part: Tensor) -> tuple | None:
    """Equal for sharded tensors that are tied; None for one without elements, which is tied to none."""
    if part.numel():
        return part.device, part.data_ptr(), tuple(value.shape), part.stride(), value.dtype
    if value.numel():  # shared memory shows which are tied, even if this process has no part of them
        return storage_id(part), part.storage_offset(), tuple(value.shape), value.dtype
    return None


def _number(value: int | float) -> Any:
    if isinstance(value, int):
        return value if -INT_BOUND <= value < INT_BOUND else {"$int": hex(value)}
    return value if math.isfinite(value) else {"$float": repr(value)}


def _has_plain_keys(value: dict) -> bool:
    return all(type(key) is str and key[:1] != "$" for key in value)


def _is_usual(factory: Any) -> bool:
    return any(factory is known for known in FACTORIES.values())


def _named(value: Any) -> str:
    kind = "class" if isinstance(value, type) else "function"
    name = getattr(value, "__qualname__", None)
    return f"the {kind} {name}" if isinstance(name, str) else f"a {title(type(value))}"


def title(kind: type) -> str:
    """Return the name of a class for messages."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
