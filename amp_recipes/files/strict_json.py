"""JSON that every parser reads: Python's own writes NaN and Infinity, which the standard does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def plain_number(value: Any) -> float | str:
    """What stands in JSON for an object that it does not know: its number if it has one, else its text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def without_nonfinite(value: Any) -> Any:
    """The same value with `"nan"`, `"inf"` and `"-inf"` for nonfinite floats, and text for keys."""
    if isinstance(value, Mapping):
        return {str(key): without_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    number = plain_number(value)
    if isinstance(number, float) and not math.isfinite(number):
        return str(number)
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
