"""Forks Python programs from one interpreter that has imported torch already: a start takes 20 ms instead of 4 s.

`python python_server.py DESCRIPTOR`, started by `programs.py`. A request is a JSON object with four file descriptors:
the program's stdin, stdout and stderr, and a pipe that is told the program's pid, then how it ended. The server ends,
and kills what it started, when the other end of its socket is closed.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

# What programs import. torch imports `_dynamo` at the first optimizer, and setuptools must come before distutils.
PRELOADED = [
    "setuptools",
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "numpy",
    "hyperpyyaml",
    "pytest",
    "sklearn.datasets",
    "amp_recipes",
    "amp_recipes.brain",
    "amp_recipes.distributed",
]
REQUEST_BYTES = 1 << 18
_PATH = sys.path[1:]  # without this file's folder, which stands first


def serve(requests: socket.socket) -> None:
    """Start programs, and tell how they ended, until the other end of the socket is closed."""
    for name in PRELOADED:
        with suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    if os.environ.get("AMP_RECIPES_TEST_DEVICE", "").startswith("simulated"):
        sys.path.append(str(Path(__file__).parents[1] / "simulated_device"))
        importlib.import_module("simulated").load()
    gc.collect()
    gc.freeze()  # a collection in a program would otherwise copy the pages that it shares with this process
    running: dict[int, tuple[int, int]] = {}  # pidfd -> (pid, pipe)
    while True:
        ready, _, _ = select.select([requests, *running], [], [])
        for pidfd in set(ready) & set(running):
            pid, pipe = running.pop(pidfd)
            os.close(pidfd)
            _, status, usage = os.wait4(pid, 0)
            _tell(pipe, {"status": status, "processor_seconds": usage.ru_utime + usage.ru_stime})
            os.close(pipe)
        if requests in ready:
            text, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 4)
            if not text:
                break
            pid, pipe = _start(json.loads(text), descriptors)
            running[os.pidfd_open(pid)] = pid, pipe
    for pid, _ in running.values():
        os.kill(pid, signal.SIGKILL)


def _start(request: dict[str, Any], descriptors: list[int]) -> tuple[int, int]:
    *streams, pipe = descriptors
    pid = os.fork()
    if pid == 0:
        _become(request, streams)
    for descriptor in streams:
        os.close(descriptor)
    _tell(pipe, {"pid": pid})
    return pid, pipe


def _tell(pipe: int, message: dict[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the test is over
        os.write(pipe, json.dumps(message).encode() + b"\n")


def _become(request: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be the program, as if the interpreter had been started for it; does not return."""
    code = 70
    try:
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        os.closerange(3, 1 << 12)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.enable(2)  # a program that hangs is asked by SIGABRT where it stands
        if request["new_session"]:
            os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        _open_streams(bool(os.environ.get("PYTHONUNBUFFERED")))
        _reseed()
        code = run_program(request["words"])
    finally:
        end_program(code)


def end_program(code: int) -> NoReturn:
    """What the interpreter does at its end: join threads, run exit functions, flush. Below 0, code is a signal."""
    for step in (threading._shutdown, atexit._run_exitfuncs):
        with suppress(BaseException):
            step()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = 120  # as the interpreter's
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _open_streams(unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr.reconfigure(line_buffering=True)


def _reseed() -> None:
    """A fresh interpreter seeds these from the system; torch's generator always begins with the same seed."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def run_program(words: list[str]) -> int:
    """Run `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...` as `__main__`, and return its exit code for `end_program`."""
    try:
        _run(words)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        try:
            _show(error)
        except SystemExit as end:  # Python, too, ends with what its excepthook asks for
            return int(end.code or 0)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(words: list[str]) -> None:
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    sys.orig_argv = [sys.executable, *words]
    added = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if words[0] == "-m":
        sys.argv = ["-m", *words[2:]]
        sys.path[:] = [os.getcwd(), *added, *_PATH]
        runpy._run_module_as_main(words[1])
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[:] = ["", *added, *_PATH]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = list(words)
        sys.path[:] = [str(Path(words[0]).resolve().parent), *added, *_PATH]
        main.__file__ = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), main.__dict__)


def _show(error: BaseException) -> None:
    """The traceback from the program's first line on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they close the socket
    serve(socket.socket(fileno=int(sys.argv[1])))
