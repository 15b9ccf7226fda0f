"""Draws rows of bars and of numbers, one row for each name, with their values beside them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amp_recipes.commands.report.drawing import (
    BLUE,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    finite,
    is_wide,
    percent,
    words,
)

_ASKERS = ((BLUE, ""), (ORANGE, "//"), (PURPLE, "xx"), (SKY, ".."))
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def bars_with_values(
    axes: Any, values: Sequence[Any], colour: str, shown: Callable[[float], str], beside: float | None = None
) -> None:
    """A bar in each row, its value behind it; the axis is logarithmic where they differ much.

    values: as they stand in a report. What is nonfinite there has a hatched bar over the whole width, and says so;
    what is missing has none. shown: how a number is written; beside: another number that the axis is to hold.
    """
    numbers = [finite(value) for value in values]
    positive = [number for number in [*numbers, beside] if number is not None and number > 0]
    low, high = 0.0, max(positive, default=1.0)
    if is_wide(positive):
        axes.set_xscale("log")
        low = min(positive) / 2
        axes.set_xlim(low, high * (high / low) ** 0.28)  # room for the value behind the longest bar
    else:
        axes.set_xlim(0, high * 1.28)
    axes.tick_params(axis="y", length=0)
    end = axes.get_xlim()[1]
    for row, (value, number) in enumerate(zip(values, numbers, strict=True)):
        place, text, style = low, "not known", {}
        if number is not None:
            place, text = max(low, number), shown(number)
            axes.barh(row, place - low, left=low, color=colour, height=0.62, alpha=0.9)
        elif value is not None:
            text, style = words(value, 12), {"color": VERMILION, "fontweight": "bold", "backgroundcolor": "white"}
            axes.barh(row, end - low, left=low, color="white", edgecolor=VERMILION, hatch="////", height=0.62)
        axes.annotate(text, (place, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, **style)


def share_cells(axes: Any, columns: Sequence[tuple[str, str]], rows: Sequence[Mapping[str, Any]]) -> None:
    """A cell for each share, darker for a larger one, with its percentage in it. columns: (key, title)."""
    for column, (key, _) in enumerate(columns):
        for row, found in enumerate(rows):
            share = finite(found.get(key))
            depth = 0.0 if share is None else math.sqrt(min(1.0, max(0.0, share)))
            axes.barh(row, 0.96, left=column + 0.02, height=0.86, color=VERMILION, alpha=0.75 * depth)
            text = "-" if share is None else percent(share)
            weight = "bold" if share else "normal"
            axes.text(column + 0.5, row, text, ha="center", va="center", fontsize=8, fontweight=weight)
    axes.set_xlim(0, len(columns))
    axes.set_xticks([column + 0.5 for column in range(len(columns))], [title for _, title in columns])
    axes.tick_params(axis="both", length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def stacked_bars(axes: Any, rows: Sequence[Counter[str]]) -> None:
    """A bar of several parts in each row, its sum behind it; bytes. Parts have a colour and a hatching each."""
    from matplotlib.patches import Patch

    totals: Counter[str] = Counter()
    for sizes in rows:
        totals.update(sizes)
    askers = [name for name, _ in totals.most_common(len(_ASKERS))]
    largest = max((sizes.total() for sizes in rows), default=1.0)
    factor, unit = next(((size, name) for size, name in _UNITS if largest >= size), _UNITS[-1])
    for row, sizes in enumerate(rows):
        left = 0.0
        for size, colour, hatch in _parts(sizes, askers):
            axes.barh(
                row, size / factor, left=left, color=colour, hatch=hatch, edgecolor="white", linewidth=0.5, height=0.66
            )
            left += size / factor
        axes.annotate(f"{left:,.3g}", (left, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    named = [*zip(askers, _ASKERS, strict=False), *([("others", (GREY, ""))] if len(totals) > len(askers) else [])]
    handles = [
        Patch(facecolor=colour, hatch=hatch, edgecolor="white", label=words(name, 30))
        for name, (colour, hatch) in named
    ]
    axes.legend(handles=handles, loc="lower right", handlelength=1.4)
    axes.set_xlim(0, largest / factor * 1.5)  # room for the legend
    axes.set_xlabel(unit)


def _parts(sizes: Counter[str], askers: Sequence[str]) -> list[tuple[float, str, str]]:
    """Size, colour and hatching of each part that is not empty: those of the askers, then of all others together."""
    others = sum(size for name, size in sizes.items() if name not in askers)
    parts = [(sizes[name], *_ASKERS[index]) for index, name in enumerate(askers)]
    return [part for part in [*parts, (others, GREY, "")] if part[0]]


def label_rows(axes: Any, names: Sequence[str], above: str) -> None:
    """Names beside the rows, the first on top; below the axis what they all stand in."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    if above:
        axes.set_xlabel(f"{axes.get_xlabel()}\nmodules of {above}")
