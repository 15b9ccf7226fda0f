"""The planted networks from public threads: each fault shows, and the instruments name it, rank it, and pin it."""

import functools
import math
import re

import pytest
from planted_faults import OUTSIDE, Planted, cases, zoo
from planted_threads import ONE_PER_KIND, THREADS
from test_planted_drift import place_of, ranked
from test_planted_locator import FirstNonfinite, taken
from test_planted_pins import error_with, healthy_modules

from amp_recipes.numerics.drift.drift import ModuleDrift
from amp_recipes.numerics.nonfinite import NonfiniteReport, locate
from amp_recipes.numerics.pins.search import PinSearch, search_pins
from amp_recipes.numerics.trial import gradient_error
from amp_recipes.numerics.watch.observe import op_name

WELL_IN_FP32 = zoo(THREADS, cause="precision")
NONFINITE = zoo(THREADS, nonfinite=True)
SILENT = zoo(THREADS, nonfinite=False)


class FirstUnwanted(FirstNonfinite):
    """Takes a mask for the culprit where it is."""

    def __init__(self, modules, ops):
        super().__init__(modules)
        self.ops = ops

    def saw(self, op, args, kwargs, output):
        name = op_name(op).removeprefix("aten::")
        if name in self.ops and name.startswith("masked_fill") and self.found is None:
            self.found = (self.at.here.module, self.at.here.phase, name)
        super().saw(op, args, kwargs, output)


def test_there_are_enough_of_them_and_each_names_its_thread(subtests):
    assert len(THREADS) >= 30
    assert {it.cause for it in THREADS.values()} == {"precision", "model", "data"}
    assert len(SILENT) >= 8
    assert len([it for it in NONFINITE if it.phase == "backward"]) >= 5
    assert set(THREADS) >= ONE_PER_KIND
    threads = []
    for planted in THREADS.values():
        with subtests.test(planted.name):
            named = re.findall(r"^\s*([\w.-]+/[\w.-]+#\d+): \S.+\.$", planted.why, re.MULTILINE)
            assert len(named) == 1
            threads += named
    assert len(set(threads)) >= 30


@pytest.mark.parametrize("planted", cases(list(THREADS.values()), ONE_PER_KIND))
def test_the_fault_shows_in_every_window_and_in_fp32_only_where_precision_is_not_to_blame(planted):
    trial = planted.trial()
    for window in planted.windows(3):
        assert trial.run(window, planted.dtype, planted.scale).is_finite != planted.nonfinite
        assert trial.run(window, planted.dtype, 1.0).is_finite != planted.nonfinite
        assert trial.run(window).is_finite == (planted in WELL_IN_FP32)


@pytest.mark.parametrize("planted", cases(WELL_IN_FP32, ONE_PER_KIND))
def test_it_trains_in_fp32(planted):
    course = planted.trial().train(planted.windows(1) * 10)
    assert course.is_finite
    assert course.losses[-1] < course.losses[0]


@pytest.mark.parametrize("planted", cases(NONFINITE, ONE_PER_KIND))
def test_the_first_nonfinite_value_is_where_it_was_planted(planted):
    trial = planted.trial()
    first = FirstUnwanted(trial.modules, planted.ops)
    trial.run(planted.windows(1)[0], planted.dtype, planted.scale, watch=[first])
    module, phase, op = first.found
    assert (module, phase) == (planted.culprit, planted.phase)
    assert not planted.ops or op in planted.ops


# ---------------------------------------------------------------------------------------------- the locator


@functools.cache
def report_of(planted: Planted) -> NonfiniteReport:
    return locate(planted.trial(), planted.windows(1)[0], planted.dtype, planted.scale)


@pytest.mark.parametrize("planted", cases(NONFINITE, ONE_PER_KIND))
def test_the_locator_names_module_cause_phase_op_and_line(planted):
    found = report_of(planted)
    assert (found.module, found.cause) == (planted.culprit, planted.cause), found.message
    assert found.phase == planted.phase or planted.cause == "data"  # the backward may be what reads the batch's NaN
    assert not planted.ops or found.op.removeprefix("aten::") in planted.ops
    assert found.line is not None and re.search(r"planted_(threads|faults)\.py:\d+$", found.line)
    assert planted.culprit == OUTSIDE or planted.culprit in found.message


@pytest.mark.parametrize("planted", cases(NONFINITE, ONE_PER_KIND))
def test_what_the_locator_advises_helps(planted):
    message = report_of(planted).message
    advised = re.findall(r"fp32_modules: \[([^\]]+)\]", message)
    assert advised == ([planted.cure] if planted.cause == "precision" else []), "a pin that cures, or none"
    assert "second problem" not in message, "there is one"
    assert "learning rate" not in message, "it has no part in it"


@pytest.mark.parametrize("planted", cases(NONFINITE, ONE_PER_KIND))
def test_the_samples_it_names_do_it_and_the_others_do_not(planted):
    window = planted.windows(1)[0]
    named = [tuple(it) if isinstance(it, list) else (0, it) for it in report_of(planted).samples]
    last = len(window) - 1
    assert planted.samples is None or named == [(last, it) for it in planted.samples]
    assert {batch for batch, _ in named} <= {last}
    guilty = [sample for _, sample in named]
    innocent = [it for it in range(len(window[last][0])) if it not in guilty]
    trial = planted.trial()
    if guilty:
        assert not trial.run([taken(window[last], guilty)], planted.dtype, 1.0).is_finite
    if guilty and innocent:
        assert trial.run([taken(window[last], innocent)], planted.dtype, 1.0).is_finite


@pytest.mark.parametrize("planted", cases(SILENT, ONE_PER_KIND))
def test_the_locator_invents_nothing_where_all_is_finite(planted):
    found = report_of(planted)
    assert (found.cause, found.module) == ("not replayable", None)


# ---------------------------------------------------------------------------------------------- drift and pins

PINNABLE = [it for it in WELL_IN_FP32 if it.cure != OUTSIDE]


@pytest.mark.parametrize("planted", cases(PINNABLE, ONE_PER_KIND))
def test_a_pin_of_the_culprit_cures_it_and_no_other_does(planted):
    trial = planted.trial()
    errors = error_with(planted, trial)
    ill = errors()
    assert min(ill) > 1.5
    assert all(map(math.isinf, ill)) == planted.nonfinite
    for cure in (planted.cure, *planted.also_cured_by):
        assert max(errors(cure)) < 0.6, cure
    healthy = healthy_modules(planted, trial)
    assert len(healthy) >= 4
    for name in healthy:
        assert max(errors(name, windows=1)) > 1.2, name


@functools.cache
def ranking_of(planted: Planted) -> list[ModuleDrift]:
    return ranked(planted)


@pytest.mark.parametrize("planted", cases(PINNABLE, ONE_PER_KIND))
def test_drift_ranks_the_culprit_first(planted):
    ranking = ranking_of(planted)
    first = ", ".join(f"{row.module} (S {row.sensitivity:.2g})" for row in ranking[:4])
    assert ranking[0].module == planted.cure, f"place {place_of(planted, ranking)}, first are {first}"


@functools.cache
def searched(planted: Planted) -> PinSearch:
    search, held_out = planted.windows(3), planted.windows(3, seed=1)
    return search_pins(
        planted.trial(),
        search,
        held_out,
        planted.dtype,
        planted.scale,
        planted.tolerance,
        ranked=ranking_of(planted),
        steps=0,
    )


@pytest.mark.parametrize("planted", cases(PINNABLE, ONE_PER_KIND))
def test_the_set_found_is_the_culprit_and_holds_on_batches_that_the_search_did_not_see(planted):
    found = searched(planted)
    assert found.modules == [planted.cure], found.notes
    assert found.verified, found.notes
    assert max(found.error, found.held_out_error) <= planted.tolerance < found.error_without
    trial = planted.trial()
    for window in planted.windows(2, seed=2):
        low = trial.run(window, planted.dtype, planted.scale, pins=found.modules)
        assert gradient_error(low, trial.run(window)) <= planted.tolerance
