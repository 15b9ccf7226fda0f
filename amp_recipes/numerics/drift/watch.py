"""Compares each module's own ops in low precision with fp32 during an fp32 step, and their effect on the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from amp_recipes.modules.nested import tensors_in
from amp_recipes.numerics.drift.own_ops import OwnOps, floating, hook_forwards
from amp_recipes.numerics.watch.observe import Attribution
from amp_recipes.numerics.watch.op_kinds import op_kind
from amp_recipes.precision import map_tensors
from amp_recipes.precision.torch_private import Op, graph_task, without_modes

FP16_MAX = torch.finfo(torch.float16).max  # 65504
FP16_NORMAL = torch.finfo(torch.float16).smallest_normal  # 2**-14 = 6.10e-5


@dataclass
class Measured:
    """The measurements of one module in one window.

    calls: of its forward; d, y: squared norms; values, above, below: how many values go in and come out, how many of
    them above 65504 in magnitude and in (0, 6.1e-5); largest: the largest of them, without infinities; inside: the
    largest magnitude that its own ops return; channels: squared norms of d and of dL/dy by channel, added over calls,
    by output, number of channels, and whether it was computed again in the backward; overflows: some values are not
    finite in low precision alone; harm: whether the gradients that come back to such values are not zero; spoils:
    whether the fp32 step changes with such values in it; raised: its own ops raise in low precision; breaks_backward:
    there, gradients cease to be finite in its backward.
    """

    calls: int = 0
    d: float = 0.0
    y: float = 0.0
    values: int = 0
    above: int = 0
    below: int = 0
    largest: float = 0.0
    inside: float = 0.0
    channels: dict[tuple[int, int, bool], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    harm: list[torch.Tensor] = field(default_factory=list)
    overflows: bool = False
    spoils: bool = False
    raised: bool = False
    breaks_backward: bool = False

    @property
    def is_harmful(self) -> bool:
        """Whether low precision makes something nonfinite here that the loss or a gradient depends on."""
        return self.raised or self.breaks_backward or self.spoils or any(map(bool, self.harm))

    @property
    def squared_sensitivity(self) -> float:
        """Sum over channels of |dL/dy_c|^2 |d_c|^2, the calls of a module taken as one."""
        if self.is_harmful:
            return math.inf
        return math.fsum(float((d * gradient).sum()) for d, gradient in self.channels.values())

    @property
    def squared_local_error(self) -> float:
        """|d|^2 / |y|^2."""
        if self.raised or self.d == 0.0:
            return math.inf if self.raised else 0.0
        return math.inf if self.y == 0.0 else self.d / self.y

    def add_flow(self, tensor: torch.Tensor) -> None:
        """Count the values of a tensor that goes in or comes out."""
        magnitudes = tensor.detach().abs()
        largest = _largest(magnitudes)
        self.values += tensor.numel()
        self.below += int((magnitudes < FP16_NORMAL).sum() - (magnitudes == 0).sum())
        self.above += int((magnitudes > FP16_MAX).sum() - magnitudes.isinf().sum()) if largest > FP16_MAX else 0
        self.largest = max(self.largest, largest)


class Inside:
    """The largest finite magnitude that each module's own ops return in the forward."""

    def __init__(self, modules: nn.Module, holders: Mapping[str, object] | None = None) -> None:
        self.at = Attribution(modules, holders=holders)
        self.largest: dict[str, float] = {}

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if graph_task() != -1 or op_kind(op).doing != "compute":
            return
        for value in tensors_in(output):
            if value.is_floating_point() and value.layout is torch.strided and value.numel():
                module = self.at.here.module
                self.largest[module] = max(self.largest.get(module, 0.0), _largest(value))


class Measure(ExitStack):
    """Inside this context, each call of a module of `names` is repeated with its own ops in low precision.

    let_flow: names of modules whose outputs are given a gradient, where they have none: else nobody knows what the loss
    makes of them. found: by name.
    """

    def __init__(
        self, modules: Mapping[str, nn.Module], names: Iterable[str], own_ops: OwnOps, let_flow: set[str]
    ) -> None:
        self._modules = {name: modules[name] for name in names}
        self._own_ops = own_ops
        self._let_flow = let_flow
        # For each call under way: what `_compare` takes, or None for one that is not compared.
        self._calls: list[tuple[list[torch.Tensor], list[torch.Tensor] | None, list[torch.Tensor]] | None] = []
        self._ran_without_graph: set[str] = set()
        super().__init__()
        self.found = {name: Measured() for name in self._modules}

    def __enter__(self) -> Measure:
        self.enter_context(self._own_ops)
        for name, module in self._modules.items():
            hook_forwards(self, module, self._before(name), self._after(name))
        return self

    def _before(self, name: str) -> Callable:
        """The module runs aside before it runs: what its hooks and its forward leave somewhere is then of fp32."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._own_ops.busy:
                return
            # Checkpointing computes again what was compared, unless it computed without a graph at first.
            is_known = graph_task() != -1 and name not in self._ran_without_graph
            self._calls.append(None if is_known else self._run_aside(name, module, args, kwargs))

        return hook

    def _run_aside(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None, list[torch.Tensor]] | None:
        """Its outputs in low precision; in fp32, if on other inputs than the real ones; and the real inputs."""
        try:
            low = self._own_ops.run(module, args, kwargs, low=True)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a constant beyond the format, an op that the device lacks in it
            self.found[name].raised = True
            return None
        exact = self._own_ops.run(module, args, kwargs, low=False) if self._own_ops.rounded else None
        return low, exact, floating((args, kwargs))

    def _after(self, name: str) -> Callable:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if self._own_ops.busy:
                return None
            call = self._calls.pop()
            if output is None:  # it raised, as checkpointing does when it has recomputed enough
                return None
            flows = name in self._let_flow and torch.is_grad_enabled()
            if flows:
                output = _with_gradient(output)
            if call is not None:
                with without_modes():  # instruments watch the step
                    self._compare(name, *call, floating(output))
            return output if flows else None

        return hook

    def _compare(
        self,
        name: str,
        low: list[torch.Tensor],
        exact: list[torch.Tensor] | None,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
    ) -> None:
        found, again = self.found[name], graph_task() != -1
        if not again:
            found.calls += 1
            for tensor in filter(torch.Tensor.numel, (*inputs, *outputs)):
                found.add_flow(tensor)
            if not torch.is_grad_enabled():
                self._ran_without_graph.add(name)
        exact = outputs if exact is None else exact
        if not len(low) == len(exact) == len(outputs):  # it does something else in low precision
            found.raised = True
            return
        for index, (a, b, y) in enumerate(zip(low, exact, outputs, strict=True)):
            if y.numel() and a.shape == b.shape == y.shape:
                d, bad = _difference(a, b.detach())
                found.overflows |= bad is not None
                if not again:
                    found.d += math.inf if bad is not None else float(_squared(d))
                    found.y += float(_squared(b.detach()))
                _listen(found, index, y, d, bad, again)


class LowInfinities(ExitStack):
    """Inside this context, in an fp32 run, a module returns the values that low precision alone makes nonfinite so."""

    def __init__(self, module: nn.Module, own_ops: OwnOps) -> None:
        self._module, self._own_ops = module, own_ops
        # For each call under way: its outputs in low precision; in fp32, if on other inputs than the real ones.
        self._calls: list[tuple[list[torch.Tensor], list[torch.Tensor] | None]] = []
        super().__init__()

    def __enter__(self) -> LowInfinities:
        self.enter_context(self._own_ops)
        hook_forwards(self, self._module, self._before, self._after)
        return self

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._own_ops.busy:
            low = self._own_ops.run(module, args, kwargs, low=True)
            rounded = self._own_ops.rounded
            self._calls.append((low, self._own_ops.run(module, args, kwargs, low=False) if rounded else None))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._own_ops.busy or not self._calls:
            return None
        low, exact = self._calls.pop()
        outputs = floating(output)
        spoiled = {
            id(y): torch.where(a.isfinite() | ~b.isfinite(), y, a.to(y.dtype))
            for a, b, y in zip(low, outputs if exact is None else exact, outputs, strict=True)
            if a.shape == b.shape == y.shape
        }
        return map_tensors(lambda tensor: spoiled.get(id(tensor), tensor), output)


def _listen(
    found: Measured, index: int, y: torch.Tensor, d: torch.Tensor, bad: torch.Tensor | None, again: bool
) -> None:
    """Bring d and the gradient of y together when the backward comes to it. bad: where d is not finite."""
    if not y.requires_grad:
        return
    # Where there are channels: second in maps (batch, channels, height, width), else last.
    dim = 1 if y.ndim >= 4 else y.ndim - 1
    d = _squared(d, dim)
    key = (index, d.numel(), again)

    def hook(gradient: torch.Tensor | None) -> None:
        if gradient is None:  # of an op with several outputs, of which the loss depends on others
            return
        with without_modes():
            if bad is not None:
                found.harm.append((gradient[bad] != 0).any())
            sums = found.channels.setdefault(key, (torch.zeros_like(d), torch.zeros_like(d)))
            sums[0].add_(d)
            sums[1].add_(_squared(gradient.detach(), dim))

    y.register_hook(hook)


def _with_gradient(output: Any) -> Any:
    """`output` in which a tensor that needs no gradient gets one, which goes no further."""

    def let_flow(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        return tensor.detach().requires_grad_().clone()  # the leaf itself may not be written to

    return map_tensors(let_flow, output)


def _difference(low: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """low - exact, 0 where one of them is not finite; and where only `low` is not, if it is anywhere."""
    d = low.to(exact.dtype) - exact
    if bool(d.sum().isfinite()):
        return d, None
    d = d.masked_fill_(~exact.isfinite(), 0.0)
    bad = ~d.isfinite()
    return (d.masked_fill_(bad, 0.0), bad) if bool(bad.any()) else (d, None)


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude."""
    least, most = map(float, torch.aminmax(tensor.detach()))
    if math.isfinite(least) and math.isfinite(most):
        return max(-least, most)
    return float(tensor.detach().nan_to_num(0.0, 0.0, 0.0).abs().amax())


def _squared(tensor: torch.Tensor, keep: int | None = None) -> torch.Tensor:
    """The squared norm of what is finite, of each slice along the dimension `keep` if one is given (1-d)."""
    norm = _norm(tensor, keep, tensor.dtype)
    if not 1e-15 < float(norm.sum()) < 1e15:  # squares leave float32, or there is something that is not finite
        norm = _norm(tensor.masked_fill(~tensor.isfinite(), 0.0), keep, _widest(tensor))
    return norm.square()


def _norm(tensor: torch.Tensor, keep: int | None, dtype: torch.dtype) -> torch.Tensor:
    magnitudes = tensor.abs() if tensor.is_complex() else tensor
    dtype = torch.promote_types(dtype.to_real(), torch.float32)
    dims = [dim for dim in range(tensor.ndim) if dim != keep]
    norm = torch.linalg.vector_norm(magnitudes, dim=dims, dtype=dtype) if dims else magnitudes.abs().to(dtype)
    norm = norm.to(_widest(tensor))
    return norm.reshape(-1) if keep is not None else norm


def _widest(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64
