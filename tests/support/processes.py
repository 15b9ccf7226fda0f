"""Runs a function in several processes that form a gloo group, as `torchrun` would, and gives what each returned."""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

# A server that has imported torch once forks each process: starting one then takes 20 ms, not 4 s.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.fsdp", "torch.distributed.checkpoint", "amp_recipes"])


def in_processes(function: Callable[..., Any], count: int, *args: Any, timeout_seconds: float = 120) -> list[Any]:
    """What `function(rank, *args)` returned in each of `count` processes, by rank.

    function: at a module's top level, so that it can be found again; what it returns is pickled. Raises AssertionError
    with the traceback of each process that failed, or that had not ended after `timeout_seconds`.
    """
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_work, args=(function, rank, count, folder, timeout_seconds, theirs, args)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            found = [_answer(pipe, timeout_seconds) for pipe in pipes]
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
    failed = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(found) if text is not None]
    assert not failed, "\n".join(failed)
    return [result for _, result in found]


def _answer(pipe: connection.Connection, timeout_seconds: float) -> tuple[str | None, Any]:
    try:
        if not pipe.poll(timeout_seconds):
            return f"no answer after {timeout_seconds:g} s", None
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "ended without an answer", None


def _work(
    function: Callable[..., Any], rank: int, count: int, folder: str, timeout_seconds: float, pipe: Any, args: tuple
) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    torch.distributed.init_process_group(
        "gloo",
        init_method=(Path(folder) / "store").as_uri(),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        # Pickled here: the pipe's own way to send a tensor shares memory with a process that may have ended by then.
        pipe.send_bytes(pickle.dumps((None, function(rank, *args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps((traceback.format_exc(), None)))
    else:
        with contextlib.suppress(RuntimeError):  # another one has failed, and says so
            torch.distributed.barrier()
    # Not through the interpreter's end: a gloo thread that then lets go of a tensor would abort the process.
    os._exit(0)
