"""Gathers the parameters of a sharded unit in the dtype to which autocast would cast them.

A policy of torch's is for good. But a run trains in bf16, evaluates in fp32, and may widen for a few steps; there each
op needs what it would find in one process.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from amp_recipes.distributed import torch_private
from amp_recipes.errors import RecipeError


class GatheredDtype:
    """The dtype of some parameter groups of FSDP's, all of one unit, which follows the unit's calls.

    groups: torch's; dtype: that of their policy. What was gathered in another dtype is kept by torch as empty shells,
    which the graph of a forward refers to, and they are put back when that dtype is asked for again.
    """

    def __init__(self, unit: nn.Module, groups: list[Any], dtype: torch.dtype, device: torch.device) -> None:
        self._groups = groups
        self._dtype: torch.dtype | None = dtype
        self._device_type = device.type
        self._shells: dict[torch.dtype | None, list[dict[str, Any]]] = {}
        self._graph = False  # a forward with gradients whose backward has not ended, in `_dtype`
        self._afterwards: torch.dtype | None = dtype
        unit.register_forward_pre_hook(self._before, prepend=True)  # before torch's own, which gathers
        unit.register_forward_hook(self._after)

    def _before(self, unit: nn.Module, inputs: Any) -> None:
        autocast = torch.is_autocast_enabled(self._device_type)
        wanted = torch.get_autocast_dtype(self._device_type) if autocast else None
        self._afterwards = self._dtype
        self._graph = self._graph and self._awaits_backward
        if wanted == self._dtype:
            return
        if self._graph and torch.is_grad_enabled():
            raise RecipeError(
                f"{type(unit).__name__} was called under autocast to {self._dtype or 'no dtype'} and then to "
                f"{wanted or 'no dtype'} before the backward. Under strategy fsdp its weights are gathered in one "
                "dtype for both calls. Call it in the same context, or pin it with fp32_modules."
            )
        self._switch(wanted)

    def _after(self, unit: nn.Module, inputs: Any, outputs: Any) -> None:
        if torch.is_grad_enabled():
            self._graph = True
        elif self._afterwards != self._dtype:
            self._switch(self._afterwards)

    @property
    def _awaits_backward(self) -> bool:
        return any(map(torch_private.awaits_backward, self._groups))

    def _switch(self, dtype: torch.dtype | None) -> None:
        parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        for group in self._groups:
            torch_private.free_gathered(group)
            group.mp_policy = dataclasses.replace(group.mp_policy, param_dtype=dtype)
        self._shells[self._dtype] = [torch_private.take_shells(parameter) for parameter in parameters]
        for parameter, shells in zip(parameters, self._shells.get(dtype, [{}] * len(parameters)), strict=True):
            torch_private.put_shells(parameter, shells)
            if hasattr(parameter, "param_dtype"):  # else torch reads the policy at the first forward
                parameter.init_dtype_attrs(self._groups[0].mp_policy)
        self._dtype = dtype
