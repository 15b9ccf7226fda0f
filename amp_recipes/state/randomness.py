"""Reads where random generators stand, as plain values, and puts them back there."""

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

    device: where the run computes; accelerators are asked only if it is one of them, and only if they are in use
    already: asking would initialize them. Values are numbers, strings, tensors (uint8) and arrays, in dicts, lists
    and tuples.
    """
    state = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False), "torch": torch.get_rng_state()}
    backend = None if device.type == "cpu" else getattr(torch, device.type, None)
    if not getattr(backend, "is_initialized", lambda: True)():
        return state
    if hasattr(backend, "get_rng_state_all"):
        state[device.type] = backend.get_rng_state_all()
    elif hasattr(backend, "get_rng_state"):
        state[device.type] = [backend.get_rng_state()]
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
    """Seed every global generator anew by what it would draw now and `number`, so that processes draw differently.

    0: all stay as they are.
    """
    if number == 0:
        return
    drawn = int(torch.empty((), dtype=torch.int64).random_())
    seed = int.from_bytes(hashlib.blake2b(f"{drawn}/{number}".encode(), digest_size=8).digest(), "little")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _set_accelerators(kind: str, states: list[torch.Tensor]) -> None:
    backend = getattr(torch, kind, None)
    there = backend.device_count() if backend is not None and backend.is_available() else 0
    if there != len(states):
        logger.warning(
            "the checkpoint has random generators of %d %s devices, but there are %d here: draws on them may differ",
            len(states),
            kind,
            there,
        )
    for index, device_state in enumerate(states[:there]):
        if hasattr(backend, "get_rng_state_all"):
            backend.set_rng_state(device_state, index)
        else:
            backend.set_rng_state(device_state)


def torch_random_state(device: torch.device) -> list[torch.Tensor]:
    """The states of torch's global generators that a step on `device` draws from; taken in microseconds.

    Python's and NumPy's take twenty times as long.
    """
    states = [torch.default_generator.get_state()]
    backend = None if device.type == "cpu" else getattr(torch, device.type, None)
    if hasattr(backend, "get_rng_state"):
        states.append(backend.get_rng_state(device) if device.type == "cuda" else backend.get_rng_state())
    return states


def set_torch_random_state(states: list[torch.Tensor], device: torch.device) -> None:
    """Take what `torch_random_state` returned for the same device."""
    torch.default_generator.set_state(states[0])
    for state in states[1:]:
        backend = getattr(torch, device.type)
        backend.set_rng_state(state, device) if device.type == "cuda" else backend.set_rng_state(state)


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
    """Take a state that `generator_state` returned for a generator of the same kind."""
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
