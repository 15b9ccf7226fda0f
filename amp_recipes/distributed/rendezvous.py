"""Connects the processes of a run: in a store of keys that all of them reach, empty at each start of the run."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from amp_recipes.errors import ConfigError, ProcessError, listed

_ASK_AGAIN_SECONDS = 0.05
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Variables that other launchers set for several processes, and their names for those of torch.
_OTHER_LAUNCHERS = (
    ("srun", "SLURM_STEP_NUM_TASKS", "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID"),
    (
        "mpirun",
        "OMPI_COMM_WORLD_SIZE",
        "RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK",
    ),
)


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def hosted_by_rank_0() -> bool:
    """Whether the store lives in rank 0's process; otherwise it lives in torchrun's."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def check_environment() -> None:
    """Raise ConfigError where a launcher started several processes, but not with what torchrun gives each of them."""
    if "WORLD_SIZE" not in os.environ:
        for launcher, count, names in _OTHER_LAUNCHERS:
            if int(os.environ.get(count, "1")) > 1:
                raise ConfigError(
                    f"WORLD_SIZE is not set, but {launcher} started {os.environ[count]} processes ({count}): each of "
                    "them would train alone, in the same folder. Start one torchrun on each machine, which starts the "
                    "processes (https://amp-recipes.github.io/amp_recipes/how_to/launch.html), or set "
                    f"{names}, MASTER_ADDR and MASTER_PORT for each. "
                    "If each process should train alone, set WORLD_SIZE=1."
                )
    missing = [name for name in _NEEDED if launched() and not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set. A launcher such as "
            "torchrun gives each process RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT. Start the script with torchrun, or unset WORLD_SIZE to train in one process."
        )


def meet(timeout_minutes: float) -> dist.Store:
    """Wait until all processes of the run have joined, and return the store of this start of the run.

    torchrun keeps one store over restarts, in which the keys of dead processes remain (torch issue 135712;
    `init_process_group` would try to reach those). So rank 0 makes a name for this start, and sends it to the present
    processes: each asks for it with a new random word.
    Raises ProcessError that names the ranks that did not join in time.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    deadline = time.monotonic() + timeout_minutes * 60
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timedelta(minutes=timeout_minutes)))
        store = dist.PrefixStore("amp_recipes", store)
        name = _gather(store, world_size, deadline) if rank == 0 else _find(store, rank, deadline)
    except (RuntimeError, ValueError) as error:  # torch's own errors of stores are RuntimeErrors
        if isinstance(error, ProcessError):
            raise
        raise ProcessError(_cannot_meet(str(error).splitlines()[0], timeout_minutes)) from error
    if name is None:
        who = f"rank {rank} got no answer from rank 0"
        raise ProcessError(_cannot_meet(who, timeout_minutes))
    return dist.PrefixStore(name, store)


def _gather(store: dist.Store, world_size: int, deadline: float) -> str:
    """Rank 0's part: give each that asks the name of this start, until all have said that they have it."""
    name = uuid.uuid4().hex
    answered: dict[int, bytes] = {}
    missing = set(range(1, world_size))
    while missing:
        for rank in sorted(missing):
            if store.check([f"{name}/has/{rank}"]):
                missing.discard(rank)
            elif store.check([f"asks/{rank}"]):
                word = store.get(f"asks/{rank}")
                if answered.get(rank) != word:  # it may be that of a process that is dead by now
                    store.set(f"answer/{word.decode()}", name)
                    answered[rank] = word
        if missing and time.monotonic() > deadline:
            raise ProcessError(_cannot_meet(f"{ranks_text(missing)} of {world_size} did not join"))
        if missing:
            time.sleep(_ASK_AGAIN_SECONDS)
    return name


def _find(store: dist.Store, rank: int, deadline: float) -> str | None:
    """The part of all others: ask rank 0 for the name of this start. None if there is no answer in time."""
    word = uuid.uuid4().hex
    store.set(f"asks/{rank}", word)
    while not store.check([f"answer/{word}"]):
        if time.monotonic() > deadline:
            return None
        time.sleep(_ASK_AGAIN_SECONDS)
    name = store.get(f"answer/{word}").decode()
    store.set(f"{name}/has/{rank}", "")
    return name


def ranks_text(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 3, 5, 8`; of many, the first eight."""
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {listed(numbers, most=8)}"


def _cannot_meet(why: str, timeout_minutes: float | None = None) -> str:
    waited = "" if timeout_minutes is None else f" within {minutes_text(timeout_minutes)}"
    environment = os.environ
    return (
        f"rank {environment['RANK']} of {environment['WORLD_SIZE']} could not join the others at MASTER_ADDR="
        f"{environment['MASTER_ADDR']} MASTER_PORT={environment['MASTER_PORT']}{waited} "
        f"(distributed_timeout_minutes): {why}. Check what the missing ranks have printed. Check that MASTER_ADDR is "
        "the machine of rank 0 and can be reached from all machines (firewall, name, a port that no other run uses). "
        "Check that every machine was started, with the same total number of processes."
    )


def minutes_text(minutes: float) -> str:
    """`10 minutes`, `1 minute`, `3 seconds`."""
    number, unit = (minutes, "minute") if minutes >= 1 else (minutes * 60, "second")
    return f"{number:g} {unit}{'' if number == 1 else 's'}"


class SignOfLife:
    """Inside this context, a thread increments a key every second or two, so that waiting ranks see it is alive."""

    _SECONDS = 1.0

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key = store.clone(), key
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, name="amp_recipes sign of life", daemon=True)

    def __enter__(self) -> SignOfLife:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=5)

    def _count(self) -> None:
        while not self._over.wait(self._SECONDS):
            try:
                self._store.add(self._key, 1)
            except RuntimeError:  # the store has ended; waiting processes see that too
                return
