"""Print what is said in audio files: python recipes/speech_recognition/predict.py RUN FILE...

RUN is the output folder of a run of train.py, or what `amp-recipes export` wrote. Each line is the file and, after a
tab, the transcript (or the keyword). Legend of shapes: T frames, M mel bands.
"""

import argparse
from typing import Any

import torch
from data import collate, read_audio

from amp_recipes import Brain, load_trained
from amp_recipes.errors import AmpRecipesError


def listen(brain: Brain, file: str) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return the features (1, T, M) of a file, the scores of the model, and its number of steps.

    brain: from `load_trained`. Raises DataError for a file that cannot be read.
    """
    wave = read_audio(file, brain.hparams.sample_rate)
    batch: dict[str, Any] = collate([{"wave": wave, "target": torch.zeros(0, dtype=torch.int64)}])
    waves, num_samples = batch["wave"].to(brain.device), batch["num_samples"].to(brain.device)
    with torch.inference_mode(), brain.evaluation_ctx:
        features_BTM, num_frames_B = brain.modules.features(waves, num_samples)
        scores, num_steps_B = brain.modules.model(features_BTM, num_frames_B)
    return features_BTM, scores.float(), num_steps_B.tolist()


def transcribe(brain: Brain, file: str) -> str:
    """Return what is said in a file."""
    _, scores, num_steps = listen(brain, file)
    return brain.hparams.objective.decode(scores, num_steps)[0]


def main(argv: list[str] | None = None) -> None:
    """Print a line for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="output folder of a run")
    parser.add_argument("files", nargs="+", help="wav, flac, ogg or opus files")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16 or auto (default: fp32)")
    parser.add_argument(
        "--beam_size", type=int, help="hypotheses of the beam search; 1: the best path (default: as trained)"
    )
    options = parser.parse_args(argv)
    try:
        brain = load_trained(options.run, options.precision)
        if options.beam_size is not None:
            brain.hparams.objective.beam_size = options.beam_size
        for file in options.files:
            print(file, transcribe(brain, file), sep="\t", flush=True)
    except AmpRecipesError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
