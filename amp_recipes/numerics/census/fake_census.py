"""Takes the census of a step without data and without memory: on fake tensors, which know shapes and dtypes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from amp_recipes.errors import PrecisionError
from amp_recipes.numerics.census.census import census_of
from amp_recipes.numerics.census.rows import Census
from amp_recipes.numerics.census.watch import CensusWatch
from amp_recipes.numerics.ops.findings import autocast_without_device
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.precision import TorchAutocast, map_tensors


def fake_census(
    model: nn.Module,
    objective: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
    backward: bool = True,
) -> Census:
    """The census of `objective(model, batch)` under autocast to `dtype`, and of its backward, computing nothing.

    device: whose autocast policy holds, also where this machine has no such device (default: the model's). Model and
    batch are copied, and stay as they are; no random number is drawn. Its `neutral` is None: there is no run to compare
    with. Dtypes are those of torch's descriptions of its ops, which are wrong for the statistics that a norm of bf16
    keeps (float32). For a device that is not there, autocast's cache holds no weights: one used twice is cast twice.
    Raises PrecisionError where the step looks at values, and for a backward on a device that is not there: torch would
    end the process.
    """
    own = next((it.device for it in (*model.parameters(), *model.buffers())), torch.device("cpu"))
    target = own if device is None else torch.device(device)
    is_there = target.type in ("cpu", "meta") or (
        torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == target.type
    )
    if backward and not is_there:
        raise PrecisionError(
            f"fake_census: this machine has no {target.type} device, and torch's autograd ends the process there. "
            "Use backward=False for the census of the forward"
        )
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # what the objective holds besides
    with FakeCopyMode(mode):
        fake_model = copy.deepcopy(model)
    fake_batch = map_tensors(mode.from_tensor, batch)
    if target != own:
        with mode:
            _move(fake_model, target, is_there)
            fake_batch = map_tensors(lambda tensor: _like(tensor, target), fake_batch)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    watch = CensusWatch(fake_model, expects_autocast=dtype is not torch.float32)
    try:
        if backward:
            plain_trial(fake_model, objective).run([fake_batch], dtype, watch=[mode, watch])
        else:
            context = TorchAutocast(target.type, dtype=dtype) if is_there else _forced_autocast(target.type, dtype)
            with mode, watch, torch.no_grad(), context:
                objective(fake_model, fake_batch)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as cause:
        raise PrecisionError(
            f"fake_census: the step asks for values, which fake tensors lack ({cause}). take_census runs it with data"
        ) from cause
    census = census_of(watch, fake_model, dtype, target.type, None)
    census.frozen_recasts = [it for it in census.frozen_recasts if it.weight not in trained]
    census.neutrality_note = "Taken on fake tensors: nothing was computed, so there is no run to compare with."
    return census


def _move(model: nn.Module, device: torch.device, is_there: bool) -> None:
    """Put other fake tensors in place of the model's, on `device`; what is shared stays shared.

    Where there is no such device none of them requires a gradient: autograd would look for the device.
    """
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    new = _like(tensor, device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(new, tensor.requires_grad and is_there) if is_parameter else new
                held[name] = moved[id(tensor)]


def _like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # Not `.to`: a build without this device has no kernel that copies to it.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _forced_autocast(device_type: str, dtype: torch.dtype) -> AbstractContextManager:
    """What torch.autocast does; it refuses a device that is not there."""
    return nullcontext() if dtype is torch.float32 else autocast_without_device(device_type, dtype, enabled=True)
