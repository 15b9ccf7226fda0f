"""Names the samples of a batch as the dataset knows them: by their index, and by their file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index as as_int
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, default_collate, default_convert

from amp_recipes.data.dynamic_items import usual_collate_fn
from amp_recipes.data.epoch_loader import EpochLoader
from amp_recipes.data.order import RecentIndices
from amp_recipes.data.reading import file_of

# Keys of a sample under which recipes keep its file.
_FILE_KEY = re.compile(r"(?:.*_)?(?:path|file|filename|filepath|file_name|file_path)")


@dataclass(frozen=True, slots=True)
class SampleName:
    """A sample as its dataset knows it.

    index: in the dataset; file: that it was read from; None where they are not known. is_certain: whether the batch has
    its samples in the order of the indices: a collate function of the user's may sort them.
    """

    index: int | str | None = None
    file: str | None = None
    is_certain: bool = True


def sample_names(loader: Any, number: int, batch: Any, length: int) -> list[SampleName] | None:
    """The names of the samples of `batch`; None if nothing is known of them.

    number: of the batch in the epoch, of this process, counted from 0; length: how many samples it has. Reads no sample
    and calls no sampler of the user's, so that training goes on as if nobody had asked.
    """
    indices = _indices_of(loader, number)
    files = _files_in(batch, length)
    if indices is None or len(indices) != length:
        return None if files is None else [SampleName(None, file) for file in files]
    of_dataset = [file_of(loader.dataset, index) for index in indices]
    collate = loader.collate_fn
    keeps_order = collate in (default_collate, default_convert, usual_collate_fn(loader.dataset))
    is_certain = keeps_order or (files is not None and files == of_dataset)
    if files is None or is_certain:
        files = files or of_dataset
        return [SampleName(_plain(index), file, is_certain) for index, file in zip(indices, files, strict=True)]
    return [SampleName(None, file) for file in files]


def _plain(index: Any) -> int | str:
    try:
        return as_int(index)
    except TypeError:  # the key of a dataset that is a mapping
        return str(index)


def _files_in(batch: Any, length: int) -> list[str] | None:
    """The files that the batch itself names."""
    if isinstance(batch, list) and len(batch) == length and all(isinstance(sample, Mapping) for sample in batch):
        keys = batch[0] if batch else ()
        batch = {key: [sample.get(key) for sample in batch] for key in keys}
    if not isinstance(batch, Mapping):
        return None
    named = (value for key, value in batch.items() if isinstance(key, str) and _FILE_KEY.fullmatch(key))
    return next((list(map(str, value)) for value in named if _are_files(value, length)), None)


def _are_files(value: Any, length: int) -> bool:
    if not isinstance(value, list | tuple) or len(value) != length:
        return False
    return all(isinstance(file, str | Path) for file in value)


# Of DataLoaders of the user's: what the present epoch reads.
_RECENT: WeakKeyDictionary[DataLoader, RecentIndices] = WeakKeyDictionary()


def _indices_of(loader: Any, number: int) -> Sequence[Any] | None:
    if isinstance(loader, EpochLoader):
        return loader.indices_of(number)
    if not isinstance(loader, DataLoader) or (loader.num_workers and not loader.in_order):
        return None
    recent = _RECENT.get(loader)
    return _in_sequence(loader, number) if recent is None else recent.of(number)


def _in_sequence(loader: DataLoader, number: int) -> Sequence[int] | None:
    """The indices of a batch of a loader of torch's own that reads its dataset from first to last; else None."""
    batches = loader.batch_sampler
    if type(loader) is not DataLoader or type(batches) is not BatchSampler:
        return None
    if type(batches.sampler) is not SequentialSampler:
        return None
    return range(len(batches.sampler))[number * batches.batch_size : (number + 1) * batches.batch_size]


def forget_recorded(loader: Any) -> None:
    """Forget what an earlier epoch of a DataLoader read, for another pass over it."""
    if isinstance(loader, DataLoader):
        _RECENT.pop(loader, None)


def recorded(loader: DataLoader, batches: Iterable[Any], first: int) -> Iterator[Any]:
    """The batches of indices of a user's loader, remembered for `sample_names`; first: the number of the first."""
    ahead = loader.num_workers * (loader.prefetch_factor or 0)  # asked for before the batches are handed out
    recent = _RECENT[loader] = RecentIndices(first, ahead)
    for indices in batches:
        recent.add(indices)
        yield indices
