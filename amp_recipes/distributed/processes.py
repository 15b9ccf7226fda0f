"""Starts and ends the group of processes; tells a process its rank and its device."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from amp_recipes.distributed import failures
from amp_recipes.distributed.rendezvous import SignOfLife, check_environment, launched, meet, minutes_text
from amp_recipes.distributed.torch_private import default_group, default_store
from amp_recipes.errors import ConfigError, ProcessError

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_MINUTES = 10.0

_timeout_minutes = DEFAULT_TIMEOUT_MINUTES
_tensor_parallel = 1
_store: dist.Store | None = None  # of this start of the run
_host_groups: dict[dist.ProcessGroup, dist.ProcessGroup | None] = {}  # by the default group that it belongs to
_groups_of_one: dict[dist.ProcessGroup, dist.ProcessGroup] = {}  # likewise
_smallest_group = 2  # that counts as several processes
_turns = 0  # of main_process_first and at_own_pace
_own_rank: int | None = None  # while this process is alone


def pick_device(name: str | None) -> torch.device:
    """The device named, or this machine's accelerator (the local rank's one) where there is any, else the CPU.

    Raises ConfigError for one that cannot be used here, or that several processes would have to share.
    """
    if name is not None:
        device = torch.device(name)
    elif torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
    else:
        device = torch.device("cpu")
    if device.type != "cpu" and launched():
        device = _of_local_rank(device)
    try:
        torch.empty(0, device=device)
        _make_current(device)
    except (RuntimeError, AssertionError) as error:
        found = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "no accelerator"
        raise ConfigError(
            f"device '{name}' cannot be used here ({str(error).splitlines()[0]}). This machine has {found}; give "
            "--device cpu, or leave it out to use the fastest device."
        ) from None
    return device


def _make_current(device: torch.device) -> None:
    """Make torch use this device where none is named, also for streams and events."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and device.type == accelerator.type and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def _of_local_rank(device: torch.device) -> torch.device:
    """The device of this type that is this process's own. Raises ConfigError where there are not enough."""
    processes, count = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.accelerator.device_count()
    if device.index is not None:
        if processes > 1:
            raise ConfigError(
                f"device '{device}' is a single device, but {processes} processes run on this machine. Give --device "
                f"{device.type}, or leave it out: each process then uses the device of its local rank."
            )
        return device
    if count == 0:
        return device  # what it is refused with says more
    if local_rank() >= count:
        raise ConfigError(
            f"rank {rank()} is process {local_rank()} of this machine (LOCAL_RANK, counted from 0), but this process "
            f"sees only {count} {device.type} device{'' if count == 1 else 's'}, and each process needs its own. "
            f"Start at most {count} on a machine (torchrun --nproc_per_node), or let each process see all devices "
            "(CUDA_VISIBLE_DEVICES hides some, and so does Slurm's --gpus-per-task). Where each process sees only "
            "its own device, set LOCAL_RANK=0 for every process."
        )
    return torch.device(device.type, local_rank())


def initialized() -> bool:
    """Whether a process group of more than one process is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() >= _smallest_group


def treat_one_as_many() -> None:
    """Make a group of one process count as several: to try that way with one device."""
    global _smallest_group
    _smallest_group = 1


def rank() -> int:
    """This process's number among all; 0 where there is one process."""
    if _own_rank is not None:
        return _own_rank
    return dist.get_rank() if initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if initialized() else 1


def local_rank() -> int:
    """This process's number among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def data_rank() -> int:
    """Return the number of this process's part of the data: processes that share each layer read the same part."""
    return rank() // _tensor_parallel


def data_world_size() -> int:
    """In how many parts the data goes."""
    return world_size() // _tensor_parallel


def is_main_process() -> bool:
    """Whether this process writes files and draws progress bars."""
    return rank() == 0


def start(
    device: torch.device,
    backend: str | None = None,
    timeout_minutes: float = DEFAULT_TIMEOUT_MINUTES,
    tensor_parallel: int = 1,
) -> None:
    """Join the process group that torchrun's environment describes; one that is up already is used as it is.

    backend: default gloo for numbers of the host and, beside it, what fits the device: cpu:gloo,cuda:nccl.
    timeout_minutes: how long to wait for the others, here and in every collective. tensor_parallel: how many neighbours
    share each layer, and so the data.
    Raises ConfigError if the environment is not complete, or the number of processes is no multiple of
    tensor_parallel; ProcessError if the others cannot be reached.
    """
    global _timeout_minutes, _tensor_parallel
    if not dist.is_initialized():
        check_environment()
    if launched() and not dist.is_initialized():
        _timeout_minutes = timeout_minutes
        store = _meet()
        failures.set_timeout(timeout_minutes)
        excepthook = sys.excepthook
        with failures.collective("joining the process group"):
            dist.init_process_group(
                backend or _backend(device),
                store=dist.PrefixStore("group", store),
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                timeout=timedelta(minutes=timeout_minutes),
            )
        sys.excepthook = excepthook  # torch's own would put the rank before each line a second time
        logger.info("%s", _description(device))
    if world_size() % tensor_parallel:
        raise ConfigError(
            f"tensor_parallel={tensor_parallel} needs a multiple of {tensor_parallel} processes, but there are "
            f"{world_size()}. Start such a number with torchrun, or change --tensor_parallel."
        )
    _tensor_parallel = tensor_parallel


def _backend(device: torch.device) -> str:
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device.type)}"


def _description(device: torch.device) -> str:
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    again = f"; restart {restarts} of {os.environ.get('TORCHELASTIC_MAX_RESTARTS', '?')}" if restarts else ""
    return (
        f"{world_size()} processes, this one on {socket.gethostname()} with {device}; {dist.get_backend_config()}; a "
        f"wait ends after {minutes_text(_timeout_minutes)}{again}"
    )


def _meet() -> dist.Store:
    """The store of this start of the run; with it begins the watch for failures, and an orderly end is prepared."""
    global _store
    if _store is None:
        failures.show_ranks_in_errors()
        _store = meet(_timeout_minutes)
        failures.start_watch(_store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _timeout_minutes)
        atexit.register(_end, os.getpid())
        if int(os.environ["RANK"]) != 0:
            _log_errors_only()
    return _store


def _log_errors_only() -> None:
    """What rank 0 says too is not said again by the others."""
    logging.getLogger("amp_recipes").setLevel(logging.ERROR)
    if logging.lastResort is not None:  # what prints a recipe's warnings where no logging is set up
        logging.lastResort.setLevel(logging.ERROR)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def _end(pid: int) -> None:
    """Leave the others in order where the script has ended, and at once where an error ends it.

    Not through the interpreter's end in the second case: a thread of gloo's that lets go of a tensor there aborts the
    process (torch pull request 179291), and NCCL would wait for those that are gone.
    """
    if os.getpid() != pid:  # forked
        return
    code = failures.exit_code()
    if code is not None:
        failures.stay_to_be_heard()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    watch = failures.current_watch()
    watch.say_done()
    _host_groups.clear()
    _groups_of_one.clear()
    gc.collect()
    # gloo's threads release the last tensors now, while the interpreter runs: they need it for that.
    time.sleep(0.02)
    if dist.is_initialized():
        with suppress(RuntimeError):
            dist.destroy_process_group()
    watch.stop()


def host_group() -> dist.ProcessGroup | None:
    """The group for tensors of the CPU: None, the default one, where it takes them; else one of gloo's beside it.

    The first call is one that all ranks make together.
    """
    default = dist.group.WORLD
    if default not in _host_groups:
        takes_cpu = "cpu:" in dist.get_backend_config()
        timeout = timedelta(minutes=_timeout_minutes)
        _host_groups[default] = None if takes_cpu else dist.new_group(backend="gloo", timeout=timeout)
    return _host_groups[default]


@contextmanager
def main_process_first(each_machine: bool = False) -> Iterator[None]:
    """Let the main process run the block first, and the others after it: for data that only one should prepare.

    each_machine: let the first process of each machine go first, where machines share no files. How long it takes does
    not matter; those that wait give up when the first shows no sign of life for distributed_timeout_minutes (10 before
    the run options are known). Every process must come here, and as many times. With one process nothing happens.
    Raises ProcessError in the others if the first one leaves by an exception.
    """
    global _turns
    if not (initialized() or launched()):
        yield
        return
    _turns += 1
    leads = local_rank() == 0 if each_machine else rank() == 0
    leader = f"machine {os.environ.get('GROUP_RANK', '0')}" if each_machine else "all"
    store = dist.PrefixStore(f"first/{_turns}/{leader}", _any_store())
    if leads:
        with SignOfLife(store, "alive"):
            try:
                yield
            except BaseException as error:
                store.set("over", f"rank {rank()} failed there: {type(error).__name__}: {error}")
                raise
        store.set("over", "")
        return
    problem = _wait_for_first(store)
    if problem:
        raise ProcessError(f"rank {rank()} waited in main_process_first, but {problem}")
    yield


def _any_store() -> dist.Store:
    """Return the store that the processes share, even if the recipe made their group."""
    if _store is None and dist.is_initialized():
        return dist.PrefixStore("amp_recipes", default_store())
    check_environment()
    return _meet()


def _wait_for_first(store: dist.Store) -> str:
    """Wait until the first process is through; what went wrong, if anything did."""
    with failures.collective("waiting in main_process_first"):
        if not _wait(store, lambda: store.check(["over"])):
            return f"the first process gave no sign of life for {minutes_text(_timeout_minutes)}"
        return store.get("over").decode()


def _wait(store: dist.Store, is_over: Callable[[], bool]) -> bool:
    """Wait until `is_over`; False if there is no sign of life for as long as a wait may take."""
    seen, since, pause = -1, time.monotonic(), 0.02
    while not is_over():
        count = store.add("alive", 0)
        if count != seen:
            seen, since = count, time.monotonic()
        elif time.monotonic() - since > _timeout_minutes * 60:
            return False
        time.sleep(pause)
        pause = min(1.0, pause * 1.5)
    return True


@contextmanager
def at_own_pace() -> Iterator[None]:
    """Let each process run the block for as long as it takes, and wait at its end for the others.

    As in `main_process_first`, only a process without a sign of life is given up. Raises ProcessError in the others if
    one leaves by an exception.
    """
    global _turns
    if not initialized():
        yield
        return
    _turns += 1
    store = dist.PrefixStore(f"pace/{_turns}", _any_store())
    with SignOfLife(store, "alive"):
        try:
            yield
        except BaseException as error:
            store.set("failed", f"rank {rank()} failed there: {type(error).__name__}: {error}")
            raise
    count = store.add("ended", 1)
    with failures.collective("waiting for work that each process does alone"):
        if count < world_size() and not _wait(store, lambda: _all_have_ended(store)):
            problem = f"another process gave no sign of life for {minutes_text(_timeout_minutes)}"
            raise ProcessError(f"rank {rank()} waited for the others, but {problem}")
    if store.check(["failed"]):
        raise ProcessError(f"rank {rank()} waited for the others, but {store.get('failed').decode()}")


def _all_have_ended(store: dist.Store) -> bool:
    return store.add("ended", 0) == world_size() or store.check(["failed"])


@contextmanager
def alone() -> Iterator[None]:
    """Inside this context, this process is the only one, for this package and for code that asks torch.distributed.

    Collectives of the default group do what they do in one process.
    """
    global _own_rank
    if not initialized():
        yield
        return
    world, _own_rank = dist.group.WORLD, rank()
    if world not in _groups_of_one:
        _groups_of_one[world] = dist.new_group([_own_rank], use_local_synchronization=True)
    try:
        with default_group(_groups_of_one[world]):
            yield
    finally:
        _own_rank = None
