"""Takes a census, a drift and a diagnosis of the language model, and a diagnosis of a network that must overflow."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from _gpu_networks import Network, language_model, loss_of, make_brain, mlp
from _gpu_results import parse, result, wait_for
from torch import nn

from amp_recipes.numerics import Diagnosis
from amp_recipes.numerics.census.census import take_census
from amp_recipes.numerics.drift.drift import drift
from amp_recipes.numerics.trial import plain_trial
from amp_recipes.numerics.verdict import headline_of

SCALE = 1024.0  # of the loss at fp16
FIRST_SENTENCES = 280


class Overflows(nn.Module):
    """Multiplies by a factor and divides by it again: nothing, where the dtype holds the product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.large = nn.Linear(width, width)
        self.small = nn.Linear(width, width)
        with torch.no_grad():
            self.large.weight.copy_(1e6 * torch.eye(width))
            self.small.weight.copy_(1e-6 * torch.eye(width))

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """(B, D) to the same."""
        return self.small(self.large(x_BD))


def overflowing(width: int) -> Network:
    """A network with that in its middle."""
    plain = mlp(width, 4 * width)
    return Network(
        "planted overflow", lambda: nn.Sequential(plain.model()[0], Overflows(width), nn.Linear(width, 10)), plain.batch
    )


@contextmanager
def timed(device: torch.device) -> Iterator[list[float]]:
    """Appends the seconds that its inside takes."""
    seconds: list[float] = []
    wait_for(device)
    began = time.perf_counter()
    yield seconds
    wait_for(device)
    seconds.append(time.perf_counter() - began)


def look_into(network: Network, device: torch.device) -> None:
    """A census and a drift of one step at both low precisions."""
    batches = [tuple(each.to(device) for each in batch) for batch in network.batches(2, device)]
    trial = plain_trial(network.make(device), lambda model, batch: loss_of(model(batch[0]), batch[1]))
    for name, dtype, scale in (("bf16", torch.bfloat16, 1.0), ("fp16", torch.float16, SCALE)):
        trial.run(batches[:1], dtype, scale)  # what is allocated and looked for once
        with timed(device) as seconds:
            census = take_census(trial, batches[:1], dtype, scale)
        # Where the step does not repeat itself, that is the device's, and not the instrument's.
        holds = None if "does not repeat itself" in census.neutrality_note else census.neutral
        result(f"census, {name}", f"{seconds[0]:.1f} s", holds, census.neutrality_note)
        ratio = census.seconds / census.bare_seconds
        result(
            f"census, {name}, watched step",
            f"{ratio:.2f} of a bare one",
            None,
            f"{sum(it.calls for it in census.ops)} ops",
        )
        with timed(device) as seconds:
            rows = drift(trial, [[batch] for batch in batches], dtype, scale)
        finite = all(math.isfinite(row.sensitivity) for row in rows)
        told = "; ".join(f"{row.module} S {row.sensitivity:.2g}" for row in rows[:3])
        result(f"drift, {name}", f"{seconds[0]:.1f} s, {len(rows)} modules", finite, f"the most sensitive: {told}")


def diagnosis_of(network: Network, device: torch.device, small: bool) -> Diagnosis:
    """What the diagnosis says of a network; printed with the time it took."""
    brain = make_brain(network.make(device), device, "fp32")
    steps, minutes = (5, 0.3) if small else (50, 0.8)
    with timed(device) as seconds:
        found = brain.diagnose(network.batches(6, device), precisions=("bf16", "fp16"), steps=steps, minutes=minutes)
    result(f"diagnosis, {network.name}", f"{seconds[0]:.1f} s")
    for answer in found.answers:
        said = headline_of(answer)[:FIRST_SENTENCES]
        result(f"diagnosis, {network.name}, {answer.name}", answer.decision, None, said)
    for note in found.notes:
        result(f"diagnosis, {network.name}, note", note[:FIRST_SENTENCES])
    return found


def main() -> None:
    """The language model, then what must be found."""
    options = parse(__doc__)
    logging.getLogger("amp_recipes").setLevel(logging.ERROR)
    device, small = options.device, options.small
    network = language_model(1, 32, 64, 16, 2) if small else language_model(12, 768, 50304, 512, 4)
    planted = diagnosis_of(overflowing(16 if small else 256), device, small)
    fp16 = next((answer for answer in planted.answers if answer.name == "fp16"), None)
    culprits = [] if fp16 is None else [row.module for row in fp16.nonfinite]
    found = any("1.large" in name for name in culprits)
    result("the planted overflow is found", ", ".join(culprits) or "nothing", found)
    look_into(network, device)
    diagnosis_of(network, device, small)


if __name__ == "__main__":
    main()
