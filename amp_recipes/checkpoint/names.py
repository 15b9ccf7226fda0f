"""Removes the names of wrappers from a module's state, so that a checkpoint has the names of the model itself.

`torch.compile`, DistributedDataParallel and DataParallel put a module inside one of theirs, which shows in every key
as `_orig_mod.` or `module.`. Whether a part of a key is such a wrapper is seen in the module tree and not in the text,
so that a submodule of the user's that happens to be called `module` keeps its name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import nn

from amp_recipes.modules.torch_private import (
    COMPILED_MODULE,
    DYNAMO,
    children_of,
    set_versions_of_state,
    versions_of_state,
)


def clean_names(module: nn.Module, keys: Iterable[str] | None = None) -> dict[str, str]:
    """Live key -> its name without wrappers, for the keys of the module's state dict (or those given)."""
    keys = list(module.state_dict() if keys is None else keys)
    if not is_wrapped(module):
        return {key: key for key in keys}
    names = {key: clean_name(module, key) for key in keys}
    if len(set(names.values())) < len(keys):  # a wrapper with a parameter of its own that is called like an inner one
        return {key: key for key in keys}
    return names


def clean_name(module: nn.Module, name: str) -> str:
    """`name` (of a submodule, parameter or buffer of `module`) without the parts that stand for wrappers."""
    kept, at = [], module
    for part in name.split("."):
        child = children_of(at).get(part) if isinstance(at, nn.Module) else None
        if child is None or _wrapped_as(type(at)) != part:
            kept.append(part)
        at = child
    return ".".join(kept)


def is_wrapped(module: nn.Module) -> bool:
    """Whether there is a wrapper in `module` at all, itself included."""
    return any(_wrapped_as(type(part)) for part in module.modules())


def clean_state(module: nn.Module, state: Any) -> Any:
    """`state`, which `module.state_dict()` returned, with clean names."""
    if not isinstance(state, Mapping) or not is_wrapped(module):
        return state
    names = clean_names(module, state)
    metadata = versions_of_state(state)
    if metadata is not None:
        # The wrapper's own entry comes first, and that of the module inside replaces it.
        metadata = OrderedDict((clean_name(module, key), value) for key, value in metadata.items())
    return _like(state, {names[key]: value for key, value in state.items()}, metadata)


def live_state(module: nn.Module, live: Mapping[str, Any], state: Any) -> Any:
    """`state`, which has clean names, as `module` takes it; live: what its `state_dict()` returns now."""
    if not isinstance(state, Mapping) or not is_wrapped(module):
        return state
    names = {clean: key for key, clean in clean_names(module, live).items()}
    metadata = versions_of_state(state)
    if metadata is not None:
        prefixes = [*(versions_of_state(live) or {})]
        known = {prefix: clean_name(module, prefix) for prefix in prefixes}
        metadata = OrderedDict((key, metadata[clean]) for key, clean in known.items() if clean in metadata)
    return _like(state, {names.get(key, key): value for key, value in state.items()}, metadata)


def _like(state: Mapping[str, Any], entries: dict[str, Any], metadata: Any) -> dict[str, Any]:
    if not isinstance(state, OrderedDict):
        return entries
    renamed = OrderedDict(entries)
    if metadata is not None:
        set_versions_of_state(renamed, metadata)
    return renamed


@cache
def _wrapped_as(kind: type) -> str | None:
    """The name under which modules of this class hold the one that they wrap; None if they wrap none."""
    if issubclass(kind, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    # By name, since importing torch._dynamo takes a second that only those who compile should pay.
    compiled = any(base.__name__ == "OptimizedModule" and base.__module__.startswith(DYNAMO) for base in kind.mro())
    return COMPILED_MODULE if compiled else None
