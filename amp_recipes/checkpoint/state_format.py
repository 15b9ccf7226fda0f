"""Turns a state into a file and a file into a state, without a line of pickled code.

A file is a safetensors file: the tensors of the state are its tensors, and everything else stands as JSON under
`amp_recipes` in its `__metadata__`. JSON arrays are lists and JSON objects dicts with text keys; what JSON lacks is an
object whose first key starts with `$`:

    {"$tensor": name}, with "stride" if it is dense but not row by row, with "dtype" and "shape" if it lies in the file
        as bytes, because safetensors has no such dtype
    {"$sharded": name}      a tensor whose parts lie in files of their own; `amp_recipes_shards` in `__metadata__` tells
        its dtype and shape, and of each part the file, where it begins and its size
    {"$array": tensor}, {"$scalar": value, "dtype": name}           NumPy's
    {"$tuple": [..]}, {"$set": [..]}, {"$frozenset": [..]}, {"$deque": [..], "maxlen": n}, {"$Size": [..]}
    {"$dict": [[key, value], ..]}, {"$Counter": ..}, {"$OrderedDict": .., "_metadata": value},
    {"$defaultdict": .., "factory": name}
    {"$int": hexadecimal}, {"$float": "nan"}, {"$complex": [re, im]}, {"$bytes": base64}, {"$dtype": name},
    {"$device": name}
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amp_recipes.checkpoint.hashed_file import HashedFile
from amp_recipes.checkpoint.shards import (
    Piece,
    Stored,
    fills,
    here,
    is_distributed,
    is_first_holder,
    is_pending,
    is_replicated,
    local_part,
)
from amp_recipes.errors import CheckpointError
from amp_recipes.modules.torch_private import set_versions_of_state, storage_id, versions_of_state

_METADATA_KEY = "amp_recipes"
_SHARDS_KEY = "amp_recipes_shards"
_VERSIONS = "_metadata"  # of the modules whose state an OrderedDict is; as the first files have it
_MAX_DEPTH = 100  # far below Python's recursion limit, also where the save stands deep in other calls
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors library reads
_INT_BOUND = 1 << 63

# The dtypes that every release of the library reads back into torch as what they are.
_DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_FILE_PATTERN = re.compile(r"\w[\w.+@-]*")
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
_NUMPY_NAMES = frozenset(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)) | {
    "bool", "float16", "float32", "float64", "complex64", "complex128",
}  # fmt: skip
_SEQUENCES: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}
_SEQUENCE_TAGS = {kind: tag for tag, kind in _SEQUENCES.items()}
_KEYS = (type(None), bool, int, float, str, bytes, tuple)
_FACTORIES = {it.__name__: it for it in (bool, int, float, str, list, tuple, set, dict)} | {"None": None}
_FACTORY_NAMES = {it: name for name, it in _FACTORIES.items()}


@dataclass
class PackedState:
    """A state on its way into a file; its containers are its own, its tensors are still those of the state."""

    document: Any  # what JSON holds
    tensors: dict[str, Tensor]  # name in the file -> detached and strided, on any device
    # Name -> dtype and shape of a tensor that lies on several processes, and where its parts are (`add_pieces`).
    sharded: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Name -> this process's part of it, if it is the one to write it, and where that begins.
    parts: dict[str, tuple[Tensor, list[int]]] = field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def add_pieces(self, file: str, pieces: Mapping[str, tuple[list[int], list[int]]]) -> None:
        """Note that a file holds parts of sharded tensors; pieces: name -> where it begins, and its size."""
        for name, (offsets, sizes) in pieces.items():
            self.sharded[name]["pieces"].append([file, offsets, sizes])

    def incomplete(self) -> list[str]:
        """The sharded tensors of which not every element has a place in a file, or some have two."""
        return [name for name, it in self.sharded.items() if not fills(it["shape"], _pieces(name, it))]


def pack_state(state: Any, name: str) -> PackedState:
    """`state` taken apart into tensors and JSON; nothing is copied or written yet.

    name: what errors call its owner. Raises CheckpointError, with the key's path and the type, for what a file
    cannot hold: functions, objects of other classes, sparse and quantized tensors, more than 100 levels.
    """
    packer = _Packer()
    try:
        document = packer.node(state, ())
    except _Refused as error:
        raise CheckpointError(
            f"State of recoverable {name}: state_dict(){error.where} is {error.what}; a checkpoint holds dense "
            "tensors, NumPy arrays, numbers, text, bytes and dicts, lists, tuples and sets of them."
        ) from None
    return PackedState(document, packer.tensors, packer.sharded, packer.parts)


def plain_problem(value: Any) -> str | None:
    """Why a file cannot give `value` back as it is, such as "a pathlib.Path at ['a'][1]"; None if it can.

    Stricter than `pack_state` in one point: a defaultdict must have one of the usual factories, since it would come
    back as a dict. Raises nothing, and copies no tensor that lies in memory as it is.
    """
    try:
        _Packer(strict=True).node(value, ())
    except _Refused as error:
        return f"{error.what} at {error.where}" if error.where else error.what
    except Exception as error:  # an object that fails at being looked at
        return f"a {_title(type(value))} that cannot be read ({type(error).__name__}: {error})"
    return None


class _Refused(Exception):
    """A file cannot hold it; where: the path of keys to it, as Python writes it; what: kind and name."""

    def __init__(self, path: tuple, what: str) -> None:
        self.where, self.what = "".join(f"[{key!r}]" for key in path), what
        super().__init__(f"{self.where} is {what}")


class _Packer:
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
        if len(path) > _MAX_DEPTH:
            raise _Refused(path[:3], f"nested more than {_MAX_DEPTH} levels deep, or holds itself")
        if isinstance(value, dict):
            return self._mapping(value, path)
        if kind is list or kind is deque or kind in _SEQUENCE_TAGS:
            return self._sequence(value, path)
        return self._value(value, path)

    def _sequence(self, value: Any, path: tuple) -> Any:
        items = self._items(value, path)
        if type(value) is list:
            return items
        if type(value) is deque:
            return {"$deque": items, "maxlen": value.maxlen}
        return {_SEQUENCE_TAGS[type(value)]: items}

    def _items(self, values: Any, path: tuple) -> list[Any]:
        # Generator states are long rows of small integers; looking at each of them in Python takes longer.
        if set(map(type, values)) == {int} and min(values) >= -_INT_BOUND and max(values) < _INT_BOUND:
            return list(values)
        return [self.node(value, (*path, index)) for index, value in enumerate(values)]

    def _mapping(self, value: dict, path: tuple) -> Any:
        kind = type(value)
        if kind not in (dict, OrderedDict, defaultdict, Counter):
            raise _Refused(path, f"a {_title(kind)}")
        if kind is defaultdict and not _is_usual(value.default_factory):
            if self._strict:
                raise _Refused(path, f"a defaultdict whose factory is {_named(value.default_factory)}")
            kind = dict  # without its factory
        if kind is dict and _has_plain_keys(value):
            return {key: self.node(item, (*path, key)) for key, item in value.items()}
        pairs = [[self._key(key, path), self.node(item, (*path, key))] for key, item in value.items()]
        if kind is defaultdict:
            return {"$defaultdict": pairs, "factory": _FACTORY_NAMES[value.default_factory]}
        if kind is OrderedDict:
            return {"$OrderedDict": pairs, _VERSIONS: self.node(versions_of_state(value), (*path, _VERSIONS))}
        return {"$Counter" if kind is Counter else "$dict": pairs}

    def _key(self, key: Any, path: tuple) -> Any:
        if isinstance(key, np.generic) and key.dtype.name in _NUMPY_NAMES:
            key = key.item()  # the Python number that finds the same entry
        if not isinstance(key, _KEYS) or isinstance(key, Enum):
            raise _Refused(path, f"a dict with a {_title(type(key))} as a key")
        return self.node(key, (*path, key))

    def _value(self, value: Any, path: tuple) -> Any:
        if isinstance(value, np.ndarray):
            return self._array(value, path)
        if isinstance(value, np.generic) and value.dtype.name in _NUMPY_NAMES:
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
            raise _Refused(path, _named(value))
        return self.node(base(value), path)  # a version that torch wraps as text, say

    def _array(self, value: np.ndarray, path: tuple) -> Any:
        if type(value) is not np.ndarray or value.dtype.name not in _NUMPY_NAMES:
            raise _Refused(path, f"a {_title(type(value))} of {value.dtype}")
        array = value.astype(value.dtype.newbyteorder("="), copy=False)
        if not array.flags.writeable or any(stride < 0 for stride in array.strides):
            array = array.copy()  # torch shares memory with neither
        return {"$array": self._tensor(torch.from_numpy(array), path)}

    def _tensor(self, value: Tensor, path: tuple) -> Any:
        if is_lazy(value):
            raise _Refused(path, "a lazy parameter without a shape yet (run a batch before the first save)")
        if is_distributed(value):
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
        if tensor.dtype not in _DTYPE_NAMES:
            node.update(dtype=str(tensor.dtype).removeprefix("torch."), shape=list(tensor.shape))
        return node

    def _distributed(self, value: Any, path: tuple) -> Any:
        if is_pending(value):
            raise _Refused(path, f"a DTensor with a sum that has not been taken ({value.placements})")
        local = local_part(value)
        if is_replicated(value):
            return self._tensor(local, path)
        if value.dtype not in _DTYPE_NAMES or local.layout != torch.strided:
            raise _Refused(path, f"a sharded tensor of {str(value.dtype).removeprefix('torch.')}")
        place = _place_of_shards(value, local) or (path,)
        name = self._packed.get(place)
        if name is None:
            name = self._packed[place] = self._free_name(path)
            self.sharded[name] = {"dtype": _DTYPE_NAMES[value.dtype], "shape": list(value.shape), "pieces": []}
            if local.numel() and is_first_holder(value):
                offsets, sizes = here(value)
                if sizes != list(local.shape):
                    raise _Refused(path, f"a sharded tensor whose part is {list(local.shape)}, expected {sizes}")
                self.parts[name] = (local, offsets)
        return {"$sharded": name}

    def _free_name(self, path: tuple) -> str:
        plain = "/".join(map(str, path)).encode("utf-8", "backslashreplace").decode() or "value"
        name, count = plain, 1
        while name in self.tensors or name in self.sharded or name == "__metadata__":
            count += 1
            name = f"{plain}#{count}"
        return name


def _plain_tensor(value: Tensor, path: tuple) -> Tensor:
    """The values of a tensor, apart from its class and its graph. Raises _Refused for what no file holds."""
    tensor = value.detach()
    if type(value) not in (Tensor, nn.Parameter):
        if type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise _Refused(path, f"a {_title(type(value))}")
        tensor = tensor.as_subclass(Tensor)
    what = str(tensor.layout).removeprefix("torch.")
    if tensor.is_quantized:
        what = "quantized"
    elif tensor.is_meta:
        what = "meta"
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        raise _Refused(path, f"a tensor that is not plain and dense ({what})")
    return tensor.resolve_conj().resolve_neg()


def _place_of_shards(value: Any, local: Tensor) -> tuple | None:
    """Equal for sharded tensors that are tied; None for one without elements, which is tied to none."""
    if local.numel():
        return local.device, local.data_ptr(), tuple(value.shape), local.stride(), value.dtype
    if value.numel():  # the memory tells which are tied, also where nothing of them is here
        return storage_id(local), local.storage_offset(), tuple(value.shape), value.dtype
    return None


def _number(value: int | float) -> Any:
    if isinstance(value, int):
        return value if -_INT_BOUND <= value < _INT_BOUND else {"$int": hex(value)}
    return value if math.isfinite(value) else {"$float": repr(value)}


def _has_plain_keys(value: dict) -> bool:
    return all(type(key) is str and key[:1] != "$" for key in value)


def _is_usual(factory: Any) -> bool:
    return any(factory is it for it in _FACTORIES.values())


def _named(value: Any) -> str:
    kind = "class" if isinstance(value, type) else "function"
    name = getattr(value, "__qualname__", None)
    return f"the {kind} {name}" if isinstance(name, str) else f"a {_title(type(value))}"


def _title(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------------- to the disk


def file_header(packed: PackedState) -> bytes:
    """All of the file that comes before the tensors' bytes. Raises CheckpointError if it would be over 100 MB."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", _METADATA_KEY: json.dumps(packed.document)}}
    if packed.sharded:
        header["__metadata__"][_SHARDS_KEY] = json.dumps(packed.sharded, separators=(",", ":"))
    offset = 0
    for name, tensor in _in_file_order(packed):
        size = tensor.numel() * tensor.element_size()
        known = _DTYPE_NAMES.get(tensor.dtype)
        shape = list(tensor.shape) if known else [size]
        header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"A state has {len(text) / 1e6:.0f} MB that are not tensors; a file holds up to "
            f"{_MAX_HEADER_BYTES / 1e6:.0f} MB. Keep long lists of numbers as tensors."
        )
    return len(text).to_bytes(8, "little") + text


def _in_file_order(packed: PackedState) -> list[tuple[str, Tensor]]:
    """Those with long elements first, so that each begins at a multiple of its element's size."""
    return sorted(packed.tensors.items(), key=lambda item: -item[1].element_size())


def write_state(path: Path, packed: PackedState, header: bytes | None = None) -> str:
    """Write a new file and have it on the disk; returns its sha256, taken while it was written."""
    file = HashedFile(path)
    try:
        file.write(memoryview(header or file_header(packed)))
        for _, tensor in _in_file_order(packed):
            if tensor.numel():
                # A single element may claim any stride and yet be contiguous: as bytes it must be 1.
                row_by_row = tensor.cpu().contiguous().as_strided((tensor.numel(),), (1,))
                file.write(memoryview(row_by_row.view(torch.uint8).numpy()))
        return file.finish()
    finally:
        file.close()


# ---------------------------------------------------------------------- and back


@torch.inference_mode(False)  # an optimizer could not train on with a state that was made inside it
def read_state(path: Path, later: bool = False) -> Any:
    """The state in a file, its tensors on the CPU in memory of their own.

    later: a `Stored` stands for each tensor that lies in the file as it is, which has not been read yet then; and for
    each that lies in files of its own (without `later` such a state is refused).
    Raises CheckpointError if the file is damaged or was not written by `write_state`. Runs no code from the file.
    """
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            document = json.loads(metadata[_METADATA_KEY])
            sharded = json.loads(metadata.get(_SHARDS_KEY, "{}"))
            return _Reader(path.name, file, sharded, later).value(document)
    except Exception as error:
        raise CheckpointError(
            f"{path}: the state cannot be read ({type(error).__name__}: {error}). The file is damaged, or no state."
        ) from error


class _Reader:
    def __init__(self, file_name: str, file: Any, sharded: dict[str, Any], later: bool) -> None:
        self._file_name, self._file, self._sharded, self._later = file_name, file, sharded, later
        self._made: dict[str, Tensor | Stored] = {}

    def value(self, node: Any) -> Any:
        """What the JSON stands for."""
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.value(item) for key, item in node.items()}
        if tag in _SEQUENCES:
            return _SEQUENCES[tag](self.value(node[tag]))
        return _READERS[tag](self, node)

    def tensor(self, node: dict) -> Tensor | Stored:
        """The tensor that a node names; tied ones are one object."""
        key = json.dumps(node)
        if key not in self._made:
            as_it_is = self._later and len(node) == 1
            self._made[key] = self._stored(node["$tensor"]) if as_it_is else _shaped(self._read(node["$tensor"]), node)
        return self._made[key]

    def array(self, node: dict) -> np.ndarray:
        """A NumPy array."""
        tensor = self.tensor(node["$array"])
        return (self._read(node["$array"]["$tensor"]) if isinstance(tensor, Stored) else tensor).numpy()

    def sharded(self, node: dict) -> Stored:
        """A tensor in files of its own; tied ones are one object."""
        name = node["$sharded"]
        if not self._later:
            raise ValueError(f"{name} lies in other files")
        key = json.dumps(node)
        if key not in self._made:
            it = self._sharded[name]
            self._made[key] = Stored(torch.Size(it["shape"]), _DTYPES[it["dtype"]], _pieces(name, it))
        return self._made[key]

    def _read(self, name: str) -> Tensor:
        # The library maps the file into memory: without a copy it would stay on the disk after its deletion.
        return self._file.get_tensor(name).clone()

    def _stored(self, name: str) -> Tensor | Stored:
        part = self._file.get_slice(name)
        shape = part.get_shape()
        piece = Piece(self._file_name, name, [0] * len(shape), shape)
        return Stored(torch.Size(shape), _DTYPES[part.get_dtype()], [piece])

    def pairs(self, pairs: list) -> list[tuple[Any, Any]]:
        """The entries of a dict that JSON could not hold as an object."""
        return [(self.value(key), self.value(item)) for key, item in pairs]

    def ordered(self, node: dict) -> OrderedDict:
        """An OrderedDict, with the `_metadata` of a module's state dict where it had one."""
        found = OrderedDict(self.pairs(node["$OrderedDict"]))
        if node[_VERSIONS] is not None:
            set_versions_of_state(found, self.value(node[_VERSIONS]))
        return found


def _shaped(stored: Tensor, node: dict) -> Tensor:
    if "dtype" in node:
        dtype = _dtype(node["dtype"])
        tensor = torch.empty(stored.numel() // dtype.itemsize, dtype=dtype, device="cpu")
        if tensor.numel():
            tensor.view(torch.uint8).copy_(stored)
        stored = tensor.reshape(node["shape"])
    if "stride" in node:
        # Only as much memory as there are elements, whatever a manipulated file says.
        reach = 1 + sum((size - 1) * stride for size, stride in zip(stored.shape, node["stride"], strict=True))
        if reach != stored.numel() or min(node["stride"]) < 1:
            raise ValueError(f"a stride of {node['stride']} for shape {list(stored.shape)}")
        stored = torch.empty_strided(stored.shape, node["stride"], dtype=stored.dtype, device="cpu").copy_(stored)
    return stored


def _pieces(name: str, entry: Mapping[str, Any]) -> list[Piece]:
    pieces = [Piece(file, name, offsets, sizes) for file, offsets, sizes in entry["pieces"]]
    for piece in pieces:  # whoever made the file, nothing is read outside of the folder
        if not _FILE_PATTERN.fullmatch(piece.file):
            raise ValueError(f"{piece.file!r} is no file of a checkpoint")
    return pieces


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


def _defaultdict(reader: _Reader, node: dict) -> defaultdict:
    return defaultdict(_FACTORIES[node["factory"]], reader.pairs(node["$defaultdict"]))


def _scalar(reader: _Reader, node: dict) -> np.generic:
    if node["dtype"] not in _NUMPY_NAMES:
        raise TypeError(f"{node['dtype']!r} is no NumPy scalar")
    return np.dtype(node["dtype"]).type(reader.value(node["$scalar"]))


_READERS: dict[str, Callable[[_Reader, dict], Any]] = {
    "$tensor": _Reader.tensor,
    "$sharded": _Reader.sharded,
    "$array": _Reader.array,
    "$scalar": _scalar,
    "$deque": lambda reader, node: deque(reader.value(node["$deque"]), node["maxlen"]),
    "$Size": lambda reader, node: torch.Size(node["$Size"]),
    "$dict": lambda reader, node: dict(reader.pairs(node["$dict"])),
    "$Counter": lambda reader, node: Counter(dict(reader.pairs(node["$Counter"]))),
    "$OrderedDict": _Reader.ordered,
    "$defaultdict": _defaultdict,
    "$int": lambda reader, node: int(node["$int"], 16),
    "$float": lambda reader, node: float(node["$float"]),
    "$complex": lambda reader, node: complex(*reader.value(node["$complex"])),
    "$bytes": lambda reader, node: base64.b64decode(node["$bytes"], validate=True),
    "$dtype": lambda reader, node: _dtype(node["$dtype"]),
    "$device": lambda reader, node: torch.device(node["$device"]),
}
