"""Trains a convolutional network in fp32 as ieee and as tf32, in bf16 and in fp16: images per second, in turns."""

from __future__ import annotations

import logging
import statistics

import torch
from _gpu_networks import convolutions, make_brain
from _gpu_results import parse, result
from _workload import Contender, TimedBatches
from overhead import quartiles, ratios

from amp_recipes.precision import set_float32_precision

WAYS = {"ieee": ("fp32", "ieee"), "tf32": ("fp32", "tf32"), "bf16": ("bf16", "ieee"), "fp16": ("fp16", "ieee")}


def contender(way: str, device: torch.device, small: bool) -> Contender:
    """A Brain in one of the ways."""
    precision, float32 = WAYS[way]
    network = convolutions(8, 1, 8, 4) if small else convolutions(64, 2, 64, 256)
    brain = make_brain(network.make(device), device, precision, float32_precision=float32)

    def fit(batches: TimedBatches) -> None:
        set_float32_precision(float32)  # one for the process: the last Brain that was made has set its own
        brain.fit([1], batches)

    return Contender(brain.modules.model, fit)


def main() -> None:
    """Measure all ways in turn."""
    options = parse(__doc__)
    logging.getLogger("amp_recipes").setLevel(logging.ERROR)
    small, device = options.small, options.device
    images = 4 if small else 256
    network = convolutions(8, 1, 8, 4) if small else convolutions(64, 2, 64, 256)
    batches = TimedBatches(2 if small else 8, device, around=2, make_batch=network.batch)
    trained = {way: contender(way, device, small) for way in WAYS}
    for each in trained.values():
        each.fit(batches)  # cuDNN looks for kernels
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(2 if small else 5):
        for way, each in trained.items():
            each.fit(batches)
            seconds[way].append(batches.seconds)
    for way, own in seconds.items():
        per_second = images * batches.steps / statistics.median(own)
        low, median, high = quartiles(ratios(seconds["ieee"], own))
        result(
            f"images per second, {way}", f"{per_second:,.0f}", None, f"{median:.2f} ({low:.2f} to {high:.2f}) of ieee"
        )


if __name__ == "__main__":
    main()
