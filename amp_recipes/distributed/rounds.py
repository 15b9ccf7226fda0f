"""A window of batches that all processes take at the same time, and what they told each other at its beginning."""

from __future__ import annotations

from collections.abc import Sequence

from amp_recipes.distributed import Poll, data_world_size


class Round:
    """One window of this process among those of the others.

    Their numbers are on their way while it computes; the first that asks for them waits. Of processes that share a
    model's layers (tensor parallel), which have the same batches, one counts.

    weights: what each batch of this process counts for; samples: how many they hold; signal: the number of the signal
    that asks this process to end, 0 for none; save_due: whether this process asks for a save.
    """

    def __init__(self, weights: Sequence[float], samples: int, signal: int, save_due: bool) -> None:
        self.weights = weights
        self._poll = Poll([len(weights), sum(weights), samples, signal, save_due])
        self._rows: list[list[float]] | None = None
        self._data_processes = data_world_size()

    @property
    def most_batches(self) -> int:
        """How many batches the process has that has most; 0: the data of all is over."""
        return int(max(row[0] for row in self._heard))

    @property
    def fewest_batches(self) -> int:
        """How many batches the process has that has fewest."""
        return int(min(row[0] for row in self._heard))

    @property
    def batches(self) -> float:
        """Batches of all processes over the number of processes, whose gradients are averaged."""
        return self._of_all(0) / self._data_processes

    @property
    def weight(self) -> float:
        """What the batches of all processes count for, over the number of processes."""
        return self._of_all(1) / self._data_processes

    @property
    def samples(self) -> int:
        """How many samples the batches of all processes hold."""
        return int(self._of_all(2))

    @property
    def signal(self) -> int:
        """The number of a signal that asks any of the processes to end; 0 where there is none."""
        return int(max(row[3] for row in self._heard))

    @property
    def save_due(self) -> bool:
        """Whether any of the processes asks for a save."""
        return any(row[4] for row in self._heard)

    @property
    def _heard(self) -> list[list[float]]:
        if self._rows is None:
            self._rows = self._poll.read()
        return self._rows

    def _of_all(self, column: int) -> float:
        return sum(row[column] for row in self._heard) * self._data_processes / len(self._heard)
