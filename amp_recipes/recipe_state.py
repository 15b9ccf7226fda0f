"""What a recipe remembers between batches, without having said so: kept in checkpoints, so that it is not lost."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from amp_recipes.randomness import GENERATORS, generator_state, set_generator_state

logger = logging.getLogger(__name__)

_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_SEQUENCES = (list, tuple, set, frozenset, deque)
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


class RecipeState:
    """The attributes that a recipe sets or changes on its Brain while it trains, and stateful objects among them.

    Kept are plain values (numbers, strings, tensors, arrays, and containers of them), random generators, and objects
    with `state_dict` and `load_state_dict`, on the Brain or in its hparams. Left alone is what did not change since
    `begin` (a setting, which a new process sets itself), what `saved_elsewhere` names, modules and data loaders.
    own: names of attributes that are the framework's (`not_the_recipes`).
    """

    def __init__(self, recipe: Any, own: Iterable[str], saved_elsewhere: Callable[[], Iterable[Any]]) -> None:
        self._recipe = recipe
        self.not_the_recipes = frozenset(own)
        self._saved_elsewhere = saved_elsewhere
        self._at_begin: dict[str, Any] = {}

    def begin(self) -> None:
        """Training begins: attributes that stay as they are now are settings."""
        self._at_begin = {name: _copy(value) for name, value in self._attributes().items() if _is_plain(value)}

    def state_dict(self) -> dict[str, Any]:
        """`values`: plain attributes that changed; `generators` and `objects`: the states of such attributes."""
        known = {id(it) for it in self._saved_elsewhere()}
        values, generators, objects = {}, {}, {}
        for name, value in self._holders().items():
            if isinstance(value, GENERATORS):
                generators[name] = generator_state(value)
            elif id(value) not in known and _is_stateful(value):
                objects[name] = value.state_dict()
        for name, value in self._attributes().items():
            if _is_plain(value) and not (name in self._at_begin and _same(value, self._at_begin[name])):
                values[name] = {"value": _copy(value), "on_device": _on_device(value)}
        return {"values": values, "generators": generators, "objects": objects}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the recipe back what `state_dict` returned; what it no longer has an object for is logged."""
        for name, saved in state["values"].items():
            if name in self.not_the_recipes:  # it was the recipe's in the version that saved it
                continue
            value = _to(saved["value"], self._recipe.device) if saved["on_device"] else saved["value"]
            setattr(self._recipe, name, _like(value, getattr(self._recipe, name, None)))
        holders = self._holders()
        for name, saved in {**state["generators"], **state["objects"]}.items():
            if name not in holders:
                logger.warning("the checkpoint has a state of '%s', which this run does not have: left out", name)
            elif name in state["generators"]:
                set_generator_state(holders[name], saved)
            else:
                holders[name].load_state_dict(saved)

    def _attributes(self) -> dict[str, Any]:
        return {name: it for name, it in vars(self._recipe).items() if name not in self.not_the_recipes}

    def _holders(self) -> dict[str, Any]:
        """What may hold a state, each under one name: attributes, and hparams as `hparams.name`."""
        found = {**self._attributes(), **{f"hparams.{name}": it for name, it in vars(self._recipe.hparams).items()}}
        first = {id(it): name for name, it in reversed(found.items())}
        return {name: it for name, it in found.items() if first[id(it)] == name}


def _is_stateful(value: Any) -> bool:
    if isinstance(value, (type, nn.Module, DataLoader)):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, _SCALARS) or kind in (Tensor, nn.Parameter):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    if kind in _SEQUENCES:
        return all(map(_is_plain, value))
    return kind in _MAPPINGS and all(_is_plain(key) and _is_plain(item) for key, item in value.items())


def _copy(value: Any) -> Any:
    """`value` as a checkpoint holds it, apart from the live one: deques are lists, dicts are plain."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in _SEQUENCES:
        kind = {deque: list, frozenset: set}.get(type(value), type(value))
        return kind(map(_copy, value))
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (Tensor, np.ndarray)):
        alike = isinstance(other, type(one)) or isinstance(one, nn.Parameter)
        return bool(alike and one.shape == other.shape and one.dtype == other.dtype and (one == other).all())
    if isinstance(one, (list, tuple, deque)):
        both = isinstance(other, (list, tuple)) and len(one) == len(other)
        return both and all(map(_same, one, other))
    if isinstance(one, dict):
        both = isinstance(other, dict) and list(one) == list(other)
        return both and all(_same(item, other[key]) for key, item in one.items())
    return bool(one == other)


def _on_device(value: Any) -> bool:
    """Whether a tensor in `value` lies on an accelerator."""
    if isinstance(value, Tensor):
        return value.device.type != "cpu"
    inside = value.values() if isinstance(value, dict) else value if type(value) in _SEQUENCES else ()
    return any(map(_on_device, inside))


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return type(value)(_to(item, device) for item in value) if type(value) in _SEQUENCES else value


def _like(value: Any, live: Any) -> Any:
    """`value` in the live container where there is one of its kind, so that other names for it see it too."""
    if isinstance(live, (list, deque)) and isinstance(value, list):
        live.clear()
        live.extend(value)
        return live
    if any(isinstance(live, kind) and isinstance(value, kind) for kind in (dict, set)):
        live.clear()
        live.update(value)
        return live
    return value
