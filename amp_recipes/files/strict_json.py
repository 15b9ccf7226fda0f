"""Writes JSON that every parser can read: Python's own writes NaN and Infinity, which are not in the standard."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any


def plain_number(value: Any) -> float | str:
    """Return a JSON value for an object of another class: its number if it has one, else its text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def without_nonfinite(value: Any, default: Callable[[Any], Any] = plain_number) -> Any:
    """The same with "nan", "inf" and "-inf" for nonfinite floats, texts for keys, and lists for tuples.

    default: what to make of an object that JSON does not know.
    """
    if isinstance(value, Mapping):
        return {str(key): without_nonfinite(item, default) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(item, default) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    number = value if isinstance(value, float) else default(value)
    if isinstance(number, float) and not math.isfinite(number):
        return str(float(number))
    return number


_COMPACT = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=plain_number)


def encode(value: Any, indent: int | None = None) -> str:
    """`value` as strict JSON, on one line unless `indent` says otherwise."""
    if indent is not None:
        return json.dumps(without_nonfinite(value), indent=indent, allow_nan=False)
    try:
        return _COMPACT.encode(value)
    except (TypeError, ValueError):  # a nonfinite float or an odd key: rare, so only then look at every value
        return _COMPACT.encode(without_nonfinite(value))


def encode_findings(value: Any) -> bytes:
    """A whole file of strict JSON, to be read by people too. Raises TypeError for what JSON does not know."""
    return (json.dumps(as_it_is_read(value), indent=2, allow_nan=False) + "\n").encode()


def as_it_is_read(value: Any) -> Any:
    """`value` as reading `encode_findings(value)` gives it back; what JSON does not know stays itself."""
    return without_nonfinite(value, default=lambda unknown: unknown)
