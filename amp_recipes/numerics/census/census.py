"""Takes the census of a step: which ops ran in which dtypes, and who asked for which cast, at what cost."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from amp_recipes.numerics.census.neutrality import differing_modules, same_bits
from amp_recipes.numerics.census.rows import (
    LOW,
    PINNED,
    CacheEffect,
    CastCount,
    Census,
    FrozenRecast,
    Misplaced,
    OpCount,
    RoundTripCount,
)
from amp_recipes.numerics.census.watch import CensusWatch, Tally, scripted
from amp_recipes.numerics.trial import Outcome, Trial, Window, now
from amp_recipes.numerics.watch.observe import dtype_name, is_registered
from amp_recipes.precision import decorated_modules, pinned_modules
from amp_recipes.precision.torch_private import has_kernel, is_dispatch_key

_WIDE = {"float32", "float64"}
# Autocast has a rule for `matmul`, not for each of the ops that a recipe may call in its place.
_MAY_LACK_A_RULE = {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "addr", "dot", "vdot"}
_MOST_TIMED = 50  # kinds of casts that are run alone to see what they take
_TIMES = 3


def take_census(
    trial: Trial, window: Window, dtype: torch.dtype, scale: float = 1.0, pins: Iterable[str] | None = None
) -> Census:
    """The census of one window under autocast to `dtype`, with the proof that watching did not change the step.

    pins: names of the modules that are pinned for it, and no others (default: those that are). Takes four steps, two
    of them watched; six where the watched step differs from the bare ones. Bytes count each element that an op reads
    or writes, whatever the layout in memory.
    """
    pins = None if pins is None else list(pins)
    run = partial(trial.run, window, dtype, scale, pins)
    bare = run()
    watch = CensusWatch(trial.modules, expects_autocast=dtype is not torch.float32)
    watched = run(watch=[watch])
    again = run()
    census = census_of(watch, trial.modules, dtype, trial.device.type, pins)
    if dtype is not torch.float32:
        census.cache = _cache_effect(trial.modules, run, watch, watched)
    census.never_called = [] if watched.pins is None else watched.pins.never_called()
    census.seconds, census.bare_seconds = watched.seconds, min(bare.seconds, again.seconds)
    census.cast_seconds = _cast_seconds(watch, trial.device)
    census.neutral = same_bits(bare, watched)
    if census.neutral:
        census.neutrality_note = "Watching the step changed no bit of the losses and gradients."
    elif not same_bits(bare, again):
        census.neutrality_note = (
            "Cannot tell whether watching changes the step: it is not reproducible, since two runs without watching "
            "differ."
        )
    else:
        changed = differing_modules(trial.modules, run)
        where = ", ".join(changed[:5]) + (" ..." if len(changed) > 5 else "")
        census.neutrality_note = (
            f"Watching the step changes it; first in {where}."
            if changed
            else "Watching the step changes it, but in no module."
        )
    return census


def pins_hold(census: Census, names: Iterable[str]) -> list[dict[str, str]]:
    """List the pins that this census refutes, as {module, reason}; empty: all are proven.

    A pin holds if it was called, and if within it, in forward, recompute and backward, nothing was done in a dtype
    below float32 but to cast it.
    """
    violations = []
    for name in names:
        if name in census.never_called:
            violations.append({"module": name, "reason": "its forward was not called, so the pin had no effect"})
        elif name not in census.called:
            violations.append({"module": name, "reason": "it was not called as a module, so its ops are unknown"})
        for row in census.ops:
            if row.counts_as_low and lies_in(row.module, name):
                reason = f"{row.op} ran in {row.low} in the {row.phase}, {row.calls} times"
                violations.append({"module": row.module, "reason": reason})
    return violations


def lies_in(module: str, name: str) -> bool:
    """Whether a module is the named one or below it."""
    return module == name or (module.startswith(f"{name}.") if name else is_registered(module))


def census_of(
    watch: CensusWatch, modules: nn.Module, dtype: torch.dtype, device_type: str, pins: Sequence[str] | None
) -> Census:
    """Make a census from `watch`, without the parts that need other runs."""
    standing = pinned_modules(modules) if pins is None else pins
    census = Census(
        dtype=dtype_name(dtype),
        ops=_ops(watch),
        casts=_casts(watch),
        called={name for name in watch.at.called if name[:1] != "<"},
        frozen_recasts=_frozen_recasts(watch, modules),
        cancelling=_cancelling(watch),
        pins=list(dict.fromkeys([*standing, *decorated_modules(modules)])),
    )
    if census.dtype in LOW:
        census.meant_low = _meant_low(census, scripted(modules), device_type)
    census.meant_fp32 = _meant_fp32(census)
    return census


def _meant_fp32(census: Census) -> list[Misplaced]:
    """Ops that ran low inside of pinned modules."""
    reason = "inside a module that is pinned to float32"
    low = [row for row in census.ops if row.counts_as_low]
    pinned = [row for row in low if any(lies_in(row.module, name) for name in census.pins)]
    return [Misplaced(row.module, row.phase, row.op, row.low, row.calls, reason) for row in pinned]


def _ops(watch: CensusWatch) -> list[OpCount]:
    tallies: defaultdict[tuple[Any, ...], Tally] = defaultdict(Tally)
    for (place, signature), calls in watch.counts.items():
        kind = signature.kind
        traits = (kind.doing, kind.writes_into, kind.is_product)
        row = (*place, kind.name, _names(signature.inputs), _names(signature.outputs), *traits)
        tallies[row].add(signature.moved * calls, calls)
    return [OpCount(*row[:5], tally.calls, tally.bytes, *row[5:]) for row, tally in tallies.items()]


def _names(dtypes: tuple[torch.dtype, ...]) -> tuple[str, ...]:
    return tuple(map(dtype_name, dtypes))


def _casts(watch: CensusWatch) -> list[CastCount]:
    tallies: defaultdict[tuple[Any, ...], Tally] = defaultdict(Tally)
    for key, tally in watch.casts.items():
        row = (*key.place, key.by, dtype_name(key.from_), dtype_name(key.to), key.line)
        tallies[row].add(tally.bytes, tally.calls)
    return [CastCount(*row[:5], tally.calls, tally.bytes, row[5]) for row, tally in tallies.items()]


def _frozen_recasts(watch: CensusWatch, modules: nn.Module) -> list[FrozenRecast]:
    trained = {name for name, parameter in modules.named_parameters() if parameter.requires_grad}
    return [
        FrozenRecast(key.weight, key.place.module, dtype_name(key.to), tally.calls, tally.bytes)
        for key, tally in watch.casts.items()
        if key.by == "autocast" and key.weight is not None and key.weight not in trained
    ]


def _cancelling(watch: CensusWatch) -> list[RoundTripCount]:
    return [
        RoundTripCount(
            there=trip.there.module,
            back=trip.back.module,
            phase=trip.back.phase,
            dtype=dtype_name(trip.dtype),
            through=dtype_name(trip.through),
            loses=torch.promote_types(trip.dtype, trip.through) != trip.through,
            calls=tally.calls,
            bytes=tally.bytes,
        )
        for trip, tally in watch.round_trips.items()
    ]


def _meant_low(census: Census, scripts: set[str], device_type: str) -> list[Misplaced]:
    """Products that ran wide in a run at a low dtype, and why they did."""
    found = []
    for row in census.ops:
        if row.phase == "forward" and row.is_product and row.inputs and set(row.inputs) <= _WIDE:
            dtype = "float64" if "float64" in row.inputs else "float32"
            reason = _why_wide(row, census.pins, scripts, device_type)
            found.append(Misplaced(row.module, row.phase, row.op, dtype, row.calls, reason))
    return found


def _why_wide(row: OpCount, pins: Sequence[str], scripts: set[str], device_type: str) -> str:
    base = row.op.rpartition("::")[2].rstrip("_")
    if row.module in scripts:
        return "in TorchScript"
    if any(lies_in(row.module, name) for name in pins):
        return PINNED
    if "float64" in row.inputs:
        return "the input is float64, which autocast does not cast"
    if row.writes_into:
        return f"writes {row.writes_into}, and autocast does not cast such ops"
    if base in _MAY_LACK_A_RULE and not _has_rule(base, device_type):
        return f"autocast has no rule for it on {device_type}"
    return "autocast was off: the code disables it there, or the call is outside of its region"


def _has_rule(base: str, device_type: str) -> bool:
    key = f"Autocast{device_type.upper()}"
    return not is_dispatch_key(key) or has_kernel(f"aten::{base}", key)


def _cache_effect(modules: nn.Module, run: Callable[..., Outcome], watch: CensusWatch, watched: Outcome) -> CacheEffect:
    """Another watched run, with autocast's cache off."""
    without = CensusWatch(modules)
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # each autocast region begins with what is set here
    try:
        outcome = run(watch=[without])
    finally:
        torch.set_autocast_cache_enabled(enabled)
    with_cache, without_cache = _weight_casts(watch), _weight_casts(without)
    return CacheEffect(
        casts=with_cache.calls,
        casts_without=without_cache.calls,
        bytes_saved=without_cache.bytes - with_cache.bytes,
        same_gradients=same_bits(watched, outcome),
    )


def _weight_casts(watch: CensusWatch) -> Tally:
    total = Tally()
    for key, tally in watch.casts.items():
        if key.by == "autocast" and key.weight is not None:
            total.add(tally.bytes, tally.calls)
    return total


def _cast_seconds(watch: CensusWatch, device: torch.device) -> float:
    """Measure the casts, each run alone on dense memory; the smaller kinds are estimated by their bytes."""
    moved = {
        (elements, from_, to): elements * (from_.itemsize + to.itemsize) * calls
        for (elements, from_, to), calls in watch.cast_sizes.items()
    }
    timed = heapq.nlargest(_MOST_TIMED, moved, key=lambda kind: moved[kind])
    seconds = sum(watch.cast_sizes[kind] * _seconds_of_cast(device, *kind) for kind in timed)
    timed_bytes = sum(moved[kind] for kind in timed)
    return seconds * sum(moved.values()) / timed_bytes if timed_bytes else 0.0


def _seconds_of_cast(device: torch.device, elements: int, from_: torch.dtype, to: torch.dtype) -> float:
    tensor = torch.zeros(elements, dtype=from_, device=device)
    tensor.to(to)
    began = now(device)
    for _ in range(_TIMES):
        tensor.to(to)
    return (now(device) - began) / _TIMES
