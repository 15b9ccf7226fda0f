"""Save and restore anything with a `state_dict`; keep the best and the newest."""

from amp_recipes.checkpoint.checkpointer import Checkpoint, Checkpointer
from amp_recipes.checkpoint.epoch_counter import EpochCounter
from amp_recipes.checkpoint.keeper import CheckpointKeeper

__all__ = ["Checkpoint", "CheckpointKeeper", "Checkpointer", "EpochCounter"]
