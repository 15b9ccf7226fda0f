"""Averages trainable parameters over the updates, and puts the averages into the modules for evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from amp_recipes.modules.sharded import local


class WeightAverage:
    """average <- decay * average + (1 - decay) * parameter, after every update that was taken.

    modules: whose trainable parameters are averaged, as they are now. Buffers (BatchNorm statistics) are not
    averaged: evaluation uses the model's own. Source of the rule: `torch.optim.swa_utils.get_ema_multi_avg_fn`.
    saved_name: from a parameter's name here to its name in a checkpoint (that of the model without wrappers).
    """

    def __init__(self, modules: nn.Module, decay: float, saved_name: Callable[[str], str] = str) -> None:
        self._saved_name = saved_name
        self._move = get_ema_multi_avg_fn(decay)
        self._applied = False  # the modules hold the averages, and this the parameters
        self.take_over(modules)

    def take_over(self, modules: nn.Module) -> None:
        """Average the trainable parameters that `modules` have now, from their present values on.

        For modules whose parameters were replaced by others, as sharding does.
        """
        named = {name: p for name, p in modules.named_parameters() if p.requires_grad}
        self._names = [self._saved_name(name) for name in named]
        self._parameters = list(named.values())
        self._averages = [parameter.detach().clone() for parameter in self._parameters]

    @torch.no_grad()
    def restart(self) -> None:
        """Restart the average from the current parameters."""
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.copy_(parameter)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the parameters once."""
        if self._averages:
            # Of sharded ones this process's parts: the rule takes each number alone.
            self._move([*map(local, self._averages)], [*map(local, self._parameters)], None)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside this context, the modules hold the averaged parameters."""
        assert not self._applied
        self._swap()
        self._applied = True
        try:
            yield
        finally:
            self._applied = False
            self._swap()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside this context, the modules hold the trained parameters, even if the averages are applied."""
        if not self._applied:
            yield
            return
        self._swap()
        self._applied = False
        try:
            yield
        finally:
            self._swap()
            self._applied = True

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, average in zip(self._parameters, self._averages, strict=True):
            trained = parameter.clone()
            parameter.copy_(average)
            average.copy_(trained)

    def state_dict(self) -> dict[str, Any]:
        """The averages by parameter name."""
        return dict(zip(self._names, self._averages, strict=True))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore averages that `state_dict` returned for the same modules."""
        with torch.no_grad():
            for name, average in zip(self._names, self._averages, strict=True):
                average.copy_(state[name])


class NoAverage:
    """Stands where `ema_decay` is not set: evaluation uses the weights that train."""

    def take_over(self, modules: nn.Module) -> None:
        """Nothing is averaged."""

    def restart(self) -> None:
        """Nothing is averaged."""

    def update(self) -> None:
        """Nothing is averaged."""

    def applied(self) -> AbstractContextManager[None]:
        """Inside this context, the modules hold the trained parameters."""
        return nullcontext()

    def set_aside(self) -> AbstractContextManager[None]:
        """Inside this context, the modules hold the trained parameters."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """No averages."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state: there are no averages."""
