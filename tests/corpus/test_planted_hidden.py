"""Faults in layers that no module registers, and behind ops that swallow an infinity, are found and cured."""

import functools
import math

import pytest
from planted_hidden import HIDDEN, Hidden

from amp_recipes.numerics.drift.drift import ModuleDrift, drift
from amp_recipes.numerics.drift.parting import find_parting
from amp_recipes.numerics.nonfinite import locate
from amp_recipes.numerics.pins.search import PinSearch, search_pins
from amp_recipes.numerics.trial import gradient_error

IN_DEFAULT_TIER = ("a_list_of_layers", "a_layer_on_the_recipe", "times_zero", "divided_by", "behind_a_decoy")
CASES = [
    pytest.param(hidden, id=name, marks=() if name in IN_DEFAULT_TIER else (pytest.mark.extended,))
    for name, hidden in HIDDEN.items()
]


@functools.cache
def ranked(hidden: Hidden) -> list[ModuleDrift]:
    return drift(hidden.trial(), hidden.windows(1), hidden.dtype, hidden.scale)


@functools.cache
def searched(hidden: Hidden) -> PinSearch:
    search, held_out = hidden.windows(3), hidden.windows(2, seed=1)
    return search_pins(hidden.trial(), search, held_out, hidden.dtype, hidden.scale, ranked=ranked(hidden), steps=0)


@pytest.mark.parametrize("hidden", CASES)
def test_it_is_wrong_without_a_pin_and_well_with_it(hidden):
    trial, (window,) = hidden.trial(), hidden.windows(1)
    reference = trial.run(window)
    tolerance = 10 * 2.0 ** (-10 if hidden.scale > 1 else -7)
    assert reference.is_finite
    assert gradient_error(trial.run_finite(window, hidden.dtype, hidden.scale), reference) > 1.5 * tolerance
    if hidden.pins:
        cured = trial.run_finite(window, hidden.dtype, hidden.scale, hidden.pins)
        assert gradient_error(cured, reference) < 0.8 * tolerance


@pytest.mark.parametrize("hidden", CASES)
def test_drift_ranks_it_first_under_its_name(hidden):
    first = ranked(hidden)[0]
    assert first.module == hidden.culprit
    assert tuple(first.pins) == hidden.pins


@pytest.mark.parametrize("hidden", CASES)
def test_the_search_finds_the_pins_and_says_what_to_do(hidden):
    found = searched(hidden)
    assert tuple(found.modules) == hidden.pins
    assert found.verified == bool(hidden.pins), found.undecided
    assert found.needed
    said = " ".join([found.undecided, *found.notes])
    assert hidden.advice in said and ("registered" in said) == bool(hidden.advice)
    if hidden.advice:
        assert hidden.culprit.partition(" (")[0] in said


@pytest.mark.parametrize("hidden", CASES)
def test_the_first_op_where_low_precision_parts_from_fp32(hidden):
    found = find_parting(hidden.trial(), hidden.windows(1)[0], hidden.dtype, hidden.scale)
    assert found is not None
    assert (found.module, found.op, found.phase) == (hidden.place, f"aten::{hidden.op}", "forward")
    assert math.isinf(found.error) or found.magnified_by == f"aten::sub in {hidden.place}"
    assert "planted_" in str(found.line)
    assert found.module in str(found) and f"aten::{hidden.op}" in str(found)


def test_no_pin_is_advised_of_a_layer_that_no_pin_can_name():
    hidden = HIDDEN["a_list_of_layers"]
    message = locate(hidden.trial(), hidden.windows(1)[0], hidden.dtype, hidden.scale).message
    assert hidden.culprit in message and "Cause: the precision" in message
    assert "fp32_modules" not in message
