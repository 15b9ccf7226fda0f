"""Repeats a training step from the same state, at any precision, and restores everything afterwards."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_recipes.files.user_code import Line, user_line
from amp_recipes.modules.torch_private import DYNAMO
from amp_recipes.precision import LossScaler, PendingUpdate, Pins, TorchAutocast, UpdateOwner, pinned_only
from amp_recipes.precision.torch_private import without_modes
from amp_recipes.state.preserved import preserved, values_kept

# Batches whose gradients make one update.
Window = Sequence[Any]


@dataclass
class Outcome:
    """The result of one window's forward and backward.

    losses: of each batch (0-d, detached, on the device), not divided by the window's length; gradients: by the
    parameter's name, unscaled, fp32 (float64 stays), in memory of their own; scale: the loss scale it ran at;
    seconds: of forward and backward; pins: those it ran with, where it was told which; stepped_under_autocast: the line
    of the recipe that stepped inside the autocast region, if any did; differentiated: all losses that went backward,
    which may be more than those returned; processor_seconds: of forward and backward, as `processor_now` counts.
    """

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    scale: float
    seconds: float
    pins: Pins | None = None
    stepped_under_autocast: Line | None = None
    differentiated: list[torch.Tensor] = field(default_factory=list)
    processor_seconds: float = 0.0

    @property
    def loss_is_finite(self) -> bool:
        return _are_finite(*self.losses, *self.differentiated)

    @property
    def is_finite(self) -> bool:
        """Whether every loss and every gradient is."""
        return self.loss_is_finite and _are_finite(*self.gradients.values())

    @property
    def gradient_norm(self) -> float:
        """The L2 norm over all gradients; it may overflow although each of them is finite."""
        norms = list(map(torch.linalg.vector_norm, self.gradients.values()))
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


@dataclass
class Course:
    """What some steps of training gave; all else is undone.

    losses: the mean loss of each window; sizes: its mean |loss|, which differs where losses of either sign add up;
    skipped: updates that were not taken, since something was not finite; seconds: that all took.
    """

    losses: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.losses))


class Recorder:
    """Scales and differentiates as a training step does; in place of the update it keeps the gradients."""

    def __init__(self, modules: nn.Module, scale: float, device: torch.device) -> None:
        self._owner = UpdateOwner(modules, LossScaler(device.type, init_scale=scale, enabled=scale != 1.0), device)
        self._device_type, self.scale = device.type, scale
        self.gradients_by_name: dict[str, torch.Tensor] = {}
        self.stepped_under_autocast: Line | None = None
        self._names = {id(parameter): name for name, parameter in modules.named_parameters()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name)  # `backward`, `losses` and all else

    def begin(self) -> None:
        """Do nothing: the code that tries the step restores the buffers."""

    def step(self, optimizers: Mapping[str, Optimizer], max_grad_norm: float) -> PendingUpdate | None:
        """Keep what the optimizers would have been given; a later step of the same window adds `#2` to the names."""
        if torch.is_autocast_enabled(self._device_type):
            self.stepped_under_autocast = user_line()
        with without_modes():  # instruments must see the step, but not the copying of its gradients
            for key, optimizer in optimizers.items():
                parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
                for index, parameter in enumerate(parameters):
                    if parameter.grad is not None:
                        self.keep(self._names.get(id(parameter), f"{key}[{index}]"), parameter.grad)
        return None

    def keep(self, name: str, gradient: torch.Tensor) -> None:
        """Keep a gradient, unscaled, under the first free name."""
        count, free = 1, name
        while free in self.gradients_by_name:
            count += 1
            free = f"{name}#{count}"
        gradient = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)
        self.gradients_by_name[free] = wide.div_(self.scale)


class _Counted:
    """Takes updates as a training step does, and counts those that are skipped."""

    def __init__(self, owner: UpdateOwner) -> None:
        self._owner, self.skipped = owner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def step(self, optimizers: Mapping[str, Optimizer], max_grad_norm: float) -> PendingUpdate | None:
        """Step as in training; waits for the result."""
        pending = self._owner.step(optimizers, max_grad_norm)
        self.skipped += pending is not None and not pending.read().taken
        return pending


class Trial:
    """A step of training, to be tried.

    modules: whose names pins and reports use; device: where batches are; take: does forward, backward and update of
    one window, `take(window, updates, context) -> losses`, with `context` around each forward and its loss, and
    `updates` in place of the run's own `UpdateOwner`; optimizers: those that it steps; preserve:
    `preserve(weights)` is a context after which everything that `take` changes is as it was (default: modules,
    optimizers and global generators, by `preserved`); holders: by name, objects that may hold layers which `modules`
    lacks.
    """

    def __init__(
        self,
        modules: nn.Module,
        device: torch.device,
        take: Callable[[Window, Any, AbstractContextManager], list[torch.Tensor]],
        optimizers: Callable[[], Mapping[str, Optimizer]] = dict,
        preserve: Callable[[bool], AbstractContextManager] | None = None,
        holders: Mapping[str, object] | None = None,
    ) -> None:
        self.modules = modules
        self.holders = holders or {}
        self.device = device
        self.optimizers = optimizers
        self._take = take
        self._preserve = preserve or (lambda weights: preserved(modules, optimizers().values(), device, weights))

    def run(
        self,
        window: Window,
        dtype: torch.dtype = torch.float32,
        scale: float = 1.0,
        pins: Iterable[str] | None = None,
        watch: Iterable[AbstractContextManager] = (),
    ) -> Outcome:
        """Forward and backward of one window under autocast to `dtype`, from the present state; all is undone.

        Every run draws the same random numbers. dtype: float32 runs without autocast; scale: of the loss; pins: names
        of the modules that are pinned to fp32 for this run, and no others (default: those that are); watch: entered
        around it (instruments), the first outermost.
        """
        recorder = Recorder(self.modules, scale, self.device)
        with ExitStack() as stack:
            stack.enter_context(self._preserve(False))
            stack.enter_context(values_kept(window))
            used = self._enter(stack, pins)
            for instrument in watch:
                stack.enter_context(instrument)
            began, of_processor = now(self.device), processor_now(self.device)
            losses = self._take(window, recorder, TorchAutocast(device_type=self.device.type, dtype=dtype))
            of_processor = processor_now(self.device) - of_processor
            seconds = now(self.device) - began
            if not recorder.gradients_by_name:  # the window ended without an update
                for name, parameter in self.modules.named_parameters():
                    if parameter.grad is not None:
                        recorder.keep(name, parameter.grad)
        gradients, differentiated = recorder.gradients_by_name, list(recorder.losses)
        stepped = recorder.stepped_under_autocast
        return Outcome(losses, gradients, scale, seconds, used, stepped, differentiated, of_processor)

    def run_finite(
        self, window: Window, dtype: torch.dtype, scale: float = 1.0, pins: Iterable[str] | None = None
    ) -> Outcome:
        """Run as `run` does; while only the gradients overflow, repeat at a sixteenth of the scale (down to 1)."""
        pins = None if pins is None else list(pins)
        while True:
            outcome = self.run(window, dtype, scale, pins)
            if outcome.is_finite or not outcome.loss_is_finite or scale <= 1.0:
                return outcome
            scale = max(1.0, scale / 16)

    def train(
        self,
        windows: Iterable[Window],
        dtype: torch.dtype = torch.float32,
        scale: float = 2.0**16,
        pins: Iterable[str] | None = None,
        prepare: Callable[[], None] = lambda: None,
    ) -> Course:
        """Make real updates, one for each window; then restore weights, optimizers and everything else.

        scale: where the loss scale begins in float16; prepare: called before the first step (to seed otherwise).
        """
        scaler = LossScaler(self.device.type, init_scale=scale, enabled=dtype == torch.float16)
        updates = _Counted(UpdateOwner(self.modules, scaler, self.device))
        context = TorchAutocast(device_type=self.device.type, dtype=dtype)
        course = Course()
        with ExitStack() as stack:
            stack.enter_context(self._preserve(True))
            self._enter(stack, pins)
            prepare()
            began = now(self.device)
            for window in windows:
                with values_kept(window):
                    losses = [float(loss) for loss in self._take(window, updates, context)]
                updates.update_scale()
                updates.drop_losses()
                course.losses.append(math.fsum(losses) / len(losses))
                course.sizes.append(math.fsum(map(abs, losses)) / len(losses))
            course.skipped = updates.skipped
            course.seconds = now(self.device) - began
        return course

    def _enter(self, stack: ExitStack, pins: Iterable[str] | None) -> Pins | None:
        if DYNAMO in sys.modules:  # compiled code hides its ops; asking for it otherwise imports the compiler
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return None if pins is None else stack.enter_context(pinned_only(self.modules, pins))


def now(device: torch.device) -> float:
    """The seconds on the clock when all that the device was given is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def processor_now(device: torch.device) -> float:
    """The processor time that this process has used, on a CPU: what runs beside it does not count; else as `now`."""
    return time.process_time() if device.type == "cpu" else now(device)


def plain_trial(
    model: nn.Module, objective: Callable[[nn.Module, Any], torch.Tensor], optimizer: Optimizer | None = None
) -> Trial:
    """The step of a hand-written loop: `objective(model, batch)` is the loss (0-d), averaged over the window.

    optimizer: steps in `Trial.train` (default: SGD at 0.01).
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if optimizer is None and trained:
        optimizer = torch.optim.SGD(trained, lr=0.01)
    optimizers = {"optimizer": optimizer} if optimizer is not None else {}
    tensors = [*model.parameters(), *model.buffers()]
    device = tensors[0].device if tensors else torch.device("cpu")

    def take(window: Window, updates: UpdateOwner, context: AbstractContextManager) -> list[torch.Tensor]:
        updates.begin()
        losses = []
        for batch in window:
            with context:
                loss = objective(model, batch)
            updates.backward(loss, of=len(window))
            losses.append(loss.detach())
        updates.step(optimizers, 0.0)
        for each in optimizers.values():
            each.zero_grad()
        return losses

    return Trial(model, device, take, lambda: optimizers, holders={"objective": objective})


def _are_finite(*tensors: torch.Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


def gradient_error(outcome: Outcome, reference: Outcome) -> float:
    """|g - g_ref| / |g_ref|, L2 over all parameters together; infinite where one side is not finite."""
    errors, norms = 0.0, 0.0
    for _, difference, squared_norm in differences(outcome, reference):
        errors += squared(difference)
        norms += squared_norm
    return ratio(errors, norms) if outcome.is_finite and reference.is_finite else math.inf


def differences(outcome: Outcome, reference: Outcome) -> Iterator[tuple[str, torch.Tensor, float]]:
    """Return for each parameter its name, g - g_ref and |g_ref|^2; a missing gradient counts as zero."""
    for name in outcome.gradients.keys() | reference.gradients.keys():
        given, wanted = outcome.gradients.get(name), reference.gradients.get(name)
        if wanted is None:
            yield name, outcome.gradients[name], 0.0
        else:
            yield name, -wanted if given is None else given - wanted, squared(wanted)


def ratio(squared_error: float, squared_norm: float) -> float:
    """The root of their quotient; 0 where both are 0, infinite where only the norm is."""
    if squared_norm == 0.0:
        return 0.0 if squared_error == 0.0 else math.inf
    return math.sqrt(squared_error / squared_norm)


def squared(tensor: torch.Tensor) -> float:
    """The squared L2 norm, computed in float64."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(torch.linalg.vector_norm(real, dtype=torch.float64) ** 2)


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return str(error).strip().partition("\n")[0]
