"""Shares the modules among the processes: each process holds all of them (ddp), or a part of each (fsdp)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from amp_recipes.distributed import ddp, fsdp
from amp_recipes.distributed.processes import initialized
from amp_recipes.distributed.recomputing import recompute

is_sharded = fsdp.is_sharded
leaves = fsdp.leaves
keeping_gathered = fsdp.keeping_gathered


def wrap(
    modules: nn.ModuleDict,
    device: torch.device,
    options: Any,
    compute_dtype: torch.dtype = torch.float32,
    fp32_modules: Collection[str] = (),
    tensor_parallel_plan: Mapping[str, str] | None = None,
) -> None:
    """Share `modules` among the processes, in place; what is shared already stays as it is.

    options: has the run options on processes as attributes; compute_dtype: what autocast computes in; fp32_modules:
    names of the modules that compute in fp32 whatever it is.
    """
    recompute(modules, options.activation_checkpointing)
    if not initialized():
        return
    if options.strategy == "fsdp":
        if options.sync_batchnorm:
            ddp.synchronise_batchnorms(modules)
        fsdp.shard(modules, device, options, compute_dtype, fp32_modules, tensor_parallel_plan)
    else:
        ddp.wrap(modules, device, options)


@contextmanager
def no_sync(modules: nn.Module, use: bool = True) -> Iterator[None]:
    """Inside this context, backward skips work that can wait for the last micro-batch; restored after exceptions."""
    if not use or not initialized():
        yield
        return
    with fsdp.no_sync(modules), ddp.no_sync(modules):
        yield


def total(numbers: torch.Tensor) -> torch.Tensor:
    """`numbers` (float64, on the device), each summed over all processes, in place."""
    if initialized():
        dist.all_reduce(numbers)
    return numbers
