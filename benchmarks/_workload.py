"""What every contender of the overhead benchmark trains, and how long its steps take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

BATCH, FEATURES, HIDDEN, CLASSES = 32, 64, 128, 10
MAX_GRAD_NORM = 5.0  # Brain's default
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    "fused AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class Refused(Exception):
    """A contender says that it cannot run a case."""


@dataclass(frozen=True)
class Case:
    """What is compared: one optimizer (a name of `OPTIMIZERS`) at one precision, device and bound on the norm."""

    optimizer: str
    precision: str
    device: torch.device
    max_grad_norm: float = MAX_GRAD_NORM

    def make_model(self) -> nn.Module:
        """A tiny MLP on the device, with the same weights at each call."""
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
        return model.to(self.device)

    def make_optimizer(self, parameters: Any) -> Optimizer:
        """The case's optimizer over `parameters`."""
        return OPTIMIZERS[self.optimizer](parameters)

    def autocast(self) -> AbstractContextManager:
        """The context of one forward; nothing at fp32."""
        dtype = DTYPES[self.precision]
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    def make_scaler(self) -> torch.amp.GradScaler | None:
        """A loss scaler at fp16, else None."""
        return torch.amp.GradScaler(self.device.type) if self.precision == "fp16" else None

    def to_device(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch where the model is, without waiting for it."""
        inputs, targets = batch
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)


def small_batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one batch for the tiny MLP."""
    return torch.randn(BATCH, FEATURES, generator=generator), torch.randint(0, CLASSES, (BATCH,), generator=generator)


class TimedBatches(DataLoader):
    """A loader that holds its batches, and times the steps that are taken between them.

    Each iteration yields `around` batches, then `steps` more, then `around` again. `seconds` is the time from the
    request of the first batch in the middle to that of the first behind it, so that neither what `fit` of a contender
    does before and after its loop counts, nor how far ahead it fetches batches.
    `processor_seconds` is what this process's threads have computed in that time.
    It is a DataLoader because some contenders take nothing else; it does none of a DataLoader's work.
    """

    def __init__(
        self,
        steps: int,
        device: torch.device,
        around: int = 3,
        seed: int = 0,
        make_batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]] = small_batch,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        batches = [make_batch(generator) for _ in range(around + steps + around)]
        if device.type != "cpu":
            batches = [(inputs.pin_memory(), targets.pin_memory()) for inputs, targets in batches]
        super().__init__(batches, batch_size=None)
        self.steps = steps
        self.seconds = math.nan
        self.processor_seconds = math.nan
        self._device = device
        self._around = around

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.seconds = math.nan
        before, behind = self._around, self._around + self.steps
        yield from self.dataset[:before]
        began, processor_began = self._now(), time.process_time()
        yield from self.dataset[before:behind]
        self.seconds = self._now() - began
        self.processor_seconds = time.process_time() - processor_began
        yield from self.dataset[behind:]

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


@dataclass(frozen=True)
class Contender:
    """One way to train: `fit` goes once over the batches and changes the weights of `model`."""

    model: nn.Module
    fit: Callable[[TimedBatches], None]
