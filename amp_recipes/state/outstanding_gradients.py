"""Saves gradients whose update is pending: a recipe may save between a backward and its step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class OutstandingGradients:
    """The `.grad` of all parameters that have one, as a recoverable. The default step leaves none.

    saved_name: from a parameter's name here to its name in a checkpoint; optimizers: returns those in use, whose
    parameters need not be in `modules`.
    """

    def __init__(
        self, modules: nn.Module, optimizers: Callable[[], Mapping[str, Optimizer]], saved_name: Callable[[str], str]
    ) -> None:
        self._modules = modules
        self._optimizers = optimizers
        self._saved_name = saved_name

    def state_dict(self) -> dict[str, Tensor]:
        """The gradients by the parameter's name."""
        return {name: live.grad.detach() for name, live in self._parameters() if live.grad is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give parameters their gradients back; those that had none lose theirs."""
        for name, parameter in self._parameters():
            saved = state.get(name)
            parameter.grad = None if saved is None else saved.to(parameter.device, copy=True)

    def layouts(self) -> dict[str, Tensor]:
        """The parameters by name: a gradient that comes back is shared among processes as its parameter is."""
        return dict(self._parameters())

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for name, parameter in self._modules.named_parameters():
            seen.add(id(parameter))
            yield self._saved_name(name), parameter
        for optimizer_name, optimizer in self._optimizers().items():
            parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
            for index, parameter in enumerate(parameters):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{optimizer_name}[{index}]", parameter
