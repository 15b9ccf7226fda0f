"""Finds the samples of a batch that make a step nonfinite: from the rows of the first value, or by trying parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from amp_recipes.numerics.nonfinite.batch_samples import Inseparable
from amp_recipes.numerics.nonfinite.values import External, Rows, bad_rows
from amp_recipes.numerics.nonfinite.walk import Origin


def samples_in_rows(
    origin: Origin, length: int, is_list: bool, parameter_shapes: frozenset[tuple[int, ...]]
) -> list[int] | None:
    """Return the samples of the batch with nonfinite rows where NaN or Inf first appeared; None if rows do not show it.

    length: how many samples it has; is_list: it is a list of them; parameter_shapes: for births in the backward.
    """
    if origin.external is not None:
        return _samples_from_outside(origin.external, length, is_list, origin.shapes)
    if origin.birth is None or origin.batch is None or origin.is_put_there:
        return None
    # The rows of a weight's gradient are features, even where there are as many as samples.
    of_weights = parameter_shapes if origin.place.phase == "backward" else frozenset()
    for rows in origin.birth.rows:
        if of_weights.isdisjoint((rows.shape, rows.shape[::-1])):
            found = _samples(rows, length, origin.shapes)
            if found is not None:
                return found
    return None


def _samples_from_outside(
    external: External, length: int, is_list: bool, shapes: Sequence[tuple[int, ...]]
) -> list[int] | None:
    """The samples of which a part of the batch is nonfinite."""
    if external.kind != "batch" or external.tensor is None:
        return None
    number = re.match(r"batch\[(\d+)\]", external.name)
    if is_list and number:
        return [int(number[1])]
    return _samples(bad_rows(external.tensor.detach()), length, shapes)


def _samples(rows: Rows, length: int, shapes: Sequence[tuple[int, ...]]) -> list[int] | None:
    if not rows.along or not length:
        return None
    if rows.shape[0] == length:
        return rows.along[0]
    if rows.shape[0] % length == 0:
        merged = _samples_of_merged(rows, length, shapes)
        if merged is not None:
            return merged
    return rows.along[1] if 1 in rows.along and rows.shape[1] == length else None


def _samples_of_merged(rows: Rows, length: int, shapes: Sequence[tuple[int, ...]]) -> list[int] | None:
    """Of samples times moments, or times heads: what it was made from tells which of them changes faster."""
    per_sample = rows.shape[0] // length
    for shape in shapes:
        merged = _merged_dimensions(shape, rows.shape[0])
        if merged and shape[0] == length:
            return sorted({row // per_sample for row in rows.along[0]})
        if merged == 2 and shape[1] == length:
            return sorted({row % length for row in rows.along[0]})
    return None


def _merged_dimensions(shape: tuple[int, ...], size: int) -> int:
    """Return how many leading dimensions of `shape`, at least 2, have `size` elements together; 0 if none."""
    product = 1
    for count, dimension in enumerate(shape, 1):
        product *= dimension
        if product == size and count > 1:
            return count
    return 0


def samples_by_parts(is_bad: Callable[[list[int]], bool], length: int, most_runs: int) -> list[int] | None:
    """The samples that do it, by halves of halves: without them all is well, with them alone it is not.

    is_bad: takes a step on these samples. One among n takes log2(n) + 3 of them. None where it takes more than
    `most_runs`, where samples do it only together, or where each quarter of more than four does it: then it is no
    matter of samples.
    """
    runs = 0

    def asked(samples: list[int]) -> bool:
        nonlocal runs
        runs += 1
        if runs > most_runs:
            raise Inseparable
        return is_bad(samples)

    try:
        part = _half_to_begin_with(asked, length)
        if part is None:
            return None
        culprits: list[int] = []
        while part:
            culprits.append(_one_of(part, asked))
            rest = [sample for sample in range(length) if sample not in culprits]
            part = rest if rest and asked(rest) else []
        return sorted(culprits) if asked(culprits) else None
    except Inseparable:
        return None


def _half_to_begin_with(asked: Callable[[list[int]], bool], length: int) -> list[int] | None:
    """Where to look for the first sample; None where no part does it alone, or each quarter does."""
    samples = list(range(length))
    if length <= 4:
        return samples
    bad = [half for half in _halves(samples) if asked(half)]
    if not bad or (len(bad) == 2 and all(asked(quarter) for half in bad for quarter in _halves(half))):
        return None
    return bad[0]


def _one_of(part: list[int], asked: Callable[[list[int]], bool]) -> int:
    while len(part) > 1:
        left, right = _halves(part)
        part = left if asked(left) else right
    return part[0]


def _halves(part: list[int]) -> tuple[list[int], list[int]]:
    return part[: len(part) // 2], part[len(part) // 2 :]
