"""Generators that are put back draw again what they drew."""

import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from amp_recipes import Checkpointer
from amp_recipes.state.randomness import (
    GENERATORS,
    generator_state,
    random_state,
    set_generator_state,
    set_random_state,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def generators_as_before():
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def draws():
    """From every global generator; an odd number of Gaussian ones, so that each keeps a second one for later."""
    return [
        *(random.random(), random.gauss(0, 1), random.getrandbits(100)),
        *(np.random.rand(), np.random.randn(), int(np.random.randint(2**40))),
        *torch.rand(3).tolist(),
        *torch.randn(17).tolist(),
        torch.randperm(50).tolist(),
    ]


class Saved:
    """A recoverable that holds one state."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return {"random": self.state}

    def load_state_dict(self, state):
        self.state = state["random"]


def through_a_checkpoint(state, folder):
    Checkpointer(folder, {"saved": Saved(state)}).save_checkpoint()
    back = Saved()
    Checkpointer(folder, {"saved": back}).recover_if_possible()
    return back.state


@pytest.mark.parametrize("saved", [False, True])
def test_every_global_generator_draws_again_what_it_drew(tmp_path, subtests, saved):
    for seeded in (False, True):
        with subtests.test(f"seeded: {seeded}"):
            if seeded:
                random.seed(1), np.random.seed(1), torch.manual_seed(1)
            draws()
            state = random_state(CPU)
            if saved:
                state = through_a_checkpoint(state, tmp_path / str(seeded))
            first = draws()
            other = draws()
            random.seed(2), np.random.seed(2), torch.manual_seed(2)
            draws()
            set_random_state(state)
            assert draws() == first
            assert draws() == other
            set_random_state(state)  # the draws have not changed it
            assert draws() == first


def test_looking_draws_nothing():
    state = random_state(CPU)
    first = draws()
    set_random_state(state)
    for _ in range(3):
        random_state(CPU)
    assert draws() == first


def numbers(generator):
    if isinstance(generator, torch.Generator):
        return torch.randn(5, generator=generator).tolist()
    if isinstance(generator, random.Random):
        return [generator.gauss(0, 1), generator.random()]
    return [*generator.normal(size=5)]


OWN_GENERATORS = {
    "torch": lambda seed: torch.Generator().manual_seed(seed),
    "numpy": lambda seed: np.random.default_rng(seed),
    "numpy_mt": lambda seed: np.random.Generator(np.random.MT19937(seed)),
    "numpy_philox": lambda seed: np.random.Generator(np.random.Philox(seed)),
    "numpy_old": lambda seed: np.random.RandomState(seed),
    "python": lambda seed: random.Random(seed),
}


@pytest.mark.parametrize("saved", [False, True])
def test_a_generator_of_ones_own_too(tmp_path, subtests, saved):
    for name, make in OWN_GENERATORS.items():
        with subtests.test(name):
            generator = make(1)
            assert isinstance(generator, GENERATORS)
            numbers(generator)
            state = generator_state(generator)
            if saved:
                state = through_a_checkpoint(state, tmp_path / name)
            first = numbers(generator)
            other = make(2)
            set_generator_state(other, state)
            assert numbers(other) == first


class Devices:
    """Stands for torch.cuda with so many devices, which are asked and told their states."""

    def __init__(self, count, initialized=True):
        self.count, self.initialized = count, initialized
        self.states = {index: torch.tensor([index], dtype=torch.uint8) for index in range(count)}

    def namespace(self):
        return SimpleNamespace(
            is_available=lambda: self.count > 0,
            is_initialized=lambda: self.initialized,
            device_count=lambda: self.count,
            get_rng_state=self.get,
            set_rng_state=lambda state, device: self.states.update({device.index: state}),
        )

    def get(self, device):
        assert self.initialized, "asking would initialize the devices"
        return self.states[device.index].clone()


def test_each_device_takes_its_own_state_and_another_number_is_one_line(monkeypatch, caplog, subtests):
    for saved, there in [(2, 2), (4, 2), (2, 4), (2, 0)]:
        with subtests.test(f"{saved} saved, {there} there"):
            caplog.clear()
            monkeypatch.setattr(torch, "cuda", Devices(saved).namespace())
            state = random_state(torch.device("cuda"))
            assert [int(each) for each in state["cuda"]] == list(range(saved))
            devices = Devices(there)
            devices.states = {index: torch.tensor([99], dtype=torch.uint8) for index in range(there)}
            monkeypatch.setattr(torch, "cuda", devices.namespace())
            with caplog.at_level(logging.WARNING):
                set_random_state(state)
            both = min(saved, there)
            assert [int(each) for each in devices.states.values()] == [*range(both), *[99] * (there - both)]
            said = [record.getMessage() for record in caplog.records]
            assert len(said) == (saved != there)
            assert all(f"{saved} cuda" in line and f"has {there}:" in line for line in said)


def test_devices_that_are_not_in_use_are_not_asked(monkeypatch):
    monkeypatch.setattr(torch, "cuda", Devices(2, initialized=False).namespace())
    assert "cuda" not in random_state(torch.device("cuda"))
    monkeypatch.setattr(torch, "cuda", Devices(2).namespace())
    assert "cuda" not in random_state(CPU)
    assert "meta" not in random_state(torch.device("meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_again_what_it_drew():
    device = torch.device("cuda")
    torch.rand(1, device=device)
    state = random_state(device)
    first = torch.randn(100, device=device)
    torch.manual_seed(5)
    set_random_state(state)
    assert torch.equal(torch.randn(100, device=device), first)
