"""Makes an earlier checkpoint the newest again, for a run that has gone wrong since."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from amp_recipes.checkpoint.checkpointer import Checkpointer, is_current
from amp_recipes.checkpoint.folder import Checkpoint, Damaged, verify_all
from amp_recipes.errors import CheckpointError

logger = logging.getLogger(__name__)


def find_newest(
    checkpointer: Checkpointer, name: str, is_good: Callable[[Checkpoint, Any], bool]
) -> tuple[Checkpoint, dict[str, Any]] | None:
    """The newest checkpoint that is whole and good, with the one state that was asked about; None if there is none.

    is_good: is asked with the checkpoint and its state of the recoverable `name`. Damaged ones, and those without that
    state, are warned about and left out. In several processes the main one calls this, and `make_newest`, alone.
    """
    for checkpoint in checkpointer.list_checkpoints():
        try:
            states = checkpointer.read(checkpoint, [name])
            if is_good(checkpoint, states[name]):
                verify_all(checkpoint.path)
                return checkpoint, states
        except Damaged as error:
            logger.warning(
                "skipping a checkpoint in the search for one to go back to: %s is damaged: %s", checkpoint.path, error
            )
        except CheckpointError as error:
            logger.warning("skipping a checkpoint in the search for one to go back to: %s", error)
    return None


def make_newest(checkpointer: Checkpointer, checkpoint: Checkpoint, states: Mapping[str, Any]) -> Checkpoint:
    """Write `checkpoint`, with `states` in place of those of the same recoverables in it, as the newest checkpoint.

    Its other files get a second name in the new one, or are copied. What was saved after `checkpoint` is deleted once
    the new one is on the disk: a kill at any moment leaves a checkpoint that a resume can take. Raises CheckpointError
    if it cannot be written; all is then as it was.
    """
    later = [each for each in checkpointer.list_checkpoints() if each.number > checkpoint.number]
    if not is_current(checkpoint):  # its files are not as those of a new one
        states = {**checkpointer.read(checkpoint), **states}
    holders = {name: _Holder(state) for name, state in states.items()}
    writer = Checkpointer(checkpointer.checkpoints_dir, holders, alone=True, rest_of=checkpoint)
    copy = writer.save_checkpoint(checkpoint.meta)
    for left in later:
        checkpointer.delete_checkpoint(left)
        logger.warning("deleted %s: it was saved after the checkpoint that the run goes back to", left.path)
    return copy


class _Holder:
    """A state as a recoverable."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state

    def load_state_dict(self, state: Any) -> None:
        self._state = state
