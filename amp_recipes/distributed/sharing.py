"""How several processes share the modules of a run: each holds all of them (ddp), or a part of each (fsdp)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from amp_recipes.distributed import ddp, fsdp
from amp_recipes.distributed.processes import initialized


def wrap(
    modules: nn.ModuleDict,
    device: torch.device,
    options: Any,
    compute_dtype: torch.dtype = torch.float32,
    fp32_modules: Collection[str] = (),
) -> None:
    """Share `modules` among the processes, in place; with one process nothing happens.

    options: has the run options on processes as attributes; compute_dtype: what autocast computes in; fp32_modules:
    names of the modules that compute in fp32 whatever it is.
    """
    if not initialized():
        return
    if options.strategy == "fsdp":
        fsdp.shard(modules, device, options, compute_dtype, fp32_modules)
    else:
        ddp.wrap(modules, device, options)


def is_sharded(modules: nn.Module) -> bool:
    """Whether a process holds parts of parameters only, so that every forward waits for the others."""
    return False
