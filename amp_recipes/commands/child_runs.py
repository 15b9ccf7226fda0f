"""Runs a recipe's script in a child process, forwards signals to it, and reports how it ended.

with ChildRuns() as children:
    ended = children.run([sys.executable, "train.py", "config.yaml"], output=folder / OUTPUT_FILE)
    if children.requested is not None: ...  # a signal asked this process to end; it ended the child
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from amp_recipes.files.folder_lock import lock_folder, unlock_folder
from amp_recipes.files.run_files import regular_only
from amp_recipes.interrupts import SIGNALS, is_default

OUTPUT_FILE = "output.txt"
"""Where the output of a run goes, in its folder."""
# Any of these signals ends this process, so the child gets one that ends it too, whatever its `save_signals` are.
_PASSED_ON = {signum: signal.SIGTERM for signum in SIGNALS} | {signal.SIGINT: signal.SIGINT}
_KEPT_BYTES = 1 << 20  # of the end of what a child has said


@dataclass(frozen=True)
class EndedChild:
    """The end of a child process.

    status: as subprocess has it, -n for signal n; said: the end of what it wrote into its file of output (or of
    errors, if they have one).
    """

    status: int
    seconds: float
    said: str = ""

    @property
    def last_lines(self) -> list[str]:
        """The lines of `said` as a terminal shows them, without empty ones: of a progress bar, its last state."""
        lines = [line.rstrip().rpartition("\r")[2] for line in self.said.split("\n")]
        return [line for line in lines if line.strip()]


class ChildRuns:
    """In the block, a signal that would end this process goes to the running child, and sets `requested`.

    The children are in sessions of their own: a Ctrl-C reaches each once, from here. Ignored signals and handlers of
    others stay as they are.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> ChildRuns:
        if threading.current_thread() is threading.main_thread():
            for signum in filter(is_default, _PASSED_ON):
                self._earlier[signum] = signal.signal(signum, self._pass_on)
        return self

    def __exit__(self, *_: Any) -> None:
        for signum, earlier in self._earlier.items():
            signal.signal(signum, earlier)

    def run(
        self,
        command: Sequence[str],
        output: Path | None = None,
        errors: Path | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> EndedChild:
        """Start the command, and wait until it has ended.

        output: what it says is appended to this file (a pipe would be held open by loader workers that outlive it),
        and it has nothing to read; None: it says it where this process does, and reads what this process would. errors:
        a file for its standard error alone. folder: where it runs. Raises OSError if it cannot be started.
        """
        began = time.monotonic()
        with ExitStack() as files:
            stdout = None if output is None else files.enter_context(open(output, "ab", opener=regular_only))
            stderr = stdout if errors is None else files.enter_context(open(errors, "ab", opener=regular_only))
            start = stderr.tell() if stderr is not None else 0
            status = self._wait_for(
                subprocess.Popen(
                    list(command),
                    stdin=None if stdout is None else subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=folder,
                    start_new_session=True,
                )
            )
        said = errors or output
        return EndedChild(status, time.monotonic() - began, "" if said is None else _end_of(said, start))

    def _wait_for(self, child: subprocess.Popen[bytes]) -> int:
        self._child = child
        try:
            if self.requested is not None:  # it came while the process was started
                child.send_signal(_PASSED_ON[self.requested])
            return child.wait()
        except BaseException:
            child.terminate()
            child.wait()
            raise
        finally:
            self._child = None

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        self.requested = signal.Signals(signum)
        if self._child is not None:
            self._child.send_signal(_PASSED_ON[self.requested])


@contextmanager
def runs_in(folder: Path) -> Iterator[ChildRuns]:
    """Lock the folder for this process in the block. Raises FolderInUseError."""
    lock_folder(folder)
    try:
        with ChildRuns() as children:
            yield children
    finally:
        unlock_folder(folder)


def killed_by(status: int) -> str:
    """`killed by SIGKILL` for the exit status of a child that a signal ended; empty for others."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else ""


def _end_of(file: Path, start: int) -> str:
    """Return what was written to a file after `start`, at most the last part of it."""
    with open(file, "rb", opener=regular_only) as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(start, size - _KEPT_BYTES))
        return stream.read().decode("utf-8", errors="replace")
