"""Loads a simulated accelerator as torch.device("simulated"), and records where the host waits for it.

`load()` makes it the accelerator of the whole process: two devices, with streams, events, pinned memory and random
generators. Kernels run on the CPU. What a GPU does late is late here too: a copy to pinned memory with
`non_blocking=True` fills its target only when the stream, an event behind the copy, or the device is waited for; until
then the target is poison (0x7F bytes, 3.39e38 as float32). The device does nothing on its own, so a missing wait is
found every time; only `query()` says no once and yes the second time, so that a program that polls comes to an end.

    simulated.load()
    with simulated.waits() as found:
        for batch in found.steps(batches):
            train(batch)
    assert not found.of_this_step       # no step waited for its own work
    assert found.most_in_a_step <= 1    # and at most once for that of a step before

What the host may not do to pinned memory while a copy uses it is in `take_violations()`.

Not simulated: speed; kernels of two streams that touch the same memory without a wait between them; `record_stream`;
CUDA's own arithmetic (results are the CPU's); graphs, collectives, compilation. Unlike on CUDA, `module.to()` refuses
scripted modules, whose parameters torch cannot swap. `x[mask] = number` is taken for a fill, also if the number is on
the device, where CUDA waits.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import simulated_build
import torch

CannotBuild = simulated_build.CannotBuild

_extension: Any = None
_listeners: list[Waits] = []
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent / "simulated"))
_LINES = 4  # of the Python program that are kept of a wait, innermost first


@dataclass(frozen=True)
class Wait:
    """One wait of the host for a device.

    Everything that is queued has a number: kernels and copies, counted from 1 over all streams and devices. A wait is
    for all work of a stream up to such a number.
    """

    kind: str
    """What waited.

    "event", "stream", "device": a synchronize() of one. "copy": a copy that blocks, or one to memory that is not
    pinned. "item": a number was read. "data": an operator whose result has a size that depends on the data.
    """
    detail: str
    device: int
    stream: int  # -1: all of the device
    waited_for: int  # the number of the newest work that was waited for; 0: of nothing
    newest: int  # the number of the newest work of all, when the host began to wait
    already_done: bool  # somebody had waited for it before: the host went on at once
    step: int  # in which the host waited; 1 is the first, 0 is outside of all steps
    for_step: int  # in which the work that it waited for had been queued
    lines: tuple[str, ...]  # "file.py:12 in function", innermost first, without torch's own

    @property
    def queued_since(self) -> int:
        """How many kernels and copies had been queued behind what was waited for: work that the device still has."""
        return self.newest - self.waited_for

    def __str__(self) -> str:
        what = f"{self.kind} ({self.detail})" if self.detail else self.kind
        return f"{what}, for step {self.for_step} in step {self.step}, at {' < '.join(self.lines) or 'no Python line'}"


@dataclass
class Waits:
    """The waits of a `with waits()`, and the steps in which they were."""

    all: list[Wait] = field(default_factory=list)
    _step_began_at: list[int] = field(default_factory=list)
    _in_step: bool = False

    def start_step(self) -> None:
        """What is queued from now on belongs to the next step."""
        self._step_began_at.append(_extension.newest_sequence())
        self._in_step = True

    def end_steps(self) -> None:
        """From now on the host waits outside of all steps."""
        self._in_step = False

    def steps(self, batches: Iterable) -> Iterator:
        """The batches; each step starts when its batch is taken, and ends when the next one is asked for."""
        for batch in batches:
            self.start_step()
            yield batch
            self.end_steps()

    @property
    def stalls(self) -> list[Wait]:
        """The waits that were not over at once."""
        return [wait for wait in self.all if not wait.already_done]

    @property
    def of_this_step(self) -> list[Wait]:
        """The stalls for work of the step in which the host waited: the device runs empty."""
        return [wait for wait in self.stalls if wait.for_step == wait.step > 0]

    @property
    def of_earlier_steps(self) -> list[Wait]:
        """The stalls inside a step for work of an earlier one: the device meanwhile has what this step queued."""
        return [wait for wait in self.stalls if wait.for_step < wait.step]

    @property
    def most_in_a_step(self) -> int:
        """The largest number of stalls in a step."""
        counts = collections.Counter(wait.step for wait in self.stalls if wait.step > 0)
        return max(counts.values(), default=0)

    def __str__(self) -> str:
        return "\n".join(map(str, self.all)) or "no waits"

    def _heard(self, kind: str, detail: str, device: int, stream: int, waited_for: int, already_done: bool) -> None:
        for_step = sum(began < waited_for for began in self._step_began_at)
        step = len(self._step_began_at) if self._in_step else 0
        newest, lines = _extension.newest_sequence(), tuple(_program_lines())
        self.all.append(Wait(kind, detail, device, stream, waited_for, newest, already_done, step, for_step, lines))


@contextlib.contextmanager
def waits() -> Iterator[Waits]:
    """Records the waits of all threads; those of a backward's own thread have no Python lines."""
    found = Waits()
    _listeners.append(found)
    try:
        yield found
    finally:
        _listeners.remove(found)


def take_violations() -> list[str]:
    """What the host did to pinned memory while a copy used it, since the last call.

    A violation is found when the copy is waited for: synchronize the devices first.
    """
    return _extension.take_violations()


def finish() -> list[str]:
    """Let both devices finish, and make simulated:0 and the devices' first streams current; returns the violations."""
    for index in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(index)
        device_type = torch.accelerator.current_stream().device_type
        torch.accelerator.set_stream(torch.Stream(stream_id=0, device_index=index, device_type=device_type))
    torch.accelerator.set_device_index(0)
    return take_violations()


def pinned_stats() -> dict[str, int]:
    """What the program has pinned.

    `bytes` that it holds, `allocations` by this thread so far, blocks `freed_under_copy` that are kept for the copy.
    """
    return _extension.pinned_stats()


def newest_sequence() -> int:
    """How many kernels and copies have been queued in this process."""
    return _extension.newest_sequence()


def load() -> None:
    """Make the simulated device this process's accelerator; the second call does nothing.

    Raises CannotBuild where it cannot be built.
    """
    global _extension
    if _extension is not None:
        return
    _extension = simulated_build.load()
    _extension.connect(_tell_listeners, _caller)
    torch.utils.rename_privateuse1_backend("simulated")
    torch._register_device_module("simulated", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    # As on CUDA: of itself torch makes new parameters for a device of this kind, and unties those that are tied.
    torch.__future__.set_swap_module_params_on_conversion(True)


def _tell_listeners(*wait: Any) -> None:
    for listener in _listeners:
        listener._heard(*wait)


def _caller() -> str:
    return next(_program_lines(), "no Python line")


def _program_lines() -> Iterator[str]:
    frame: types.FrameType | None = sys._getframe()
    left = _LINES
    while frame is not None and left:
        code = frame.f_code
        if not code.co_filename.startswith(_HIDDEN):
            yield f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
            left -= 1
        frame = frame.f_back


def _device_module() -> types.ModuleType:
    """`torch.simulated`: what torch and programs look for in `torch.cuda`."""
    module = types.ModuleType("torch.simulated")
    accelerator = torch.accelerator
    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # where torch.utils.checkpoint asks whether there are draws to repeat
        _is_in_bad_fork=lambda: False,
        device_count=_extension.device_count,
        current_device=accelerator.current_device_index,
        set_device=accelerator.set_device_index,
        device=_Device,
        synchronize=accelerator.synchronize,
        current_stream=accelerator.current_stream,
        stream=lambda stream: stream,  # it is a context manager itself
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda *_, **__: True,
        memory_allocated=accelerator.memory_allocated,
        max_memory_allocated=accelerator.max_memory_allocated,
        reset_peak_memory_stats=accelerator.reset_peak_memory_stats,
        empty_cache=lambda: None,
        get_rng_state=lambda device=None: _generator(device).get_state(),
        set_rng_state=lambda state, device=None: _generator(device).set_state(state),
        get_rng_state_all=lambda: [generator.get_state() for generator in _generators()],
        set_rng_state_all=_set_rng_state_all,
        manual_seed=lambda seed: _generator(None).manual_seed(seed),
        manual_seed_all=lambda seed: [generator.manual_seed(seed) for generator in _generators()],
    )
    return module


class _Device(contextlib.ContextDecorator):
    """Makes a device the thread's current one, as torch.cuda.device."""

    def __init__(self, device: torch.device | str | int) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self.index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self.before)


def _index(device: torch.device | str | int | None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _generator(device: torch.device | str | int | None) -> torch.Generator:
    return _extension.default_generator(_index(device))


def _generators() -> list[torch.Generator]:
    return [_generator(index) for index in range(_extension.device_count())]


def _set_rng_state_all(states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(_generators(), states, strict=True):
        generator.set_state(state)
