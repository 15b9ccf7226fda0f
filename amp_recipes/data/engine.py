"""Runs torch's loader inside ours: keeps its workers between passes, and explains their errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakSet

from torch.utils.data import DataLoader

from amp_recipes.data.loader_faults import TIMED_OUT, Iteration, let_go, worker_fault
from amp_recipes.data.sample_draws import draws_put_back
from amp_recipes.data.workers import Workers, deaths_unreported
from amp_recipes.errors import DataError
from amp_recipes.modules.torch_private import set_timeout_of_batches

POLL_SECONDS = 1.0  # how long a request to stop may go unseen


class LoadingStopped(Exception):
    """Raised if the loader's `stop` returned true while it waited for a batch; iterating on still returns the batch."""


def poll_seconds(limit: float, stop: Callable[[], bool] | None, persistent: bool) -> float:
    """The timeout for torch's loader if `limit` is the user's (0: none)."""
    if stop is None or persistent:  # persistent ones wait by that timeout for the end of an earlier pass, too
        return limit
    return min(limit, POLL_SECONDS) if limit else POLL_SECONDS


def next_batch(batches: Iterator[Any], limit: float, stop: Callable[[], bool] | None) -> Any:
    """The next one of `batches`, torch's iterator, whose timeout is `poll_seconds`.

    torch takes nothing from its queue where it times out, so that it can be asked again. Raises LoadingStopped, and
    after `limit` seconds (0: never) torch's RuntimeError.
    """
    began = time.monotonic()
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            if not TIMED_OUT.search(str(error)):
                raise
            if stop is not None and stop():
                raise LoadingStopped from None
            if limit and time.monotonic() - began >= limit:
                raise RuntimeError(f"DataLoader timed out after {limit} seconds") from error


class Engine(NamedTuple):
    """torch's loader, and its worker processes."""

    loader: DataLoader
    workers: Workers


def options_of_workers(loader: DataLoader) -> dict[str, Any]:
    """The options of a loader of ours that torch's loader takes over: how many workers, and how they run."""
    names = ("num_workers", "persistent_workers", "prefetch_factor", "multiprocessing_context")
    return {name: getattr(loader, name) for name in (*names, "in_order", "pin_memory")}


class Engines:
    """The engines of one loader of ours; where workers persist, one engine serves pass after pass."""

    def __init__(self) -> None:
        self._kept: Engine | None = None
        self._passes: WeakSet[EnginePass] = WeakSet()
        # Held: an error that a signal's handler raises takes the pass away before anybody asks what it was reading.
        self._last_iteration: Iteration | None = None

    def take(self, make: Callable[[], Engine], anew: bool = False) -> Engine:
        """The engine for the next pass: the one before if its workers persist and live, else what `make` makes."""
        if anew or (self._kept is not None and self._kept.workers.dead()):
            self._kept = None
        engine = self._kept or make()
        if engine.loader.persistent_workers:
            self._kept = engine
        return engine

    def begin(self, loader: Any, engine: Engine, iteration: Iteration, protect: bool) -> EnginePass:
        """A pass of `engine`, with the arguments of `EnginePass`; `close` ends it, unless nobody holds it any more."""
        begun = EnginePass(loader, engine, iteration, self.drop, protect)
        self._passes.add(begun)
        self._last_iteration = iteration
        return begun

    def drop(self) -> None:
        """The next pass starts new workers."""
        self._kept = None

    def close(self) -> None:
        """End all workers and all passes."""
        if self._kept is not None:
            self._kept.workers.close()
        self._kept = None
        for begun in list(self._passes):
            begun.close()

    def __del__(self) -> None:
        if self._kept is not None:
            self._kept.workers.close()


class EnginePass:
    """The batches of one pass of an engine. An error about a worker comes as a DataError, and ends the pass.

    loader: ours, which has the `timeout` and may have a `stop`, and is held as long as the pass is: it holds the
    persistent workers. protect: put the global generators back after each batch, which is read in this process.
    """

    def __init__(
        self, loader: Any, engine: Engine, iteration: Iteration, drop_workers: Callable[[], None], protect: bool
    ) -> None:
        self._loader, self._iteration, self._drop_workers = loader, iteration, drop_workers
        self._protect = protect
        self._ends_workers = not loader.persistent_workers
        self._fault: DataError | None = None
        self._batches: Iterator[Any] | None = None
        try:
            with self._quietly(), engine.workers.starting():
                self._batches = iter(engine.loader)
        except Exception as error:
            self._raise_if_told(error)
            raise

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._fault is not None:
            raise self._fault
        try:
            with self._quietly():
                return next_batch(self._batches, self._loader.timeout, self._loader.stop)
        except (StopIteration, LoadingStopped):
            raise
        except Exception as error:
            self._raise_if_told(error)
            raise

    def wait_at_most(self, seconds: float) -> None:
        """Set how long torch waits for a batch from now on."""
        set_timeout_of_batches(self._batches, seconds)

    def close(self) -> None:
        """The pass is over: its workers end, and there are no more batches."""
        if self._iteration.workers.count:
            self._iteration.workers.close()
            self._batches = iter(())

    def __del__(self) -> None:
        if self._ends_workers:
            self._iteration.workers.close()

    def _quietly(self) -> AbstractContextManager[Any]:
        return draws_put_back() if self._protect else nullcontext()

    def _raise_if_told(self, error: Exception) -> None:
        """Raise the DataError for an error about a worker; this ends the pass and the workers."""
        self._fault = worker_fault(error, self._iteration.name, self._iteration)
        if self._fault is None:
            return
        self._drop_workers()
        self._iteration.workers.close()
        let_go(error)
        with deaths_unreported():
            self._batches = None
        raise self._fault from error
