"""Which options a run has, what each means, and what values each takes."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amp_recipes.config.options.fields import OptionFields
from amp_recipes.config.options.other_names import instead_of, value_here
from amp_recipes.config.yaml.mistakes import did_you_mean, join_mistakes
from amp_recipes.errors import ConfigError

_INTEGER_BITS = 64  # no option counts further
_SHOWN_CHARACTERS = 200  # of a value, in a message


@dataclass(frozen=True)
class Purpose:
    """What a script is started for: to train, to be diagnosed, or to show again how a step went nonfinite.

    folder: what `--replay` was given.
    """

    action: Literal["train", "diagnose", "replay"] = "train"
    folder: str | None = None


@dataclass(frozen=True, init=False, eq=False, repr=False)
class RunOptions(OptionFields, Mapping[str, Any]):
    """The options of one run: typed, validated, readable as attributes and as a mapping.

    `RunOptions(precision="bf16", seed=3)` sets two options; the others have their defaults. `explicit`
    tells which ones were set. Two objects are equal if all their values are.
    Raises ConfigError that names every unknown option and every wrong value together.
    """

    def __init__(self, **options: Any) -> None:
        self._set(options, "RunOptions")

    @classmethod
    def from_mapping(
        cls, mapping: Mapping[str, Any] | None, where: str = "run_opts", purpose: Purpose = Purpose()
    ) -> RunOptions:
        """The options that `mapping` sets; `where` opens each error message."""
        options = cls.__new__(cls)
        options._set({} if mapping is None else mapping, where, purpose)
        return options

    @property
    def purpose(self) -> Purpose:
        """What the command line asks for beside the options: no YAML can say it, and it is not written down."""
        return self._purpose

    @property
    def explicit(self) -> frozenset[str]:
        """Names of the options that were set, also where they were set to their default."""
        return self._explicit

    def with_defaults_from(self, hparams: Mapping[str, Any] | None, where: str = "hparams") -> RunOptions:
        """These options, those not explicit taken from `hparams` where it has a key of that name."""
        names = OPTION_NAMES - self.explicit
        found = {name: hparams[name] for name in names if name in hparams} if hparams else {}
        if not found:
            return self
        explicit = {name: self[name] for name in self.explicit}
        return self.from_mapping({**found, **explicit}, where, self.purpose)

    def _set(self, options: Mapping[str, Any], where: str, purpose: Purpose = Purpose()) -> None:
        values, mistakes = validate_options(options)
        if mistakes:
            raise ConfigError(join_mistakes([f"{where}: {text}" for text in mistakes.values()], where))
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen for everybody else
        object.__setattr__(self, "_explicit", frozenset(options))
        object.__setattr__(self, "_purpose", purpose)

    def __getitem__(self, name: str) -> Any:
        if name not in OPTION_NAMES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (declared.name for declared in fields(self))

    def __len__(self) -> int:
        return len(OPTION_NAMES)

    def __repr__(self) -> str:
        explicit = (f"{name}={self[name]!r}" for name in self if name in self.explicit)
        return f"RunOptions({', '.join(explicit)})"


FRAMEWORK_KEYS = frozenset({"lr_scheduler", "tensor_parallel_plan"})
"""Keys of a YAML that are no run options and that the framework reads."""

OPTION_NAMES = frozenset(declared.name for declared in fields(RunOptions))
OPTION_TYPES: dict[str, Any] = dict(sorted(get_type_hints(RunOptions).items()))
_SCHEMA = OmegaConf.structured(RunOptions)  # to be copied: to make it anew takes four times as long
OmegaConf.set_readonly(_SCHEMA, False)  # OmegaConf copies the flag of a frozen dataclass


def options_by_group() -> dict[str, list[Any]]:
    """The dataclass fields of `RunOptions` under their group's title, in the order of the class."""
    groups: dict[str, list[Any]] = {}
    for declared in fields(RunOptions):
        groups.setdefault(declared.metadata["group"], []).append(declared)
    return groups


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


def option_choices(name: str) -> tuple[str, ...]:
    """The values that an option with a closed list of values takes; empty for the others."""
    hint = OPTION_TYPES[name]
    return get_args(hint) if all(isinstance(choice, str) for choice in get_args(hint)) else ()


def display(value: Any) -> str:
    """A default as one types it on the command line; empty for an absent one."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def validate_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of every option as its type, and what is wrong with `options`, by name.

    The caller decides how to report the mistakes: a YAML knows the line, a dict does not.
    """
    if not isinstance(options, Mapping):
        kind = type(options).__name__
        return {}, {"": f"run options must be a mapping of names to values, but are a {kind}"}
    schema = copy.deepcopy(_SCHEMA)
    mistakes: dict[str, str] = {}
    for name, value in options.items():
        if name not in OPTION_NAMES:
            mistakes[name] = f"there is no run option {name!r}.{instead_of(name) or did_you_mean(name, OPTION_NAMES)}"
            continue
        try:
            OmegaConf.update(schema, name, _plain(name, value))
        except (OmegaConfBaseException, ValueError):
            mistakes[name] = f"{name} is {_shown(value)}, but must be {_expected(name)}.{_nearest(name, value)}"
    values: dict[str, Any] = OmegaConf.to_container(schema, resolve=False)  # type: ignore[assignment]
    for declared in fields(RunOptions):
        within, value = declared.metadata["within"], values[declared.name]
        if declared.name not in mistakes and within and value is not None and not within.holds(value):
            mistakes[declared.name] = f"{declared.name} is {_shown(value)}, but must be {within.text}."
    if not mistakes and values["min_scale"] > values["init_scale"]:
        floor, start = values["min_scale"], values["init_scale"]
        mistakes["min_scale"] = f"min_scale is {floor!r}, but must be at most init_scale ({start!r})."
    return values, mistakes


def near_misses(keys: Iterable[str]) -> list[str]:
    """What to say of keys that are no run options but look like a misspelt one: a YAML may have keys of its own."""
    said = []
    for key in keys:
        known = key in OPTION_NAMES | FRAMEWORK_KEYS
        near = [] if known else difflib.get_close_matches(str(key), sorted(OPTION_NAMES), 1, cutoff=0.8)
        said += [f"{key!r} is no run option; did you mean {name!r}?" for name in near]
    return said


def _plain(name: str, value: Any) -> Any:
    """`value` as OmegaConf takes it; ValueError where its own conversion would guess."""
    hint = OPTION_TYPES[name]
    if isinstance(value, os.PathLike):
        value = str(value)
    elif getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy's
        value = value.item()
    if hint == list[str]:
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise ValueError(name)
        return list(value)
    if hint is bool:
        if not isinstance(value, bool | str) and value not in (0, 1):
            raise ValueError(name)
    elif value is False and "off" in option_choices(name):
        return "off"  # as YAML 1.1 reads the word
    elif isinstance(value, bool) or (isinstance(value, int) and value.bit_length() > _INTEGER_BITS):
        raise ValueError(name)
    if name == "device" and value is not None:
        import torch  # takes seconds, and the names of the options are wanted without it

        try:
            value = str(torch.device(value))
        except (RuntimeError, TypeError) as error:
            raise ValueError(name) from error
    # OmegaConf reads ${...} and ??? in a string as its own syntax and lets them pass any type.
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise ValueError(name)
    return value


def _shown(value: Any) -> str:
    """A value for a message: not at length, and not where Python refuses to write it (a number of 10,000 digits)."""
    if isinstance(value, int) and value.bit_length() > _INTEGER_BITS:
        return f"a whole number of {value.bit_length():,} bits"
    try:
        text = repr(value)
    except ValueError:  # such a number in a list
        return f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _expected(name: str) -> str:
    hint = OPTION_TYPES[name]
    if choices := option_choices(name):
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if name == "device":
        return "a device that torch knows, such as cpu, cuda, cuda:1 or mps"
    words = {
        list[str]: "a list of strings",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        int | None: "a whole number or null",
        float | None: "a number or null",
        str | None: "a string (without ${...}) or null",
    }
    return words[hint]


def _nearest(name: str, value: Any) -> str:
    choices = ("cpu", "cuda", "mps", "xpu") if name == "device" else option_choices(name)
    here = value_here(value) if choices else ""
    if here.partition(":")[0] in choices:
        return f" Did you mean {here}?"
    return did_you_mean(value, choices) if isinstance(value, str) else ""
