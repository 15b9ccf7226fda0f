"""Exchanges data between the processes of a run that save or load one checkpoint together.

They talk over a gloo group of their own, so that a save in the background cannot come between training's collectives;
each process uses it from one thread at a time, since whoever saves or loads first waits for its own background.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from amp_recipes import distributed
from amp_recipes.checkpoint.folder import Damaged
from amp_recipes.distributed.torch_private import timeout_of
from amp_recipes.errors import CheckpointError, ConfigError

# The first of them is raised if processes meet different ones.
_KINDS: tuple[type[Exception], ...] = (ConfigError, CheckpointError, Damaged)


class NoAnswer(CheckpointError):
    """Another process has ended, or did not come."""


class CheckpointGroup:
    """The processes that save and load together. A process that does not answer causes a CheckpointError.

    group: None, where there is one process: every method is then done at once.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank()
        self.count = 1 if group is None else dist.get_world_size()

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is not sharded, and decides."""
        return self.rank == 0

    def to_main(self, value: Any) -> list[Any]:
        """On the main process what every process gave, by rank; nothing on the others."""
        if self._group is None:
            return [value]
        found = [None] * self.count if self.is_main else None
        self._communicate(lambda: dist.gather_object(value, found, dst=0, group=self._group))
        return found or []

    def from_main(self, value: Any = None) -> Any:
        """Return the value that the main process passed."""
        if self._group is None:
            return value
        box = [value]
        self._communicate(lambda: dist.broadcast_object_list(box, src=0, group=self._group))
        return box[0]

    def of_all(self, value: Any) -> list[Any]:
        """Return the values of all processes, by rank."""
        if self._group is None:
            return [value]
        found = [None] * self.count
        self._communicate(lambda: dist.all_gather_object(found, value, group=self._group))
        return found

    def meet(self, what: str) -> None:
        """Wait until all processes are here to do the same. Raises CheckpointError on all if they are not."""
        came = self.of_all(what)
        if len(set(came)) > 1:
            listed = ", ".join(f"rank {rank} wants to {what}" for rank, what in enumerate(came))
            raise CheckpointError(f"Ranks disagree: {listed}. All ranks must save, or load, a checkpoint together.")

    def all_do(self, job: Callable[[], Any]) -> Any:
        """Run `job` on every process and return its result. Errors are raised on all, a CheckpointError first."""
        if self._group is None:
            return job()
        done, error = _tried(job)
        met = self.of_all(None if error is None else _as_text(error))
        bad = [(told[0], rank, told) for rank, told in enumerate(met) if told is not None]
        if bad:
            _, rank, told = min(bad)
            raise error if rank == self.rank else _error_from(told, "" if rank == 0 else f"rank {rank}: ")
        return done

    def on_main(self, job: Callable[[], Any]) -> Any:
        """Run `job` on the main process only, and return its result on all; its error is raised on all."""
        done, error = _tried(job) if self.is_main else (None, None)
        done, told = self.from_main((done, None if error is None else _as_text(error)))
        if told is not None:
            raise error or _error_from(told)
        return done

    def _communicate(self, act: Callable[[], object]) -> None:
        try:
            act()
        except RuntimeError as error:
            raise _no_answer(error) from error


ALONE = CheckpointGroup()

_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the processes' group -> ours beside it


def checkpoint_group() -> CheckpointGroup:
    """All processes of the run. Where there are several, all of them must come here; the first time makes the group."""
    if not distributed.initialized():
        return ALONE
    world = dist.group.WORLD
    if world not in _groups:
        try:
            _groups[world] = dist.new_group(backend="gloo", timeout=_timeout())
        except RuntimeError as error:
            raise _no_answer(error) from error
    return CheckpointGroup(_groups[world])


def _timeout() -> timedelta:
    """Return the time for which the processes of the run wait for each other."""
    # The default of new_group is torch's, not that of the processes' group.
    return timeout_of(distributed.host_group() or dist.group.WORLD)


def _tried(job: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return job(), None
    except Exception as error:
        return None, error


def _as_text(error: Exception) -> tuple[int, str]:
    """Return an error as data that can be sent to the other processes."""
    index = next((index for index, kind in enumerate(_KINDS) if isinstance(error, kind)), None)
    return (1, f"{type(error).__name__}: {error}") if index is None else (index, str(error))


def _error_from(told: tuple[int, str], before: str = "") -> Exception:
    return _KINDS[told[0]](before + told[1])


def _no_answer(error: RuntimeError) -> NoAnswer:
    return NoAnswer(
        f"The other processes did not answer ({str(error).partition(chr(10))[0]}). Either one of them has ended, or "
        "not all of them came here. With several processes, every rank must call the functions that save or load a "
        "checkpoint, so do not call them under `if is_main_process()`. Only rank 0 writes what is not sharded. The "
        "processes wait for each other for distributed_timeout_minutes."
    )
