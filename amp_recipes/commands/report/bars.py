"""Draws rows of bars and of numbers, one row for each name, with their values beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from amp_recipes.commands.report.drawing import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    finite,
    finite_list,
    is_wide,
    percent,
    words,
)

_LOOKS = ((BLUE, ""), (ORANGE, "//"), (PURPLE, "xx"), (SKY, ".."), (GREY, ""))
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class Bar(NamedTuple):
    """A bar with its value after it. value: as in a report; shown: how a number is written."""

    value: Any
    colour: str
    shown: Callable[[float], str]


def bars_with_values(axes: Any, bars: Sequence[Bar], room: float = 0.28, beside: float | None = None) -> None:
    """A bar in each row, its value after it; the axis is logarithmic where the values differ much.

    What is nonfinite has a hatched bar over the whole width, and says so; what is missing has none. room: for what is
    written after the longest bar, as a share of it; beside: another number that the axis is to hold.
    """
    numbers = [finite(bar.value) for bar in bars]
    low, high = _limits([*numbers, beside])
    axes.set_xscale("log" if low else "linear")
    axes.set_xlim(low, high * (high / low) ** room if low else high * (1 + room))
    axes.tick_params(axis="y", length=0)
    widths = [0.0 if number is None else max(low, number) - low for number in numbers]
    drawn = axes.barh(range(len(bars)), widths, left=low, color=[bar.colour for bar in bars], height=0.62, alpha=0.9)
    axes.bar_label(drawn, list(map(_text_behind, bars)), padding=4, fontsize=8)
    for row, number in enumerate(numbers):
        if number is None and bars[row].value is not None:
            _hatched_bar(axes, row, words(bars[row].value, 12))


def _limits(numbers: Iterable[float | None]) -> tuple[float, float]:
    """Where an axis begins, 0 if it need not be logarithmic, and the largest number that it holds."""
    positive = [number for number in numbers if number is not None and number > 0]
    return min(positive) / 2 if is_wide(positive) else 0.0, max(positive, default=1.0)


def _hatched_bar(axes: Any, row: int, text: str) -> None:
    low, high = axes.get_xlim()
    bar = axes.barh(row, high - low, left=low, color="white", edgecolor=VERMILION, hatch="////", height=0.62)
    style = {"color": VERMILION, "fontsize": 8, "fontweight": "bold", "backgroundcolor": "white"}
    axes.bar_label(bar, [text], label_type="center", **style)


def _text_behind(bar: Bar) -> str:
    if bar.value is None:
        return "not known"
    number = finite(bar.value)
    return "" if number is None else bar.shown(number)


def share_cells(axes: Any, titles: Sequence[str], shares: Sequence[Sequence[Any]]) -> None:
    """A cell for each share, darker for a larger one, with its percentage in it."""
    numbers = np.array([finite_list(row) for row in shares])
    axes.imshow(np.sqrt(numbers.clip(0, 1)), cmap="Oranges", vmin=0, vmax=1, aspect="auto", alpha=0.75)
    for (row, column), share in np.ndenumerate(numbers):
        text = "-" if np.isnan(share) else percent(share)
        axes.text(column, row, text, ha="center", va="center", fontsize=8, fontweight="bold" if share > 0 else "normal")
    axes.set_xticks(range(len(titles)), titles)
    axes.tick_params(axis="both", length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def stacked_bars(axes: Any, rows: Sequence[Counter[str]]) -> None:
    """A bar of several parts in each row, its sum after it; bytes. Parts have a colour and a hatching each."""
    largest = max((sizes.total() for sizes in rows), default=1.0)
    factor, unit = next(((size, name) for size, name in _UNITS if largest >= size), _UNITS[-1])
    left = np.zeros(len(rows))
    for (name, sizes), (colour, hatch) in zip(_series(rows).items(), _LOOKS, strict=False):
        style = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5, "label": words(name, 30)}
        drawn = axes.barh(range(len(rows)), np.array(sizes) / factor, left=left, height=0.66, **style)
        left += np.array(sizes) / factor
    if rows:
        axes.bar_label(drawn, [f"{size:,.3g}" for size in left], padding=4, fontsize=8)
        axes.legend(loc="lower right", handlelength=1.4)
    axes.set_xlim(0, largest / factor * 1.5)  # room for the legend
    axes.set_xlabel(unit)


def _series(rows: Sequence[Counter[str]]) -> dict[str, list[int]]:
    """The sizes in each row of the names with most in all, then of all others together."""
    totals = sum(rows, Counter[str]())
    named = [name for name, _ in totals.most_common(len(_LOOKS) - 1)]
    series = {name: [sizes[name] for sizes in rows] for name in named}
    if len(totals) > len(named):
        series["others"] = [sizes.total() - sum(sizes[name] for name in named) for sizes in rows]
    return series


def label_rows(axes: Any, names: Sequence[str], above: str = "") -> None:
    """Names beside the rows, the first on top; below the axis the module that they are all in."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    if above:
        axes.set_xlabel(f"{axes.get_xlabel()}\nmodules of {above}")
