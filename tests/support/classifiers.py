"""The smallest recipes that tests train: a classifier of (inputs, labels), and one that takes its steps itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from amp_recipes import Brain, Stage


class Classifier(Brain):
    """Learns the labels by a cross entropy in fp32."""

    def compute_forward(self, batch: Any, stage: Stage) -> torch.Tensor:
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Stage) -> torch.Tensor:
        return nn.functional.cross_entropy(predictions.float(), batch[1])


class StepsByHand(Classifier):
    """Steps with torch alone in a `fit_batch` of its own, as recipes of the original Brain do."""

    def fit_batch(self, batch: Any) -> torch.Tensor:
        self.before_step()
        with self.training_ctx:
            loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def before_step(self) -> None:
        """A test may look at the recipe here."""
