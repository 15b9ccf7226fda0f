"""Shares what the processes have in one window of batches, taken by all of them at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from amp_recipes.distributed.collectives import AsyncGather
from amp_recipes.distributed.processes import data_world_size


class SyncedWindow:
    """One window of this process among those of the others.

    Their numbers travel while it computes; the first that asks for them waits. Of processes that share a model's layers
    (tensor parallel), and so have the same batches, one counts.

    weights: what each batch of this process counts for; samples: how many they hold; weighted: whether batches count
    by these weights, or each the same; signal: the number of the signal that asks this process to end, 0 for none;
    save_due: whether this process asks for a save.
    """

    def __init__(
        self, weights: Sequence[float], samples: int, weighted: bool, signal: int = 0, save_due: bool = False
    ) -> None:
        self.weights = weights
        self._weighted = weighted
        self._gathered = AsyncGather([len(weights), sum(weights), samples, signal, save_due])
        self._rows: list[list[float]] | None = None
        self._data_processes = data_world_size()

    def share(self, index: int) -> tuple[float, float]:
        """What the batch counts for in the windows of all processes, and what these count for together.

        As if one process accumulated the batches of all: over their mean, since gradients are averaged. A batch beyond
        the process's own only keeps up with the others, and counts for nothing.
        """
        is_own = index < len(self.weights)
        if self._weighted:
            return (self.weights[index] if is_own else 0.0), self._of_all(1) / self._data_processes
        return float(is_own), self._of_all(0) / self._data_processes

    @property
    def most_batches(self) -> int:
        """How many batches the process has that has most; 0: the data of all is over."""
        return int(max(row[0] for row in self._received))

    @property
    def fewest_batches(self) -> int:
        """How many batches the process has that has fewest."""
        return int(min(row[0] for row in self._received))

    @property
    def samples(self) -> int:
        """How many samples the batches of all processes hold."""
        return int(self._of_all(2))

    def requests(self) -> tuple[int, bool]:
        """The number of a signal that asks any of the processes to end (0: none), and whether any asks for a save."""
        return int(max(row[3] for row in self._received)), any(row[4] for row in self._received)

    @property
    def _received(self) -> list[list[float]]:
        if self._rows is None:
            self._rows = self._gathered.read()
        return self._rows

    def _of_all(self, column: int) -> float:
        return sum(row[column] for row in self._received) * self._data_processes / len(self._received)
