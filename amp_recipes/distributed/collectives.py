"""Exchanges verdicts, means, sums and decisions between the processes.

Numbers of the host go over `host_group`, which never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from amp_recipes.distributed.failures import collective
from amp_recipes.distributed.processes import host_group, initialized, world_size


def agree(flag: torch.Tensor) -> torch.Tensor:
    """The maximum of `flag` (0-d, on the device) over all ranks."""
    if initialized():
        with collective("agreeing on an update"):
            dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag


class AsyncGather:
    """Gathers numbers of all processes in the background; each process passes as many, at the same point."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._mine = torch.tensor(numbers, dtype=torch.float64)
        self._all = self._mine.new_empty(world_size(), len(numbers))
        self._work = None
        if initialized():
            rows = list(self._all.unbind())
            with collective("exchanging the sizes of the next updates"):
                self._work = dist.all_gather(rows, self._mine, group=host_group(), async_op=True)
        else:
            self._all.copy_(self._mine)

    def read(self) -> list[list[float]]:
        """The numbers of every process, by rank; waits until all have given theirs."""
        if self._work is not None:
            with collective("exchanging the sizes of the next updates"):
                self._work.wait()
            self._work = None
        return self._all.tolist()


def mean(value: float, weight: float) -> float:
    """The mean of `value` over all ranks, weighted; NaN where no rank has any weight."""
    if not initialized():
        return value
    pairs = AsyncGather([value if weight > 0 else 0.0, weight]).read()
    weights = math.fsum(weight for _, weight in pairs)
    return math.fsum(value * weight for value, weight in pairs) / weights if weights > 0 else math.nan


def sums(numbers: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """The numbers of each name, each summed over all ranks in their order; a rank may lack a name."""
    of_ranks = gather(dict(numbers))
    names = dict.fromkeys(name for of_rank in of_ranks for name in of_rank)
    return {
        name: tuple(map(sum, zip(*(of_rank[name] for of_rank in of_ranks if name in of_rank), strict=True)))
        for name in names
    }


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in their order, on every rank; it is pickled."""
    of_ranks = [value] * world_size()
    if initialized():
        with collective("gathering values from all ranks"):
            dist.all_gather_object(of_ranks, value, group=host_group())
    return of_ranks


def from_main_process(value: Any) -> Any:
    """`value` as the main process has it, on every rank."""
    if not initialized():
        return value
    box = [value]
    with collective("receiving from the main process"):
        dist.broadcast_object_list(box, group=host_group())
    return box[0]


def wait_for_all() -> None:
    """Wait until every rank is here."""
    if initialized():
        with collective("waiting for all ranks"):
            dist.barrier(group=host_group())
