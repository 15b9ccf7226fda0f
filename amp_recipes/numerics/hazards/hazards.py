"""Finds hazards of low precision in the user's code, with their lines, from one watched step."""

from __future__ import annotations

from traceback import walk_tb

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from amp_recipes.files.user_code import Line, user_line
from amp_recipes.numerics.hazards.list import Found, Hazard
from amp_recipes.numerics.hazards.modules import note_modules
from amp_recipes.numerics.hazards.ops import OpHazards
from amp_recipes.numerics.trial import Trial, Window
from amp_recipes.numerics.watch.observe import OpWatch

__all__ = ["Hazard", "find_hazards"]

_SHOWN = 200  # characters of an error


def find_hazards(trial: Trial, window: Window) -> list[Hazard]:
    """The hazards of one step in bf16, the worst first: what it does, and what the same code would do in fp16.

    bf16 has fp32's range, so that a step which cannot run in fp16 (a mask of -1e9 is refused there) is seen whole. A
    step that raises in bf16 too is a hazard itself, beside those before it. Each line is named once for each thing that
    is wrong with it. Values are those of this window: another may hold larger ones. Code that asks for the dtype is
    seen as it is in bf16; `torch.finfo(x.dtype)` is known to follow it.
    """
    found = Found()
    note_modules(trial.modules, found)
    ops = OpHazards(trial.modules, found, trial.device.type)
    calls = ops.calls
    try:
        with register_optimizer_step_pre_hook(calls.before_step):
            outcome = trial.run(window, torch.bfloat16, watch=[calls, OpWatch(ops.at, ops.saw, ops.about_to_see)])
    except Exception as error:  # whatever the user's code raises
        _note_error(error, found)
    else:
        if outcome.stepped_under_autocast is not None:
            calls.note_step(outcome.stepped_under_autocast)
    return found.worst_first


def _note_error(error: Exception, found: Found) -> None:
    line = None
    for frame, number in walk_tb(error.__traceback__):  # the innermost line of the user's
        here = user_line(frame)
        if here is not None and here.file == frame.f_code.co_filename:
            line = Line(here.file, number)
    words = " ".join(f"{type(error).__name__}: {error}".split())
    words = words if len(words) <= _SHOWN else f"{words[:_SHOWN]}..."
    found.add(
        "raises",
        f"the step raises an error in bf16, and the code after it was not checked: {words}",
        line,
        "wrong",
        "bf16",
    )
