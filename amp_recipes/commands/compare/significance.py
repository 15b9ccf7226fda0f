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
from statistics import fmean, stdev
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
    """The result of a test on two samples.

    name: the test's; count: runs, of the precision that is tested; worse_by: difference of the means, in the metric's
    unit, positive where the tested precision is worse; error: its standard error; freedom: the degrees of freedom; p:
    of so large a `worse_by`, or a larger one, without any real difference. Without spread there is no t distribution:
    p is then 0 or 1.
    """

    name: str
    count: int
    worse_by: float
    error: float
    freedom: float
    p: float

    @property
    def pairs(self) -> bool:
        """Whether seed was compared with seed."""
        return self.name == PAIRED

    def detectable(self, alpha: float) -> float | None:
        """The true difference that this test, with this spread, would call worse at `alpha` in `POWER` of all cases.

        From the noncentral t distribution (Cohen, Statistical power analysis, 1988). None without spread.
        """
        if self.error == 0.0:
            return None
        special = _scipy_special()
        limit = -special.stdtrit(self.freedom, alpha)
        return self.error * float(special.nctdtrinc(self.freedom, 1.0 - POWER, limit))


def worse_than(reference: Mapping[int, float], tested: Mapping[int, float], mode: str) -> Tested | None:
    """Whether the values of `tested` (by seed) are worse than those of `reference`; None where one has fewer than 2.

    mode: "min" where smaller is better, "max" where larger is. Values must be finite.
    """
    if min(len(reference), len(tested)) < 2:
        return None
    sign = {"min": 1.0, "max": -1.0}[mode]
    size = max(map(abs, [*reference.values(), *tested.values()]))
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


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation, with n - 1; None of fewer than two values."""
    return stdev(values) if len(values) > 1 else None


def require_scipy() -> None:
    """Raise ConfigError where scipy is not installed: better before hours of training than after."""
    _scipy_special()


def _paired(differences: Sequence[float], size: float) -> Tested:
    count = len(differences)
    error = _without_rounding(stdev(differences), size) / math.sqrt(count)
    return _tested(PAIRED, count, fmean(differences), error, count - 1, size)


def _welch(reference: Sequence[float], tested: Sequence[float], size: float) -> Tested:
    """The degrees of freedom are those of Welch and Satterthwaite."""
    counts = [len(reference), len(tested)]
    parts = [_without_rounding(stdev(values), size) ** 2 / len(values) for values in (reference, tested)]
    error = math.sqrt(sum(parts))
    freedom = float(sum(counts) - 2)
    if error > 0.0:
        freedom = sum(parts) ** 2 / sum(part**2 / (count - 1) for part, count in zip(parts, counts, strict=True))
    return _tested(WELCH, len(tested), fmean(tested) - fmean(reference), error, freedom, size)


def _tested(name: str, count: int, worse_by: float, error: float, freedom: float, size: float) -> Tested:
    if error > 0.0:
        p = float(_scipy_special().stdtr(freedom, -worse_by / error))
    else:
        p = 0.0 if worse_by > _ROUNDING * size else 1.0
    return Tested(name, count, worse_by, error, freedom, p)


def _without_rounding(deviation: float, size: float) -> float:
    return deviation if deviation > _ROUNDING * size else 0.0


def _scipy_special() -> ModuleType:
    try:
        from scipy import special
    except ImportError as error:
        raise ConfigError(
            f"compare tests with scipy, which is not installed ({error}): pip install 'amp-recipes[report]'."
        ) from error
    return special
