"""Where a run's batches come from, and what each counts for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from amp_recipes import distributed
from amp_recipes.data import as_batches, batch_length, length, make_loader, to_device
from amp_recipes.errors import ConfigError, DataError
from amp_recipes.hooks import Stage
from amp_recipes.run_report import RunReport

_UPDATES_OF_A_DIAGNOSIS = 1000
_SET_NAMES = {Stage.TRAIN: "Training set", Stage.VALID: "Validation set", Stage.TEST: "Test set"}


class RunData(RunReport):
    """Base of `Brain`: makes loaders, moves batches and weighs them."""

    def make_dataloader(
        self, dataset: Dataset, stage: Stage, ckpt_prefix: str | None = None, **loader_kwargs: Any
    ) -> DataLoader:
        """A loader over the samples of `dataset`; its order depends on `seed` and the epoch alone.

        ckpt_prefix: without effect, for recipes that give it: checkpoints hold every loader's place anyway.
        """
        shuffle = loader_kwargs.pop("shuffle", False)
        if stage is Stage.TRAIN and self.train_sampler is not None:
            loader_kwargs.setdefault("sampler", self.train_sampler)
        return make_loader(
            dataset,
            shuffle=shuffle,
            seed=self.seed or 0,
            device=self.device,
            name=_SET_NAMES[stage],
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            **loader_kwargs,
        )

    def _count_updates(self) -> int:
        """How many updates the fit that begins will take, if none is skipped."""
        if not self._loaders:  # a diagnosis, which takes steps of the start
            return _UPDATES_OF_A_DIAGNOSIS
        batches = length(self._loaders["train"])
        epochs = getattr(self._epoch_counter, "limit", None) or length(self._epoch_counter)
        if batches is None or epochs is None:
            unknown = "its training set" if batches is None else "the epoch counter"
            raise ConfigError(
                f"lr_scheduler takes total_updates, but {unknown} has no length to count them by. Give it in the YAML, "
                "as an argument of lr_scheduler."
            )
        if self.debug:
            batches, epochs = min(batches, self.debug_batches), min(epochs, self.debug_epochs)
        updates = -(-batches // self.grad_accumulation_factor) * epochs
        return min(updates, self.optimizer_step_limit or updates)

    def _batches_of(self, data: Any, stage: Stage, loader_kwargs: Mapping[str, Any]) -> Iterable[Any]:
        make = functools.partial(self.make_dataloader, stage=stage)
        batches = as_batches(data, _SET_NAMES[stage], loader_kwargs, make)
        if length(batches) == 0:
            raise DataError(f"{_SET_NAMES[stage]} is empty: its {type(data).__name__} holds no batch.")
        if getattr(batches, "num_workers", 0) and hasattr(batches, "stop"):  # a signal need not wait for a slow batch
            batches.stop = functools.partial(self._may_leave, stage)
        return batches

    def _to_device(self, batch: Any) -> Any:
        return to_device(batch, self.device, non_blocking=self.device.type == "cuda")

    def _weigh(self, batches: Sequence[Any]) -> tuple[list[float], int]:
        """What each batch of a window counts for, and how many samples they hold, as they were loaded."""
        weights = lengths = [batch_length(batch) for batch in batches]
        if self._own_batch_weight:  # nothing to wait for: they are not on the device yet
            weights = [float(self.batch_weight(batch)) for batch in batches]
        return weights, sum(lengths)
