"""No instrument names a fault in a network that has none, at bf16 and at fp16."""

import dataclasses
import math

import pytest
import torch
from healthy_networks import HEALTHY
from planted_faults import Planted

from amp_recipes.numerics.diagnosis import Questions, diagnose, tolerance_for
from amp_recipes.numerics.drift.drift import drift
from amp_recipes.numerics.hazards.hazards import find_hazards
from amp_recipes.numerics.nonfinite import locate
from amp_recipes.numerics.pins.gradient_noise import GradientNoise
from amp_recipes.numerics.pins.search import search_pins
from amp_recipes.numerics.trial import gradient_error

DTYPES = (torch.bfloat16, torch.float16)
BY_DEFAULT = ("causal_language_model", "mixture_of_two_experts", "bound_of_an_overflow")


def each(dtypes: tuple[torch.dtype, ...] = DTYPES) -> list:
    """One case for each network and dtype."""
    return [
        pytest.param(
            dataclasses.replace(network, dtype=dtype, scale=1.0 if dtype == torch.bfloat16 else network.scale),
            id=f"{name}-{str(dtype).removeprefix('torch.')}",
            marks=() if name in BY_DEFAULT else pytest.mark.extended,
        )
        for name, network in HEALTHY.items()
        for dtype in dtypes
    ]


def tolerance_of(network: Planted) -> float:
    """What a diagnosis would take."""
    trial, noise = network.trial(), GradientNoise()
    for window in network.windows(4):
        noise.add(trial.run(window))
    return tolerance_for(network.dtype, noise.relative)


def test_there_are_enough_of_them():
    assert len(HEALTHY) >= 10


@pytest.mark.parametrize("network", each())
def test_it_is_well_and_learns(network: Planted):
    trial, tolerance = network.trial(), tolerance_of(network)
    for window in network.windows(3):
        low, reference = trial.run(window, network.dtype, network.scale), trial.run(window)
        assert low.is_finite and reference.is_finite
        assert gradient_error(low, reference) < tolerance
    torch.manual_seed(0)  # some draw noise
    course = network.trial().train(network.windows(1) * 20, network.dtype, network.scale)
    assert course.is_finite and sum(course.losses[-5:]) < sum(course.losses[:5])


@pytest.mark.parametrize("network", each())
def test_the_locator_finds_nothing(network: Planted):
    for window in network.windows(2):
        found = locate(network.trial(), window, network.dtype, network.scale)
        assert (found.cause, found.module) == ("not replayable", None)


@pytest.mark.parametrize("network", each())
def test_no_pin_is_needed_and_none_is_found(network: Planted):
    trial, windows = network.trial(), network.windows(3)
    ranking = drift(trial, windows[:1], network.dtype, network.scale)
    assert all(math.isfinite(row.sensitivity) for row in ranking)
    held_out = network.windows(3, seed=1)
    found = search_pins(
        trial, windows, held_out, network.dtype, network.scale, tolerance_of(network), ranked=ranking, steps=0
    )
    assert (found.modules, found.verified) == ([], True), found.undecided


@pytest.mark.parametrize("network", each((torch.bfloat16,)))
def test_no_line_is_called_wrong(network: Planted):
    hazards = find_hazards(network.trial(), network.windows(1)[0])
    assert [str(it.message) for it in hazards if it.grade == "wrong"] == []


@pytest.mark.extended
@pytest.mark.parametrize("name", HEALTHY)
def test_the_verdict_is_safe(name):
    network = HEALTHY[name]
    found = diagnose(network.trial(), network.windows(8), Questions(("bf16", "fp16"), steps=60))
    assert [(it.name, it.pins.decision) for it in found.answers] == [("bf16", "safe"), ("fp16", "safe")], found.verdict
