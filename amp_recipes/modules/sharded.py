"""Recognises tensors that are divided over processes (DTensors), without importing DTensor if there are none.

The import takes 0.6 s, which only runs that shard should pay; if DTensor was not imported, no tensor is one.
"""

from __future__ import annotations

import sys

import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this process may hold a part only."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # absent, too, while it is imported
    return dtensor is not None and isinstance(tensor, dtensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of `tensor`, sharing its memory: the tensor itself where it is not sharded.

    To be called without gradients enabled, or on what needs none.
    """
    return tensor.to_local() if is_sharded(tensor) else tensor
