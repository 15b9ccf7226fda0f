"""Reads the states of random generators as plain values, and restores them."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every global generator: Python's, NumPy's, torch's on the CPU and on the accelerators in use.

    device: where the run computes; accelerators, all of its type, are asked only if it is one of them, and only if they
    are in use already: asking would initialize them. Values are numbers, strings, tensors (uint8) and arrays, in dicts,
    lists and tuples.
    """
    state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    backend = _backend(device.type)
    if backend is not None and getattr(backend, "is_initialized", lambda: True)():
        state[device.type] = [backend.get_rng_state(each) for each in _devices(device.type, backend.device_count())]
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put every global generator where `random_state` found it.

    Accelerators that this machine does not have are left out, and those that the state does not know stay as they
    are; both are logged.
    """
    _set_python(random, state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    for kind in state.keys() - {"python", "numpy", "torch"}:
        _set_accelerators(kind, state[kind])


def set_apart(number: int) -> None:
    """Reseed every global generator from its next draw and `number`, so that processes draw different numbers.

    0: all stay as they are.
    """
    if number == 0:
        return
    drawn = int(torch.empty((), dtype=torch.int64).random_())
    seed = int.from_bytes(hashlib.blake2b(f"{drawn}/{number}".encode(), digest_size=8).digest(), "little")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _backend(device_type: str) -> Any:
    """`torch.cuda` and its like, of a type of device that has generators of its own; else None."""
    backend = None if device_type == "cpu" else getattr(torch, device_type, None)
    return backend if hasattr(backend, "get_rng_state") else None


def _devices(device_type: str, count: int) -> list[torch.device]:
    return [torch.device(device_type, index) for index in range(count)]


def _set_accelerators(kind: str, states: list[torch.Tensor]) -> None:
    backend = _backend(kind)
    there = backend.device_count() if backend is not None and backend.is_available() else 0
    if there != len(states):
        logger.warning(
            "the checkpoint has random generators of %d %s devices, but this machine has %d: random numbers on them "
            "may differ",
            len(states),
            kind,
            there,
        )
    for device, device_state in zip(_devices(kind, there), states, strict=False):
        backend.set_rng_state(device_state, device)


def torch_random_state(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's global generators that a step on `device` draws from; taken in microseconds.

    Python's and NumPy's take twenty times as long.
    """
    states = [torch.default_generator.get_state()]
    if device.type == "cpu":
        return states
    backend = _backend(device.type)
    if backend is not None:
        states.append(backend.get_rng_state(device))
    return states


class SharedRandomState:
    """The state of torch's generators before each batch of an evaluation: one copy for several of them.

    A copy is taken before each batch while the batches draw, and before every eighth once they do not.
    """

    _MOST = 8

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: list[torch.Tensor] = []
        self._interval, self._left, self._most = 1, 0, self._MOST

    def take(self) -> list[torch.Tensor] | None:
        """Return an earlier copy for one more batch; None if it is time for a new one."""
        if not self._left:
            return None
        self._left -= 1
        return self._states

    def copy(self, is_for_many: bool) -> list[torch.Tensor]:
        """Return a copy for the next batch; is_for_many: those after it may get it, too."""
        states, before = torch_random_state(self._device), self._states
        is_quiet = is_for_many and _are_equal(states, before)
        self._interval = min(2 * self._interval, self._most) if is_quiet else 1
        self._states, self._left = states, self._interval - 1
        return states

    def holds(self, states: list[torch.Tensor]) -> bool:
        """Whether the generators are still there; if not, each batch from now on gets a copy of its own."""
        if _are_equal(torch_random_state(self._device), states):
            return True
        self._most, self._left = 1, 0
        return False


def _are_equal(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(states) == len(others) and all(map(torch.equal, states, others))


def set_torch_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Restore what `torch_random_state` returned for the same device."""
    torch.default_generator.set_state(states[0])
    for state in states[1:]:
        _backend(device.type).set_rng_state(state, device)


def generator_state(generator: Any) -> Any:
    """The state of one of `GENERATORS`, as plain values, a tensor or arrays."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.getstate()


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each of the generators, by its name."""
    return {name: generator_state(generator) for name, generator in generators.items()}


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore a state that `generator_state` returned for a generator of the same kind."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        _set_python(generator, state)


def _set_python(generator: Any, state: Any) -> None:
    version, numbers, gauss = state  # a list where it went through JSON
    generator.setstate((version, tuple(numbers), gauss))
