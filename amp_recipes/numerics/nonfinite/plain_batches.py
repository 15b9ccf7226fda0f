"""Splits batches of any structure into parts that a file can hold, and joins them again.

A state file holds dicts, lists, tuples, tensors, arrays and numbers. Named tuples and dataclasses are taken apart, and
the class is noted by name; it is looked up among what the process has imported, and put together without calling any
of its code. What else a batch holds is named and left out.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch

from amp_recipes.checkpoint import plain_problem
from amp_recipes.errors import CheckpointError

_MAX_DEPTH = 60  # of containers; a state file takes 100
_CONTAINERS = (dict, OrderedDict, list, tuple)

Path = tuple[Any, ...]  # of keys, indices and field names


@dataclass
class PlainBatches:
    """Batches as a file can hold them.

    values: the batches; forms: path, kind ("namedtuple", "dataclass", "requires_grad") and class of what is made of
    them again; left_out: what could not be taken along, in words; it is None in `values`.
    """

    values: list[Any]
    forms: list[tuple[Path, str, str]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, batches: list[Any]) -> PlainBatches:
        """Split batches; their tensors stay as they are."""
        taken = cls([])
        taken.values = [taken._plain(batch, (index,)) for index, batch in enumerate(batches)]
        return taken

    def restored(self) -> list[Any]:
        """The batches. Raises CheckpointError where a class is not there, or is another than it was."""
        forms: dict[Path, list[tuple[str, str]]] = {}
        for path, kind, name in self.forms:
            forms.setdefault(tuple(path), []).append((kind, name))
        return [_rebuilt(value, (index,), forms) for index, value in enumerate(self.values)]

    def _plain(self, value: Any, path: Path) -> Any:
        kind = type(value)
        if len(path) > _MAX_DEPTH:
            return self._leave_out(path, f"nested more than {_MAX_DEPTH} levels deep, or contains itself")
        if kind in (dict, OrderedDict):
            return kind((key, self._plain(item, (*path, key))) for key, item in value.items())
        if kind in (list, tuple):
            return kind(self._items(value, path))
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            self.forms.append((path, "namedtuple", _name_of(kind)))
            return self._items(value, path)
        if is_dataclass(value) and not isinstance(value, type):
            self.forms.append((path, "dataclass", _name_of(kind)))
            return {name: self._plain(item, (*path, name)) for name, item in _attributes_of(value)}
        if isinstance(value, torch.Tensor) and value.requires_grad:
            self.forms.append((path, "requires_grad", ""))
        problem = plain_problem(value)
        return value if problem is None else self._leave_out(path, problem)

    def _items(self, values: Iterable[Any], path: Path) -> list[Any]:
        return [self._plain(item, (*path, index)) for index, item in enumerate(values)]

    def _leave_out(self, path: Path, why: str) -> None:
        first, *rest = path
        self.left_out.append(f"batch {first}{''.join(f'[{key!r}]' for key in rest[:8])} is {why}")


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass that are set, and what else stands on the object."""
    for name in dict.fromkeys([*(each.name for each in fields(value)), *getattr(value, "__dict__", ())]):
        if hasattr(value, name):
            yield name, getattr(value, name)


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _rebuilt(value: Any, path: Path, forms: dict[Path, list[tuple[str, str]]]) -> Any:
    if isinstance(value, dict):
        for key in value:
            value[key] = _rebuilt(value[key], (*path, key), forms)
    elif type(value) in (list, tuple):
        value = type(value)(_rebuilt(item, (*path, index), forms) for index, item in enumerate(value))
    for kind, name in forms.get(path, ()):
        value = value.requires_grad_() if kind == "requires_grad" else _made(kind, name, value)
    return value


def _made(kind: str, name: str, value: Any) -> Any:
    """An object of the named class, of what it was taken apart into; none of the class's code runs."""
    module, _, qualified = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    if isinstance(found, type) and kind == "namedtuple" and _is_tuple_of(found, len(value)):
        return tuple.__new__(found, value)
    if isinstance(found, type) and kind == "dataclass" and is_dataclass(found) and _takes(found, value):
        made = object.__new__(found)
        for key, item in value.items():
            object.__setattr__(made, key, item)
        return made
    raise CheckpointError(
        f"a batch contains a {qualified} of {module}, which is not imported here as the same {kind}. Import the "
        "module that defines it before you read the folder. `amp-recipes replay` does this by running the recipe's "
        "script."
    )


def _is_tuple_of(found: type, length: int) -> bool:
    return issubclass(found, tuple) and len(getattr(found, "_fields", ())) == length


def _takes(found: type, values: dict[str, Any]) -> bool:
    """Whether objects of a dataclass can have these attributes."""
    return not hasattr(found, "__slots__") or {each.name for each in fields(found)} >= values.keys()
