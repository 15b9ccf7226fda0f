"""Reads a command line: a YAML file, run options, overrides of YAML keys, and requests such as --check."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from amp_recipes.config.options.help import print_help
from amp_recipes.config.options.other_names import instead_of
from amp_recipes.config.options.plain_errors import end_errors_with, show_mistakes_plainly
from amp_recipes.config.options.requests import FLAGS, VALUED, Request, RequestWords
from amp_recipes.config.options.run_options import OPTION_NAMES, OPTION_TYPES, RunOptions, near_misses, validate_options
from amp_recipes.config.options.typed_values import option_value, parse_value
from amp_recipes.config.yaml.including import expand_includes
from amp_recipes.config.yaml.limits import Budget
from amp_recipes.config.yaml.mistakes import did_you_mean, join_mistakes, reader_may_leave
from amp_recipes.config.yaml.nodes import COMMAND_LINE, Mistakes
from amp_recipes.config.yaml.overriding import apply_overrides
from amp_recipes.config.yaml.reading import read_file
from amp_recipes.distributed import show_ranks_in_errors
from amp_recipes.errors import ConfigError
from amp_recipes.files.granted_trust import trust_in

__all__ = ["Overrides", "Request", "loading", "parse_arguments", "parse_value", "trust_in"]

_ALIASES = {"allow-config-change": "accept_changes", "allow_config_change": "accept_changes"}
# The words that OmegaConf reads as a bool: only these are taken as the value of a boolean option.
_BOOL_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "1", "0"})


AnyOverrides: TypeAlias = "Mapping[str, Any] | str | None"
"""Overrides as `load_hparams` takes them: `Overrides`, another mapping, YAML text."""


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
        options = explicit_options(self)
        for name, value in values.items():
            if name in OPTION_NAMES:
                options[name] = option_value(name, value) if isinstance(value, str) else value
            else:
                _nest(overrides, name, value, mistakes)
        if mistakes:
            raise ConfigError(join_mistakes(mistakes, "the command line"))
        overrides.run_options = RunOptions.from_mapping(options, COMMAND_LINE, self.run_options.purpose)
        return overrides


def explicit_options(overrides: AnyOverrides) -> dict[str, Any]:
    """The run options that were set beside overrides of the command line."""
    options = overrides.run_options if isinstance(overrides, Overrides) else RunOptions()
    return {name: value for name, value in options.items() if name in options.explicit}


def parse_arguments(argv: Sequence[str] | None = None) -> tuple[str, RunOptions, Overrides]:
    """The YAML file, the run options and the overrides that `argv` (default: `sys.argv[1:]`) names.

    `--key=value` and `--key value` are the same, a dot goes one level down (`--model.hidden=128`), and an
    option is never guessed from a prefix. A boolean run option needs no value (`--debug`). A key that is
    given twice has its last value. A value that itself begins with `--` must be given as `--key=--value`.
    A name that is not a run option goes to the overrides; `load_hparams` checks it against the YAML, and does what
    `--check`, `--show-config`, `--sweep` and `--trust` ask for.
    Prints the options (those that few need on `--help all` only), and the keys of the YAML if one is named, and exits
    with status 0 on `--help`; every other mistake is in one ConfigError. Of a script's own command line (`argv` is
    None) a ConfigError that nobody catches is shown without a traceback.
    """
    if _loads:
        raise ConfigError(
            "parse_arguments was called by code that a YAML names, and the YAML could then choose the command line, "
            "--trust included. Call it in the script itself, below `if __name__ == '__main__':` if a YAML names "
            "something in that script."
        )
    if argv is None:
        show_mistakes_plainly()
        show_ranks_in_errors()
    line = _CommandLine(sys.argv[1:] if argv is None else argv)
    if argv is None and line.requests.purpose().action == "diagnose":
        end_errors_with(2)  # no verdict; 1 says that a precision is not safe
    if line.help_topic is not None:
        with reader_may_leave():
            print_help(line.files[0] if line.files else None, with_rare=line.help_topic == "all")
        raise SystemExit(0)
    if mistakes := [f"{COMMAND_LINE}: {text}" for text in line.all_mistakes()]:
        raise ConfigError(join_mistakes([*mistakes, *line.mistakes_in_keys()], "the command line"))
    line.overrides.run_options = RunOptions.from_mapping(line.options, COMMAND_LINE, line.requests.purpose())
    line.overrides.request = line.requests.request(line.words)
    return line.files[0], line.overrides.run_options, line.overrides


class _CommandLine:
    """The parts of a command line.

    files: words that are no options; words: the options that are not requests, as they can be given again;
    help_topic: None without `--help`, else "" or the word after it.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        self.files: list[str] = []
        self.options: dict[str, Any] = {}
        self.overrides = Overrides()
        self.requests = RequestWords()
        self.words: list[str] = []
        self.help_topic: str | None = None
        self._mistakes: list[str] = []
        for name, text in self._named_texts(deque(argv)):
            if name == "help" and text in (None, "all"):
                self.help_topic = text or ""
            elif not self.requests.takes(name, text):
                self._take(name, text)

    def all_mistakes(self) -> Iterator[str]:
        """Yield the mistakes in the words, roughly in their order."""
        if not self.files:
            script = Path(sys.argv[0]).name or "train.py"
            yield f"the YAML file is missing; expected: {script} CONFIG.yaml [--option value ...]."
        yield from self._mistakes
        for extra in self.files[1:]:
            hint = did_you_mean(extra, OPTION_NAMES, prefix="--")
            yield f"{extra!r} is neither an option nor a value; an option starts with --.{hint}"
        yield from self.requests.all_mistakes()
        yield from validate_options(self.options)[1].values()

    def mistakes_in_keys(self) -> list[str]:
        """The mistakes in the new values for keys of the YAML; empty if that cannot be read as it is.

        When the YAML is loaded, they are found in any case; this is for a command line that has others.
        """
        of_file, found, budget = Mistakes(), Mistakes(), Budget()
        try:
            root = read_file(self.files[0], of_file, budget) if self.files else None
            if root is not None:
                expand_includes(root, (), of_file, budget)
                apply_overrides(root, self.overrides, found, COMMAND_LINE, "--")
        except ConfigError:  # beyond a limit
            return []
        return [] if of_file else list(found)

    def _take(self, name: str, text: str | None) -> None:
        """Keep a run option or a new value for a key of the YAML."""
        head, *below = name.split(".")
        self.words.append(f"--{name}" if text is None else f"--{name}={text}")
        if text is None:
            self._mistakes.append(_without_value(name))
        elif head in OPTION_NAMES and below:
            self._mistakes.append(f"--{name}: {head} is a run option, so it has no keys below it.")
        elif head in OPTION_NAMES:
            self.options[name] = option_value(name, text)
        else:
            _nest(self.overrides, name, parse_value(text), self._mistakes)

    def _named_texts(self, words: deque[str]) -> Iterator[tuple[str, str | None]]:
        """Each option's name and text, None where it has none."""
        while words:
            typed = words.popleft()
            word = "--help" if typed == "-h" else typed
            if not word.startswith("-") or word == "-":
                self.files.append(word)
                continue
            name, equals, text = word[2:].partition("=")
            if not word.startswith("--"):
                self._mistakes.append(f"{word!r}: an option starts with two dashes.")
            elif not all(name.split(".")):
                self._mistakes.append(f"{word!r} has an empty name; expected --key=value or --key.subkey=value.")
            else:
                name = _ALIASES.get(name, name)
                yield from ((name, each) for each in ([text] if equals else _texts_behind(name, words)))


def _texts_behind(name: str, words: deque[str]) -> list[str | None]:
    """Return the values of an option without `=`, from the words after it; several for `--sweep`."""
    following = words[0] if words else "--"
    if name == "sweep":
        return _axes_behind(words)
    if name == "help":
        takes = following == "all"
    elif OPTION_TYPES.get(name) is bool:
        takes = following.lower() in _BOOL_WORDS
    else:
        takes = name.replace("_", "-") not in FLAGS and not following.startswith("--")
    if takes:
        return [words.popleft()]
    return ["true" if OPTION_TYPES.get(name) is bool else None]


def _axes_behind(words: deque[str]) -> list[str | None]:
    axes: list[str | None] = []
    while words and not words[0].startswith("--") and "=" in words[0]:
        axes.append(words.popleft())
    return axes or [None]


_loads: list[object] = []  # one for each YAML that is being checked or built, in any thread


@contextmanager
def loading() -> Iterator[None]:
    """Forbid code that a YAML names to read the command line while the YAML is checked or built."""
    load = object()
    _loads.append(load)
    try:
        yield
    finally:
        _loads.remove(load)


def _without_value(name: str) -> str:
    """Return the mistake in an option without a value: it needs one, or its name is misspelt."""
    if advice := instead_of(name):
        return f"there is no run option {name!r}.{advice}"
    is_known = name in OPTION_NAMES or name.replace("_", "-") in VALUED
    hint = "" if is_known else did_you_mean(name, (*FLAGS, *VALUED), prefix="--")
    if is_known or not (hint or near_misses([name])):
        return f"--{name} needs a value: --{name}=..."
    hint = hint or did_you_mean(name, OPTION_NAMES, prefix="--")
    return f"there is no run option {name!r}.{hint} A key of the YAML needs a value: --{name}=..."


def _nest(overrides: dict[str, Any], name: str, value: Any, mistakes: list[str]) -> None:
    """Put `value` where the dotted `name` says."""
    *parents, last = name.split(".")
    branch = overrides
    for depth, part in enumerate(parents, start=1):
        below = branch.setdefault(part, {})
        if not isinstance(below, dict):
            parent = ".".join(parents[:depth])
            mistakes.append(f"--{name} conflicts with --{parent}, whose value has no keys.")
            return
        branch = below
    if not isinstance(branch.get(last), dict) or not branch[last]:
        branch[last] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            _nest(branch[last], str(key), item, mistakes)
    else:
        mistakes.append(f"--{name} conflicts with another option, which sets a key below it.")
