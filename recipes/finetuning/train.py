"""Fine-tune a text classifier: python recipes/finetuning/train.py configs/finetuning.yaml

The pretrained model is in model.py, the texts in data.py, every setting in the YAML file.
Legend of shapes: B batch, T tokens, K classes.
"""

import torch
from model import freeze_modes, save_for_transformers

from amp_recipes import Brain, Stage, create_experiment_directory, load_hparams, needs_extra, parse_arguments
from amp_recipes.distributed import is_sharded

with needs_extra("finetuning"):
    from sklearn.metrics import f1_score


class TextClassifier(Brain):
    """Cross entropy on texts; reports accuracy, and the mean of the classes' F1 on the valid and test sets."""

    def compute_forward(self, batch: dict[str, torch.Tensor], stage: Stage) -> torch.Tensor:
        """Return the class scores (B, K)."""
        return self.modules.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def compute_objectives(
        self, predictions: torch.Tensor, batch: dict[str, torch.Tensor], stage: Stage
    ) -> torch.Tensor:
        """Return the mean loss of the batch, each text counted as its class's weight; collect the answers."""
        labels_B = batch["labels"]
        answers_B = predictions.detach().argmax(dim=1)
        self.add_metric("accuracy", answers_B == labels_B, len(labels_B))
        if stage != Stage.TRAIN:
            self.answers.append(torch.stack((labels_B, answers_B)))
        return self.modules.loss(predictions, labels_B)

    def batch_weight(self, batch: dict[str, torch.Tensor]) -> float:
        """Return the weight of the batch in an accumulation window: its texts, or the sum of their class weights.

        Batches by length are not always full, and a weighted mean is divided by the sum of its weights.
        """
        weights_K = self.hparams.texts.class_weights
        return float(len(batch["labels"]) if weights_K is None else weights_K[batch["labels"]].sum())

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Start with no answers; put modules that are all frozen into evaluation mode."""
        self.answers = []
        freeze_modes(self.modules)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> dict[str, float]:
        """Return the macro F1; after the test, save what was tested for users of transformers."""
        if stage == Stage.TRAIN:
            return {}
        of_processes = self.gather(self.answers)
        labels, answers = torch.cat([both for own in of_processes for both in own], dim=1).tolist()
        self.answers = []
        folder = self.output_path("best_model") if stage == Stage.TEST else None
        if folder is not None and not is_sharded(self.modules):  # then `amp-recipes export` gathers the parts
            save_for_transformers(self.hparams.model, self.hparams.tokenizer, folder)
        return {"macro_f1": float(f1_score(labels, answers, average="macro", zero_division=0.0))}


def main(argv: list[str] | None = None) -> None:
    """Train, then test the best checkpoint, as the YAML file and the command line say."""
    hparams_file, run_opts, overrides = parse_arguments(argv)
    hparams = load_hparams(hparams_file, overrides)
    create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    texts = hparams["texts"]
    brain = TextClassifier(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    train_kwargs, valid_kwargs = hparams["train_loader_kwargs"], hparams["valid_loader_kwargs"]
    brain.fit(hparams["epoch_counter"], texts.train, texts.valid, None, train_kwargs, valid_kwargs)
    brain.evaluate(texts.test, max_key=hparams["early_stop_metric"], test_loader_kwargs=valid_kwargs)


if __name__ == "__main__":
    main()
