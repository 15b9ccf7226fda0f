"""Makes an earlier checkpoint the newest again, for a run that has gone wrong since."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from amp_recipes.checkpoint.checkpointer import Checkpointer
from amp_recipes.checkpoint.folder import Checkpoint
from amp_recipes.errors import CheckpointError

logger = logging.getLogger(__name__)


def find_newest(
    checkpointer: Checkpointer, name: str, is_good: Callable[[Checkpoint, Any], bool]
) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest checkpoint that is whole and good, with the states in it; None if there is none.

    is_good: is asked with the checkpoint and its state of the recoverable `name`. Damaged ones, and those without that
    state, are warned about and left out.
    """
    for checkpoint in checkpointer.list_checkpoints():
        try:
            if is_good(checkpoint, checkpointer.read(checkpoint, [name])[name]):
                return checkpoint, checkpointer.read(checkpoint)
        except CheckpointError as error:
            logger.warning("not a checkpoint to go back to: %s", error)
    return None


def make_newest(checkpointer: Checkpointer, checkpoint: Checkpoint, states: Mapping[str, Any]) -> Checkpoint:
    """Write `states`, those of `checkpoint` but for what is to be otherwise from now on, as the newest checkpoint.

    What was saved after `checkpoint` is deleted once that is on the disk: a kill at any moment leaves a checkpoint that
    a resume can take. Raises CheckpointError if it cannot be written; all is then as it was.
    """
    later = [it for it in checkpointer.list_checkpoints() if it.number > checkpoint.number]
    holders = {name: _Holder(state) for name, state in states.items()}
    copy = Checkpointer(checkpointer.checkpoints_dir, holders).save_checkpoint(checkpoint.meta)
    for left in later:
        checkpointer.delete_checkpoint(left)
        logger.warning("deleted %s: the run goes back to before it", left.path)
    return copy


class _Holder:
    """A state as a recoverable."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state
