"""How long a save makes training stand still: of the language model of 124 M parameters with AdamW, about 1.5 GB.

The device is waited for after each step, so that a step's time is its own. Printed: the median of the steps without a
save, and what the step with the first save, and with a later one, takes beyond that.
"""

from __future__ import annotations

import logging
import statistics
import time

import torch
from _gpu_networks import Batch, Trainer, language_model_124m, make_brain, scratch_folder
from _gpu_results import parse, result, wait_for

WARM_UP = 3


class Timed(Trainer):
    """Notes when each batch begins: a save is between two of them."""

    def on_fit_batch_start(self, batch: Batch, should_step: bool) -> None:
        """A batch begins."""
        wait_for(self.device)
        self.begins.append(time.perf_counter())


def measure(device: torch.device, background: bool, small: bool) -> None:
    """Train, and save now and then."""
    network = language_model_124m(small)
    interval, saves = (4, 3) if small else (30, 4)
    folder = scratch_folder()
    brain = make_brain(
        *(network.make(device), device, "bf16"),
        kind=Timed,
        output_folder=folder,
        ckpt_interval_steps=interval,
        ckpt_background=background,
    )
    brain.begins = []
    brain.fit([1], network.batches(interval * saves + 2, device))
    times = [after - before for before, after in zip(brain.begins, brain.begins[1:], strict=False)]
    # Step n (from 1) begins at begins[n - 1]; the save after it falls before the begin of the next.
    saving = {interval * number - 1 for number in range(1, saves + 1)}
    plain = [seconds for index, seconds in enumerate(times) if index >= WARM_UP and index not in saving]
    usual = statistics.median(plain)
    how = "in the background" if background else "while training waits"
    result(f"a step without a save, {how}", f"{1e3 * usual:.1f} ms", None, f"of {len(plain)}; some beside a write")
    first, *later = [times[index] - usual for index in sorted(saving)]
    result(f"the first save, {how}", f"{1e3 * first:.1f} ms more")
    result(f"a later save, {how}", f"{1e3 * statistics.median(later):.1f} ms more", None, f"median of {len(later)}")
    slowest = max(plain) - usual
    result(f"the slowest step without a save, {how}", f"{1e3 * slowest:.1f} ms more")


def main() -> None:
    """In both ways."""
    options = parse(__doc__.splitlines()[0])
    logging.getLogger("amp_recipes").setLevel(logging.ERROR)
    for background in (True, False):
        measure(options.device, background, options.small)


if __name__ == "__main__":
    main()
