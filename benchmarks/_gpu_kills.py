"""Kills runs inside an epoch (SIGKILL), resumes them, and compares their weights with those of an undisturbed run.

Dropout draws from the device's generator, and every update is saved while the device goes on with the next ones.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch
from _gpu_networks import Batch, Trainer, bits_of, language_model, make_brain, same_bits, scratch_folder
from _gpu_results import PRECISIONS, parse, result

from amp_recipes import Stage

STEPS, EPOCHS = 12, 2
KILLED_AT = 8  # of the second epoch's steps
CASES = [*((precision, True) for precision in PRECISIONS), ("bf16", False)]


class Killed(Trainer):
    """Ends itself in the middle of the second epoch, as a power loss would."""

    dies = False

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Know the epoch."""
        self.epoch = epoch

    def on_fit_batch_end(self, batch: Batch, outputs: torch.Tensor, loss: torch.Tensor, should_step: bool) -> None:
        """The update is under way, and the save of the one before."""
        if self.dies and self.epoch == EPOCHS and self.step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, device: torch.device, precision: str, background: bool, small: bool, dies: bool) -> Killed:
    """Train in the folder, going on from what is there."""
    network = language_model(1, 32, 64, 16, 2, 0.1) if small else language_model(4, 256, 512, 128, 8, 0.1)
    brain = make_brain(
        *(network.make(device), device, precision),
        kind=Killed,
        output_folder=str(folder),
        ckpt_interval_steps=1,
        ckpt_background=background,
        deterministic=True,
        ema_decay=0.9,
    )
    brain.dies = dies
    brain.fit(range(1, EPOCHS + 1), network.batches(STEPS, device))
    return brain


def compare(root: Path, precision: str, background: bool, argv: Sequence[str]) -> None:
    """Train undisturbed; kill another run; go on with it; say whether both end alike."""
    options = parse_words(argv)
    name = f"{precision}_{'background' if background else 'foreground'}"
    words = [*argv, f"--folder={root / name}", f"--precision={precision}", *(["--background"] if background else [])]
    killed = subprocess.run([sys.executable, __file__, *words], check=False)
    assert killed.returncode == -signal.SIGKILL, f"the run to be killed ended with status {killed.returncode}"
    whole = train(root / f"{name}_whole", options.device, precision, background, options.small, False)
    resumed = train(root / name, options.device, precision, background, options.small, False)
    equal = same_bits(bits_of(whole.modules), bits_of(resumed.modules))
    equal = equal and whole.optimizer_step == resumed.optimizer_step
    how = "saved in the background" if background else "saved while training waits"
    result(f"{precision}, {how}", "the same bits" if equal else "other bits", equal)


def parse_words(argv: Sequence[str]) -> Namespace:
    """The options; with a folder, be the run that is killed."""
    return parse(
        __doc__.splitlines()[0],
        argv,
        folder={"type": Path},
        precision={"default": "fp32"},
        background={"action": "store_true"},
    )


def main(argv: Sequence[str]) -> None:
    """Go through all cases."""
    options = parse_words(argv)
    if options.folder is not None:
        train(options.folder, options.device, options.precision, options.background, options.small, True)
        return
    root = Path(scratch_folder())
    for precision, background in CASES:
        compare(root, precision, background, argv)


if __name__ == "__main__":
    main(sys.argv[1:])
