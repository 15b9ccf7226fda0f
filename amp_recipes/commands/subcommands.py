"""Runs the subcommands of `amp-recipes`: each takes the parsed command line, and returns the exit status."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from amp_recipes.commands.child_runs import ChildRuns
from amp_recipes.commands.collection import recipe_called
from amp_recipes.commands.diff import compare_runs
from amp_recipes.commands.export import export_run
from amp_recipes.commands.requests import report
from amp_recipes.commands.run_records import require_script
from amp_recipes.commands.verify_resume.verify import verify_resume
from amp_recipes.config import check as check_yaml
from amp_recipes.config import parse_arguments
from amp_recipes.config.options.requests import DIAGNOSIS_SETTINGS
from amp_recipes.config.yaml.mistakes import one_line, printable
from amp_recipes.errors import AmpRecipesError, ConfigError
from amp_recipes.numerics.nonfinite import read_command
from amp_recipes.numerics.ops.reference import report_ops


def export(arguments: argparse.Namespace) -> int:
    print(export_run(arguments.run_folder, arguments.to).report())
    return 0


def verify(arguments: argparse.Namespace) -> int:
    return verify_resume(
        arguments.script,
        arguments.hparams_file,
        arguments.recipe_options,
        arguments.steps,
        arguments.save_at,
        arguments.kill_at,
        arguments.keep,
        say=lambda line: print(line, flush=True),
    )


def check(arguments: argparse.Namespace) -> int:
    require_script(arguments.script)
    file, _, overrides = parse_arguments([str(arguments.hparams_file), *arguments.recipe_options])
    settings = check_yaml(file, overrides, recipe_folder=arguments.script.resolve().parent)
    print(report(settings, overrides))
    return 0


def train(arguments: argparse.Namespace) -> int:
    recipe = recipe_called(arguments.recipe)
    return _start(recipe.script, [str(recipe.hparams_file), *arguments.recipe_options])


def diagnose(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in DIAGNOSIS_SETTINGS}
    settings = [f"--diagnose-{name}={text}" for name, text in given.items() if text is not None]
    try:
        return _start(
            arguments.script, [str(arguments.hparams_file), *arguments.recipe_options, "--diagnose", *settings]
        )
    except AmpRecipesError as error:
        print(printable(f"amp-recipes: {error}"), file=sys.stderr)
        return 2  # 1 says that the precision is not safe


def replay(arguments: argparse.Namespace) -> int:
    command = read_command(arguments.folder)
    words = [*command["words"], f"--replay={arguments.folder.resolve()}"]
    script = Path(command["cwd"], command["script"])
    start = ["-m", command["module"]] if command["module"] else [str(script)]
    shown_command = one_line(shlex.join(["python", *start, *words]))
    print(f"in {one_line(command['cwd'])}:\n  {shown_command}", file=sys.stderr, flush=True)
    reasons = command["not_vouched_for"]
    if missing := [name for name in reasons if name not in arguments.trust.split(",")]:
        listed = "".join(f"\n  {one_line(name)}: {one_line(reasons[name])}" for name in missing)
        again = one_line(shlex.join(["amp-recipes", "replay", str(arguments.folder), f"--trust={','.join(reasons)}"]))
        raise ConfigError(
            f"{arguments.folder} would run code that may not be yours:{listed}\nIf the command above is yours: {again}"
        )
    if command["masked"]:
        masked = one_line(", ".join(command["masked"]))
        print(f"not saved in the folder, so give these options again: {masked}", file=sys.stderr, flush=True)
    return _start(script, words, command["cwd"], command["module"])


def _start(script: Path, words: Sequence[str], folder: str | None = None, module: str | None = None) -> int:
    """Run a recipe's script as its user would, with this interpreter; its exit status, 128 + n for signal n.

    module: its name, where it was started by `python -m`.
    """
    require_script(script)
    start = ["-m", module] if module else [str(script)]
    try:
        with ChildRuns() as children:
            status = children.run([sys.executable, *start, *words], folder=folder).status
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; expected the folder in which the run was started.") from error
    return status if status >= 0 else 128 - status


def ops(arguments: argparse.Namespace) -> int:
    print(report_ops(arguments.device, arguments.dtype, arguments.json, arguments.all))
    return 0


def diff(arguments: argparse.Namespace) -> int:
    try:
        found = compare_runs(*arguments.runs)
    except AmpRecipesError as error:
        print(printable(f"amp-recipes: {error}"), file=sys.stderr)
        return 2  # as diff and cmp do: 1 says that there are differences
    print(found.as_json() if arguments.json else found.report())
    return int(found.differ)
