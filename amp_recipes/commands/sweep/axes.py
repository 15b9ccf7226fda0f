"""Reads the words after `--sweep`: the keys and their values; and names the folder of each run."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from amp_recipes.config.options.arguments import parse_value
from amp_recipes.config.yaml.mistakes import did_you_mean, join_mistakes
from amp_recipes.errors import ConfigError

MOST_RUNS = 1_000  # of a grid: more is probably a mistake
_NAME_CHARACTERS = 120  # file systems take 255 bytes, and people less
_EXACT_FLOAT_CHARACTERS = 10
_CLOSING = {"[": "]", "{": "}", "(": ")"}
_SCALES = ("log", "linear")


@dataclass(frozen=True)
class Choice:
    """One value of a swept key. text: what is typed for it, `--key=text`; value: what the command line reads there."""

    text: str
    value: Any


@dataclass(frozen=True)
class Choices:
    """A key and the values that it is to take: `act=relu,gelu`."""

    key: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Range:
    """A key and the interval in which its value may lie: `lr=1e-5..1e-2:log`. Both ends whole: whole numbers only."""

    key: str
    low: float
    high: float
    log: bool

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Both ends, to be checked before anything runs."""
        return tuple(Choice(repr(end), end) for end in (self.low, self.high))


Axis: TypeAlias = "Choices | Range"
Combination: TypeAlias = "dict[str, Choice]"


def read_axes(words: Sequence[str], trials: int | None) -> list[Axis]:
    """The axes that are typed as `key=value,value` or `key=low..high`, in the order of their keys.

    trials: how many runs are chosen from them; None: the whole grid is run, and no axis may be a range.
    Raises ConfigError with every mistake.
    """
    mistakes: list[str] = []
    axes: dict[str, Axis] = {}
    for word in words:
        try:
            axis = _read_axis(word)
            _refuse_overlap(axis.key, axes)
        except ValueError as error:
            mistakes.append(f"--sweep {word!r}: {error}")
            continue
        axes[axis.key] = axis
        if isinstance(axis, Range) and trials is None:
            mistakes.append(f"--sweep {word!r}: a range needs --sweep-trials N, the number of runs to choose from it.")
    mistakes = [*_wrong_size(axes.values(), words, trials), *mistakes]
    if mistakes:
        raise ConfigError(join_mistakes(mistakes, "the sweep"))
    return [axes[key] for key in sorted(axes)]  # the same sweep whatever the order in which it is typed


def _wrong_size(axes: Iterable[Axis], words: Sequence[str], trials: int | None) -> Iterator[str]:
    """Yield the mistakes in the number of runs."""
    if not words:
        yield "--sweep-trials chooses among the values of --sweep, as in --sweep 'lr=1e-5..1e-2:log'."
    if trials is not None:
        if trials < 1:
            yield f"--sweep-trials {trials}: expected 1 or more."
        return
    runs = math.prod(len(axis.choices) for axis in axes)
    if runs > MOST_RUNS:
        yield f"the grid has {runs:,} runs, but at most {MOST_RUNS:,} are allowed; --sweep-trials N chooses N of them."


def _refuse_overlap(key: str, others: Iterable[str]) -> None:
    """Raise ValueError if another swept key is the same, or one of the two holds the other."""
    for other in others:
        if key == other:
            raise ValueError(f"{key} is swept twice; give all its values at once, as in lr=1e-3,1e-4.")
        if key.startswith(f"{other}.") or other.startswith(f"{key}."):
            raise ValueError(f"{other} is swept too, but one of the two keys is inside the other.")


def grid(axes: Sequence[Axis]) -> Iterator[Combination]:
    """Every combination, the last axis changing fastest."""
    for chosen in itertools.product(*(axis.choices for axis in axes)):
        yield dict(zip((axis.key for axis in axes), chosen, strict=True))


def covering(axes: Sequence[Axis]) -> Iterator[Combination]:
    """As few combinations as have every choice and both ends of every range in them."""
    for index in range(max(len(axis.choices) for axis in axes)):
        yield {axis.key: axis.choices[index % len(axis.choices)] for axis in axes}


def describe(combination: Combination) -> str:
    """The values as people read them: `lr=0.001, act=relu`."""
    return ", ".join(f"{key}={describe_value(choice)}" for key, choice in combination.items())


def describe_value(choice: Choice) -> str:
    """One value as people read it."""
    return _shown(choice.value)[0]


def folder_name(combination: Combination) -> str:
    """A short and safe name of a folder for these values, in any order of the keys: `act=relu,lr=0.001`.

    Where it does not say the values exactly, it ends with a digest of them: other values, another folder.
    """
    parts, exact = [], True
    for key, choice in sorted(combination.items()):
        shown, is_exact = _shown(choice.value)
        part = f"{_safe(key)}={_safe(shown)}"
        exact = exact and is_exact and part == f"{key}={shown}"
        parts.append(part)
    name = ",".join(parts)
    if exact and len(name) <= _NAME_CHARACTERS:
        return name
    values = repr(sorted((key, choice.value) for key, choice in combination.items()))
    digest = hashlib.sha256(values.encode()).hexdigest()[:8]
    return f"{name[: _NAME_CHARACTERS - len(digest) - 1]}-{digest}"


def _safe(text: str) -> str:
    other = "[^A-Za-z0-9_.+-]+"
    return re.sub(other, "_", re.sub(f"^{other}|{other}$", "", text))


def _shown(value: Any) -> tuple[str, bool]:
    """A value as short text, and whether the command line would read just this value from it."""
    if isinstance(value, float):
        exact = repr(value)
        short = len(exact) <= _EXACT_FLOAT_CHARACTERS
        return (exact if short else f"{value:.4g}"), short
    if isinstance(value, str):
        return value, parse_value(value) == value
    text = json.dumps(value, default=str)
    return text, not isinstance(value, list | dict)


def _read_axis(word: str) -> Axis:
    """The axis that a word describes. Raises ValueError that says what is wrong with it."""
    key, equals, text = word.partition("=")
    key, text = key.strip(), text.strip()
    if not equals:
        raise ValueError("expected key=value,value, as in lr=1e-3,1e-4.")
    if key.startswith("-"):
        raise ValueError(f"write the key without dashes: {word.lstrip('-')}")
    if not all(key.split(".")):
        raise ValueError("the name of the key, or of a part of it, is empty; expected key=... or key.subkey=...")
    if key == "output_folder":
        raise ValueError("output_folder cannot be swept: each run gets its own folder below it.")
    if not text:
        raise ValueError(f"there is no value; expected {key}=value,value.")
    texts = _split(text)
    if not all(texts):
        raise ValueError("a value is empty; write '' for an empty text.")
    ranges = [_read_range(key, text) for text in texts]
    if len(texts) == 1 and ranges[0] is not None:
        return ranges[0]
    if any(ranges):
        raise ValueError("a range cannot be mixed with values; give either the values or the range.")
    return Choices(key, _distinct(texts))


def _distinct(texts: Sequence[str]) -> tuple[Choice, ...]:
    """A choice for each text. Raises ValueError where two are the same value."""
    choices: dict[str, Choice] = {}
    for text in texts:
        choice = Choice(text, parse_value(text))
        same = choices.setdefault(repr(choice.value), choice)
        if same is not choice:
            raise ValueError(f"{same.text} and {text} are the same value; give each value once.")
    return tuple(choices.values())


def _read_range(key: str, text: str) -> Range | None:
    """The range that `low..high` or `low..high:log` is; None where the text is a value such as ../data."""
    below, dots, rest = text.partition("..")
    above, colon, scale = rest.partition(":")
    low, high = _number(below), _number(above)
    if not dots or (low is None and high is None):
        return None
    if low is None or high is None:
        raise ValueError(
            f"a range needs two finite numbers, as in 1e-5..1e-2; {text} has only one. Put a value that is not a "
            "range in quotes."
        )
    _refuse_range(low, high, below, above, scale if colon else "linear")
    if isinstance(low, float) or isinstance(high, float):
        low, high = float(low), float(high)
    return Range(key, low, high, scale == "log")


def _refuse_range(low: float, high: float, below: str, above: str, scale: str) -> None:
    """Raise ValueError for ends that make no range, or a scale that there is not."""
    if scale not in _SCALES:
        raise ValueError(f"{scale!r} is not a scale of a range; expected log or linear.{did_you_mean(scale, _SCALES)}")
    if low >= high:
        raise ValueError(f"a range goes from the smaller number to the larger: {above}..{below}.")
    if scale == "log" and low <= 0:
        raise ValueError(f"a range on a log scale has ends greater than 0, not {below}.")


def _number(text: str) -> float | int | None:
    value = parse_value(text.strip())
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _split(text: str) -> list[str]:
    """The parts between the commas outside brackets and quotes. Raises ValueError if one is left open."""
    parts = [""]
    waiting: list[str] = []  # closing brackets and quotes, the innermost last
    characters = iter(text)
    for character in characters:
        if character == "," and not waiting:
            parts.append("")
            continue
        if waiting and character == waiting[-1]:
            waiting.pop()  # two quotes inside quotes end them and open them again, which comes to the same
        elif waiting[-1:] == ['"'] and character == "\\":
            character += next(characters, "")
        elif closing := _closing(character, parts[-1], waiting):
            waiting.append(closing)
        parts[-1] += character
    if waiting:
        raise ValueError(f"a closing {waiting[-1]} is missing; put a value with a single bracket or quote in quotes.")
    return [part.strip() for part in parts]


def _closing(character: str, before: str, waiting: Sequence[str]) -> str:
    """Return the character that closes the bracket or quote; empty if none is opened."""
    if waiting and waiting[-1] in "'\"":
        return ""
    if character in "'\"":  # elsewhere it is an apostrophe
        return character if before.strip() == "" or before.rstrip()[-1] in "'[{(,:" else ""
    return _CLOSING.get(character, "")
