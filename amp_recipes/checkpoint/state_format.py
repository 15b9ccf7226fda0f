"""Writes a state to a file and reads it back, without any pickled code.

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
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from amp_recipes.checkpoint.background import without_forks
from amp_recipes.checkpoint.hashed_file import HashedFile
from amp_recipes.checkpoint.packing import (
    DTYPE_NAMES,
    FACTORIES,
    NUMPY_NAMES,
    SEQUENCES,
    VERSIONS,
    Packer,
    Refused,
    title,
)
from amp_recipes.checkpoint.shards import Piece, Stored, fills
from amp_recipes.errors import CheckpointError
from amp_recipes.modules.torch_private import set_versions_of_state

_METADATA_KEY = "amp_recipes"
_SHARDS_KEY = "amp_recipes_shards"
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors library reads
_FILE_PATTERN = re.compile(r"\w[\w.+@-]*")
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass
class PackedState:
    """A state on its way into a file; its containers are its own, its tensors are still those of the state."""

    document: Any  # the values in JSON
    tensors: dict[str, Tensor]  # name in the file -> detached and strided, on any device
    # Name -> dtype and shape of a tensor divided over several processes, and its parts (`add_pieces`).
    sharded: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Name -> this process's part of it, if it is the one to write it, and where that begins.
    parts: dict[str, tuple[Tensor, list[int]]] = field(default_factory=dict)

    @property
    def tensor_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def header(self) -> bytes:
        """All of the file that comes before the tensors' bytes. Raises CheckpointError if it would be over 100 MB."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt", _METADATA_KEY: json.dumps(self.document)}}
        if self.sharded:
            header["__metadata__"][_SHARDS_KEY] = json.dumps(self.sharded, separators=(",", ":"))
        offset = 0
        for name, tensor in self.in_file_order():
            known = DTYPE_NAMES.get(tensor.dtype)
            shape, end = list(tensor.shape) if known else [tensor.nbytes], offset + tensor.nbytes
            header[name] = {"dtype": known or "U8", "shape": shape, "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        if len(text) > _MAX_HEADER_BYTES:
            raise CheckpointError(
                f"A state has {len(text) / 1e6:.0f} MB of values that are not tensors; a file holds at most "
                f"{_MAX_HEADER_BYTES / 1e6:.0f} MB. Store long lists of numbers as tensors."
            )
        return len(text).to_bytes(8, "little") + text

    def in_file_order(self) -> list[tuple[str, Tensor]]:
        """The tensors, those with long elements first: so each begins at a multiple of its element's size."""
        return sorted(self.tensors.items(), key=lambda item: -item[1].element_size())

    def add_pieces(self, file: str, pieces: Mapping[str, tuple[list[int], list[int]]]) -> None:
        """Note that a file holds parts of sharded tensors; pieces: name -> where it begins, and its size."""
        for name, (offsets, sizes) in pieces.items():
            self.sharded[name]["pieces"].append([file, offsets, sizes])

    def incomplete(self) -> list[str]:
        """The sharded tensors of which not every element has a place in a file, or some have two."""
        return [name for name, entry in self.sharded.items() if not fills(entry["shape"], _pieces(name, entry))]


def pack_state(state: Any, name: str) -> PackedState:
    """`state` taken apart into tensors and JSON; nothing is copied or written yet.

    name: what errors call its owner. Raises CheckpointError, with the key's path and the type, for what a file
    cannot hold: functions, objects of other classes, sparse and quantized tensors, more than 100 levels.
    """
    packer = Packer()
    try:
        document = packer.node(state, ())
    except Refused as error:
        raise CheckpointError(
            f"State of recoverable {name}: state_dict(){error.where} is {error.what}; a checkpoint can hold dense "
            "tensors, NumPy arrays, numbers, text, bytes, and dicts, lists, tuples and sets of these."
        ) from None
    return PackedState(document, packer.tensors, packer.sharded, packer.parts)


def plain_problem(value: Any) -> str | None:
    """Return why a file cannot store `value`, such as "a pathlib.Path at ['a'][1]"; None if it can.

    Stricter than `pack_state` in one point: a defaultdict must have one of the usual factories, since it would come
    back as a dict. Raises nothing, and copies no tensor that lies in memory as it is.
    """
    try:
        Packer(strict=True).node(value, ())
    except Refused as error:
        return f"{error.what} at {error.where}" if error.where else error.what
    except Exception as error:  # an object that fails at being looked at
        return f"a {title(type(value))} that cannot be read ({type(error).__name__}: {error})"
    return None


# ---------------------------------------------------------------------- to the disk


def write_state(path: Path, packed: PackedState) -> str:
    """Write a new file and have it on the disk; returns its sha256, taken while it was written."""
    with closing(HashedFile(path)) as file:
        file.write(memoryview(packed.header))
        for _, tensor in packed.in_file_order():
            if tensor.numel():
                file.write(_bytes_of(tensor))
        return file.finish()


@without_forks()
def _bytes_of(tensor: Tensor) -> memoryview:
    # A single element may claim any stride and yet be contiguous: as bytes it must be 1.
    row_by_row = tensor.cpu().contiguous().as_strided((tensor.numel(),), (1,))
    return memoryview(row_by_row.view(torch.uint8).numpy())


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
            f"{path}: the state cannot be read ({type(error).__name__}: {error}). The file is damaged, or is not a "
            "state file."
        ) from error


class _Reader:
    def __init__(self, file_name: str, file: Any, sharded: dict[str, Any], later: bool) -> None:
        self._file_name, self._file, self._sharded, self._later = file_name, file, sharded, later
        self._made: dict[str, Tensor | Stored] = {}

    def value(self, node: Any) -> Any:
        """Return the value that the JSON stands for."""
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        tag = next(iter(node), "")
        if not tag.startswith("$"):
            return {key: self.value(item) for key, item in node.items()}
        if tag in SEQUENCES:
            return SEQUENCES[tag](self.value(node[tag]))
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
            raise ValueError(f"{name} is stored in other files")
        key = json.dumps(node)
        if key not in self._made:
            entry = self._sharded[name]
            self._made[key] = Stored(torch.Size(entry["shape"]), _DTYPES[entry["dtype"]], _pieces(name, entry))
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
        if node[VERSIONS] is not None:
            set_versions_of_state(found, self.value(node[VERSIONS]))
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
            raise ValueError(f"{piece.file!r} is not a file of a checkpoint")
    return pieces


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


def _defaultdict(reader: _Reader, node: dict) -> defaultdict:
    return defaultdict(FACTORIES[node["factory"]], reader.pairs(node["$defaultdict"]))


def _scalar(reader: _Reader, node: dict) -> np.generic:
    if node["dtype"] not in NUMPY_NAMES:
        raise TypeError(f"{node['dtype']!r} is not a NumPy scalar")
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
