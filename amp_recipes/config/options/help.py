"""Prints `--help`, made from the declarations of the run options and from the YAML."""

from __future__ import annotations

import argparse

from amp_recipes.config.options.requests import FLAGS
from amp_recipes.config.options.run_options import (
    OPTION_TYPES,
    OPTIONS,
    RunOptions,
    display,
    option_choices,
    options_by_group,
)
from amp_recipes.config.options.yaml_help import keys_help
from amp_recipes.config.yaml.including import expand_includes
from amp_recipes.config.yaml.limits import Budget
from amp_recipes.config.yaml.nodes import Mistakes
from amp_recipes.config.yaml.reading import read_file

_METAVARS = {bool: "BOOL", list[str]: "LIST", str | None: "TEXT", float: "X", float | None: "X"}
# Options besides the flags, each with its arguments for argparse.
_REQUESTS = {
    "trust": {
        "metavar": "NAME",
        "help": "let the YAML use this package, module or function, or include files from this folder. Without it the "
        "YAML may use the recipe and harmless names of amp_recipes, torch and Python. Several names: separate them by "
        "commas, or repeat the option",
    },
    "sweep": {
        "metavar": "KEY=A,B",
        "nargs": "+",
        "help": "train with every combination of these values, each in its own folder, and print a table: "
        "--sweep 'lr=1e-3,1e-4' 'model.hidden=64,128'",
    },
    "sweep-trials": {
        "metavar": "N",
        "help": "let Optuna choose N combinations; keys may then have ranges: 'lr=1e-5..1e-2:log', 'hidden=32..256'",
    },
    "diagnose-minutes": {"metavar": "X", "help": "approximate time limit of a diagnosis (default: 5)"},
    "diagnose-windows": {"metavar": "N", "help": "windows of batches that a diagnosis looks at (default: 8)"},
    "diagnose-tolerance": {
        "metavar": "X",
        "help": "largest relative error of the gradient that a diagnosis accepts (default: a fifth of the difference "
        "between batches, and at least ten times the precision's eps)",
    },
    "replay": {
        "metavar": "FOLDER",
        "help": "repeat the step that became nonfinite, from its folder nonfinite-N, and exit",
    },
    "allow-config-change": {"action": "store_true", "help": "the same as --accept_changes"},
}


def print_help(hparams_file: str | None, with_rare: bool) -> None:
    """Print the options by group, and the keys of the YAML with their values and comments.

    with_rare: also the options that few people use.
    """
    _parser(with_rare).print_help()
    root = read_file(hparams_file, Mistakes(), Budget()) if hparams_file is not None else None
    if root is not None:
        expand_includes(root, (), Mistakes(), Budget())
        print(f"\nKeys of {hparams_file}; each can be set as an option:\n\n{keys_help(root)}")


def _parser(with_rare: bool) -> argparse.ArgumentParser:
    groups = options_by_group(with_rare)
    left_out = len(OPTIONS) - sum(map(len, groups.values()))
    parser = argparse.ArgumentParser(
        usage="%(prog)s CONFIG.yaml [--option value ...] [--yaml.key value ...]",
        description="Any key of the YAML can be set: --key=value or --key value, with a dot for each level.",
        epilog=f"--help all shows {left_out} more options that few recipes need." if left_out else None,
        allow_abbrev=False,
    )
    parser.add_argument("hparams_file", metavar="CONFIG.yaml", help="hyperparameters (YAML with HyperPyYAML's tags)")
    requests = parser.add_argument_group("Configuration (command line only)")
    for flag, text in FLAGS.items():
        requests.add_argument(f"--{flag}", action="store_true", help=text)
    for name, settings in _REQUESTS.items():
        requests.add_argument(f"--{name}", **settings)  # type: ignore[arg-type]
    defaults = RunOptions()
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for option in options:
            default = display(defaults[option.name])
            text = option.metadata["help"].replace("`", "").replace("%", "%%")
            group.add_argument(
                f"--{option.name}",
                metavar=_metavar(option.name),
                nargs="?" if OPTION_TYPES[option.name] is bool else None,
                help=f"{text} (default: {default})" if default else text,
            )
    return parser


def _metavar(name: str) -> str:
    if choices := option_choices(name):
        return "{" + ",".join(choices) + "}"
    return _METAVARS.get(OPTION_TYPES[name], "N")
