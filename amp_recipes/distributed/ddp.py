"""Modules of which every process holds all, with gradients averaged over the processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amp_recipes.distributed.processes import initialized


def wrap(modules: nn.ModuleDict, device: torch.device, options: Any) -> None:
    """Wrap, in place, every module that has trainable parameters in DistributedDataParallel."""
    for name, module in modules.items():
        if isinstance(module, DistributedDataParallel) or not any(p.requires_grad for p in module.parameters()):
            continue
        devices = [device] if device.type == "cuda" else None
        modules[name] = DistributedDataParallel(
            module, device_ids=devices, find_unused_parameters=options.find_unused_parameters
        )


@contextmanager
def no_sync(modules: nn.Module, use: bool = True) -> Iterator[None]:
    """Within it, backward does not average gradients across ranks; restored also after an exception."""
    if not use or not initialized():
        yield
        return
    with ExitStack() as stack:
        for module in modules.modules():
            if isinstance(module, DistributedDataParallel):
                stack.enter_context(module.no_sync())
        yield


@contextmanager
def evaluating(modules: nn.Module) -> Iterator[None]:
    """Within it, a forward waits for no other process."""
    yield
