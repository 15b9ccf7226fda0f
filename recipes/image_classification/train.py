"""Train an image classifier: python recipes/image_classification/train.py configs/image_classification.yaml

The network is in model.py, the images in data.py, every setting in the YAML file.
Legend of shapes: B batch, C channels, H height, W width, K classes.
"""

import json

import torch
import torch.nn.functional as F
from data import CLASSES_FILE, check_classes

from amp_recipes import Brain, Stage, create_experiment_directory, load_hparams, parse_arguments


class ImageClassifier(Brain):
    """Cross entropy on images; reports the accuracy."""

    def compute_forward(self, batch: dict[str, torch.Tensor], stage: Stage) -> torch.Tensor:
        """Return the class scores (B, K); training augments the images first."""
        images_BCHW = batch["image"]
        if stage == Stage.TRAIN:
            images_BCHW = self.hparams.augment(images_BCHW)
        return self.modules.model(images_BCHW)

    def compute_objectives(
        self, predictions: torch.Tensor, batch: dict[str, torch.Tensor], stage: Stage
    ) -> torch.Tensor:
        """Return the mean loss and count the right answers; only training smooths the labels."""
        labels_B = batch["label"]
        self.add_metric("accuracy", predictions.argmax(dim=1) == labels_B, len(labels_B))
        smoothing = self.hparams.label_smoothing if stage == Stage.TRAIN else 0.0
        # The loss in fp32 at every precision, because a softmax sums many small numbers.
        return F.cross_entropy(predictions.float(), labels_B, label_smoothing=smoothing)


def main(argv: list[str] | None = None) -> None:
    """Train, then test the best checkpoint, as the YAML file and the command line say."""
    hparams_file, run_opts, overrides = parse_arguments(argv)
    hparams = load_hparams(hparams_file, overrides)
    create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    images = hparams["images"]
    brain = ImageClassifier(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    if classes_file := brain.output_path(CLASSES_FILE):
        if run_opts.resume != "never":
            check_classes(classes_file, images.classes)
        classes_file.write_text(json.dumps(images.classes))
    loader_kwargs = hparams["loader_kwargs"]
    brain.fit(
        hparams["epoch_counter"],
        images.train,
        images.valid,
        train_loader_kwargs={**loader_kwargs, "shuffle": True},
        valid_loader_kwargs=loader_kwargs,
    )
    brain.evaluate(images.test, max_key="accuracy", test_loader_kwargs=loader_kwargs)


if __name__ == "__main__":
    main()
