"""How a command line becomes a YAML file, run options, overrides of YAML keys, and what is asked for beside a run.

Values are YAML 1.2 scalars and flow collections, as they would be in the file. What YAML would refuse, or
read as something other than what was typed (tags, anchors, comments, block collections, dates), is the typed
text.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from traceback import format_exception
from typing import Any, Literal

from ruamel.yaml import YAML
from ruamel.yaml.events import AliasEvent, NodeEvent
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from amp_recipes.config.options.other_names import instead_of
from amp_recipes.config.options.run_options import (
    OPTION_NAMES,
    OPTION_TYPES,
    Purpose,
    RunOptions,
    display,
    near_misses,
    option_choices,
    options_by_group,
    validate_options,
)
from amp_recipes.config.options.yaml_help import keys_help
from amp_recipes.config.yaml.including import expand_includes
from amp_recipes.config.yaml.limits import TEXT_CHARACTERS, Budget
from amp_recipes.config.yaml.mistakes import did_you_mean, join_mistakes, printable, reader_may_leave
from amp_recipes.config.yaml.nodes import COMMAND_LINE, Mistakes
from amp_recipes.config.yaml.reading import read_file
from amp_recipes.distributed import show_ranks_in_errors
from amp_recipes.errors import CheckpointError, ConfigError, DataError
from amp_recipes.files.user_code import lies_with_the_user

# Words of the command line that are no run options: a YAML cannot say them. Those with a dash are also known with `_`.
FLAGS = {
    "check": "Check YAML and command line, build nothing, and end.",
    "show-config": "Print the resolved YAML with the place that each value came from, and end.",
    "diagnose": "Say what the precision does to the model, in place of training it, and end.",
}
_ALIASES = {"allow-config-change": "accept_changes", "allow_config_change": "accept_changes"}

_TRUSTED = "AMP_RECIPES_TRUSTED"  # the variable that holds what the command line trusts

# The words that OmegaConf reads as a bool: only these are taken as the value of a boolean option.
_BOOL_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "1", "0"})
# What one value may hold; more is text, as is all that YAML would refuse.
_ITEMS, _COLLECTIONS, _OPENING = 10_000, 500, ("[", "{", "? ", "- ")
# A date is left out: nobody who types 2024-01-02 for a folder's name wants a date object.
_PLAIN_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))


@dataclass(frozen=True)
class Request:
    """What a command line asks `load_hparams` for, beside options and overrides.

    action: a run, or what is to be done instead of one; trust: what the YAML may name beside the defaults; axes,
    trials: of a sweep, as they were typed; words: what each run of the sweep is given too.
    """

    action: Literal["run", "check", "show_config", "sweep"] = "run"
    trust: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    trials: int | None = None
    words: tuple[str, ...] = ()


class Overrides(dict[str, Any]):
    """New values for YAML keys, nested as the YAML is, with the run options and the request beside them.

    `run_options` are not among the keys: `load_hparams` writes those that were set over YAML keys of the same
    name, so that a `!ref` to one follows it.
    """

    def __init__(
        self, *args: Any, run_options: RunOptions | None = None, request: Request | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.run_options = RunOptions() if run_options is None else run_options
        self.request = Request() if request is None else request

    def with_values(self, values: Mapping[str, Any]) -> Overrides:
        """These overrides and further values by dotted names, run options among them. Raises ConfigError."""
        mistakes: list[str] = []
        overrides = Overrides(copy.deepcopy(dict(self)), request=self.request)
        options = {name: self.run_options[name] for name in self.run_options.explicit}
        for name, value in values.items():
            if name in OPTION_NAMES:
                options[name] = _option_value(name, value) if isinstance(value, str) else value
            else:
                _nest(overrides, name, value, mistakes)
        if mistakes:
            raise ConfigError(join_mistakes(mistakes, "the command line"))
        overrides.run_options = RunOptions.from_mapping(options, COMMAND_LINE, self.run_options.purpose)
        return overrides


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[str, RunOptions, Overrides]:
    """The YAML file, the run options and the overrides that `argv` (default: `sys.argv[1:]`) names.

    `--key=value` and `--key value` are the same, a dot goes one level down (`--model.hidden=128`), and an
    option is never guessed from a prefix. A boolean run option needs no value (`--debug`). A key that is
    given twice has its last value. A value that itself begins with `--` must be given as `--key=--value`.
    A name that is not a run option goes to the overrides; `load_hparams` checks it against the YAML, and does what
    `--check`, `--show-config`, `--sweep` and `--trust` ask for.
    Prints the options, and the keys of the YAML if one is named, and exits with status 0 on `--help`; every other
    mistake is in one ConfigError. Of a script's own command line (`argv` is None) a ConfigError that nobody catches
    is shown without a traceback.
    """
    if loading:
        raise ConfigError(
            "parse_arguments is called by what a YAML names, whose words, --trust among them, would then be its own. "
            "Call it from the script, below `if __name__ == '__main__':` if a YAML names something of that script."
        )
    if argv is None:
        _show_mistakes_plainly()
        show_ranks_in_errors()
    argv = list(sys.argv[1:] if argv is None else argv)
    positional: list[str] = []
    options: dict[str, Any] = {}
    overrides = Overrides()
    asked = _Asked()
    mistakes: list[str] = []
    wants_help = False
    for name, text in _split(argv, positional, mistakes):
        head, *below = name.split(".")
        if name == "help" and text is None:
            wants_help = True
            continue
        if asked.takes(name, text, mistakes):
            continue
        asked.words += [f"--{name}" if text is None else f"--{name}={text}"]
        if text is None:
            mistakes.append(_without_value(name))
        elif head in OPTION_NAMES and below:
            mistakes.append(f"--{name}: {head} is a run option and has no keys below it.")
        elif head in OPTION_NAMES:
            options[name] = _option_value(name, text)
        else:
            _nest(overrides, name, parse_value(text), mistakes)
    if wants_help:
        with reader_may_leave():
            _print_help(positional)
        raise SystemExit(0)
    if not positional:
        script = Path(sys.argv[0]).name or "train.py"
        mistakes.insert(0, f"the YAML file is missing; expected: {script} CONFIG.yaml [--option value ...].")
    for extra in positional[1:]:
        hint = did_you_mean(extra, OPTION_NAMES, prefix="--")
        mistakes.append(f"{extra!r} is neither an option nor a value; an option opens with --.{hint}")
    mistakes += [*asked.mistakes(), *validate_options(options)[1].values()]
    if mistakes:
        lines = [f"{COMMAND_LINE}: {text}" for text in mistakes]
        raise ConfigError(join_mistakes(lines, "the command line"))
    overrides.run_options = RunOptions.from_mapping(options, COMMAND_LINE, asked.purpose())
    overrides.request = asked.request()
    return positional[0], overrides.run_options, overrides


class _Loading:
    """Whether a YAML is being checked or built somewhere in this process: true inside its `with`."""

    def __init__(self) -> None:
        self._count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1

    def __bool__(self) -> bool:
        return self._count > 0


loading = _Loading()


class _Asked:
    """What of a command line is neither a run option nor an override, as it is read word by word."""

    def __init__(self) -> None:
        self.flags: list[str] = []
        self.trust: list[str] = []
        self.axes: list[str] = []
        self.trials: str | None = None
        self.replay: str | None = None
        self.words: list[str] = []

    def takes(self, name: str, text: str | None, mistakes: list[str]) -> bool:
        """Whether it is one of its words."""
        name = name.replace("_", "-")
        if name in FLAGS:
            if text is not None:
                mistakes.append(f"--{name} takes no value, but is given {text!r}.")
            self.flags.append(name)
        elif name == "trust" and text is not None:
            self.trust += _names_in(text)
        elif name == "sweep" and text is not None:
            self.axes.append(text)
        elif name == "sweep-trials" and text is not None:
            self.trials = text
        elif name == "replay" and text is not None:
            self.replay = text
        else:
            return False
        return True

    def mistakes(self) -> Iterator[str]:
        # A YAML has no way to the words that started this process, nor to its variables.
        granted = [*trust_in(sys.orig_argv), *_names_in(os.environ.get(_TRUSTED, ""))]
        if foreign := [name for name in self.trust if name not in granted]:
            yield (
                f"--trust {','.join(foreign)} is not on the command line that started this process, and only that can "
                "grant trust: other words may be a YAML's. Give it there, or in the script, to load_hparams(trust=...)."
            )
        if self.trials is not None and not (self.trials.isdecimal() and int(self.trials) > 0):
            yield f"--sweep-trials is {self.trials!r}, but must be a whole number, 1 or more."
        if self.trials is not None and not self.axes:
            yield "--sweep-trials needs --sweep with the keys to try: --sweep 'lr=1e-5..1e-2:log'."
        actions = [f"--{flag}" for flag in dict.fromkeys(self.flags)]
        actions += ["--sweep"] * bool(self.axes) + ["--replay"] * (self.replay is not None)
        if len(actions) > 1:
            yield f"{' and '.join(actions)} cannot be done at once; give one of them."

    def request(self) -> Request:
        words = [*self.words, *(f"--trust={name}" for name in self.trust)]
        trials = int(self.trials) if self.trials is not None else None
        trust, axes = tuple(self.trust), tuple(self.axes)
        if self.axes:
            return Request("sweep", trust, axes, trials, tuple(words))
        instead = [flag.replace("-", "_") for flag in self.flags if flag != "diagnose"]
        return Request(instead[0] if instead else "run", trust)  # type: ignore[arg-type]

    def purpose(self) -> Purpose:
        if self.replay is not None:
            return Purpose("replay", self.replay)
        return Purpose("diagnose") if "diagnose" in self.flags else Purpose()


def _names_in(text: str) -> list[str]:
    return [part.strip() for part in text.strip("[]").split(",") if part.strip()]


def trust_in(words: Sequence[str]) -> list[str]:
    """The names that `--trust` gives among the words of a command line."""
    texts = [word.removeprefix("--trust=") for word in words if word.startswith("--trust=")]
    texts += [text for word, text in pairwise(words) if word == "--trust"]
    return [name for text in texts for name in _names_in(text)]


# For the processes that a script starts by multiprocessing, whose own words are those of Python.
os.environ.setdefault(_TRUSTED, ",".join(trust_in(sys.orig_argv)))


def parse_value(text: str) -> Any:
    """The plain value that `text` is in YAML 1.2; `text` itself where YAML would change or refuse it."""
    if not text.strip() or any(char in text for char in "\n\r\x85\u2028\u2029"):
        return text
    if len(text) > TEXT_CHARACTERS or text.count(",") > _ITEMS or sum(map(text.count, _OPENING)) > _COLLECTIONS:
        return text  # the YAML reader's time grows with their square
    try:
        return _plain_value(text)
    except Exception:  # whatever makes the YAML reader stumble, the typed text is the value
        return text


def _plain_value(text: str) -> Any:
    """As `parse_value`, with any exception where the text is not plain YAML that says what was typed."""
    yaml = YAML(typ="safe", pure=True)
    for event in yaml.parse(text):
        named = isinstance(event, NodeEvent) and event.anchor is not None
        if named or isinstance(event, AliasEvent) or getattr(event, "tag", None) is not None:
            raise ValueError("anchors, aliases and tags are not plain values")
    yaml = YAML(typ="safe", pure=True)
    root = yaml.compose(text)
    # A comment, or a second document, lies outside the root node.
    if text[: root.start_mark.index].strip() or text[root.end_mark.index :].strip():
        raise ValueError("more than one value")
    if isinstance(root, ScalarNode) and root.style is None:
        value = _construct(yaml, root)
        return text if isinstance(value, str) else value
    return _construct(yaml, root)


def _construct(yaml: YAML, node: Any) -> Any:
    if isinstance(node, ScalarNode):
        if node.style in ("|", ">") or node.tag == "tag:yaml.org,2002:merge":
            raise ValueError("block scalars and merges are not plain values")
        return yaml.constructor.construct_object(node) if node.tag in _PLAIN_TAGS else node.value
    if not node.flow_style:
        raise ValueError("a block collection, as in `a: b`, is more often meant as text")
    if isinstance(node, SequenceNode):
        return [_construct(yaml, item) for item in node.value]
    assert isinstance(node, MappingNode)
    mapping: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if value_node.start_mark.index == value_node.end_mark.index:
            raise ValueError("`{name}` is more often a template than a mapping to nothing")
        key = _construct(yaml, key_node)
        if key in mapping:
            raise ValueError("the same key twice")
        mapping[key] = _construct(yaml, value_node)
    return mapping


def _split(argv: list[str], positional: list[str], mistakes: list[str]) -> Iterator[tuple[str, str | None]]:
    """Each option's name and text, None where it has none; other words go to `positional`."""
    words = iter(argv)
    waiting = next(words, None)
    while waiting is not None:
        word, waiting = waiting, next(words, None)
        if word in ("-h", "--help"):
            yield "help", None
            continue
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        name, equals, text = word[2:].partition("=")
        name = _ALIASES.get(name, name)
        if not word.startswith("--"):
            mistakes.append(f"{word!r}: an option opens with two dashes.")
        elif not all(name.split(".")):
            mistakes.append(f"{word!r} has an empty name; expected --key=value or --key.subkey=value.")
        elif equals:
            yield name, text
        elif name.replace("_", "-") in FLAGS:
            yield name, None
        elif name == "sweep":
            axes = []
            while waiting is not None and not waiting.startswith("--") and "=" in waiting:
                axes.append(waiting)
                waiting = next(words, None)
            for axis in axes or [None]:
                yield name, axis
        elif OPTION_TYPES.get(name) is bool:
            if waiting is not None and waiting.lower() in _BOOL_WORDS:
                text, waiting = waiting, next(words, None)
            yield name, text or "true"
        elif waiting is None or waiting.startswith("--"):
            yield name, None
        else:
            yield name, waiting
            waiting = next(words, None)


def _without_value(name: str) -> str:
    """What is wrong with an option that has no value: it needs one, or it is a misspelt one that needs none."""
    if advice := instead_of(name):
        return f"there is no run option {name!r}.{advice}"
    hint = did_you_mean(name, FLAGS, prefix="--")
    if not hint and not near_misses([name]):
        return f"--{name} needs a value: --{name}=..."
    hint = hint or did_you_mean(name, OPTION_NAMES, prefix="--")
    return f"there is no run option {name!r}.{hint} A key of the YAML needs a value: --{name}=..."


def _option_value(name: str, text: str) -> Any:
    """The value of a run option: text stays text for an option that is one (a folder named 007)."""
    value = parse_value(text)
    hint = OPTION_TYPES[name]
    if hint == list[str]:
        return _string_list(value, text)
    holds_text = hint == (str | None) or option_choices(name)
    return text if holds_text and value is not None and not isinstance(value, str) else value


def _string_list(value: Any, text: str) -> Any:
    """A list of strings; `[*.norm, model.head]` too, which YAML would take for an alias."""
    if isinstance(value, str) and text.startswith("[") and text.endswith("]"):
        return [item.strip().strip("'\"") for item in text[1:-1].split(",") if item.strip()]
    return value if isinstance(value, list) else [text]


def _nest(overrides: dict[str, Any], name: str, value: Any, mistakes: list[str]) -> None:
    """Put `value` where the dotted `name` says."""
    *parents, last = name.split(".")
    branch = overrides
    for depth, part in enumerate(parents, start=1):
        below = branch.setdefault(part, {})
        if not isinstance(below, dict):
            parent = ".".join(parents[:depth])
            mistakes.append(f"--{name}: --{parent} is given too, with a value that has no keys.")
            return
        branch = below
    if not isinstance(branch.get(last), dict) or not branch[last]:
        branch[last] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            _nest(branch[last], str(key), item, mistakes)
    else:
        mistakes.append(f"--{name} gives a value, but another option gives keys below it.")


def _print_help(positional: Sequence[str]) -> None:
    """Print the options by group, and the keys of the YAML with their values and comments."""
    help_parser().print_help()
    root = read_file(positional[0], Mistakes(), Budget()) if positional else None
    if root is not None:
        expand_includes(root, (), Mistakes(), Budget())
        print(f"\nKeys of {positional[0]}, each an option too:\n\n{keys_help(root)}")


def _show_mistakes_plainly() -> None:
    """Let a user's mistake that ends the script be its message alone: the way through the loader would only hide it.

    One that came from an exception in the recipe's own code keeps its traceback; of a library's, the message is enough.
    """
    before = sys.excepthook
    if getattr(before, "shows_mistakes_plainly", False):
        return

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        if isinstance(error, (ConfigError, DataError, CheckpointError)) and not _is_of_own_code(error.__cause__):
            print(printable(f"{Path(sys.argv[0]).name}: {error}"), file=sys.stderr)
        else:
            before(kind, error, traceback)

    hook.shows_mistakes_plainly = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _is_of_own_code(cause: BaseException | None) -> bool:
    """Whether an exception came out of the recipe's own files; of another process, its traceback is text."""
    if cause is None:
        return False
    files = re.findall(r'^ *File "(.+)", line \d+', "".join(format_exception(cause)), re.MULTILINE)
    return any(map(lies_with_the_user, files))


def help_parser() -> argparse.ArgumentParser:
    """The parser that prints `--help`, made from the fields of `RunOptions`."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s CONFIG.yaml [--option value ...] [--yaml.key value ...]",
        description="Overrides any key of the YAML: --key=value or --key value, a dot for each level.",
        allow_abbrev=False,
    )
    parser.add_argument("hparams_file", metavar="CONFIG.yaml", help="hyperparameters, in HyperPyYAML")
    instead = parser.add_argument_group("Configuration (not in the YAML)")
    for flag, text in FLAGS.items():
        instead.add_argument(f"--{flag}", action="store_true", help=text)
    instead.add_argument(
        "--trust",
        metavar="NAME",
        help="what the YAML may name beside the recipe, amp_recipes and torch: a package, a module, a function; or a "
        "folder that it may include from. Several: with commas, or given again",
    )
    instead.add_argument(
        "--sweep",
        metavar="KEY=A,B",
        nargs="+",
        help="run every combination, one folder each, and print a table: --sweep 'lr=1e-3,1e-4' 'model.hidden=64,128'",
    )
    instead.add_argument(
        "--sweep-trials",
        metavar="N",
        help="let Optuna choose N combinations; keys may then have ranges: 'lr=1e-5..1e-2:log', 'hidden=32..256'",
    )
    instead.add_argument(
        "--replay", metavar="FOLDER", help="show again how a step went nonfinite (a folder nonfinite-N), and end"
    )
    instead.add_argument("--allow-config-change", action="store_true", help="the same as --accept_changes")
    defaults = RunOptions()
    for title, options in options_by_group().items():
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
    hint = OPTION_TYPES[name]
    words = {bool: "BOOL", list[str]: "LIST", str | None: "TEXT", float: "X", float | None: "X"}
    return words.get(hint, "N")
