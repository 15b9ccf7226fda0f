"""Takes one combination per value for the default tier of tests."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def in_turn(first: Sequence[Any], *others: Sequence[Any]) -> list[Any]:
    """All combinations of the factors' values, for `pytest.mark.parametrize`.

    The default tier has each value of the first factor once, with the others' values in turn. The rest is marked
    `extended`. `first` has the most values, so that no value of the others is left out.
    """
    assert all(len(first) >= len(other) for other in others)
    return [
        pytest.param(
            *(factor[at] for factor, at in zip((first, *others), row, strict=True)),
            marks=() if all(at == row[0] % len(other) for other, at in zip(others, row[1:], strict=True))
            else pytest.mark.extended,
        )
        for row in product(*(range(len(factor)) for factor in (first, *others)))
    ]  # fmt: skip
