"""Lowers learning rates only during each step, so that no schedule and no checkpoint sees the lower ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class LoweredRates:
    """While `active`, every group of the attached optimizers steps with `factor` times its learning rate."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self.active = False
        # The groups that have their lower rate now, by identity, with the rate to put back.
        self._lowered: dict[int, tuple[dict[str, Any], Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lowered": {}}  # identities mean nothing in a copy

    def attach(self, optimizers: Mapping[str, Optimizer]) -> None:
        """Lower the rates in all steps of these optimizers from now on. May be called again."""
        for optimizer in optimizers.values():
            optimizer.register_step_pre_hook(self._before)
            optimizer.register_step_post_hook(self._after)

    def in_force(self, optimizer: Optimizer) -> Any:
        """The rate of the optimizer's first group in its next step; a copy where it is a tensor."""
        rate = optimizer.param_groups[0]["lr"]
        if self.active:
            return rate * self._factor
        return rate.clone() if isinstance(rate, Tensor) else rate  # a scheduler may change a tensor in place

    @torch.no_grad()
    def put_back(self) -> None:
        """Give the groups the rates of the schedule again: also where a step was left by an exception."""
        for group, rate in self._lowered.values():
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._lowered.clear()

    @torch.no_grad()
    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if not self.active:
            return
        seen = {id(group["lr"]) for group, rate in self._lowered.values() if isinstance(rate, Tensor)}
        for group in optimizer.param_groups:
            rate = group.get("lr")
            if rate is None or id(group) in self._lowered or id(rate) in seen:
                continue
            if isinstance(rate, Tensor):  # in place: a captured graph, or another group, has this very tensor
                seen.add(id(rate))
                self._lowered[id(group)] = group, rate.clone()
                rate.mul_(self._factor)
            else:
                self._lowered[id(group)] = group, rate
                group["lr"] = rate * self._factor

    def _after(self, *_: Any) -> None:
        self.put_back()
