"""Finds the modules that a device cannot run in a low precision, and proves that pinning them to fp32 helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from traceback import walk_tb

import torch
from torch import nn

from amp_recipes.numerics.trial import Trial, Window, first_line


@dataclass(frozen=True)
class Unrunnable:
    """The reason why a step does not run in a precision.

    errors: pattern for `fp32_modules` -> (the first module of that pattern that raised, the first line of its error).
    With all patterns pinned the step runs. Empty: no pins help, only fp32.
    """

    errors: dict[str, tuple[str, str]]

    def __str__(self) -> str:
        return "; ".join(f"{name} raises {text!r}" for name, text in self.errors.values())


def find_unrunnable(trial: Trial, window: Window, dtype: torch.dtype, pinned: Iterable[str] = ()) -> Unrunnable | None:
    """Find why `window` does not run under autocast to `dtype`; None if it does, or if fp32 does not run either.

    pinned: names of the modules that are pinned to fp32 already. Leaves the run unchanged. Takes one step
    where all is well; else one for each kind of module that fails, and two more. Raises what the step raises that is
    no RuntimeError, and torch.OutOfMemoryError.
    """
    pinned = list(pinned)
    errors = _cure(trial, window, dtype, pinned)
    # Once more as it was: an error that comes and goes by itself is none of the precision's.
    if errors is None or _failure(trial, window, dtype, pinned) is None:
        return None
    return Unrunnable(errors)


def _cure(trial: Trial, window: Window, dtype: torch.dtype, pinned: list[str]) -> dict[str, tuple[str, str]] | None:
    """Find the pins for `Unrunnable.errors`; None if the step runs without, or does not run in fp32 either."""
    pins, errors = list(pinned), {}
    while (failure := _failure(trial, window, dtype, pins)) is not None:
        name, text = failure
        if name is None or name in pins:
            return {} if _failure(trial, window, torch.float32, pins) is None else None
        pattern, added = _kind(trial.modules, name)
        errors[pattern] = name, text
        pins += added
    return errors or None


def _failure(trial: Trial, window: Window, dtype: torch.dtype, pins: list[str]) -> tuple[str | None, str] | None:
    """The module in which the step fails, if it is in one, and what the error says; None where it runs."""
    try:
        trial.run(window, dtype, pins=pins)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
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
