"""Compare the speed of fp32 and bf16: python recipes/language_modeling/speed.py configs/language_modeling.yaml

Takes every option of train.py. Each turn trains `--steps_per_epoch` updates in fp32, then in bf16; there are
`--number_of_epochs` turns after one to warm up. Nothing is written or validated.
"""

import statistics
import sys

from train import LanguageModel

from amp_recipes import load_hparams, parse_arguments

PRECISIONS = ("fp32", "bf16")


def make_brain(argv: list[str], precision: str) -> LanguageModel:
    """Return a Brain at this precision that writes no files."""
    hparams_file, run_opts, overrides = parse_arguments(
        [*argv, f"--precision={precision}", "--output_folder=null", "--noprogressbar", "--peak_flops=1"]
    )
    hparams = load_hparams(hparams_file, overrides)
    return LanguageModel(hparams["modules"], hparams["opt_class"], hparams, run_opts)


def measure(brain: LanguageModel, turn: int) -> float:
    """Train one turn, and return its tokens per second."""
    corpus, loader_kwargs = brain.hparams.corpus, brain.hparams.loader_kwargs
    brain.fit([turn], corpus.train, train_loader_kwargs=loader_kwargs)
    return brain.summary.last["train"]["tokens_per_second"]


def main(argv: list[str] | None = None) -> None:
    """Print the median speeds and the median of the turns' ratios."""
    argv = sys.argv[1:] if argv is None else argv
    brains = {precision: make_brain(argv, precision) for precision in PRECISIONS}
    speeds: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    for turn in range(1, brains["fp32"].hparams.number_of_epochs + 2):
        for precision, brain in brains.items():
            speeds[precision].append(measure(brain, turn))
    measured = {precision: values[1:] for precision, values in speeds.items()}
    for precision, values in measured.items():
        print(f"{precision}: {statistics.median(values):.0f} tokens per second")
    ratios = [bf16 / fp32 for fp32, bf16 in zip(*measured.values(), strict=True)]
    print(f"bf16 is {statistics.median(ratios):.2f} times as fast (turns: {min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
