"""Print what is said in audio files: python recipes/speech_recognition/transcribe.py RUN FILE...

RUN is the output folder of a run of train.py; its best weights and its resolved settings are used, not its data.
Each line is the file, a tab, and the transcript (or the keyword). --beam_size=16 searches, as in the YAML;
--picture=PATH.png draws what the network saw and said. Legend of shapes: S samples, T frames or steps, M mel bands,
K outputs.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from data import collate, read_audio

from amp_recipes import load_hparams
from amp_recipes.checkpoint import best_checkpoint, model_weights
from amp_recipes.errors import DataError


class Transcriber:
    """The features, the network and the decoding of a finished run.

    run: the output folder. Raises CheckpointError where it has no checkpoint, DataError where it has no settings.
    """

    def __init__(self, run: str | Path):
        settings = Path(run) / "hyperparams.yaml"
        if not settings.is_file():
            raise DataError(f"'{run}' has no {settings.name}; expected the output folder of a run of train.py")
        hparams = load_hparams(settings)
        self.sample_rate = hparams["sample_rate"]
        self.objective = hparams["objective"]
        self.modules = torch.nn.ModuleDict(hparams["modules"])
        self.modules.load_state_dict(model_weights(best_checkpoint(Path(run))))
        self.modules.eval()

    @torch.no_grad()
    def listen(self, path: str | Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return features (1, T, M), scores and steps of a file; raises DataError for one that is unreadable."""
        batch = collate([{"wave": read_audio(path, self.sample_rate), "target": torch.zeros(0, dtype=torch.int64)}])
        features_BTM, num_frames_B = self.modules["features"](batch["wave"], batch["num_samples"])
        return features_BTM, *self.modules["model"](features_BTM, num_frames_B)

    def transcribe(self, path: str | Path) -> str:
        """Return what is said in a file."""
        _, scores, num_steps_B = self.listen(path)
        return self.objective.decode(scores, num_steps_B.tolist())[0]

    def draw(self, path: str | Path, picture: str | Path) -> None:
        """Draw a file's features and, below, the probability of each output in each step (or of each label)."""
        features_BTM, scores, num_steps_B = self.listen(path)
        seconds = read_audio(path, self.sample_rate).numel() / self.sample_rate
        figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), layout="constrained", height_ratios=[1, 1.4])
        above.imshow(features_BTM[0].T, origin="lower", aspect="auto", extent=(0, seconds, 0, features_BTM.shape[2]))
        above.set(title=self.objective.decode(scores, num_steps_B.tolist())[0], ylabel="mel band", xlabel="seconds")
        probabilities = scores[0].softmax(dim=-1)
        if probabilities.ndim == 1:
            below.bar(self.objective.names, probabilities)
            below.set(ylabel="probability")
        else:
            said_K = (probabilities.amax(dim=0) > 0.2).nonzero().flatten().tolist()
            extent = (0, seconds, len(said_K) - 0.5, -0.5)
            below.imshow(probabilities[:, said_K].T, aspect="auto", cmap="Greys", vmin=0, vmax=1, extent=extent)
            below.set_yticks(range(len(said_K)), [self.objective.names[output] for output in said_K])
            below.set(ylabel="output", xlabel="seconds")
        figure.savefig(picture, dpi=80)
        plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Print the transcripts of the files on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", help="output folder of a run of train.py")
    parser.add_argument("files", nargs="+", help="wav, flac or ogg files")
    parser.add_argument("--beam_size", type=int, help="hypotheses that decoding follows; absent: as the run's")
    parser.add_argument("--picture", help="file for a picture of the first recording")
    arguments = parser.parse_args(argv)
    transcriber = Transcriber(arguments.run)
    if arguments.beam_size is not None:
        transcriber.objective.beam_size = arguments.beam_size
    if arguments.picture is not None:
        transcriber.draw(arguments.files[0], arguments.picture)
    for path in arguments.files:
        print(path, transcriber.transcribe(path), sep="\t", flush=True)


if __name__ == "__main__":
    main()
