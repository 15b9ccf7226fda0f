"""Puts a model, its optimizers and the random generators back as they were, so that a step can be tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_recipes.randomness import random_state, set_random_state


@contextmanager
def preserved(
    modules: nn.Module, optimizers: Iterable[Optimizer], device: torch.device, weights: bool = False
) -> Iterator[None]:
    """Within it, gradients begin as None; afterwards everything is bit for bit as it was, in the same objects.

    Kept: buffers, gradients, whether modules train, and the global random generators. weights: also the parameters
    and the optimizers' state, copied to host memory: their size is needed there.
    """
    optimizers = list(optimizers)
    parameters = _parameters(modules, optimizers)
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    modes = [(module, module.training) for module in modules.modules()]
    buffers = [_Buffers(module) for module in modules.modules() if module._buffers]
    random = random_state(device)
    values = [(parameter, _copy(parameter)) for parameter in parameters] if weights else []
    states = [_OptimizerState(optimizer) for optimizer in optimizers] if weights else []
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, value in values:
            parameter.data.copy_(value)  # .data: a graph that saved the parameter may still be differentiated
        for state in states:
            state.put_back()
        for kept in buffers:
            kept.put_back()
        for module, training in modes:
            module.training = training
        for parameter, gradient in gradients:
            parameter.grad = gradient
        set_random_state(random)


def _parameters(modules: nn.Module, optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Each once: those of the modules, and what optimizers hold beside them."""
    held = (it for optimizer in optimizers for group in optimizer.param_groups for it in group["params"])
    return list({id(it): it for it in (*modules.parameters(), *held)}.values())


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory."""
    return tensor.detach().to("cpu", copy=True)


class _Buffers:
    """The buffers of one module: the objects and their values."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._kept = {
            key: (buffer, None if buffer is None or buffer.is_meta else buffer.detach().clone())
            for key, buffer in module._buffers.items()
        }

    def put_back(self) -> None:
        for key in self._module._buffers.keys() - self._kept.keys():
            del self._module._buffers[key]
        for key, (buffer, value) in self._kept.items():
            self._module._buffers[key] = buffer
            if value is not None:
                if buffer.shape != value.shape:  # a cache that grew in place
                    buffer.data = value
                elif value.layout is not torch.strided or all(value.stride()) or value.numel() <= 1:
                    buffer.data.copy_(value)


class _OptimizerState:
    """The state and the settings of one optimizer: the objects and their values."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {
            parameter: {name: (value, _value(value)) for name, value in state.items()}
            for parameter, state in optimizer.state.items()
            if isinstance(state, Mapping)
        }
        self._groups = [
            {name: (value, _value(value)) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        self._optimizer.state.clear()
        for parameter, state in self._state.items():
            self._optimizer.state[parameter] = {name: _restored(*kept) for name, kept in state.items()}
        for group, kept_group in zip(self._optimizer.param_groups, self._groups, strict=True):
            for name, kept in kept_group.items():
                group[name] = _restored(*kept)


def _value(value: Any) -> Any:
    return _copy(value) if isinstance(value, torch.Tensor) else value


def _restored(object_: Any, value: Any) -> Any:
    if isinstance(object_, torch.Tensor):
        object_.data.copy_(value)
        return object_
    return value
