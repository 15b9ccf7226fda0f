"""Loads saved states into live objects: checks that they fit, and undoes a load that fails."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from amp_recipes.checkpoint.background import without_forks
from amp_recipes.checkpoint.folder import RANK_MARK, STATE_SUFFIX, Damaged
from amp_recipes.checkpoint.names import clean_names, clean_state, live_state
from amp_recipes.checkpoint.shards import Stored
from amp_recipes.checkpoint.state_format import PackedState, pack_state
from amp_recipes.distributed.torch_private import dtensor_like
from amp_recipes.errors import CheckpointError, ConfigError, listed
from amp_recipes.modules.nested import tensors_in
from amp_recipes.modules.sharded import is_sharded, local
from amp_recipes.state.preserved import has_state

_RECOVERABLE_PATTERN = re.compile(r"\w[\w.+-]*")  # safe as a file name on every platform
_MAX_NAME_BYTES = 255 - len(STATE_SUFFIX)


def check_recoverable(name: str, obj: Any, taken: Mapping[str, Any]) -> None:
    """Raise ConfigError if a recoverable's name is no plain file name or taken, or if it has no state to save."""
    if not isinstance(name, str) or not _RECOVERABLE_PATTERN.fullmatch(name):
        raise ConfigError(
            f"Recoverable {name!r}: a recoverable's name is a file name of letters, digits, '_', '-', '+' and '.'."
        )
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise ConfigError(f"Recoverable {name[:20]}…: its name is longer than {_MAX_NAME_BYTES} bytes.")
    if name in taken:
        taken_by = type(taken[name]).__name__
        raise ConfigError(f"Recoverable {name!r} is already a {taken_by}; choose another name.")
    if isinstance(obj, type) or not has_state(obj):
        what = f"the class {obj.__name__}" if isinstance(obj, type) else f"a {type(obj).__name__}"
        raise ConfigError(
            f"Recoverable {name!r} is {what}; expected an object with state_dict() and load_state_dict()."
        )


def pack_recoverable(name: str, obj: Any) -> PackedState:
    """The state of a live object, taken apart for its file, under names without wrappers. Raises CheckpointError."""
    try:
        state = obj.state_dict()
    except Exception as error:
        kind = type(obj).__name__
        raise CheckpointError(
            f"state_dict() of recoverable {name!r} ({kind}) raised {type(error).__name__}: {error}."
        ) from error
    return pack_state(
        clean_state(obj, state) if isinstance(obj, nn.Module) else state, f"{name!r} ({type(obj).__name__})"
    )


# ---------------------------------------------------------------------- before a save


def trainable_names(obj: Any) -> frozenset[str]:
    """The names, as its file has them, of the parameters that training changes; none for what is no module."""
    if not isinstance(obj, nn.Module):
        return frozenset()
    parameters = obj.named_parameters(remove_duplicate=False)
    names = [name for name, parameter in parameters if parameter.requires_grad]
    return frozenset(clean_names(obj, names).values())


def nonfinite_parameters(states: Mapping[str, PackedState], trainable: Mapping[str, frozenset[str]]) -> list[str]:
    """The parameters that training changes and that hold NaN or infinities. One read per device."""
    tensors = {
        f"{name.partition(RANK_MARK)[0]}.{key}": tensor
        for name, state in states.items()
        for key, tensor in state.tensors.items()
        if key in trainable[name]
    }
    return _with_bad_numbers(tensors, lambda extremes: ~extremes.isfinite())


def _with_bad_numbers(tensors: Mapping[str, Tensor], are_bad: Callable[[Tensor], Tensor]) -> list[str]:
    by_device: dict[torch.device, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            by_device.setdefault(tensor.device, {})[name] = _extremes(tensor)
    with without_forks():
        rows = {
            device: are_bad(torch.stack(list(found.values()))).any(1).tolist() for device, found in by_device.items()
        }
    return [name for device, found in by_device.items() for name, bad in zip(found, rows[device], strict=True) if bad]


def refuse_nonfinite(bad: Iterable[str]) -> None:
    """Raise CheckpointError if there are any; bad: names of parameters."""
    bad = list(dict.fromkeys(bad))
    if bad:
        raise CheckpointError(
            f"parameters are not finite (NaN or infinite): {listed(bad)}. Training has diverged: resume from an "
            "earlier checkpoint with a lower learning rate. If a parameter is meant to hold infinities, freeze it."
        )


@without_forks()
def _extremes(tensor: Tensor) -> Tensor:
    """Least and greatest element, as float64; NaN if there is one. One pass, and no copy for the usual dtypes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor if tensor.dtype != torch.complex32 else tensor.to(torch.complex64))
    if tensor.element_size() < 2:  # the 8-bit floats have no comparison
        tensor = tensor.float()
    return torch.stack(tensor.aminmax()).double()


# ---------------------------------------------------------------------- before a load


def refuse_diverged(recoverables: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Raise Damaged where trained parameters are not finite, or what an optimizer keeps of them is NaN.

    It was written so, by a save that did not look or by another program, and training from it learns nothing.
    """
    weights: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    for name, state in states.items():
        obj = recoverables[name]
        weights |= {f"{name}.{key}": state[key] for key in trainable_names(obj) if _is_dense(state.get(key))}
        if isinstance(obj, Optimizer):
            kept |= _kept_of_parameters(name, state)
    bad = _with_bad_numbers(_here(weights), lambda extremes: ~extremes.isfinite())
    bad += _with_bad_numbers(_here(kept), torch.isnan)
    if bad:
        raise Damaged(f"not finite: {listed(bad)}")


def _kept_of_parameters(name: str, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that an optimizer keeps of its parameters, by what messages call them."""
    kept = state.get("state")
    return {
        f"{name}: {key} of parameter {index}": value
        for index, of_one in (kept.items() if isinstance(kept, Mapping) else ())
        if isinstance(of_one, Mapping)
        for key, value in of_one.items()
        if _is_dense(value) and value.ndim  # a single number, such as a best loss, may be NaN until it is known
    }


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _here(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: local(tensor.detach()) for name, tensor in tensors.items()}


def mismatches(name: str, obj: Any, state: Any) -> list[str]:
    """List what in `state` does not fit `obj`, as far as this is known without loading it."""
    if not isinstance(obj, nn.Module | Optimizer):
        return []
    if not isinstance(state, Mapping):
        return [f"{name}: a {type(state).__name__} in the checkpoint; expected a state dict"]
    live = obj.state_dict()
    if isinstance(obj, nn.Module):
        return _module_mismatches(name, clean_state(obj, live), state)
    here, there = _parameters_per_group(live), _parameters_per_group(state)
    return [] if here == there else [f"{name}: parameters per group are {here} here, {there} in the checkpoint"]


def _parameters_per_group(state: Mapping[str, Any]) -> list[int]:
    return [len(group["params"]) for group in state.get("param_groups", [])]


def _module_mismatches(name: str, live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    problems = [f"{name}.{key}: not in the checkpoint" for key in live if key not in saved]
    problems += [f"{name}.{key}: only in the checkpoint" for key in saved if key not in live]
    for key in live.keys() & saved.keys():
        problem = _difference(live[key], saved[key])
        if problem is not None:
            problems.append(f"{name}.{key}: {problem} in the checkpoint")
    return sorted(problems)


def _difference(here: Any, there: Any) -> str | None:
    """In what a tensor cannot take a saved one: in its shape, or in what kind of numbers it holds."""
    if not (isinstance(here, Tensor) and isinstance(there, Tensor | Stored)) or is_lazy(here):
        return None
    if here.shape != there.shape:
        return f"shape {tuple(here.shape)} here, {tuple(there.shape)}"
    return f"{here.dtype} here, {there.dtype}" if _kind(here.dtype) != _kind(there.dtype) else None


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """What no load may change, as it may the number of bits."""
    return dtype.is_floating_point, dtype.is_complex


# ---------------------------------------------------------------------- the load


def load_all(recoverables: Mapping[str, Any], states: Mapping[str, Any], source: str) -> Callable[[], str]:
    """Give every object its state, or leave all as they are; returns what takes the load back, and says how that went.

    states: as their files have them; source: the checkpoint, for errors. Raises CheckpointError if an object does not
    take its state; those before it then have their former one again, as far as they take that.
    """
    same_precision = not any(_in_other_precision(recoverables[name], state) for name, state in states.items())
    before: dict[str, Any] = {}

    def take_back() -> str:
        lost = [changed for changed, old in before.items() if not _put_back(recoverables[changed], old)]
        if lost:
            return f"Could not restore {', '.join(lost)}: do not train with this model."
        return "All objects were restored to their earlier state."

    for name, state in states.items():
        obj = recoverables[name]
        try:
            before[name] = None
            live = obj.state_dict()
            before[name] = _copied(live)
            obj.load_state_dict(live_state(obj, live, state) if isinstance(obj, nn.Module) else state)
            if same_precision:
                _undo_casts(obj, state)
        except Exception as error:
            raise CheckpointError(
                f"{source}: loading the state of {name!r} ({type(obj).__name__}) failed: {error}. {take_back()}"
            ) from error
    return take_back


def _put_back(obj: Any, state: Any) -> bool:
    try:
        obj.load_state_dict(state)
        _undo_casts(obj, state)
    except Exception:
        return False
    return True


def _in_other_precision(obj: Any, state: Any) -> bool:
    """Whether a module's parameters have other dtypes than they had when they were saved."""
    if not isinstance(obj, nn.Module):
        return False
    live = clean_state(obj, obj.state_dict())
    pairs = [(live[key], state[key]) for key in live.keys() & state.keys()]
    return any(
        isinstance(here, Tensor) and isinstance(there, Tensor) and not is_lazy(here) and here.dtype != there.dtype
        for here, there in pairs
    )


def _undo_casts(obj: Any, state: Any) -> None:
    """Give an optimizer the dtypes of its saved state.

    torch casts it to the parameter's, which rounds what is kept more exactly than that (moments and master weights in
    float32 of bfloat16 parameters). An optimizer that loads its state in its own way knows what it does.
    """
    if not isinstance(obj, Optimizer) or type(obj).load_state_dict is not Optimizer.load_state_dict:
        return
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [parameter for group in obj.param_groups for parameter in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        if parameter in obj.state and index in state["state"]:
            obj.state[parameter] = _not_cast(obj.state[parameter], state["state"][index])


def _not_cast(live: Any, saved: Any) -> Any:
    """`live`, but where a tensor has another dtype than in `saved`, the saved one on the live one's device."""
    if isinstance(live, Tensor) and isinstance(saved, Tensor):
        return live if live.dtype == saved.dtype else saved.to(live.device, copy=True)
    if isinstance(live, dict) and isinstance(saved, dict):
        live.update({key: _not_cast(live[key], saved[key]) for key in live.keys() & saved.keys()})
    elif type(live) in (list, tuple) and type(live) is type(saved):
        return type(live)(map(_not_cast, live, saved))
    return live


def _copied(state: Any) -> Any:
    """A copy that shares nothing with `state`; its tensors in host memory, where there is more room."""
    return deepcopy(state, {id(tensor): _on_host(tensor) for tensor in tensors_in(state)})


def _on_host(tensor: Tensor) -> Tensor:
    if is_lazy(tensor):
        return tensor
    part = local(tensor.detach()).to("cpu", copy=True)
    return dtensor_like(tensor, part) if is_sharded(tensor) else part
