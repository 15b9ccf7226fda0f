"""Label texts with a fine-tuned model: python recipes/finetuning/classify.py RUN/best_model "a text" "another text"

Without texts, every line of the standard input is one. Writes label, probability and text, separated by tabs.
"""

import argparse
import sys

from model import load_fine_tuned
from transformers import pipeline

from amp_recipes.errors import AmpRecipesError


def main(argv: list[str] | None = None) -> None:
    """Print a line for each text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_folder", help="best_model in the output folder of a run")
    parser.add_argument("texts", nargs="*", help="what to label; none: the lines of the standard input")
    parser.add_argument("--batch_size", type=int, default=32, help="texts at a time (default: 32)")
    arguments = parser.parse_args(argv)
    try:
        model, tokenizer = load_fine_tuned(arguments.model_folder)
    except AmpRecipesError as error:
        parser.error(str(error))
    label = pipeline("text-classification", model=model, tokenizer=tokenizer)
    texts = arguments.texts or [line for line in sys.stdin.read().splitlines() if line.strip()]
    for text, found in zip(texts, label(texts, batch_size=arguments.batch_size, truncation=True), strict=True):
        print(found["label"], f"{found['score']:.4f}", " ".join(text.split()), sep="\t")


if __name__ == "__main__":
    main()
