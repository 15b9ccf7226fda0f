"""Train a language model: python recipes/language_modeling/train.py configs/language_modeling.yaml

The network is in model.py, the text in data.py and windows.py, every setting in the YAML file.
Legend of shapes: B batch, T tokens, V vocabulary.
"""

import logging
import math

import torch
import torch.nn.functional as F
from model import IGNORE
from throughput import measure_peak_flops

from amp_recipes import Brain, Stage, create_experiment_directory, fwd_default_precision, load_hparams, parse_arguments

logger = logging.getLogger(__name__)


# In fp32: CUDA's autocast computes the log-softmax in bf16, where a token's loss is off by up to 0.065 nats.
@fwd_default_precision
def mean_loss(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy (0-d, in nats) of scores (B, T, V) over the targets (B, T)."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)


class LanguageModel(Brain):
    """Cross entropy of the next token; reports bits per byte of text, tokens per second and the share of the peak."""

    def compute_forward(self, batch: dict[str, torch.Tensor], stage: Stage) -> torch.Tensor:
        """Return the scores (B, T, V) of the token after each."""
        return self.modules.model(batch["inputs"])

    def compute_objectives(
        self, predictions: torch.Tensor, batch: dict[str, torch.Tensor], stage: Stage
    ) -> torch.Tensor:
        """Return the mean loss over the batch's targets, in nats."""
        self.tokens_read += (batch["targets"] != IGNORE).sum()
        return mean_loss(predictions, batch["targets"])

    def batch_weight(self, batch: dict[str, torch.Tensor]) -> float:
        """Return the number of targets, so that each token counts the same in windows and in averages."""
        return float((batch["targets"] != IGNORE).sum())

    def on_fit_start(self) -> None:
        """Measure what the device can do at this precision."""
        super().on_fit_start()
        model = self.hparams.model
        self.peak_flops_found = self.hparams.peak_flops or measure_peak_flops(model, lambda: self.training_ctx)
        logger.info("%s; peak %.3g flop/s", self.hparams.corpus.summary(), self.peak_flops_found)

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Count tokens from zero; a resumed stage restores its count."""
        self.tokens_read = 0

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> dict[str, float]:
        """Return bits per byte of text; of training also tokens per second and the share of the peak flops."""
        part = getattr(self.hparams.corpus, stage.name.lower())
        metrics = {"bits_per_byte": stage_loss / math.log(2) / part.bytes_per_token}
        if stage == Stage.TRAIN:
            of_processes = self.gather(int(self.tokens_read))
            metrics["tokens_per_second"] = sum(of_processes) / self.stage_seconds
            flops_per_second = metrics["tokens_per_second"] * self.hparams.model.flops_per_token()
            metrics["model_flops_utilisation"] = flops_per_second / (self.peak_flops_found * len(of_processes))
        return metrics


def main(argv: list[str] | None = None) -> None:
    """Train, then test the best checkpoint, as the YAML file and the command line say."""
    hparams_file, run_opts, overrides = parse_arguments(argv)
    hparams = load_hparams(hparams_file, overrides)
    create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    corpus, loader_kwargs = hparams["corpus"], hparams["loader_kwargs"]
    brain = LanguageModel(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    brain.fit(hparams["epoch_counter"], corpus.train, corpus.valid, None, loader_kwargs, loader_kwargs)
    brain.evaluate(corpus.test, min_key="bits_per_byte", test_loader_kwargs=loader_kwargs)


if __name__ == "__main__":
    main()
