"""Modules of which every process holds a part, gathered when they compute (FSDP2)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn


def shard(
    modules: nn.ModuleDict,
    device: torch.device,
    options: Any,
    compute_dtype: torch.dtype = torch.float32,
    fp32_modules: Collection[str] = (),
) -> None:
    """Shard the parameters of `modules` over the processes, in place."""
