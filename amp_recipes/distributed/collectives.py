"""What processes tell each other: verdicts, means, sums, and what the main one decides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from amp_recipes.distributed.processes import initialized, world_size


def agree(flag: torch.Tensor) -> torch.Tensor:
    """The maximum of `flag` (0-d, on the device) over all ranks."""
    if initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag


def mean(value: float, weight: float, device: torch.device) -> float:
    """The mean of `value` over all ranks, weighted; NaN where no rank has any weight."""
    if not initialized():
        return value
    total = torch.tensor([value * weight if weight > 0 else 0.0, weight], dtype=torch.float64)
    total = total.to(device) if dist.get_backend() == "nccl" else total
    dist.all_reduce(total)
    summed, weights = total.tolist()
    return summed / weights if weights > 0 else math.nan


def means(values: Sequence[float], device: torch.device) -> list[float]:
    """The mean of each of `values` over all ranks, which must give as many."""
    if not initialized():
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    total = total.to(device) if dist.get_backend() == "nccl" else total
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def sums(numbers: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """The numbers of each name, each summed over all ranks in their order; a rank may lack a name."""
    of_ranks: list[Mapping[str, Sequence[float]]] = [numbers]
    if initialized():
        of_ranks = of_ranks * world_size()
        dist.all_gather_object(of_ranks, dict(numbers))
    names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
    return {name: tuple(map(sum, zip(*(it[name] for it in of_ranks if name in it), strict=True))) for name in names}


def from_main_process(value: Any) -> Any:
    """`value` as the main process has it, on every rank."""
    if not initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def wait_for_all() -> None:
    """Go on when every rank has come here."""
    if initialized():
        dist.barrier()
