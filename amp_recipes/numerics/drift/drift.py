"""Ranks modules by the effect on the loss of running their own ops in low precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from amp_recipes.files.strict_json import as_it_is_read
from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.drift.own_ops import LOW, CallDtypes, OwnOps, floating, hookable
from amp_recipes.numerics.drift.watch import Inside, LowInfinities, Measure, Measured
from amp_recipes.numerics.trial import Outcome, Trial, Window, gradient_error
from amp_recipes.numerics.watch.observe import OUTSIDE, Attribution, OpWatch, is_registered
from amp_recipes.numerics.watch.op_kinds import op_kind
from amp_recipes.precision.torch_private import Op


@dataclass
class ModuleDrift:
    """The effect of low precision on one module.

    module: its name; of one that is not registered the way to it, with NOT_REGISTERED; pins: the registered modules
    whose pin covers it: itself, or those in whose forward it runs (empty: the recipe itself calls it);
    local_error: |d| / |y|, y the module's outputs in fp32 and d the error that its own ops make in low precision;
    sensitivity: S^2 = sum over channels c of |dL/dy_c|^2 |d_c|^2, how far d can move the loss if errors of different
    channels are independent (infinite where the loss depends on a value that is not finite); gradient_error:
    |g - g_ref| / |g_ref| of the module's own parameters with all modules in low precision (None: none of them is
    trained); above_max, below_normal: shares of the values that flow in and out, in fp32, above 65504 and in
    (0, 6.1e-5), whatever the dtype; largest: the largest finite magnitude there and inside; calls: of its forward.
    Squares are averaged over windows.
    """

    module: str
    local_error: float
    sensitivity: float
    gradient_error: float | None
    above_max: float
    below_normal: float
    largest: float
    calls: int
    pins: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.pins is None:
            self.pins = (self.module,)

    def as_dict(self) -> dict[str, Any]:
        """Return as in `diagnosis.json`: nonfinite numbers as strings."""
        return as_it_is_read(vars(self))


def drift(
    trial: Trial,
    windows: Sequence[Window],
    dtype: torch.dtype,
    scale: float = 1.0,
    candidates: Iterable[str] | None = None,
    pins: Iterable[str] | None = None,
) -> list[ModuleDrift]:
    """All modules that own low-precision ops, the most sensitive first.

    Each window is run in `dtype` as a whole, and in fp32. In the fp32 run, each call of a module is made once more with
    its own ops in `dtype`, on the same inputs, random numbers and buffers; modules inside it stay fp32. What its ops
    were given in low precision in the low run they are given rounded so, and are compared with fp32 on the same, so
    that each rounding is laid at the door of one module. dL/dy comes from the backward of the fp32 run.
    Modules that are not registered count like others, where the way to them is found; else the ops of such a module
    are counted to the one in whose forward it runs.

    scale: of the loss in the low run; candidates: names of modules (default: those in whose own forward an op computes
    on or to a low dtype); pins: names of the modules that are pinned meanwhile (default: those that are).
    S is of the forward, and of the first order; it is infinite, too, for a module in whose backward the gradients of
    the low run cease to be finite, and for one whose infinities change the fp32 step when they are put there, though
    their gradient in fp32 is zero: 0 * inf is NaN. It is 0 for a module under `no_grad` whose values are finite.
    """
    runs = _Runs(trial, dtype, scale, pins, candidates)
    found: dict[str, tuple[list[Measured], list[float]]] = {}
    for window in windows:
        low, reference, measured = runs.both(window)
        for name, one in measured.items():
            if one.calls or one.raised:
                seen, errors = found.setdefault(name, ([], []))
                seen.append(one)
                errors += _own_gradient_error(trial.modules, runs.modules[name], low, reference)
    ranked = [
        replace(_mean(name, seen, errors, len(windows)), pins=runs.pins_for(name))
        for name, (seen, errors) in found.items()
    ]
    return sorted(ranked, key=lambda row: -row.sensitivity)


class _Runs:
    """Runs windows in low precision and in fp32.

    modules: all that can be measured, by name.
    """

    def __init__(
        self,
        trial: Trial,
        dtype: torch.dtype,
        scale: float,
        pins: Iterable[str] | None,
        candidates: Iterable[str] | None,
    ) -> None:
        self._trial, self._dtype, self._scale = trial, dtype, scale
        self._pins = None if pins is None else list(pins)
        self._candidates = None if candidates is None else list(candidates)
        self.modules = hookable(trial.modules, trial.holders)
        self._ran_in: dict[str, dict[str, None]] = {}

    def pins_for(self, name: str) -> tuple[str, ...]:
        """The modules whose pin covers this one."""
        return (name,) if is_registered(name) else tuple(each for each in self._ran_in[name] if each != OUTSIDE)

    def both(self, window: Window) -> tuple[Outcome | None, Outcome, dict[str, Measured]]:
        """The low run (None: it raises) and the fp32 run of a window, and what was measured in them."""
        dtypes = CallDtypes(self.modules)
        low, owners = self._low_run(window, dtypes)
        names = owners if self._candidates is None else self._candidates
        reference, measured = self._measured(window, names, dtypes)
        if low is not None and low.loss_is_finite and not low.is_finite and reference.is_finite:
            for name in self._backward_births(window, low.scale) & measured.keys():
                measured[name].breaks_backward = True
        for name, one in measured.items():
            if one.overflows and not one.is_harmful:
                one.spoils = self._spoils(window, name, dtypes, reference)
        return low, reference, measured

    def _low_run(self, window: Window, dtypes: CallDtypes) -> tuple[Outcome | None, list[str]]:
        """Run the window in low precision (None: it raises); also returns the modules that own low ops."""
        trial, low = self._trial, None
        owners = _LowOwners(trial, self.modules)
        try:
            low = trial.run(
                window, self._dtype, self._scale, self._pins, watch=[dtypes, OpWatch(owners.at, owners.saw)]
            )
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a constant beyond the format, an op that the device lacks in it
            pass
        for name, around in owners.at.ran_in.items():
            self._ran_in.setdefault(name, {}).update(around)
        if low is None:
            return None, [name for name in self.modules if is_registered(name) or name in self._ran_in]
        if low.loss_is_finite and not low.is_finite and self._scale > 1.0:
            low = trial.run_finite(window, self._dtype, self._scale / 16, self._pins)
        return low, list(owners.found)

    def _measured(self, window: Window, names: list[str], dtypes: CallDtypes) -> tuple[Outcome, dict[str, Measured]]:
        """The fp32 run, and what was measured in it."""
        own_ops = OwnOps(self.modules, dtypes, self._dtype, self._trial.device)

        def run(let_flow: set[str]) -> tuple[Outcome, dict[str, Measured]]:
            inside = Inside(self._trial.modules, self._trial.holders)
            measure = Measure(self.modules, names, own_ops, let_flow)
            reference = self._trial.run(window, pins=self._pins, watch=[OpWatch(inside.at, inside.saw), measure])
            for name, one in measure.found.items():
                one.inside = inside.largest.get(name, 0.0)
            return reference, measure.found

        if not dtypes.without_gradient & set(names):
            return run(set())
        try:
            return run(dtypes.without_gradient)
        except (RuntimeError, TypeError):
            return run(set())  # it does with an output what only a tensor without gradient allows: then S of that is 0

    def _spoils(self, window: Window, name: str, dtypes: CallDtypes, reference: Outcome) -> bool:
        """Whether the fp32 step is another with what low precision makes nonfinite in this module."""
        own_ops = OwnOps(self.modules, dtypes, self._dtype, self._trial.device)
        try:
            outcome = self._trial.run(window, pins=self._pins, watch=[LowInfinities(self.modules[name], own_ops)])
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the recipe checks its values, or does with an output what no other tensor allows
            return True
        return gradient_error(outcome, reference) > 10 * torch.finfo(self._dtype).eps

    def _backward_births(self, window: Window, scale: float) -> set[str]:
        """Names of the modules in whose own backward an op makes, of finite values, one that is not."""
        at = Attribution(self._trial.modules, holders=self._trial.holders)
        found: set[str] = set()

        def saw(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if at.here.phase == "backward" and not _are_finite(output) and _are_finite(args, kwargs):
                found.add(at.here.module)

        self._trial.run(window, self._dtype, scale, self._pins, watch=[OpWatch(at, saw)])
        return found


def _mean(name: str, seen: list[Measured], gradient_errors: list[float], windows: int) -> ModuleDrift:
    """Combine the results of all windows for one module: root mean squares, shares, the largest magnitude."""
    values = max(1, sum(one.values for one in seen))
    squares = [error**2 for error in gradient_errors]
    return ModuleDrift(
        module=name,
        local_error=math.sqrt(sum(one.squared_local_error for one in seen) / windows),
        sensitivity=math.sqrt(sum(one.squared_sensitivity for one in seen) / windows),
        gradient_error=math.sqrt(math.fsum(squares) / len(squares)) if squares else None,
        above_max=sum(one.above for one in seen) / values,
        below_normal=sum(one.below for one in seen) / values,
        largest=max(max(one.largest, one.inside) for one in seen),
        calls=sum(one.calls for one in seen),
    )


class _LowOwners:
    """Names of the modules in whose own forward an op computes on a low dtype, or to one, in the order of these ops."""

    def __init__(self, trial: Trial, modules: dict[str, nn.Module]) -> None:
        self.at = Attribution(trial.modules, holders=trial.holders)
        self._known = modules
        self.found: dict[str, None] = {}

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        dtypes = {tensor.dtype for tensor in tensors_in(args, kwargs, output)}
        if op_kind(op).doing != "compute" or dtypes.isdisjoint(LOW):
            return
        place = self.at.here
        if place.phase == "backward" or place.module in (OUTSIDE, *self.found):
            return
        name = place.module if place.module in self._known or is_registered(place.module) else self.at.registered
        if name == OUTSIDE:
            return
        while name and name not in self._known:  # a scripted module's ops count for the one around it
            name = name.rpartition(".")[0]
        if name in self._known:
            self.found[name] = None


def _are_finite(*values: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in floating(values) if tensor.is_floating_point())


def _own_gradient_error(modules: nn.Module, module: nn.Module, low: Outcome | None, reference: Outcome) -> list[float]:
    """|g - g_ref| / |g_ref| over the parameters that the module itself holds; empty if none of them got a gradient."""
    own = {id(parameter) for parameter in module.parameters(recurse=False)}
    names = {name for name, parameter in modules.named_parameters() if id(parameter) in own}
    wanted = _only(names, reference)
    if low is None:
        return [math.inf] if wanted.gradients else []
    given = _only(names, low)
    return [gradient_error(given, wanted)] if given.gradients or wanted.gradients else []


def _only(names: set[str], outcome: Outcome) -> Outcome:
    """The outcome with these parameters' gradients alone."""
    # A window with several updates has `weight#2` and so on.
    own = {key: gradient for key, gradient in outcome.gradients.items() if key.partition("#")[0] in names}
    return replace(outcome, losses=[], gradients=own)
