"""Explains the failure of a loader worker: which worker, and what it was reading."""

from __future__ import annotations

import multiprocessing
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.pool import RemoteTraceback
from typing import Any
from weakref import WeakSet

from amp_recipes.data.order import Task
from amp_recipes.data.reading import Failure, describe_sample, samples_of
from amp_recipes.data.workers import Reading, Workers, deaths_unreported
from amp_recipes.errors import DataError

_ALL: WeakSet[Iteration] = WeakSet()
# The texts of torch/csrc/DataLoader.cpp and of torch/utils/data/dataloader.py: torch has no class for these errors.
TIMED_OUT = re.compile(r"DataLoader timed out after (?P<seconds>[\d.]+) seconds")
_DIED = re.compile(r"DataLoader worker \(pid(?:\(s\))? (?P<pids>[\d, ]+)\)")
_BY_SIGNAL = re.compile(r"killed by signal: (?P<signal>[^.]+)\.")
_BY_CODE = re.compile(r"exited unexpectedly with exit code (?P<code>\d+)")
_SIGNALS = {int(number): number.name for number in signal.Signals}
_NOTICE_SECONDS = 2.0  # a process is gone a moment before its parent knows
_ADVICE = {
    "SIGKILL": "The system usually does this when memory runs out: use fewer workers, a smaller prefetch_factor or "
    "smaller batches.",
    "SIGBUS": "Shared memory ran out: enlarge /dev/shm, or use fewer workers or a smaller prefetch_factor.",
    "SIGSEGV": "A library crashed while it read: read that sample with num_workers=0 to see where.",
}


@dataclass(eq=False)
class Iteration:
    """One pass over a loader, with what is needed to explain its errors."""

    name: str
    dataset: Any
    workers: Workers
    in_flight: dict[int, Task] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ALL.add(self)

    def describe(self, reading: Reading) -> str:
        """Return what that worker is reading."""
        task = self.in_flight.get(reading.task)
        if task is None:
            return "a batch"
        if isinstance(task.indices, (list, tuple)):
            at_once = callable(getattr(self.dataset, "__getitems__", None)) and reading.place == 0
            if at_once or reading.place >= len(task.indices):
                return samples_of(task.indices)
            return describe_sample(self.dataset, task.indices[reading.place])
        return describe_sample(self.dataset, task.indices)


class loader_faults:
    """Turn torch's errors about workers into a DataError, in the block in which `loader` is iterated.

    torch raises them from a signal handler, so in the middle of any code. Other errors pass as they are. `loader` may
    be any iterable; of one that `make_loader` made, the error names the worker and what it was reading.
    """

    # A class, because the handler may raise while a generator's context manager is on its way in or out.

    def __init__(self, loader: Any) -> None:
        self._name = getattr(loader, "name", "Data set")

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        cause: BaseException | None = error
        if isinstance(error, (EOFError, ConnectionError)):
            # A dead worker hands its tensors over no more, which can be noticed before its death is.
            try:
                time.sleep(_NOTICE_SECONDS)
            except RuntimeError as late:
                cause = late
        fault = worker_fault(cause, self._name) if cause is not None else None
        if fault is not None:
            raise fault from cause


def worker_fault(error: BaseException, name: str, iteration: Iteration | None = None) -> DataError | None:
    """The DataError that says what an error of torch about a loader worker means; None for any other error.

    iteration: the one whose next batch raised it, where that is known.
    """
    if isinstance(error, DataError):
        return None  # reported already
    texts = [str(cause) for cause in _causes(error) if type(cause) is RuntimeError]
    for text in texts:
        if timed_out := TIMED_OUT.search(text):
            return _hang(float(timed_out["seconds"]), name, iteration)
        if died := _DIED.search(text):
            # Where it was noticed late, the cause's text knows more.
            how = next((known for known in texts if _BY_SIGNAL.search(known) or _BY_CODE.search(known)), text)
            return _death(int(died["pids"].split(",")[0]), how, name)
    return _unreported_death(error, name, iteration)


def _unreported_death(error: BaseException, name: str, iteration: Iteration | None) -> DataError | None:
    """A worker of the iteration has ended, and torch has not said so yet."""
    if iteration is None:
        return None
    with deaths_unreported():
        dead = iteration.workers.dead(_NOTICE_SECONDS if isinstance(error, (EOFError, OSError)) else 0.0)
    return _death(dead[0], "", name) if dead else None


def let_go(error: BaseException | None) -> None:
    """Take the tracebacks off `error` and what it came from: torch's frames in them keep the workers from ending."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def read_fault(failure: Failure, name: str) -> DataError:
    """The DataError of a sample that raised, with the original error and its traceback as the cause."""
    where = "" if failure.worker is None else f" It was read by loader worker {failure.worker}."
    advice = "Repair this sample, or leave it out of the dataset."
    error = DataError(f"{name}: {failure.what}: {failure.summary}.{where} {advice}")
    error.__cause__ = failure.error if failure.error is not None else RemoteTraceback(f'\n"""\n{failure.traceback}"""')
    return error


def _death(pid: int, text: str, name: str) -> DataError:
    with deaths_unreported():
        # Reaps the dead one. As long as it is a zombie, torch raises again at the end of every other child process,
        # so also in whatever cleans up after this error.
        multiprocessing.active_children()
    which, was_reading, code = f"a loader worker (pid {pid})", "", None
    for iteration in list(_ALL):
        worker = iteration.workers.worker_of(pid)
        if worker is not None:
            name, which = iteration.name, f"loader worker {worker} (pid {pid})"
            code = iteration.workers.exit_code(pid)
            reading = [now for now in iteration.workers.reading() if now.worker == worker]
            was_reading = f" while it read {iteration.describe(reading[0])}" if reading else " between two batches"
            if not reading or reading[0].task in iteration.in_flight:
                break  # else an earlier pass over the same persistent workers
    how, advice = _how_it_ended(text, code)
    return DataError(f"{name}: {which} {how}{was_reading}. {advice}".rstrip())


def _how_it_ended(text: str, code: int | None) -> tuple[str, str]:
    """Return how a worker ended, and advice, from its exit code or from torch's text."""
    signal_name = _SIGNALS.get(-code) if code is not None else None
    if by_signal := _BY_SIGNAL.search(text):
        described = by_signal["signal"].strip()
        names = {signal.strsignal(number): name for number, name in _SIGNALS.items()}
        signal_name = names.get(described, described)
    if signal_name is not None:
        return f"was killed by {signal_name}", _ADVICE.get(signal_name, "")
    if by_code := _BY_CODE.search(text):
        code = int(by_code["code"])
    how = "ended unexpectedly" if code is None else f"ended with exit code {code}"
    return how, "Read with num_workers=0 to see its error."


def _hang(seconds: float, name: str, iteration: Iteration | None) -> DataError:
    slow = []
    if iteration is not None:
        name = iteration.name
        reading = iteration.workers.reading()
        due = min(iteration.in_flight, default=-1)
        slow = [now for now in reading if now.task == due] or reading
        with deaths_unreported():
            iteration.workers.kill([now.pid for now in reading])  # what one waits for, others may too
    who = "; ".join(f"loader worker {now.worker} (pid {now.pid}) was reading {iteration.describe(now)}" for now in slow)
    return DataError(
        f"{name}: no batch came for {seconds:g} seconds{': ' + who if who else ''}. If reading may take longer, raise "
        "the limit: timeout=<seconds> in the loader kwargs (0: none)."
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__
