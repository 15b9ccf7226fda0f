"""Ends all ranks within seconds after one of them fails, and reports why."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from amp_recipes.distributed.rendezvous import hosted_by_rank_0, launched, minutes_text
from amp_recipes.errors import ProcessError

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
# Time for the main thread to end by itself, with its own error, before its process is ended. With the time to notice a
# failure this must stay under 10 s, and under the 30 s after which torchrun kills what has not ended.
_GRACE_SECONDS = 5.0
# A connection breaks before the watcher of the dead process's machine has reported why.
_REPORT_WITHIN_SECONDS = 2.0
_TELL_WITHIN_SECONDS = 2.0
_MESSAGE_LENGTH = 2000
# What torchrun gives its processes between SIGTERM and SIGKILL.
_SAVE_WITHIN_SECONDS = 30.0
_FAILED = "failed"
_LAUNCHER = -1
_WITHOUT_A_WORD = (
    "its process ended without a Python error: it was killed (SIGKILL, out of memory, preemption; see dmesg and the "
    "launcher's output) or aborted in C++"
)

# In the texts of torch's errors; gloo's and some of NCCL's are plain RuntimeErrors.
_TIMED_OUT = ("timed out", "timeout")
_FROM_TORCH = ("gloo", "NCCL", "nccl", "Connection closed by peer", "mismatch between collectives", "Timed out waiting")


@dataclass(frozen=True)
class Report:
    """A rank's report of a failure, its own or a neighbour's; a `consequence` followed from another failure."""

    rank: int
    kind: str
    message: str
    consequence: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {f'{self.kind}: ' if self.kind else ''}{self.message}"


class Watch:
    """Looks, beside the main thread, for failures of other ranks, and ends this process if one has failed.

    store: the run's, of which the watch takes a connection of its own. It asks there once a second; on one machine the
    kernel tells it of processes that died without a word. Training itself does nothing for it.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout_minutes: float) -> None:
        self.rank, self.world_size, self.timeout_minutes = rank, world_size, timeout_minutes
        self.exit_code: int | None = None  # of a process that fails
        self.store = store.clone()
        self._received = threading.Event()
        self._report: Report | None = None
        self._host_is_done = self._store_is_gone = False
        # A descriptor that can be read when the process has ended -> its rank; -1: torchrun, which started this one.
        self._neighbours: dict[int, int] = {}
        self._unopened = _on_this_machine(rank, world_size) if hasattr(os, "pidfd_open") else set()
        self._ends, self._wake = os.pipe()
        self._main = threading.main_thread().ident
        self._thread = threading.Thread(target=self._run, name="amp_recipes watch", daemon=True)
        self.store.set(f"process/{rank}", json.dumps([_machine(), os.getpid()]))
        self._thread.start()

    def report(self, within_seconds: float = 0.0) -> Report | None:
        """The first failure of the run, if one is known by then."""
        self._received.wait(within_seconds)
        return self._report

    def tell(self, report: Report) -> None:
        """Report a failure to all ranks; only the first report counts. Takes seconds at most, even without a store."""
        if self._store_is_gone:
            return
        thread = threading.Thread(target=self._tell, args=(report,), daemon=True)
        thread.start()
        thread.join(_TELL_WITHIN_SECONDS)

    def say_done(self) -> None:
        """Report that this process ends normally; rank 0 waits for the others if it hosts the store."""
        if self._store_is_gone:
            return
        with contextlib.suppress(RuntimeError):
            self.store.set(f"done/{self.rank}", "")
            waiting = set(range(self.world_size)) if self.rank == 0 and hosted_by_rank_0() else set()
            deadline = time.monotonic() + _REPORT_WITHIN_SECONDS + 2 * _LOOK_SECONDS
            while waiting and time.monotonic() < deadline and not self._received.is_set():
                waiting = {rank for rank in waiting if not self.store.check([f"done/{rank}"])}
                time.sleep(0.02 if waiting else 0)

    def stop(self) -> None:
        """Look no more. Once."""
        os.write(self._wake, b"x")
        self._thread.join(timeout=_TELL_WITHIN_SECONDS)
        if self._thread.is_alive():
            return  # the store does not answer; the descriptors are still in use
        for descriptor in (self._ends, self._wake, *self._neighbours):
            os.close(descriptor)
        self._neighbours.clear()

    def _run(self) -> None:
        """The thread: look until the process ends."""
        self._open_launcher()
        while self._report is None:
            readable, _, _ = select.select([self._ends, *self._neighbours], [], [], _LOOK_SECONDS)
            if self._ends in readable:
                return
            ended = [self._neighbours[descriptor] for descriptor in readable]
            if _LAUNCHER in ended:
                self._end_without_launcher()
                return
            try:
                if not self._store_is_gone:
                    self._look([*ended, *self._open_neighbours()])
            except RuntimeError:
                self._lose_store()
            for descriptor in readable:
                del self._neighbours[descriptor]
                os.close(descriptor)
        if self.rank == 0 and self._report.rank != 0:
            logger.error("%s", self._report)  # for its log file; each rank prints its own
        self._end_with_the_others()

    def _open_launcher(self) -> None:
        """Open a descriptor of torchrun's process, if it started this one."""
        if hasattr(os, "pidfd_open") and "TORCHELASTIC_RUN_ID" in os.environ:  # only Linux has it
            with contextlib.suppress(OSError):
                self._neighbours[os.pidfd_open(os.getppid())] = _LAUNCHER

    def _open_neighbours(self) -> list[int]:
        """Open a descriptor of each of the run's other processes on this machine; those that have ended already."""
        ended = []
        for rank in sorted(self._unopened):
            if not self.store.check([f"process/{rank}"]):
                continue
            self._unopened.discard(rank)
            machine, pid = json.loads(self.store.get(f"process/{rank}"))
            if machine != _machine():
                continue
            try:
                self._neighbours[os.pidfd_open(pid)] = rank
            except ProcessLookupError:
                ended.append(rank)
            except OSError:  # the system does not let us
                self._unopened.clear()
        return ended

    def _look(self, ended: Iterable[int]) -> None:
        """Read a reported failure, or report neighbours that `ended` without one."""
        for rank in ended:
            if not self.store.check([f"done/{rank}"]):
                self._tell(Report(rank, "", _WITHOUT_A_WORD))
        if self.store.check([_FAILED]):
            self._take(self.store.get(_FAILED))
        elif hosted_by_rank_0() and not self._host_is_done:
            self._host_is_done = self.store.check(["done/0"])

    def _lose_store(self) -> None:
        """React to the end of the store: rank 0 has ended if it hosted it, else failures are only noticed later."""
        self._store_is_gone = True
        if hosted_by_rank_0() and not self._host_is_done and self.rank != 0:
            self._report = Report(
                0, "", "its process, which hosts the store of the run, ended without an error message"
            )
            self._received.set()
        elif not hosted_by_rank_0():
            logger.warning(
                "lost the connection to torchrun's store: failures of other ranks are noticed only when a wait times "
                "out"
            )

    def _tell(self, report: Report) -> None:
        with contextlib.suppress(RuntimeError):
            self._take(self.store.compare_set(_FAILED, "", json.dumps(asdict(report))))

    def _take(self, told: bytes) -> None:
        self._report = Report(**json.loads(told))
        self._received.set()

    def _end_without_launcher(self) -> None:
        """Save and end when torchrun has died: this process would train on, and keep its folder from a new start.

        As torchrun itself asks, by SIGTERM: all ranks finish the step and save.
        """
        self._store_is_gone = os.environ.get("GROUP_RANK", "0") == "0"  # it was with the torchrun of the first machine
        if self.rank == 0:
            logger.error("torchrun, which started this process, has ended: saving, then exiting")
        os.kill(os.getpid(), signal.SIGTERM)
        if not select.select([self._ends], [], [], _SAVE_WITHIN_SECONDS)[0]:
            _print(self.rank, f"ended because torchrun ended; could not save within {_SAVE_WITHIN_SECONDS:g} s")
            os._exit(128 + signal.SIGTERM)

    def _end_with_the_others(self) -> None:
        """Give the main thread time to end by itself; then end the process, even if it sits in C++ for ever."""
        if select.select([self._ends], [], [], _GRACE_SECONDS)[0]:
            return
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        text = f"ended because {self._report}" if self._report.rank != self.rank else f"ended: {self._report}"
        _print(self.rank, f"{text}\nThe main thread was here and did not end within {_GRACE_SECONDS:g} s:\n{stack}")
        _write_error_file(text, stack, consequence=self._report.rank != self.rank)
        os._exit(self.exit_code or 1)


_watch: Watch | None = None
_exit_code: int | None = None  # that the process is going to end with, once an error has reached the top


def start_watch(store: dist.Store, rank: int, world_size: int, timeout_minutes: float) -> None:
    """Look for failures of other ranks from now on, and tell them of ours. Once a process."""
    global _watch
    if _watch is None:
        _watch = Watch(store, rank, world_size, timeout_minutes)
        show_ranks_in_errors()


def current_watch() -> Watch | None:
    """The watch of this process; None if it has none, as one that has not met others."""
    return _watch


def set_timeout(minutes: float) -> None:
    """Say how long the process group waits, for the texts of errors."""
    if _watch is not None:
        _watch.timeout_minutes = minutes


def exit_code() -> int | None:
    """Return the exit code of a process that an error ends; None if no error has reached the top."""
    return _exit_code


def stay_to_be_heard() -> None:
    """Stay until the others have read why this process ends, if the store ends with it."""
    if _watch is not None and _watch.rank == 0 and hosted_by_rank_0():
        time.sleep(1.5 * _LOOK_SECONDS)


def timeout_text() -> str:
    """Return the time for which a process waits for the others, with the option that sets it."""
    minutes = "" if _watch is None else f"{minutes_text(_watch.timeout_minutes)} "
    return f"{minutes}(distributed_timeout_minutes)"


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Inside this context, an error because other ranks did not take part becomes a ProcessError that says so.

    what: what this rank was doing, such as `averaging the loss`.
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_from_torch(error):
            raise
        raise ProcessError(_explain(error, what)) from error


def _is_from_torch(error: BaseException) -> bool:
    """Whether a collective or a store of torch's raised this."""
    if isinstance(error, dist.DistError):
        return True
    return type(error) is RuntimeError and any(sign in str(error) for sign in _FROM_TORCH)


def _explain(error: BaseException, what: str = "") -> str:
    """Explain a collective that broke or timed out, and say what to check."""
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    during = f" while {what}" if what else ""
    rank = _rank()
    report = None if _watch is None else _watch.report(_REPORT_WITHIN_SECONDS)
    if report is not None and not report.consequence and report.rank != rank:
        return f"rank {rank} lost the others{during}, because {report}"
    if any(sign in said.lower() for sign in _TIMED_OUT):
        return (
            f"rank {rank} waited {timeout_text()} for the others{during}, and the wait timed out: {said}. A rank "
            "hangs, or does something else at this point (another number of batches, a branch on the rank, a hook in "
            "one rank only). See where each process is (py-spy dump --pid ...). If a rank is only slow, give a larger "
            "--distributed_timeout_minutes."
        )
    return (
        f"rank {rank} lost the others{during}: {said}. No rank has reported an error: one was killed (out of memory? "
        "see dmesg and the launcher's output), lost its network, or called another collective or the same one with "
        f"another shape. Each wait ends after {timeout_text()}."
    )


def show_ranks_in_errors() -> None:
    """Print an error that ends one of several processes with its rank, and report it to the others and to torchrun.

    With one process, or the second time, nothing changes.
    """
    before = sys.excepthook
    if not launched() or getattr(before, "shows_ranks", False):
        return
    pid = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid:
            _fail(before, kind, error, trace)
        else:  # a forked process, which is none of the ranks
            before(kind, error, trace)

    hook.shows_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _fail(before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print the error that ends this rank, and tell of it."""
    global _exit_code
    _exit_code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    if _watch is not None:
        _watch.exit_code = _exit_code
    if _is_from_torch(error):
        explained = ProcessError(_explain(error))
        explained.__cause__ = error
        kind, error, trace = ProcessError, explained, None
    consequence = isinstance(error, ProcessError)
    message = f"{error}"[:_MESSAGE_LENGTH]
    if consequence and _another_rank_has_the_cause():
        # The way to this place in so many ranks would hide the one error that matters.
        stack = f"{kind.__name__}: {message}"
        _print(_rank(), f"{Path(sys.argv[0]).name}: {stack}")
    else:
        stack = _printed(before, kind, error, trace)
        if "Traceback (most recent" in stack or not _rank_0_says(stack):
            _print(_rank(), stack)
    _write_error_file(f"{kind.__name__}: {message}", stack, consequence)
    if _watch is not None:
        _watch.tell(Report(_rank(), kind.__name__, message, consequence))


def _another_rank_has_the_cause() -> bool:
    first = None if _watch is None else _watch.report()
    return first is not None and not first.consequence and first.rank != _rank()


def _printed(before: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: Any) -> str:
    """Return the text that `before`, an excepthook, prints."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        before(kind, error, trace)
    return printed.getvalue()


def _rank_0_says(mistake: str) -> bool:
    """Whether rank 0 shows the same mistake of the user's, one in a YAML say: it need not stand there eight times."""
    key = f"says/{hashlib.sha256(mistake.encode()).hexdigest()}"
    try:
        store = _watch.store if _watch is not None else _launchers_store()
        if store is None:
            return False
        if _rank() == 0:
            store.set(key, "")
            return False
        deadline = time.monotonic() + _REPORT_WITHIN_SECONDS
        while not (said := store.check([key])) and time.monotonic() < deadline:
            time.sleep(0.05)  # its own wait would print that it timed out
        return said
    except (RuntimeError, ValueError):
        return False


def _launchers_store() -> dist.Store | None:
    """torchrun's store, for a word before the processes have met; None without one."""
    if hosted_by_rank_0():
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    within = timedelta(seconds=_TELL_WITHIN_SECONDS)
    return dist.PrefixStore("amp_recipes", dist.TCPStore(host, port, timeout=within, wait_for_workers=False))


def _write_error_file(message: str, stack: str, consequence: bool) -> None:
    """Leave the error where torchrun looks for it, in the form that `record` of its own would give it.

    torchrun calls the earliest, in whole seconds, the root cause: what followed from it is dated a little later.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    extra: Mapping[str, str] = {"py_callstack": stack, "timestamp": str(int(time.time()) + 10 * consequence)}
    with contextlib.suppress(OSError):
        # torchrun cannot read half of one, and sends SIGTERM to the others as soon as one rank has failed.
        whole = Path(f"{file}.part")
        whole.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
        whole.replace(file)


def _print(rank: int, text: str) -> None:
    """Write lines to standard error, each with the rank, in one piece so that those of two ranks do not mix."""
    lines = "".join(f"[rank {rank}] {line}\n" for line in text.rstrip().splitlines())
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(lines)
        sys.stderr.flush()


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _on_this_machine(rank: int, world_size: int) -> set[int]:
    """The ranks of this machine's other processes, as launchers number them."""
    local_rank, local_size = (int(os.environ.get(f"LOCAL_{name}", "0")) for name in ("RANK", "WORLD_SIZE"))
    first = rank - local_rank
    return set(range(max(first, 0), min(first + local_size, world_size))) - {rank}


def _machine() -> str:
    """Names what has one set of process numbers: a machine, or a container with its own."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
