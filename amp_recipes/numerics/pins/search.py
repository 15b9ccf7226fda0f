"""Searches the smallest set of modules that must be pinned to fp32 for a gradient error within tolerance."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from glob import escape
from typing import Any

import torch

from amp_recipes.files.strict_json import as_it_is_read
from amp_recipes.modules.unregistered import how_to_register
from amp_recipes.numerics.census.census import lies_in, pins_hold, take_census
from amp_recipes.numerics.drift.drift import ModuleDrift
from amp_recipes.numerics.drift.parting import Parting, find_parting
from amp_recipes.numerics.pins.budget import Budget
from amp_recipes.numerics.pins.gradient_noise import ErrorSums, GradientError, GradientNoise
from amp_recipes.numerics.pins.proof import Training, cost, train_with_pins
from amp_recipes.numerics.trial import Outcome, Trial, Window, first_line
from amp_recipes.numerics.watch.observe import NOT_REGISTERED, OUTSIDE, dtype_name

# The search asks for less than the bounds: on held-out batches errors were seen to be up to 21 % larger.
_MARGIN = 1.25
_WIDENED = 3  # times that the search asks for less still, where all batches together do not hold
# The gradient of no parameter may be changed by more: one that is wholly gone is changed by 1.
TENSOR_TOLERANCE = 0.5
# A step that differs from itself by more than this share of a bound cannot be held to it.
_REPEATS = 0.25
_PAIRS = 5
_SLOW_SECONDS = 1.0
_BLAMED = 3  # of the ranking's modules, where none of them is nonfinite


def default_tolerance(dtype: torch.dtype) -> float:
    """Ten times the dtype's eps: more than rounding alone does at usual depths, far less than what goes wrong."""
    return 10 * torch.finfo(dtype).eps


@dataclass
class PinSearch:
    """A set of pins, and what was shown about it.

    modules: to pin beside those that are already (empty: none is needed, if `verified`); tolerance: bound on the
    relative error of the gradient; error, held_out_error: the largest one over the windows searched on and held out;
    bias_tolerance: bound on the part of the error that is the same on every window;
    worst: what was found with these pins on all windows, or with none where no set does; without: the same without
    `modules`; needed: whether a bound is exceeded without them; parting: the first op where the step without `modules`
    parts from fp32; proof: the steps of training; cost_time, cost_memory: ratios to a step without `modules`;
    verified: held-out batches, census and training (where it was asked for) agree; undecided: why not, in words;
    helps: what a person can do about that, a kind of sentence in `verdict.py`;
    superfluous: modules that were pinned already without need; runs: steps that the search took. None: not measured;
    infinite: not finite in low precision.
    """

    tolerance: float
    bias_tolerance: float = math.inf
    modules: list[str] = field(default_factory=list)
    error: float | None = None
    held_out_error: float | None = None
    worst: GradientError | None = None
    without: GradientError | None = None
    needed: bool = False
    parting: Parting | None = None
    verified: bool = False
    undecided: str = ""
    helps: str = ""
    proof: Training = field(default_factory=Training)
    cost_time: float | None = None
    cost_memory: float | None = None
    superfluous: list[str] = field(default_factory=list)
    already: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    runs: int = 0

    @property
    def decision(self) -> str:
        """`safe`: nothing more is to be pinned; `pins`: `modules` are; or `not decided`."""
        return "not decided" if not self.verified else "pins" if self.modules else "safe"

    @property
    def error_without(self) -> float | None:
        """The error without `modules`, of the worst window."""
        return None if self.without is None else self.without.error

    @property
    def steps(self) -> int:
        """Steps of training in the proof."""
        return self.proof.steps

    @property
    def training(self) -> str:
        """The result of training, in words."""
        return self.proof.text

    @property
    def fp32_modules(self) -> list[str]:
        """The value for the run option: the earlier pins that are needed, and the new ones if verified."""
        new = self.modules if self.verified else []
        return [name for name in self.already if name not in self.superfluous] + new

    def as_dict(self) -> dict[str, Any]:
        """Return as in `diagnosis.json`: nonfinite numbers as strings."""
        left_out = ("worst", "without", "needed", "parting", "proof", "already")
        found = {name: value for name, value in vars(self).items() if name not in left_out}
        found |= {
            "fp32_modules": self.fp32_modules,
            "error_without": self.error_without,
            "worst_tensor": None if self.worst is None else self.worst.as_dict(),
            "tensor_tolerance": TENSOR_TOLERANCE,
            "bias": None if self.worst is None else self.worst.bias,
            "decision": self.decision,
            "steps": self.steps,
            "training": self.training,
            "training_detail": self.proof.detail,
            "parting": None if self.parting is None else self.parting.as_dict(),
            "training_worse": self.proof.worse,
            "training_comparison": None if self.proof.comparison is None else asdict(self.proof.comparison),
            "curves": {"reference": self.proof.reference, "pinned": self.proof.low},
        }
        return as_it_is_read(found)

    def yaml(self) -> str:
        """A file for `!include:` that says which modules to pin, with what was shown in its comment.

        Only of pins that are verified: raises ValueError of others.
        """
        if not self.verified or self.held_out_error is None or self.error_without is None:
            raise ValueError(f"these pins are not verified, so they are not written to a file: {self.undecided}.")
        without = f"{self.error_without:.2g}" if math.isfinite(self.error_without) else "not finite"
        names = json.dumps([escape(name) for name in self.fp32_modules], ensure_ascii=False)
        return (
            f"# gradient error {self.held_out_error:.2g} on held-out batches (tolerance {self.tolerance:.2g}, "
            f"{without} without); {self.training}\n"
            "# To use it, copy it beside your YAML:   pins: !include:fp32_modules.yaml\n"
            "#                                        fp32_modules: !ref <pins[fp32_modules]>\n"
            f"fp32_modules: {names}\n"
        )


def search_pins(
    trial: Trial,
    search: Sequence[Window],
    held_out: Sequence[Window],
    dtype: torch.dtype,
    scale: float,
    tolerance: float | None = None,
    ranked: Sequence[ModuleDrift] = (),
    steps: int = 100,
    seconds: float | None = None,
    already: Sequence[str] = (),
    bias_tolerance: float | None = None,
    repeats_within: float = 0.0,
    further: Sequence[Window] = (),
    prove: Callable[..., Training] = train_with_pins,
) -> PinSearch:
    """The smallest set of pins that is found: by rank, galloping and bisecting the prefix, then taken out one by one.

    search, held_out: windows to search on (at least three are better) and to verify on; ranked: what `drift` returned;
    steps: of training in the proof, at most (0: none is asked for); seconds: that it may take, about (None: as long as
    it needs); already: modules that are pinned, and stay so; bias_tolerance: bound on the part of the error that is the
    same on every batch (default: the tolerance); repeats_within: what an fp32 step differs from itself by; further:
    windows that the proof trains on as well; prove: what trains. The set is 1-minimal on the windows searched (no
    single pin can be left out), not the only one, and held-out windows and training decide whether it is `verified`.
    """
    bound = default_tolerance(dtype) if tolerance is None else tolerance
    found = PinSearch(bound, bound if bias_tolerance is None else bias_tolerance, already=list(already))
    if repeats_within > _REPEATS * min(found.tolerance, found.bias_tolerance):
        by = f"by {100 * repeats_within:.2g} %" if math.isfinite(repeats_within) else "without a bound"
        found.undecided, found.helps = f"the step is not reproducible: two runs in fp32 differ {by}", "make_repeatable"
        return found
    return _Search(trial, search, held_out, dtype, scale, found, seconds, further, prove).run(ranked, steps)


class _OutOfTime(Exception):
    """The search has used up its seconds."""


class _Search:
    def __init__(
        self,
        trial: Trial,
        search: Sequence[Window],
        held_out: Sequence[Window],
        dtype: torch.dtype,
        scale: float,
        found: PinSearch,
        seconds: float | None,
        further: Sequence[Window],
        prove: Callable[..., Training],
    ) -> None:
        self._trial, self._search, self._held_out, self._further = trial, list(search), list(held_out), further
        self._dtype, self._scale, self._already = dtype, scale, list(found.already)
        self._train = prove
        self._budget = Budget(seconds)
        self._measured: dict[frozenset[str], GradientError] = {}
        # The sums of the set that did last, so that held-out windows are added without taking the others again.
        self._kept: tuple[frozenset[str], ErrorSums] | None = None
        self._target = 1.0
        self._references: dict[int, Outcome] = {}
        self._judged: set[str] = set()
        self._worst = self._search[0]  # the window with the largest error without new pins
        self.found = found

    def run(self, ranked: Sequence[ModuleDrift], steps: int) -> PinSearch:
        found = self.found
        pins = dict.fromkeys(pin for row in ranked for pin in row.pins)
        order = [pin for pin in pins if not any(lies_in(pin, name) for name in self._already)]
        try:
            noise = GradientNoise()
            for window in (*self._search, *self._held_out):
                noise.add(self._reference(window))
            self._judged = noise.judged
            found.worst = found.without = self._of(())
            found.error = found.worst.error
            holds = self._find(order)
            if found.needed:
                self._explain(ranked)
            if holds:
                self._prove(steps)
        except _OutOfTime:
            found.undecided, found.helps = f"the time ran out after {found.runs} steps of the search", "more_time"
        return found

    def _find(self, order: list[str]) -> bool:
        """Whether there is a set that holds on all windows: `found.modules`. One that fails is searched on as well."""
        found, allowed, chosen = self.found, 1.0, list[str]()
        for widened in range(_WIDENED + len(self._held_out)):
            if widened or self._excess(()) > 1:
                found.needed, self._target = True, allowed / _MARGIN
                prefix = self._prefix(order, self._target)
                if prefix is None:
                    found.modules, found.error, found.worst = [], found.error_without, found.without
                    found.undecided, found.helps = self._nothing_does(order)
                    return False
                chosen = self._pruned(prefix, self._target)
            found.modules, found.error = chosen, self._of(chosen).error
            if not self._held_out:
                found.undecided = "no batch is left for the final test, because the search used them all"
                found.helps = "more_windows"
                return False
            failing = self._verified_with(chosen)
            if failing is None:
                return True
            found.needed = True
            if not chosen:
                found.without = found.worst
            if failing:
                self._held_out = [window for window in self._held_out if window is not failing[0]]
                self._search.append(failing[0])
                self._measured.clear()
                self._kept = None
                found.notes.append("A held-out batch failed, so the search was repeated with it")
            else:
                allowed /= _MARGIN
        found.undecided, found.helps = "pins that pass on the searched batches fail on others", "more_windows"
        return False

    def _explain(self, ranked: Sequence[ModuleDrift]) -> None:
        """Name the first op that is wrong, and say which layers are to be registered."""
        found = self.found
        found.parting = self._parting(())
        if found.parting is not None and str(found.parting) not in found.undecided:
            found.notes.append(f"The first op where {dtype_name(self._dtype)} and float32 part is {found.parting}")
        blamed = [row for row in ranked if not math.isfinite(row.sensitivity)] or ranked[:_BLAMED]
        names = [row.module for row in blamed if row.module.endswith(NOT_REGISTERED)]
        found.notes += how_to_register(name.removesuffix(NOT_REGISTERED) for name in names)

    def _parting(self, pins: Iterable[str]) -> Parting | None:
        if self._budget.is_spent:
            return None
        step = (self._trial, self._worst, self._dtype, self._scale)
        return find_parting(*step, [*self._already, *pins], self._pay_for_test)

    def _pay_for_test(self) -> bool:
        """Whether there is time for one more step in fp32; pays for it."""
        if self._budget.is_spent:
            return False
        self._budget.pay(torch.float32, self._budget.price(torch.float32))
        return True

    def _nothing_does(self, order: list[str]) -> tuple[str, str]:
        """Why no set of pins does, and what helps."""
        if not order:
            return "there is no module to pin: the error comes from ops outside of modules", "outside"
        left = self._of(order)
        error = f"the error is {100 * left.error:.2g} %" if math.isfinite(left.error) else "it is not finite"
        first, helps = self._parting(order), "outside"
        rest = "the rest comes from ops outside of modules, or from the noise of the batches"
        if first is not None:
            rest = f"with them, {dtype_name(self._dtype)} and float32 part first at {first}"
            helps = "outside" if first.module == OUTSIDE else "compare"
        return f"even with all {len(order)} candidates pinned {error}: {rest}", helps

    def _verified_with(self, names: Sequence[str]) -> list[Window] | None:
        """None if the set holds on held-out windows and on all together; else the windows that fail, worst first."""
        found, key = self.found, frozenset(names)
        if self._kept is None or self._kept[0] != key:
            self._measured.pop(key, None)
            self._of(names, keep=True)
        assert self._kept is not None
        sums, self._kept = self._kept[1], None
        errors = [self._add(sums, window, key) for window in self._held_out]
        found.held_out_error = max(errors)
        found.worst = sums.result(self._judged)
        by_error = sorted(zip(errors, self._held_out, strict=True), key=lambda pair: -pair[0])
        failing = [window for error, window in by_error if error > found.tolerance]
        if failing:
            return failing
        return [] if self._exceeds(found.worst) > 1 else None

    def _prefix(self, order: list[str], target: float) -> list[str] | None:
        """The shortest beginning of `order` that does, where the excess falls with its length."""
        if not order or self._excess(order) > target:
            return None
        low, high = 0, 1
        while high < len(order) and self._excess(order[:high]) > target:
            low, high = high, 2 * high
        high = min(high, len(order))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._excess(order[:middle]) <= target else (middle, high)
        return order[:high]

    def _pruned(self, chosen: list[str], target: float) -> list[str]:
        """`chosen` without the pins that can be left out, the least sensitive tried first, until none can."""
        before = None
        while chosen != before:
            before = chosen
            for name in reversed(before):
                fewer = [other for other in chosen if other != name]
                if self._excess(fewer) <= target:
                    chosen = fewer
        return chosen

    def _excess(self, names: Iterable[str]) -> float:
        return self._exceeds(self._of(names))

    def _exceeds(self, error: GradientError) -> float:
        return error.excess(self.found.tolerance, self.found.bias_tolerance, TENSOR_TOLERANCE)

    def _of(self, names: Iterable[str], keep: bool = False) -> GradientError:
        """Return the errors of the set on the searched windows."""
        key = frozenset(names)
        if key not in self._measured:
            sums = ErrorSums()
            errors = [self._add(sums, window, key) for window in self._search]
            if not key:
                self._worst = self._search[errors.index(max(errors))]
            self._measured[key] = sums.result(self._judged)
            if keep or self._exceeds(self._measured[key]) <= self._target:
                self._kept = (key, sums)
        return self._measured[key]

    def _reference(self, window: Window) -> Outcome:
        if self._budget.is_spent:
            raise _OutOfTime
        key = id(window)
        if key not in self._references:
            with self._budget.step(torch.float32):
                self._references[key] = self._trial.run(window)
        return self._references[key]

    def _add(self, sums: ErrorSums, window: Window, names: frozenset[str]) -> float:
        """Count the window, and return its error."""
        reference = self._reference(window)
        self.found.runs += 1
        try:
            with self._budget.step(self._dtype):
                low = self._trial.run_finite(window, self._dtype, self._scale, [*self._already, *sorted(names)])
        except Exception as error:  # a mask value beyond the dtype's range, an op that the device lacks
            note = f"A step in {dtype_name(self._dtype)} raises an error: {first_line(error).rstrip('.')}"
            if note not in self.found.notes:
                self.found.notes.append(note)
            return sums.fail()
        return sums.add(low, reference)

    def _prove(self, steps: int) -> None:
        found = self.found
        pins = [*self._already, *found.modules]
        holds = not found.modules or self._pins_hold_and_cost(pins)
        fit, pairs = self._budget.training(steps, self._dtype)
        windows = [*self._search, *self._held_out, *self._further]
        if steps and not fit:
            found.proof = Training(text="no time was left for training", helps="more_time")
        else:
            found.proof = self._train(self._trial, windows, self._dtype, self._scale, pins, fit, pairs)
            if fit < steps:
                found.notes.append(f"The time was enough for only {fit} of {steps} training steps")
        found.verified = holds and (found.proof.proven or steps == 0)
        if not found.verified:
            found.undecided, found.helps = (
                (found.proof.text, found.proof.helps) if holds else ("a pin has no effect", "compare")
            )
            return
        with suppress(_OutOfTime):  # what is verified stays so
            self._look_for_superfluous()

    def _pins_hold_and_cost(self, pins: list[str]) -> bool:
        """Whether the found pins do what they are to do; notes what they cost."""
        found, window = self.found, self._search[0]
        census = take_census(self._trial, window, self._dtype, self._scale, pins=pins)
        broken = pins_hold(census, found.modules)
        found.notes += [f"A pin has no effect: {pin['module']}: {pin['reason']}" for pin in broken]
        pairs = 2 if self._budget.price(self._dtype) > _SLOW_SECONDS else _PAIRS
        with suppress(Exception):  # without the pins the step may not run at all
            found.cost_time, found.cost_memory = cost(
                self._trial, window, self._dtype, self._scale, pins, self._already, pairs
            )
        return not broken

    def _look_for_superfluous(self) -> None:
        """Find earlier pins that are not needed (with the new ones, and one by one)."""
        kept = list(self._already)
        for name in list(kept):
            fewer = [other for other in kept if other != name]
            saved, self._already = self._already, fewer
            sums = ErrorSums()
            try:
                for window in (*self._search, *self._held_out):
                    self._add(sums, window, frozenset(self.found.modules))
            finally:
                self._already = saved
            if self._exceeds(sums.result(self._judged)) <= 1 / _MARGIN:
                kept = fewer
                self.found.superfluous.append(name)
