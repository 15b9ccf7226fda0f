"""Counts epochs, and continues after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from amp_recipes.errors import CheckpointError, ConfigError


class EpochCounter:
    """Counts epochs from 1 to `limit`; after a restore it continues with the epoch after the saved one.

    limit: number of epochs; 0: none. It is not part of the state, so a resumed run may raise it.
    `current` is the running epoch (0 before the first). A counter at its limit yields no more epochs.
    Raises ConfigError if limit is not an integer of 0 or more.
    """

    def __init__(self, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 0:
            raise ConfigError(f"EpochCounter: limit is {limit!r}; expected an integer of 0 or more.")
        self.limit = limit
        self.current = 0

    def __iter__(self) -> Iterator[int]:
        while self.current < self.limit:
            self.current += 1
            yield self.current

    def state_dict(self) -> dict[str, int]:
        """Return the running, or last, epoch: `{"current": n}`."""
        return {"current": self.current}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the count: iterating continues with the epoch after `state["current"]`."""
        current = state.get("current")
        if isinstance(current, bool) or not isinstance(current, int) or current < 0:
            raise CheckpointError(f'EpochCounter: the saved state is {state!r}; expected {{"current": n}}.')
        self.current = current
