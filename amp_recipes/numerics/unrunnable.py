"""Finds the modules that a device cannot run in a low precision, and proves that pinning them to fp32 helps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from amp_recipes.numerics.trial import Trial, Window


@dataclass(frozen=True)
class Unrunnable:
    """What keeps a step from running in a precision.

    errors: by the pattern (as `fp32_modules` takes it) of the modules to pin: the name of the first of them that
    raised, and its error. With all of them pinned the step runs. Empty: no pins help, only fp32.
    """

    errors: dict[str, tuple[str, RuntimeError]]

    def __str__(self) -> str:
        return "; ".join(f"{name} raises {first_line(error)!r}" for name, error in self.errors.values())


def find_unrunnable(trial: Trial, window: Window, dtype: torch.dtype, pinned: Iterable[str] = ()) -> Unrunnable | None:
    """Why `window` cannot be run under autocast to `dtype`; None where it can, or where fp32 cannot run it either.

    pinned: names of the modules that are pinned to fp32 already. Everything is afterwards as it was. Takes one step
    for each kind of module that fails, and one in fp32.
    """
    pins, errors = list(pinned), {}
    while (error := _error_of(trial, window, dtype, pins)) is not None:
        name = _innermost_module(error, trial.modules)
        if name is None or name in pins:
            return Unrunnable({}) if _error_of(trial, window, torch.float32, pins) is None else None
        pattern, added = _kind(trial.modules, name)
        errors[pattern] = name, error
        pins += added
    return Unrunnable(errors) if errors else None


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0]


def _error_of(trial: Trial, window: Window, dtype: torch.dtype, pins: list[str]) -> RuntimeError | None:
    try:
        trial.run(window, dtype, pins=pins)
    except RuntimeError as error:
        return error
    return None


def _innermost_module(error: BaseException, modules: nn.Module) -> str | None:
    """The name of the innermost module whose method raised the error; None if it came from outside of all."""
    names = {id(module): name for name, module in modules.named_modules() if name}
    found, trace = None, error.__traceback__
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
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
