"""Seeds the random draws of a dataset: those of a sample depend only on (seed, epoch, index)."""

from __future__ import annotations

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset

from amp_recipes.state.randomness import GENERATORS

# Read from every augmentation library: `random`, `numpy.random` and torch's CPU generator. 9 us for all three.
_TORCH = torch.default_generator
_PLAIN = (list, tuple, range)


class SampleSeeds:
    """Seeds the three global generators for a sample of one (seed, epoch).

    torch.manual_seed is not used: it reaches for the accelerators too, which takes 200 us and does not belong in a
    worker.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._prefix = hashlib.blake2b(f"draws/{seed}/{epoch}/".encode(), digest_size=16)

    def set_for(self, index: Any) -> None:
        """Draws from now on are those of the sample `index` (or of a batch: the list of its indices)."""
        digest = self._prefix.copy()
        digest.update(_name(index).encode())
        seeds = digest.digest()
        # Three parts of one hash: the streams of the generators have nothing to do with each other.
        random.seed(int.from_bytes(seeds[:8], "little"))
        np.random.seed(int.from_bytes(seeds[8:12], "little"))
        _TORCH.manual_seed(int.from_bytes(seeds[12:], "little"))


class DrawStream:
    """A second state of the global generators, apart from the run's own: `with stream:` continues it."""

    def __init__(self, seeds: SampleSeeds, name: str) -> None:
        self._seeds, self._name = seeds, name
        self._here: tuple[Any, Any, Any] | None = None

    def __enter__(self) -> None:
        self._outside = _states()
        if self._here is None:
            self._seeds.set_for(self._name)
        else:
            _restore(self._here)

    def __exit__(self, *error: object) -> None:
        self._here = _states()
        _restore(self._outside)


@contextmanager
def draws_put_back() -> Iterator[None]:
    """Restore the global generators after the block."""
    states = _states()
    try:
        yield
    finally:
        _restore(states)


def draws_nothing(dataset: Any) -> bool:
    """Whether `dataset` is known not to draw at random; it need not be seeded then."""
    kind = type(dataset)
    if kind is Subset:
        return draws_nothing(dataset.dataset)
    if kind is ConcatDataset:
        return all(map(draws_nothing, dataset.datasets))
    if kind is StackDataset:
        parts = dataset.datasets
        return all(map(draws_nothing, parts.values() if isinstance(parts, dict) else parts))
    return kind is TensorDataset or kind in _PLAIN


def held_generators(*holders: Any) -> dict[str, Any]:
    """The random generators that the holders (samplers, loaders) keep as attributes, by holder and attribute."""
    found = {}
    for number, holder in enumerate(holders):
        for name, value in getattr(holder, "__dict__", {}).items():
            if isinstance(value, GENERATORS) and not any(value is other for other in found.values()):
                found[f"{number}.{name}"] = value
    return found


def _name(index: Any) -> str:
    """The index as text: the same for 3, np.int64(3) and a 0-d tensor of 3."""
    if isinstance(index, list):
        return ",".join(map(_name, index))
    try:
        return str(operator.index(index))
    except TypeError:
        return repr(index)


def _states() -> tuple[Any, Any, Any]:
    numpy_state = np.random.get_state()
    if isinstance(numpy_state, tuple):  # as long as nobody gave NumPy another kind of generator
        name, numbers, *rest = numpy_state
        # NumPy takes its 624 numbers back one by one: 35 us from an array, 11 us with them as a list.
        numpy_state = (name, numbers.tolist(), *rest)
    return random.getstate(), numpy_state, _TORCH.get_state()


def _restore(states: tuple[Any, Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    _TORCH.set_state(states[2])
