"""Decides from numbers alone whether a loss or a gradient norm has left its band, and keeps the history of spikes."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

# The median absolute deviation of normally distributed values, times this, is their standard deviation.
_DEVIATIONS_PER_MAD = 1.4826
# A series that hardly moves has hardly a spread, and its least movement would be a spike. In sound runs of small
# classifiers and language models no loss went further than 7.2 spreads, but gradient norms of a spread of 0.1 went to
# four times their median: so a norm's spread counts as 0.25 at least.
LEAST_SPREAD_OF_LOSS = 0.05
LEAST_SPREAD_OF_NORM = 0.25


class Band:
    """The usual range of one series: up to the median of the latest values plus `factor` times their spread.

    window: how many values make the band; before there are so many, there is none. The spread is the median absolute
    deviation (MAD) times 1.4826, so that some outliers among the values do not widen it; least_spread: what it is at
    least. All this of logarithms, since losses and norms differ by factors (a zero counts as the smallest value above
    it); where a value is negative, of the values themselves, and least_spread is relative to their median size.
    """

    def __init__(self, window: int, factor: float, least_spread: float) -> None:
        self._window = window
        self._factor = factor
        self._least_spread = least_spread
        self._least_factor = math.exp(min(factor * least_spread, 700.0))
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> None:
        """Add the next value, a finite one; the oldest is dropped."""
        if len(self._values) == self._window:
            del self._ordered[bisect_left(self._ordered, self._values.popleft())]
        self._values.append(value)
        insort(self._ordered, value)

    def has(self, value: float) -> bool:
        """Whether `value` lies in the band, or there is none; NaN does not."""
        if len(self._values) < self._window:
            return True
        middle = self._ordered[(self._window - 1) // 2]
        least = middle * self._least_factor if self._ordered[0] >= 0 else middle
        return value <= least or value <= self.limit  # most values need no look at the spread

    @property
    def limit(self) -> float:
        """The upper end of the band; infinite where there is none."""
        if len(self._values) < self._window or self._ordered[-1] == self._ordered[0] == 0:
            return math.inf
        if self._ordered[0] < 0:
            sizes = sorted(map(abs, self._ordered))
            return self._above(self._ordered, self._least_spread * _median(sizes))
        smallest = next(value for value in self._ordered if value > 0)
        limit = self._above([math.log(max(value, smallest)) for value in self._ordered], self._least_spread)
        return math.exp(limit) if limit < 709 else math.inf  # beyond, `exp` raises OverflowError

    @property
    def median(self) -> float:
        """The median of the values that make the band; NaN where there is none."""
        return _median(self._ordered) if len(self._values) == self._window else math.nan

    def _above(self, ordered: list[float], least_spread: float) -> float:
        median = _median(ordered)
        spread = _DEVIATIONS_PER_MAD * _median(sorted(abs(value - median) for value in ordered))
        return median + self._factor * max(spread, least_spread)

    @property
    def values(self) -> list[float]:
        """The values that make the band, oldest first."""
        return list(self._values)

    def load(self, values: Iterable[float]) -> None:
        """Restore values that `values` returned; only the latest if the window is smaller now."""
        self._values = deque(list(values)[-self._window :])
        self._ordered = sorted(self._values)


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else ordered[half - 1] / 2 + ordered[half] / 2


@dataclass(frozen=True)
class Reading:
    """A value that lay above its band.

    series: `loss`, or `gradient norm (<optimizer>)`; limit: the band's upper end; median: of the band (both are NaN
    where there is none); where: words for the place; update: updates taken in all, its own included.
    """

    series: str
    value: float
    limit: float
    median: float
    where: str
    update: int

    def __str__(self) -> str:
        band = f"median {self.median:.4g}, upper limit {self.limit:.4g}" if math.isfinite(self.limit) else "no band yet"
        return f"{self.where}: {self.series} {self.value:.4g} is outside its band ({band})"


class SpikeWatch:
    """The bands of a fit, what has left them, and what was done about it.

    window, factor: of the bands; patience: updates in a row with a value outside that make a spike.

    observed: updates taken in all when the latest values were observed. outside: updates in a row, up to the latest,
    that had a value outside; last: the latest such value; left_after: updates taken before the first of them.
    until: a recovery is under way until so many updates are taken (None: there is none); went_back_to: updates taken at
    the place that the fit went back to last. spikes, went_back: counts of the run. fit: which of the process's it is.
    """

    def __init__(self, window: int, factor: float, patience: int) -> None:
        self._window = window
        self._factor = factor
        self._patience = patience
        self.spikes = self.went_back = 0
        self.begin(0, 0)

    def begin(self, fit: int, updates: int) -> None:
        """Begin a fit after so many updates, with empty bands; the counts continue."""
        self.fit, self.observed = fit, updates
        self.until: int | None = None
        self.went_back_to: int | None = None
        self.accept_level()

    def accept_level(self) -> None:
        """Accept the level of the latest values as the usual one: the bands start anew."""
        self._bands: dict[str, Band] = {}
        self.outside = 0
        self.last: Reading | None = None
        self.left_after: int | None = None

    def observe(self, loss: float, norms: Iterable[tuple[str, float]], where: str, update: int) -> None:
        """Judge the values of an update that was taken; those of one that lay outside do not enter the bands.

        loss: a nonfinite one lies outside. norms: optimizer and norm of each of its steps. where, update: as in
        `Reading`.
        """
        values = [("loss", loss), *((f"gradient norm ({name})", norm) for name, norm in norms)]
        before, self.observed = self.observed, update
        outside = [
            (name, value) for name, value in values if not (math.isfinite(value) and self._band(name).has(value))
        ]
        if outside:
            (series, value), band = outside[0], self._band(outside[0][0])
            self.left_after = before if self.outside == 0 else self.left_after
            self.outside += 1
            self.last = Reading(series, value, band.limit, band.median, where, update)
            return
        self.outside, self.left_after = 0, None
        for name, value in values:
            self._band(name).add(value)

    @property
    def spiked(self) -> bool:
        """Whether values have stayed outside for long enough, and no recovery is under way that may help."""
        return self.outside >= self._patience and self.until is None

    def is_good(self, updates: int, saved: Mapping[str, Any] | None) -> bool:
        """Whether a checkpoint is of this fit, and from before values went outside.

        updates: taken when it was saved. saved: the state of a watch in it, with `judged` besides: whether that had
        observed all that the checkpoint holds (a recipe may save in the middle of an update); None if it has none.
        """
        begun = self.observed if self.left_after is None else self.left_after
        if saved is None:
            return updates <= begun
        whole = updates < begun or (updates == begun and saved["judged"])
        return saved["fit"] == self.fit and saved["outside"] == 0 and whole

    def gone_back(self, saved: Mapping[str, Any] | None, update: int, until: int) -> dict[str, Any]:
        """The state of a watch that has gone back to a checkpoint of `update` with the state `saved`."""
        bands = {} if saved is None else saved["bands"]
        recovery = {"until": until, "went_back_to": update, "went_back": self.went_back + 1}
        calm = {"observed": update, "bands": bands, "outside": 0, "last": None, "left_after": None, "judged": True}
        return {**self.state_dict(), **calm, **recovery}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain values."""
        return {
            "fit": self.fit,
            "observed": self.observed,
            "bands": {name: band.values for name, band in self._bands.items()},
            "outside": self.outside,
            "left_after": self.left_after,
            "last": None if self.last is None else asdict(self.last),
            "until": self.until,
            "went_back_to": self.went_back_to,
            "spikes": self.spikes,
            "went_back": self.went_back,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.begin(state["fit"], state["observed"])
        for name, values in state["bands"].items():
            self._band(name).load(values)
        self.outside, self.left_after = state["outside"], state["left_after"]
        self.last = None if state["last"] is None else Reading(**state["last"])
        self.until, self.went_back_to = state["until"], state["went_back_to"]
        self.spikes, self.went_back = state["spikes"], state["went_back"]

    def _band(self, series: str) -> Band:
        if series not in self._bands:
            least = LEAST_SPREAD_OF_LOSS if series == "loss" else LEAST_SPREAD_OF_NORM
            self._bands[series] = Band(self._window, self._factor, least)
        return self._bands[series]
