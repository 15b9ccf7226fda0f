"""Runs torchrun with workers that are forks of it, which has imported torch already: a start takes 0.3 s instead of 8.

    python forked_torchrun.py --standalone --nproc_per_node=2 train.py ...

It is torch's own `torch.distributed.run`, with its agent, rendezvous and restarts. Only the interpreter that it would
start for each worker is a fork.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as handlers
import torch.distributed.fsdp  # noqa: F401 - what workers import, once here instead of in each
import torch.distributed.run as torchrun

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # started as a script, by its path
from python_server import end_program, run_program

POLL_SECONDS = 0.005


class ForkedInterpreter:
    """What `subprocess.Popen([python, "-u", script, ...], start_new_session=True)` is to torchrun.

    patience: bound on the seconds that torchrun waits for its end; output: a file for what it writes; note: told "fork"
    with its pid, and "exit" with its exit code.
    """

    def __init__(
        self,
        args: tuple[str, ...],
        env: dict[str, str],
        patience: float = float("inf"),
        output: Path | None = None,
        note: Callable[[str, int], object] = lambda kind, value: None,
    ) -> None:
        self.returncode: int | None = None
        self._patience, self._note = patience, note
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if output is not None:
                descriptor = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
                os.dup2(descriptor, 1)
                os.dup2(descriptor, 2)
            _be_interpreter(args[args.index("-u") + 1 :], env)
        self._note("fork", self.pid)

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self._note("exit", self.returncode)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        deadline = time.monotonic() + min(self._patience, float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return self.returncode


def run(arguments: list[str], start: Callable[[tuple[str, ...], dict[str, str]], object] = ForkedInterpreter) -> None:
    """torchrun in this process; start: makes a worker of a command and its variables."""
    handlers.SubprocessHandler._popen = lambda self, args, env: start(args, env)
    torchrun.main(arguments)


def _be_interpreter(argv: tuple[str, ...], env: dict[str, str]) -> NoReturn:
    """Run a script in this fork as a new interpreter would."""
    code = 70
    try:
        os.setsid()
        os.environ.clear()
        os.environ.update(env)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        atexit._clear()
        code = run_program(list(argv))
    finally:
        end_program(code)


if __name__ == "__main__":
    run(sys.argv[1:])
