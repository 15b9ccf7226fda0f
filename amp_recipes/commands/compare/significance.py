"""Decides whether one precision's final metrics are worse than the reference's by more than seeds make them vary.

One-sided, since the question is whether the precision costs something: better is not worse.

Where both have a value at each seed, the test is Student's t-test on the differences at equal seeds. Runs of one seed
share initial weights and the order of the data, so they are not independent, as Welch's test asks of its two samples.
The paired test asks nothing of how strongly they hang together (for what it gains: arXiv 2512.24145, on seeds shared
by what is compared). In 40,000 simulated comparisons without a difference, at alpha 0.05 and 3 seeds, it called 5 %
worse at every correlation from -0.3 to 0.99, Welch's test 5.7 % at -0.3, 3.9 % at 0, 1.7 % at 0.5 and none at 0.99.
The price of half the degrees of freedom: at 3 seeds and no correlation it finds a difference of two standard deviations
in 49 % of cases, Welch's in 57 %; from a correlation of 0.3 on it finds more than Welch's.

Welch's t-test (as for seeds of deep networks in Colas et al. 2019, arXiv 1904.06979) is for samples of unequal seeds,
which runs that did not finish leave behind; and for differences that are the same at every seed although the seeds are
not: an accuracy over 269 images moves in steps of 1/269, so two seeds often differ alike by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from amp_recipes.errors import ConfigError

ALPHA = 0.05
"""The chance, over all precisions together, to call one worse that is not."""
POWER = 0.8
"""In what share of comparisons the difference that is named as detectable would be called worse."""

PAIRED = "paired t-test, one-sided"
WELCH = "Welch's t-test, one-sided"

# Metrics that are equal but for the last bits of their sums, such as 0.98 - 0.97 and 0.99 - 0.98, have no spread.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Tested:
    """What a test says of two samples.

    name: the test's; pairs: whether seed was compared with seed; count: runs, of the precision that is tested;
    worse_by: difference of the means, in the metric's unit, positive where the tested precision is worse; error: its
    standard error; freedom: the degrees of freedom; p: of so large a `worse_by`, or a larger one, without any real
    difference. Without spread there is no t distribution: p is then 0 or 1.
    """

    name: str
    pairs: bool
    count: int
    worse_by: float
    error: float
    freedom: float
    p: float

    def detectable(self, alpha: float) -> float | None:
        """The true difference that this test, with this spread, would call worse at `alpha` in `POWER` of all cases.

        From the noncentral t distribution (Cohen, Statistical power analysis, 1988). None without spread.
        """
        if self.error == 0.0:
            return None
        stats, optimize = _scipy("stats"), _scipy("optimize")
        limit = stats.t.isf(alpha, self.freedom)

        def missing(shift: float) -> float:
            return float(stats.nct.sf(limit, self.freedom, shift)) - POWER

        most = limit + 10.0
        while missing(most) < 0.0:
            most *= 2.0
        return self.error * float(optimize.brentq(missing, 0.0, most))


def worse_than(reference: Mapping[int, float], tested: Mapping[int, float], mode: str) -> Tested | None:
    """Whether the values of `tested` (by seed) are worse than those of `reference`; None where one has fewer than 2.

    mode: "min" where smaller is better, "max" where larger is. Values must be finite.
    """
    if min(len(reference), len(tested)) < 2:
        return None
    sign = {"min": 1.0, "max": -1.0}[mode]
    size = _size(reference, tested)
    unpaired = _welch([sign * value for value in reference.values()], [sign * value for value in tested.values()], size)
    if reference.keys() != tested.keys():
        return unpaired
    paired = _paired([sign * (tested[seed] - reference[seed]) for seed in sorted(tested)], size)
    return unpaired if paired.error == 0.0 and unpaired.error > 0.0 else paired


def holm(p_values: Sequence[float]) -> list[float]:
    """The p values, each corrected for there being several, in the same order.

    Calling worse what is at or below alpha then errs in one or more of them with a chance of at most alpha
    (S. Holm 1979, A simple sequentially rejective multiple test procedure).
    """
    corrected = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = highest
    return corrected


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return math.fsum(values) / len(values)


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation, with n - 1; None of fewer than two values."""
    if len(values) < 2:
        return None
    middle = mean(values)
    return math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))


def require_scipy() -> None:
    """Raise ConfigError where scipy is not installed: better before hours of training than after."""
    _scipy("stats")


def _paired(differences: Sequence[float], size: float) -> Tested:
    count = len(differences)
    error = _without_rounding(spread(differences), size) / math.sqrt(count)
    worse_by = mean(differences)
    if error == 0.0:
        return Tested(PAIRED, True, count, worse_by, 0.0, count - 1, _p_without_spread(worse_by, size))
    found = _scipy("stats").ttest_1samp(differences, 0.0, alternative="greater")
    return Tested(PAIRED, True, count, worse_by, error, count - 1, float(found.pvalue))


def _welch(reference: Sequence[float], tested: Sequence[float], size: float) -> Tested:
    count = len(tested)
    parts = [_without_rounding(spread(values), size) ** 2 / len(values) for values in (reference, tested)]
    error = math.sqrt(sum(parts))
    worse_by = mean(tested) - mean(reference)
    if error == 0.0:
        freedom = len(reference) + count - 2
        return Tested(WELCH, False, count, worse_by, 0.0, freedom, _p_without_spread(worse_by, size))
    found = _scipy("stats").ttest_ind(tested, reference, equal_var=False, alternative="greater")
    return Tested(WELCH, False, count, worse_by, error, float(found.df), float(found.pvalue))


def _p_without_spread(worse_by: float, size: float) -> float:
    return 0.0 if worse_by > _ROUNDING * size else 1.0


def _without_rounding(deviation: float | None, size: float) -> float:
    assert deviation is not None  # there are two values or more
    return deviation if deviation > _ROUNDING * size else 0.0


def _size(*samples: Mapping[int, float]) -> float:
    return max(abs(value) for sample in samples for value in sample.values())


def _scipy(name: str) -> ModuleType:
    try:
        from scipy import optimize, stats
    except ImportError as error:
        raise ConfigError(
            f"compare tests with scipy, which is not installed ({error}): pip install 'amp-recipes[report]'."
        ) from error
    return {"stats": stats, "optimize": optimize}[name]
