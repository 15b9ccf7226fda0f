"""Takes windows and batches together with the other processes of a run; one process does not wait."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, repeat
from typing import Any

import torch
from torch.optim import Optimizer

from amp_recipes import distributed
from amp_recipes.data import batch_length
from amp_recipes.distributed.synced_window import SyncedWindows
from amp_recipes.errors import listed
from amp_recipes.loggers import show_notices
from amp_recipes.loop.loader_pass import Pass
from amp_recipes.loop.window import Shares
from amp_recipes.modules.nested import tensors_in
from amp_recipes.modules.torch_private import tree_map
from amp_recipes.precision.optimizers import parameters_of_optimizer
from amp_recipes.precision.scaling import Averaged
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)

# The batches of a window, and the weight of each.
Batches = tuple[list[Any], Shares]


def join_processes(settings: Any) -> tuple[torch.device, bool]:
    """Meet the other processes of the run; returns the device of this one, and whether a launcher has started it."""
    if not settings.noprogressbar:
        show_notices()
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS needs, read at its first use
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    device = distributed.pick_device(settings.device)
    backend, minutes = settings.distributed_backend, settings.distributed_timeout_minutes
    launched = distributed.launched()
    distributed.start(device, backend, minutes, settings.tensor_parallel)
    return device, launched


def gather_values(value: Any) -> list[Any]:
    """`value` of every process that reads data of its own, in the order of their ranks, with its tensors on the CPU."""
    on_cpu = tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, value)
    return distributed.gather(on_cpu)[:: distributed.world_size() // distributed.data_world_size()]


class OwnWindow:
    """The weights of a window's batches in a run of one process; see `Shares`."""

    def __init__(self, weights: Sequence[float], samples: int, run: Any) -> None:
        self.weights = weights
        self.samples = samples
        self.requests = run.saving.requests
        self._of = sum(weights) if run.weighted else len(weights)
        self._each = weights if run.weighted else None

    def share(self, index: int) -> tuple[float, float]:
        """Return the number to multiply the loss of a batch with, and the number to divide it by."""
        if len(self.weights) == 1:
            return 1.0, 1.0
        return (1.0 if self._each is None else self._each[index]), self._of


class OneProcess:
    """A run of one process."""

    many = False

    def __init__(self, run: Any) -> None:
        self._run = run

    def windows(self, windows: Iterable[list[Any]]) -> Iterator[Batches]:
        """The windows, each with what its batches count for."""
        for batches in windows:
            yield batches, OwnWindow(*self._run.feed.weigh(batches), self._run)

    def to_evaluate(self, batches: Iterable[Any], current: Pass) -> Iterator[tuple[Any, bool]]:
        """The batches, each with whether it counts; ends early if a signal asks."""
        for batch in batches:
            if self.may_leave(current.stage):
                return
            yield batch, True

    def may_leave(self, stage: Stage) -> bool:
        """Whether a signal asks the run to end, and it stands where it can: not between the batches of a window."""
        run = self._run
        if not run.interrupts.requested:
            return False
        if stage is Stage.TRAIN:
            return run.current.at_place and run.settings.grad_accumulation_factor == 1
        return stage is Stage.VALID or not run.in_fit

    def is_to_end(self) -> bool:
        """Whether a signal asks the run to end."""
        return self._run.interrupts.requested is not None

    def share_modules(self) -> None:
        """Prepare the modules for training."""
        self._run.wrap_modules()

    def share_untrained(self) -> None:
        """Do nothing: there is no other process."""

    def warn_of_differing_weights(self) -> None:
        """Do nothing: there is no other process."""

    def averaged(
        self, loss: torch.Tensor, optimizers: Sequence[Optimizer] | None
    ) -> AbstractContextManager[Averaged | None]:
        """Context around a backward; one process averages with no other."""
        return nullcontext()

    def no_sync(self, use: bool) -> AbstractContextManager[None]:
        """Inside this context, nothing changes: one process averages its gradients with no other."""
        return nullcontext()


class ManyProcesses:
    """One process of a run of several, which take their windows together."""

    many = True

    def __init__(self, run: Any) -> None:
        self._run = run
        self._shared = False  # the modules, among the processes
        self._compared = False  # the first batch, with those of the others

    def windows(self, windows: Iterable[list[Any]]) -> Iterator[Batches]:
        """Yield the windows of this process, each at the same time as those of the others.

        If the data of this process ends first, it repeats its last batch with weight 0 until all data has ended. So the
        others do not wait for ever, and no sample counts twice.
        """
        run = self._run
        sharded, last, first = distributed.is_sharded(run.modules), None, None
        skipped = run.totals.skipped_steps
        window_size = run.settings.grad_accumulation_factor
        synced_windows = SyncedWindows(run.weighted, run.feed.certain_batches(), window_size)
        for batches in chain(self._compared_with_others(windows), repeat([])):
            weights, samples = run.feed.weigh(batches)
            synced = synced_windows.take(weights, samples, run.saving.requests)
            if last is None and synced.most_batches:
                last = first = self._borrowed_batch(batches[-1:], synced.fewest_batches == 0)
            if not batches and run.skipped_steps > skipped:
                last = first  # a nonfinite batch would cause each update to be skipped, even with weight 0
            skipped = run.totals.skipped_steps
            # A sharded model is gathered in every forward, so that all need as many; else only one that has come to its
            # end needs to know.
            if not batches and not synced.most_batches:
                return
            if not batches or sharded:
                filler = batches[-1] if batches else last
                batches = batches + [filler] * (synced.most_batches - len(batches))
            last = batches[-1]
            yield batches, synced

    def to_evaluate(self, batches: Iterable[Any], current: Pass) -> Iterator[tuple[Any, bool]]:
        """Yield the batches, each with whether it counts; ends early if a signal asks.

        All processes continue until none has a batch left. A process without data repeats its last batch if the model
        is sharded, since the others gather it, and otherwise only waits.
        """
        run = self._run
        may_end = current.stage is Stage.VALID or not run.in_fit
        sharded, last, nothing = distributed.is_sharded(run.modules), None, object()
        for batch in chain(batches, repeat(nothing)):
            own = [] if batch is nothing else [batch]
            told = _EvaluatedTogether(own, run.saving.signal if may_end else 0)
            if sharded and last is None and told.any_has_one:
                last = self._borrowed_batch(own, not told.all_have_one)
            if own:
                last = batch
                yield batch, True  # the answers arrive meanwhile
            run.log.advance(0, told.samples_of_others)
            if run.saving.asked_to_end(told.signal) or not told.any_has_one:
                return
            if sharded and not own:
                yield last, False

    def may_leave(self, stage: Stage) -> bool:
        """Of several processes none leaves by itself."""
        return False

    def is_to_end(self) -> bool:
        """Whether all processes know that they must end: after a signal, a process first has to tell the others."""
        return self._run.current.asked_to_end

    def share_modules(self) -> None:
        """Share the modules among the processes; where they are shared already, nothing happens."""
        run = self._run
        was_sharded = distributed.is_sharded(run.modules)
        run.wrap_modules()
        if distributed.is_sharded(run.modules) and not was_sharded:
            run.ema.take_over(run.modules)
        elif not self._shared:
            run.ema.restart()  # at the first process's weights, which all have now
        self._shared = True

    def share_untrained(self) -> None:
        """Make all processes evaluate the same model, even if nothing was trained and nothing will be loaded."""
        if self._run.shards:
            self.share_modules()  # the whole may be larger than the device
        elif not self._shared:
            distributed.start_alike(self._run.modules)  # the averaging of gradients would use memory without need

    def warn_of_differing_weights(self) -> None:
        """Say so where the processes have come to hold different models."""
        if self._run.settings.strategy != "ddp":
            return
        names = distributed.differing(self._run.modules)
        if names:
            logger.warning(
                "the weights differ between processes: %s. Something changed them that is not averaged: a "
                "loss.backward() in place of self.backward(loss), weights set by hand, or a schedule that depends on "
                "the rank.",
                listed(names),
            )

    def averaged(
        self, loss: torch.Tensor, optimizers: Sequence[Optimizer] | None
    ) -> AbstractContextManager[Averaged | None]:
        """Around a backward that leaves gradients with the parameters of `optimizers` (default: all): averages them."""
        parameters = None
        if optimizers is not None:
            parameters = [*chain.from_iterable(map(parameters_of_optimizer, optimizers))]
        return distributed.averaging(self._run.modules, loss, parameters)

    def no_sync(self, use: bool) -> AbstractContextManager[None]:
        """Inside this context, processes do not average gradients in backward (where `use`)."""
        return distributed.no_sync(self._run.modules) if use else nullcontext()

    def _borrowed_batch(self, own: Sequence[Any], some_have_none: bool) -> Any:
        """A batch to keep up with: this process's own, or another's where it has none from the start."""
        if not some_have_none:
            return own[0]
        of_processes = distributed.gather(list(own))
        return own[0] if own else next(batches[0] for batches in of_processes if batches)

    def _compared_with_others(self, windows: Iterable[list[Any]]) -> Iterator[list[Any]]:
        """The windows; warns if the first is the same in all processes, since then each reads all of the data."""
        source = iter(windows)
        first = next(source, [])
        if not self._compared:
            self._compared = True
            digests = distributed.gather(_digest(first))
            if distributed.data_world_size() > 1 and len(set(digests)) == 1 and digests[0] is not None:
                logger.warning(
                    "all %d processes start with the same batch: each seems to read the whole dataset instead of "
                    "its own part. Use a torch Dataset, or let your iterable yield only the part of "
                    "torch.distributed.get_rank().",
                    len(digests),
                )
        return chain([first] if first else [], source)


class _EvaluatedTogether:
    """The message that the processes exchange before each evaluates a batch, or has none left."""

    def __init__(self, own: Sequence[Any], signum: int) -> None:
        self._samples = batch_length(own[0]) if own else 0
        self._gathered = distributed.AsyncGather([len(own), signum, self._samples])

    @property
    def any_has_one(self) -> bool:
        """Whether any process has a batch."""
        return any(count for count, *_ in self._gathered.read())

    @property
    def all_have_one(self) -> bool:
        """Whether each process has a batch."""
        return all(count for count, *_ in self._gathered.read())

    @property
    def signal(self) -> int:
        """The number of a signal that asks any of the processes to end; 0: none."""
        return max(int(signum) for _, signum, _ in self._gathered.read())

    @property
    def samples_of_others(self) -> int:
        """Return the number of samples in the batches of the others; processes that share their data count once."""
        rows = self._gathered.read()
        return int(sum(row[2] for row in rows) * distributed.data_world_size() / len(rows)) - self._samples


def _digest(batches: Any) -> str | None:
    """The same for batches whose tensors are equal; None where there are none, or none that can be read."""
    tensors = list(tensors_in(batches))
    digest = hashlib.blake2b()
    try:
        for tensor in tensors:
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    except (RuntimeError, NotImplementedError):  # sparse, quantized, on no device
        return None
    return digest.hexdigest() if tensors else None
