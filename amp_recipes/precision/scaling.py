"""Runs scale -> backward -> unscale -> clip -> step -> update -> skip: no other file does.

A nonfinite loss or gradient never reaches the weights, in any precision: the verdict is one 0-d tensor on the device.
Fused optimizers read it there; for others the host reads it, once. In both cases it is copied to the host in the
background, and read when it is needed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from amp_recipes.errors import RecipeError
from amp_recipes.modules.sharded import is_sharded, local
from amp_recipes.modules.torch_private import sparse_values
from amp_recipes.precision.host_copy import HostCopy, HostFuture
from amp_recipes.precision.loss_scaler import LossScaler
from amp_recipes.precision.optimizers import parameters_of_optimizer, parameters_with_gradient
from amp_recipes.precision.rollback import BufferRollback
from amp_recipes.precision.sharded_gradients import Ranks, mark_of, marks_differ, sum_of_squares
from amp_recipes.precision.torch_private import STEP_TAKES_FOUND_INF, foreach_mul, foreach_norm, unscale_and_check

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Update:
    """The result of one call of `UpdateOwner.step`, in host numbers."""

    taken: bool
    losses: list[float]  # what was handed to `backward` for it, in order
    grad_norms: dict[str, float]  # per optimizer: L2 before clipping, unscaled
    scale: float | None  # loss scale that was in force; None without scaling

    @property
    def grad_norm(self) -> float | None:
        """L2 norm over all gradients of the update; None if there were none."""
        return math.hypot(*self.grad_norms.values()) if self.grad_norms else None


class PendingUpdate:
    """An update whose verdict may still be on its way from the device."""

    __slots__ = ("_future", "_marked", "_names", "_update", "losses")

    def __init__(self, future: HostFuture, losses: int, names: Sequence[str], marked: bool = False) -> None:
        self._marked = marked  # the last number is 1 where ranks had gradients of different parameters
        self._future = future  # verdict, losses, norms, and the scale where there is one
        self.losses = losses  # how many were handed to `backward` for it
        self._names = names
        self._update: Update | None = None

    @property
    def known(self) -> bool:
        """Whether the host has the verdict already, without waiting."""
        return self._future.known

    def read(self) -> Update:
        """The verdict; waits for it where it has not arrived."""
        if self._update is None:
            skip, *numbers = self._future.read()
            if self._marked and numbers.pop():
                raise RecipeError(
                    "the processes have gradients of different parameters, so strategy fsdp added gradients of "
                    "different parameters to each other (the update was skipped). On one rank, a forward left some "
                    "parameters unused. Set find_unused_parameters, which sends zeros for them, or use the same "
                    "modules on every rank."
                )
            first_norm = self.losses
            scale_at = first_norm + len(self._names)
            self._update = Update(
                taken=skip == 0.0 and all(map(math.isfinite, numbers)),
                losses=numbers[:first_norm],
                grad_norms=dict(zip(self._names, numbers[first_norm:scale_at], strict=True)),
                scale=numbers[scale_at] if scale_at < len(numbers) else None,
            )
        return self._update


class _Part:
    """One optimizer's part in an update.

    parameters: those that have a gradient; gradients: once unscaled, of sparse ones the values behind their distinct
    indices; norm: the L2 norm over all of them (0-d).
    """

    __slots__ = ("gradients", "norm", "optimizer", "parameters")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = parameters_with_gradient(optimizer)

    def unscale(self, scaler: LossScaler) -> None:
        """Unscale the gradients in place."""
        for parameter in self.parameters:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
        if scaler.is_enabled():
            scaler.unscale_round_(self.optimizer)
            scaler.note_step(self.optimizer)
        gradients = [parameter.grad for parameter in self.parameters]
        self.gradients = [sparse_values(each) if each.is_sparse else each for each in gradients]

    def step(self, max_grad_norm: float, known_norm: float | None, skip: torch.Tensor | None) -> None:
        """Clip and step; with `skip`, the fused kernel leaves everything as it is where that is 1.

        known_norm: the norm, where the host has it.
        """
        _clip(self.gradients, self.norm, known_norm, max_grad_norm)
        optimizer = self.optimizer
        if skip is None:
            optimizer.step()
            return
        optimizer.grad_scale, optimizer.found_inf = None, skip  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    def skips_on_device(self, skip: torch.Tensor) -> bool:
        """Whether the step takes `found_inf` and skips without the host (torch's fused optimizers).

        Not for an optimizer on the CPU with a GPU (offloaded parameters): it would read an unfinished copy of `skip`.
        Not if a gradient is sparse: torch's SGD then uses other kernels.
        """
        return (
            getattr(self.optimizer, STEP_TAKES_FOUND_INF, False)
            and all(group.get("fused", True) for group in self.optimizer.param_groups)
            and all(device.type == skip.device.type for device in {each.device for each in self.parameters})
            and not any(each.grad.is_sparse for each in self.parameters)
        )


class Averaged(Protocol):
    """The flags that a backward sends to the other processes with the averaged gradients."""

    def tell(self, losses: Sequence[torch.Tensor]) -> None:
        """Before the backward: let its gradients tell whether any of the `losses` (0-d, detached) is nonfinite."""

    def heard_with(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor | None:
        """0-d: NaN if a loss was nonfinite on any rank, else 0.

        None, on all ranks, where the gradients of these parameters could not tell it.
        """


class UpdateOwner:
    """Differentiates losses and takes, or skips, the updates of all optimizers of a run.

    modules: whose buffers go back when an update is skipped.
    scaler: a `LossScaler`, disabled unless fp16.
    agree: makes all ranks share a verdict, if the gradients do not carry it: takes and returns a 0-d float tensor (the
    maximum over ranks).
    ranks: queries to the other processes for sharded parameters.
    """

    def __init__(
        self,
        modules: nn.Module,
        scaler: LossScaler,
        device: torch.device,
        agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.scaler = scaler
        self.buffers = BufferRollback(modules)
        self._modules = modules
        self._agree = agree
        self._ranks = ranks
        self._host = HostCopy(device)
        self._averaged: Averaged | None = None  # of the latest backward
        self.losses: list[torch.Tensor] = []  # those that went backward, until the first one after a step
        self._losses_judged = False
        self._zero = torch.zeros((), device=device)
        self._one = torch.ones((), device=device)
        self._stepped: set[int] = set()
        # Per optimizer: how many states it had when last looked at, and the parameters whose state exists. Held by
        # reference, so that no id is given out again.
        self._initialized: dict[int, tuple[Optimizer, int, dict[int, nn.Parameter]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        # What is keyed by identity means nothing in a copy.
        return {**self.__dict__, "_initialized": {}, "_stepped": set(), "losses": [], "_averaged": None}

    def begin(self) -> None:
        """To be called before a training forward: makes sure that there are buffers to go back to."""
        if not self.buffers.watching:
            self.buffers.watch()

    def backward(
        self,
        loss: torch.Tensor,
        share: float = 1.0,
        of: float = 1.0,
        optimizers: Iterable[Optimizer] | None = None,
        averaged: Averaged | None = None,
    ) -> None:
        """Scale and differentiate loss * share / of (0-d); gradients accumulate until `step`.

        share, of: what the loss counts for in its accumulation window, and the sum over the window; optimizers: leave
        gradients with their parameters alone (default: with all). averaged: who averages the gradients, if anybody.
        """
        if self._losses_judged:
            self.losses, self._losses_judged = [], False
        loss = as_scalar(loss, "backward")
        self.losses.append(loss.detach())
        self._averaged = averaged
        # With a loss scale, gradients must stay what they are: a nonfinite one would lower the scale.
        if averaged is not None and not self.scaler.is_enabled():
            averaged.tell(self.losses)
        if share != 1.0:
            loss = loss * share
        if of != 1.0:
            loss = loss / of
        inputs = None if optimizers is None else self._leaves(_trainable(optimizers))
        if inputs is None or inputs:  # of frozen optimizers there are none
            if not loss.requires_grad:
                raise RecipeError(
                    "backward: the loss has no gradient. Either compute_objectives returns a detached loss "
                    "(.detach(), torch.tensor(...), torch.no_grad()), or all parameters that it depends on are "
                    "frozen (requires_grad=False)."
                )
            self.scaler.scale(loss).backward(inputs=inputs)

    def gradients(self, loss: torch.Tensor, inputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Gradients of `loss` with respect to `inputs`, unscaled and differentiable (for a gradient penalty).

        loss: any shape; summed. Returns one tensor for one input, else a tuple in the order of `inputs`.
        """
        one = isinstance(inputs, torch.Tensor)
        scaled = self.scaler.is_enabled()
        # Scaled, the mean: from a sum, the way back would begin at each element with the scale itself, inf in fp16.
        total = loss if loss.ndim == 0 else loss.float().mean() if scaled else loss.sum()
        sharded = self._ranks is not None and any(is_sharded(parameter) for parameter in self._modules.parameters())
        with self._ranks.keeping_gathered(self._modules) if sharded else nullcontext():
            grads = torch.autograd.grad(self.scaler.scale(total), inputs, create_graph=True)
        if scaled:
            # In float32 on the device: the scale is a power of two unless the user chose other factors.
            inverse = self.scaler.scale_tensor.reciprocal() * loss.numel()
            grads = tuple(grad * inverse for grad in grads)
        return grads[0] if one else grads

    def step(self, optimizers: Mapping[str, Optimizer], max_grad_norm: float) -> PendingUpdate | None:
        """Unscale, clip and step `optimizers`, all or none of them.

        torch alone would skip one by one. Each is clipped by its own L2 norm over all its groups, after unscaling.
        A norm that overflows over finite gradients skips as well. A fused optimizer reads the verdict on the
        device; an unfused one, and any optimizer on its first step (torch's fused SGD leaves momentum uninitialised
        when its first step is skipped), costs one read.

        max_grad_norm: 0 or less: no clipping.
        Returns the pending verdict; None where no parameter has a gradient.
        """
        # Kept until the next backward: two optimizers may step by name after both backwards.
        losses, self._losses_judged = self.losses, True
        parts = {name: _Part(optimizer) for name, optimizer in optimizers.items()}
        parts = {name: part for name, part in parts.items() if part.parameters}
        if not parts:
            return None
        scale = self.scaler.scale_tensor
        if scale is None and self.scaler.is_enabled():
            raise RecipeError(
                "the gradients were not scaled, but precision fp16 needs this: call self.backward(loss) instead of "
                "loss.backward()."
            )
        with torch.no_grad():
            # Copied before unscaling, which may move the scale by an earlier round's verdict.
            scales = [] if scale is None else [scale.clone()]
            for part in parts.values():
                part.unscale(self.scaler)
                if self.scaler.is_enabled():  # a paused one is not moved, and would never forget them
                    self._stepped.add(id(part.optimizer))
            failed, marks = self._take_norms([*parts.values()], losses)
            norms = [part.norm for part in parts.values()]
            received = self._received_flags(optimizers.values())
            if received is not None:
                norms[0] = norms[0] + received.to(norms[0].device)
            numbers = self._gather([*losses, *norms, *scales, *marks])
            asks = self._agree is not None and received is None
            # On a CPU the host sees the numbers as soon as the device does.
            on_host = self._host.immediate
            skip = None if on_host and not asks else self._verdict(numbers, failed, asks)
            pending = PendingUpdate(self._host.post(numbers), len(losses), [*parts], bool(marks))
            if not on_host and self._can_skip_on_device(parts.values(), skip):
                for part in parts.values():
                    part.step(max_grad_norm, None, skip)
            elif pending.read().taken:
                for name, part in parts.items():
                    part.step(max_grad_norm, pending.read().grad_norms[name], None)
                    self._remember(part)
            self.buffers.settle(None if on_host else skip, lambda: not pending.read().taken)
        return pending

    def update_scale(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Move the loss scale by the verdicts so far, once all of `optimizers` have stepped (default: now)."""
        if self.scaler.awaits_update and all(id(optimizer) in self._stepped for optimizer in optimizers):
            self.scaler.update()
            self._stepped.clear()

    def drop_losses(self) -> None:
        """Forget the losses that gradients came from: the gradients are gone, or their window is over."""
        self.losses, self._averaged = [], None

    def forget_state(self) -> None:
        """Read optimizer states and buffers again: they were replaced from outside."""
        self._initialized.clear()
        self.buffers.watching = False

    def _can_skip_on_device(self, parts: Iterable[_Part], skip: torch.Tensor) -> bool:
        """Whether the kernels of all optimizers can leave everything as it is, so that the host need not know."""
        return all(part.skips_on_device(skip) and self._knows(part) for part in parts)

    def _knows(self, part: _Part) -> bool:
        """Whether the state of all its parameters exists, so that a kernel can skip."""
        _, states, known = self._initialized.get(id(part.optimizer), (None, -1, {}))
        return states == len(part.optimizer.state) and known.keys() >= set(map(id, part.parameters))

    def _remember(self, part: _Part) -> None:
        """The optimizer has stepped, so the state of all its parameters exists."""
        if self._host.immediate:
            return
        optimizer = part.optimizer
        _, _, known = self._initialized.get(id(optimizer), (None, -1, {}))
        known = {**known, **{id(parameter): parameter for parameter in part.parameters}}
        self._initialized[id(optimizer)] = (optimizer, len(optimizer.state), known)

    def _take_norms(
        self, parts: Sequence[_Part], losses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Compute the norm of each part's gradients; of sharded gradients, all ranks do so together.

        Returns what the ranks know then (else None and nothing): whether anything failed on any of them, and, in a
        list, whether they have gradients of different parameters (0-d, 1 or 0).
        """
        if self._ranks is None or not any(is_sharded(gradient) for part in parts for gradient in part.gradients):
            for part in parts:
                part.norm = _norm(part.gradients)
            return None, []
        failed, differs = self._ask_ranks(self._ranks, parts, losses)
        for part in parts:
            part.gradients = list(map(local, part.gradients))
        return failed, [differs]

    def _leaves(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """Return the tensors to differentiate with respect to: for a sharded parameter, its gathered form."""
        if self._ranks is None or not any(is_sharded(parameter) for parameter in parameters):
            return parameters
        return self._ranks.leaves(self._modules, parameters)

    def _ask_ranks(
        self, ranks: Ranks, parts: Sequence[_Part], losses: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute each optimizer's norm over all parts of its gradients. Returns two numbers (0-d, 1 or 0).

        They say whether anything failed on any rank, and whether ranks have gradients of different parameters: then
        torch has added up gradients of one with those of another. One collective, which also tells the scaler of
        overflows in the others' parts.
        """
        processes, device = ranks.world_size(), self._zero.device
        scaled = self.scaler.is_enabled()
        overflows = [self.scaler.found_infs(part.optimizer) if scaled else [] for part in parts]
        squares = [sum_of_squares(part.gradients, device, processes) for part in parts]
        bad = [_sum(found, device) for found in overflows]
        bad.append(_sum((loss.isfinite().logical_not() for loss in losses), device))
        mark = mark_of(chain.from_iterable(parameters_of_optimizer(part.optimizer) for part in parts))
        # Filled on the device: to copy them there, the host would wait for it.
        marks = torch.stack([squares[0].new_full((), number) for number in (mark, mark * mark)])
        *numbers, total, total_of_squares = ranks.total(torch.cat([torch.stack([*squares, *bad]), marks]))
        differs = marks_differ(total, total_of_squares, processes)
        for part, square in zip(parts, numbers, strict=False):
            part.norm = square.sqrt().to(self._zero.dtype)
        bad = numbers[len(parts) :]
        for found, overflowed in zip(overflows, bad, strict=False):
            for flag in found:
                flag.copy_(overflowed > 0)
        failed = (torch.stack(bad).sum() > 0) | differs
        return failed.to(self._zero.dtype), differs.to(self._zero.dtype)

    def _gather(self, report: Sequence[torch.Tensor]) -> torch.Tensor:
        """A vector on the device: a place for the verdict (0: take the update), then the report.

        float32, or float64 if a loss is.
        """
        return torch.stack([self._zero, *(number.to(self._zero.device) for number in report)])

    def _received_flags(self, optimizers: Iterable[Optimizer]) -> torch.Tensor | None:
        """Return the flags of all ranks that the latest backward sent with the gradients of these optimizers."""
        return None if self._averaged is None else self._averaged.heard_with(_trainable(optimizers))

    def _verdict(self, numbers: torch.Tensor, failed: torch.Tensor | None, asks: bool) -> torch.Tensor:
        """0-d float32 on the device, also in its place: 1 if any number is nonfinite on any rank, else 0.

        failed: 1 or 0 where the ranks have been asked already; asks: whether they are to be, if not.
        """
        if numbers.dtype == torch.float32:
            skip = numbers[0]
            # One kernel that raises the flag; multiplying by one leaves the numbers as they are.
            unscale_and_check([numbers[1:]], skip, self._one)
        else:
            skip = numbers.isfinite().all().logical_not().float()
        if failed is not None:
            skip.copy_(torch.maximum(skip, failed))
        elif asks:
            skip.copy_(self._agree(skip))
        if numbers.dtype != torch.float32:
            numbers[0] = skip
        return skip


def as_scalar(loss: Any, where: str) -> torch.Tensor:
    """`loss` as a 0-d tensor. Raises RecipeError for what is none."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss if loss.ndim == 0 else loss.reshape(())
    given, advice = f"a {type(loss).__name__}", "Return only the loss; use add_metric for other values."
    if isinstance(loss, torch.Tensor):
        given, advice = (
            f"a tensor of shape {tuple(loss.shape)}",
            "Reduce it in compute_objectives, for example with .mean().",
        )
    elif loss is None:
        advice = "Check that compute_objectives, and fit_batch if the recipe has one, end with `return loss`."
    elif isinstance(loss, (int, float)):
        advice = "Return the tensor itself from compute_objectives, without .item() or float()."
    raise RecipeError(f"{where}: the loss is {given}; expected a tensor with one number. {advice}")


def _trainable(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    parameters = chain.from_iterable(map(parameters_of_optimizer, optimizers))
    return [parameter for parameter in parameters if parameter.requires_grad]


def _norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The L2 norm over all of them, computed as `torch.nn.utils.get_total_norm` does."""
    device, dtype = gradients[0].device, gradients[0].dtype
    if all(gradient.dtype is dtype and gradient.device == device for gradient in gradients):
        # The common case without sorting the gradients by device and dtype, which costs more than the norm.
        return torch.linalg.vector_norm(torch.stack(foreach_norm(gradients)))
    return torch.nn.utils.get_total_norm(gradients)


def _clip(
    gradients: Sequence[torch.Tensor], norm: torch.Tensor, known_norm: float | None, max_grad_norm: float
) -> None:
    """Multiply by min(1, max_grad_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does.

    known_norm: `norm`, where the host has it. Well below the bound (2 %: three roundings of bf16) the coefficient is
    exactly 1, and multiplying by it is left out.
    """
    if max_grad_norm <= 0 or (known_norm is not None and known_norm < 0.98 * max_grad_norm - 1e-6):
        return
    # In the order in which torch divides a number by a tensor, so that the bits are the same; in place it is cheaper.
    coefficient = (norm + 1e-6).reciprocal_().mul_(max_grad_norm).clamp_(max=1.0)
    if all(gradient.device == coefficient.device for gradient in gradients):
        foreach_mul(gradients, coefficient)
    else:
        for gradient in gradients:
            gradient.mul_(coefficient.to(gradient.device, non_blocking=gradient.device.type != "cpu"))


def clear_gradients(optimizer: Optimizer, set_to_none: bool) -> None:
    """`optimizer.zero_grad`, without the profiler's record that costs more than the work where nothing overrides it."""
    if set_to_none and getattr(optimizer.zero_grad, "__func__", None) is Optimizer.zero_grad:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    else:
        optimizer.zero_grad(set_to_none=set_to_none)


def _sum(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """0-d float64 on `device`: how many of the 0-d `flags` are raised."""
    return sum((flag.to(device).double() for flag in flags), torch.zeros((), dtype=torch.float64, device=device))
