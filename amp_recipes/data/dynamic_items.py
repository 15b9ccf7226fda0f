"""Supports SpeechBrain's datasets and loaders, if they have been imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, Subset

# The number of batches that a SaveableDataLoader skips; seen in SpeechBrain 1.1, which has no public name for it.
_SKIP_TO = "_speechbrain_recovery_skip_to"


def usual_collate_fn(dataset: Any) -> Callable[[list[Any]], Any] | None:
    """`PaddedBatch` for a DynamicItemDataset or a Subset of one: its samples are dicts of any lengths; else None."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    theirs = sys.modules.get("speechbrain.dataio.dataset")
    if theirs is None or not isinstance(dataset, theirs.DynamicItemDataset):
        return None
    from speechbrain.dataio.batch import PaddedBatch

    return PaddedBatch


def forget_skipping(loader: DataLoader) -> None:
    """Have a SaveableDataLoader begin at the epoch's first batch: whoever calls skips those that are done himself."""
    if getattr(loader, _SKIP_TO, None) is not None:
        setattr(loader, _SKIP_TO, None)


def is_plain_loader(loader: Any) -> bool:
    """Whether `loader` orders and reads as torch's DataLoader does; SpeechBrain's saveable one does."""
    theirs = sys.modules.get("speechbrain.dataio.dataloader")
    return type(loader) is DataLoader or (theirs is not None and type(loader) is theirs.SaveableDataLoader)
