"""Makes the loader for a dataset, and refuses early what cannot train."""

from __future__ import annotations

import inspect
import logging
import os
from difflib import get_close_matches
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from amp_recipes.data.batches import length
from amp_recipes.data.buckets import EpochBatches
from amp_recipes.data.dynamic_items import usual_collate_fn
from amp_recipes.data.epoch_loader import EpochLoader
from amp_recipes.data.samplers import EpochShuffle, samplers_of, shares_itself
from amp_recipes.data.streams import StreamLoader
from amp_recipes.errors import ConfigError, DataError
from amp_recipes.modules.devices import queues_work

logger = logging.getLogger(__name__)

_WORKERS_PER_CORE = 16  # more than reading from a slow disk can use
_ACCEPTED = [name for name in inspect.signature(DataLoader.__init__).parameters if name not in ("self", "dataset")]


def make_loader(
    dataset: Any,
    *,
    shuffle: bool,
    seed: int,
    device: torch.device | str,
    name: str = "Data set",
    rank: int = 0,
    world_size: int = 1,
    **loader_kwargs: Any,
) -> DataLoader:
    """Return a DataLoader that can be resumed and draws nothing from the global generators.

    shuffle: through `EpochShuffle`; an IterableDataset and a given sampler or batch_sampler order themselves.
    device: where the batches go; only for CUDA is memory pinned by default.
    name: what messages call the data, such as "Training set".
    rank, world_size: this process among those that share the samples. Each gets batches of its own, of `batch_size`;
        the last ones of an epoch are of even size, and if fewer samples than processes are left, some are repeated. An
        IterableDataset splits itself.
    loader_kwargs: any argument of torch's DataLoader; what is given wins. With a `generator`, torch shuffles
        by it. Of more than 16 workers for each core, those are not started, with a warning. With workers, `timeout` is
        300 seconds by default. SpeechBrain's DynamicItemDataset gets its
        `PaddedBatch` as the default `collate_fn`.
    Raises ConfigError for arguments that DataLoader does not take, DataError for no samples or no batches.
    """
    _refuse_unknown(loader_kwargs, name)
    _bound_workers(loader_kwargs, name)
    iterable = isinstance(dataset, IterableDataset)
    ordered = any(loader_kwargs.get(key) is not None for key in ("sampler", "batch_sampler"))
    orders_itself = iterable or ordered
    _refuse_empty(dataset, name, needs_length=not orders_itself)
    loader_kwargs.setdefault("pin_memory", queues_work(torch.device(device)))
    loader_kwargs.setdefault("collate_fn", usual_collate_fn(dataset))
    if loader_kwargs.get("generator") is None:
        loader_kwargs.pop("generator", None)
    batch_sampler = loader_kwargs.get("batch_sampler")
    if isinstance(batch_sampler, EpochBatches):
        _fit_batch_sampler(batch_sampler, dataset, seed, name)
    try:
        if shuffle and not orders_itself:
            by_torch = "generator" in loader_kwargs
            loader_kwargs |= {"shuffle": True} if by_torch else {"sampler": EpochShuffle(dataset, seed)}
        if iterable:
            loader: DataLoader = StreamLoader(dataset, seed=seed, name=name, **loader_kwargs)
        else:
            loader = EpochLoader(dataset, seed=seed, name=name, rank=rank, world_size=world_size, **loader_kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{name}: the loader cannot be created: {error}") from error
    return _checked(loader, name)


def reads_all(loader: Any) -> bool:
    """Whether `loader` gives every process all samples: a DataLoader over a dataset whose samplers have no rank."""
    if not isinstance(loader, DataLoader) or isinstance(loader, (EpochLoader, StreamLoader)):
        return False
    return not isinstance(loader.dataset, IterableDataset) and not shares_itself(loader)


def close_loader(loader: Any) -> None:
    """End the workers of a loader that `make_loader` made, also of a pass that is not over; nothing for others.

    May be called again. The loader can be iterated again: it then starts new workers.
    """
    if isinstance(loader, (EpochLoader, StreamLoader)):
        loader.close()


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell `loader` and whatever in it has a `set_epoch` (samplers, dataset) which epoch begins.

    Any iterable of batches may be given; one without `set_epoch` is left as it is.
    """
    for part in (loader, getattr(loader, "dataset", None), *samplers_of(loader)):
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def _bound_workers(loader_kwargs: dict[str, Any], name: str) -> None:
    """Limit num_workers: hundreds of processes would fill the memory of a small machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    given, most = loader_kwargs.get("num_workers"), _WORKERS_PER_CORE * cores
    if isinstance(given, int) and given > most:
        loader_kwargs["num_workers"] = most
        logger.warning(
            "%s: num_workers=%d is too many for %d CPU cores; started %d workers (%d for each core)",
            name,
            given,
            cores,
            most,
            _WORKERS_PER_CORE,
        )


def _refuse_unknown(loader_kwargs: dict[str, Any], name: str) -> None:
    unknown = [key for key in loader_kwargs if key not in _ACCEPTED]
    if not unknown:
        return
    hints = [f"did you mean {match!r}?" for key in unknown for match in get_close_matches(key, _ACCEPTED, n=1)]
    raise ConfigError(
        f"{name}: DataLoader has no argument {', '.join(map(repr, unknown))}; "
        + (f"{' '.join(hints)} It takes " if hints else "it takes ")
        + f"{', '.join(_ACCEPTED)}."
    )


def _refuse_empty(dataset: Any, name: str, needs_length: bool) -> None:
    samples = length(dataset)
    if samples == 0:
        raise DataError(f"{name} is empty: its {type(dataset).__name__} has 0 samples.")
    if samples is None and needs_length:
        raise DataError(
            f"{name}: a {type(dataset).__name__} has no length. Give it __len__, pass a "
            "sampler, or make it an IterableDataset."
        )


def _fit_batch_sampler(batch_sampler: EpochBatches, dataset: Any, seed: int, name: str) -> None:
    if batch_sampler.seed is None:
        batch_sampler.seed = seed
    samples, lengths = length(dataset), len(batch_sampler.lengths)
    if samples is not None and samples != lengths:
        kind = type(batch_sampler).__name__
        raise ConfigError(f"{name}: {kind} was given {lengths} lengths, but the dataset has {samples} samples")


def _checked(loader: DataLoader, name: str) -> DataLoader:
    """`loader`, if it gives any batch."""
    own_batches = loader.batch_sampler is not None and loader.batch_size is None
    if own_batches:
        source = loader.batch_sampler
    else:
        source = loader.dataset if isinstance(loader.dataset, IterableDataset) else loader.sampler
    # Asked of the source: `len(loader)` would make torch warn about an IterableDataset that yields more.
    count = length(source)
    if count == 0:
        raise DataError(f"{name} gives 0 batches: its {type(source).__name__} yields nothing.")
    if count is not None and loader.drop_last and not own_batches:
        _refuse_less_than_a_batch(loader, count, name)
    return loader


def _refuse_less_than_a_batch(loader: DataLoader, samples: int, name: str) -> None:
    shares = isinstance(loader, EpochLoader) and not loader.already_shared
    processes = loader.world_size if shares else 1
    if samples >= (loader.batch_size or 1) * processes:
        return
    size = f"batch size {loader.batch_size}"
    if processes > 1:
        size += f" x {processes} processes"
    raise DataError(
        f"{name} gives 0 batches: drop_last with {samples} samples < {size}. "
        "Lower batch_size, or set drop_last to false."
    )
