"""Draws a diagnosis from its `diagnosis.json`: drift, underflow, casts, pins and the training that checks them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from amp_recipes.commands.report.bars import Bar, bars_with_values, label_rows, share_cells, stacked_bars
from amp_recipes.commands.report.drawing import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    SERIES,
    SKY,
    VERMILION,
    dicts,
    finite,
    finite_list,
    is_wide,
    legend_beside,
    module_names,
    page,
    part,
    percent,
    read_report,
    save,
    words,
    wrapped,
)
from amp_recipes.errors import listed

JSON_FILE, PICTURE_FILE = "diagnosis.json", "diagnosis.png"

_MODULES_SHOWN = 20  # of the drift; more would not be read
_CASTING_SHOWN = 10
_CASTERS = {"user": "your code"}  # as `diagnosis.json` names them, and as a reader does
_NAME_CHARACTERS = 48
_WIDTH_INCHES = 13.0
_ROW_INCHES = 0.235
_PINS_LISTED = 12
_LARGEST_FP16 = 65504.0


# How to draw a picture into a figure, and its height in inches.
_Panel: TypeAlias = "tuple[Callable[[Any], None], float]"


def draw_diagnosis(folder: Path) -> Path | None:
    """Draw `<folder>/diagnosis.json` as `diagnosis.png` beside it; None if there is nothing to draw.

    What the file does not have is left out. Raises ConfigError for a file that cannot be read or written, and where
    matplotlib is not installed.
    """
    found = read_report(folder / JSON_FILE) or {}
    panels = _panels(found)
    rows = [*_drift_panel(found), *(panels[first : first + 2] for first in range(0, len(panels), 2))]
    if not rows:
        return None
    inches = [max(height for _, height in row) for row in rows]
    with page(_title(found), _headline(found), _WIDTH_INCHES, inches) as (figure, cells):
        for cell, row in zip(cells, rows, strict=True):
            places = cell.subgridspec(1, len(row))
            for column, (draw, _) in enumerate(row):
                draw(figure.add_subfigure(places[column]))
        return save(figure, folder / PICTURE_FILE)


def _drift_panel(found: dict[str, Any]) -> list[list[_Panel]]:
    """The picture that has a row for itself."""
    drift = dicts(found.get("drift"))
    height = 1.2 + min(len(drift), _MODULES_SHOWN) * _ROW_INCHES
    return [[(partial(_drift, drift), height)]] if drift else []


def _panels(found: dict[str, Any]) -> list[_Panel]:
    """The other pictures for which the file has something, in the order of the page."""
    panels: list[_Panel] = []
    underflow, casts = part(found, "underflow"), dicts(found.get("casts"))
    if finite_list(underflow.get("scales")) and finite_list(underflow.get("flushed")):
        own = finite(part(found, "loss_scale").get("init"))
        panels.append((partial(_underflow, underflow, own), 3.2))
    if casts:
        count = min(_CASTING_SHOWN, len({str(row.get("module")) for row in casts}))
        panels.append((partial(_casts, casts), 1.2 + 0.2 * count))
    return [*panels, *_panels_of_pins(found)]


def _panels_of_pins(found: dict[str, Any]) -> Iterator[_Panel]:
    pins = part(found, "pins")
    if any(finite(pins.get(name)) is not None for name in ("error", "held_out_error")):
        yield partial(_pins, pins), 3.0
    curves = part(pins, "curves")
    if _curves(curves.get("reference")) or _curves(curves.get("pinned")):
        low = f"{words(found.get('precision') or 'low', 12)}{', pinned' if pins.get('modules') else ''}"
        yield partial(_training, curves, low), 4.0


def _title(found: dict[str, Any]) -> str:
    torch = part(found, "versions").get("torch")
    precision = words(found.get("precision"), 40)
    return f"Diagnosis{f' of {precision}' if precision else ''}{f', torch {words(torch, 30)}' if torch else ''}"


def _headline(found: dict[str, Any]) -> str:
    lines = [wrapped(line, 165, 3) for line in _what_to_do(found) if line.strip()]
    kinds = Counter(str(hazard.get("kind")) for hazard in dicts(found.get("hazards")))
    if kinds:
        hazards = ", ".join(f"{kind} ({count})" if count > 1 else kind for kind, count in kinds.most_common(8))
        lines.append(wrapped(f"Hazards in the code: {hazards}.", 165, 2))
    return "\n".join(lines)


def _what_to_do(found: dict[str, Any]) -> list[str]:
    """The first line of each precision, and what to add to the YAML; the figures are in the pictures."""
    headlines = found.get("headlines")
    if not isinstance(headlines, list):
        return str(found.get("verdict") or "").splitlines()[:6]
    settings = {name: lines for name, lines in part(found, "settings").items() if isinstance(lines, list) and lines}
    return [
        *map(str, headlines),
        *(f"For {name}, add to your YAML: {'; '.join(map(str, lines))}" for name, lines in settings.items()),
    ]


# ---------------------------------------------------------------------- drift


def _drift(drift: Sequence[dict[str, Any]], figure: Any) -> None:
    """Each module a row: sensitivity, gradient error, and the shares outside of fp16's range."""
    shown = drift[:_MODULES_SHOWN]
    names, above = module_names([row.get("module") or "(the whole model)" for row in shown], _NAME_CHARACTERS)
    left, middle, right = figure.subplots(1, 3, sharey=True, width_ratios=[1.25, 1, 0.62])
    of = f"the first {len(shown)} of {len(drift)} modules" if len(drift) > len(shown) else "all modules"
    bars_with_values(left, [Bar(row.get("sensitivity"), BLUE, "{:.2g}".format) for row in shown])
    left.set_title(f"Sensitivity, {of}")
    left.set_xlabel("|dL/dy| * |error|")
    bars_with_values(middle, [Bar(row.get("gradient_error"), GREEN, "{:.2g}".format) for row in shown])
    middle.set_title("Gradient error")
    middle.set_xlabel("relative to the gradient in fp32")
    shares = [[row.get("above_max"), row.get("below_normal")] for row in shown]
    share_cells(right, ["> 65504", "< 6.1e-5"], shares)
    right.set_title("Share beyond fp16")
    right.set_xlabel("of the module's values")
    label_rows(left, names, above)
    left.set_ylabel("module")


# ---------------------------------------------------------------------- underflow


def _underflow(underflow: dict[str, Any], own: float | None, figure: Any) -> None:
    """The share of the gradients that fp16 would flush, by loss scale, and the window between too low and too high.

    own: the loss scale that the run begins with.
    """
    axes = figure.add_subplot()
    octaves = [math.log2(scale) if scale > 0 else math.nan for scale in finite_list(underflow.get("scales"))]
    zeros = finite(underflow.get("exact_zeros"))
    flushed = [share - (zeros or 0.0) for share in finite_list(underflow.get("flushed"))]
    axes.set_title("Gradients that fp16 would lose, by loss scale")
    axes.set_xlabel("log2 of the loss scale")
    beyond = "" if not zeros else f",\nbeyond the {percent(zeros)} that are 0 in bf16"
    axes.set_ylabel(f"share of gradient values{beyond}")
    axes.set_yscale("symlog", linthresh=1e-4, linscale=0.5)
    axes.set_ylim(0, 5)
    ticks = [0, 1e-4, 1e-3, 1e-2, 1e-1, 1]
    axes.set_yticks(ticks, [percent(tick) for tick in ticks])
    axes.minorticks_off()
    for name, colour, style, width, shares in (  # the thin one is drawn over the wide one: where they meet both show
        ("flushed to 0", BLUE, "-", 3.6, flushed),
        ("kept with\nfewer digits", PURPLE, "--", 1.4, finite_list(underflow.get("subnormal"))),
    ):
        count = min(len(octaves), len(shares))
        style = {"color": colour, "linestyle": style, "linewidth": width, "marker": ".", "label": name}
        axes.plot(octaves[:count], shares[:count], **style)
    _mark_scales(axes, underflow)
    if own is not None and own > 0:
        axes.axvline(math.log2(own), color=VERMILION, linestyle=":", linewidth=2.4, label=f"of this run\n({own:g})")
    legend_beside(axes)


def _mark_scales(axes: Any, underflow: dict[str, Any]) -> None:
    """Mark the scale from which there is overflow, the window below it, and the scale to begin with."""
    least, most = axes.get_xlim()
    largest, width = finite(underflow.get("largest")), finite(underflow.get("window_octaves"))
    overflow = math.log2(_LARGEST_FP16 / largest) if largest is not None and largest > 0 else math.inf
    if overflow < most:
        axes.axvspan(overflow, most, facecolor="none", edgecolor=VERMILION, hatch="//", linewidth=0, alpha=0.5)
        axes.text(most, 0.012, "overflow", color=VERMILION, fontweight="bold", ha="right", backgroundcolor="white")
    if width is not None and width > 0 and overflow < math.inf:
        axes.axvspan(overflow - width, overflow, color=GREEN, alpha=0.15, linewidth=0)
        middle = (max(least, overflow - width) + min(most, overflow)) / 2
        axes.text(middle, 4, f"window: {width:.1f} octaves", ha="center", va="top", color=GREEN)
    _mark_init_scale(axes, finite(underflow.get("init_scale")), middle=(least + most) / 2)
    axes.set_xlim(least, most)


def _mark_init_scale(axes: Any, scale: float | None, middle: float) -> None:
    """Mark the scale to begin with, its name on the side of the picture's middle."""
    if scale is None or scale <= 0:
        return
    at = math.log2(scale)
    axes.axvline(at, color=BLACK, linewidth=1.2)
    text = f"advised\n2^{at:g}" if at == int(at) else f"advised\n{scale:g}"
    left = at > middle
    axes.annotate(
        text,
        (at, 0.1),
        xytext=(-5 if left else 5, 0),
        textcoords="offset points",
        fontweight="bold",
        ha="right" if left else "left",
    )


# ---------------------------------------------------------------------- casts


def _casts(casts: Sequence[dict[str, Any]], figure: Any) -> None:
    """Bytes that each module casts in a step, by who asked for the casts."""
    axes = figure.add_subplot()
    of: dict[str, Counter[str]] = {}
    for row in casts:
        size = finite(row.get("bytes"))
        if size is not None and size > 0:
            of.setdefault(str(row.get("module") or "(outside of modules)"), Counter())[
                _CASTERS.get(str(row.get("by")), str(row.get("by")))
            ] += size
    ranked = sorted(of.items(), key=lambda entry: -entry[1].total())
    shown = ranked[:_CASTING_SHOWN]
    which = f"{len(shown)} of {len(ranked)} modules" if len(ranked) > len(shown) else "all modules"
    axes.set_title(f"Casts in a step, {which}")
    stacked_bars(axes, [sizes for _, sizes in shown])
    label_rows(axes, *module_names([name for name, _ in shown], _NAME_CHARACTERS - 8))
    axes.set_ylabel("module")


# ---------------------------------------------------------------------- pins and training


def _pins(pins: dict[str, Any], figure: Any) -> None:
    """The gradient error with the pins, on the batches of the search and on others, against the tolerance."""
    axes = figure.add_subplot()
    modules = pins.get("modules")
    modules = modules if isinstance(modules, list) else []
    axes.set_title(_title_of_pins(len(modules), pins.get("verified")))
    rows = {"error": "batches of the search", "held_out_error": "held-out batches"}
    if modules and "error_without" in pins:
        rows = {"error_without": "without them", **rows}
    tolerance = finite(pins.get("tolerance"))
    bars_with_values(axes, [Bar(pins.get(key), BLUE, percent) for key in rows], beside=tolerance)
    axes.xaxis.set_major_formatter(lambda share, _: percent(share))
    if tolerance is not None and tolerance > 0:
        axes.axvline(tolerance, color=VERMILION, linestyle="--", linewidth=1.4)
        left = axes.transAxes.inverted().transform(axes.transData.transform((tolerance, 0)))[0] > 0.6
        axes.annotate(
            f"tolerance {percent(tolerance)}",
            (tolerance, -0.62),
            xytext=(-4 if left else 4, 0),
            textcoords="offset points",
            color=VERMILION,
            fontweight="bold",
            va="center",
            ha="right" if left else "left",
        )
    axes.set_yticks(range(len(rows)), list(rows.values()))
    axes.set_ylim(len(rows) - 0.4, -0.9)
    axes.set_ylabel("measured on")
    axes.set_xlabel("\n".join(["relative to the gradient in fp32", *_told_of_pins(pins, modules)]), loc="left")


def _title_of_pins(count: int, verified: Any) -> str:
    more = f"with {count} more module{'' if count == 1 else 's'} in fp32" if count else "without more pins"
    proofs = {True: ", verified", False: ", NOT verified"}
    return f"Gradient error {more}{proofs[verified] if isinstance(verified, bool) else ''}"


def _told_of_pins(pins: dict[str, Any], modules: Sequence[Any]) -> list[str]:
    lines = []
    if modules:
        lines.append(wrapped(f"in fp32: {listed(modules, _PINS_LISTED)}", 84, 3))
    costs = {"time": finite(pins.get("cost_time")), "memory": finite(pins.get("cost_memory"))}
    shown_costs = [f"{cost:.2f} times the {what}" for what, cost in costs.items() if cost is not None]
    return [*lines, *([f"a step takes {' and '.join(shown_costs)}"] if shown_costs else [])]


def _training(curves: dict[str, Any], low: str, figure: Any) -> None:
    """Losses of the seeds in fp32 and in low precision, and below them what each pair differs by. low: its name.

    The curves of a pair lie on each other, so fp32's are wide and pale, and the others thin over them.
    """
    reference, pinned = _curves(curves.get("reference")), _curves(curves.get("pinned"))
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    axes.set_title(f"Training check: {len(reference)} fp32 seed{'' if len(reference) == 1 else 's'} and {low}")
    axes.set_ylabel("loss")
    if is_wide([value for curve in [*reference, *pinned] for value in curve]):
        axes.set_yscale("log")
    for colour, width, name, group in ((SKY, 4.5, "fp32", reference), (BLACK, 0.9, low, pinned)):
        is_finite = all(math.isfinite(loss) for curve in group for loss in curve)
        name += "" if is_finite else "\n(nonfinite)"
        for curve in group:
            axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=width, marker=_marker(curve), label=name)
            name = "_"  # a curve without a name of its own is left out of the legend
    legend_beside(axes)
    for index, (first, second) in enumerate(zip(reference, pinned, strict=False)):
        higher = [its - mine for mine, its in zip(first, second, strict=False)]
        below.plot(range(1, len(higher) + 1), higher, color=SERIES[index % len(SERIES)], linewidth=0.9, alpha=0.8)
    below.axhline(0, color=GREY, linewidth=0.8)
    below.set_ylabel("difference\nof a pair")
    below.set_xlabel("updates")


def _marker(curve: Sequence[float]) -> str:
    """Points for a short curve, of which a line would show little."""
    return "." if len(curve) < 20 else ""


def _curves(value: Any) -> list[list[float]]:
    """One curve, or a list of them, as a list of curves; those without any finite value are left out."""
    if not isinstance(value, list):
        return []
    nested = value if any(isinstance(item, list) for item in value) else [value]
    curves = [finite_list(item) for item in nested]
    return [curve for curve in curves if any(math.isfinite(loss) for loss in curve)]
