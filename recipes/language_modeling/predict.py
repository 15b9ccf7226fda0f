"""Write text with a trained model: python recipes/language_modeling/predict.py RUN "def "

RUN is the output folder of a run of train.py, one of its CKPT+ folders, or what `amp-recipes export` wrote.
"""

import argparse

from model import generate

from amp_recipes import load_trained
from amp_recipes.errors import AmpRecipesError


def main(argv: list[str] | None = None) -> None:
    """Print the prompt, and how the model continues it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="output folder of a run")
    parser.add_argument("prompt", nargs="?", default="", help="how the text begins; without one, a new document begins")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add, at most (default: 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top_k", type=int, default=40, help="draw among this many likeliest tokens; 0: all (40)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed writes the same text (default: 1)")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16 or auto (default: fp32)")
    parser.add_argument("--device", help="cpu, cuda ... (default: the best one)")
    parser.add_argument("--data_path", help="where the text or the shards are now, if they were moved")
    options = parser.parse_intermixed_args(argv)  # options may stand between the words
    overrides = {} if options.data_path is None else {"corpus": {"data_path": options.data_path}}
    try:
        brain = load_trained(options.run, options.precision, options.device, overrides)
        corpus = brain.hparams.corpus
        prompt = [corpus.separator, *corpus.encode(options.prompt)]
    except AmpRecipesError as error:
        parser.error(str(error))
    with brain.evaluation_ctx:
        drawn = generate(brain.modules.model, prompt, options.tokens, options.temperature, options.top_k, options.seed)
        written = list(drawn)
    if corpus.separator in written:
        written = written[: written.index(corpus.separator)]
    print(options.prompt + corpus.decode(written))


if __name__ == "__main__":
    main()
