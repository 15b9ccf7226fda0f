"""The methods that a recipe writes, or may override: what `Brain` calls, with what each means by default."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

import torch
from torch.optim import Optimizer

from amp_recipes.data import batch_length


class Stage(Enum):
    """What a batch is used for.

    Equal to the stage of the same name of SpeechBrain's `Stage`: a recipe that still compares with that one would
    otherwise take every stage for another.
    """

    TRAIN = auto()
    VALID = auto()
    TEST = auto()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Enum) and type(other).__name__ == "Stage" and self.name == other.name

    __hash__ = Enum.__hash__  # of the name, so equal ones have one


class Hooks:
    """Base of `Brain`. All are called with positional arguments."""

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The model's predictions for a batch on the device; runs under the stage's precision."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_forward(batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> torch.Tensor:
        """The loss (0-d) of the predictions; runs under the stage's precision."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_objectives(predictions, batch, stage)")

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """A stage begins; modules are already in the stage's mode."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> Mapping[str, float] | None:
        """A stage ended. May return metrics: early stopping, keep-best and the summary read them."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Before a training batch's forward."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: torch.Tensor, should_step: bool) -> None:
        """After a training batch's backward, and after its update where `should_step`.

        On a device that queues its work the verdict on that update is still under way: counters wait for it when read,
        and the optimizer's learning rate moves just before the next update.
        """

    def batch_weight(self, batch: Any) -> float | torch.Tensor:
        """What a batch counts for in averages: its leading dimension.

        Overridden, it is also what the batch counts for in the accumulation window (tokens, frames); by default the
        batches of a window count the same. Gets the batch as the loader yields it, before it moves to the device.
        """
        return batch_length(batch)

    def freeze_optimizers(self, optimizers: dict[str, Optimizer]) -> Mapping[str, Optimizer]:
        """The optimizers that may step now; leave out those that are to wait."""
        return optimizers
