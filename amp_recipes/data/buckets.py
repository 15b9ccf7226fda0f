"""Makes batches of samples of similar length; their order depends on (seed, epoch) only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from amp_recipes.data.samplers import epoch_seed
from amp_recipes.errors import ConfigError

# Puts indices, sorted by length, into batches.
Cut = Callable[[list[int]], Iterator[list[int]]]


class LengthBuckets(Sampler[list[int]]):
    """Batches of `batch_size` samples (per process) that are of similar length, so that little is padding.

    lengths: of all samples, in any unit; shuffle: False gives the samples in order of length; seed: default, the run's;
    pool_size: samples among which neighbours in length are looked for (default 100 batches); drop_last: leave out a
    batch that is not full, of which each pool can have one.
    """

    def __init__(
        self,
        lengths: Iterable[float] | Tensor,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        pool_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self.pool_size = 100 * batch_size if pool_size is None else pool_size
        _refuse_less_than_one("LengthBuckets", batch_size=batch_size, pool_size=self.pool_size)
        self.lengths = _checked(lengths, "LengthBuckets")
        self.shuffle, self.seed, self.epoch = shuffle, seed, 0
        self.samples_per_batch, self.drop_last = batch_size, drop_last
        self._kept = _KeptBatches()

    def set_epoch(self, epoch: int) -> None:
        """Give the batches of that epoch from the next iteration on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._kept.of(self, self._cut))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._kept.of(self, self._cut))

    def _cut(self, indices: list[int]) -> Iterator[list[int]]:
        for first in range(0, len(indices), self.samples_per_batch):
            batch = indices[first : first + self.samples_per_batch]
            if len(batch) == self.samples_per_batch or not self.drop_last:
                yield batch


class DynamicBatches(Sampler[list[int]]):
    """Batches of as many samples of similar length as fit: the longest times their number is at most the limit.

    lengths, shuffle, seed: as for `LengthBuckets`; max_total_length: per process, in the unit of the lengths, padding
    counted; max_batch_size: more samples are never in a batch; pool_size: samples among which neighbours in length are
    looked for; too_long: what becomes of a sample longer than the limit: "raise" (ConfigError) or "alone" (a batch of
    its own).
    """

    def __init__(
        self,
        lengths: Iterable[float] | Tensor,
        max_total_length: float,
        *,
        max_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int | None = None,
        pool_size: int = 5000,
        too_long: str = "raise",
    ) -> None:
        self.lengths = _checked(lengths, "DynamicBatches")
        self.shuffle, self.seed, self.pool_size, self.epoch = shuffle, seed, pool_size, 0
        if too_long not in ("raise", "alone"):
            raise ConfigError(f"DynamicBatches: too_long {too_long!r} is unknown; expected 'raise' or 'alone'")
        _refuse_less_than_one("DynamicBatches", max_batch_size=max_batch_size, pool_size=pool_size)
        long = (self.lengths > max_total_length).nonzero().flatten().tolist()
        if long and too_long == "raise":
            longest = int(self.lengths.argmax())
            raise ConfigError(
                f"DynamicBatches: {len(long)} samples are longer than max_total_length {max_total_length:g}; the "
                f"longest is sample {longest} with {self.lengths[longest].item():g}. Raise the limit, leave them out, "
                "or give too_long='alone'."
            )
        self.max_total_length, self.max_batch_size = max_total_length, max_batch_size
        self._kept = _KeptBatches()

    def set_epoch(self, epoch: int) -> None:
        """Give the batches of that epoch from the next iteration on."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._kept.of(self, self._cut))

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._kept.of(self, self._cut))

    def _cut(self, indices: list[int]) -> Iterator[list[int]]:
        batch: list[int] = []
        most = self.max_batch_size or len(indices)
        for index, length in zip(indices, self.lengths[indices].tolist(), strict=True):
            # Sorted: the newest is the longest.
            if batch and (length * (len(batch) + 1) > self.max_total_length or len(batch) == most):
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch


EpochBatches = LengthBuckets | DynamicBatches
"""The batch samplers whose batches a loader of `make_loader` shares among the ranks, and finds its place in again."""


class _KeptBatches:
    """The batches of one epoch, kept until another one begins."""

    def __init__(self) -> None:
        self._made: tuple[tuple[int | None, int], list[list[int]]] | None = None

    def of(self, sampler: EpochBatches, cut: Cut) -> list[list[int]]:
        """All batches of the sampler's epoch; cut: puts indices, sorted by length, into batches."""
        key = (sampler.seed, sampler.epoch if sampler.shuffle else 0)
        if self._made is None or self._made[0] != key:
            self._made = key, _make(sampler, cut)
        return self._made[1]


def _make(sampler: EpochBatches, cut: Cut) -> list[list[int]]:
    generator = torch.Generator().manual_seed(epoch_seed(sampler.seed or 0, sampler.epoch, "buckets"))
    count = len(sampler.lengths)
    order = torch.randperm(count, generator=generator) if sampler.shuffle else torch.arange(count)
    # Sorted in pools of a shuffled epoch, not in all of it: so the samples meet other neighbours in each epoch.
    pools = order.split(sampler.pool_size) if sampler.shuffle else [order]
    by_length = (pool[sampler.lengths[pool].argsort(stable=True)].tolist() for pool in pools)
    batches = [batch for indices in by_length for batch in cut(indices)]
    if not sampler.shuffle:
        return batches
    return [batches[at] for at in torch.randperm(len(batches), generator=generator).tolist()]


def _refuse_less_than_one(owner: str, **counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ConfigError(f"{owner}: {name} {count} is not a number of samples (1 or more)")


def _checked(lengths: Iterable[float] | Tensor, name: str) -> Tensor:
    """The lengths as a 1-d tensor; float64 unless they are whole numbers, so that a limit is met exactly."""
    try:
        checked = _as_tensor(lengths)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name}: lengths must be numbers, one for each sample: {error}") from error
    if checked.ndim != 1 or checked.is_complex() or checked.dtype == torch.bool:
        raise ConfigError(f"{name}: lengths must be numbers, one for each sample; got shape {tuple(checked.shape)}")
    bad = (~torch.isfinite(checked) | (checked < 0)).nonzero().flatten().tolist()
    if bad:
        raise ConfigError(
            f"{name}: the length of sample {bad[0]} is {checked[bad[0]].item()}; expected a finite number, 0 or more"
        )
    return checked


def _as_tensor(lengths: Iterable[float] | Tensor) -> Tensor:
    if isinstance(lengths, Tensor) or hasattr(lengths, "__array__"):
        found = torch.as_tensor(lengths).detach().cpu()
    else:
        numbers = lengths if isinstance(lengths, Sequence) else list(lengths)
        found = torch.as_tensor(numbers)
        if found.is_floating_point():  # else Python's floats would become float32
            found = torch.tensor(numbers, dtype=torch.float64)
    is_whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    return found.long() if is_whole else found
