"""Finds the modules and parameters in lists, dicts and closures, which torch does not know of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

_REGISTERS = frozenset(vars(nn.Module()))  # attributes in which torch keeps what it knows of
_DEPTH = 3  # containers within containers
_MOST = 1000  # items of a container of layers; one of more is data


def unregistered(modules: nn.Module, holders: Mapping[str, object]) -> dict[str, nn.Module | nn.Parameter]:
    """The modules and parameters that are reached from `modules` or `holders` and that `modules` does not register.

    holders: by name, objects that may have some (a recipe), or functions. The keys tell the way there, as in
    `encoder.blocks[2].up`; what has several ways is given once. Of such a module its own parameters are not given.
    """
    known = {id(each) for each in (*modules.modules(), *modules.parameters())}
    found: dict[str, nn.Module | nn.Parameter] = {}
    owners: list[tuple[str, object]] = [*holders.items(), *modules.named_modules()]
    for where, owner in owners:  # it grows
        for attribute, value in _attributes(owner):
            for name, each in _below(f"{where}.{attribute}" if where else attribute, value, _DEPTH):
                if id(each) not in known:
                    known.add(id(each))
                    found[name] = each
                    owners.append((name, each))
    return found


def how_to_register(names: Iterable[str]) -> list[str]:
    """For each place that holds some of these layers (keys of `unregistered`): what to do, in a sentence."""
    places: dict[str, list[str]] = {}
    for name in names:
        places.setdefault(_place(name), []).append(name)
    return [_advice(place, inside) for place, inside in places.items()]


def _place(name: str) -> str:
    """The list or dict that holds it; else the layer's own name."""
    return name.partition("[")[0] if "[" in name else name


def _advice(place: str, names: list[str]) -> str:
    layers = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    verb = "is" if len(names) == 1 else "are"
    if place.startswith("self."):
        cure = "Add the layer to `modules` of the Brain, and call it from there"
    elif place == names[0]:
        cure = "Make it an attribute of the module that calls it"
    else:
        kind = "nn.ModuleDict" if names[0][len(place) + 1] in "'\"" else "nn.ModuleList"
        cure = f"Make {place} an {kind}"
    return (
        f"{layers} {verb} not registered: torch and pins do not know such a layer, and its weights are not saved, not "
        f"moved to the device, and not trained by an optimizer over the parameters of the modules. {cure}"
    )


def _attributes(owner: object) -> Iterable[tuple[str, Any]]:
    if isinstance(owner, FunctionType):
        return _closure(owner)
    return [(name, value) for name, value in getattr(owner, "__dict__", {}).items() if name not in _REGISTERS]


def _closure(function: FunctionType) -> list[tuple[str, Any]]:
    """The outer variables that a function uses, and its defaults."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    outer = [(name, cell) for name, cell in cells if _is_filled(cell)]
    defaults = enumerate(function.__defaults__ or ())
    return [(name, cell.cell_contents) for name, cell in outer] + [(f"default{i}", value) for i, value in defaults]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _below(name: str, value: Any, depth: int) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    if isinstance(value, nn.Parameter):
        yield name, value
    elif isinstance(value, nn.Module):
        yield from ((f"{name}.{below}" if below else name, module) for below, module in value.named_modules())
    elif depth:
        for part, item in _parts(value):
            yield from _below(f"{name}{part}", item, depth - 1)


def _parts(value: Any) -> Iterable[tuple[str, Any]]:
    """What a container or a function holds, each with what leads there."""
    if isinstance(value, list | tuple) and len(value) <= _MOST:
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, dict) and len(value) <= _MOST:
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, FunctionType):
        return [(f".{name}", item) for name, item in _closure(value)]
    if isinstance(value, partial):
        return [("", value.func), *_parts(value.args), *_parts(value.keywords)]
    return ()
