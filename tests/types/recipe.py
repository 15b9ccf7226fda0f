"""What a checker of types sees of the package: checked by mypy and pyright in `make lint`, and never run.

Each `# type: ignore` stands where the checker is to find a mistake: both tell of one that is not needed.
"""

from typing import Any

import torch
from torch import nn
from typing_extensions import assert_type

from amp_recipes import AMPConfig, Brain, Checkpointer, EpochCounter, Stage, TorchAutocast, fwd_default_precision
from amp_recipes.config import Hparams, Overrides, RunOptions, load_hparams, parse_arguments


class Pinned(nn.Module):
    @fwd_default_precision(cast_inputs=torch.float32)
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * scale


@fwd_default_precision
def scaled(x: torch.Tensor, factor: int) -> torch.Tensor:
    return x * factor


assert_type(Pinned().forward(torch.ones(2), scale=2.0), torch.Tensor)
assert_type(scaled(torch.ones(2), factor=3), torch.Tensor)
scaled(torch.ones(2), factor="three")  # type: ignore[arg-type]


class Recipe(Brain):
    def compute_forward(self, batch: Any, stage: Stage) -> torch.Tensor:
        prediction: torch.Tensor = self.modules.model(batch[0])
        return prediction

    def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Stage) -> torch.Tensor:
        return nn.functional.mse_loss(predictions, batch[1]) * self.hparams.weight

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> dict[str, float]:
        return {"loss": stage_loss, "step": float(self.optimizer_step)}

    def options(self) -> None:
        assert_type(self.max_grad_norm, float)
        assert_type(self.grad_accumulation_factor, int)
        assert_type(self.fp32_modules, list[str])
        assert_type(self.device, torch.device)
        print(self.max_grad_nrom)  # type: ignore[attr-defined]


def main(argv: list[str] | None = None) -> None:
    file, run_opts, overrides = parse_arguments(argv)
    assert_type(file, str)
    assert_type(run_opts, RunOptions)
    assert_type(overrides, Overrides)
    hparams = load_hparams(file, overrides)
    assert_type(hparams, Hparams)
    brain = Recipe({"model": Pinned()}, torch.optim.Adam, hparams, run_opts)
    brain.fit(EpochCounter(3), [torch.ones(2)], valid_loader_kwargs={"batch_size": 2})
    assert_type(brain.evaluate([torch.ones(2)]), float)
    Checkpointer("save", {"model": Pinned()}).save_checkpoint({"loss": 1.0})
    with TorchAutocast("cpu", AMPConfig.from_name("bf16").dtype):
        pass
