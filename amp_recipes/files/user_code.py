"""Finds the running line of the user's code, not of torch, the framework or an installed library."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

# Folders of code that a user did not write for this recipe: the interpreter, installed packages, this framework. A
# recipe inside one of them is not found; one whose project holds a virtual environment is.
_LIBRARIES = tuple(
    str(Path(folder).resolve()) + os.sep
    for folder in (
        Path(__file__).parent.parent,
        Path(torch.__file__).parent,
        *(sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
_LIBRARY_FOLDERS = frozenset({"site-packages", "dist-packages"})  # also those of other environments on the path
# Code without a file was made at run time (dataclasses, torch.fx), but for what was typed at a prompt.
_TYPED = ("<stdin>", "<ipython-input", "<console>")


class Line(NamedTuple):
    """A line of a file."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}:{self.number}"


def user_line(frame: FrameType | None = None) -> Line | None:
    """The innermost line of the user's code under `frame` (default: the caller); None where there is none."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None:
        if lies_with_the_user(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


@functools.cache  # asked for every frame of a deep stack
def lies_with_the_user(filename: str) -> bool:
    """Whether the user wrote this file, or typed it: it is not the interpreter's, a library's or the framework's."""
    if filename.startswith("<"):
        return filename.startswith(_TYPED)
    path = Path(filename).resolve()
    return not str(path).startswith(_LIBRARIES) and _LIBRARY_FOLDERS.isdisjoint(path.parts)
