"""Prints only the message, without a traceback, when a user's mistake ends a script."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from traceback import format_exception
from typing import Any

from amp_recipes.config.yaml.mistakes import printable
from amp_recipes.errors import (
    AmpRecipesError,
    CheckpointError,
    ConfigError,
    DataError,
    FolderInUseError,
    PrecisionError,
)
from amp_recipes.files.user_code import lies_with_the_user

# Of a RecipeError, the traceback shows the line to change; of a ProcessError, `distributed` decides what is shown.
_EXPLAINED = (ConfigError, DataError, CheckpointError, PrecisionError, FolderInUseError)


def show_mistakes_plainly() -> None:
    """Print a user's mistake that ends the script without its traceback, in which the message would be hard to find.

    One that came from an exception in the recipe's own code keeps its traceback; of a library's, or of an error of ours
    that the recipe raised, the message is enough.
    """
    before = sys.excepthook
    if getattr(before, "shows_mistakes_plainly", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, _EXPLAINED) and not _is_of_own_code(error.__cause__):
            print(printable(f"{Path(sys.argv[0]).name}: {error}"), file=sys.stderr)
        else:
            before(kind, error, traceback)

    hook.shows_mistakes_plainly = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def end_errors_with(status: int) -> None:
    """From now on, an exception that ends the script gives this exit status, for scripts that test it."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        before(kind, error, traceback)
        if issubclass(kind, Exception):
            raise SystemExit(status)

    sys.excepthook = hook


def _is_of_own_code(cause: BaseException | None) -> bool:
    """Whether an exception came out of the recipe's own files; of another process, its traceback is text."""
    if cause is None or isinstance(cause, AmpRecipesError):  # the recipe has raised it on purpose
        return False
    text = "".join(format_exception(cause))
    if text.rstrip('"\n').rpartition("\n")[2].startswith(f"{AmpRecipesError.__module__}."):  # of a loader's worker
        return False
    files = re.findall(r'^ *File "(.+)", line \d+', text, re.MULTILINE)
    return any(map(lies_with_the_user, files))
