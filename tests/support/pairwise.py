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
    rows = _rows(factors)
    missing = {pair for row in rows for pair in _pairs(row)}
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(missing.intersection(_pairs(row))))
        chosen.add(best)
        missing.difference_update(_pairs(best))
    return _params(factors, chosen)


def each_once(*factors: Sequence[Any]) -> list[Any]:
    """As `pairwise`, with fewer by default: each value of each factor comes once or more."""
    count = max(map(len, factors))
    return _params(factors, {tuple(at % len(factor) for factor in factors) for at in range(count)})


def extended(*values: Any) -> Any:
    """A case of a parametrized test that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.extended)


def _params(factors: Sequence[Sequence[Any]], by_default: set[tuple[int, ...]]) -> list[Any]:
    params = []
    for row in _rows(factors):
        values = [factor[at] for factor, at in zip(factors, row, strict=True)]
        params.append(pytest.param(*values, marks=() if row in by_default else pytest.mark.extended))
    return params


def _rows(factors: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    return list(product(*(range(len(factor)) for factor in factors)))


def _pairs(row: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    """Each two entries of `row`, with their places."""
    return list(combinations(enumerate(row), 2))
