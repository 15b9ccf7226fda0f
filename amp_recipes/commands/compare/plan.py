"""Decides which runs a comparison consists of, under which settings, and by which metric they are judged."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amp_recipes.commands.run_records import require_script
from amp_recipes.config import parse_arguments
from amp_recipes.config.changes import differences
from amp_recipes.config.options.run_options import display
from amp_recipes.config.trust.checking import Settings, read_settings
from amp_recipes.config.yaml.limits import Budget
from amp_recipes.config.yaml.nodes import Mapping as MappingNode
from amp_recipes.config.yaml.nodes import Mistakes
from amp_recipes.config.yaml.reading import read_text
from amp_recipes.config.yaml.writing import to_yaml
from amp_recipes.errors import ConfigError
from amp_recipes.options import MAX_SEED
from amp_recipes.precision import AMPConfig

_MOST_RUNS = 1000
_MANY_SEEDS = 100  # a seed typed as a count: `--seeds 1234`
# Options that change neither what a run computes nor where its records are.
_OF_SAVING = frozenset({"accept_changes", "ckpt_background", "ckpt_interval_minutes", "ckpt_interval_steps", "resume"})
_HARMLESS = _OF_SAVING | {"log_interval_steps", "noprogressbar", "output_folder"}
# What compare gives to each run itself, and where it takes it from.
_OWN = {"precision": "--precisions", "seed": "--seeds", "output_folder": "--to"}


@dataclass(frozen=True)
class Metric:
    """The metric to compare by. mode: "min" or "max"; chosen: whether the YAML or the user named it."""

    name: str
    mode: str
    chosen: bool

    @property
    def stage(self) -> str:
        """The stage that the name begins with, as in `valid.accuracy`; empty if there is none."""
        stage, _, rest = self.name.partition(".")
        return stage if rest and stage in ("test", "valid", "train") else ""

    @property
    def key(self) -> str:
        """The name without the stage: what the runs call it."""
        return self.name.removeprefix(f"{self.stage}.") if self.stage else self.name


@dataclass(frozen=True)
class PlannedRun:
    """One run of the comparison. settings: those that are saved, to see when they change."""

    precision: str
    seed: int
    folder: Path
    settings: Mapping[str, Any] = field(compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.precision} seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    """A comparison before anything is run. settings: the run options; runs: seed by seed, the reference first."""

    script: Path
    hparams_file: Path
    options: tuple[str, ...]
    precisions: tuple[str, ...]
    seeds: tuple[int, ...]
    folder: Path
    metric: Metric
    settings: Mapping[str, Any]
    runs: tuple[PlannedRun, ...]

    @property
    def reference(self) -> str:
        """The precision that the others are compared with."""
        return self.precisions[0]


def make_plan(
    script: Path,
    hparams_file: Path,
    options: Sequence[str],
    precisions: str,
    seeds: str,
    folder: Path | None,
    metric: str | None,
    mode: str | None,
) -> Plan:
    """The plan of a comparison as it was typed. Raises ConfigError for what is wrong with it, the YAML included."""
    require_script(script)
    names, numbers = read_precisions(precisions), read_seeds(seeds)
    if len(names) * len(numbers) > _MOST_RUNS:
        raise ConfigError(
            f"{len(names)} precisions and {len(numbers)} seeds are {len(names) * len(numbers)} runs; compare takes up "
            f"to {_MOST_RUNS}."
        )
    _, run_options, overrides = parse_arguments([str(hparams_file), *options])
    for name in sorted(run_options.explicit & _OWN.keys()):
        raise ConfigError(f"--{name} is given to each run by compare: use {_OWN[name]}.")
    if overrides.request.action != "run":
        raise ConfigError("compare trains the recipe: leave out --check, --show-config and --sweep.")
    folder = Path("results", "compare", script.resolve().parent.name) if folder is None else folder
    runs, options_found = [], {}
    for seed in numbers:
        for name in names:
            run_folder = folder / name / f"seed_{seed}"
            given = overrides.with_values({"precision": name, "seed": seed, "output_folder": str(run_folder)})
            # Data only, so from anywhere: what may be included is for the script to say.
            settings = read_settings(hparams_file, given, folders=["/"])
            options_found = settings.options
            runs.append(PlannedRun(name, seed, run_folder, _remembered(settings)))
    if options_found.get("test_only"):
        raise ConfigError("compare trains the recipe: leave out test_only.")
    return Plan(
        script,
        hparams_file,
        tuple(options),
        names,
        numbers,
        folder,
        choose_metric(metric, mode, options_found),
        options_found,
        tuple(runs),
    )


def read_precisions(text: str) -> tuple[str, ...]:
    """The names in `fp32,bf16`, the reference first. Raises ConfigError."""
    names = _words(text, "--precisions", "such as fp32,bf16,fp16")
    for name in names:
        if name == "auto":
            raise ConfigError("--precisions: auto depends on the machine; name a precision, such as bf16.")
        try:
            AMPConfig.from_name(name)
        except ConfigError as error:
            raise ConfigError(f"--precisions: {error}") from None
    if len(names) < 2:
        raise ConfigError(
            f"--precisions {text}: give two or more, the reference first, such as --precisions fp32,bf16."
        )
    return tuple(names)


def read_seeds(text: str) -> tuple[int, ...]:
    """The seeds: 1 to n of a number alone, else those of a list; `7,` is the one seed 7. Raises ConfigError."""
    expected = "a number of seeds, or a list of them such as 11,12,13"
    words = _words(text, "--seeds", expected)
    if not all(re.fullmatch(r"[0-9]{1,10}", word) for word in words):
        raise ConfigError(f"--seeds {text}: expected {expected}.")
    numbers = [int(word) for word in words]
    if "," not in text:
        if not 1 <= numbers[0] <= _MANY_SEEDS:
            raise ConfigError(
                f"--seeds {text}: the number of seeds must be 1 to {_MANY_SEEDS}. For the one seed {text}, "
                f"add a comma: --seeds {text},"
            )
        return tuple(range(1, numbers[0] + 1))
    if max(numbers) > MAX_SEED:
        raise ConfigError(f"--seeds {text}: a seed is at most {MAX_SEED}.")
    return tuple(numbers)


def choose_metric(name: str | None, mode: str | None, options: Mapping[str, Any]) -> Metric:
    """Return the metric to compare by: the one typed, else the YAML's early_stop_metric, else the loss.

    options: the recipe's run options. Raises ConfigError if it is not known which of two values is better.
    """
    watched = options.get("early_stop_metric")
    chosen = name or watched
    metric = Metric(chosen or "loss", mode or "min", chosen is not None)
    if mode is not None:
        return metric
    if watched and watched in (metric.name, metric.key):
        return replace(metric, mode=options.get("early_stop_mode", "min"))
    if metric.key == "loss":
        return metric
    raise ConfigError(f"--metric {chosen}: is a smaller or a larger value better? Give --mode min or --mode max.")


def setting_differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two sets of saved settings, one line each: `lr: 0.1 -> 0.2`."""
    if was == now:
        return []
    try:
        changes = differences(_tree(was["yaml"]), _tree(now["yaml"]))
        found = [str(change) for change in changes if change.name.partition(".")[0] not in _HARMLESS]
        before, after = dict(was["options"]), dict(now["options"])
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        return [f"the saved settings cannot be read ({error})"]
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            found.append(f"{name}: {before.get(name, '(absent)')} -> {after.get(name, '(absent)')}")
    return found


def _remembered(settings: Settings) -> dict[str, Any]:
    """The settings as JSON values: the resolved YAML, and the run options that it does not have."""
    beside = settings.options.keys() - settings.resolved.items.keys() - _HARMLESS
    options = {name: display(settings.options[name]) or "null" for name in sorted(beside)}
    return {"yaml": to_yaml(settings.resolved), "options": options}


def _tree(text: str) -> MappingNode:
    mistakes = Mistakes()
    root = read_text(text, "the settings", mistakes, Budget())
    mistakes.raise_if_any("the settings")
    if not isinstance(root, MappingNode):
        raise ConfigError("they are not a mapping")
    return root


def _words(text: str, option: str, expected: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    words = words[:-1] if len(words) > 1 and not words[-1] else words
    if not all(words):
        raise ConfigError(f"{option} {text!r}: expected {expected}.")
    if twice := sorted(word for word, count in Counter(words).items() if count > 1):
        raise ConfigError(f"{option} {text}: {', '.join(twice)} is given twice.")
    return words
