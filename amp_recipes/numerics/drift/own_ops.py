"""Runs a module's own ops in low precision as a low run would, with the modules inside it in fp32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from amp_recipes.numerics.watch.observe import is_registered, unregistered_modules
from amp_recipes.precision import TorchAutocast, map_tensors
from amp_recipes.precision.torch_private import without_modes
from amp_recipes.state.preserved import module_state_kept
from amp_recipes.state.randomness import random_state, set_random_state

LOW = (torch.float16, torch.bfloat16)
_Dtypes = tuple[torch.dtype, ...]


def floating(value: Any) -> list[torch.Tensor]:
    """The dense floating-point and complex tensors in nested containers, in order, each once."""
    found: dict[int, torch.Tensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided:
            found[id(tensor)] = tensor
        return tensor

    map_tensors(note, value)
    return list(found.values())


def hook_forwards(context: ExitStack, module: nn.Module, before: Callable, after: Callable) -> None:
    """Call `before` and `after` around each forward of a module, also around one that raises, until `context` ends."""
    context.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    context.callback(module.register_forward_hook(after, always_call=True).remove)


def hookable(modules: nn.Module, holders: Mapping[str, object] | None = None) -> dict[str, nn.Module]:
    """The modules by the names of places, without those of TorchScript: they take no hooks, and no pins.

    holders: see `unregistered_modules`.
    """
    named = {**dict(modules.named_modules()), **unregistered_modules(modules, holders or {})}
    return {name: module for name, module in named.items() if not isinstance(module, torch.jit.ScriptModule)}


class CallDtypes(ExitStack):
    """Inside this context, records for each call of each module the dtypes of floating inputs and outputs.

    modules: by name, as `hookable` gives them.
    without_gradient: names of the modules that returned floating tensors of which none needs a gradient, while
    gradients were on.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._calls: dict[nn.Module, list[tuple[_Dtypes, _Dtypes]]] = {}
        super().__init__()
        self.without_gradient: set[str] = set()

    def __enter__(self) -> CallDtypes:
        for name, module in self._modules.items():
            self._calls[module] = []
            hook_forwards(self, module, self._before, self._after(name))
        return self

    def of(self, module: nn.Module, call: int) -> tuple[_Dtypes, _Dtypes]:
        """Dtypes of what went into this call of `module` (from 0, recomputation counts too), and of what came out."""
        calls = self._calls.get(module, [])
        return calls[call] if call < len(calls) else ((), ())

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls[module].append((_dtypes(floating((args, kwargs))), ()))

    def _after(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            outputs = floating(output)
            self._calls[module][-1] = (self._calls[module][-1][0], _dtypes(outputs))
            if outputs and torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in outputs):
                self.without_gradient.add(name)

        return hook


def _dtypes(tensors: list[torch.Tensor]) -> _Dtypes:
    return tuple(tensor.dtype for tensor in tensors)


class OwnOps(ExitStack):
    """Inside this context, in an fp32 run, a single module can be run as it would in a low run.

    Its own ops run under autocast to `dtype`. What went into it in low precision in the run of `dtypes` goes in
    rounded; modules inside it compute in fp32, and what they gave in low precision there comes out rounded. So that an
    op that follows the dtype of its input computes as there.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], dtypes: CallDtypes, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._modules = set(modules.values())
        self._unregistered = {module for name, module in modules.items() if not is_registered(name)}
        self.dtypes = dtypes
        self._dtype = dtype
        self._device = device
        self._calls: Counter[nn.Module] = Counter()
        super().__init__()
        self.busy = False
        self.rounded = False  # whether the latest `run` in low precision rounded what its own ops were given

    def __enter__(self) -> OwnOps:
        self._calls.clear()
        for module in self._modules:
            self.callback(module.register_forward_pre_hook(self._count).remove)
        return self

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], low: bool) -> list[torch.Tensor]:
        """The floating tensors that this call of `module` gives; for its forward pre-hook, and nothing is changed.

        low: its own ops in low precision; else in fp32, on what is rounded as for `low`.
        """
        calls = self._calls.copy()
        self.busy = True
        if low:
            self.rounded = False
        try:
            with ExitStack() as stack:
                stack.enter_context(without_modes())  # instruments watch the step
                stack.callback(set_random_state, random_state(self._device))
                stack.enter_context(module_state_kept(module))
                # Activation checkpointing around it counts what is saved.
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_same, _same))
                args, kwargs = map_tensors(_copy, (args, kwargs))
                output = self._forward(module, args, kwargs, low)
                return [tensor.detach() for tensor in floating(output)]
        finally:
            self.busy = False
            self._calls = calls

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], low: bool) -> Any:
        dtypes = self.dtypes.of(module, self._calls[module] - 1)[0]
        args, kwargs = self._as_in_low_run((args, kwargs), dtypes, low)
        with (
            self._inner_modules_in_fp32(module, low),
            TorchAutocast(self._device.type, dtype=self._dtype if low else torch.float32, cache_enabled=False),
        ):
            return module.forward(*args, **kwargs)

    @contextmanager
    def _inner_modules_in_fp32(self, outer: nn.Module, low: bool) -> Iterator[None]:
        """Within it, the outermost calls of modules inside compute in fp32, and give what is rounded as there."""
        device_types = {parameter.device.type for parameter in outer.parameters()} | {self._device.type}
        running: list[nn.Module] = []
        autocast_off = ExitStack()

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            running.append(module)
            if len(running) > 1 or not low:
                return None
            for device_type in device_types:
                autocast_off.enter_context(TorchAutocast(device_type, enabled=False))
            return map_tensors(lambda tensor: tensor.float() if tensor.dtype in LOW else tensor, (args, kwargs))

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            del running[-1:]  # empty where a pre-hook before ours raised
            if running:
                return None
            autocast_off.close()
            if output is None:
                return None
            return self._as_in_low_run(output, self.dtypes.of(module, self._calls[module] - 1)[1], low)

        with ExitStack() as hooks, autocast_off:
            for module in self._modules & {*outer.modules(), *self._unregistered} - {outer}:
                hook_forwards(hooks, module, before, after)
            yield

    def _as_in_low_run(self, value: Any, dtypes: _Dtypes, low: bool) -> Any:
        """`value` with tensors in the dtypes that they had there (not low: in fp32 again, but rounded)."""
        tensors = floating(value)
        if len(tensors) != len(dtypes):
            return value
        rounded = {
            id(tensor): tensor.to(dtype) if low else tensor.to(dtype).to(tensor.dtype)
            for tensor, dtype in zip(tensors, dtypes, strict=True)
            if dtype in LOW and tensor.dtype not in LOW
        }
        if not rounded:
            return value
        self.rounded = True
        return map_tensors(lambda tensor: rounded.get(id(tensor), tensor), value)

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._calls[module] += 1


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that may be written to; one of a leaf could not."""
    return tensor.detach().requires_grad_(tensor.requires_grad).clone()
