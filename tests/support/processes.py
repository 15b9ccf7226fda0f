"""Runs a function in several processes that form a gloo group, as `torchrun` would, and gives what each returned."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from programs import DEADLINE_SECONDS, Program

_WORK = "import sys, processes; processes.work(*sys.argv[1:])"


def in_processes(
    function: Callable[..., Any], count: int, *args: Any, timeout_seconds: float = DEADLINE_SECONDS
) -> list[Any]:
    """What `function(rank, *args)` returned in each of `count` processes, by rank.

    function: at a module's top level, so that it can be found again; what it returns is pickled. Raises AssertionError
    with the traceback of each process that failed, or that had not ended after `timeout_seconds` (where it stood is
    then on stderr).
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "task").write_bytes(pickle.dumps((function, args, timeout_seconds)))
        modules = os.pathsep.join(filter(None, sys.path))
        programs = []
        for rank in range(count):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            variables = {name: str(value) for name, value in variables.items()}
            programs.append(Program("-c", _WORK, folder, env={**variables, "PYTHONPATH": modules}))
        deadline = time.monotonic() + timeout_seconds
        try:
            answers = [_answer(program, Path(folder) / str(rank), deadline) for rank, program in enumerate(programs)]
        finally:
            for program in programs:
                program.kill()  # one that is left: the test is ended from outside
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
    assert not failed, "\n".join(failed)
    return [result for _, result in answers]


def _answer(program: Program, path: Path, deadline: float) -> tuple[str | None, Any]:
    try:
        program.wait(max(0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        program.send_signal(signal.SIGUSR1)  # shows where it stands
        time.sleep(0.5)
        program.kill()
        program.wait()
        return "had not ended when its time was over", None
    if not path.exists():
        return f"ended without an answer (exit status {program.returncode})", None
    return pickle.loads(path.read_bytes())


def work(folder: str) -> NoReturn:
    """Be one of the processes."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    function, args, timeout_seconds = pickle.loads((Path(folder) / "task").read_bytes())
    torch.distributed.init_process_group(
        "gloo",
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        answer = pickle.dumps((None, function(rank, *args)))
    except BaseException:
        answer = pickle.dumps((traceback.format_exc(), None))
    (Path(folder) / str(rank)).write_bytes(answer)
    with contextlib.suppress(RuntimeError):  # another one has failed, and says so
        torch.distributed.monitored_barrier(timeout=timedelta(seconds=5))
    # Not through the interpreter's end: a gloo thread that then lets go of a tensor would abort the process.
    sys.stdout.flush()
    os._exit(0)


def in_a_child(action: Callable[[], object]) -> str:
    """What `action` returns, as text, or "Type: message" of the exception that it raises, from a forked process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            text = str(action())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as stream:
        text = stream.read()
    os.waitpid(pid, 0)
    return text
