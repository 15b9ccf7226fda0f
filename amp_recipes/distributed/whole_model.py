"""Lets a process compute by itself for a while: with the whole model, and without the others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_recipes.distributed import ddp, fsdp
from amp_recipes.distributed.collectives import AsyncGather
from amp_recipes.distributed.processes import initialized

# Of the bytes of the whole model: weights, gradients, a copy of these, and the same again for activations and scraps.
_COPIES = 6


def why_not_whole(modules: nn.Module, options: Any, device: torch.device) -> str:
    """Return in words why the processes cannot enter `whole`; empty if they can. All of them ask together.

    options: has the run options on processes as attributes.
    """
    if not initialized():
        return ""
    if options.strategy != "fsdp":
        return "ddp with static_graph expects the same backward in every step" if options.static_graph else ""
    if options.tensor_parallel > 1:
        return "with tensor_parallel, no process can run a layer alone"
    needed = _COPIES * sum(parameter.numel() * parameter.element_size() for parameter in modules.parameters())
    if needed <= min(free for (free,) in AsyncGather([_free_bytes(device)]).read()):
        return ""
    return f"one process cannot hold the whole model and its gradients on {device} ({needed / 1e9:.1f} GB)"


def _free_bytes(device: torch.device) -> float:
    if device.type == "cpu" or not hasattr(torch.accelerator, "get_memory_info"):
        return float("inf")
    free, _ = torch.accelerator.get_memory_info(device)
    return free + torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


@contextmanager
def whole(modules: nn.Module, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside this context, each process holds the whole model, and its forwards and backwards wait for no other.

    All processes enter and leave together. Optimizers hold the same parameters as the modules; not to be stepped,
    except where their state and all weights are put back afterwards. SyncBatchNorm is plain inside `alone`.
    """
    if not initialized():
        yield
        return
    with ddp.paused(modules), fsdp.gathered(modules, optimizers):
        yield
