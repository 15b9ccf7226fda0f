"""Makes the optimizer, which decays only matrices, and the learning rate schedule."""

import math
from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


def adamw(parameters: Iterable[nn.Parameter], lr: float, betas: tuple[float, float], weight_decay: float) -> AdamW:
    """Return AdamW over two groups: matrices (embeddings, too) decay, vectors (scales of norms) do not."""
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [it for it in parameters if it.ndim >= 2], "weight_decay": weight_decay},
        {"params": [it for it in parameters if it.ndim < 2], "weight_decay": 0.0},
    ]
    # One kernel for all parameters; in fp16 the host does not wait for it.
    return AdamW([group for group in groups if group["params"]], lr=lr, betas=tuple(betas), fused=True)


def warmup_cosine(optimizer: AdamW, total_updates: int, warmup_updates: int, final_ratio: float) -> LambdaLR:
    """Return a schedule by updates: the rate rises linearly, then falls by half a cosine wave to final_ratio of it.

    total_updates: of the whole run; where the YAML does not give it, the framework does.
    """
    return LambdaLR(optimizer, partial(rate_factor, total_updates, warmup_updates, final_ratio))


def rate_factor(total_updates: int, warmup_updates: int, final_ratio: float, taken: int) -> float:
    """Return the share of the full rate for the update after `taken` updates; after the last it stays constant."""
    if taken < warmup_updates:
        return (taken + 1) / warmup_updates
    done = min(1.0, (taken - warmup_updates) / max(1, total_updates - warmup_updates))
    return final_ratio + (1 - final_ratio) * (1 + math.cos(math.pi * done)) / 2
