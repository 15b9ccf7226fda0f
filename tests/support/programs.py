"""Starts Python programs for tests, each as a fork of one server that has imported torch already.

`run_python` and `Program` are `subprocess.run` and `subprocess.Popen` for `python WORDS`. What they do not have is a
fresh interpreter: a test of imports, of options of the interpreter (also as variables: PYTHONHASHSEED), or of variables
that libraries read when they are imported, starts `sys.executable` itself.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from repository import REPOSITORY

READ_BY_SERVER = ("PYTHONPATH", "PYTHONUNBUFFERED")
DEADLINE_SECONDS = 600  # of a program that hangs; none takes a tenth of it on an idle machine
_finished_processor_seconds = [0.0]


def run_python(
    *words: Any,
    cwd: str | Path | None = None,
    env: dict[str, str] | None = None,
    input: str | None = None,
    timeout_seconds: float = DEADLINE_SECONDS,
) -> subprocess.CompletedProcess:
    """Run `python *words` to its end, with what it wrote as text.

    env: added to this process's variables. Raises AssertionError with what the program wrote if it does not end in
    time.
    """
    program = Program(*words, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = program.communicate(input, timeout_seconds)
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGABRT)  # shows where each thread stands
        output, errors = program.communicate()
        raise AssertionError(f"{words} did not end within {timeout_seconds} s:\n{output}\n{errors}") from None
    finally:
        program.kill()  # also when the test is ended from outside
    return subprocess.CompletedProcess(words, program.returncode, output, errors)


def finished_processor_seconds() -> float:
    """The processor time of all programs that have ended, and of the processes that they waited for."""
    return _finished_processor_seconds[0]


class Program(subprocess.Popen):
    """`python *words`, under way; all arguments of subprocess.Popen that `_execute_child` below passes on.

    env: added to this process's variables, to which the repository is added as a place of modules.
    """

    def __init__(self, *words: Any, env: dict[str, str] | None = None, **options: Any) -> None:
        unread = [name for name in env or {} if name.startswith("PYTHON") and name not in READ_BY_SERVER]
        assert not unread, f"a forked program does not read {unread}: start sys.executable"
        if not os.path.isdir(options.get("cwd") or "."):
            raise FileNotFoundError(options["cwd"])
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **(env or {})}
        super().__init__([str(word) for word in words], env=variables, **{"text": True, **options})

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(subprocess.Popen._execute_child).bind(self, *arguments).arguments
        request = {
            "words": given["args"],
            "cwd": os.path.abspath(given["cwd"] or os.getcwd()),
            "env": given["env"],
            "new_session": given["start_new_session"],
        }
        ours = {"p2cread": 0, "c2pwrite": 1, "errwrite": 2}
        streams = [given[name] if given[name] >= 0 else number for name, number in ours.items()]
        self._messages, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(_server(), [json.dumps(request).encode()], [*streams, theirs.fileno()])
        theirs.close()
        self.pid = self._message()["pid"]
        self._child_created = True
        names = ["p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"]
        self._close_pipe_fds(*(given[name] for name in names))

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self.returncode if self.returncode is not None or not self._has_ended(0) else self._read_end()

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not self._has_ended(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout)
            self._read_end()
        return self.returncode

    def _has_ended(self, seconds: float | None) -> bool:
        return bool(select.select([self._messages], [], [], seconds)[0])

    def _message(self) -> dict[str, Any]:
        text = self._messages.recv(1 << 12)
        assert text, "the server of Python programs has ended"
        return json.loads(text)

    def _read_end(self) -> int:
        end = self._message()
        self._messages.close()
        _finished_processor_seconds[0] += end["processor_seconds"]
        self.returncode = os.waitstatus_to_exitcode(end["status"])
        return self.returncode


@functools.cache
def _server() -> socket.socket:
    """The socket of this process's server, which is started at the first use."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("python_server.py")), str(theirs.fileno())]
    with open(os.devnull) as nothing:
        process = subprocess.Popen(command, env=variables, pass_fds=[theirs.fileno()], stdin=nothing)
    theirs.close()
    ours.settimeout(DEADLINE_SECONDS)
    _server.process = process  # else its destructor warns that it still runs
    return ours
