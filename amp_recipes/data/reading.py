"""Reads samples, in a worker or in the main process: seeds the draws, and reports which sample failed."""

from __future__ import annotations

import traceback
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Dataset, Subset, default_collate, default_convert, get_worker_info

from amp_recipes.data.order import Task
from amp_recipes.data.sample_draws import SampleSeeds, draws_nothing
from amp_recipes.data.workers import Workers

# Names that torchvision, torchaudio and many recipes use.
_LISTS = ("samples", "files", "paths", "imgs", "items", "filenames", "file_paths", "image_paths", "audio_paths")


@dataclass(frozen=True)
class Failure:
    """A batch that could not be read, as reported by a worker; `error` only where it is of the same process."""

    what: str
    summary: str
    traceback: str
    worker: int | None
    error: Exception | None


class Reader(Dataset):
    """A torch Dataset of whole batches: `reader[task]` is (its number, the collated batch or a Failure)."""

    def __init__(self, dataset: Any, batched: bool, collate: Callable[[Any], Any], seed: int, workers: Workers) -> None:
        self.dataset = dataset
        self._batched, self._collate, self._seed, self._workers = batched, collate, seed, workers
        self._seed_samples = not draws_nothing(dataset)
        self._seed_collate = collate not in (default_collate, default_convert)
        self._at_once = batched and _reads_batches(dataset)
        self._seeds: SampleSeeds | None = None
        self._epoch: int | None = None

    @property
    def draws(self) -> bool:
        """Whether reading moves the global generators."""
        return self._seed_samples or self._seed_collate

    def __getitem__(self, task: Task) -> tuple[int, Any]:
        if task.epoch != self._epoch:
            self._begin_epoch(task.epoch)
        number, indices = task.number, task.indices
        self._workers.begin(number)
        try:
            batch = self._read(indices)
            return number, batch if isinstance(batch, Failure) else self._put_together(batch, indices)
        finally:
            self._workers.end()

    def _begin_epoch(self, epoch: int) -> None:
        # A persistent worker has a copy of the dataset, which the main process cannot reach.
        if self._epoch is not None and get_worker_info() is not None and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        self._epoch, self._seeds = epoch, SampleSeeds(self._seed, epoch)

    def _read(self, indices: Any) -> Any:
        """The samples, or a Failure."""
        if self._at_once:
            return self._read_one(indices, self.dataset.__getitems__)
        if not self._batched:
            return self._read_one(indices, self.dataset.__getitem__)
        samples = []
        dataset, seeds, workers = self.dataset, self._seeds if self._seed_samples else None, self._workers
        for place, index in enumerate(indices):
            workers.at(place)
            if seeds is not None:
                seeds.set_for(index)
            try:
                samples.append(dataset[index])
            except Exception as error:
                return failure_of(self._describe(index), error)
        return samples

    def _read_one(self, index: Any, read: Callable[[Any], Any]) -> Any:
        if self._seed_samples:
            self._seeds.set_for(index)
        try:
            return read(index)
        except Exception as error:
            return failure_of(self._describe(index), error)

    def _put_together(self, samples: Any, indices: Any) -> Any:
        if self._seed_collate:
            self._seeds.set_for(["collate", indices])
        try:
            return self._collate(samples)
        except Exception as error:
            if not self._batched:
                return failure_of(samples_of(indices), error)
            failure = failure_of(f"{samples_of(indices)} cannot be collated into a batch", error)
            return replace(failure, summary=failure.summary + self._unfit(samples, indices))

    def _unfit(self, samples: Sequence[Any], indices: Sequence[Any]) -> str:
        """Return which sample prevents a batch from being collated, and why; empty if that is unknown."""
        names = [describe_sample(self.dataset, index) for index in indices]
        named = list(zip(names, samples, strict=False))
        missing = [name for name, sample in named if sample is None]
        if missing:
            return f"; {missing[0]} is None"
        alone = [name for name, sample in named if not self._fit([sample])]
        if len(alone) == len(samples):  # the fault may be the collate_fn's
            return ""
        if alone:
            return f"; {alone[0]} cannot be collated even alone"
        other = next((name for name, sample in named[1:] if not self._fit([samples[0], sample])), None)
        advice = " (give a collate_fn that pads them)" if self._collate is default_collate else ""
        return "" if other is None else f"; {other} does not match {named[0][0]}{advice}"

    def _fit(self, samples: list[Any]) -> bool:
        try:
            self._collate(samples)
        except Exception:
            return False
        return True

    def _describe(self, index: Any) -> str:
        return f"{describe_sample(self.dataset, index)} cannot be read"


def collate_as_it_is(batch: Any) -> Any:
    """The reader has collated the batch already."""
    return batch


def describe_sample(dataset: Any, index: Any) -> str:
    """`sample 17 (data/a.wav)`: the index, and its file if the dataset names it."""
    if isinstance(index, list):
        return samples_of(index)
    file = file_of(dataset, index)
    return f"sample {index}" + (f" ({file})" if file is not None else "")


def file_of(dataset: Any, index: Any) -> str | None:
    """The file of a sample, if the dataset names it."""
    try:
        file = _file_of(dataset, index)
    except Exception:  # this only adds to a message
        return None
    return None if file is None else str(file)


def samples_of(indices: Any) -> str:
    """`samples [3, 1, 4, ...]`, shortened; `sample 3` for a single one."""
    if not isinstance(indices, (list, tuple)):
        return f"sample {indices}"
    shown = ", ".join(map(str, indices[:8]))
    return f"samples [{shown}{', ...' if len(indices) > 8 else ''}]"


def _reads_batches(dataset: Any) -> bool:
    """Whether samples are read by `__getitems__`; a Subset has it for the dataset's sake only."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _file_of(dataset: Any, index: Any) -> Any:
    describe = getattr(dataset, "describe", None)
    if callable(describe):
        return describe(index)
    if isinstance(dataset, Subset):
        return _file_of(dataset.dataset, dataset.indices[index])
    if isinstance(dataset, ConcatDataset):
        index = index + len(dataset) if index < 0 else index
        part = bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return _file_of(dataset.datasets[part], index - before)
    if isinstance(dataset, list | tuple):
        return _first_path(dataset[index])
    if isinstance(getattr(dataset, "data", None), dict) and hasattr(dataset, "data_ids"):  # SpeechBrain's
        return _first_path(dataset.data[dataset.data_ids[index]])
    for name in _LISTS:
        entries = getattr(dataset, name, None)
        if isinstance(entries, Sequence) and not isinstance(entries, str) and len(entries) == len(dataset):
            return _first_path(entries[index])
    return None


def _first_path(entry: Any) -> Any:
    if isinstance(entry, dict):
        entry = list(entry.values())
    if isinstance(entry, (list, tuple)):
        return next((part for part in entry if isinstance(part, (str, Path))), None)
    return entry if isinstance(entry, (str, Path)) else None


def failure_of(what: str, error: Exception) -> Failure:
    """The Failure of what raised `error`, which is being handled."""
    summary = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    named = getattr(error, "filename", None)
    if isinstance(named, (str, Path)) and str(named) not in what + summary:
        summary += f" (file {named})"
    info = get_worker_info()
    text = traceback.format_exc()
    return Failure(what, summary, text, None if info is None else info.id, error if info is None else None)
