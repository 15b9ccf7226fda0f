"""Makes the pages of docs/reference/ that the code determines: python tests/docs/generated_pages.py writes them.

Options come from the declarations in the package, commands from the parser's table, the API from the public names.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amp_recipes.commands.cli import COMMANDS, Argument, Command
from amp_recipes.config.options.help import _REQUESTS
from amp_recipes.config.options.requests import FLAGS
from amp_recipes.config.options.run_options import options_table

REPOSITORY = Path(__file__).resolve().parents[2]

MADE = "<!-- Made by tests/docs/generated_pages.py: change the text there, or the words in the code, and run it. -->\n"

OPTIONS_HEAD = """\
# Run options

Run options tell the framework how to run a recipe: the precision, the checkpoints, the device. You can set each of them

- on the command line: `--precision bf16` or `--precision=bf16`
- in the script: `MyBrain(..., run_opts={"precision": "bf16"})`
- in the YAML: `precision: bf16`

The command line and the script win over the YAML.

Values are YAML: `1e-4` is a number, `[1, 2]` is a list, `null` is nothing, `true` is a switch that is on. A key that is
neither a run option nor a key of your YAML is an error. The error names the nearest key.

```bash
amp-recipes new my_task
cd my_task
python train.py my_task.yaml --seed 7 --debug    # two run options
python train.py my_task.yaml --help              # the usual options, and every key of this YAML
python train.py my_task.yaml --help all          # every option
```

Two keys of the YAML are not run options, but the framework reads them:

| key | meaning |
| --- | --- |
| `lr_scheduler` | Makes the learning rate scheduler. See [Brain](brain.md#hparams-that-the-brain-reads). |
| `tensor_parallel_plan` | Which layers several processes share. See [Launch several processes](../how_to/launch.md). |

"""

COMMANDS_HEAD = """\
# Commands

There are two kinds of commands: `amp-recipes COMMAND ...`, and the recipe's own script, `python train.py config.yaml`.
SCRIPT and YAML in the tables below are those two files. `amp-recipes COMMAND --help` prints the same as this page.
`python -m amp_recipes` does the same as `amp-recipes`.

An error of the framework is one message, and exit status 1. A command line with a mistake ends with status 2.

## The recipe's script

`python SCRIPT YAML [options]` trains the recipe. Every [run option](options.md) and every key of the YAML is an option.
A dot stands for each level: `--model.hidden 64`. These options are not in the YAML:

"""
CODE = re.compile(
    r"amp-recipes [a-z-]+(?: [A-Z]+| --[a-z][\w-]*)*"  # commands
    r"|--[a-z][\w-]*(?: '[^']*')*|'[^' ]*=[^']*'"  # options with their values
    r"|CKPT\+|nonfinite-N|[\w/]*<[^>]*>|\b\w+(?:_\w+)+\b|\b\w+\.json\b"  # names
)
RUN_HERE = ("new", "ops", "completion")  # commands whose examples need nothing
OF_THE_RECIPE = "Options of the recipe may follow. After a lone `--`, all words are options of the recipe."

API_PAGES = {
    "amp_recipes": None,
    "amp_recipes.checkpoint": ("Checkpoint", "best_checkpoint", "load_weights", "model_weights"),
    "amp_recipes.config": ("Hparams", "check", "seed_everything"),
    "amp_recipes.data": ("DynamicBatches", "LengthBuckets", "EpochShuffle"),
    "amp_recipes.distributed": ("is_main_process", "main_process_first", "is_sharded", "rank", "world_size"),
    "amp_recipes.precision": ("pin_fp32", "pinned_modules", "has_default_precision", "set_float32_precision"),
    "amp_recipes.loggers": ("JsonlLogger", "ProgressLogger", "EpochLogger", "SummaryLogger"),
    "amp_recipes.records": ("Logger", "StepRecord", "StageRecord", "RunSummary"),
    "amp_recipes.errors": (
        "AmpRecipesError",
        "ConfigError",
        "PrecisionError",
        "NonfiniteError",
        "DataError",
        "RecipeError",
        "CheckpointError",
        "FolderInUseError",
        "ProcessError",
    ),
}


def pages() -> Iterator[tuple[Path, str]]:
    """Each generated page, and what it must hold."""
    folder = REPOSITORY / "docs" / "reference"
    yield folder / "options.md", made(OPTIONS_HEAD + re.sub(r"^\*\*(.+)\*\*$", r"## \1", options_table(), flags=re.M))
    yield folder / "commands.md", made(commands_page())
    for package, names in API_PAGES.items():
        yield folder / "api" / f"{package.rpartition('.')[2]}.md", made(api_page(package, names))


def made(text: str) -> str:
    """The page with the mark below its title: some readers of Markdown expect the title first."""
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{MADE}{rest}"


def commands_page() -> str:
    requests = {name: Argument(f"--{name}", text, action="store_true") for name, text in FLAGS.items()}
    requests |= {name: Argument(f"--{name}", **told) for name, told in _REQUESTS.items()}
    return COMMANDS_HEAD + arguments_table(requests.values()) + "".join(map(section, COMMANDS))


def section(command: Command) -> str:
    positional = [shown(argument) for argument in command.arguments if not argument.name.startswith("-")]
    options = ["[options]"] if len(positional) < len(command.arguments) or command.passes_options else []
    usage = " ".join(["amp-recipes", command.name, *positional, *options])
    mark = "" if command.name in RUN_HERE else "<!-- not run: it trains, or takes a run of yours -->\n"
    example = f"{mark}```bash\n{command.example}\n```\n"
    passes = f"{OF_THE_RECIPE}\n\n" if command.passes_options else ""
    table = arguments_table(command.arguments)
    return f"\n## {command.name}\n\n`{usage}`\n\n{plain(command.summary)}\n\n{table}\n{passes}{example}"


def arguments_table(arguments: Any) -> str:
    rows = [f"| `{shown(argument)}` | {plain(argument.options['help'])} |\n" for argument in arguments]
    return "| argument | meaning |\n| --- | --- |\n" + "".join(rows)


def shown(argument: Argument) -> str:
    """An argument as one types it."""
    options = argument.options
    value = options.get("metavar") or ("{" + ",".join(options["choices"]) + "}" if "choices" in options else "")
    if options.get("nargs") == 2:
        value = f"{value} {value}"
    if argument.name.startswith("-"):
        return f"{argument.name} {value}".rstrip()
    return f"[{value}]" if options.get("nargs") == "?" else value


def plain(text: str) -> str:
    """A text of the terminal in a Markdown table: options, wildcards and paths are code."""
    parts = text.replace("%%", "%").replace("|", "\\|").split("`")
    parts[::2] = [CODE.sub(r"`\g<0>`", part) for part in parts[::2]]  # the others stand between backticks already
    return "`".join(parts)


def api_page(package: str, names: tuple[str, ...] | None) -> str:
    module = importlib.import_module(package)
    names = names or tuple(module.__all__)
    rows, entries = [], []
    for name in names:
        documented = inspect.getdoc(getattr(module, name))
        assert documented, f"{package}.{name} has no docstring"
        first = documented.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| [`{name}`](#{package}.{name}) | {first} |\n")
        entries.append(f"\n::: {package}.{name}\n")
    table = "| name | what it is |\n| --- | --- |\n" + "".join(rows)
    return f"# {package}\n\n{table}{''.join(entries)}"


def main() -> None:
    for path, text in pages():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(REPOSITORY))


if __name__ == "__main__":
    main()
