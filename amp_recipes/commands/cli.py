"""Reads the command line of `amp-recipes` and runs the subcommand that it names: one entry of COMMANDS for each.

What a command runs is imported when it is chosen: torch takes seconds, and `--version` and `completion` do without.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from amp_recipes import __version__
from amp_recipes.commands import compare, new
from amp_recipes.commands.completion import SHELLS, Words, completion_script
from amp_recipes.config.yaml.mistakes import printable, reader_may_leave
from amp_recipes.errors import AmpRecipesError


@dataclass(frozen=True)
class Command:
    """One subcommand.

    add_arguments: enters what it takes into its parser; run: `module:function` that does it, and returns the exit
    status; passes_options: whether options that it does not know are for a recipe (they come as `recipe_options`).
    """

    name: str
    summary: str
    example: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: str
    passes_options: bool = False


# ---------------------------------------------------------------------- export


def _export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_folder", metavar="RUN", type=Path, help="output folder of a run, or one of its CKPT+ folders"
    )
    parser.add_argument(
        "--to", metavar="FOLDER", type=Path, help="where to write (default: the folder `export` in the run's)"
    )


# ---------------------------------------------------------------------- verify-resume


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="the recipe's script")
    parser.add_argument("hparams_file", metavar="YAML", type=Path, help="its YAML file")
    parser.add_argument(
        "--steps", type=int, default=12, metavar="N", help="updates (windows) of each run (default: 12)"
    )
    parser.add_argument(
        "--save_at", type=int, default=5, metavar="N", help="updates between checkpoints in an epoch (default: 5)"
    )
    parser.add_argument(
        "--kill_at", type=int, default=8, metavar="N", help="updates after which one run is killed (default: 8)"
    )
    parser.add_argument(
        "--keep", metavar="FOLDER", type=Path, help="keep the runs here (default: a temporary folder, removed)"
    )


# ---------------------------------------------------------------------- check


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="the recipe's script, which is not run")
    parser.add_argument("hparams_file", metavar="YAML", type=Path, help="its YAML file")


# ---------------------------------------------------------------------- diagnose, replay


def _diagnose_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", metavar="SCRIPT", type=Path, help="the recipe's script")
    parser.add_argument("hparams_file", metavar="YAML", type=Path, help="its YAML file")


def _replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="a folder nonfinite-N that a run left behind")
    parser.add_argument(
        "--trust",
        metavar="NAMES",
        default="",
        help="with commas: a script or module that is not a file of yours as the run had it, and what the run trusted",
    )


# ---------------------------------------------------------------------- ops


def _ops_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="TYPE", help="cpu, cuda or xpu (default: the best one here)")
    parser.add_argument("--dtype", metavar="NAME", help="bf16 or fp16 (default: bf16)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--all", action="store_true", help="also the ops that do as documented")


# ---------------------------------------------------------------------- diff


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", type=Path, nargs=2, help="output folders of two runs")
    parser.add_argument("--json", action="store_true", help="print the differences as one JSON object")


# ---------------------------------------------------------------------- completion


def _completion_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="the shell that shall read the script")


def completion(arguments: argparse.Namespace) -> int:
    print(completion_script(arguments.shell, {command.name: _words(command) for command in COMMANDS}), end="")
    return 0


def _words(command: Command) -> Words:
    """What may follow a subcommand."""
    taken = _TakenArguments()
    command.add_arguments(taken)  # type: ignore[arg-type]
    first_choices = taken.positional[0] if taken.positional else ()
    return Words({"--help": (), **taken.options}, first_choices, command.passes_options)


class _TakenArguments:
    """Stands where `add_arguments` expects a parser, since argparse has no public way to ask for what was added.

    options: the values that each option takes, where they are few; positional: those of each other argument.
    """

    def __init__(self) -> None:
        self.options: dict[str, tuple[str, ...]] = {}
        self.positional: list[tuple[str, ...]] = []

    def add_argument(self, name: str, choices: Sequence[str] = (), **_: object) -> None:
        if name.startswith("--"):
            self.options[name] = tuple(choices)
        else:
            self.positional.append(tuple(choices))


COMMANDS = (
    Command(
        "new",
        "Make a recipe of your own in a new folder: script, YAML, model, data, tests and a README. It runs at once, on "
        "random data. Nothing is overwritten.",
        "amp-recipes new my_task --to experiments/my_task",
        new.add_arguments,
        "amp_recipes.commands.new:run",
    ),
    Command(
        "check",
        "Check a recipe's YAML and options without running its script: every mistake at once, with its line. Builds "
        "nothing, but imports the modules that the YAML names. With --show-config: print the resolved YAML with the "
        "place that each value came from. What the script trusts beside the defaults must be given by --trust.",
        "amp-recipes check recipes/image_classification/train.py configs/image_classification.yaml --precision bf16",
        _check_arguments,
        "amp_recipes.commands.subcommands:check",
        passes_options=True,
    ),
    Command(
        "export",
        "Write the weights of a run's best checkpoint as safetensors, with its resolved settings.",
        "amp-recipes export results/image_classification/bf16/seed_1234",
        _export_arguments,
        "amp_recipes.commands.subcommands:export",
    ),
    Command(
        "verify-resume",
        "Prove that a recipe which is killed and started again does the same as without, bit for bit; or name the "
        "first thing that differs, and why. Runs the recipe four times for a few updates. Exit status: 0 equal, 1 "
        "different, 2 a run failed.",
        "amp-recipes verify-resume recipes/image_classification/train.py configs/image_classification.yaml "
        "--precision bf16",
        _verify_arguments,
        "amp_recipes.commands.subcommands:verify",
        passes_options=True,
    ),
    Command(
        "diagnose",
        "Say what bf16 or fp16 does to a recipe's model: is it safe, which modules need fp32, what it costs. Looks at "
        "a few batches in place of training; prints a verdict, and writes diagnosis.json into the output folder. The "
        "same as SCRIPT YAML --diagnose.",
        "amp-recipes diagnose recipes/image_classification/train.py configs/image_classification.yaml --precision fp16",
        _diagnose_arguments,
        "amp_recipes.commands.subcommands:diagnose",
        passes_options=True,
    ),
    Command(
        "replay",
        "Take a step that went nonfinite again, from the folder that the run wrote about it. Starts the run's script, "
        "which the folder names: replay only what you would run.",
        "amp-recipes replay results/image_classification/fp16/seed_1234/nonfinite-17",
        _replay_arguments,
        "amp_recipes.commands.subcommands:replay",
    ),
    Command(
        "ops",
        "Print what autocast does to each op on this machine: the documented lists beside what a live probe finds, and "
        "the differences.",
        "amp-recipes ops --device cpu --dtype bf16",
        _ops_arguments,
        "amp_recipes.commands.subcommands:ops",
    ),
    Command(
        "compare",
        "Train a recipe at several precisions and seeds, and say whether a precision is worse than the first one "
        "beyond what seeds do. Exit status: 0 none is worse, 1 one is, 2 there is no verdict.",
        "amp-recipes compare recipes/image_classification/train.py configs/image_classification.yaml "
        "--precisions fp32,bf16 --seeds 3",
        compare.add_arguments,
        "amp_recipes.commands.compare.command:run",
        passes_options=True,
    ),
    Command(
        "diff",
        "Show what differs between two runs: settings, versions, git state, results. Exit status: 0 nothing but times "
        "and memory, 1 something, 2 a folder is no run or cannot be read.",
        "amp-recipes diff results/image_classification/fp32/seed_1 results/image_classification/bf16/seed_1",
        _diff_arguments,
        "amp_recipes.commands.subcommands:diff",
    ),
    Command(
        "completion",
        "Print a script that completes options and keys of the YAML in bash or zsh. Its first lines say where to put "
        "it.",
        "amp-recipes completion bash",
        _completion_arguments,
        "amp_recipes.commands.cli:completion",
    ),
)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="amp-recipes",
        description="Tools around recipes and what their runs leave behind.",
        epilog="amp-recipes COMMAND --help tells what a command takes.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"amp-recipes {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="command")
    for command in COMMANDS:
        passes = " Options of the recipe may follow; after a lone -- all of them are." if command.passes_options else ""
        sub = commands.add_parser(
            command.name,
            help=command.summary.partition(".")[0].partition(";")[0],
            description=command.summary,
            epilog=f"Example: {command.example}.{passes}",
            allow_abbrev=False,
        )
        command.add_arguments(sub)
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
        module, _, function = arguments.chosen.run.partition(":")
        return getattr(importlib.import_module(module), function)(arguments)
    except AmpRecipesError as error:
        print(printable(f"amp-recipes: {error}"), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
