"""Tries steps of a run without a trace: its counters, logs and weights do not change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from amp_recipes import numerics
from amp_recipes.data import SampleName, sample_names
from amp_recipes.loop.ema import NoAverage
from amp_recipes.loop.metrics import StageMetrics
from amp_recipes.loop.processes import OwnWindow
from amp_recipes.loop.window import PendingWindows, Window
from amp_recipes.precision import UpdateOwner
from amp_recipes.stage import Stage
from amp_recipes.state.preserved import Holder, preserved
from amp_recipes.state.randomness import set_generator_state, set_torch_random_state

# What a recipe may override to move weights without an optimizer's step: a teacher's average, a critic's clipping.
_MAY_MOVE_WEIGHTS = ("fit_batch", "on_fit_batch_start", "on_fit_batch_end")


class BeforeStep(NamedTuple):  # made in a third of the time of a frozen dataclass, for each step
    """The data needed to repeat a window's step, as long as the step has not changed the weights.

    random: torch's global generators; generators: the recipe's own, with their states; step: batches done before it;
    versions: of the batches' tensors, which tell whether the recipe has written to them; loader: that they come from;
    first: the number of the first batch there, counted from 0; random_is_certain: whether `random` was taken just
    before it, or nothing was drawn in between.
    """

    batches: Sequence[Any]
    random: list[torch.Tensor]
    generators: list[tuple[str, Any, Any]]
    step: int
    versions: list[int]
    loader: Any = None
    first: int = 0
    random_is_certain: bool = True

    def sample_names(self) -> list[list[SampleName] | None]:
        """The names of the samples of each batch, where they are known; to be asked in the same epoch."""
        numbered = enumerate(self.batches, self.first)
        try:
            return [sample_names(self.loader, number, batch, numerics.samples_in(batch)) for number, batch in numbered]
        except Exception:  # a dataset of any kind: this only adds to a message
            return []


def training_trial(run: Any, before: BeforeStep | None = None, weights: bool = True) -> numerics.Trial:
    """The training step, to be taken with other precisions.

    before: where it began (default: where the run is); weights: then keep them too, for each run of the trial.
    """
    kept = weights and before is not None

    optimizers = lambda: run.recipe.optimizers_dict  # noqa: E731
    holders = {"self": run.recipe, "self.hparams": run.recipe.hparams}
    preserve = lambda weights: _rehearsal_from(run, before, weights or kept)  # noqa: E731
    return numerics.Trial(run.modules, run.device, partial(_try_window, run), optimizers, preserve, holders)


@contextmanager
def _rehearsal_from(run: Any, before: BeforeStep | None, weights: bool, steps: bool = True) -> Iterator[None]:
    """A rehearsal that begins where a step began."""
    with rehearsal(run, weights, steps):
        if before is not None:
            run.current.step = before.step
            set_torch_random_state(before.random, run.device)
            for _, generator, state in before.generators:
                set_generator_state(generator, state)
        yield


def _try_window(
    run: Any, batches: Sequence[Any], updates: UpdateOwner, context: AbstractContextManager
) -> list[torch.Tensor]:
    window = Window(run, run.current, OwnWindow(*run.feed.weigh(batches), run), len(batches))
    with run.replaced(plan=run.plan.for_trial(updates, context), window=window):
        run.pending.open(window)
        losses = window.take(batches)
        run.pending.clear()
    return losses


def forward_trial(run: Any, stage: Stage, before: BeforeStep | None = None) -> numerics.Trial:
    """Forward and loss of a batch, to be tried with other precisions; before: where it began."""

    def take(batches: Sequence[Any], _: UpdateOwner, context: AbstractContextManager) -> list[torch.Tensor]:
        run.current.stage = stage
        run.modules.train(stage is Stage.TRAIN)
        on_device = map(run.feed.to_device, batches)
        if stage is Stage.TRAIN:
            return [_training_loss(run, batch, context) for batch in on_device]
        with torch.no_grad(), run.replaced(plan=run.plan.evaluating_in(context)):
            losses = (run.recipe.evaluate_batch(batch, stage) for batch in on_device)
            return [run.returned_loss(loss, "evaluate_batch") for loss in losses]

    preserve = partial(_rehearsal_from, run, before, steps=False)
    return numerics.Trial(run.modules, run.device, take, preserve=preserve)


def _training_loss(run: Any, batch: Any, context: AbstractContextManager) -> torch.Tensor:
    run.current.step += 1
    with context:
        outputs = run.recipe.compute_forward(batch, Stage.TRAIN)
        return run.recipe.compute_objectives(outputs, batch, Stage.TRAIN).detach()


@contextmanager
def rehearsal(run: Any, weights: bool, steps: bool = True) -> Iterator[None]:
    """Inside this context, steps leave no trace in the run: neither in its counters nor in the recipe's state.

    weights: keep them too; steps: whether more than a forward will be done.
    """
    recipe = run.recipe
    weights = weights or (steps and any(map(run.overrides, _MAY_MOVE_WEIGHTS)))
    current = copy.copy(run.current)
    current.sums = StageMetrics()
    idle = {"log": run.idle_log, "ema": NoAverage(), "reach": None}
    plan = copy.copy(run.plan)  # a hook may set another context
    checkpointer = recipe.checkpointer
    optimizers = recipe.optimizers_dict.values()
    with (
        preserved(run.modules, optimizers, run.device, weights, _holders(run), untouched=[recipe]),
        run.replaced(plan=plan, pending=PendingWindows(run.device), current=current, window=Window(run), **idle),
    ):
        recipe.checkpointer = None if checkpointer is None else _SavesNothing(checkpointer)
        try:
            yield
        finally:
            recipe.checkpointer = checkpointer


def weights_kept(run: Any) -> AbstractContextManager[None]:
    """Context for several trials without an update: a forward may move weights, but not the optimizers' state."""
    return preserved(run.modules, (), run.device, True, _holders(run), untouched=[run.recipe])


def _holders(run: Any) -> list[Holder]:
    recipe = run.recipe
    return [(vars(recipe), run.recipe_state.not_the_recipes), (vars(recipe.hparams), ())]


class _SavesNothing:
    """A checkpointer as a recipe sees it while a step is tried: it reads, and leaves saving to the run."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("save", "start_saving", "delete", "prune")):
            return lambda *_, **__: None
        return getattr(self._checkpointer, name)
