"""Combines the options that the packages declare into `RunOptions`, and validates them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from amp_recipes.checkpoint.options import CheckpointOptions
from amp_recipes.config.options.option_values import choices_of, value_of
from amp_recipes.config.options.other_names import instead_of
from amp_recipes.config.yaml.mistakes import did_you_mean, join_mistakes
from amp_recipes.distributed.options import ProcessOptions
from amp_recipes.errors import ConfigError
from amp_recipes.loggers.options import OutputOptions
from amp_recipes.loop.options import EarlyStoppingOptions, OptimizationOptions, SpikeOptions, TrialOptions
from amp_recipes.options import composed_of
from amp_recipes.precision.options import LossScaleOptions, PrecisionOptions
from amp_recipes.state.options import RandomnessOptions

if TYPE_CHECKING:

    class OptionFields(
        PrecisionOptions,
        LossScaleOptions,
        OptimizationOptions,
        SpikeOptions,
        EarlyStoppingOptions,
        RandomnessOptions,
        TrialOptions,
        OutputOptions,
        CheckpointOptions,
        ProcessOptions,
    ):
        """Each option as an attribute, for checkers of types: at run time no class inherits from a group."""
else:
    OptionFields = object


@dataclass(frozen=True)
class Purpose:
    """The purpose of a start: to train, to diagnose, or to replay a step that became nonfinite.

    folder: what `--replay` was given; settings: of a diagnosis, those that were given: minutes, windows, tolerance.
    """

    action: Literal["train", "diagnose", "replay"] = "train"
    folder: str | None = None
    settings: Mapping[str, float] = field(default_factory=dict)


@composed_of(
    PrecisionOptions,
    LossScaleOptions,
    OptimizationOptions,
    SpikeOptions,
    EarlyStoppingOptions,
    RandomnessOptions,
    TrialOptions,
    OutputOptions,
    CheckpointOptions,
    ProcessOptions,
)
class RunOptions(Mapping[str, Any], OptionFields):
    """The options of one run: typed, validated, readable as attributes and as a mapping.

    `RunOptions(precision="bf16", seed=3)` sets two options; the others have their defaults. `explicit`
    holds the names of those that were set. Two objects are equal if all their values are.
    Raises ConfigError that names every unknown option and every wrong value together.
    """

    def __init__(self, **options: Any) -> None:
        vars(self).update(_attributes(options, "RunOptions", Purpose()))  # it is frozen for everybody else

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any] | None, where: str = "run_opts", purpose: Purpose = Purpose()
    ) -> RunOptions:
        """The options that `mapping` sets; `where` opens each error message."""
        options = cls.__new__(cls)
        vars(options).update(_attributes({} if mapping is None else mapping, where, purpose))
        return options

    @property
    def purpose(self) -> Purpose:
        """The purpose, from the command line only: a YAML cannot set it, and it is not saved."""
        return vars(self)["_purpose"]

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the options that were set, also where they were set to their default."""
        return vars(self)["_explicit"]

    def with_defaults_from(self, hparams: Mapping[str, Any] | None, where: str = "hparams") -> RunOptions:
        """These options, those not explicit taken from `hparams` where it has a key of that name."""
        names = OPTIONS.keys() - self.explicit
        found = {name: hparams[name] for name in names if name in hparams} if hparams else {}
        if not found:
            return self
        explicit = {name: self[name] for name in self.explicit}
        return self.from_mapping({**found, **explicit}, where, self.purpose)

    def __getitem__(self, name: str) -> Any:
        if name not in OPTIONS:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(OPTIONS)

    def __len__(self) -> int:
        return len(OPTIONS)

    def __repr__(self) -> str:
        explicit = (f"{name}={self[name]!r}" for name in self if name in self.explicit)
        return f"RunOptions({', '.join(explicit)})"


OPTIONS: dict[str, Field[Any]] = {declared.name: declared for declared in fields(RunOptions)}  # type: ignore[arg-type]
"""The dataclass field of each option; its meaning, range and group are in the `metadata`."""
OPTION_NAMES = frozenset(OPTIONS)
OPTION_TYPES: dict[str, Any] = {name: OPTIONS[name].type for name in sorted(OPTIONS)}
FRAMEWORK_KEYS = frozenset({"lr_scheduler", "tensor_parallel_plan"})
"""Keys of a YAML that are no run options and that the framework reads."""


def option_choices(name: str) -> tuple[str, ...]:
    """The values that an option with a closed list of values takes; empty for the others."""
    return choices_of(OPTIONS[name])


def options_by_group(with_rare: bool = True) -> dict[str, list[Field[Any]]]:
    """The dataclass fields of `RunOptions` under their group's title, in the order of the class."""
    groups: dict[str, list[Field[Any]]] = {}
    for declared in OPTIONS.values():
        if with_rare or not declared.metadata["rare"]:
            groups.setdefault(declared.metadata["group"], []).append(declared)
    return groups


def validate_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of every option as its type, and what is wrong with `options`, by name.

    The caller decides how to report the mistakes: a YAML knows the line, a dict does not.
    """
    if not isinstance(options, Mapping):
        kind = type(options).__name__
        return {}, {"": f"run options must be a mapping of names to values, but are a {kind}"}
    mistakes: dict[str, str] = {}
    values: dict[str, Any] = {name: option.default for name, option in OPTIONS.items()}
    values |= {name: make() for name, option in OPTIONS.items() if (make := option.default_factory) is not MISSING}
    for name, value in options.items():
        if name not in OPTIONS:
            mistakes[name] = f"there is no run option {name!r}.{instead_of(name) or did_you_mean(name, OPTIONS)}"
            continue
        try:
            values[name] = value_of(OPTIONS[name], value)
        except ValueError as error:
            mistakes[name] = str(error)
    if not mistakes and values["min_scale"] > values["init_scale"]:
        floor, start = values["min_scale"], values["init_scale"]
        mistakes["min_scale"] = f"min_scale is {floor!r}, but must be at most init_scale ({start!r})."
    return values, mistakes


def options_table() -> str:
    """A Markdown table per group of options: name, default, meaning."""
    defaults = RunOptions()
    tables = []
    for group, options in options_by_group().items():
        rows = [f"**{group}**", "", "| option | default | meaning |", "| --- | --- | --- |"]
        for declared in options:
            meaning = declared.metadata["help"].replace("|", "\\|")
            if choices := option_choices(declared.name):
                meaning = f"{meaning} One of {', '.join(f'`{choice}`' for choice in choices)}."
            default = display(defaults[declared.name])
            rows.append(f"| `{declared.name}` | {default and f'`{default}`'} | {meaning} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables) + "\n"


def display(value: Any) -> str:
    """A default as one types it on the command line; empty for an absent one."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def near_misses(keys: Iterable[str]) -> list[str]:
    """Return hints on keys that look like misspelt run options; a YAML may also have keys of its own."""
    strange = [key for key in keys if key not in OPTION_NAMES | FRAMEWORK_KEYS]
    near = {key: difflib.get_close_matches(str(key), sorted(OPTION_NAMES), 1, cutoff=0.8) for key in strange}
    return [f"{key!r} is not a run option; did you mean {names[0]!r}?" for key, names in near.items() if names]


def _attributes(options: Mapping[str, Any], where: str, purpose: Purpose) -> dict[str, Any]:
    """Return the attributes of a `RunOptions`. Raises ConfigError that names every mistake."""
    values, mistakes = validate_options(options)
    if mistakes:
        raise ConfigError(join_mistakes([f"{where}: {text}" for text in mistakes.values()], where))
    return {**values, "_explicit": frozenset(options), "_purpose": purpose}
