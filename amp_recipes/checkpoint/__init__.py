"""Saves and restores anything with a `state_dict`; keeps the best and the newest."""

from typing import TYPE_CHECKING

from amp_recipes.files.lazy_names import lazy_names

if TYPE_CHECKING:
    from amp_recipes.checkpoint.best import best_checkpoint, load_weights, model_weights
    from amp_recipes.checkpoint.checkpointer import Checkpointer
    from amp_recipes.checkpoint.epoch_counter import EpochCounter
    from amp_recipes.checkpoint.folder import Checkpoint, fit_of
    from amp_recipes.checkpoint.going_back import find_newest, make_newest
    from amp_recipes.checkpoint.names import clean_name, clean_names
    from amp_recipes.checkpoint.policy import CheckpointPolicy
    from amp_recipes.checkpoint.speechbrain import HookedModules, hooked_state
    from amp_recipes.checkpoint.state_format import plain_problem

__all__ = [
    "Checkpoint",
    "CheckpointPolicy",
    "Checkpointer",
    "EpochCounter",
    "HookedModules",
    "best_checkpoint",
    "clean_name",
    "clean_names",
    "find_newest",
    "fit_of",
    "hooked_state",
    "load_weights",
    "make_newest",
    "model_weights",
    "plain_problem",
]
__getattr__, __dir__ = lazy_names(__name__)
