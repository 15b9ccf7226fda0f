"""Holds hazards as they are met: what is wrong with a line of the user's code once, and the worst first."""

from __future__ import annotations

import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
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


def names(text: str) -> frozenset[str]:
    """The words of `text`."""
    return frozenset(text.split())


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
        """As in `diagnosis.json`."""
        return {
            "kind": self.kind,
            "file": self.file,
            "line": self.line,
            "message": self.message,
            "precision": self.precision,
            "module": self.module,
            "grade": self.grade,
            "modules": list(self.modules),
            "also": list(self.also),
            "inside": self.inside,
        }


@dataclass
class _Met:
    """A hazard, and where else it was met."""

    hazard: Hazard
    modules: list[str]
    places: list[str]


class Found:
    """Hazards in the order in which they are met."""

    def __init__(self) -> None:
        self._met: dict[tuple, _Met] = {}

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
        met = self._met.setdefault(
            (kind, precision, what, hazard.place if is_about_line else None), _Met(hazard, [], [])
        )
        if module and module not in met.modules:
            met.modules.append(module)
        if hazard.place not in met.places:
            met.places.append(hazard.place)

    @property
    def worst_first(self) -> list[Hazard]:
        """By grade, then by kind; what is alike stays in the order in which it was met."""
        hazards = [_finished(met) for met in self._met.values()]
        return sorted(hazards, key=lambda it: (_GRADES.index(it.grade), KINDS.index(it.kind)))


def _finished(met: _Met) -> Hazard:
    hazard, others = met.hazard, met.places[1:]
    message = hazard.message
    if others:
        rest = len(others) - _LINES_NAMED
        named = ", ".join(others[:_LINES_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        message = f"{message} Also at {named}."
    if hazard.inside:
        message = f"{message} (In {hazard.inside}.)"
    values = vars(hazard) | {"message": message, "modules": tuple(met.modules), "also": tuple(others)}
    return Hazard(**values)


def library_line() -> str:
    """`file:line` of the installed library that runs, where it stands between torch and the user's code; else empty."""
    frame = sys._getframe(1)
    while frame is not None and _is_carrier(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    filename = frame.f_code.co_filename
    line = user_line(frame)
    return f"{filename}:{frame.f_lineno}" if line is not None and line.file != filename else ""


_is_carrier_file: dict[str, bool] = {}


def _is_carrier(filename: str) -> bool:
    known = _is_carrier_file.get(filename)
    if known is None:
        path = str(Path(filename).resolve())
        is_library = any(folder in Path(path).parts for folder in _INSTALLED)
        is_torchs = path.startswith(_CARRIERS[:2])
        known = filename.startswith("<") or is_torchs or (path.startswith(_CARRIERS[2]) and not is_library)
        _is_carrier_file[filename] = known
    return known
