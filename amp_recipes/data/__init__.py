"""Makes loaders and samplers that are reproducible and can be resumed, and moves batches to the device."""

from amp_recipes.data.batches import as_batches, as_epochs, length, windows
from amp_recipes.data.buckets import DynamicBatches, LengthBuckets
from amp_recipes.data.engine import LoadingStopped
from amp_recipes.data.epoch_loader import EpochLoader
from amp_recipes.data.loader_faults import loader_faults
from amp_recipes.data.loaders import close_loader, make_loader, reads_all, set_epoch
from amp_recipes.data.moving import batch_length, to_device
from amp_recipes.data.place import (
    batches_from,
    begin_again,
    beginning,
    can_begin_again,
    generator_states,
    loader_state,
    replay_reason,
    set_generator_states,
)
from amp_recipes.data.sample_names import SampleName, sample_names
from amp_recipes.data.samplers import EpochShuffle

__all__ = [
    "DynamicBatches",
    "EpochLoader",
    "EpochShuffle",
    "LengthBuckets",
    "LoadingStopped",
    "SampleName",
    "as_batches",
    "as_epochs",
    "batch_length",
    "batches_from",
    "begin_again",
    "beginning",
    "can_begin_again",
    "close_loader",
    "generator_states",
    "length",
    "loader_faults",
    "loader_state",
    "make_loader",
    "reads_all",
    "replay_reason",
    "sample_names",
    "set_epoch",
    "set_generator_states",
    "to_device",
    "windows",
]
