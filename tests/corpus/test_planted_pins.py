"""A pin of the culprit, and of no other module, cures each planted network; the search for pins finds it."""

import functools
import math
from collections.abc import Callable

import pytest
from planted_faults import OUTSIDE, ZOO, Planted, cases, zoo
from torch import nn

from amp_recipes.numerics.drift.drift import drift
from amp_recipes.numerics.pins.search import PinSearch, search_pins
from amp_recipes.numerics.trial import Trial, gradient_error

PINNABLE = [it for it in zoo(cause="precision") if it.culprit != OUTSIDE]


def error_with(planted: Planted, trial: Trial, windows: int = 2) -> Callable[..., list[float]]:
    """A function of pinned modules: the gradient error of some windows, in tolerances."""
    drawn = planted.windows(windows)
    references = [trial.run(window) for window in drawn]

    def errors(*pins: str, windows: int = windows) -> list[float]:
        found = []
        for window, reference in list(zip(drawn, references, strict=True))[:windows]:
            low = trial.run(window, planted.dtype, planted.scale, pins=pins)
            found.append(gradient_error(low, reference) / planted.tolerance)
        return found

    return errors


def healthy_modules(planted: Planted, trial: Trial) -> list[str]:
    """Modules that can be pinned, but those whose pin covers the culprit, or what feeds it."""
    cures = (planted.cure, *planted.also_cured_by)
    return [
        name
        for name, module in trial.modules.named_modules()
        if type(module).forward is not nn.Module.forward
        and not any(name == "" or f"{cure}.".startswith(f"{name}.") for cure in cures)
    ]


def test_there_are_enough_of_them():
    assert len(PINNABLE) >= 25


@pytest.mark.parametrize("planted", cases(PINNABLE))
def test_a_pin_of_the_culprit_cures_it_and_no_other_does(planted):
    trial = planted.trial()
    errors = error_with(planted, trial)
    ill = errors()
    assert min(ill) > 1.5
    assert all(map(math.isinf, ill)) == planted.nonfinite
    for cure in (planted.culprit, *planted.also_cured_by):
        assert max(errors(cure)) < 0.6, cure
    healthy = healthy_modules(planted, trial)
    assert len(healthy) >= 4
    for name in healthy:
        assert max(errors(name, windows=1)) > 1.2, name


# ---------------------------------------------------------------------------------------------- the search


@functools.cache
def searched(planted: Planted, steps: int = 0) -> PinSearch:
    trial = planted.trial()
    search, held_out = planted.windows(3), planted.windows(3, seed=1)
    ranking = drift(trial, search[:1], planted.dtype, planted.scale)
    return search_pins(
        trial, search, held_out, planted.dtype, planted.scale, planted.tolerance, ranked=ranking, steps=steps
    )


@pytest.mark.parametrize("planted", cases(PINNABLE))
def test_the_set_found_is_the_culprit_and_holds_on_batches_that_the_search_did_not_see(planted):
    found = searched(planted)
    assert found.modules == [planted.culprit], "it does alone, and the set is to be the smallest that is found"
    assert found.verified, found.notes
    assert found.tolerance == planted.tolerance
    assert max(found.error, found.held_out_error) <= found.tolerance < found.error_without
    trial = planted.trial()
    for window in planted.windows(2, seed=2):
        low = trial.run(window, planted.dtype, planted.scale, pins=found.modules)
        assert gradient_error(low, trial.run(window)) <= planted.tolerance


TRAINED = [ZOO[it] for it in ("matmul_overflow", "cancellation_in_a_convolution_bf16", "backward_of_an_inverse_root")]


@pytest.mark.parametrize("planted", cases(TRAINED, frozenset({"matmul_overflow"})))
def test_training_with_the_set_found_is_equal_to_fp32(planted):
    found = searched(planted, steps=12)
    assert found.verified and found.steps == 12, found.training
    assert found.modules == [planted.culprit]
