"""Uses torch's private names for scaling, for kernels over lists, and for instruments that watch every op.

All were seen in torch 2.11.0 and 2.13.0 and may change with any release:
tests/unit/precision/test_torch_private_precision.py says which. What is called in every step or for every op is
torch's own function, without a Python call around it.

Two methods of torch's have private names and are overridden where they are called, so they are not here:
`GradScaler._unscale_grads_` (`LossScaler`) and `TorchDispatchMode._should_skip_dynamo` (`OpWatch`, `CensusWatch`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from types import CodeType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._utils import _flatten_dense_tensors
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass

# ---------------------------------------------------------------------- kernels over lists of tensors

foreach_copy: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
"""Copies each tensor of the second list into that of the first, with few kernels."""

foreach_mul: Callable[..., None] = torch._foreach_mul_
"""Multiplies each tensor of a list by a number, or by a tensor on its device, in place."""

foreach_norm: Callable[..., list[Tensor]] = torch._foreach_norm
"""The L2 norm of each tensor of a list."""

unscale_and_check: Callable[[list[Tensor], Tensor, Tensor], None] = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies each tensor by the third argument, in place, and sets the second to 1 if any number is nonfinite."""

flatten: Callable[[list[Tensor]], Tensor] = _flatten_dense_tensors
"""All numbers of a list of dense tensors in one vector."""

# ---------------------------------------------------------------------- the loss scaler

current_scale: Callable[[torch.amp.GradScaler], Tensor | None] = attrgetter("_scale")
"""A scaler's scale on the device (0-d float32); None before the first loss."""

rounds_of: Callable[[torch.amp.GradScaler], dict[int, dict[str, Any]]] = attrgetter("_per_optimizer_states")
"""By the id of an optimizer: `stage` (OptState) and `found_inf_per_device` since the scale's last update."""

scaler_is_on: Callable[[torch.amp.GradScaler], bool] = attrgetter("_enabled")
"""Whether a scaler scales."""


def switch_scaler(scaler: torch.amp.GradScaler, enabled: bool) -> None:
    """Enable or disable a scaler; its state stays."""
    scaler._enabled = enabled


STEP_TAKES_FOUND_INF = "_step_supports_amp_scaling"
"""Attribute of optimizers whose step reads `found_inf` and skips on the device (fused ones): true, or absent."""


# ---------------------------------------------------------------------- ops, for instruments

Op = OpOverload
"""One overload of an op, as `__torch_dispatch__` gets it."""

DispatchMode = TorchDispatchMode
"""The base class of modes that see each op below autograd."""

without_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Context in which no instrument sees an op."""

without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunction
"""Context in which no `__torch_function__` sees a call."""

is_wrapper: Callable[[object], bool] = is_traceable_wrapper_subclass
"""Whether a tensor's class only wraps other tensors, and tells which (`__tensor_flatten__`)."""

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
"""The logger that reports each op that cannot be traced."""


def fake_tensor_mode(**options: Any) -> AbstractContextManager[Any]:
    """A mode in which ops compute dtypes and shapes alone."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # 0.3 s, which only the rehearsal of ops should pay

    return FakeTensorMode(**options)


def schema_of(op: OpOverload) -> Any:
    """Names and types of the op's arguments and results."""
    return op._schema


def bare_op_name(op: OpOverload) -> str:
    """The op's name without namespace and overload."""
    return op._opname


kernel_of: Callable[[OpOverload], Any] = attrgetter("_op")
"""The function that an overload runs, without the Python frame of its `__call__`. AttributeError: a higher-order op."""


def all_op_names() -> list[str]:
    """All ops that torch's dispatcher knows, with namespace and overload."""
    return torch._C._dispatch_get_all_op_names()


def is_dispatch_key(name: str) -> bool:
    """Whether torch's dispatcher has such a key; RuntimeError is what it has for questions about another."""
    return hasattr(torch._C.DispatchKey, name)


def has_kernel(name: str, dispatch_key: str) -> bool:
    """Whether the op has a kernel of its own for that key, such as "AutocastCPU"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, dispatch_key)


def runs_on(name: str, device_type: str) -> bool:
    """Whether the op has a kernel for the device, also if that is one for all kinds of devices."""
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, torch._C._dispatch_key_for_device(device_type))


# ---------------------------------------------------------------------- autograd, for instruments

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread; -1: none."""

running_node: Callable[[], Node | None] = torch._C._current_autograd_node
"""The node whose backward runs on this thread."""

next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next node that this thread makes."""

BACKWARD_CODE: CodeType = torch.autograd.graph._engine_run_backward.__code__
"""The code of the frame from which Python calls autograd's engine."""

FIRST_GRADIENTS = "_make_grads"
"""The name of torch's function that makes the gradient with which a backward begins."""

COMPILER_FRAMES = (("inner", "_fn"), ("_compile.py", "eval_frame.py"))
"""Names of functions, and ends of files, of the frames that torch.compile puts around a mode's own."""


def node_number(node: Node) -> int:
    """Return the number of nodes this thread made before this one; 2**64 - 1 for one that adds to a leaf's gradient."""
    return node._sequence_nr()


def users_function(context: Any) -> type | None:
    """The `autograd.Function` subclass whose ctx this is."""
    return getattr(type(context), "_forward_cls", None)


def weak_storage(tensor: Tensor) -> int:
    """The address of the tensor's storage, which is not reused until `free_weak_storage`. Raises for sparse ones."""
    return tensor.untyped_storage()._weak_ref()


def free_weak_storage(address: int) -> None:
    """Give back what `weak_storage` took."""
    torch.UntypedStorage._free_weak_ref(address)
