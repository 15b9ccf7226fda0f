"""Takes the census of a step on fake tensors, which know shapes and dtypes alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from amp_recipes.numerics.census.census import census_of
from amp_recipes.numerics.census.rows import Census
from amp_recipes.numerics.census.watch import CensusWatch
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.precision import map_tensors


def fake_census(
    model: nn.Module, objective: Callable[[nn.Module, Any], torch.Tensor], batch: Any, dtype: torch.dtype
) -> Census:
    """The census of `objective(model, batch)` under autocast to `dtype`, and of its backward, computing nothing.

    Dtypes are those of torch's descriptions of its ops, which are wrong for the statistics that a norm of bf16 keeps
    (float32).
    """
    device_type = next((tensor.device.type for tensor in model.parameters()), "cpu")
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # what the objective holds besides
    with FakeCopyMode(mode):
        fake_model = copy.deepcopy(model)
    fake_batch = map_tensors(mode.from_tensor, batch)
    watch = CensusWatch(fake_model, expects_autocast=dtype is not torch.float32)
    plain_trial(fake_model, objective).run([fake_batch], dtype, watch=[mode, watch])
    return census_of(watch, fake_model, dtype, device_type, None)
