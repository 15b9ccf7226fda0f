"""Train my_task: python train.py my_task.yaml

The network is in model.py, the data in data.py, every setting in my_task.yaml.
Legend of shapes: B batch, K classes.
"""

import torch
import torch.nn.functional as F
from amp_recipes import Brain, Stage, load_hparams, parse_arguments


class MyTask(Brain):
    """Learns the class of each sample by cross entropy; reports the accuracy."""

    def compute_forward(self, batch: dict[str, torch.Tensor], stage: Stage) -> torch.Tensor:
        """Return the scores of the classes (B, K). The batch is on the device, the precision is set."""
        return self.modules.model(batch["features"])

    def compute_objectives(
        self, predictions: torch.Tensor, batch: dict[str, torch.Tensor], stage: Stage
    ) -> torch.Tensor:
        """Return the mean loss of the batch, and count the right answers."""
        labels_B = batch["label"]
        # Your own metrics: a metric is the sum of its totals divided by the sum of its counts.
        self.add_metric("accuracy", predictions.argmax(dim=1) == labels_B, len(labels_B))
        # The loss in fp32 at every precision, because a softmax sums many small numbers.
        return F.cross_entropy(predictions.float(), labels_B)


def main(argv: list[str] | None = None) -> None:
    """Train, then test the best checkpoint, as the YAML file and the command line say."""
    hparams_file, run_opts, overrides = parse_arguments(argv)
    hparams = load_hparams(hparams_file, overrides)
    datasets, loader_kwargs = hparams["datasets"], hparams["loader_kwargs"]
    brain = MyTask(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    brain.fit(
        hparams["epoch_counter"],
        datasets.train,
        datasets.valid,
        train_loader_kwargs={**loader_kwargs, "shuffle": True},
        valid_loader_kwargs=loader_kwargs,
    )
    brain.evaluate(datasets.test, max_key="accuracy", test_loader_kwargs=loader_kwargs)


if __name__ == "__main__":
    main()
