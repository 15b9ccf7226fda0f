"""Makes the loaders of a run, moves batches to the device and weighs them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from amp_recipes import distributed
from amp_recipes.data import as_batches, batch_length, length, make_loader, reads_all, to_device
from amp_recipes.errors import ConfigError, DataError
from amp_recipes.modules.devices import queues_work
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)

_UPDATES_OF_A_DIAGNOSIS = 1000
_SET_NAMES = {Stage.TRAIN: "Training set", Stage.VALID: "Validation set", Stage.TEST: "Test set"}


class Feed:
    """The source of a run's batches, and the weight of each.

    place_in_yaml: where the YAML gives an argument of that name and value, in words; empty if it does not.
    """

    def __init__(self, run: Any, place_in_yaml: Any) -> None:
        self._run = run
        self._place_in_yaml = place_in_yaml

    def make_loader(self, dataset: Dataset, stage: Stage, loader_kwargs: dict[str, Any]) -> DataLoader:
        """A loader over the samples of `dataset`; its order depends on `seed` and the epoch alone."""
        run = self._run
        shuffle = loader_kwargs.pop("shuffle", False)
        if stage is Stage.TRAIN and run.recipe.train_sampler is not None:
            loader_kwargs.setdefault("sampler", run.recipe.train_sampler)
        return make_loader(
            dataset,
            shuffle=shuffle,
            seed=run.settings.seed or 0,
            device=run.device,
            name=_SET_NAMES[stage],
            rank=distributed.data_rank(),
            world_size=distributed.data_world_size(),
            **loader_kwargs,
        )

    def batches_of(self, data: Any, stage: Stage, loader_kwargs: Mapping[str, Any]) -> Iterable[Any]:
        """Return an iterable over the batches of a dataset; raises DataError for an empty one."""
        make = functools.partial(self._run.recipe.make_dataloader, stage=stage)
        try:
            batches = as_batches(data, _SET_NAMES[stage], loader_kwargs, make)
        except ConfigError as error:
            raise ConfigError(f"{self._place_of_argument(str(error), loader_kwargs)}{error}") from error.__cause__
        if length(batches) == 0:
            raise DataError(f"{_SET_NAMES[stage]} is empty: its {type(data).__name__} has no batches.")
        _warn_of_repeated_reading(batches, stage)
        if getattr(batches, "num_workers", 0) and hasattr(batches, "stop"):  # a signal need not wait for a slow batch
            batches.stop = functools.partial(self._run.processes.may_leave, stage)
        return batches

    def _place_of_argument(self, message: str, loader_kwargs: Mapping[str, Any]) -> str:
        """Return where the YAML gives the first loader kwarg that a message names; empty if it gives none of them."""
        places = (self._place_in_yaml(name, value) for name, value in loader_kwargs.items() if name in message)
        return next(filter(None, places), "")

    def limited(self, batches: Iterable[Any], done: int = 0) -> Iterator[Any]:
        """The batches; in debug mode only the first few, of which `done` were before these."""
        settings = self._run.settings
        few = islice(batches, max(0, settings.debug_batches - done) if settings.debug else None)
        return self._run.task.watch.limited(few, self._run.current.stage)

    def certain_batches(self) -> int:
        """Return the least number of batches that this process will still train on in the pass that begins.

        One less than the length says: the last one may fall to another process. The length of a stream is an estimate.
        """
        loader, done = self._run.fit.loaders["train"], self._run.current.step
        batches = length(loader)
        if batches is None or isinstance(getattr(loader, "dataset", None), IterableDataset):
            return 0
        settings = self._run.settings
        if settings.debug:
            batches = min(batches, settings.debug_batches)
        return max(0, batches - done - 1)

    def to_device(self, batch: Any) -> Any:
        """The batch on the run's device."""
        device = self._run.device
        return to_device(batch, device, non_blocking=queues_work(device))

    def weigh(self, batches: Sequence[Any]) -> tuple[list[float], int]:
        """Return the weight of each batch of a window, and the number of their samples, as they were loaded."""
        weights = lengths = [batch_length(batch) for batch in batches]
        if self._run.weighted:  # nothing to wait for: they are not on the device yet
            weights = [float(self._run.recipe.batch_weight(batch)) for batch in batches]
        return weights, sum(lengths)

    def count_updates(self) -> int:
        """Return the number of updates that the fit will make if none is skipped."""
        settings, fit = self._run.settings, self._run.fit
        if not fit.loaders:  # a diagnosis, which takes steps of the start
            return _UPDATES_OF_A_DIAGNOSIS
        batches = _most_batches(length(fit.loaders["train"]))
        epochs = getattr(fit.epoch_counter, "limit", None) or length(fit.epoch_counter)
        if batches is None or epochs is None:
            unknown = "its training set" if batches is None else "the epoch counter"
            raise ConfigError(
                f"lr_scheduler needs total_updates, but {unknown} has no length, so the number cannot be computed. "
                "Give total_updates in the YAML, as an argument of lr_scheduler."
            )
        if settings.debug:
            batches, epochs = min(batches, settings.debug_batches), min(epochs, settings.debug_epochs)
        updates = -(-batches // settings.grad_accumulation_factor) * epochs
        return min(updates, settings.optimizer_step_limit or updates)


def _most_batches(own: int | None) -> int | None:
    """The epoch's windows are those of the process that has most; None where any cannot tell."""
    lengths = distributed.gather(own)
    return None if None in lengths else max(lengths)


def _warn_of_repeated_reading(batches: Iterable[Any], stage: Stage) -> None:
    """Say so where every process would read the same batches."""
    if distributed.data_world_size() > 1 and reads_all(batches):
        logger.warning(
            "%s is a DataLoader that does not divide its data among processes: each of the %d processes reads all of "
            "it. Pass the Dataset itself, of which each process reads its own part, or use a sampler with a rank "
            "(DistributedSampler).",
            _SET_NAMES[stage],
            distributed.data_world_size(),
        )
