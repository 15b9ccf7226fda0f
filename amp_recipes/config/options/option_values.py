"""Checks and converts the value of one run option, and says what is wrong with it.

OmegaConf converts, as a user of YAML expects ("3" is a number, "off" is false); what its conversion would have to
guess is refused before. What it may convert to is a type of one value: a schema of all options would have to be
copied for each load.
"""

from __future__ import annotations

import functools
import os
from dataclasses import Field, make_dataclass
from typing import Any, get_args

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amp_recipes.config.options.other_names import value_here
from amp_recipes.config.yaml.mistakes import did_you_mean, shown

_INTEGER_BITS = 64  # no option counts further
_SHOWN_CHARACTERS = 200  # of a value, in a message
_EXPECTED = {
    list[str]: "a list of strings",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    int | None: "a whole number or null",
    float | None: "a number or null",
    str | None: "a string (without ${...}) or null",
}


def value_of(option: Field[Any], value: Any) -> Any:
    """The value as the type of the option. Raises ValueError that says what was given and what is accepted."""
    try:
        converted = _converted(option, value)
    except (OmegaConfBaseException, ValueError):
        text = f"{option.name} is {_shown(value)}, but must be {_expected(option)}.{_nearest(option, value)}"
        raise ValueError(text) from None
    within = option.metadata["within"]
    if within and converted is not None and not within.holds(converted):
        raise ValueError(f"{option.name} is {_shown(converted)}, but must be {within.text}.")
    return converted


def choices_of(option: Field[Any]) -> tuple[str, ...]:
    """The values that an option with a closed list of values takes; empty for the others."""
    choices = get_args(option.type)
    return choices if all(isinstance(choice, str) for choice in choices) else ()


def _converted(option: Field[Any], value: Any) -> Any:
    value = _host_value(value)
    if option.type == list[str]:
        return _strings(value)
    if value is False and "off" in choices_of(option):
        return "off"  # as YAML 1.1 reads the word
    if _would_be_guessed(option.type, value):
        raise ValueError(value)
    if option.name == "device" and value is not None:
        return _device_name(value)
    return OmegaConf.structured(_schema_of(option.type)(value)).value


@functools.cache
def _schema_of(kind: Any) -> Any:
    return make_dataclass("Value", [("value", kind)])


def _host_value(value: Any) -> Any:
    """A path as text, a number of NumPy's as one of Python's."""
    if isinstance(value, os.PathLike):
        return str(value)
    is_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_scalar else value


def _strings(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else value
    is_list = isinstance(values, list | tuple) and all(isinstance(item, str) for item in values)
    if not is_list or any(map(_is_of_omegaconf, values)):
        raise ValueError(value)
    return list(values)


def _would_be_guessed(kind: Any, value: Any) -> bool:
    """Whether OmegaConf would take a value for something else than was written, as `true` for the number 1."""
    if isinstance(value, str):
        return _is_of_omegaconf(value)
    if kind is bool:
        return not isinstance(value, bool) and value not in (0, 1)
    return isinstance(value, bool) or _is_huge(value)


def _is_of_omegaconf(text: str) -> bool:
    """Whether OmegaConf reads text as its own syntax, which passes any type."""
    return "${" in text or text == "???"


def _is_huge(value: Any) -> bool:
    return isinstance(value, int) and value.bit_length() > _INTEGER_BITS


def _device_name(value: Any) -> str:
    import torch  # takes seconds, and the names of the options are wanted without it

    try:
        return str(torch.device(value))
    except (RuntimeError, TypeError) as error:
        raise ValueError(value) from error


def _shown(value: Any) -> str:
    """A value for a message: not at length, and not where Python refuses to write it (a number of 10,000 digits)."""
    if _is_huge(value):
        return f"a whole number of {value.bit_length():,} bits"
    return shown(value, _SHOWN_CHARACTERS)


def _expected(option: Field[Any]) -> str:
    if choices := choices_of(option):
        return f"{', '.join(choices[:-1])} or {choices[-1]}"
    if option.name == "device":
        return "a device that torch knows, such as cpu, cuda, cuda:1 or mps"
    return _EXPECTED[option.type]  # type: ignore[index]


def _nearest(option: Field[Any], value: Any) -> str:
    choices = ("cpu", "cuda", "mps", "xpu") if option.name == "device" else choices_of(option)
    here = value_here(value) if choices else ""
    if here.partition(":")[0] in choices:
        return f" Did you mean {here}?"
    return did_you_mean(value, choices) if isinstance(value, str) else ""
