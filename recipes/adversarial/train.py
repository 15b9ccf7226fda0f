"""Train a WGAN with gradient penalty: python recipes/adversarial/train.py configs/adversarial.yaml

The networks are in model.py, the images in data.py, the measures of quality in quality.py, every setting in the YAML
file. Source: Gulrajani et al. 2017, "Improved Training of Wasserstein GANs", algorithm 1.
Legend of shapes: B batch, C channels, H height, W width.
"""

import torch
from quality import nearest_ratio, save_grid, sliced_wasserstein

from amp_recipes import Brain, Stage, create_experiment_directory, load_hparams, parse_arguments


class AdversarialBrain(Brain):
    """A critic learns to score real images above generated ones, the generator to raise the scores of its own."""

    critic_updates = 0  # of the whole run; checkpoints keep it, as each attribute that training changes
    lengths: tuple[int, ...] = ()  # of the batches in the accumulation window so far

    def init_optimizers(self) -> None:
        """Give each network an optimizer of its own."""
        self.optimizers_dict = {
            "critic": self.opt_class(self.modules.critic.parameters()),
            "generator": self.opt_class(self.modules.generator.parameters()),
        }

    def fit_batch(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Step the critic on this batch and, after critic_steps of them, the generator; return the critic's loss."""
        images_BCHW = batch["image"]
        with self.no_sync(not self.should_step):  # several processes average once, at the end of the window
            loss = self.critic_loss(images_BCHW)
            self.backward(loss, "critic")
        self.lengths += (len(images_BCHW),)
        if self.should_step:  # the last batch of an accumulation window
            self.optimizers_step("critic")
            self.critic_updates += 1
            if self.critic_updates % self.hparams.critic_steps == 0:
                # As many samples as the critic saw images, in batches of the same lengths: both networks accumulate.
                for left, length in enumerate(self.lengths, start=1 - len(self.lengths)):
                    with self.no_sync(left < 0):
                        self.backward(self.generator_loss(length), "generator")
                self.optimizers_step("generator")
            self.lengths = ()
        return loss.detach()

    def critic_loss(self, real_BCHW: torch.Tensor) -> torch.Tensor:
        """Return mean(score of generated) - mean(score of real) + the gradient penalty."""
        with self.training_ctx:
            with torch.no_grad():
                generated_BCHW = self.modules.generator(self.hparams.generator.noise(len(real_BCHW)))
            share_B111 = torch.rand_like(real_BCHW[:, :1, :1, :1])
            mixed_BCHW = torch.lerp(real_BCHW, generated_BCHW, share_B111).requires_grad_()
            real_B, generated_B, mixed_B = map(self.modules.critic, (real_BCHW, generated_BCHW, mixed_BCHW))
        # Each score depends on its own image alone, so these are the slopes at each image.
        slopes_B = self.gradients(mixed_B, mixed_BCHW).flatten(1).norm(dim=1)
        self.add_metric("critic_gap", real_B - generated_B, len(real_B))
        self.add_metric("slope", slopes_B, len(slopes_B))
        penalty = (slopes_B - 1).square().mean()
        return generated_B.mean() - real_B.mean() + self.hparams.penalty_weight * penalty

    def generator_loss(self, count: int) -> torch.Tensor:
        """Return minus the mean score of count generated images."""
        with self.training_ctx:
            scores_B = self.modules.critic(self.modules.generator(self.hparams.generator.noise(count)))
        self.add_metric("generator_loss", -scores_B, count)
        return -scores_B.mean()

    def compute_forward(self, batch: dict[str, torch.Tensor], stage: Stage) -> torch.Tensor:
        """Return images (B, C, H, W) of the averaged generator from the fixed noise of the valid or test samples."""
        return self.modules.generator(batch["noise"])

    def compute_objectives(
        self, predictions: torch.Tensor, batch: dict[str, torch.Tensor], stage: Stage
    ) -> torch.Tensor:
        """Return the critic's loss without the penalty; keep the images for the end of the stage."""
        gap_B = self.modules.critic(batch["image"]) - self.modules.critic(predictions)
        self.add_metric("critic_gap", gap_B, len(gap_B))
        self.generated.append(predictions)
        self.real.append(batch["image"])
        return -gap_B.mean()

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Start with empty lists of images."""
        self.generated, self.real = [], []

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> dict[str, float]:
        """Measure the images that were generated, and save the first of them, beside real ones, as a picture."""
        if stage == Stage.TRAIN:
            return {}
        generated_NCHW, real_NCHW = self._of_all_processes(self.generated), self._of_all_processes(self.real)
        self.generated, self.real = [], []
        path = self.output_path("samples/test.png" if stage == Stage.TEST else f"samples/epoch_{epoch:04d}.png")
        if path is not None:
            save_grid(path, [images[: self.hparams.pictured] for images in (generated_NCHW, real_NCHW)])
        return {
            "distance": sliced_wasserstein(generated_NCHW, real_NCHW),
            "nearest": nearest_ratio(generated_NCHW, real_NCHW, self.hparams.reference),
        }

    def _of_all_processes(self, batches: list[torch.Tensor]) -> torch.Tensor:
        """Return the images (N, C, H, W) of all processes' batches."""
        return torch.cat([images_NCHW for own in self.gather(batches) for images_NCHW in own])


def main(argv: list[str] | None = None) -> None:
    """Train, then test the best checkpoint, as the YAML file and the command line say."""
    hparams_file, run_opts, overrides = parse_arguments(argv)
    hparams = load_hparams(hparams_file, overrides)
    create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    images, loaders = hparams["images"], hparams["loader_kwargs"]
    brain = AdversarialBrain(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    train_kwargs = {**loaders, "shuffle": True, "drop_last": True}
    brain.fit(hparams["epoch_counter"], images.train, images.valid, None, train_kwargs, loaders)
    brain.evaluate(images.test, min_key="distance", test_loader_kwargs=loaders)


if __name__ == "__main__":
    main()
