"""Declares run options: each with its type, default, meaning and range, in the room it belongs to.

A room's `options.py` has its groups, which `config/options/run_options.py` puts together. This file stands below all
rooms, since each of them declares options; and the files with the groups import nothing that takes long, since the
completion of a command line reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")

MAX_SEED = 2**32 - 1  # what numpy.random.seed takes; torch and random take more


@dataclass(frozen=True)
class Range:
    """The values that an option accepts, as a test and in words."""

    holds: Callable[[Any], bool]
    text: str


ANY_NUMBER = Range(math.isfinite, "a finite number")
POSITIVE = Range(lambda x: 0 < x < math.inf, "greater than 0")
ABOVE_ONE = Range(lambda x: 1 < x < math.inf, "greater than 1")
FRACTION = Range(lambda x: 0 < x < 1, "between 0 and 1, both excluded")
AT_LEAST_ZERO = Range(lambda x: 0 <= x < math.inf, "0 or more")
AT_LEAST_ONE = Range(lambda x: x >= 1, "1 or more")
AT_LEAST_FOUR = Range(lambda x: x >= 4, "4 or more")
SEED = Range(lambda x: 0 <= x <= MAX_SEED, f"from 0 to {MAX_SEED}")


def option(
    default: Any, text: str, within: Range | None = None, *, changes_training: bool | None = None, rare: bool = False
) -> Any:
    """Declare an option by its default and meaning, in a class that `option_group` makes a group.

    within: the numbers that it accepts; changes_training: whether a resumed run must keep it (default: as the group
    says); rare: whether only `--help all` shows it.
    """
    metadata = {"help": text, "within": within, "changes_training": changes_training, "rare": rare}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def option_group(title: str, changes_training: bool = True) -> Callable[[type[T]], type[T]]:
    """Make a class a group of options. changes_training: whether a resumed run must keep them."""

    def declare(group: type[T]) -> type[T]:
        for declared in _fields_of(group).values():
            metadata = {"group": title, **declared.metadata}
            if metadata["changes_training"] is None:
                metadata["changes_training"] = changes_training
            declared.metadata = MappingProxyType(metadata)
        return group

    return declare


def composed_of(*groups: type) -> Callable[[type[T]], type[T]]:
    """Make a class a frozen dataclass whose fields are the options of the groups, in their order.

    No class inherits from a group: what a room declares is data.
    """

    def compose(kind: type[T]) -> type[T]:
        for group in groups:
            hints = get_type_hints(group)
            for name, declared in _fields_of(group).items():
                kind.__annotations__[name] = hints[name]
                setattr(kind, name, declared)
        return dataclass(frozen=True, init=False, eq=False, repr=False)(kind)

    return compose


def _fields_of(group: type) -> Mapping[str, Field[Any]]:
    return {name: declared for name, declared in vars(group).items() if isinstance(declared, Field)}
