"""Watches the worker processes of a loader: tracks what each reads, and ends them with the run."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any, NamedTuple
from weakref import WeakSet

from torch.utils.data import get_worker_info

from amp_recipes.interrupts import SIGNALS, is_default

TIMEOUT_SECONDS = 300.0  # for a batch, where the user sets no limit: a hung file system must not hang the run
_END_CHECK_SECONDS = 0.5  # how often a worker looks whether it is to end
_KILL_SECONDS = 5.0  # even SIGKILL waits for a process that waits for a disk
_ALL: WeakSet[Workers] = WeakSet()


class Reading(NamedTuple):
    """The sample that a worker reads now: worker number, pid, task number and place in the task."""

    worker: int
    pid: int
    task: int
    place: int


class _Row(ctypes.Structure):
    """The state of one worker, as it reports it; task: -1 between two of them."""

    _fields_ = (("pid", ctypes.c_int64), ("task", ctypes.c_int64), ("place", ctypes.c_int64))


class _Orders(ctypes.Structure):
    """The orders of the main process to all workers."""

    _fields_ = (("closing", ctypes.c_bool), ("epoch", ctypes.c_int64))


class Workers:
    """A board in shared memory on which each worker writes its pid and what it reads; the main process reads it.

    So the main process knows which sample a worker was reading when it died or hung. count: 0 where it reads itself.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._orders = RawValue(_Orders) if count else _Orders()
        self._rows = RawArray(_Row, [(0, -1, 0)] * count) if count else ()
        self._mine = _Row()  # of the main process, where nobody looks
        self._owner = os.getpid()
        self._processes: list[multiprocessing.Process] = []
        _ALL.add(self)

    # ------------------------------------------------------------------ in a worker

    def join(self, worker: int) -> None:
        """Make this process worker `worker`."""
        self._mine = self._rows[worker]
        self._mine.pid = os.getpid()

    def begin(self, task: int) -> None:
        """Record that this worker begins a task."""
        self._mine.place = 0
        self._mine.task = task

    def at(self, place: int) -> None:
        """Record that this worker reads the sample at that place of its task."""
        self._mine.place = place

    def end(self) -> None:
        """Record that this worker has finished its task."""
        self._mine.task = -1

    @property
    def closing(self) -> bool:
        """Whether the main process wants its workers to end."""
        return self._orders.closing

    @property
    def epoch(self) -> int:
        """The epoch that is read, for workers that get no tasks."""
        return self._orders.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._orders.epoch = epoch

    # ------------------------------------------------------------------ in the main process

    def close(self) -> None:
        """Let SIGTERM end the workers from now on."""
        if os.getpid() == self._owner:  # not a forked process that drops its copy of the loader
            self._orders.closing = True

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Register the processes that start in the block as these workers."""
        if not self.count:
            yield
            return
        before = multiprocessing.active_children()
        # A signal to all processes of the run waits until a worker has said, in `start_worker`, what it does with it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # What torch's iterator calls `_workers`, without reaching into it.
            children = multiprocessing.active_children()
            self._processes = [*self._processes, *(child for child in children if child not in before and child.daemon)]

    @property
    def running(self) -> bool:
        """Whether any of them is there."""
        return os.getpid() == self._owner and any(process.exitcode is None for process in self._processes)

    def worker_of(self, pid: int) -> int | None:
        """The number of the worker with that pid."""
        return next((worker for worker, row in enumerate(self._rows) if row.pid == pid), None)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of that worker: minus a signal's number, or what it returned."""
        return next((process.exitcode for process in self._processes if process.pid == pid), None)

    def reading(self) -> list[Reading]:
        """Return what each busy worker reads."""
        now = [Reading(worker, row.pid, row.task, row.place) for worker, row in enumerate(self._rows)]
        return [reading for reading in now if reading.task >= 0]

    def dead(self, wait_seconds: float = 0.0) -> list[int]:
        """The pids of the workers that have ended; waits so long for the first."""
        deadline = time.monotonic() + wait_seconds
        while True:
            dead = [process.pid for process in self._processes if process.exitcode is not None]
            if dead or not self._processes or time.monotonic() > deadline:
                return dead
            time.sleep(0.01)

    def kill(self, pids: Collection[int] | None = None) -> None:
        """End those workers, or all, with SIGKILL: a hung one ignores other signals, and would delay the exit."""
        if os.getpid() != self._owner:
            return
        doomed = [process for process in self._processes if pids is None or process.pid in pids]
        for process in doomed:
            process.kill()
        for process in doomed:
            process.join(_KILL_SECONDS)


def start_worker(workers: Workers, worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Prepare a worker before its first sample.

    Signals that a terminal or a job scheduler sends to every process of the run are the main process's business: it
    finishes its step and needs batches for that. A worker ends when the main process closes it or is gone.
    """
    workers.join(worker)
    if threading.current_thread() is threading.main_thread():
        parent = os.getppid()

        def on_terminate(number: int, frame: Any) -> None:
            if workers.closing or os.getppid() != parent:
                os._exit(128 + number)

        signal.signal(signal.SIGTERM, on_terminate)
        for signum in SIGNALS:
            if signum == signal.SIGINT or is_default(signum):  # a recipe's own handler is for its workers too
                signal.signal(signum, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=_end_with, args=(workers, parent), daemon=True).start()
    info = get_worker_info()
    # The documented use of `get_worker_info().dataset` is to reach the user's dataset, not our reader around it. The
    # class refuses changes, but there is no other way to say which dataset is meant.
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if worker_init_fn is not None:
        worker_init_fn(worker)


@contextmanager
def deaths_unreported() -> Iterator[None]:
    """Remove torch's SIGCHLD handler in the block, since it raises when a worker is killed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # handlers run in the main thread only, and are set there only
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler if handler is not None else signal.SIG_DFL)


def _end_with(workers: Workers, parent: int) -> None:
    # torch's own loop looks for its parent between two batches only: a hung read would outlive the run for good.
    # Looked at in two ways: the parent may have gone before this worker asked who it is, and a worker that was started
    # later keeps an earlier one's line to its parent open.
    process = multiprocessing.parent_process()
    while os.getppid() == parent and (process is None or process.is_alive()):
        closing = workers.closing
        time.sleep(_END_CHECK_SECONDS)
        if closing:
            # Still here, so in the middle of a sample, for which torch would wait 5 s. What was on its way to the
            # main process has arrived by now. With status 0, as torch's SIGCHLD handler raises for any other.
            os._exit(0)
    os._exit(1)


@atexit.register
def _kill_what_is_left() -> None:
    # Python's exit sends SIGTERM to the workers and waits for them without limit. They ignore it, or hang.
    if any(workers.running for workers in _ALL):
        with deaths_unreported():
            for workers in list(_ALL):
                workers.kill()
