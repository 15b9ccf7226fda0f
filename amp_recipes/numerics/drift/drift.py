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
from amp_recipes.numerics.drift.watch import Inside, Measure, Measured
from amp_recipes.numerics.trial import Outcome, Trial, Window, gradient_error
from amp_recipes.numerics.watch.observe import OUTSIDE, Attribution, OpWatch
from amp_recipes.numerics.watch.op_kinds import op_kind
from amp_recipes.precision.torch_private import Op


@dataclass
class ModuleDrift:
    """The effect of low precision on one module.

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

    scale: of the loss in the low run; candidates: names of modules (default: those in whose own forward an op computes
    on or to a low dtype); pins: names of the modules that are pinned meanwhile (default: those that are).
    S is of the forward, and of the first order; it is infinite, too, for a module in whose backward the gradients of
    the low run cease to be finite. It is 0 for a module under `no_grad` whose values are finite.
    """
    pins = None if pins is None else list(pins)
    chosen = None if candidates is None else list(candidates)
    found: dict[str, tuple[list[Measured], list[float]]] = {}
    for window in windows:
        low, reference, measured = _run_both(trial, window, dtype, scale, pins, chosen)
        for name, one in measured.items():
            if one.calls or one.raised:
                seen, errors = found.setdefault(name, ([], []))
                seen.append(one)
                errors += _own_gradient_error(trial.modules, name, low, reference)
    ranked = [_mean(name, seen, errors, len(windows)) for name, (seen, errors) in found.items()]
    return sorted(ranked, key=lambda row: -row.sensitivity)


def _run_both(
    trial: Trial, window: Window, dtype: torch.dtype, scale: float, pins: list[str] | None, chosen: list[str] | None
) -> tuple[Outcome | None, Outcome, dict[str, Measured]]:
    """The low run (None: it raises) and the fp32 run of a window, and what was measured in them."""
    dtypes = CallDtypes(trial.modules)
    low, owners = _low_run(trial, window, dtype, scale, pins, dtypes)
    reference, measured = _measured(trial, window, dtype, pins, owners if chosen is None else chosen, dtypes)
    if low is not None and low.loss_is_finite and not low.is_finite and reference.is_finite:
        for name in _backward_births(trial, window, dtype, low.scale, pins) & measured.keys():
            measured[name].breaks_backward = True
    return low, reference, measured


def _low_run(
    trial: Trial, window: Window, dtype: torch.dtype, scale: float, pins: list[str] | None, dtypes: CallDtypes
) -> tuple[Outcome | None, list[str]]:
    """Run the window in low precision (None: it raises); also returns the modules that own low ops."""
    owners = _LowOwners(trial.modules)
    try:
        low = trial.run(window, dtype, scale, pins, watch=[dtypes, OpWatch(owners.at, owners.saw)])
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # a constant beyond the format, an op that the device lacks in it
        return None, list(hookable(trial.modules))
    if low.loss_is_finite and not low.is_finite and scale > 1.0:
        low = trial.run_finite(window, dtype, scale / 16, pins)
    return low, list(owners.found)


def _measured(
    trial: Trial, window: Window, dtype: torch.dtype, pins: list[str] | None, names: list[str], dtypes: CallDtypes
) -> tuple[Outcome, dict[str, Measured]]:
    """The fp32 run, and what was measured in it."""
    own_ops = OwnOps(trial.modules, dtypes, dtype, trial.device)

    def run(let_flow: set[str]) -> tuple[Outcome, dict[str, Measured]]:
        inside, measure = Inside(trial.modules), Measure(trial.modules, names, own_ops, let_flow)
        reference = trial.run(window, pins=pins, watch=[OpWatch(inside.at, inside.saw), measure])
        for name, one in measure.found.items():
            one.inside = inside.largest.get(name, 0.0)
        return reference, measure.found

    if not dtypes.without_gradient & set(names):
        return run(set())
    try:
        return run(dtypes.without_gradient)
    except (RuntimeError, TypeError):
        return run(set())  # it does with an output what only a tensor without gradient allows: then S of that is 0


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

    def __init__(self, modules: nn.Module) -> None:
        self.at = Attribution(modules)
        self._known = hookable(modules)
        self.found: dict[str, None] = {}

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        dtypes = {tensor.dtype for tensor in tensors_in(args, kwargs, output)}
        if op_kind(op).doing != "compute" or dtypes.isdisjoint(LOW):
            return
        place = self.at.here
        if place.phase == "backward" or place.module in (OUTSIDE, *self.found):
            return
        name = place.module
        while name and name not in self._known:  # a scripted module's ops count for the one around it
            name = name.rpartition(".")[0]
        if name in self._known:
            self.found[name] = None


def _backward_births(
    trial: Trial, window: Window, dtype: torch.dtype, scale: float, pins: list[str] | None
) -> set[str]:
    """Names of the modules in whose own backward an op makes, of finite values, one that is not."""
    at = Attribution(trial.modules)
    found: set[str] = set()

    def saw(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if at.here.phase == "backward" and not _are_finite(output) and _are_finite(args, kwargs):
            found.add(at.here.module)

    trial.run(window, dtype, scale, pins, watch=[OpWatch(at, saw)])
    return found


def _are_finite(*values: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in floating(values) if tensor.is_floating_point())


def _own_gradient_error(modules: nn.Module, name: str, low: Outcome | None, reference: Outcome) -> list[float]:
    """|g - g_ref| / |g_ref| over the parameters that the module itself holds; empty if none of them got a gradient."""
    own = {id(parameter) for parameter in modules.get_submodule(name).parameters(recurse=False)}
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
