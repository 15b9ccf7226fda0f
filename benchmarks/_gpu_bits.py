"""Compares the weights that a Brain trains with those of the hand-written loop, bit for bit, each of them twice."""

from __future__ import annotations

import os

import torch
from _gpu_networks import Network, bits_of, by_hand, convolutions, language_model, make_brain, mlp, same_bits
from _gpu_results import PRECISIONS, parse, result


def networks(small: bool) -> list[Network]:
    """One of each kind."""
    if small:
        return [mlp(32, 16), convolutions(4, 1, 8, 4), language_model(1, 32, 64, 16, 2)]
    return [mlp(1024, 512), convolutions(32, 1, 32, 64), language_model(4, 256, 512, 256, 8)]


def trained(network: Network, device: torch.device, precision: str, optimizer: str, steps: int) -> list[list]:
    """The weights after some steps: by hand, by hand again, by a Brain, by a Brain again."""
    batches = network.batches(steps, device)
    ends = []
    for _ in range(2):
        model = network.make(device)
        by_hand(model, device, precision, optimizer).fit(batches)
        ends.append(bits_of(model))
    for _ in range(2):
        brain = make_brain(network.make(device), device, precision, optimizer)
        brain.fit([1], batches)
        ends.append(bits_of(brain.modules.model))
    return ends


def compare(network: Network, device: torch.device, precision: str, optimizer: str, steps: int) -> None:
    """Train in all ways, and print whether they end alike."""
    what = f"{network.name}, {precision}, {optimizer}"
    try:
        loop, loop_again, brain, brain_again = trained(network, device, precision, optimizer, steps)
    except RuntimeError as error:  # an op that the device has in no deterministic form
        result(what, "failed", False, str(error).strip().splitlines()[0])
        return
    repeats, equal = same_bits(loop, loop_again), same_bits(loop, brain)
    note = "" if repeats else "the loop does not repeat itself, so nothing can be told"
    if not same_bits(brain, brain_again):
        note += "; nor does Brain" if note else "Brain does not repeat itself"
    result(what, "the same bits" if equal else "other bits", equal if repeats else None, note)


def main() -> None:
    """Compare in every network, precision and optimizer."""
    options = parse(__doc__)
    # Attention's and some convolutions' backwards add up in any order otherwise, and nothing could be told.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    for network in networks(options.small):
        for precision in PRECISIONS:
            for optimizer in ("fused", "unfused"):
                compare(network, options.device, precision, optimizer, 4 if options.small else 20)


if __name__ == "__main__":
    main()
