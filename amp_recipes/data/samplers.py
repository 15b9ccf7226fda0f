"""Orders the samples of an epoch, and selects those of this process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any

import torch
from torch import Tensor
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

    def order(self) -> Tensor:
        """The epoch's indices as a tensor (int64)."""
        generator = torch.Generator().manual_seed(epoch_seed(self.seed, self.epoch, "shuffle"))
        return torch.randperm(len(self.dataset), generator=generator)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order().tolist())


def shares_itself(loader: Any) -> bool:
    """Whether a loader's sampler gives each rank its own samples, as torch's DistributedSampler."""
    return any(hasattr(sampler, name) for sampler in samplers_of(loader) for name in ("num_replicas", "rank"))


def samplers_of(loader: Any) -> list[Any]:
    """A loader's sampler and batch sampler, and the sampler inside the latter: those that there are, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    return list({id(sampler): sampler for sampler in found if sampler is not None}.values())


def rank_batches(
    order: Iterable[Any], start: int, batch_size: int, drop_last: bool, rank: int, world_size: int
) -> Iterator[tuple[list[Any], int]]:
    """This rank's batches of the epoch after its first `start` samples, each with the count of samples done by then.

    Every step takes the next `batch_size * world_size` samples of the order, shared among the ranks by `share`. Counted
    are the samples of all ranks, so that the position means the same for another number of processes.
    """
    step = batch_size * world_size
    done = start
    for samples in _chunks(order, start, step):
        if drop_last and len(samples) < step:
            return
        done += len(samples)
        if own := share(samples, rank, world_size):
            yield own, done


def share(samples: Sequence[Any], rank: int, world_size: int) -> Sequence[Any]:
    """This rank's part of one step's samples: neighbours, and at most one more than any other rank's.

    Fewer samples than ranks: the first ranks have one each, the others none.
    """
    count = len(samples)
    if count < world_size:
        return samples[rank : rank + 1]
    return samples[count * rank // world_size : count * (rank + 1) // world_size]


def rank_groups(batches: Iterable[Any], start: int, rank: int, world_size: int) -> Iterator[tuple[Any, int]]:
    """Do as `rank_batches` with batches that a batch sampler made: a step takes the next `world_size` of them.

    Where fewer are left, the largest are halved until there is one for each rank; of fewer samples than ranks the last
    ranks get none.
    """
    source = iter(batches)
    done = 0
    while done < start:
        batch = next(source, None)
        if batch is None:
            return
        done += count_of(batch)
    while group := list(islice(source, world_size)):
        done += sum(map(count_of, group))
        batches_of_ranks = spread(group, world_size)
        if rank < len(batches_of_ranks):
            yield batches_of_ranks[rank], done


def spread(batches: list[Any], world_size: int) -> list[Any]:
    """At most `world_size` batches, each a part of one given; fewer only where there are fewer samples."""
    batches = list(batches)
    while len(batches) < world_size:
        largest = max(range(len(batches)), key=lambda at: count_of(batches[at]))
        samples = list(batches[largest])
        if len(samples) < 2:
            break
        batches[largest : largest + 1] = [samples[: (len(samples) + 1) // 2], samples[(len(samples) + 1) // 2 :]]
    return batches


def count_of(batch: Any) -> int:
    """Return the number of samples in a batch of indices; 1 if it is unknown."""
    return len(batch) if isinstance(batch, Sized) else 1


def _chunks(order: Iterable[Any], start: int, size: int) -> Iterator[list[Any]]:
    if isinstance(order, (Tensor, range, list)):
        for first in range(start, len(order), size):
            part = order[first : first + size]
            yield part.tolist() if isinstance(part, Tensor) else list(part)
        return
    source = islice(order, start, None)
    while part := list(islice(source, size)):
        yield part
