"""Train my_task: python train.py my_task.yaml

A generator learns to make points like the real ones, from a critic that learns to tell them apart (Goodfellow et al.
2014, "Generative Adversarial Nets", with the non-saturating loss). The networks are in model.py, the points in data.py,
every setting in my_task.yaml.
Legend of shapes: B batch, N any number, D dimensions.
"""

import torch
import torch.nn.functional as F
from amp_recipes import Brain, Stage, load_hparams, parse_arguments


class MyTask(Brain):
    """Two networks that take turns, each with an optimizer of its own."""

    def init_optimizers(self) -> None:
        """Give each network its optimizer, under the name by which fit_batch steps it."""
        self.optimizers_dict = {name: self.opt_class(self.modules[name].parameters()) for name in self.modules}

    def fit_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """Train the critic on this batch, then the generator; return the critic's loss."""
        with self.training_ctx:  # computes in the precision of the YAML
            made_BD = self.modules.generator(len(batch))
            real_scores_B1 = self.modules.critic(batch)
            made_scores_B1 = self.modules.critic(made_BD.detach())
            critic_loss = F.softplus(-real_scores_B1).mean() + F.softplus(made_scores_B1).mean()
        self.backward(critic_loss)
        if self.should_step:  # the last batch of an update
            self.optimizers_step("critic")

        with self.training_ctx:
            generator_loss = F.softplus(-self.modules.critic(made_BD)).mean()
        self.backward(generator_loss, "generator")  # flows through the critic, but leaves its gradients empty
        if self.should_step:
            self.optimizers_step("generator")
        self.add_metric("generator_loss", generator_loss)
        return critic_loss.detach()

    def compute_forward(self, batch: torch.Tensor, stage: Stage) -> torch.Tensor:
        """Return as many generated points (B, D) as there are real ones."""
        return self.modules.generator(len(batch))

    def compute_objectives(self, predictions: torch.Tensor, batch: torch.Tensor, stage: Stage) -> torch.Tensor:
        """Return the distance between generated and real points: the loss of validation and test."""
        return energy_distance(predictions, batch)


def energy_distance(x_ND: torch.Tensor, y_ND: torch.Tensor) -> torch.Tensor:
    """Return 2 E|x - y| - E|x - x'| - E|y - y'|, which is 0 for two samples of one distribution (Szekely 2003)."""
    within = [torch.cdist(it, it).sum() / (len(it) * (len(it) - 1)) for it in (x_ND, y_ND)]
    return 2 * torch.cdist(x_ND, y_ND).mean() - sum(within)


def main(argv: list[str] | None = None) -> None:
    """Train, then test the best checkpoint, as the YAML file and the command line say."""
    hparams_file, run_opts, overrides = parse_arguments(argv)
    hparams = load_hparams(hparams_file, overrides)
    datasets, valid_loader_kwargs = hparams["datasets"], hparams["valid_loader_kwargs"]
    brain = MyTask(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    brain.fit(
        hparams["epoch_counter"],
        datasets.train,
        datasets.valid,
        train_loader_kwargs={**hparams["loader_kwargs"], "shuffle": True},
        valid_loader_kwargs=valid_loader_kwargs,
    )
    brain.evaluate(datasets.test, min_key="loss", test_loader_kwargs=valid_loader_kwargs)


if __name__ == "__main__":
    main()
