"""Collects hazards: each problem of a line of the user's code once, and the worst first."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from traceback import walk_stack
from typing import Any, Literal

import torch

from amp_recipes.files.user_code import Line, user_line

# wrong: raises, or spoils this step; risk: can do so; note: nothing is wrong here, but something differs elsewhere.
Grade = Literal["wrong", "risk", "note"]

# The worst first, within a grade.
KINDS = (
    *("raises", "step_under_autocast", "half_parameters", "mask_value", "exp_of_large", "bce", "value_range"),
    *("scripted_pin", "eps", "long_reduction", "backward_under_autocast", "whole_numbers", "not_autocast"),
    "cpu_is_not_cuda",
)
_GRADES = ("wrong", "risk", "note")
_LINES_NAMED = 3
# Frames that never are where a value was chosen: torch's, ours, the standard library's.
_CARRIERS = tuple(
    str(Path(folder).resolve())
    for folder in (Path(__file__).parents[2], Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class Hazard:
    """Something in the code that low precision makes dangerous.

    kind: one of `KINDS`; file, line: of the user's code, empty and 0 where only a module can be named; precision:
    fp16 or bf16, empty for both; module: in whose forward (the first, of `modules`); grade: how bad; also: other
    places, `file:line`; inside: `file:line` of the installed library that does it, where the user's line calls one.
    """

    kind: str
    file: str
    line: int
    message: str
    precision: str = ""
    module: str = ""
    grade: Grade = "risk"
    modules: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    inside: str = ""

    @property
    def place(self) -> str:
        """`file:line`, or the module."""
        return f"{self.file}:{self.line}" if self.file else self.module or "the model"

    def as_dict(self) -> dict[str, Any]:
        """Return the hazard as in `diagnosis.json`."""
        return vars(self) | {"modules": list(self.modules), "also": list(self.also)}


class Found:
    """Hazards in the order in which they are met."""

    def __init__(self) -> None:
        self._met: dict[tuple, tuple[Hazard, list[str], list[str]]] = {}  # and the modules and places where it was met

    def add(
        self,
        kind: str,
        message: str,
        line: Line | None,
        grade: Grade,
        precision: str = "",
        module: str = "",
        what: Any = "",
        is_about_line: bool = True,
        inside: str = "",
    ) -> None:
        """Note a hazard; again on the same line, with the same `what`, only the module is added.

        is_about_line: False where one remark on `what` is enough for the whole model.
        """
        file, number = (line.file, line.number) if line is not None else ("", 0)
        hazard = Hazard(kind, file, number, message, precision, module, grade, inside=inside)
        key = (kind, precision, what, hazard.place if is_about_line else None)
        _, modules, places = self._met.setdefault(key, (hazard, [], []))
        if module and module not in modules:
            modules.append(module)
        if hazard.place not in places:
            places.append(hazard.place)

    @property
    def worst_first(self) -> list[Hazard]:
        """By grade, then by kind; what is alike stays in the order in which it was met."""
        hazards = [_finished(*met) for met in self._met.values()]
        return sorted(hazards, key=lambda hazard: (_GRADES.index(hazard.grade), KINDS.index(hazard.kind)))


def _finished(hazard: Hazard, modules: list[str], places: list[str]) -> Hazard:
    message, others = hazard.message, places[1:]
    if others:
        rest = len(others) - _LINES_NAMED
        named = ", ".join(others[:_LINES_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        message = f"{message} Also at {named}."
    if hazard.inside:
        message = f"{message} (In {hazard.inside}.)"
    return replace(hazard, message=message, modules=tuple(modules), also=tuple(others))


def library_line() -> str:
    """`file:line` of the installed library that runs, where it stands between torch and the user's code; else empty."""
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)) if not _is_carrier(frame.f_code.co_filename))
    frame = next(frames, None)
    line = None if frame is None else user_line(frame)
    if frame is None or line is None or line.file == frame.f_code.co_filename:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


@cache
def _is_carrier(filename: str) -> bool:
    path = Path(filename).resolve()
    is_librarys = any(folder in path.parts for folder in _INSTALLED)
    is_torchs = str(path).startswith(_CARRIERS[:2])
    return filename.startswith("<") or is_torchs or (str(path).startswith(_CARRIERS[2]) and not is_librarys)
