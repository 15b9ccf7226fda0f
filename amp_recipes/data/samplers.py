"""In which order an epoch takes its samples."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sized

import torch
from torch.utils.data import Sampler


def epoch_seed(seed: int, epoch: int, purpose: str) -> int:
    """A 64-bit seed for one generator: a function of its arguments only, on every machine.

    Hashed, because with `seed + epoch` run 1 would repeat in epoch 0 what run 0 does in epoch 1, and because
    torch's CPU generator takes only the low 32 bits of a seed, which a hash fills evenly. `purpose` keeps the
    order of the samples independent of what loader workers draw.
    """
    digest = hashlib.blake2b(f"{purpose}/{seed}/{epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class EpochShuffle(Sampler[int]):
    """The indices of `dataset` in an order that is a function of (seed, epoch) only.

    Iterating twice in an epoch gives the same order twice, so a resumed run finds its place again; the
    global generators are neither read nor moved. `set_epoch` chooses the epoch (0 until then).
    """

    def __init__(self, dataset: Sized, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Give the order of that epoch from the next iteration on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch, "shuffle"))
        return iter(torch.randperm(len(self.dataset), generator=generator).tolist())
