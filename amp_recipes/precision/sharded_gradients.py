"""Computes norms over gradients that are divided over processes (DTensors).

Scaling, clipping and judging work on the parts; only sums of squares travel.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from amp_recipes.errors import PrecisionError
from amp_recipes.modules.sharded import is_sharded, local
from amp_recipes.precision.torch_private import foreach_norm


class Ranks(Protocol):
    """Queries to the other processes for sharded parameters."""

    def world_size(self) -> int:
        """Return the number of processes."""

    def total(self, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers` (float64, on the device), each summed over all processes."""

    def leaves(self, modules: nn.Module, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
        """Return the leaves of `parameters` in the graph of a forward that has run."""

    def keeping_gathered(self, modules: nn.Module) -> AbstractContextManager[None]:
        """Inside this context, a backward keeps the gathered tensors that a second one, in its own graph, needs."""


def by_format(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """The tensors by device and dtype, as torch's kernels over lists take them."""
    formats: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        formats.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return formats


def sum_of_squares(gradients: Sequence[torch.Tensor], device: torch.device, processes: int) -> torch.Tensor:
    """Return this process's part of the squared norm over all `gradients` (0-d float64, on `device`).

    Summed over all `processes`, each number counts once: what several of them hold is divided by how many do. Each
    part's norm is taken in its own dtype, as a norm that overflows there is to be seen; the squares in float64, where
    those of any fp32 norm are finite.
    """
    copies: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        copies.setdefault(processes // _parts(gradient), []).append(local(gradient))
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for times, parts in copies.items():
        for same in by_format(parts).values():
            norm = torch.linalg.vector_norm(torch.stack(foreach_norm(same)))
            squares += norm.to(device).double().square() / times
    return squares


def mark_of(parameters: Iterable[torch.Tensor]) -> float:
    """A number (below 2^16) that differs, but for one case in 65,536, where other `parameters` have gradients."""
    return float(zlib.crc32(bytes(parameter.grad is not None for parameter in parameters)) & 0xFFFF)


def marks_differ(total: torch.Tensor, total_of_squares: torch.Tensor, processes: int) -> torch.Tensor:
    """Whether the marks of all processes are not all equal (0-d bool); in float64 exact up to 1,024 of them."""
    return total_of_squares * processes - total.square() > 0.5


def _parts(gradient: torch.Tensor) -> int:
    """Into how many parts `gradient` is divided; 1: each process holds all of it."""
    if not is_sharded(gradient):
        return 1
    if any(placement.is_partial() for placement in gradient.placements):
        raise PrecisionError(
            f"a gradient of shape {tuple(gradient.shape)} has a pending sum over processes ({gradient.placements}), "
            "so its norm is unknown: let the layer's parallel style reduce it."
        )
    sizes = zip(gradient.placements, gradient.device_mesh.shape, strict=True)
    return math.prod(size for placement, size in sizes if not placement.is_replicate())
