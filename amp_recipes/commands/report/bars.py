"""Draws rows of bars and of numbers, one row for each name, with their values beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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

_ASKERS = ((BLUE, ""), (ORANGE, "//"), (PURPLE, "xx"), (SKY, ".."))
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


class Bar(NamedTuple):
    """A bar with its value behind it. value: as it stands in a report; shown: how a number is written."""

    value: Any
    colour: str
    shown: Callable[[float], str]


def bars_with_values(axes: Any, bars: Sequence[Bar], room: float = 0.28, beside: float | None = None) -> None:
    """A bar in each row, its value behind it; the axis is logarithmic where the values differ much.

    What is nonfinite has a hatched bar over the whole width, and says so; what is missing has none. room: for what is
    written behind the longest bar, as a share of it; beside: another number that the axis is to hold.
    """
    numbers = [finite(bar.value) for bar in bars]
    positive = [number for number in [*numbers, beside] if number is not None and number > 0]
    low, high = 0.0, max(positive, default=1.0)
    if is_wide(positive):
        axes.set_xscale("log")
        low = min(positive) / 2
        axes.set_xlim(low, high * (high / low) ** room)
    else:
        axes.set_xlim(0, high * (1 + room))
    axes.tick_params(axis="y", length=0)
    end = axes.get_xlim()[1]
    for row, (bar, number) in enumerate(zip(bars, numbers, strict=True)):
        place, text, style = low, "not known", {}
        if number is not None:
            place, text = max(low, number), bar.shown(number)
            axes.barh(row, place - low, left=low, color=bar.colour, height=0.62, alpha=0.9)
        elif bar.value is not None:
            text, style = words(bar.value, 12), {"color": VERMILION, "fontweight": "bold", "backgroundcolor": "white"}
            axes.barh(row, end - low, left=low, color="white", edgecolor=VERMILION, hatch="////", height=0.62)
        _write_behind(axes, text, place, row, **style)


def _write_behind(axes: Any, text: str, place: float, row: int, **style: Any) -> None:
    axes.annotate(text, (place, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8, **style)


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
        _write_behind(axes, f"{left:,.3g}", left, row)
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


def label_rows(axes: Any, names: Sequence[str], above: str = "") -> None:
    """Names beside the rows, the first on top; below the axis what they all stand in."""
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    if above:
        axes.set_xlabel(f"{axes.get_xlabel()}\nmodules of {above}")
