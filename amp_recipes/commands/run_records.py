"""Finds the script of runs, and reads, writes and formats their JSON files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from amp_recipes.config.yaml.mistakes import one_line
from amp_recipes.errors import ConfigError
from amp_recipes.files.run_files import read_json, write_atomically
from amp_recipes.files.strict_json import encode


def require_script(script: Path) -> None:
    """Raise ConfigError unless the file of a recipe's script is there."""
    if not script.is_file():
        raise ConfigError(f"{script} is not a file; expected the recipe's script, such as train.py.")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file, or something else in it. Raises ConfigError."""
    try:
        found = read_json(file)
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}


def write_object(file: Path, content: dict[str, Any]) -> None:
    """Write a JSON object, whole or not at all. Raises OSError."""
    write_atomically(file, (encode(content, indent=2) + "\n").encode())


def as_number(value: Any) -> float:
    """A number of a record, in which a NaN is the text "nan"; NaN for what is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def cut(text: str, characters: int = 100) -> str:
    """Text in one line, cut after so many characters."""
    shown = one_line(text[: characters + 1])
    return shown if len(shown) <= characters else f"{shown[:characters]}..."
