"""Exchanges the sizes of a window between the processes, which all take one window of batches at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from amp_recipes.distributed.collectives import AsyncGather
from amp_recipes.distributed.processes import data_world_size
from amp_recipes.errors import DataError

# Longest delay of a signal, or of the clock of the checkpoints: about so many seconds, and at most so many windows
# (one may come to take longer). A message takes some 0.4 ms of a CPU; a sixteenth of that does not show.
_SECONDS_UNHEARD = 0.5
_MOST_UNHEARD = 16

_BATCHES, _WEIGHT, _SAMPLES, _SIGNAL, _SAVE_DUE, _COVERS = range(6)  # the columns of a message


class _Message:
    """The message of one process to the others about a window, and those that follow.

    Of processes that share a model's layers (tensor parallel), and so have the same batches, one counts.

    signum: the number of the signal that asks this process to end, 0 for none; save_due: whether this process asks for
    a save; covers: for how many windows more this process needs no other message.
    """

    def __init__(self, weights: Sequence[float], samples: int, signum: int, save_due: bool, covers: int) -> None:
        self.batches, self.own_samples = len(weights), samples
        self._gathered = AsyncGather([len(weights), sum(weights), samples, signum, save_due, covers])
        self._rows: list[list[float]] | None = None
        self._data_processes = data_world_size()

    @property
    def rows(self) -> list[list[float]]:
        """A row of each process; waits until all have come."""
        if self._rows is None:
            self._rows = self._gathered.read()
        return self._rows

    def sum(self, column: int) -> float:
        """The sum over the processes."""
        return sum(row[column] for row in self.rows) * self._data_processes / len(self.rows)

    def mean(self, column: int) -> float:
        """The mean over the processes."""
        return self.sum(column) / self._data_processes

    def most(self, column: int) -> float:
        """The greatest of the processes' numbers."""
        return max(row[column] for row in self.rows)

    def least(self, column: int) -> float:
        """The smallest of the processes' numbers."""
        return min(row[column] for row in self.rows)


class SyncedWindow:
    """One window of this process among those of the others.

    Their numbers travel while it computes; the first that asks for them waits.

    weights: what each batch of this process counts for; samples: how many the batches of all processes hold;
    weighted: whether batches count by these weights, or each the same; asked: whether the message is of this window,
    or of one before, and holds for it.
    """

    def __init__(self, weights: Sequence[float], message: _Message, weighted: bool, asked: bool) -> None:
        self.weights = weights
        self._message = message
        self._weighted = weighted
        self._asked = asked

    def share(self, index: int) -> tuple[float, float]:
        """Return the weight of the batch in the windows of all processes, and the weight of all these together.

        As if one process accumulated the batches of all: over their mean, since gradients are averaged. A batch beyond
        the process's own only keeps up with the others, and counts for nothing.
        """
        is_own = index < len(self.weights)
        if self._weighted:
            return (self.weights[index] if is_own else 0.0), self._message.mean(_WEIGHT)
        return float(is_own), self._message.mean(_BATCHES)

    @property
    def most_batches(self) -> int:
        """The largest number of batches of any process; 0: all data is used up."""
        return int(self._message.most(_BATCHES))

    @property
    def fewest_batches(self) -> int:
        """The smallest number of batches of any process."""
        return int(self._message.least(_BATCHES))

    @property
    def samples(self) -> int:
        """The number of samples in the batches of all processes.

        Where this window was not asked about, as many as in the one that was; the next message corrects the sum.
        """
        return int(self._message.sum(_SAMPLES))

    def requests(self) -> tuple[int, bool]:
        """The number of a signal that asks any of the processes to end (0: none), and whether any asks for a save."""
        if not self._asked:
            return 0, False
        return int(self._message.most(_SIGNAL)), bool(self._message.most(_SAVE_DUE))


class SyncedWindows:
    """The windows of one pass over the training set.

    The processes exchange a message for each window, unless its content is known already: if all batches have the same
    weight, and each process certainly has more windows of the same size, one message is valid for the windows of half
    a second, at most 16.

    weighted: see `SyncedWindow`; certain_batches: least number of batches that this process has; per_window: batches
    per window.
    """

    def __init__(self, weighted: bool, certain_batches: int, per_window: int) -> None:
        self._weighted = weighted
        self._alike = 0 if weighted else certain_batches // per_window  # windows to come, of as many batches each
        self._message: _Message | None = None
        self._sent_at = 0.0
        self._since = 0  # windows for which it has been valid, besides its own
        self._samples_untold = 0

    def take(self, weights: Sequence[float], samples: int, requests: Callable[[], tuple[int, bool]]) -> SyncedWindow:
        """The next window; requests: asked for a signal's number and whether a save is due, where these are told.

        Raises DataError for a window with fewer batches than this process was certain of.
        """
        self._alike = max(0, self._alike - 1)
        message = self._message
        if message is not None and self._since < message.least(_COVERS):
            if len(weights) < message.batches:
                raise DataError(
                    "the training set yields fewer batches than its __len__ says, and the other processes rely on "
                    "that number. Let __len__ return the real number of batches, or remove it."
                )
            self._since += 1
            self._samples_untold += samples - message.own_samples
            return SyncedWindow(weights, message, self._weighted, asked=False)
        covers = min(self._alike, self._windows_until_message())
        self._message = _Message(weights, samples + self._samples_untold, *requests(), covers)
        self._since, self._samples_untold = 0, 0
        return SyncedWindow(weights, self._message, self._weighted, asked=True)

    def _windows_until_message(self) -> int:
        """Return the number of windows until the next message, from the duration of those since the last one."""
        before, self._sent_at = self._sent_at, time.monotonic()
        if self._message is None:
            return 0
        seconds = (self._sent_at - before) / (1 + self._since)
        return int(_SECONDS_UNHEARD / max(seconds, _SECONDS_UNHEARD / _MOST_UNHEARD))
