"""Splits a product of parameters between the two tiers of tests."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest


def pairwise(*factors: Sequence[Any]) -> list[Any]:
    """All combinations of the factors' values, for `pytest.mark.parametrize`.

    The default tier has a part of them in which every two values of two factors meet once or more. The others are
    marked `extended`.
    """
    rows = list(product(*(range(len(factor)) for factor in factors)))
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(_pairs(row))))
        chosen.add(best)
        missing.difference_update(_pairs(best))
    return [
        pytest.param(
            *(factor[at] for factor, at in zip(factors, row, strict=True)),
            marks=() if row in chosen else pytest.mark.extended,
        )
        for row in rows
    ]


def _pairs(row: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Each two entries of `row`, with their places."""
    return list(combinations(enumerate(row), 2))
