"""Cuts and joins tensors whose parts are on several processes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from amp_recipes.modules.sharded import local


def dtensors_exist() -> bool:
    """Whether anybody has imported DTensor, which takes half a second: else there is none."""
    return hasattr(sys.modules.get("torch.distributed.tensor"), "DTensor")


def here(value: Any) -> tuple[list[int], list[int]]:
    """Return the start of this process's part of a DTensor, by dimension, and its size."""
    module = sys.modules["torch.distributed.tensor._utils"]
    sizes, offsets = module.compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if len(offsets) != len(value.shape) or 0 in sizes:  # a part that is empty, or no part of the mesh
        return [0] * len(value.shape), list(local(value.detach()).shape)
    return list(offsets), list(sizes)


def is_first_holder(value: Any) -> bool:
    """Whether this process is the one that writes its part of a DTensor: of those with the same part, the first."""
    coordinate = value.device_mesh.get_coordinate()
    return coordinate is not None and not any(
        at for at, placement in zip(coordinate, value.placements, strict=True) if placement.is_replicate()
    )


def replicated_like(value: Any, whole: Tensor) -> Any:
    """A DTensor that all processes of the mesh of `value` hold whole."""
    from torch.distributed.tensor import DTensor, Replicate

    placements = [Replicate()] * value.device_mesh.ndim
    return DTensor.from_local(whole, value.device_mesh, placements, run_check=False)


# ---------------------------------------------------------------------- in files


@dataclass(frozen=True)
class Piece:
    """A part of a tensor in a file of its own: where it begins in the tensor, and how many elements it has."""

    file: str
    name: str  # in the file
    offsets: Sequence[int]
    sizes: Sequence[int]

    def overlap(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
        """By dimension, begin and end in the whole tensor of what this piece shares with a box; [] for nothing."""
        shared = [
            (max(mine, at), min(mine + size, at + wanted))
            for mine, size, at, wanted in zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        ]
        return shared if all(begin < end for begin, end in shared) else []


@dataclass(eq=False)
class Stored:
    """A tensor in the files of a checkpoint, of which nothing has been read yet."""

    shape: torch.Size
    dtype: torch.dtype
    pieces: list[Piece]

    def files(self, offsets: Sequence[int], sizes: Sequence[int]) -> set[str]:
        """The names of the files in which a box of it lies."""
        return {piece.file for piece in self._pieces(offsets, sizes)}

    @torch.inference_mode(False)  # an optimizer could not train on with a state that was made inside it
    def read(self, files: OpenFiles, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """A box of it, on the CPU, in memory of its own. Raises ValueError if the pieces do not fill it once."""
        made = torch.empty(list(sizes), dtype=self.dtype, device="cpu")
        filled = 0
        for piece in self._pieces(offsets, sizes):
            shared = piece.overlap(offsets, sizes) if self.shape else []
            part = files.part(piece, shared)
            if part.dtype != self.dtype:
                raise ValueError(f"{piece.name} is {part.dtype} in {piece.file}, expected {self.dtype}")
            there = tuple(slice(begin - at, end - at) for (begin, end), at in zip(shared, offsets, strict=True))
            made[there] = part
            filled += part.numel()
        if filled != made.numel():
            raise ValueError(f"its pieces hold {filled} of {made.numel()} elements")
        return made

    def _pieces(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterable[Piece]:
        return [piece for piece in self.pieces if not self.shape or piece.overlap(offsets, sizes)]


class OpenFiles(ExitStack):
    """The safetensors files of one checkpoint, each opened once, when something is read from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._open: dict[str, Any] = {}
        self.callback(self._open.clear)

    def part(self, piece: Piece, shared: Sequence[tuple[int, int]]) -> Tensor:
        """Return the part of a piece that `shared` names in indices of the whole tensor."""
        file = self._open.get(piece.file)
        if file is None:
            opened = safe_open(str(self._folder / piece.file), framework="pt", device="cpu")
            file = self._open[piece.file] = self.enter_context(opened)
        sizes = [end - begin for begin, end in shared]
        if sizes == list(piece.sizes):
            found = file.get_tensor(piece.name)
            if list(found.shape) != sizes:
                raise ValueError(f"{piece.name} has shape {list(found.shape)} in {piece.file}, expected {sizes}")
            return found
        inside = [slice(begin - at, end - at) for (begin, end), at in zip(shared, piece.offsets, strict=True)]
        return file.get_slice(piece.name)[tuple(inside)]


def fills(shape: Sequence[int], pieces: Sequence[Piece]) -> bool:
    """Whether the pieces make up the tensor: inside it, none over another, and together as many elements."""
    held = [piece for piece in pieces if prod(piece.sizes)]
    inside = all(
        at >= 0 and at + size <= length
        for piece in held
        for at, size, length in zip(piece.offsets, piece.sizes, shape, strict=True)
    )
    return inside and sum(prod(piece.sizes) for piece in held) == prod(shape) and not _any_overlap(shape, held)


def _any_overlap(shape: Sequence[int], pieces: Sequence[Piece]) -> bool:
    if all(list(piece.sizes[1:]) == list(shape[1:]) for piece in pieces):  # rows, as fsdp divides a tensor
        rows = sorted((piece.offsets[0], piece.sizes[0]) for piece in pieces if piece.offsets)
        return any(at + size > after for (at, size), (after, _) in pairwise(rows))
    return any(one.overlap(other.offsets, other.sizes) for one, other in combinations(pieces, 2))
