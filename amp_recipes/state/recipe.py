"""Saves attributes that a recipe changes between batches, without the recipe registering them."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from amp_recipes.state.preserved import has_state, put_items
from amp_recipes.state.randomness import GENERATORS, generator_state, set_generator_state

logger = logging.getLogger(__name__)

# Statistics are small and always kept; weights and tables are kept once they differ from what they were at first.
_SMALL_BYTES = 64 * 1024
_LARGE_BYTES = 2**26
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
_CHUNK = 2**20
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2**64 divided by the golden ratio, as a signed number: spreads neighbours far apart


_NEITHER = (type, nn.Module, DataLoader)  # no plain values, and what they hold is not kept as one state


class RecipeState:
    """The attributes that a recipe sets or changes on its Brain while it trains, and what has a state among them.

    Kept are plain values (numbers, strings, tensors, arrays, and containers of them), random generators, modules that
    `modules` does not hold, and objects with `state_dict` and `load_state_dict` (also optimizers that nobody entered in
    `optimizers_dict`), on the Brain and in its hparams. Left alone are settings (what never changed since `begin`; a
    new process sets them itself) and what others save.

    own: names of attributes that are the framework's (`not_the_recipes`); saved_elsewhere: objects that have a place
    of their own in checkpoints; problem: says why a value cannot be in a checkpoint, or None; hooked: gives an object
    with a state in the place of one that cannot tell its own, or None.
    """

    def __init__(
        self,
        recipe: Any,
        own: Iterable[str],
        saved_elsewhere: Callable[[], Iterable[Any]],
        problem: Callable[[Any], str | None],
        hooked: Callable[[Any], Any] = lambda value: None,
    ) -> None:
        self._recipe = recipe
        self.not_the_recipes = frozenset(own)
        self._saved_elsewhere = saved_elsewhere
        self._problem = problem
        self._hooked = hooked
        self._at_begin: dict[str, Any] | None = None
        self._moved: set[str] = set()
        self._reported = False
        self._kept: dict[str, Any] | None = None  # copies of what was there at `begin`
        self._names: set[str] = set()

    def begin(self, keep: bool = False) -> None:
        """Training begins, for the first time in this process: what stays as it is now is a setting.

        keep: copy it, as `put_back` needs; tensors of more than 64 MB are left out.
        """
        if self._at_begin is None:
            found = {**self._plain_values(), **{f"{name}:{key}": part for name, key, part in self._module_parts()}}
            self._at_begin = {name: _mark(value) for name, value in found.items()}
            self._names = set(self._attributes())
            if keep:
                self._kept = {name: _copy(value) for name, value in found.items() if _size(value) <= _LARGE_BYTES}

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Make what is not in `state` what it was at `begin`, for a run that goes back in the process that saved it.

        `load_state_dict(state)` then does what it would do in a new process.
        """
        if self._kept is None or self._at_begin is None:
            return
        lost = [*self._put_back_values(state["values"]), *self._put_back_modules(state["modules"])]
        if lost:
            logger.warning(
                "could not restore these to their earlier values, because they are too large to copy: %s",
                ", ".join(lost),
            )

    def _put_back_values(self, saved: Mapping[str, Any]) -> Iterator[str]:
        """Yields the names of those that were not copied."""
        plain = self._plain_values()
        for name in plain.keys() - self._names - saved.keys():
            delattr(*self._place_of(name))
        for name in (self._names & self._at_begin.keys()) - saved.keys():
            if name in plain and _mark(plain[name]) == self._at_begin[name]:
                continue
            if name in self._kept:
                self._set(name, self._kept[name], _on_device(self._kept[name]))
            else:
                yield name

    def _put_back_modules(self, saved: Mapping[str, Any]) -> Iterator[str]:
        """Yields the names of the parts that were not copied."""
        for name, key, part in self._module_parts():
            full = f"{name}:{key}"
            if key in saved.get(name, {}) or full not in self._at_begin or _mark(part) == self._at_begin[full]:
                continue
            if full in self._kept and part.shape == self._kept[full].shape:
                _fill(part, self._kept[full])
            else:
                yield full

    def state_dict(self) -> dict[str, Any]:
        """By name: `values` that changed, and the states of `generators`, `objects` and `modules`."""
        generators, objects, left_out = {}, {}, {}
        for name, value in self._holders():
            state = _state_of(value)
            problem = self._problem(state)
            if problem is not None:
                left_out[name] = problem
            elif isinstance(value, GENERATORS):
                generators[name] = state
            else:
                objects[name] = state
        plain = self._plain_values(left_out)
        values = {
            name: {"value": _copy(value), "on_device": _on_device(value)}
            for name, value in plain.items()
            if self._has_moved(name, value)
        }
        modules: dict[str, dict[str, Tensor]] = {}
        for name, key, part in self._module_parts():
            if part.nbytes <= _SMALL_BYTES or self._has_moved(f"{name}:{key}", part):
                modules.setdefault(name, {})[key] = part.detach().clone()
        self._tell(left_out)
        return {"values": values, "generators": generators, "objects": objects, "modules": modules}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the recipe back what `state_dict` returned; what it no longer has an object for is logged."""
        for name, saved in state["values"].items():
            if name not in self.not_the_recipes:  # else it was the recipe's in the version that saved it
                self._set(name, saved["value"], saved["on_device"])
                self._moved.add(name)
        holders = dict(self._holders())
        for name, saved in {**state["generators"], **state["objects"]}.items():
            if name not in holders:
                logger.warning("ignoring the state of '%s' in the checkpoint: this run has no such object", name)
            elif name in state["generators"]:
                set_generator_state(holders[name], saved)
            else:
                holders[name].load_state_dict(saved)
        for name, key, part in self._module_parts():
            saved = state["modules"].get(name, {}).get(key)
            if saved is not None and saved.shape == part.shape:
                _fill(part, saved)
                self._moved.add(f"{name}:{key}")

    def generators(self) -> dict[str, Any]:
        """The random generators among the attributes, by name."""
        return {name: value for name, value in self._attributes().items() if isinstance(value, GENERATORS)}

    # ------------------------------------------------------------------ finding the recipe's values

    def _attributes(self) -> dict[str, Any]:
        """Everything that may hold something, under one name each: the Brain's own, and hparams as `hparams.name`."""
        own = {name: value for name, value in vars(self._recipe).items() if name not in self.not_the_recipes}
        return {**own, **{f"hparams.{name}": value for name, value in vars(self._recipe.hparams).items()}}

    def _plain_values(self, left_out: dict[str, str] | None = None) -> dict[str, Any]:
        """The attributes that a checkpoint can hold; left_out: takes those that it cannot, with the reason."""
        found = {}
        for name, value in self._attributes().items():
            if isinstance(value, _NEITHER) or self._holder_of(value) is not None:
                continue
            problem = self._problem(value)
            if problem is None:
                found[name] = value
            elif left_out is not None and not callable(value) and self._may_remember(value):
                left_out[name] = problem
        return found

    def _may_remember(self, value: Any, depth: int = 8) -> bool:
        """Whether training might change `value` unseen: not where it is data, modules saved elsewhere, or a path.

        depth: how deep containers are looked into.
        """
        if isinstance(value, nn.Module):
            saved = {id(part) for _, part in _parts(self._recipe.modules)}
            return any(id(part) not in saved for _, part in _parts(value))
        if isinstance(value, (Dataset, DataLoader, Sampler, Path)):
            return False
        problems = [item for item in _inside(value) if self._problem(item) is not None]
        if problems and depth:
            return any(self._may_remember(item, depth - 1) for item in problems)
        return not callable(value)

    def _holders(self) -> Iterator[tuple[str, Any]]:
        """Generators and objects that have a state, each once."""
        seen = {id(each) for each in self._saved_elsewhere()}
        for name, value in self._attributes().items():
            holder = None if id(value) in seen else self._holder_of(value)
            if holder is not None:
                seen.add(id(value))
                yield name, holder

    def _holder_of(self, value: Any) -> Any:
        """Return the object that has the state of `value`: itself, or another one; None if there is none."""
        if isinstance(value, _NEITHER):
            return None
        return value if isinstance(value, GENERATORS) or has_state(value) else self._hooked(value)

    def _module_parts(self) -> Iterator[tuple[str, str, Tensor]]:
        """Parameters and buffers, each once, of the recipe's modules that are not in `modules`."""
        seen = {id(part) for _, part in _parts(self._recipe.modules)}
        for name, value in self._attributes().items():
            if isinstance(value, nn.Module):
                for key, part in _parts(value):
                    if id(part) not in seen and self._problem(part.detach()) is None:
                        seen.add(id(part))
                        yield name, key, part

    def _has_moved(self, name: str, value: Any) -> bool:
        if name not in self._moved:
            begin = self._at_begin or {}
            if name in begin and begin[name] == _mark(value):
                return False
            self._moved.add(name)
        return True

    def _set(self, name: str, value: Any, on_device: bool) -> None:
        holder, attribute = self._place_of(name)
        value = _copy(value, self._recipe.device if on_device else None)
        setattr(holder, attribute, _like(value, getattr(holder, attribute, None)))

    def _place_of(self, name: str) -> tuple[Any, str]:
        """The object that has what `_attributes` calls `name`, and what it is called there."""
        attribute = name.removeprefix("hparams.")
        return self._recipe if attribute == name else self._recipe.hparams, attribute

    def _tell(self, left_out: Mapping[str, str]) -> None:
        if left_out and not self._reported:
            self._reported = True
            listed = "; ".join(f"{name} ({problem})" for name, problem in left_out.items())
            logger.info("these are not saved in checkpoints, so a resumed run creates them again: %s", listed)


def _inside(value: Any) -> Iterable[Any]:
    """Return the contents of a container or a dataclass."""
    if is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple, deque, set, frozenset)) else ()


def _leaves(value: Any) -> Iterator[Any]:
    """The tensors and arrays in a plain value, at any depth."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    for item in _inside(value):
        yield from _leaves(item)


def _size(value: Any) -> int:
    """Bytes of the tensors and arrays in it."""
    return sum(leaf.nbytes for leaf in _leaves(value))


def _on_device(value: Any) -> bool:
    """Whether a tensor in it lies on an accelerator."""
    return any(isinstance(leaf, Tensor) and leaf.device.type != "cpu" for leaf in _leaves(value))


def _copy(value: Any, device: torch.device | None = None) -> Any:
    """`value` apart from the live one; device: where its tensors go (default: they stay)."""
    tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, Tensor)]
    return deepcopy(value, {id(tensor): tensor.detach().to(device, copy=True) for tensor in tensors})


def _state_of(holder: Any) -> Any:
    return generator_state(holder) if isinstance(holder, GENERATORS) else holder.state_dict()


def _parts(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _mark(value: Any) -> Any:
    """Return a mark by which a later change of `value` is noticed, at little cost in memory."""
    if isinstance(value, Tensor):
        # By content: writes through `.data` and by torch's own kernels do not change the version counter.
        return id(value), value.dtype, value.shape, _content(value.detach())
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, hash(value.tobytes())
    if isinstance(value, Mapping):
        return type(value), [(key, _mark(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), [_mark(item) for item in value]
    if isinstance(value, set):
        return set, frozenset(value)  # not the set itself, which would be equal to whatever it becomes
    return type(value), value


def _content(tensor: Tensor) -> int:
    """A hash of the bits, made where the tensor lies: each element times an odd number of its own, modulo 2**64."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    bits = tensor.contiguous().flatten().view(_INTEGERS[tensor.itemsize])
    chunk = min(bits.numel(), _CHUNK)
    factors = torch.arange(chunk, device=bits.device) * _ODD * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(chunk) if chunk else ():
        total = total * _ODD + (part.long() * factors[: part.numel()]).sum()
    return total.item()


def _like(value: Any, live: Any) -> Any:
    """`value` in the live tensor or container where there is one of its kind, so that other names for it see it too."""
    match live, value:
        case Tensor(), Tensor():
            fits = live.shape == value.shape and live.dtype == value.dtype and not live.is_inference()
            return _fill(live, value) if fits else value
        case list(), list():
            put_items(live, [*map(_like, value, live), *value[len(live) :]])
        case dict(), dict():
            put_items(live, {key: _like(item, live.get(key)) for key, item in value.items()})
        case (set(), set()) | (deque(), deque() | list()):
            put_items(live, value)
        case _:
            return value
    return live


def _fill(live: Tensor, value: Tensor) -> Tensor:
    with torch.no_grad():
        live.copy_(value)
    return live
