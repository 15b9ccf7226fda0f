"""Tell the class of images: python recipes/image_classification/predict.py RUN IMAGE...

RUN is the output folder of a run of train.py, or what `amp-recipes export` wrote. Each line is the file, the class and
its probability, with tabs between them.
"""

import argparse

import torch
from data import CLASSES_FILE, check_classes, read_image

from amp_recipes import load_trained
from amp_recipes.errors import AmpRecipesError, ConfigError, DataError
from amp_recipes.trained import run_folder


def classify(run: str, files: list[str], precision: str = "fp32", data_folder: str | None = None) -> list[tuple]:
    """Return (class, probability) of each image file, by the best weights of a run."""
    overrides = {} if data_folder is None else {"images": {"data_folder": data_folder}}
    try:
        brain = load_trained(run, precision, overrides=overrides)
    except (ConfigError, DataError) as error:
        hint = "If the images of the training were moved, give their folder: --data_folder FOLDER"
        raise DataError(f"{error}\n{hint}") from error
    images = brain.hparams.images  # knows the names of the classes, and what the images must look like
    check_classes(run_folder(run) / CLASSES_FILE, images.classes)
    answers = []
    for file in files:
        image_CHW = read_image(file, images.image_size, images.channels)
        with torch.inference_mode(), brain.evaluation_ctx:
            scores_1K = brain.modules.model(image_CHW.unsqueeze(0).to(brain.device))
        probability, label = scores_1K[0].float().softmax(dim=0).max(dim=0)
        answers.append((images.classes[label], probability.item()))
    return answers


def main(argv: list[str] | None = None) -> None:
    """Print a line for each image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="output folder of a run")
    parser.add_argument("files", nargs="+", help="images of any size")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16 or auto (default: fp32)")
    parser.add_argument("--data_folder", help="where the images of the training are now, if they were moved")
    options = parser.parse_args(argv)
    try:
        answers = classify(options.run, options.files, options.precision, options.data_folder)
    except AmpRecipesError as error:
        parser.error(str(error))
    for file, (name, probability) in zip(options.files, answers, strict=True):
        print(file, name, f"{probability:.3f}", sep="\t")


if __name__ == "__main__":
    main()
