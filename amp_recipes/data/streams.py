"""A loader over an IterableDataset that goes on where it stopped, as far as the data set can tell its place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from amp_recipes.data.loader_faults import Iteration, let_go, read_fault, worker_fault
from amp_recipes.data.reading import Failure, failure_of
from amp_recipes.data.sample_draws import SampleSeeds, draws_put_back
from amp_recipes.data.samplers import epoch_seed
from amp_recipes.data.waiting import LoadingStopped, next_batch, poll_seconds
from amp_recipes.data.workers import TIMEOUT_SECONDS, Workers, deaths_unreported, start_worker
from amp_recipes.errors import DataError


class StreamLoader(DataLoader):
    """A DataLoader over an IterableDataset whose draws are functions of (seed, epoch, worker, number of the sample).

    The place is the data set's own state where it has `state_dict` and `load_state_dict` (with workers this takes
    torchdata's StatefulDataLoader); else the number of batches, which are read again after `load_state_dict`.

    stop: may be set before an iteration: asked about once a second while a batch of workers is waited for; if it says
    yes, LoadingStopped is raised, and iterating on goes on waiting. Not asked where there are persistent_workers.
    """

    stop: Callable[[], bool] | None = None

    def __init__(self, dataset: Any, *, seed: int, name: str = "Data set", **kwargs: Any) -> None:
        if kwargs.get("num_workers"):
            kwargs.setdefault("timeout", TIMEOUT_SECONDS)
        super().__init__(dataset, **kwargs)
        self.seed, self.name, self.epoch = seed, name, 0
        self.batches_done = 0
        self._resumed: Mapping[str, Any] | None = None
        self._running: DataLoader | None = None  # torch's loader of the latest iteration
        self._persistent: tuple[DataLoader, Workers] | None = None
        self._passes: WeakSet[_StreamIterator] = WeakSet()

    @property
    def knows_its_place(self) -> bool:
        """Whether a resume goes on in the middle of the stream without reading its beginning again."""
        return is_stateful(self.dataset) and (self.num_workers == 0 or has_torchdata())

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of that epoch, from its beginning unless it is the one of `load_state_dict`."""
        if epoch != self.epoch:
            self._resumed, self._running, self.batches_done = None, None, 0
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The place: `epoch`, `batches` of this process handed out, and the state of the stream there."""
        if self._resumed is not None:
            return dict(self._resumed)
        state = {"epoch": self.epoch, "batches": self.batches_done, "num_workers": self.num_workers}
        if self.batches_done and self._running is not None:
            if hasattr(self._running, "state_dict"):
                state["stream"] = self._running.state_dict()
            elif self.knows_its_place:
                state["dataset"] = self._running.dataset.place()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration of that epoch goes on from there."""
        if not isinstance(state, Mapping) or not {"epoch", "batches", "num_workers"} <= state.keys():
            raise DataError(f"{self.name}: a stream's position has 'epoch' and 'batches'; got {state!r:.200}")
        if state["batches"] and state["num_workers"] != self.num_workers:
            raise DataError(
                f"{self.name}: the position in this IterableDataset was saved with num_workers={state['num_workers']}, "
                f"but there are {self.num_workers} now, which read other samples. Resume with as many as then."
            )
        if "stream" in state and not has_torchdata():
            raise DataError(
                f"{self.name}: this position needs torchdata, with which it was saved: pip install torchdata"
            )
        self.set_epoch(state["epoch"])
        self._resumed, self.batches_done = state, state["batches"]

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        self.batches_done = 0
        if resumed is not None or (self._persistent is not None and self._persistent[1].dead()):
            self._persistent = None  # where workers are to go on, they start anew with the state
        engine, workers = self._persistent or self._engine()
        if self.persistent_workers:
            self._persistent = engine, workers
        if self.generator is None:
            engine.generator.manual_seed(epoch_seed(self.seed, self.epoch, "workers"))
        if workers is not None:
            workers.epoch = self.epoch
        if isinstance(engine.dataset, _Stream):
            engine.dataset.epoch = self.epoch
        if resumed is not None and "stream" in resumed:
            engine.load_state_dict(resumed["stream"])
        elif resumed is not None and "dataset" in resumed:
            engine.dataset.go_to(resumed["dataset"])
        self._running = engine
        batches = _StreamIterator(self, engine, workers)
        self._passes.add(batches)
        if resumed is not None:
            again = 0 if "stream" in resumed or "dataset" in resumed else resumed["batches"]
            for _ in range(again):
                next(batches, None)
            self.batches_done = resumed["batches"]
        return batches

    def drop_workers(self) -> None:
        """The next iteration starts new workers."""
        self._persistent = None

    def close(self) -> None:
        """End all workers now, and the passes that use them; the next iteration starts new ones."""
        if self._persistent is not None:
            self._persistent[1].close()
        self._persistent = None
        if self.num_workers:
            self._running = None  # torchdata's loader holds on to its latest pass
        for batches in list(self._passes):
            batches.close()

    def __del__(self) -> None:
        if getattr(self, "_persistent", None) is not None:
            self._persistent[1].close()

    def _engine(self) -> tuple[DataLoader, Workers | None]:
        workers = Workers(self.num_workers) if self.num_workers else None
        start = partial(start_worker, workers, self.worker_init_fn) if workers else None
        dataset, collate = self.dataset, self.collate_fn
        if isinstance(dataset, IterDataPipe):  # torch shuffles and shards these itself, if it sees them
            start = self.worker_init_fn
        else:
            stateful = is_stateful(dataset)
            dataset = (_StatefulStream if stateful else _Stream)(dataset, self.seed, workers)
            collate = partial(_collate, collate)
        kind = DataLoader
        if has_torchdata():
            from torchdata.stateful_dataloader import StatefulDataLoader as kind
        options = dict(
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            collate_fn=collate,
            pin_memory=self.pin_memory,
            timeout=self.timeout,
            worker_init_fn=start,
            multiprocessing_context=self.multiprocessing_context,
            generator=self.generator if self.generator is not None else torch.Generator(),
            prefetch_factor=self.prefetch_factor,
            persistent_workers=self.persistent_workers,
            in_order=self.in_order,
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital")  # torchdata 0.11 calls it, torch 2.13 warns
            return kind(dataset, **options), workers


def is_stateful(x: Any) -> bool:
    """Whether `x` can tell its place and take it back."""
    return callable(getattr(x, "state_dict", None)) and callable(getattr(x, "load_state_dict", None))


def has_torchdata() -> bool:
    """Whether torchdata's StatefulDataLoader is installed."""
    return find_spec("torchdata") is not None and find_spec("torchdata.stateful_dataloader") is not None


class _Stream(IterableDataset):
    """The user's data set, seeded before each sample."""

    def __init__(self, dataset: Any, seed: int, workers: Workers | None) -> None:
        self.dataset, self.seed, self.workers = dataset, seed, workers
        self.epoch = 0
        self._told: int | None = None
        self._samples: _Samples | None = None
        self._goes_on: Mapping[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None and self.workers is not None:
            self.epoch = self.workers.epoch
            # A persistent worker has a copy of the data set, which the main process cannot tell.
            if self._told not in (None, self.epoch) and hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.epoch)
            self._told = self.epoch
        seeds = SampleSeeds(self.seed, self.epoch)
        worker = 0 if info is None else info.id
        seeds.set_for(f"worker {worker}")
        iterator = iter(self.dataset)
        stateful = is_stateful(self.dataset) or is_stateful(iterator)
        kind = _StatefulSamples if stateful else _Samples
        self._samples = kind(iterator, seeds, worker, self.workers if info is not None else None, self.dataset)
        if self._goes_on is not None:
            self._samples.load_state_dict(self._goes_on)
            self._goes_on = None
        return self._samples


class _StatefulStream(_Stream):
    def state_dict(self) -> Any:
        return self.dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.dataset.load_state_dict(state)

    # Without torchdata, which asks the data set and its iterator each for their own.

    def place(self) -> dict[str, Any]:
        return {"dataset": self.dataset.state_dict(), "samples": self._samples.state_dict()}

    def go_to(self, place: Mapping[str, Any]) -> None:
        self.dataset.load_state_dict(place["dataset"])
        self._goes_on = place["samples"]


class _Samples:
    """The samples of one worker's stream; a Failure, and then the end, where one cannot be read."""

    def __init__(
        self, iterator: Iterator[Any], seeds: SampleSeeds, worker: int, workers: Workers | None, dataset: Any
    ) -> None:
        self._iterator, self._seeds, self._worker, self._workers = iterator, seeds, worker, workers
        self._owner = dataset
        self._count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._workers is not None:
            self._workers.begin(self._count)
        self._seeds.set_for(f"{self._worker}/{self._count}")
        try:
            sample = next(self._iterator)
        except StopIteration:
            raise
        except Exception as error:
            self._iterator = iter(())
            return failure_of(f"sample {self._count} of the stream cannot be read", error)
        finally:
            if self._workers is not None:
                self._workers.end()
        self._count += 1
        return sample


class _StatefulSamples(_Samples):
    def state_dict(self) -> dict[str, Any]:
        own = self._iterator is not self._owner and is_stateful(self._iterator)
        return {"count": self._count, "iterator": self._iterator.state_dict() if own else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._count = state["count"]
        if state["iterator"] is not None:
            self._iterator.load_state_dict(state["iterator"])


def _collate(collate: Callable[[Any], Any], samples: Any) -> Any:
    failures = [it for it in samples if isinstance(it, Failure)] if isinstance(samples, list) else []
    if isinstance(samples, Failure):
        return samples
    if failures:
        return failures[0]
    try:
        return collate(samples)
    except Exception as error:
        return failure_of("samples of the stream cannot be put into a batch", error)


class _StreamIterator:
    """The batches of one pass, as `StreamLoader` hands them out."""

    def __init__(self, loader: StreamLoader, engine: DataLoader, workers: Workers | None) -> None:
        self._loader, self._workers, self._engine = loader, workers, engine
        self._persistent = loader.persistent_workers
        self._iteration = loader._last = Iteration(loader.name, loader.dataset, workers)  # kept as in EpochLoader
        self._fault: DataError | None = None
        self._batches: Iterator[Any] | None = None
        with self._quietly(), workers.starting() if workers is not None else nullcontext():
            self._batches = iter(engine)
        if workers is not None:  # not before: torchdata waits as long for the workers' start, too
            self._batches._timeout = poll_seconds(loader.timeout, loader.stop, self._persistent)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._fault is not None:
            raise self._fault
        try:
            with self._quietly():
                batch = next_batch(self._batches, self._loader.timeout, self._loader.stop)
        except (StopIteration, LoadingStopped):
            raise
        except Exception as error:
            self._fault = worker_fault(error, self._loader.name, self._iteration)
            if self._fault is None:
                raise
            self._workers.close()
            let_go(error)
            with deaths_unreported():
                self._batches = None
                self._loader.drop_workers()
            raise self._fault from error
        if isinstance(batch, Failure):
            fault = read_fault(batch, self._loader.name)
            del self  # as in EpochLoader: an error that is kept must not keep the workers
            raise fault
        if self._loader._running is self._engine:
            self._loader.batches_done += 1
        return batch

    def close(self) -> None:
        """The pass is over: its workers end, and there are no more batches."""
        if self._workers is not None:
            self._workers.close()
            self._batches, self._engine = iter(()), None

    def __del__(self) -> None:
        if self._workers is not None and not self._persistent:
            self._workers.close()

    def _quietly(self) -> Any:
        """The global generators stay where they are; workers have their own."""
        return draws_put_back() if self._workers is None else nullcontext()
