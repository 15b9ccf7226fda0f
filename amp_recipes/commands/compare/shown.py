"""Shows a comparison to people: verdicts, a table, and the losses on the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from amp_recipes.commands.compare.verdict import REFERENCE
from amp_recipes.commands.tables import markdown_table
from amp_recipes.loggers.text import format_bytes, format_seconds, format_value

_STATIONS = 4  # points of the training at which the loss is shown


def as_markdown(found: Mapping[str, Any]) -> str:
    """The whole comparison as a Markdown page."""
    names = [entry["precision"] for entry in found["precisions"]]
    return "\n".join(
        [f"# {', '.join(names[1:])} compared with {names[0]}", "", f"    {found['command']}", "", *report(found), ""]
    )


def report(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines for a terminal; Markdown as well."""
    yield from (f"- {entry['headline']}" for entry in found["precisions"][1:])
    yield from ["", markdown_table(list(_table(found))), "", _explanation(found)]
    if losses := list(_losses(found)):
        yield from ["", "Training loss: mean (lowest to highest seed)", "", markdown_table(losses)]
    if failures := list(_failures(found)):
        yield from ["", *failures]
    for note in found["notes"]:
        yield from ["", f"Note: {note}"]


def _explanation(found: Mapping[str, Any]) -> str:
    """Return the notes on how to read the table."""
    text = (
        f"{_metric(found)}: mean ± standard deviation over seeds, {_better(found)} is better; validation and test ran "
        f"in {found['eval_precision']}. Time: median per update after the first tenth; the runs were made one after "
        "another, seed by seed."
    )
    if any(entry["memory_of"] == "process" for entry in found["precisions"]):
        text += "\nMemory is the peak of the whole process, Python and its libraries included."
    return text


def _table(found: Mapping[str, Any]) -> Iterator[list[str]]:
    yield ["", "verdict", _metric(found), "worse by", "p", "time per update", "memory", "finished", "skipped"]
    for entry in found["precisions"]:
        test = entry["test"] or {}
        runs = entry["runs"]
        updates, skipped = (sum(run[name] for run in runs) for name in ("updates", "skipped"))
        p = test.get("p_holm")
        yield [
            entry["precision"],
            "(reference)" if entry["verdict"] == REFERENCE else entry["verdict"],
            _mean_and_spread(entry),
            format_value(test.get("worse_by")),
            "-" if p is None else f"{p:.2g}",
            _with_ratio(entry["step_seconds"], entry["step_ratio"], _step_time),
            _with_ratio(entry["memory_bytes"], entry["memory_ratio"], format_bytes),
            f"{sum(run['finished'] for run in runs)} of {len(runs)}",
            f"{skipped / updates:.1%}".replace("%", " %") if updates else "-",
        ]


def _losses(found: Mapping[str, Any]) -> Iterator[list[str]]:
    """Rows at equal parts of the training."""
    curves = found["curves"]["loss"]
    updates, of = curves["updates"], curves["by_precision"]
    if not updates:
        return
    count = len(updates)
    rows = sorted({max(0, -(-count * part // _STATIONS) - 1) for part in range(1, _STATIONS + 1)})
    yield ["update", *of]
    for row in rows:
        yield [f"{updates[row]:,}", *(_range([run[row] for run in runs]) for runs in of.values())]


def _range(losses: list[float | None]) -> str:
    """The mean of the losses that there are, with the lowest and the highest of several."""
    there = [loss for loss in losses if loss is not None]
    if not there:
        return "-"
    ends = f" ({format_value(min(there))} to {format_value(max(there))})" if len(there) > 1 else ""
    return f"{format_value(sum(there) / len(there))}{ends}"


def _failures(found: Mapping[str, Any]) -> Iterator[str]:
    for entry in found["precisions"]:
        for run in entry["runs"]:
            if not run["finished"]:
                yield f"- {entry['precision']} seed {run['seed']} did not finish: {run['message']}"


def _mean_and_spread(entry: Mapping[str, Any]) -> str:
    if entry["mean"] is None:
        return "-"
    return format_value(entry["mean"]) + ("" if entry["spread"] is None else f" ± {format_value(entry['spread'])}")


def _with_ratio(value: Any, ratio: float | None, shown: Any) -> str:
    if value is None:
        return "-"
    return shown(value) + ("" if ratio is None else f" (x{ratio:.2f})")


def _step_time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else format_seconds(seconds)


def _metric(found: Mapping[str, Any]) -> str:
    return f"{found['metric']['place']} {found['metric']['name']}"


def _better(found: Mapping[str, Any]) -> str:
    return "lower" if found["metric"]["mode"] == "min" else "higher"
