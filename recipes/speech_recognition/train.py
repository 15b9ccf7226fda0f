"""Train a speech recogniser: python recipes/speech_recognition/train.py configs/speech_recognition.yaml

The features are in features.py, the network in model.py, what is learned (characters by CTC, or keywords) in
objectives.py, the recordings in data.py, every setting in the YAML file.
Legend of shapes: B batch, S samples, T frames or steps, M mel bands, K outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch

from amp_recipes import Brain, Stage, create_experiment_directory, load_hparams, parse_arguments

Batch = dict[str, Any]


class SpeechRecognizer(Brain):
    """Learns what its objective says, from log-mel features; reports the objective's error rates."""

    def compute_forward(self, batch: Batch, stage: Stage) -> torch.Tensor:
        """Return the scores; training adds noise and masks some of the features."""
        waves_BS, num_samples_B = batch["wave"], batch["num_samples"]
        if stage == Stage.TRAIN:
            waves_BS = self.hparams.add_noise(waves_BS, num_samples_B)
        features_BTM, num_frames_B = self.modules.features(
            waves_BS, num_samples_B, force_allow_autocast=not self.hparams.pin_features
        )
        if stage == Stage.TRAIN:
            features_BTM = self.hparams.spec_augment(features_BTM, num_frames_B)
        scores, _ = self.modules.model(features_BTM, num_frames_B)
        return scores

    def compute_objectives(self, scores: torch.Tensor, batch: Batch, stage: Stage) -> torch.Tensor:
        """Return the objective's loss; in validation and test count the errors, over the whole set and per speaker."""
        objective, num_steps = self.hparams.objective, self.num_steps(batch)
        if stage != Stage.TRAIN:
            self.add_errors(scores, num_steps, batch)
        if stage == Stage.TEST:
            for speaker in sorted(set(batch.get("speaker", []))):
                rows = [row for row, name in enumerate(batch["speaker"]) if name == speaker]
                part = {"target": batch["target"][rows], "label_counts": [batch["label_counts"][row] for row in rows]}
                self.add_errors(scores[rows], [num_steps[row] for row in rows], part, f" of {speaker}")
        return objective.loss(scores, num_steps, batch, force_allow_autocast=not self.hparams.pin_loss)

    def add_errors(self, scores: torch.Tensor, num_steps: Sequence[int], batch: Batch, of: str = "") -> None:
        """Add a batch's errors to the metrics of the stage; of: a suffix of their names."""
        for name, (errors, total) in self.hparams.objective.count(scores, num_steps, batch).items():
            self.add_metric(name + of, errors, total)

    def batch_weight(self, batch: Batch) -> int:
        """Return the weight of the batch in averages and windows: its steps, or its recordings, without padding."""
        return self.hparams.objective.weight(self.num_steps(batch))

    def num_steps(self, batch: Batch) -> list[int]:
        """Return the steps of each recording's scores, without padding."""
        features, model = self.hparams.features, self.hparams.model
        return [model.num_steps(features.num_frames(count)) for count in batch["sample_counts"]]


def main(argv: list[str] | None = None) -> None:
    """Train, then test the best checkpoint, as the YAML file and the command line say."""
    hparams_file, run_opts, overrides = parse_arguments(argv)
    hparams = load_hparams(hparams_file, overrides)
    create_experiment_directory(hparams["output_folder"], hparams_file, overrides)
    speech = hparams["load_speech"]()

    def loader_kwargs(recordings, shuffle: bool = False):
        return {**hparams["loader_kwargs"], "batch_sampler": hparams["batches"](recordings.durations, shuffle=shuffle)}

    brain = SpeechRecognizer(hparams["modules"], hparams["opt_class"], hparams, run_opts)
    brain.fit(
        hparams["epoch_counter"],
        speech.train,
        speech.valid,
        train_loader_kwargs=loader_kwargs(speech.train, shuffle=True),
        valid_loader_kwargs=loader_kwargs(speech.valid),
    )
    brain.evaluate(speech.test, **hparams["best"], test_loader_kwargs=loader_kwargs(speech.test))


if __name__ == "__main__":
    main()
