"""Drops activations in the forward, and computes them again in the backward (activation checkpointing)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from amp_recipes.distributed.torch_private import recompute_composably
from amp_recipes.errors import ConfigError
from amp_recipes.modules.blocks import chosen_blocks, repeated_blocks
from amp_recipes.modules.names import check_patterns

BLOCKS = "blocks"
# Statistics are small; tables (masks, rotary angles) are large, and do not change.
_SMALL_BYTES = 64 * 1024


def recompute(modules: nn.ModuleDict, patterns: Sequence[str]) -> None:
    """Make the modules that `patterns` name keep only their inputs; where they do already, nothing changes.

    patterns: as those of `fp32_modules`, or the word "blocks" for the repeated blocks. torch's composable checkpoint:
    names, classes, pins and autocast stay as they are, random numbers are drawn again as they were, and buffers
    (BatchNorm statistics) are as one forward leaves them.
    Raises ConfigError for a pattern that matches nothing, and for "blocks" where the model repeats none.
    """
    for module in chosen(modules, patterns):
        recompute_composably(module, lambda module=module: (nullcontext(), _buffers_kept(module)))


def chosen(modules: nn.ModuleDict, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules that `patterns` name. Raises as `recompute` does."""
    option = "activation_checkpointing"
    check_patterns(option, patterns)
    found = chosen_blocks(option, modules, [pattern for pattern in patterns if pattern != BLOCKS])
    if BLOCKS in patterns:
        blocks = [block for entry in modules.values() for block in repeated_blocks(entry)]
        if not blocks:
            raise ConfigError(
                f"{option}: the model has no repeated {BLOCKS} (several children of one class in a ModuleList or "
                "Sequential). Name the modules to recompute, as in ['*.layer1', 'type:Bottleneck']."
            )
        found += [block for block in blocks if block not in found]
    return found


def _buffers_kept(module: nn.Module) -> AbstractContextManager[None]:
    return _put_back([buffer for buffer in module.buffers() if buffer.nbytes <= _SMALL_BYTES])


@contextmanager
def _put_back(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)
