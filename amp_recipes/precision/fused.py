"""Lets optimizers skip an update on the device, so that the host does not wait for its result."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_recipes.precision.torch_private import STEP_TAKES_FOUND_INF, runs_on

logger = logging.getLogger(__name__)

_FUSED_KERNELS = {Adam: "aten::_fused_adam_", AdamW: "aten::_fused_adamw_", SGD: "aten::_fused_sgd_"}
_CHOICES = ("fused", "foreach", "capturable")  # of a group: how its step is computed


class KernelChoices:
    """How the recipe wants the steps of its optimizers computed; a checkpoint brings the choices of another run."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._of_groups = [
            (optimizer, [{name: group[name] for name in _CHOICES if name in group} for group in optimizer.param_groups])
            for optimizer in optimizers.values()
        ]

    def put_back(self) -> None:
        """Give the groups these choices again, and have the counters of steps where their kernels read them."""
        for optimizer, of_groups in self._of_groups:
            for group, choices in zip(optimizer.param_groups, of_groups, strict=False):
                group.update(choices)
            if any(_CHOICES[0] in choices for choices in of_groups):
                _set_fused(optimizer, any(group["fused"] for group in optimizer.param_groups))


def prefer_fused(optimizers: Mapping[str, Optimizer], modules: nn.Module, device: torch.device) -> None:
    """Make torch's Adam, AdamW and SGD fused, where the recipe has not chosen how they are computed.

    Without a choice torch takes one of its own (`foreach` on a GPU), whose kernels cannot skip. Says which optimizers
    still make the host wait. May be called again, as after a checkpoint was loaded.

    modules: have no fused kernels if one of them gives sparse gradients (an embedding); device: where updates are
    judged, and where all parameters are to lie.
    """
    sparse = any(getattr(module, "sparse", False) for module in modules.modules())
    for name, optimizer in optimizers.items():
        kernel = None if sparse else _FUSED_KERNELS.get(type(optimizer))
        if kernel is not None and all(_may_be_fused(group, kernel, device.type) for group in optimizer.param_groups):
            _fuse(optimizer)
        elif not getattr(optimizer, STEP_TAKES_FOUND_INF, False):
            logger.info(
                "optimizer '%s' (%s) cannot skip an update on the device, so the host waits for each of its steps. "
                "torch's Adam, AdamW and SGD with fused=True avoid the wait, if all parameters are real, all "
                "gradients are dense, and both are on the device.",
                name,
                type(optimizer).__name__,
            )


def _may_be_fused(group: Mapping[str, Any], kernel: str, device_type: str) -> bool:
    """Whether torch is to choose, and may take the fused kernels: for floating parameters on a device that has them."""
    # As torch reads it: foreach=False asks for the kernels of single tensors.
    chosen = group["fused"] is not None or group["foreach"] is not None or group.get("capturable")
    # Torch leaves out the dampening at a parameter's first step, and `_before_fused_sgd` could not.
    chosen = chosen or group["differentiable"] or group.get("dampening")
    if chosen or not runs_on(kernel, device_type):
        return False
    return all(torch.is_floating_point(each) and each.device.type == device_type for each in group["params"])


def _fuse(optimizer: Optimizer) -> None:
    if isinstance(optimizer, SGD) and not optimizer.defaults["fused"]:
        optimizer.register_step_pre_hook(_before_fused_sgd)
    optimizer.defaults["fused"] = True  # of groups that are added later
    for group in optimizer.param_groups:
        group["fused"] = True
    _set_fused(optimizer, True)


def _set_fused(optimizer: Optimizer, fused: bool) -> None:
    """Have what depends on `fused` as it is to be: who looks at `found_inf`, and where the steps are counted."""
    setattr(optimizer, STEP_TAKES_FOUND_INF, fused)
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" in state:
                device = parameter.device if on_device else "cpu"
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=device)


def _before_fused_sgd(optimizer: Optimizer, *_: Any) -> None:
    """Give parameters that have their first gradient a momentum of 0, from which the step is torch's first one.

    By itself torch's fused SGD ends in a TypeError where others of the group have a momentum already, and keeps
    uninitialised memory where that step is skipped. Its other kernels do neither, and take sparse gradients.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group["fused"] else ():
            if parameter.grad is None:
                continue
            if parameter.grad.is_sparse:
                _leave_unfused(optimizer)
                return
            if group["momentum"] and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _leave_unfused(optimizer: Optimizer) -> None:
    logger.info(
        "torch's fused SGD does not support sparse gradients: using the normal SGD, so the host waits for each of "
        "its steps."
    )
    for group in optimizer.param_groups:
        group["fused"] = False
    _set_fused(optimizer, False)
