"""Write text with a trained model: python recipes/language_modeling/sample.py RUN_FOLDER --prompt "def "

RUN_FOLDER is the output folder of a run (its best checkpoint), one of its CKPT+ folders, or what `amp-recipes export`
wrote.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path

from data import Corpus
from model import generate
from safetensors.torch import load_file
from tokenizers import Tokenizer
from train import LanguageModel

from amp_recipes import load_hparams
from amp_recipes.checkpoint import best_checkpoint, load_weights, model_weights
from amp_recipes.errors import CheckpointError


def load_run(folder: Path, run_opts: dict[str, object], data_path: str | None = None) -> LanguageModel:
    """Return the trained model of a run, in a Brain that holds it on the device; nothing is written.

    data_path: where the text or the shards (whose tokenizer is needed) are now, if they were moved.
    Raises CheckpointError if the folder holds no such run.
    """
    homes = [folder, *folder.parents[:2]] if folder.name.startswith("CKPT+") else [folder]
    settings = next((home / "hyperparams.yaml" for home in homes if (home / "hyperparams.yaml").is_file()), None)
    if settings is None:
        raise CheckpointError(f"there is no hyperparams.yaml in '{folder}'; expected the output folder of a run")
    hparams = load_hparams(str(settings), {} if data_path is None else {"corpus": {"data_path": data_path}})
    brain = LanguageModel(hparams["modules"], hparams=hparams, run_opts={**run_opts, "output_folder": None})
    exported = folder / "model.safetensors"
    weights = load_file(exported) if exported.is_file() else model_weights(best_checkpoint(folder))
    load_weights(brain.modules, weights, str(folder))
    brain.modules.eval()
    return brain


def encode(text: str, corpus: Corpus) -> list[int]:
    """Return the tokens of text."""
    if corpus.tokenizer is None:
        return list(text.encode())
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer))
    tokenizer.encode_special_tokens = True  # as prepare.py has it
    return tokenizer.encode(text, add_special_tokens=False).ids


def decode(tokens: Iterable[int], corpus: Corpus) -> str:
    """Return the text of tokens; bytes that are no UTF-8 become question marks."""
    if corpus.tokenizer is None:
        return bytes(tokens).decode(errors="replace")
    return Tokenizer.from_file(str(corpus.tokenizer)).decode(list(tokens))


def main(argv: list[str] | None = None) -> None:
    """Print the prompt and what the model makes of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of a run")
    parser.add_argument("--prompt", default="", help="how the text begins; without one, at a document's beginning")
    parser.add_argument("--tokens", type=int, default=200, help="the most tokens to add (200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (0.8)")
    parser.add_argument("--top_k", type=int, default=40, help="draw among so many likeliest tokens; 0: all (40)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed writes the same text (1)")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16 (fp32)")
    parser.add_argument("--device", default=None, help="cpu, cuda ... (the best one)")
    parser.add_argument("--data_path", default=None, help="where the text or shards are now, if they were moved")
    settings = parser.parse_args(argv)
    run_opts = {"eval_precision": settings.precision, "device": settings.device}
    brain = load_run(settings.run, run_opts, settings.data_path)
    corpus = brain.hparams.corpus
    prompt = [corpus.separator, *encode(settings.prompt, corpus)]
    with brain.evaluation_ctx:
        written = list(
            generate(brain.modules.model, prompt, settings.tokens, settings.temperature, settings.top_k, settings.seed)
        )
    if corpus.separator in written:
        written = written[: written.index(corpus.separator)]
    print(settings.prompt + decode(written, corpus))


if __name__ == "__main__":
    main()
