"""Uses torch's private names for modules, tensors and nested values; other files call these functions.

All were seen in torch 2.11.0 and 2.13.0 and may change with any release:
tests/unit/modules/test_torch_private_modules.py says which. The names of several processes are in
distributed/torch_private.py, those of AMP and of the instruments in precision/torch_private.py; these
stand lower, because `state` and `modules` need them too.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

SEEN_IN = ("2.11.0", "2.13.0")  # the oldest and the newest that the tests run with
"""The release of torch in which every private name of the three files was seen to work as described."""

# ---------------------------------------------------------------------- modules

COMPILED_MODULE = "_orig_mod"
"""Attribute in which a compiled module (by torch.compile) holds the original module."""

DYNAMO = "torch._dynamo"
"""The compiler's module. Look it up in `sys.modules`: importing it takes 2 s."""

BatchNorm: type[nn.Module] = nn.modules.batchnorm._BatchNorm
"""The base class of all BatchNorm modules, SyncBatchNorm included."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The live register of the module's own parameters, with None for those that are left out (no bias)."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The live register of the module's own buffers: to write to, past `__setattr__`, and to see what appears."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """The live register of the module's children."""
    return module._modules


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """Names of the module's own buffers that its state leaves out."""
    return module._non_persistent_buffers_set


def forward_pre_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The live register of what runs before the module's forward."""
    return module._forward_pre_hooks


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The live register of what runs after the module's forward."""
    return module._forward_hooks


def versions_of_state(state: Any) -> Any:
    """The versions by which modules read states that older releases of torch wrote; None: the state has none."""
    return getattr(state, "_metadata", None)


def set_versions_of_state(state: Any, versions: Any) -> None:
    """Give an OrderedDict the versions that `load_state_dict` looks for."""
    state._metadata = versions


def made_from(script: nn.Module) -> Any:
    """Return the object from which TorchScript made `script`; None for one that was loaded."""
    return getattr(getattr(script, "_concrete_type", None), "py_class", None)


def name_in_script(script: nn.Module) -> str:
    """The dotted name that TorchScript gave to the class, with `__torch__` before it."""
    return script._c._type().qualified_name()


# ---------------------------------------------------------------------- tensors


version_of: Callable[[Tensor], int] = attrgetter("_version")
"""The number of writes to a tensor that autograd has counted. RuntimeError: inference tensors have no version.

Instruments read it for each op, so it is not a Python function.
"""


def sparse_values(tensor: Tensor) -> Tensor:
    """Return the values of a sparse COO tensor, even if it is not coalesced (`values()` then raises)."""
    return tensor._values()


def storage_id(tensor: Tensor) -> int:
    """The address of the tensor's storage object: equal for all that share memory. Raises for sparse and lazy ones."""
    return tensor.untyped_storage()._cdata


# ---------------------------------------------------------------------- loaders


def set_timeout_of_batches(batches: Any, seconds: float) -> None:
    """Set how long a running iterator of a DataLoader with workers waits for a batch; 0: without limit."""
    batches._timeout = seconds


# ---------------------------------------------------------------------- nested values

REGISTER_PYTREE = "torch.utils._pytree.register_pytree_node"
"""Registers a user's own container class with torch."""

tree_leaves: Callable[[Any], list[Any]] = pytree.tree_leaves
"""All values in nested containers that torch knows, in order."""

tree_map: Callable[..., Any] = pytree.tree_map
"""Applies a function to each value of nested containers; returns new containers."""


def pytree_parts(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return a registered container's contents, and a function that rebuilds it; None for any other value.

    The exact class counts, as it does for torch: a subclass of dict is not registered.
    """
    node = pytree.SUPPORTED_NODES.get(type(value))
    if node is None:
        return None
    parts, context = node.flatten_fn(value)
    return list(parts), lambda mapped: node.unflatten_fn(mapped, context)


# ---------------------------------------------------------------------- device types, and torch.compile


def out_of_tree_device_type() -> str:
    """The device type that an accelerator outside of torch's own sources has taken; "privateuseone": none has."""
    return torch._C._get_privateuse1_backend_name()


def assume_constant_result(function: Callable[..., Any]) -> Callable[..., Any]:
    """Do what torch.compiler.assume_constant_result does, without its import of the compiler (2 s)."""
    function._dynamo_marked_constant = True
    return function
