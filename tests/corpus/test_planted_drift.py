"""Drift ranks the culprit of the planted networks first, whatever decoys stand beside it."""

import math

import pytest
from planted_faults import OUTSIDE, Planted, zoo

from amp_recipes.numerics.drift.drift import ModuleDrift, drift

PINNABLE = [it for it in zoo(cause="precision") if it.culprit != OUTSIDE]
AT_LEAST = 0.85  # of the networks


def ranked(planted: Planted, windows: int = 1) -> list[ModuleDrift]:
    return drift(planted.trial(), planted.windows(windows), planted.dtype, planted.scale)


@pytest.fixture(scope="module")
def rankings() -> dict[str, list[ModuleDrift]]:
    return {it.name: ranked(it) for it in PINNABLE}


def place_of(planted: Planted, ranking: list[ModuleDrift]) -> int | None:
    """How many modules rank before the culprit; None where it is not in the ranking."""
    names = [it.module for it in ranking]
    return names.index(planted.culprit) if planted.culprit in names else None


def test_drift_ranks_the_culprit_first(rankings):
    missed = [
        f"{it.name}: {it.culprit} has place {place_of(it, rankings[it.name])}, first is "
        + ", ".join(f"{row.module} (S {row.sensitivity:.2g})" for row in rankings[it.name][:3])
        for it in PINNABLE
        if place_of(it, rankings[it.name]) != 0
    ]
    first = len(PINNABLE) - len(missed)
    print(f"culprit first in {first} of {len(PINNABLE)}", *missed, sep="\n")
    assert first >= max(18, AT_LEAST * len(PINNABLE)), "\n".join(missed)


def test_the_culprit_is_in_the_ranking_near_the_top(rankings, subtests):
    for planted in PINNABLE:
        with subtests.test(planted.name):
            place = place_of(planted, rankings[planted.name])
            assert place is not None
            assert place <= 2 or planted.phase == "backward"


def test_every_row_is_sound(rankings, subtests):
    for planted in PINNABLE:
        names = {name for name, _ in planted.make().named_modules()}
        ranking = rankings[planted.name]
        with subtests.test(planted.name):
            assert len({it.module for it in ranking}) == len(ranking)
            for row in ranking:
                assert row.module in names
                assert row.local_error >= 0 and row.sensitivity >= 0
                assert 0 <= row.above_max <= 1 and 0 <= row.below_normal <= 1
                assert not math.isnan(row.sensitivity)


def test_a_large_error_without_a_say_in_the_loss_ranks_low(rankings, subtests):
    humming = [name for name, ranking in rankings.items() if "hum.tone" in {it.module for it in ranking}]
    assert len(humming) >= 3
    for name in humming:
        rows = {it.module: it for it in rankings[name]}
        with subtests.test(name):
            assert rows["hum.tone"].local_error > 10 * rows["head.out"].local_error
            assert rows["hum.tone"].sensitivity < rows["head.out"].sensitivity
