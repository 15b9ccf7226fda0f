"""Draw what the network sees and says: python recipes/speech_recognition/draw.py RUN FILE PICTURE.png

Above, the features of an audio file; below, the probability of each output in each step (or of each keyword).
Legend of shapes: T frames, M mel bands, K outputs.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
from data import read_audio
from predict import listen

from amp_recipes import Brain, load_trained


def draw(brain: Brain, file: str, picture: str | Path) -> None:
    """Write the picture of a file. brain: from `load_trained`."""
    features_BTM, scores, num_steps = listen(brain, file)
    objective, sample_rate = brain.hparams.objective, brain.hparams.sample_rate
    seconds = read_audio(file, sample_rate).numel() / sample_rate
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5), layout="constrained", height_ratios=[1, 1.4])
    features_MT = features_BTM[0].T.float().cpu()
    above.imshow(features_MT, origin="lower", aspect="auto", extent=(0, seconds, 0, len(features_MT)))
    above.set(title=objective.decode(scores, num_steps)[0], ylabel="mel band", xlabel="seconds")
    probabilities = scores[0].softmax(dim=-1).cpu()
    if probabilities.ndim == 1:
        below.bar(objective.names, probabilities)
        below.set(ylabel="probability")
    else:
        said_K = (probabilities.amax(dim=0) > 0.2).nonzero().flatten().tolist()
        extent = (0, seconds, len(said_K) - 0.5, -0.5)
        below.imshow(probabilities[:, said_K].T, aspect="auto", cmap="Greys", vmin=0, vmax=1, extent=extent)
        below.set_yticks(range(len(said_K)), [objective.names[output] for output in said_K])
        below.set(ylabel="output", xlabel="seconds")
    figure.savefig(picture, dpi=80)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Draw the file on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="output folder of a run")
    parser.add_argument("file", help="a wav, flac, ogg or opus file")
    parser.add_argument("picture", help="the .png to write")
    options = parser.parse_args(argv)
    draw(load_trained(options.run), options.file, options.picture)


if __name__ == "__main__":
    main()
