"""Rejects optimizers that cannot train safely, before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from amp_recipes.errors import PrecisionError, RecipeError, listed
from amp_recipes.modules.sharded import is_sharded
from amp_recipes.precision.amp_config import fp16_parameters


def check_optimizers(
    optimizers: Mapping[str, Optimizer], modules: nn.Module, scaled: bool, several_processes: bool = False
) -> None:
    """Raise PrecisionError for what cannot be trained safely, before the first step.

    scaled: losses are scaled (fp16), which needs parameters in fp32. several_processes: gradients are averaged over
    them, and only those of `modules`; others are a RecipeError.
    """
    names = {id(parameter): name for name, parameter in modules.named_parameters()}
    sharded = any(map(is_sharded, modules.parameters()))
    owner: dict[int, str] = {}
    for key, optimizer in optimizers.items():
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PrecisionError(
                f"optimizer '{key}' is LBFGS, which computes the loss several times inside one step. A step here may "
                "be skipped, clipped and scaled, so it computes the loss only once. Use a first-order optimizer such "
                "as AdamW or SGD."
            )
        parameters = list(parameters_of_optimizer(optimizer))
        named = [(names.get(id(p), f"parameter {index}"), p) for index, p in enumerate(parameters)]
        _refuse_strangers(
            key, [parameter for parameter in parameters if id(parameter) not in names], sharded, several_processes
        )
        _refuse_owned(key, named, owner)
        if scaled:
            _refuse_fp16(key, fp16_parameters(named))


def parameters_of_optimizer(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """All that it trains, in the order of its groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def parameters_with_gradient(optimizer: Optimizer) -> list[nn.Parameter]:
    """All that it trains and that have a gradient now, in the order of its groups."""
    return [
        parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
    ]


def _refuse_owned(key: str, named: Sequence[tuple[str, nn.Parameter]], owner: dict[int, str]) -> None:
    """Raise PrecisionError for parameters that another optimizer has; owner: optimizers by the parameter's id."""
    for name, parameter in named:
        if owner.setdefault(id(parameter), key) != key:
            raise PrecisionError(
                f"parameter {name} belongs to two optimizers, '{owner[id(parameter)]}' and '{key}', so its gradient "
                "would be unscaled and clipped twice. Give it to only one of them."
            )


def _refuse_strangers(key: str, strangers: Sequence[torch.Tensor], sharded: bool, several_processes: bool) -> None:
    """Raise RecipeError where parameters that are not in the modules would train by themselves, or not at all."""
    if sharded and strangers:
        raise RecipeError(
            f"optimizer '{key}' holds parameters from before the modules were sharded (strategy fsdp), which are no "
            "longer trained. Create optimizers in init_optimizers, or give opt_class."
        )
    if several_processes and strangers:
        raise RecipeError(
            f"optimizer '{key}' trains {len(strangers)} parameters that are not in the Brain's modules (the first "
            f"has shape {tuple(strangers[0].shape)}), so their gradients would not be averaged over the processes. "
            "Add the modules that hold them to `modules`."
        )


def _refuse_fp16(key: str, names: Sequence[str]) -> None:
    if names:
        raise PrecisionError(
            f"optimizer '{key}' holds {len(names)} fp16 parameter(s): {listed(names)}. Precision fp16 keeps the "
            "weights in fp32 and casts them in the forward. Remove the call of .half() on the model, or convert the "
            "model back with .float()."
        )
