"""Finds the modules that a device cannot run in a low precision, and proves that pinning them to fp32 helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from amp_recipes.files.user_code import Line, lies_with_the_user
from amp_recipes.numerics.trial import Trial, Window, first_line
from amp_recipes.numerics.watch.observe import OUTSIDE, Attribution, OpWatch, op_name
from amp_recipes.precision.torch_private import Op


@dataclass(frozen=True)
class Unrunnable:
    """The reason why a step does not run in a precision.

    errors: pattern for `fp32_modules` -> (the first module of that pattern that raised, the first line of its error).
    With all patterns pinned the step runs. Empty: no pins help, only fp32.
    """

    errors: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        return "; ".join(f"{name} raises {text!r}" for name, text in self.errors.values())


def find_unrunnable(
    trial: Trial, window: Window, dtype: torch.dtype, pinned: Iterable[str] = (), kind: type[Exception] = RuntimeError
) -> Unrunnable | None:
    """Find why `window` does not run under autocast to `dtype`; None if it does, or if fp32 does not run either.

    pinned: names of the modules that are pinned to fp32 already; kind: of the errors that count. Leaves the run
    unchanged. Takes one step where all is well; else one for each kind of module that fails, and two more. Raises what
    the step raises of another kind, and torch.OutOfMemoryError.
    """
    pinned = list(pinned)
    errors = _cure(trial, window, dtype, pinned, kind)
    # Once more as it was: an error that comes and goes by itself is none of the precision's.
    if errors is None or _failure(trial, window, dtype, pinned, kind) is None:
        return None
    return Unrunnable(errors)


def pinned_by(modules: nn.Module, found: Unrunnable) -> list[str]:
    """The names of the modules that the patterns of `found` pin."""
    return list(dict.fromkeys(pin for name, _ in found.errors.values() for pin in _kind(modules, name)[1]))


@dataclass(frozen=True)
class Raised:
    """What a step raises, and where.

    error: its class and first line; module: in whose code, empty outside of modules; op: that raised it, empty for
    Python code; line: of the user's code.
    """

    error: str
    module: str = ""
    op: str = ""
    line: Line | None = None


def where_it_raises(trial: Trial, window: Window, dtype: torch.dtype, pins: Iterable[str]) -> Raised | None:
    """Run `window` once more, watched; None if nothing is raised."""
    ops = _RunningOp(trial.modules)
    try:
        trial.run(window, dtype, pins=pins, watch=[OpWatch(ops.at, ops.saw, ops.about_to_see)])
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        module = _innermost_module(error, trial.modules) or ""
        return Raised(what_raised(error), module or ops.module, ops.name, ops.line or _user_line_of(error))
    return None


def what_raised(error: Exception) -> str:
    """The class of an error, and its first line."""
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"


class _RunningOp:
    """Knows the op that runs now: of a backward also its module and its line."""

    def __init__(self, modules: nn.Module) -> None:
        self.at = Attribution(modules, lines=True)
        self.name = self.module = ""
        self.line: Line | None = None

    def about_to_see(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = op_name(op)
        if self.at.here.phase == "backward":
            self.module, self.line = self.at.here.module.replace(OUTSIDE, ""), self.at.line

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.name = self.module = ""
        self.line = None


def _user_line_of(error: Exception) -> Line | None:
    """The innermost line of the user's code on the way to the error."""
    found = None
    for frame, number in walk_tb(error.__traceback__):
        if lies_with_the_user(frame.f_code.co_filename):
            found = Line(frame.f_code.co_filename, number)
    return found


def _cure(
    trial: Trial, window: Window, dtype: torch.dtype, pinned: list[str], kind: type[Exception]
) -> dict[str, tuple[str, str]] | None:
    """Find the pins for `Unrunnable.errors`; None if the step runs without, or does not run in fp32 either."""
    pins, errors = list(pinned), {}
    while (failure := _failure(trial, window, dtype, pins, kind)) is not None:
        name, text = failure
        if name is None or name in pins:
            return {} if _failure(trial, window, torch.float32, pins, kind) is None else None
        pattern, added = _kind(trial.modules, name)
        errors[pattern] = name, text
        pins += added
    return errors or None


def _failure(
    trial: Trial, window: Window, dtype: torch.dtype, pins: list[str], kind: type[Exception]
) -> tuple[str | None, str] | None:
    """The module in which the step fails, if it is in one, and what the error says; None where it runs."""
    try:
        trial.run(window, dtype, pins=pins)
    except torch.OutOfMemoryError:
        raise
    except kind as error:
        return _innermost_module(error, trial.modules), first_line(error)
    return None


def _innermost_module(error: BaseException, modules: nn.Module) -> str | None:
    """The name of the innermost module whose method raised the error; None if it came from outside of all."""
    names = {id(module): name for name, module in modules.named_modules() if name}
    found = None
    for frame, _ in walk_tb(error.__traceback__):
        found = names.get(id(frame.f_locals.get("self")), found)
    return found


def _kind(modules: nn.Module, name: str) -> tuple[str, list[str]]:
    """The pattern that pins this module, and all that it pins: of torch's own modules the whole class.

    Where a device has no LSTM in bf16, it has none for any of a model's LSTMs. A class of the recipe's own says less.
    """
    kind = type(modules.get_submodule(name))
    if not kind.__module__.startswith("torch.nn."):
        return name, [name]
    return f"type:{kind.__name__}", [
        other for other, module in modules.named_modules() if type(module).__name__ == kind.__name__
    ]
