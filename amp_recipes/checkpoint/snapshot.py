"""Copies the state of a running training to host memory, so that it can be written while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from amp_recipes.checkpoint.background import without_forks
from amp_recipes.checkpoint.state_format import PackedState
from amp_recipes.modules.devices import queues_work

logger = logging.getLogger(__name__)

# New memory is taken only if there is this much more of it free: training, its loader workers and the page cache
# of the file that is being written want some too.
_FREE_PER_NEEDED = 2

_Slot = tuple[str, str, bool]  # recoverable, name of the tensor in its file, whether in pinned memory


class Snapshot:
    """Copies of states in host memory, which is used again from one save to the next."""

    def __init__(self) -> None:
        self._buffers: dict[_Slot, Tensor] = {}
        self._reported = False

    def prepare(self, states: Mapping[str, PackedState]) -> None:
        """Allocate the pinned memory for copies of these states, if there is enough; `take` uses it later.

        Any thread may do it, one at a time.
        """
        pinned = {slot: tensor for slot, tensor in _by_slot(states).items() if slot[-1]}
        try:
            if not _lack_of_memory(sum(tensor.nbytes for tensor in pinned.values())):
                self._add_buffers(pinned)
        except Exception as error:  # this is no failed save: the first save will try again
            logger.info("could not allocate the memory for a copy of the state before the first save: %s", error)

    @torch.inference_mode(False)  # a buffer made inside it could not be written to outside
    @torch.no_grad()
    def take(self, states: Mapping[str, PackedState]) -> tuple[dict[str, PackedState], Callable[[], None]] | None:
        """The states with copies of their tensors, and what waits until the copies are there.

        From a device that queues its work the copies are queued behind the work so far, and the host does not wait.
        None, once with a warning in the log, if the host has not clearly enough free memory. A snapshot is good until
        the next is taken.
        """
        live = _by_slot(states)
        if not self._make_room(live):
            return None
        events = {tensor.device: None for tensor in live.values() if queues_work(tensor.device)}
        for slot, tensor in live.items():
            self._buffers[slot].copy_(tensor, non_blocking=tensor.device in events)
        for device in events:
            events[device] = torch.Event(device)
            events[device].record(torch.accelerator.current_stream(device))

        def wait() -> None:
            for event in events.values():
                event.synchronize()

        copies = {
            name: replace(
                state, tensors={key: self._buffers[_slot(name, key, live)] for key, live in state.tensors.items()}
            )
            for name, state in states.items()
        }
        return copies, wait

    def _make_room(self, live: Mapping[_Slot, Tensor]) -> bool:
        """Keep exactly one buffer of the right shape for each tensor."""
        kept = self._buffers.items()
        self._buffers = {slot: buffer for slot, buffer in kept if slot in live and _fits(buffer, live[slot])}
        missing = {slot: live[slot] for slot in live if slot not in self._buffers}
        needed = sum(tensor.nbytes for tensor in missing.values())
        problem = _lack_of_memory(needed) or self._add_buffers(missing)
        return problem is None or self._tell(needed, problem)

    def _add_buffers(self, missing: Mapping[_Slot, Tensor]) -> str | None:
        try:
            for slot, tensor in missing.items():
                with without_forks():
                    self._buffers[slot] = torch.empty_like(tensor, device="cpu", pin_memory=slot[-1])
        except RuntimeError as error:  # torch's way to say that memory could not be had
            self._buffers.clear()
            return str(error).partition("\n")[0]
        return None

    def _tell(self, needed: int, why: str) -> bool:
        if not self._reported:
            logger.warning(
                "training waits while a checkpoint is written: a copy of the state in host memory needs %.0f MB, and "
                "twice as much must be free (%s)",
                needed / 1e6,
                why,
            )
        self._reported = True
        return False


def _lack_of_memory(needed: int) -> str | None:
    free = free_host_memory() if needed else None
    return f"{free / 1e6:.0f} MB free" if free is not None and needed * _FREE_PER_NEEDED > free else None


def _by_slot(states: Mapping[str, PackedState]) -> dict[_Slot, Tensor]:
    return {_slot(name, key, tensor): tensor for name, state in states.items() for key, tensor in state.tensors.items()}


def _slot(name: str, key: str, tensor: Tensor) -> _Slot:
    return name, key, queues_work(tensor.device)


def _fits(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def free_host_memory() -> int | None:
    """Bytes that this process may still take without others giving way; None where the system does not say."""
    found = [_available_in_machine(), *map(_available_in_group, _memory_groups())]
    return min((bytes_ for bytes_ in found if bytes_ is not None), default=None)


def _available_in_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _memory_groups() -> list[Path]:
    """The control groups (containers, batch jobs) that may bound this process's memory, from the inside out."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = Path("/sys/fs/cgroup", controllers)
            own = root / path.lstrip("/")
            groups += [own, *(parent for parent in own.parents if parent == root or root in parent.parents)]
    return groups


def _available_in_group(folder: Path) -> int | None:
    for limit_file, usage_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int((folder / limit_file).read_text())  # "max" is no number: no limit
            usage = int((folder / usage_file).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            return limit - usage + int(stat.get(cache, 0))
        except (OSError, ValueError):
            continue
    return None
