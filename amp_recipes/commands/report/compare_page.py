"""Draws a comparison of precisions from its `compare.json`: losses, the metric, each seed's result, time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from amp_recipes.commands.report.bars import Bar, bars_with_values, label_rows
from amp_recipes.commands.report.drawing import (
    GREY,
    MARKERS,
    SERIES,
    VERMILION,
    dicts,
    finite,
    finite_list,
    is_wide,
    legend_beside,
    page,
    part,
    read_report,
    save,
    words,
    wrapped,
)

JSON_FILE, PICTURE_FILE = "compare.json", "compare.png"

_VERDICT_CHARACTERS = 150


def draw_comparison(folder: Path) -> Path | None:
    """Draw `<folder>/compare.json` as `compare.png` beside it; None if there is nothing to draw.

    Raises ConfigError for a file that cannot be read or written, and where matplotlib is not installed.
    """
    found = read_report(folder / JSON_FILE) or {}
    entries = dicts(found.get("precisions"))
    if not entries:
        return None
    colours = {str(it.get("precision")): SERIES[index % len(SERIES)] for index, it in enumerate(entries)}
    headline = "\n".join(wrapped(str(entry.get("headline")), _VERDICT_CHARACTERS, 3) for entry in entries[1:])
    title = f"Compared with {words(found.get('reference'), 20)}, over seeds"
    with page(title, headline, width=12, rows=[3.9, 3.2]) as (figure, (upper, lower)):
        _curves(figure.add_subfigure(upper), found, colours)
        _endings(figure.add_subfigure(lower), entries, part(found, "metric"), colours)
        return save(figure, folder / PICTURE_FILE)


def _curves(figure: Any, found: dict[str, Any], colours: dict[str, str]) -> None:
    """The loss on the way, and the metric after each epoch if there are such."""
    curves = part(found, "curves")
    loss, by_epoch = part(curves, "loss"), part(curves, "metric")
    left, *others = figure.subplots(1, 2 if by_epoch else 1, squeeze=False)[0]
    left.set_title("Training loss: mean and range over seeds")
    left.set_xlabel("updates")
    _bands(left, finite_list(loss.get("updates")), part(loss, "by_precision"), colours)
    for right in others:
        right.set_title(f"{words(by_epoch.get('stage'))} {words(part(found, 'metric').get('name'))} after each epoch")
        right.set_xlabel("epoch")
        right.xaxis.get_major_locator().set_params(integer=True)
        _bands(right, finite_list(by_epoch.get("epochs")), part(by_epoch, "by_precision"), colours)


def _endings(figure: Any, entries: Sequence[dict[str, Any]], metric: dict[str, Any], colours: dict[str, str]) -> None:
    results, time, memory = figure.subplots(1, 3, width_ratios=[1.5, 1, 1])
    _results(results, entries, metric, colours)
    time.set_title("Time per update")
    _bars(time, entries, ("step_seconds", "step_ratio"), (1e3, "ms"), colours)
    counted = next((words(entry.get("memory_of"), 20) for entry in entries if entry.get("memory_of")), "")
    memory.set_title(f"Peak memory of the {counted}" if counted else "Peak memory")
    _bars(memory, entries, ("memory_bytes", "memory_ratio"), (2**-20, "MiB"), colours)


def _bands(axes: Any, x: Sequence[float], by_precision: dict[str, Any], colours: dict[str, str]) -> None:
    """A line for each precision's mean over seeds, and a band from its lowest to its highest seed."""
    shown = {name: _by_point(runs)[: len(x)] for name, runs in by_precision.items()}
    shown = {name: values for name, values in shown.items() if values.count()}
    if not shown:
        axes.text(0.5, 0.5, "no values", ha="center", color=GREY, transform=axes.transAxes)
        return
    axes.margins(x=0.01)
    if is_wide(np.concatenate([values.compressed() for values in shown.values()])):
        axes.set_yscale("log")
    for index, (name, values) in enumerate(shown.items()):
        at, means = x[: len(values)], values.mean(axis=1)
        colour, style = colours.get(name, GREY), ("-", "--", "-.", ":")[index % 4]
        marker = MARKERS[index % len(MARKERS)] if means.count() == 1 else ""
        axes.plot(at, means, color=colour, linestyle=style, marker=marker, linewidth=1.6, label=words(name))
        axes.fill_between(at, values.min(axis=1), values.max(axis=1), color=colour, alpha=0.15, linewidth=0)
    legend_beside(axes)


def _by_point(runs: Any) -> np.ma.MaskedArray:
    """The curves of several seeds as a table of points and seeds, with a mask where there is no value."""
    curves = [finite_list(run) for run in runs] if isinstance(runs, list) else []
    return np.ma.masked_invalid(np.array(list(zip(*curves, strict=False)), ndmin=2))


def _results(axes: Any, entries: Sequence[dict[str, Any]], metric: dict[str, Any], colours: dict[str, str]) -> None:
    """Each seed's final metric, a line from precision to precision; runs that did not finish are listed below."""
    better = "lower" if metric.get("mode") == "min" else "higher"
    name = f"{words(metric.get('place'))} {words(metric.get('name'))}"
    axes.set_title(f"Final {name} of each seed ({better} is better)")
    by_seed = _values_by_seed(entries)
    for points in by_seed.values():
        axes.plot(*zip(*points, strict=True), color=GREY, linewidth=0.8, alpha=0.6, zorder=1)
    for place, entry in enumerate(entries):
        values = [value for points in by_seed.values() for at, value in points if at == place]
        colour = colours[str(entry.get("precision"))]
        axes.scatter([place] * len(values), values, color=colour, marker=MARKERS[place % len(MARKERS)], zorder=3, s=34)
        if values:
            axes.hlines(sum(values) / len(values), place - 0.22, place + 0.22, color=colour, linewidth=2, zorder=2)
        _tell_lost(axes, place, sum(not run.get("finished") for run in dicts(entry.get("runs"))))
    axes.set_xticks(range(len(entries)), [words(entry.get("precision"), 12) for entry in entries])
    axes.set_xlim(-0.6, len(entries) - 0.4)
    axes.margins(y=0.18)


def _tell_lost(axes: Any, place: int, count: int) -> None:
    if count:
        at = {"xycoords": ("data", "axes fraction"), "xytext": (0, 4), "textcoords": "offset points"}
        style = {"ha": "center", "va": "bottom", "color": VERMILION, "fontsize": 8.5, "fontweight": "bold"}
        axes.annotate(f"{count} did not finish", (place, 0), **at, **style)


def _values_by_seed(entries: Sequence[dict[str, Any]]) -> dict[Any, list[tuple[int, float]]]:
    """For each seed the place of each precision, and the final metric there."""
    by_seed: dict[Any, list[tuple[int, float]]] = {}
    for place, entry in enumerate(entries):
        for run in dicts(entry.get("runs")):
            value = finite(run.get("value"))
            if value is not None:
                by_seed.setdefault(run.get("seed"), []).append((place, value))
    return by_seed


def _bars(
    axes: Any,
    entries: Sequence[dict[str, Any]],
    keys: tuple[str, str],
    unit: tuple[float, str],
    colours: dict[str, str],
) -> None:
    """A bar for each precision, with its value and how many times the reference's it is.

    keys: of the value and of the ratio in an entry; unit: what the value is multiplied by, and then measured in.
    """
    factor, name = unit
    bars = []
    for place, entry in enumerate(entries):
        amount, ratio = (finite(entry.get(key)) for key in keys)
        times = f"  (x{ratio:.2f})" if ratio is not None and place else ""
        value = entry.get(keys[0]) if amount is None else amount * factor
        bars.append(Bar(value, colours[str(entry.get("precision"))], partial(_amount, f" {name}{times}")))
    bars_with_values(axes, bars, room=0.75)
    label_rows(axes, [words(entry.get("precision"), 12) for entry in entries])
    axes.set_xlabel(name)


def _amount(unit: str, number: float) -> str:
    return (f"{number:,.0f}" if 100 <= number < 1e9 else f"{number:.3g}") + unit
