"""Lets optimizers skip an update on the device, so that the host need not wait for the verdict on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_recipes.precision.torch_private import STEP_TAKES_FOUND_INF

logger = logging.getLogger(__name__)

_HAVE_FUSED = (Adam, AdamW, SGD)


def prefer_fused(optimizers: Mapping[str, Optimizer], modules: nn.Module) -> None:
    """Make torch's Adam, AdamW and SGD fused, where the recipe has not chosen how they are computed.

    Without a choice torch takes one of its own (`foreach` on a GPU), whose kernels cannot skip. Says which optimizers
    still make the host wait. May be called again, as after a checkpoint was loaded, which holds an earlier choice.

    modules: have no fused kernels if one of them gives sparse gradients (an embedding).
    """
    sparse = any(getattr(module, "sparse", False) for module in modules.modules())
    for name, optimizer in optimizers.items():
        has_fused = type(optimizer) in _HAVE_FUSED and not sparse
        if has_fused and all(map(_leaves_the_choice, optimizer.param_groups)):
            _fuse(optimizer)
        elif not getattr(optimizer, STEP_TAKES_FOUND_INF, False):
            logger.info(
                "optimizer '%s' (%s) cannot skip an update on the device, so the host waits for each of its steps: "
                "torch's Adam, AdamW and SGD with fused=True need no wait.",
                name,
                type(optimizer).__name__,
            )


def _leaves_the_choice(group: Mapping[str, Any]) -> bool:
    """Whether torch is to choose, and may take the fused kernels, which take floating parameters only."""
    # As torch reads it: foreach=False asks for the kernels of single tensors.
    chosen = group["foreach"] is not None or group.get("capturable") or group["differentiable"]
    # Torch leaves out the dampening at a parameter's first step, and `_begin_momentum` could not.
    chosen = chosen or group.get("dampening")
    floating = all(torch.is_floating_point(parameter) for parameter in group["params"])
    return group["fused"] is None and not chosen and floating


def _fuse(optimizer: Optimizer) -> None:
    if isinstance(optimizer, SGD) and not optimizer.defaults["fused"]:
        optimizer.register_step_pre_hook(_begin_momentum)
    optimizer.defaults["fused"] = True  # of groups that are added later
    setattr(optimizer, STEP_TAKES_FOUND_INF, True)
    for group in optimizer.param_groups:
        group["fused"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:  # which other kernels keep on the host
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)


def _begin_momentum(optimizer: Optimizer, *_: Any) -> None:
    """Give parameters that have their first gradient a momentum of 0, from which the step is torch's first one.

    By itself torch's fused SGD ends in a TypeError where others of the group have a momentum already, and keeps
    uninitialised memory where that step is skipped. Its other kernels do neither.
    """
    if len(optimizer.state) == sum(len(group["params"]) for group in optimizer.param_groups):
        return  # all have begun
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["momentum"] else ():
            if parameter.grad is not None and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
