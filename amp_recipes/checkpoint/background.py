"""Runs jobs on a checkpoint folder in the background, one at a time; keeps an error until somebody waits."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

logger = logging.getLogger(__name__)

_forks = threading.RLock()  # held by a thread that forks, and by a thread while the process must not be forked


@contextmanager
def without_forks() -> Iterator[None]:
    """Inside this context, the process is not forked: a thread that wants to fork waits.

    A fork has the calling thread alone. What another one was just about to do for the first time, as torch's kernels
    look each other up, stays half done there for good, and a loader worker that needs it would wait for ever.
    """
    with _forks:
        yield


def _before_fork() -> None:
    _forks.acquire()


def _after_fork() -> None:
    with suppress(RuntimeError):  # a signal's handler raised in `acquire`, and Python forks all the same
        _forks.release()


def _forget_in_child() -> None:
    global _forks
    _forks = threading.RLock()  # the parent's may be held by a thread that is not here


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_forget_in_child)


class Background:
    """At most one job in a thread. Python's exit waits for it, as it does for every thread that is no daemon."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], object]) -> None:
        """Begin `job`; waits for the one before, and raises its error instead if it failed."""
        self.wait()
        claim = threading.Lock()  # the thread that has it does the job
        self._thread = threading.Thread(target=self._run, args=(job, claim), name="checkpoint")
        try:
            self._thread.start()
        except RuntimeError as error:
            if claim.acquire(blocking=False):  # not begun: the thread leaves the job to us, if it comes at all
                self._thread = None
                job()
            # Python has no new thread to give where the interpreter is ending, or has as many as it may have. Any other
            # error is of a signal's handler, which raises wherever it runs: torch's does, for a dead loader worker.
            if "new thread" not in str(error):
                raise

    def wait(self) -> None:
        """Return when nothing is under way; raises the error of the last job, once. Inside the job: returns at once."""
        error = self.take_error()
        if error is not None:
            raise error

    def take_error(self) -> BaseException | None:
        """Wait as `wait` does, but return the error instead of raising it."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return None
        thread.join()
        self._thread = None
        error, self._error = self._error, None
        return error

    def _run(self, job: Callable[[], object], claim: threading.Lock) -> None:
        if not claim.acquire(blocking=False):
            return
        try:
            job()
        except BaseException as error:
            # Told now, since the next save may be an hour away, or the run may end without one.
            logger.error("%s", error)
            self._error = error


_of_folder: weakref.WeakValueDictionary[str, Background] = weakref.WeakValueDictionary()


def background_of(folder: str | os.PathLike[str]) -> Background:
    """The one for that folder in this process, so that two checkpointers of one folder wait for each other."""
    return _of_folder.setdefault(os.path.realpath(folder), Background())
