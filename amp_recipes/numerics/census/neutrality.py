"""Decides whether watching a step changed it, and which modules it changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.trial import Outcome
from amp_recipes.numerics.watch.observe import Attribution, OpWatch, dtype_name
from amp_recipes.precision.torch_private import without_modes

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(outcome: Outcome, other: Outcome) -> bool:
    """Whether losses and gradients are the same, bit for bit (a NaN equals itself)."""
    if len(outcome.losses) != len(other.losses) or outcome.gradients.keys() != other.gradients.keys():
        return False
    pairs = [*zip(outcome.losses, other.losses, strict=True)]
    pairs += [(gradient, other.gradients[name]) for name, gradient in outcome.gradients.items()]
    return all(one.dtype == two.dtype and torch.equal(_bits(one), _bits(two)) for one, two in pairs)


def differing_modules(modules: nn.Module, run: Callable[..., Outcome]) -> list[str]:
    """Modules whose output is another when `run(watch=...)` is watched, the first to end first, with what changed.

    Two runs with a hook on each module. Empty where they agree: then what changes is in no module, or the hook itself
    changes the path. Later modules mostly differ because earlier ones do.
    """
    bare, watched = _Outputs(modules), _Outputs(modules)
    run(watch=[bare])
    silent = OpWatch(Attribution(modules), lambda *_: None)  # sees every op and does nothing
    run(watch=[watched, silent])
    found: dict[str, str] = {}
    for (name, before), (_, after) in zip(bare.seen, watched.seen, strict=False):
        if name in found or len(before) != len(after):
            continue
        for (dtype_before, bits), (dtype_after, other_bits) in zip(before, after, strict=True):
            if dtype_before is not dtype_after:
                found[name] = f"{name} ({dtype_name(dtype_before)} -> {dtype_name(dtype_after)})"
            elif bits is not None and int(bits) != int(other_bits):
                found.setdefault(name, f"{name} (other bits)")
    return list(found.values())


class _Outputs:
    """Inside its `with`, records the output of each module's call: dtypes, and a sum over the bits."""

    def __init__(self, modules: nn.Module) -> None:
        self._names = {module: name for name, module in modules.named_modules()}
        self.seen: list[tuple[str, list[tuple[torch.dtype, torch.Tensor | None]]]] = []

    def __enter__(self) -> _Outputs:
        self._hook = register_module_forward_hook(self._note)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hook.remove()

    def _note(self, module: nn.Module, _: Any, output: Any) -> None:
        with without_modes(), torch.no_grad():
            told = [(tensor.dtype, _sum_of_bits(tensor)) for tensor in tensors_in(output)]
        self.seen.append((self._names.get(module, f"<{type(module).__name__}>"), told))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    return _bits(tensor).sum(dtype=torch.int64)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as integers."""
    tensor = tensor.detach()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor.resolve_neg().contiguous().view(_INTEGERS[tensor.itemsize])
