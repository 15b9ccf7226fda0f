"""Reads the command line of `amp-recipes` and runs the subcommand that it names: one entry of COMMANDS for each.

What a command runs is imported when it is chosen: torch takes seconds, and `--version` and `completion` do without.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_recipes import __version__
from amp_recipes.commands.completion import SHELLS, Words, completion_script
from amp_recipes.commands.new import TEMPLATES
from amp_recipes.config.yaml.mistakes import printable, reader_may_leave
from amp_recipes.errors import AmpRecipesError
from amp_recipes.files.lazy_names import from_commands


class Argument:
    """An argument of a subcommand; options: further ones of `ArgumentParser.add_argument`."""

    def __init__(self, name: str, help: str, **options: Any) -> None:
        self.name = name
        self.options = {"help": help, **options}


def _path(name: str, metavar: str, help: str, **options: Any) -> Argument:
    return Argument(name, help, metavar=metavar, type=Path, **options)


@dataclass(frozen=True)
class Command:
    """One subcommand.

    run: `module:function` of this room that does it, and returns the exit status; passes_options: whether options that
    it does not know are for a recipe (they come as `recipe_options`).
    """

    name: str
    summary: str
    example: str
    run: str
    arguments: tuple[Argument, ...]
    passes_options: bool = False


_RECIPE = (_path("script", "SCRIPT", "the recipe's script"), _path("hparams_file", "YAML", "its YAML file"))

COMMANDS = (
    Command(
        "new",
        "Create a recipe of your own in a new folder: script, YAML, model, data and a README. By default it is made "
        "from a template, trains on random data, and has tests; with --from it is a copy of a recipe of the package. "
        "No file is overwritten.",
        "amp-recipes new digits --from image_classification",
        "new:run",
        (
            Argument("name", "the recipe's name, such as my_task", metavar="NAME", nargs="?"),
            Argument("--from", "copy this recipe (--list shows them)", metavar="RECIPE", dest="recipe"),
            Argument("--list", "list the recipes and templates, and exit", action="store_true"),
            _path("--to", "FOLDER", "folder to create (default: NAME in the current folder)"),
            Argument(
                "--template",
                "; ".join(f"{name}: {summary}" for name, summary in TEMPLATES.items()) + " (default: basic)",
                choices=TEMPLATES,
                default="basic",
            ),
        ),
    ),
    Command(
        "run",
        "Train a recipe of the package. Its results go into the current folder. To change its code, make a copy: "
        "amp-recipes new NAME --from RECIPE.",
        "amp-recipes run image_classification --precision bf16",
        "subcommands:train",
        (Argument("recipe", "the recipe's name (see amp-recipes new --list)", metavar="RECIPE"),),
        passes_options=True,
    ),
    Command(
        "check",
        "Check a recipe's YAML and options without running its script, and report every mistake with its line. Builds "
        "no objects, but imports the modules that the YAML names. With --show-config: print the resolved YAML with the "
        "source of each value. If the script gives trust=... to load_hparams, give the same names with --trust.",
        "amp-recipes check recipes/image_classification/train.py configs/image_classification.yaml --precision bf16",
        "subcommands:check",
        (_path("script", "SCRIPT", "the recipe's script, which is not run"), _RECIPE[1]),
        passes_options=True,
    ),
    Command(
        "export",
        "Write the weights of a run's best checkpoint as safetensors, with its resolved settings.",
        "amp-recipes export results/image_classification/bf16/seed_1234",
        "subcommands:export",
        (
            _path("run_folder", "RUN", "output folder of a run, or one of its CKPT+ folders"),
            _path("--to", "FOLDER", "folder to write to (default: `export` in the run's folder)"),
        ),
    ),
    Command(
        "verify-resume",
        "Test whether a recipe that is killed and resumed gives the same results, bit for bit, as one that was not "
        "killed. If they differ, name the first difference and its likely cause. Runs the recipe four times for a few "
        "updates. Exit status: 0 equal, 1 different, 2 a run failed.",
        "amp-recipes verify-resume recipes/image_classification/train.py configs/image_classification.yaml "
        "--precision bf16",
        "subcommands:verify",
        (
            *_RECIPE,
            Argument("--steps", "updates of each run (default: 12)", type=int, default=12, metavar="N"),
            Argument(
                "--save_at", "updates between checkpoints in an epoch (default: 5)", type=int, default=5, metavar="N"
            ),
            Argument(
                "--kill_at", "kill one run after this many updates (default: 8)", type=int, default=8, metavar="N"
            ),
            _path("--keep", "FOLDER", "keep the runs here (default: a temporary folder, deleted at the end)"),
        ),
        passes_options=True,
    ),
    Command(
        "diagnose",
        "Report what bf16 or fp16 does to a recipe's model: whether it is safe, which modules need fp32, what it "
        "costs. Uses a few batches instead of training. Prints a verdict, and writes diagnosis.json into the output "
        "folder. The same as SCRIPT YAML --diagnose. Exit status: 0 safe, 1 not safe as it is, 2 not decided, or an "
        "error.",
        "amp-recipes diagnose recipes/image_classification/train.py configs/image_classification.yaml --precision fp16",
        "subcommands:diagnose",
        (
            *_RECIPE,
            Argument("--minutes", "approximate time limit (default: 5)", metavar="X"),
            Argument("--windows", "windows of batches to look at (default: 8)", metavar="N"),
            Argument(
                "--tolerance",
                "largest relative error of the gradient that is accepted (default: a fifth of the difference between "
                "batches, and at least ten times the precision's eps)",
                metavar="X",
            ),
        ),
        passes_options=True,
    ),
    Command(
        "replay",
        "Repeat a step that became nonfinite, from the folder that the run wrote. Starts the script that the folder "
        "names: replay only folders that you trust.",
        "amp-recipes replay results/image_classification/fp16/seed_1234/nonfinite-17",
        "subcommands:replay",
        (
            _path("folder", "FOLDER", "a folder nonfinite-N that a run wrote"),
            Argument(
                "--trust",
                "what the replay may run although the framework cannot confirm that it is yours, as listed by the "
                "error; separated by commas",
                metavar="NAMES",
                default="",
            ),
        ),
    ),
    Command(
        "ops",
        "Print what autocast does to each op on this machine: the documented lists, what running the ops "
        "shows, and the differences.",
        "amp-recipes ops --device cpu --dtype bf16",
        "subcommands:ops",
        (
            Argument("--device", "cpu, cuda or xpu (default: the best one here)", metavar="TYPE"),
            Argument("--dtype", "bf16 or fp16 (default: bf16)", metavar="NAME"),
            Argument("--json", "print one JSON object", action="store_true"),
            Argument("--all", "also list the ops that behave as documented", action="store_true"),
        ),
    ),
    Command(
        "compare",
        "Train a recipe at several precisions and seeds, and test whether a precision is worse than the first "
        "by more than seeds make results vary. Exit status: 0 none is worse, 1 one is, 2 there is no verdict.",
        "amp-recipes compare recipes/image_classification/train.py configs/image_classification.yaml "
        "--precisions fp32,bf16 --seeds 3",
        "compare.command:run",
        (
            *_RECIPE,
            Argument(
                "--precisions",
                "what to compare; the first is the reference (default: fp32,bf16)",
                default="fp32,bf16",
                metavar="P,P",
            ),
            Argument(
                "--seeds",
                "seeds 1 to N, or a list such as 11,12,13 (default: 3); more seeds can show smaller differences",
                default="3",
                metavar="N",
            ),
            _path(
                "--to",
                "FOLDER",
                "where the runs and the comparison go (default: results/compare/<the script's folder>)",
            ),
            Argument(
                "--metric",
                "metric to compare by: `accuracy`, or `valid.accuracy` of one stage (default: early_stop_metric, else "
                "loss)",
                metavar="NAME",
            ),
            Argument(
                "--mode", "which values of the metric are better (default: early_stop_mode)", choices=("min", "max")
            ),
            Argument("--json", "print the comparison as one JSON object", action="store_true"),
        ),
        passes_options=True,
    ),
    Command(
        "diff",
        "Show what differs between two runs: settings, versions, git state, results. Exit status: 0 no difference "
        "but in times and memory, 1 another difference, 2 a folder is not a run or cannot be read.",
        "amp-recipes diff results/image_classification/fp32/seed_1 results/image_classification/bf16/seed_1",
        "subcommands:diff",
        (
            _path("runs", "RUN", "output folders of two runs", nargs=2),
            Argument("--json", "print the differences as one JSON object", action="store_true"),
        ),
    ),
    Command(
        "completion",
        "Print a script that completes options and keys of the YAML in bash or zsh. Its first lines say where to put "
        "it.",
        "amp-recipes completion bash",
        "cli:completion",
        (Argument("shell", "the shell that will use the script", choices=SHELLS),),
    ),
)


def completion(arguments: argparse.Namespace) -> int:
    print(completion_script(arguments.shell, {command.name: _words(command) for command in COMMANDS}), end="")
    return 0


def _words(command: Command) -> Words:
    """Return the words that may follow a subcommand."""
    choices = {argument.name: argument.options.get("choices", ()) for argument in command.arguments}
    options = {name: values for name, values in choices.items() if name.startswith("--")}
    first = next((values for name, values in choices.items() if name not in options), ())
    return Words({"--help": (), **options}, first, command.passes_options)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="amp-recipes",
        description="Create, check, train and compare recipes, and use the results of runs.",
        epilog="amp-recipes COMMAND --help shows the arguments of a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"amp-recipes {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for command in COMMANDS:
        passes = " Options of the recipe may follow; after --, all are the recipe's." if command.passes_options else ""
        sub = commands.add_parser(
            command.name,
            help=command.summary.partition(".")[0].partition(";")[0],
            description=command.summary,
            epilog=f"Example: {command.example}.{passes}",
            allow_abbrev=False,
        )
        for argument in command.arguments:
            sub.add_argument(argument.name, **argument.options)
        sub.set_defaults(chosen=command, parser=sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status.

    An error of the framework's is one message on stderr and status 1; a command line that does not parse ends with
    status 2, as argparse does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    status = 0
    with reader_may_leave():
        status = _run(words)
    return status


def _run(words: list[str]) -> int:
    at = words.index("--") if "--" in words else len(words)
    arguments, unknown = make_parser().parse_known_args(words[:at])
    arguments.recipe_options = [*unknown, *words[at + 1 :]]
    if arguments.recipe_options and not arguments.chosen.passes_options:
        arguments.parser.error(f"unrecognized arguments: {' '.join(arguments.recipe_options)}")
    try:
        return from_commands(*arguments.chosen.run.split(":"))(arguments)
    except AmpRecipesError as error:
        print(printable(f"amp-recipes: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
