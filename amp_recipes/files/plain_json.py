"""Makes findings JSON that every parser reads: Python's own writes NaN and Infinity, which the standard has not."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """The same with "nan", "inf" and "-inf" for nonfinite floats, texts for keys, and lists for tuples."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def json_bytes(value: Any) -> bytes:
    """A whole file of strict JSON, to be read by people too. Raises TypeError for what JSON does not know."""
    return (json.dumps(plain(value), indent=2, allow_nan=False) + "\n").encode()
