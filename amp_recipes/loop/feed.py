"""Where a run's batches come from, and what each counts for."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from amp_recipes import distributed
from amp_recipes.data import as_batches, batch_length, length, make_loader, reads_all, to_device
from amp_recipes.distributed.rounds import Round
from amp_recipes.errors import ConfigError, DataError
from amp_recipes.loop.hooks import Stage
from amp_recipes.loop.metrics import StageMetrics
from amp_recipes.loop.report_to_recipe import RunReport

logger = logging.getLogger(__name__)

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
            rank=distributed.data_rank(),
            world_size=distributed.data_world_size(),
            **loader_kwargs,
        )

    def _count_updates(self) -> int:
        """How many updates the fit that begins will take, if none is skipped."""
        if not self._loaders:  # a diagnosis, which takes steps of the start
            return _UPDATES_OF_A_DIAGNOSIS
        batches = self._most_batches(length(self._loaders["train"]))
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

    def _most_batches(self, own: int | None) -> int | None:
        """The epoch's windows are those of the process that has most; None where any cannot tell."""
        lengths = distributed.gather(own)
        return None if None in lengths else max(lengths)

    def _batches_of(self, data: Any, stage: Stage, loader_kwargs: Mapping[str, Any]) -> Iterable[Any]:
        make = functools.partial(self.make_dataloader, stage=stage)
        try:
            batches = as_batches(data, _SET_NAMES[stage], loader_kwargs, make)
        except ConfigError as error:
            raise ConfigError(f"{self._place_of_argument(str(error), loader_kwargs)}{error}") from error.__cause__
        if length(batches) == 0:
            raise DataError(f"{_SET_NAMES[stage]} is empty: its {type(data).__name__} holds no batch.")
        self._warn_of_repeated_reading(batches, stage)
        if getattr(batches, "num_workers", 0) and hasattr(batches, "stop"):  # a signal need not wait for a slow batch
            batches.stop = functools.partial(self._may_leave, stage)
        return batches

    def _place_of_argument(self, message: str, loader_kwargs: Mapping[str, Any]) -> str:
        """Where the YAML gives the first loader kwarg that a message names; empty where it gives none of them."""
        places = (self._place_in_yaml(name, value) for name, value in loader_kwargs.items() if name in message)
        return next(filter(None, places), "")

    def _to_device(self, batch: Any) -> Any:
        return to_device(batch, self.device, non_blocking=self.device.type == "cuda")

    def _weigh(self, batches: Sequence[Any]) -> tuple[list[float], int]:
        """What each batch of a window counts for, and how many samples they hold, as they were loaded."""
        weights = lengths = [batch_length(batch) for batch in batches]
        if self._own_batch_weight:  # nothing to wait for: they are not on the device yet
            weights = [float(self.batch_weight(batch)) for batch in batches]
        return weights, sum(lengths)

    def _warn_of_repeated_reading(self, batches: Iterable[Any], stage: Stage) -> None:
        """Say so where every process would read the same batches."""
        if distributed.data_world_size() > 1 and reads_all(batches):
            logger.warning(
                "%s is a DataLoader that knows nothing of processes: each of the %d reads all of it. Give the Dataset "
                "itself, of which each reads its own part, or a sampler with a rank (DistributedSampler).",
                _SET_NAMES[stage],
                distributed.data_world_size(),
            )

    # ------------------------------------------------------------------ in step with other processes

    def _in_step(self, windows: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """The windows of this process, each at the same time as those of the others.

        Where the data of this one ends first, it takes its last batch again, which then counts for nothing, until all
        have come to their end: so nobody waits for it for ever, and no sample counts twice.
        """
        if not distributed.initialized():
            yield from windows
            return
        sharded, last, first = distributed.is_sharded(self.modules), None, None
        skipped = self._skipped_steps
        windows = self._compared_with_others(windows)
        try:
            for batches in chain(windows, repeat([])):
                self._round = Round(*self._weigh(batches), self._signal, self._save_due())
                if last is None and self._round.most_batches:
                    last = first = self._lent(batches[-1:], self._round.fewest_batches == 0)
                if not batches and self.skipped_steps > skipped:
                    last = first  # a batch that is not finite would have each update skipped, though it counts nothing
                skipped = self._skipped_steps
                # A sharded model is gathered in every forward, so that all need as many; else only one that has come to
                # its end needs to know.
                if not batches or sharded:
                    missing = self._round.most_batches - len(batches)
                    if not batches and not missing:
                        return
                    batches = batches + [batches[-1] if batches else last] * missing
                last = batches[-1]
                yield batches
        finally:
            self._round = None

    def _lent(self, own: Sequence[Any], some_have_none: bool) -> Any:
        """A batch to keep up with: this process's own, or another's where it has none from the start."""
        if not some_have_none:
            return own[0]
        of_processes = distributed.gather(list(own))
        return own[0] if own else next(its[0] for its in of_processes if its)

    def _compared_with_others(self, windows: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """The windows; warns if the first is the same in all processes, since then each reads all of the data."""
        source = iter(windows)
        first = next(source, [])
        if not self._compared:
            self._compared = True
            digests = distributed.gather(_digest(first))
            if distributed.data_world_size() > 1 and len(set(digests)) == 1 and digests[0] is not None:
                logger.warning(
                    "all %d processes begin with the same batch: each seems to read all of the data, and not a part of "
                    "its own. Give a torch Dataset, or divide by torch.distributed.get_rank() what you iterate.",
                    len(digests),
                )
        return chain([first] if first else [], source)

    def _to_evaluate(self, batches: Iterable[Any], stage: Stage) -> Iterator[tuple[Any, bool]]:
        """The batches, each with whether it counts; ends early if a signal asks.

        All processes go on until none has a batch left. One whose data is over takes its last batch again where the
        model is sharded and the others gather it, and just waits where it is not.
        """
        if not distributed.initialized():
            for batch in batches:
                if self._may_leave(stage):
                    return
                yield batch, True
            return
        heeded = stage is Stage.VALID or not self._in_fit
        sharded, last, nothing = distributed.is_sharded(self.modules), None, object()
        for batch in chain(batches, repeat(nothing)):
            counts = batch is not nothing
            samples = batch_length(batch) if counts else 0
            poll = distributed.Poll([counts, self._signal if heeded else 0, samples])
            if sharded and last is None and any(some for some, *_ in poll.read()):
                last = self._lent([batch] if counts else [], not all(some for some, *_ in poll.read()))
            if counts:
                last = batch
                yield batch, True  # the answers arrive meanwhile
            heard = poll.read()
            of_all = sum(row[2] for row in heard) * distributed.data_world_size() / len(heard)
            self._log.advance(0, int(of_all) - samples)
            if self._asked_to_end(max(int(signal) for _, signal, _ in heard)) or not any(some for some, *_ in heard):
                return
            if sharded and not counts:
                yield last, False

    def _share_of_round(self, this: Round) -> tuple[float, float]:
        """What the batch at hand counts for in the windows of all processes, and what these count for.

        As if one process accumulated the batches of all: over their mean, since gradients are averaged.
        """
        if self._own_batch_weight:
            return self._batch_weight, this.weight
        return float(self._counts), this.batches

    @contextmanager
    def _uncounted(self) -> Iterator[None]:
        """Within it, what `add_metric` is given is dropped."""
        sums, self._sums = self._sums, StageMetrics()
        window_sums, self._window_sums = self._window_sums, None
        try:
            yield
        finally:
            self._sums, self._window_sums = sums, window_sums

    @property
    def _signal(self) -> int:
        return self._interrupts.requested or 0

    def _asked_to_end(self, signal: int) -> bool:
        """Whether a signal, which any process may have been sent, asks all of them to end; all know the same of it."""
        if signal:
            self._interrupts.requested = signal
        self._asked = signal != 0
        return self._asked

    @property
    def _is_to_end(self) -> bool:
        """Whether all processes know that they are to end: one that has just been sent a signal has not told yet."""
        return self._asked if distributed.initialized() else self._interrupts.requested is not None


def _digest(batches: Any) -> str | None:
    """The same for batches whose tensors are equal; None where there are none, or none that can be read."""
    tensors = [leaf for leaf in tree_leaves(batches) if isinstance(leaf, torch.Tensor)]
    digest = hashlib.blake2b()
    try:
        for tensor in tensors:
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    except (RuntimeError, NotImplementedError):  # sparse, quantized, on no device
        return None
    return digest.hexdigest() if tensors else None
