"""Loaders and samplers that repeat, and batches on their way to the device."""

from amp_recipes.data.batches import as_batches, length, windows
from amp_recipes.data.loaders import make_loader, set_epoch
from amp_recipes.data.moving import batch_length, to_device
from amp_recipes.data.samplers import EpochShuffle

__all__ = [
    "EpochShuffle",
    "as_batches",
    "batch_length",
    "length",
    "make_loader",
    "set_epoch",
    "to_device",
    "windows",
]
