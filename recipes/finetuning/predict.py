"""Label texts with a fine-tuned model: python recipes/finetuning/predict.py RUN "a text" "another text"

RUN is the output folder of a run of train.py, or its best_model. Without texts, every line of the standard input is
one. Each line is the label, its probability and the text, with tabs between them.
"""

import argparse
import sys
from pathlib import Path

from model import load_fine_tuned

from amp_recipes import Brain, needs_extra
from amp_recipes.errors import AmpRecipesError

with needs_extra("finetuning"):
    from transformers import pipeline


def main(argv: list[str] | None = None) -> None:
    """Print a line for each text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of a run, or its best_model")
    parser.add_argument("texts", nargs="*", help="what to label; none: the lines of the standard input")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16 or auto (default: fp32)")
    parser.add_argument("--batch_size", type=int, default=32, help="texts at a time (default: 32)")
    options = parser.parse_intermixed_args(argv)  # options may stand between the words
    best = options.run / "best_model"
    try:
        model, tokenizer = load_fine_tuned(best if best.is_dir() else options.run)
        brain = Brain({"model": model}, run_opts={"precision": options.precision, "eval_precision": options.precision})
    except AmpRecipesError as error:
        parser.error(str(error))
    label = pipeline("text-classification", model=model, tokenizer=tokenizer, device=brain.device)
    texts = options.texts or [line for line in sys.stdin.read().splitlines() if line.strip()]
    with brain.evaluation_ctx:
        answers = label(texts, batch_size=options.batch_size, truncation=True)
    for text, answer in zip(texts, answers, strict=True):
        print(answer["label"], f"{answer['score']:.4f}", " ".join(text.split()), sep="\t")


if __name__ == "__main__":
    main()
