"""Lists the batches of one pass over an epoch, for one process: which indices, from which place on."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import SequentialSampler

from amp_recipes.data.buckets import EpochBatches
from amp_recipes.data.sample_draws import DrawStream, SampleSeeds
from amp_recipes.data.samplers import EpochShuffle, rank_batches, rank_groups

_REMEMBERED = 64  # batches, more than a window has, whose result comes one window later
_QUIET = (EpochShuffle, SequentialSampler, list, tuple, range)  # samplers that draw nothing from global generators


class Task(NamedTuple):
    """One batch to read: its number in this pass, its epoch, its indices (without batching: one index)."""

    number: int
    epoch: int
    indices: Any


class RecentIndices:
    """The indices of the latest batches that were read.

    first: the number of the first batch in the epoch; ahead: how many are read before they are handed out.
    """

    def __init__(self, first: int, ahead: int = 0) -> None:
        self._next = first
        self._latest: deque[Any] = deque(maxlen=_REMEMBERED + ahead)

    def add(self, indices: Any) -> None:
        """Remember the indices of the next batch."""
        self._latest.append(indices)
        self._next += 1

    def of(self, number: int) -> Any:
        """Return the indices of a batch, by its number in the epoch; None if they are not remembered."""
        place = number - (self._next - len(self._latest))
        return self._latest[place] if 0 <= place < len(self._latest) else None


@dataclass(frozen=True)
class EpochOrder:
    """The order of the samples of a pass. It holds no loader, so that it keeps none (and no worker) alive.

    source: a sampler, or a batch sampler if `own_batches`; rank, world_size: as `rank_batches` takes them;
    already_shared: the source gives each rank its own samples.
    """

    source: Any
    own_batches: bool
    batch_size: int | None
    drop_last: bool
    rank: int
    world_size: int
    already_shared: bool
    seed: int
    epoch: int

    @property
    def is_fixed(self) -> bool:
        """Whether it can be listed again at any time, without calling anything of the user's."""
        return isinstance(self.source, EpochBatches) or type(self.source) in _QUIET

    def indices(self, start: int, number: int) -> Any:
        """The indices of batch `number` after the first `start` samples of all ranks; None if there are not so many."""
        found = next(islice(self._batches(start), number, None), None)
        return None if found is None else found[0]

    def tasks(self, start: int, in_flight: dict[int, Task], done: dict[int, int]) -> Iterator[Task]:
        """The batches after the first `start` samples of all ranks.

        Each is added to `in_flight`; `done` gets the number of samples of all ranks that are read after it.
        """
        batched = self.own_batches or self.batch_size is not None
        for number, (indices, samples) in enumerate(self._batches(start)):
            task = Task(number, self.epoch, indices if batched else indices[0])
            in_flight[number], done[number] = task, samples
            yield task

    def _batches(self, start: int) -> Iterator[tuple[Any, int]]:
        # The user's samplers draw from the global generators, which are the model's: here they get their own.
        draws = nullcontext() if self.is_fixed else DrawStream(SampleSeeds(self.seed, self.epoch), "sampler")
        scale = self.world_size if self.already_shared else 1
        batches = self._shared(start // scale)
        while True:
            with draws:
                batch = next(batches, None)
            if batch is None:
                return
            yield batch[0], batch[1] * scale

    def _shared(self, start: int) -> Iterator[tuple[Any, int]]:
        rank, world_size = (0, 1) if self.already_shared else (self.rank, self.world_size)
        source = self.source
        if self.own_batches:
            return rank_groups(source, start, rank, world_size)
        if type(source) is EpochShuffle:
            source = source.order()
        elif type(source) is SequentialSampler:
            source = range(len(source))
        return rank_batches(source, start, self.batch_size or 1, self.drop_last, rank, world_size)
