"""Reads the requests of a command line, such as `--check`, `--sweep` and `--trust`, which no YAML can set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from amp_recipes.config.options.run_options import Purpose
from amp_recipes.files.granted_trust import granted_trust, names_in

# Words of the command line that are no run options: a YAML cannot say them. Those with a dash are also known with `_`.
FLAGS = {
    "check": "Check the YAML and the command line, build nothing, and exit.",
    "show-config": "Print the resolved YAML with the source of each value, and exit.",
    "diagnose": "Report what the precision does to the model instead of training it, and exit. Exit status: 0 safe, 1 "
    "not safe as it is, 2 not decided (also where the script ends with an error).",
}
# Numbers of a diagnosis: the type, what it accepts, and that in words.
DIAGNOSIS_SETTINGS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "minutes": (float, lambda x: x > 0, "a number greater than 0"),
    "windows": (int, lambda x: x >= 3, "a whole number, 3 or more"),
    "tolerance": (float, lambda x: 0 < x < math.inf, "a number greater than 0"),
}
_OF_DIAGNOSIS = "diagnose-"
# Words that need a value.
VALUED = ("trust", "sweep", "sweep-trials", "replay", *(f"{_OF_DIAGNOSIS}{name}" for name in DIAGNOSIS_SETTINGS))


@dataclass(frozen=True)
class Request:
    """The task that a command line gives to `load_hparams`, besides options and overrides.

    action: a run, or what is to be done instead of one; trust: what the YAML may name beside the defaults; axes,
    trials: of a sweep, as they were typed; words: what each run of the sweep is given too.
    """

    action: Literal["run", "check", "show_config", "sweep"] = "run"
    trust: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    trials: int | None = None
    words: tuple[str, ...] = ()


class RequestWords:
    """Collects the words of a command line that are neither run options nor overrides."""

    def __init__(self) -> None:
        self._flags: list[str] = []
        self._values: dict[str, list[str]] = {name: [] for name in VALUED}
        self._mistakes: list[str] = []

    def takes(self, name: str, text: str | None) -> bool:
        """Store an option that is one of these words; return whether it was."""
        name = name.replace("_", "-")
        if name in FLAGS:
            if text is not None:
                self._mistakes.append(f"--{name} takes no value, but is given {text!r}.")
            self._flags.append(name)
            return True
        if name in self._values and text is not None:
            self._values[name].append(text)
            return True
        return False

    def all_mistakes(self) -> Iterator[str]:
        """Yield the mistakes in the words and in their combination."""
        yield from self._mistakes
        # A YAML has no way to the words that started this process, nor to its variables.
        granted = granted_trust()
        if foreign := [name for name in self._trust if name not in granted]:
            yield (
                f"--trust {','.join(foreign)} is refused: it is not on the command line that started this process, and "
                "other arguments may come from a YAML. Give it on that command line, or call load_hparams(trust=...) "
                "in the script."
            )
        yield from self._wrong_trials()
        yield from self._wrong_settings()
        actions = [*dict.fromkeys(self._flags), *(name for name in ("sweep", "replay") if self._values[name])]
        if len(actions) > 1:
            yield f"{' and '.join(f'--{action}' for action in actions)} cannot be combined; give one of them."

    def _wrong_trials(self) -> Iterator[str]:
        for trials in self._values["sweep-trials"][-1:]:
            if not trials.isdecimal() or int(trials) == 0:
                yield f"--sweep-trials is {trials!r}, but must be a whole number, 1 or more."
            if not self._values["sweep"]:
                yield "--sweep-trials needs --sweep with the keys to try: --sweep 'lr=1e-5..1e-2:log'."

    def _wrong_settings(self) -> Iterator[str]:
        for name, (kind, accepts, expected) in DIAGNOSIS_SETTINGS.items():
            for text in self._values[f"{_OF_DIAGNOSIS}{name}"][-1:]:
                if not _is_number(text, kind, accepts):
                    yield f"--{_OF_DIAGNOSIS}{name} is {text!r}, but must be {expected}."
                if "diagnose" not in self._flags:
                    yield f"--{_OF_DIAGNOSIS}{name} needs --diagnose."

    def request(self, words: list[str]) -> Request:
        """Return the request. words: the other words of the command line."""
        trust, axes = tuple(self._trust), tuple(self._values["sweep"])
        if axes:
            trials = self._values["sweep-trials"][-1:]
            granted = [f"--trust={name}" for name in trust]
            return Request("sweep", trust, axes, int(trials[0]) if trials else None, (*words, *granted))
        instead = [flag.replace("-", "_") for flag in self._flags if flag != "diagnose"]
        return Request(instead[0] if instead else "run", trust)  # type: ignore[arg-type]

    def purpose(self) -> Purpose:
        """Return the purpose of the run."""
        if self._values["replay"]:
            return Purpose("replay", self._values["replay"][-1])
        if "diagnose" not in self._flags:
            return Purpose()
        settings = {}
        for name, (kind, accepts, _) in DIAGNOSIS_SETTINGS.items():
            for text in self._values[f"{_OF_DIAGNOSIS}{name}"][-1:]:
                if _is_number(text, kind, accepts):  # what is not one is among the mistakes
                    settings[name] = kind(text)
        return Purpose("diagnose", settings=settings)

    @property
    def _trust(self) -> list[str]:
        return [name for text in self._values["trust"] for name in names_in(text)]


def _is_number(text: str, kind: type, accepts: Callable[[Any], bool]) -> bool:
    try:
        return accepts(kind(text))
    except ValueError:
        return False
