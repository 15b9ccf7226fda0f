"""Finds hazards in the calls of the user's code that autocast skips, refuses, or treats differently on CUDA."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from amp_recipes.files.user_code import Line, user_line
from amp_recipes.modules.devices import autocast_device_types
from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.hazards.list import Found, Grade, library_line
from amp_recipes.numerics.hazards.modules import NAMES
from amp_recipes.numerics.ops.lists import DOCUMENTED, FLOAT32, LOWER_PRECISION, RAISES, policy
from amp_recipes.numerics.watch.observe import Attribution
from amp_recipes.numerics.watch.op_kinds import names

_BACKWARDS = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
# A CPU runs these as they are given, where CUDA casts them.
_CAST_ON_CUDA_ALONE = names("mv addmv addr")
# They move, pick or repeat values, so that the precision they run in changes none.
_MOVES = names("""max_pool3d max_unpool2d max_unpool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d
    reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d view_as_complex""")
# In place they keep the dtype of what they write into.
_ARITHMETIC = names("add sub mul div addcmul addcdiv lerp")
_TORCHS = str(Path(torch.__file__).parent)


class CallHazards(TorchFunctionMode):
    """Looks at the calls of torch's functions, above autocast: what the user gave, and whether autocast is on.

    calling: the function that runs; is_under_autocast: whether it was called so (kernels cannot tell: what dispatches
    them switches autocast off); escapes: whether it was called as autocast does not touch. at: knows the module;
    is_wide_on_cuda: whether CUDA would have kept a tensor in fp32.
    """

    def __init__(
        self, found: Found, device_type: str, at: Attribution, is_wide_on_cuda: Callable[[torch.Tensor], bool]
    ) -> None:
        super().__init__()
        self._found = found
        self._device_type = device_type
        self._has_autocast = device_type in autocast_device_types()
        # Whose rules count: this device's, and for a rehearsal on a CPU those of CUDA.
        judged = [device_type, "cuda"] if device_type == "cpu" else [device_type]
        self._judged = [judge for judge in judged if judge in DOCUMENTED]
        self._at = at
        self.calling = ""
        self.is_under_autocast = False
        self.escapes = False
        self._is_wide_on_cuda = is_wide_on_cuda

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.is_under_autocast = self._is_autocast_on()
        self.calling = getattr(func, "__name__", "")
        self.escapes = False
        if self.is_under_autocast and self.calling != "__get__":
            self._look(func, self.calling, args, kwargs)
        return func(*args, **kwargs)

    def before_step(self, *_: Any) -> None:
        """An optimizer steps."""
        if self._is_autocast_on() and torch.is_autocast_cache_enabled():
            self.note_step(user_line())

    def _is_autocast_on(self) -> bool:
        return self._has_autocast and torch.is_autocast_enabled(self._device_type)

    def note_step(self, line: Line | None) -> None:
        """An optimizer stepped inside the autocast region, called from `line`."""
        message = (
            "an optimizer steps inside the autocast region. Autocast keeps low-precision copies of the weights, so a "
            "later forward in the same region uses the old weights. Leave the region before the step."
        )
        self._found.add("step_under_autocast", message, line, "wrong")

    def _look(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in _BACKWARDS:
            message = (
                "the backward runs inside the autocast region, which then casts the backward's own matrix products, "
                "also those of fp32 regions and pinned modules. Leave the region before the backward."
            )
            self._add("backward_under_autocast", message, "risk")
            return
        call = _how_called(name, args, kwargs)
        self.escapes = bool(call.how)
        if call.how and not _is_torchs(_calling_frame(func)):
            self._escaped(call, _floating(args, kwargs))
        if name == "binary_cross_entropy" and RAISES in [policy(judge, name) for judge in self._judged]:
            message = (
                "binary_cross_entropy raises an error under CUDA's autocast, because fp16 cannot hold its gradients. "
                "Use binary_cross_entropy_with_logits (BCEWithLogitsLoss) on the logits, or disable autocast for it."
            )
            self._add("bce", message, "wrong")
        elif self._device_type == "cpu":
            self._other_on_cuda(name, args, kwargs)

    def _escaped(self, call: _Call, given: list[torch.Tensor]) -> None:
        """A call that autocast leaves alone for the way it is made."""
        for device_type in self._judged:
            self._left_alone(call, given, device_type)
        if call.base in _ARITHMETIC and call.how == "in place":
            self._narrowed(call.name, given)

    def _left_alone(self, call: _Call, given: list[torch.Tensor], device_type: str) -> None:
        """A call in place, with out= or dtype= of what autocast would cast, where that makes a difference."""
        rule = policy(device_type, call.base)
        if rule == FLOAT32:
            found = self._low_dtypes(call, given, device_type)
            if not found:
                return
            does, so = f"runs {call.base} in fp32", f"this one runs in {' and '.join(found)}"
        elif rule == LOWER_PRECISION and call.asked is None and any(tensor.dtype is torch.float32 for tensor in given):
            does, so = f"casts {call.base} to low precision", "this one runs in fp32, or raises where dtypes differ"
        else:
            return
        on = "" if device_type == self._device_type else "CUDA's "
        message = f"{call.name} {call.how}: {on}autocast {does}, but does not change calls {call.how}, so {so}."
        self._add("not_autocast", message, "risk", what=(call.name, call.how))

    def _low_dtypes(self, call: _Call, given: list[torch.Tensor], device_type: str) -> list[str]:
        """In which low dtypes the call runs: the one that it asks for, else those that it is given."""
        if call.asked is not None:
            return [NAMES[call.asked]] if call.asked in NAMES else []
        low = [tensor for tensor in given if tensor.dtype in NAMES]
        if device_type == "cuda":
            low = [tensor for tensor in low if not self._is_wide_on_cuda(tensor)]
        return sorted({NAMES[tensor.dtype] for tensor in low})

    def _narrowed(self, name: str, given: list[torch.Tensor]) -> None:
        """A sum or product that would be fp32, written into low precision."""
        target, *others = given or [None]
        if target is None or target.dtype not in NAMES or self._is_wide_on_cuda(target):
            return
        if any(other.dtype is torch.float32 and other.ndim for other in others):
            into = NAMES[target.dtype]
            message = f"{name} in place writes its fp32 result into {into}: out of place it stays fp32."
            self._add("not_autocast", message, "note", what=name)

    def _other_on_cuda(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Report an op that a CPU runs in fp32 and CUDA does not."""
        if name in _MOVES or not (name == "cross_entropy" or _differs_on_cuda(name)):
            return
        does = self._does_on_cuda(name, _floating(args, kwargs))
        if does:
            self._add("cpu_is_not_cuda", f"{name} runs in fp32 here; CUDA's autocast {does}.", "note", what=name)

    def _does_on_cuda(self, name: str, given: list[torch.Tensor]) -> str:
        """Return in words what CUDA's autocast does with the call; empty if there is no difference."""
        if name in _CAST_ON_CUDA_ALONE:
            return "casts it to low precision" if any(tensor.dtype is torch.float32 for tensor in given) else ""
        if not any(tensor.dtype in NAMES and not self._is_wide_on_cuda(tensor) for tensor in given):
            return ""
        if name == "cross_entropy":
            return "rounds its log_softmax to the dtype of the logits: give it logits.float()"
        if policy("cuda", name) is not None:
            return "runs it in the widest dtype of its inputs"
        return "leaves it in the dtype of its input, where CUDA may not support it"

    def _add(self, kind: str, message: str, grade: Grade, what: Any = "") -> None:
        module = self._at.place.module
        is_about_line = kind != "cpu_is_not_cuda"
        self._found.add(kind, message, user_line(), grade, "", module, what, is_about_line, library_line())


def _floating(*values: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(*values) if tensor.is_floating_point()]


class _Call(NamedTuple):
    """A call of torch's: how it escapes autocast (empty: it does not), what it calls, the dtype that it asks for."""

    name: str
    how: str
    base: str
    asked: torch.dtype | None


def _how_called(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    if name.endswith("_") and not name.endswith("__"):
        return _Call(name, "in place", name.rstrip("_"), None)
    if kwargs.get("out") is not None:
        return _Call(name, "with out=", name, None)
    asked = kwargs.get("dtype") or next((value for value in args if isinstance(value, torch.dtype)), None)
    return _Call(name, "" if asked is None else "with dtype=", name, asked)


def _differs_on_cuda(name: str) -> bool:
    here, there = policy("cpu", name), policy("cuda", name)
    return name in _CAST_ON_CUDA_ALONE or (here == FLOAT32 and there not in (FLOAT32, RAISES))


def _calling_frame(func: Any) -> FrameType | None:
    """Return the frame that called `func`, without those of torch's own Python functions."""
    passed = (getattr(func, "__code__", None), overrides.handle_torch_function.__code__)
    frames = walk_stack(sys._getframe(3))  # above this, _look and __torch_function__
    return next((frame for frame, _ in frames if frame.f_code not in passed), None)


def _is_torchs(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_TORCHS)
