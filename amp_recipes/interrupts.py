"""Handles signals as requests: the current step is finished and saved; then the process ends, or continues."""

from __future__ import annotations

import _thread
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

# A closed terminal, Ctrl-\, what schedulers warn with, a limit of processor time: by default each kills the process.
SAVE_SIGNALS = ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""The signals that the option `save_signals` accepts."""
SIGNALS = tuple(signal.Signals[name] for name in ("SIGTERM", "SIGINT", *SAVE_SIGNALS))
"""The signals that ask a run to save."""
# Terminals and launchers may deliver one Ctrl-C twice (to the group, and passed on): that is no second wish.
_SECOND_AFTER_SECONDS = 1.0
_LOG_WITHIN_SECONDS = 1.0


class RunInterrupted(SystemExit):
    """A signal ended the run; `code` is 128 plus the signal's number, as a shell has it (143, 130)."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(128 + signum)
        self.message = message
        self.signum = signum

    def __str__(self) -> str:
        return self.message


class Interrupts:
    """Inside this context, signals only set `requested`; the loop reads it, saves and calls `leave`.

    save_signals: names of those that set `save_requested` instead, after which the loop saves and continues.
    It works only in the main thread, and only for signals with Python's default action: ignored signals stay ignored,
    and a recipe keeps its own handlers. So a nested one does nothing. A forked process has the default actions again.
    A second SIGINT, a second or more after the first, raises KeyboardInterrupt at once, except inside `saving()`. A
    request that the loop has not read ends the process at the end of the block.

    requested, save_requested: the signal's number; None while there is none.
    """

    _saves = 0  # of all objects together: the one that has the handlers need not be the one that saves

    def __init__(self, save_signals: Iterable[str] = ()) -> None:
        self.requested: int | None = None
        self.save_requested: int | None = None
        self._saves_at = {signum for signum in SIGNALS if signum.name in save_signals}
        self._depth = 0
        self._earlier: dict[int, Any] = {}
        self._first_sigint: float | None = None
        self._leaves = False

    def __enter__(self) -> Interrupts:
        self._depth += 1
        if self._depth == 1:
            self.requested = self.save_requested = self._first_sigint = None
            self._leaves = False
            self._install()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        self._restore()
        if self.save_requested is not None:
            logger.warning("%s: there was nothing left to save", signal.Signals(self.save_requested).name)
        if self.requested is not None and kind is None:
            self.leave("ends here")

    def __reduce__(self) -> tuple[Any, ...]:
        return Interrupts, ([signum.name for signum in self._saves_at],)  # a copy has caught nothing

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Inside this context, no signal interrupts: a second SIGINT is recorded like the first."""
        Interrupts._saves += 1
        try:
            yield
        finally:
            Interrupts._saves -= 1

    def leave(self, message: str) -> NoReturn:
        """End the process, as the signal asked; `message` says what was saved.

        Raises RunInterrupted, or KeyboardInterrupt for a SIGINT in an interactive session, which continues.
        """
        signum = signal.SIGTERM if self.requested is None else self.requested
        text = f"{signal.Signals(signum).name}: {message}"
        _wait_for_log()
        logger.warning("%s", text)
        if signum == signal.SIGINT and (sys.flags.interactive or hasattr(sys, "ps1")):
            raise KeyboardInterrupt(text)
        # torchrun sends a second SIGTERM as soon as one of several processes has ended: each keeps its exit code.
        self._leaves = int(os.environ.get("WORLD_SIZE", "1")) > 1
        ended = self._depth == 0 and threading.current_thread() is threading.main_thread()
        if self._leaves and ended and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise RunInterrupted(text, signum)

    def _install(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in SIGNALS:
            if is_default(signum):
                self._earlier[signum] = signal.signal(signum, self._note)
        if self._earlier:
            _installed.append(self)

    def _restore(self) -> None:
        for signum, earlier in self._earlier.items():
            if signal.getsignal(signum) == self._note:  # not one that the recipe has set since
                ignored = self._leaves and signum == signal.SIGTERM
                signal.signal(signum, signal.SIG_IGN if ignored else earlier)
        self._earlier.clear()
        if self in _installed:
            _installed.remove(self)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """The handler. It runs between any two instructions of the main thread, so it takes no lock."""
        if signum in self._saves_at:
            self.save_requested = signum
            return
        first = self.requested is None
        if first:
            self.requested = signum
        told = f"{signal.Signals(signum).name}: finishing the step, saving, then exiting"
        if signum == signal.SIGINT:
            now = time.monotonic()
            if self._first_sigint is None:
                self._first_sigint = now
                _log(f"{told}; press Ctrl-C again to exit at once")
            elif now - self._first_sigint >= _SECOND_AFTER_SECONDS and not self._saves:
                raise KeyboardInterrupt("a second SIGINT")
        elif first:
            _log(told)


_installed: list[Interrupts] = []
_unsaid: list[_thread.LockType] = []  # a lock for each line that a thread logs, free when it is done


def is_default(signum: int) -> bool:
    """Whether the signal has Python's default action: it is not ignored, and has no handler."""
    handler = signal.getsignal(signum)
    # Python does not know of the handlers of C libraries, nor of those of faulthandler.
    return handler is signal.default_int_handler or (handler == signal.SIG_DFL and not _getsig(signum))


_getsig = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)(("PyOS_getsig", ctypes.pythonapi))


def _log(text: str) -> None:
    """Log from a thread: the handler may stand inside a write to the same stream, which cannot be entered twice.

    `threading.Thread` would wait for locks that the interrupted code may hold.
    """
    unsaid = _thread.allocate_lock()
    unsaid.acquire()
    _unsaid.append(unsaid)
    try:
        _thread.start_new_thread(_say, (text, unsaid))
    except RuntimeError:  # no more threads at the interpreter's end
        unsaid.release()


def _say(text: str, unsaid: _thread.LockType) -> None:
    try:
        logger.warning("%s", text)
    finally:
        unsaid.release()


def _wait_for_log() -> None:
    """Until the handler's lines are in the log: the process may end right after this."""
    while _unsaid:
        _unsaid.pop().acquire(timeout=_LOG_WITHIN_SECONDS)


def _default_in_child() -> None:
    """A forked process (a loader's worker, a recipe's own) is to end at a SIGTERM, not to note it."""
    for interrupts in reversed(_installed):
        interrupts._restore()
    _unsaid.clear()  # the threads are the parent's


os.register_at_fork(after_in_child=_default_in_child)
