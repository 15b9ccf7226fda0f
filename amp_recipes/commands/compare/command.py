"""Runs `amp-recipes compare`: plan, runs, verdict, files."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amp_recipes.commands.child_runs import ChildRuns, runs_in
from amp_recipes.commands.compare.outcome import Outcome, read_outcome
from amp_recipes.commands.compare.plan import Plan, make_plan
from amp_recipes.commands.compare.runs import CannotCompare, Ended, Runs
from amp_recipes.commands.compare.shown import as_markdown, report
from amp_recipes.commands.compare.significance import require_scipy
from amp_recipes.commands.compare.verdict import compared, find_place
from amp_recipes.commands.report.compare_page import draw_comparison
from amp_recipes.config.yaml.mistakes import printable
from amp_recipes.errors import AmpRecipesError, ConfigError, PrecisionError
from amp_recipes.files.run_files import write_atomically
from amp_recipes.files.strict_json import encode
from amp_recipes.precision import resolve_precision

NONE_WORSE, ONE_WORSE, FAILED = 0, 1, 2

JSON_FILE, TABLE_FILE = "compare.json", "compare.md"


def run(arguments: argparse.Namespace) -> int:
    """Compare as the command line says; the exit status.

    arguments: what the command line says, with the recipe's own words as `recipe_options`.
    0: no precision is worse; 1: one is; 2: there is no verdict on some of them (one seed, a reference that did not
    finish, a mistake); 128 + n: signal n ended it, and the same command continues it.
    """
    # With --json, the only thing on the standard output is the JSON.
    say = partial(print, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    try:
        return _run(arguments, say)
    except (AmpRecipesError, CannotCompare) as error:
        print(printable(f"amp-recipes: {error}"), file=sys.stderr)
        return FAILED


def _run(arguments: argparse.Namespace, say: Any) -> int:
    if "RANK" in os.environ:
        raise ConfigError("compare starts its runs itself, one process each: start it without torchrun.")
    require_scipy()
    plan = make_plan(
        arguments.script,
        arguments.hparams_file,
        arguments.recipe_options,
        arguments.precisions,
        arguments.seeds,
        arguments.to,
        arguments.metric,
        arguments.mode,
    )
    with runs_in(plan.folder) as children:
        outcomes = _train(plan, children, say)
        if children.requested is not None:
            say(f"{children.requested.name}: comparison stopped; run the same command again to continue it.")
            return 128 + children.requested
        found = compared(plan, outcomes, _command(arguments))
        _write(plan.folder, found, say, arguments.json)
    return ONE_WORSE if found["worse"] else FAILED if found["undecided"] else NONE_WORSE


def _train(plan: Plan, children: ChildRuns, say: Any) -> list[Outcome]:
    """Make all runs and read what they left."""
    say(f"{plan.script} {plan.hparams_file}: {len(plan.runs)} runs, one after another, into {plan.folder}")
    for line in _warnings(plan):
        say(f"  {line}")
    outcomes: list[Outcome] = []
    for ended in Runs(plan, children, say).make_all():
        outcomes.append(_outcome(plan, ended))
        if outcomes[-1].finished:
            find_place(plan.metric, outcomes)  # a missing metric is an error after the first run, not the last
    return outcomes


def _outcome(plan: Plan, ended: Ended) -> Outcome:
    run = ended.run
    records = run.folder / ("debug" if plan.settings.get("debug") else "")
    outcome = read_outcome(run.precision, run.seed, run.folder, records, ended.message)
    outcome.script = ended.script
    if outcome.finished and not outcome.epochs:
        raise CannotCompare(
            f"{run} finished, but wrote no records to {records}: does the script give its Brain the run options (or "
            "hparams) that it was started with, output_folder among them?"
        )
    return outcome


def _warnings(plan: Plan) -> list[str]:
    """Return the warnings on precisions that are slow on this CPU, before anything runs.

    A GPU is not asked: this process would then hold memory there, beside the runs.
    """
    device = plan.settings.get("device") or ("gpu" if torch.accelerator.is_available() else "cpu")
    if device != "cpu":
        return []
    found = []
    for name in plan.precisions:
        try:
            warning = resolve_precision(name, device).warning
        except PrecisionError as error:
            warning = str(error)
        if warning:
            found.append(warning)
    return found


def _write(folder: Path, found: dict[str, Any], say: Any, as_json: bool) -> None:
    text = encode(found, indent=2) + "\n"
    write_atomically(folder / JSON_FILE, text.encode())
    write_atomically(folder / TABLE_FILE, as_markdown(found).encode())
    if as_json:
        print(text, end="")
    say("")
    for line in report(found):
        say(line)
    files = f"{folder / JSON_FILE} and {TABLE_FILE}"
    try:
        picture = draw_comparison(folder)
    except ConfigError as error:  # the numbers are written; the picture is optional
        say(f"\nWritten to {files}. No picture: {error}")
    else:
        say(f"\nWritten to {files}" + (f", drawn in {picture.name}." if picture else "."))


def _command(arguments: argparse.Namespace) -> str:
    """The command as it can be typed again."""
    words = ["amp-recipes", "compare", str(arguments.script), str(arguments.hparams_file)]
    for name in ("precisions", "seeds", "to", "metric", "mode"):
        value = getattr(arguments, name)
        words += [] if value is None else [f"--{name}", str(value)]
    return shlex.join([*words, *(["--", *arguments.recipe_options] if arguments.recipe_options else [])])
