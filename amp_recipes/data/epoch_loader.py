"""Loads a dataset in an order that depends only on (seed, epoch), and resumes inside an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from amp_recipes.data.buckets import EpochBatches
from amp_recipes.data.engine import Engine, EnginePass, Engines, options_of_workers, poll_seconds
from amp_recipes.data.loader_faults import Iteration, read_fault
from amp_recipes.data.order import EpochOrder, RecentIndices, Task
from amp_recipes.data.reading import Failure, Reader, collate_as_it_is
from amp_recipes.data.sample_draws import held_generators
from amp_recipes.data.samplers import EpochShuffle, epoch_seed, samplers_of, shares_itself
from amp_recipes.data.workers import TIMEOUT_SECONDS, Workers, start_worker
from amp_recipes.errors import DataError
from amp_recipes.state.randomness import set_generator_state, states_of


class EpochLoader(DataLoader):
    """A DataLoader over a map-style dataset that can resume inside an epoch, with any number of processes.

    The order is the sampler's, shared among the ranks; the draws inside the dataset are functions of (seed, epoch,
    index); the global generators stay where they are. `dataset`, `sampler`, `batch_sampler` and `batch_size` are as in
    any DataLoader, of all ranks together; `len` and the batches are this rank's.

    A sampler of the user's runs on generators of its own, which are functions of (seed, epoch); one that has `rank` or
    `num_replicas`, as torch's DistributedSampler, shares its samples out itself.

    stop: may be set before an iteration: asked about once a second while a batch of workers is waited for; if it
    returns true, LoadingStopped is raised; iterating on waits again. Not asked where there are persistent_workers.
    """

    stop: Callable[[], bool] | None = None

    def __init__(
        self, dataset: Any, *, seed: int, name: str = "Data set", rank: int = 0, world_size: int = 1, **kwargs: Any
    ) -> None:
        if kwargs.get("num_workers"):
            kwargs.setdefault("timeout", TIMEOUT_SECONDS)
        super().__init__(dataset, **kwargs)
        self.seed, self.name, self.epoch = seed, name, 0
        self.rank, self.world_size = rank, world_size
        self._position = _Position()
        self._resumed: _Position | None = None  # where the next iteration begins; None: at the epoch's first sample
        self._engines = Engines()
        self._pass: _Pass | None = None

    # ------------------------------------------------------------------ the place

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of that epoch, from its beginning unless it is the one of `load_state_dict`."""
        if epoch != self.epoch:
            self._resumed, self._position = None, _Position()
        self.epoch = epoch
        for sampler in (self.sampler, self.batch_sampler):
            if isinstance(sampler, (EpochShuffle, EpochBatches)):
                sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """The place: `epoch`, and `samples`: how many of it, of all ranks, are in the batches handed out.

        Also `batches` where a batch sampler makes them, and `generators` where samplers have some of their own.
        """
        position = self._position
        state = {"epoch": self.epoch, "samples": position.samples}
        if self._own_batches:
            state["batches"] = position.batches * self.world_size
        if generators := self._generators():
            state["generators"] = position.generators or states_of(generators)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration of that epoch begins after those samples, without reading them."""
        if not isinstance(state, Mapping) or not {"epoch", "samples"} <= state.keys():
            raise DataError(f"{self.name}: a saved position needs 'epoch' and 'samples', but is {state!r:.200}")
        generators = self._generators()
        for name, saved in state.get("generators", {}).items():
            if name not in generators:
                raise DataError(f"{self.name}: the saved position has a generator {name}, which these samplers lack")
            set_generator_state(generators[name], saved)
        self.set_epoch(state["epoch"])
        samples = state["samples"]
        batches = state["batches"] if "batches" in state else samples / (self.batch_size or 1)
        self._resumed = self._position = _Position(samples, -int(-batches // self.world_size))

    @property
    def batches_done(self) -> int:
        """The number of batches of this rank before the present position in the epoch."""
        return self._position.batches

    def indices_of(self, batch: int) -> list[Any] | None:
        """The indices in the dataset of a batch of this rank, by its number in the epoch; None if they are not known.

        If the user's sampler makes the order, only the latest batches are known.
        """
        begun = self._pass
        if begun is None or batch < begun.batches or not (self._own_batches or self.batch_size):
            return None
        if begun.recent is not None:
            found = begun.recent.of(batch)
        else:
            found = begun.order.indices(begun.samples, batch - begun.batches)
        return None if found is None else list(found)

    # ------------------------------------------------------------------ iterating

    def __len__(self) -> int:
        if self.already_shared:
            return super().__len__()
        if self._own_batches:
            return -(-len(self.batch_sampler) // self.world_size)
        step = (self.batch_size or 1) * self.world_size
        samples = len(self.sampler)
        return samples // step if self.drop_last else -(-samples // step)

    def __iter__(self) -> Iterator[Any]:
        start, self._resumed = self._resumed or _Position(), None
        start.generators = states_of(self._generators())
        self._position = replace(start)
        engine = self._engines.take(self._engine)
        engine.loader.generator.manual_seed(epoch_seed(self.seed, self.epoch, "workers"))
        if self.generator is not None:
            # torch takes the seed of its workers from it, before the sampler takes the order. Taken here, in every
            # epoch, so that the order is torch's and yet the same with workers, without, and with persistent ones.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
        iteration = Iteration(self.name, self.dataset, engine.workers)
        done: dict[int, int] = {}
        order = self._order()
        engine.loader.sampler.iterator = order.tasks(start.samples, iteration.in_flight, done)
        listed_again = order.is_fixed and (self.in_order or not self.num_workers)
        recent = None if listed_again else RecentIndices(start.batches)
        self._pass = _Pass(order, start.samples, start.batches, recent)
        protect = not self.num_workers and engine.loader.dataset.draws
        batches = self._engines.begin(self, engine, iteration, protect)
        return _EpochIterator(self, batches, self._position, iteration, done, recent)

    def close(self) -> None:
        """End all workers now, and the passes that use them; the next iteration starts new ones."""
        self._engines.close()

    @property
    def _own_batches(self) -> bool:
        """Whether a batch sampler of the user's makes the batches."""
        return self.batch_size is None and self.batch_sampler is not None

    @property
    def already_shared(self) -> bool:
        """Whether the sampler gives each rank its own samples."""
        return shares_itself(self)

    def _generators(self) -> dict[str, Any]:
        found = held_generators(*samplers_of(self))
        if self.generator is not None and not any(self.generator is held for held in found.values()):
            found["generator"] = self.generator
        return found

    def _order(self) -> EpochOrder:
        return EpochOrder(
            source=self.batch_sampler if self._own_batches else self.sampler,
            own_batches=self._own_batches,
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            rank=self.rank,
            world_size=self.world_size,
            already_shared=self.already_shared,
            seed=self.seed,
            epoch=self.epoch,
        )

    def _engine(self) -> Engine:
        """torch's loader, which reads whole batches through our reader."""
        workers = Workers(self.num_workers)
        reader = Reader(self.dataset, self.batch_sampler is not None, self.collate_fn, self.seed, workers)
        engine = DataLoader(
            reader,
            batch_size=None,
            sampler=_Tasks(),
            collate_fn=collate_as_it_is,
            timeout=poll_seconds(self.timeout, self.stop, self.persistent_workers),
            worker_init_fn=partial(start_worker, workers, self.worker_init_fn),
            generator=torch.Generator(),
            **options_of_workers(self),
        )
        return Engine(engine, workers)


@dataclass
class _Position:
    """A place in the epoch: samples of all ranks and batches of this one that lie before it.

    generators: the states of the samplers' generators at the epoch's beginning; None where they are what they are now.
    """

    samples: int = 0
    batches: int = 0
    generators: dict[str, Any] | None = None


class _Pass(NamedTuple):
    """The order of the latest pass, from the place on where it began: after so many samples and batches."""

    order: EpochOrder
    samples: int
    batches: int
    recent: RecentIndices | None


class _Tasks:
    """The sampler of torch's loader: gives what `iterator` holds when an iteration begins."""

    iterator: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.iterator


class _EpochIterator:
    """The batches of one pass, as `EpochLoader` hands them out."""

    def __init__(
        self,
        loader: EpochLoader,
        batches: EnginePass,
        position: _Position,
        iteration: Iteration,
        done: dict,
        recent: RecentIndices | None,
    ) -> None:
        self._loader, self._batches, self._recent = loader, batches, recent
        self._position, self._iteration, self._done = position, iteration, done
        self._failed: int | None = None  # the number of a batch with a sample that could not be read

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        if self._failed is not None:  # the user continues after a bad batch
            self._hand_out(self._failed)
            self._failed = None
        try:
            number, batch = next(self._batches)
        except StopIteration:
            self._position.generators = None
            raise
        if isinstance(batch, Failure):
            self._failed = number
            fault = read_fault(batch, self._iteration.name)
            # Not in the traceback: whoever keeps the error would keep the workers, and where it is part of a cycle,
            # the garbage collector removes their queues before they are asked to end (they then take 5 s).
            del self
            raise fault
        self._hand_out(number)
        return batch

    def _hand_out(self, number: int) -> None:
        task = self._iteration.in_flight.pop(number)
        if self._recent is not None:
            self._recent.add(task.indices)
        self._position.samples = self._done.pop(number)
        self._position.batches += 1
