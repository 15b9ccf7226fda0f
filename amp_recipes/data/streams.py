"""Loads an IterableDataset, and resumes where it stopped if the dataset can save its position."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from amp_recipes.data.engine import Engine, EnginePass, Engines, options_of_workers, poll_seconds
from amp_recipes.data.loader_faults import Iteration, read_fault
from amp_recipes.data.reading import Failure, failure_of
from amp_recipes.data.sample_draws import SampleSeeds
from amp_recipes.data.samplers import epoch_seed
from amp_recipes.data.workers import TIMEOUT_SECONDS, Workers, start_worker
from amp_recipes.errors import DataError
from amp_recipes.state.preserved import has_state


class StreamLoader(DataLoader):
    """A DataLoader over an IterableDataset whose draws are functions of (seed, epoch, worker, number of the sample).

    The place is the dataset's own state where it has `state_dict` and `load_state_dict` (with workers this takes
    torchdata's StatefulDataLoader); else the number of batches, which are read again after `load_state_dict`.

    stop: may be set before an iteration: asked about once a second while a batch of workers is waited for; if it
    returns true, LoadingStopped is raised; iterating on waits again. Not asked where there are persistent_workers.
    """

    stop: Callable[[], bool] | None = None

    def __init__(self, dataset: Any, *, seed: int, name: str = "Data set", **kwargs: Any) -> None:
        if kwargs.get("num_workers"):
            kwargs.setdefault("timeout", TIMEOUT_SECONDS)
        super().__init__(dataset, **kwargs)
        self.seed, self.name, self.epoch = seed, name, 0
        self._progress = _Progress()
        self._resumed: Mapping[str, Any] | None = None
        self._running: DataLoader | None = None  # torch's loader of the latest iteration
        self._engines = Engines()

    @property
    def batches_done(self) -> int:
        """The number of batches of the epoch that have been returned."""
        return self._progress.batches

    @property
    def knows_its_place(self) -> bool:
        """Whether a resume continues in the middle of the stream without reading its beginning again."""
        return has_state(self.dataset) and (self.num_workers == 0 or has_torchdata())

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of that epoch, from its beginning unless it is the one of `load_state_dict`."""
        if epoch != self.epoch:
            self._resumed, self._running, self._progress = None, None, _Progress()
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
        """Let the next iteration of that epoch continue from there."""
        if not isinstance(state, Mapping) or not {"epoch", "batches", "num_workers"} <= state.keys():
            raise DataError(f"{self.name}: a saved position needs 'epoch' and 'batches', but is {state!r:.200}")
        if state["batches"] and state["num_workers"] != self.num_workers:
            raise DataError(
                f"{self.name}: the position in this IterableDataset was saved with num_workers={state['num_workers']}, "
                f"but now there are {self.num_workers} workers, which would read other samples. Resume "
                "with the saved number."
            )
        if "stream" in state and not has_torchdata():
            raise DataError(f"{self.name}: this position was saved with torchdata and needs it: pip install torchdata")
        self.set_epoch(state["epoch"])
        self._resumed, self._progress = state, _Progress(state["batches"])

    def __iter__(self) -> Iterator[Any]:
        resumed, self._resumed = self._resumed, None
        self._progress = _Progress()
        # New workers are started with the saved state.
        engine = self._engines.take(self._engine, anew=resumed is not None)
        self._set_epoch_of(engine)
        to_read_again = 0 if resumed is None else _restore_place(engine.loader, resumed)
        self._running = engine.loader
        iteration = Iteration(self.name, self.dataset, engine.workers)
        # The global generators stay where they are; workers have their own.
        begun = self._engines.begin(self, engine, iteration, protect=not self.num_workers)
        if self.num_workers:  # not before: torchdata waits as long for the workers' start, too
            begun.wait_at_most(poll_seconds(self.timeout, self.stop, self.persistent_workers))
        batches = _StreamIterator(self.name, begun, self._progress)
        for _ in range(to_read_again):
            next(batches, None)
        if resumed is not None:
            self._progress.batches = resumed["batches"]
        return batches

    def close(self) -> None:
        """End all workers now, and the passes that use them; the next iteration starts new ones."""
        if self.num_workers:
            self._running = None  # torchdata's loader holds on to its latest pass
        self._engines.close()

    def _set_epoch_of(self, engine: Engine) -> None:
        if self.generator is None:
            engine.loader.generator.manual_seed(epoch_seed(self.seed, self.epoch, "workers"))
        engine.workers.epoch = self.epoch
        if isinstance(engine.loader.dataset, _Stream):
            engine.loader.dataset.epoch = self.epoch

    def _engine(self) -> Engine:
        workers = Workers(self.num_workers)
        start = partial(start_worker, workers, self.worker_init_fn)
        dataset, collate = self.dataset, self.collate_fn
        if isinstance(dataset, IterDataPipe):  # torch shuffles and shards these itself, if it sees them
            start = self.worker_init_fn
        else:
            dataset = _Stream(dataset, self.seed, workers)
            collate = partial(_collate, collate)
        kind = DataLoader
        if has_torchdata():
            from torchdata.stateful_dataloader import StatefulDataLoader as kind
        options = dict(
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            collate_fn=collate,
            timeout=self.timeout,
            worker_init_fn=start,
            generator=self.generator if self.generator is not None else torch.Generator(),
            **options_of_workers(self),
        )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*set_vital")  # torchdata 0.11 calls it, torch 2.13 warns
            return Engine(kind(dataset, **options), workers)


def _restore_place(engine: DataLoader, state: Mapping[str, Any]) -> int:
    """Continue the stream at its saved position; return the number of batches to read again if it has none."""
    if "stream" in state:
        engine.load_state_dict(state["stream"])
    elif "dataset" in state:
        engine.dataset.go_to(state["dataset"])
    else:
        return state["batches"]
    return 0


def has_torchdata() -> bool:
    """Whether torchdata's StatefulDataLoader is installed."""
    return find_spec("torchdata") is not None and find_spec("torchdata.stateful_dataloader") is not None


@dataclass
class _Progress:
    """The progress of one pass; the next pass has its own."""

    batches: int = 0


class _Stream(IterableDataset):
    """The user's dataset, seeded before each sample."""

    def __init__(self, dataset: Any, seed: int, workers: Workers) -> None:
        self.dataset, self.seed, self.workers = dataset, seed, workers
        self.epoch = 0
        self._told: int | None = None
        self._samples: _Samples | _StatefulSamples | None = None
        self._saved: Mapping[str, Any] | None = None
        if has_state(dataset):  # torchdata asks the dataset and its iterator each for their own, if they have one
            self.state_dict, self.load_state_dict = dataset.state_dict, dataset.load_state_dict

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        if info is not None:
            self.epoch = self.workers.epoch
            # A persistent worker has a copy of the dataset, which the main process cannot reach.
            if self._told not in (None, self.epoch) and hasattr(self.dataset, "set_epoch"):
                self.dataset.set_epoch(self.epoch)
            self._told = self.epoch
        seeds = SampleSeeds(self.seed, self.epoch)
        worker = 0 if info is None else info.id
        seeds.set_for(f"worker {worker}")
        iterator = iter(self.dataset)
        self._samples = _Samples(iterator, seeds, worker, self.workers)
        if has_state(self.dataset) or has_state(iterator):
            self._samples = _StatefulSamples(self._samples, self.dataset)
        if self._saved is not None:
            self._samples.load_state_dict(self._saved)
            self._saved = None
        return self._samples

    def place(self) -> dict[str, Any]:
        """The state of both, without torchdata."""
        return {"dataset": self.dataset.state_dict(), "samples": self._samples.state_dict()}

    def go_to(self, place: Mapping[str, Any]) -> None:
        self.dataset.load_state_dict(place["dataset"])
        self._saved = place["samples"]


class _Samples:
    """The samples of one worker's stream; a Failure, and then the end, where one cannot be read."""

    def __init__(self, iterator: Iterator[Any], seeds: SampleSeeds, worker: int, workers: Workers) -> None:
        self.iterator, self._seeds, self._worker, self._workers = iterator, seeds, worker, workers
        self.count = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._workers.begin(self.count)
        self._seeds.set_for(f"{self._worker}/{self.count}")
        try:
            sample = next(self.iterator)
        except StopIteration:
            raise
        except Exception as error:
            self.iterator = iter(())
            return failure_of(f"sample {self.count} of the stream cannot be read", error)
        finally:
            self._workers.end()
        self.count += 1
        return sample


class _StatefulSamples:
    """The samples of a stream that can save its position."""

    def __init__(self, samples: _Samples, dataset: Any) -> None:
        self._samples, self._dataset = samples, dataset

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._samples)

    def state_dict(self) -> dict[str, Any]:
        iterator = self._samples.iterator
        own = iterator is not self._dataset and has_state(iterator)
        return {"count": self._samples.count, "iterator": iterator.state_dict() if own else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._samples.count = state["count"]
        if state["iterator"] is not None:
            self._samples.iterator.load_state_dict(state["iterator"])


def _collate(collate: Callable[[Any], Any], samples: Any) -> Any:
    for sample in samples if isinstance(samples, list) else [samples]:
        if isinstance(sample, Failure):
            return sample
    try:
        return collate(samples)
    except Exception as error:
        return failure_of("samples of the stream cannot be collated into a batch", error)


class _StreamIterator:
    """The batches of one pass, as `StreamLoader` hands them out."""

    def __init__(self, name: str, batches: EnginePass, progress: _Progress) -> None:
        self._name, self._batches, self._progress = name, batches, progress

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        if isinstance(batch, Failure):
            fault = read_fault(batch, self._name)
            del self  # as in EpochLoader: an error that is kept must not keep the workers
            raise fault
        self._progress.batches += 1
        return batch
