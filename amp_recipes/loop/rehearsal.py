"""Tries steps of a run without a trace: its counters, logs and weights do not change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from amp_recipes import numerics
from amp_recipes.loop.ema import NoAverage
from amp_recipes.loop.metrics import StageMetrics
from amp_recipes.loop.processes import OwnWindow
from amp_recipes.loop.window import PendingWindows, Window
from amp_recipes.precision import UpdateOwner
from amp_recipes.stage import Stage
from amp_recipes.state.preserved import preserved
from amp_recipes.state.randomness import set_generator_state, set_torch_random_state

# What a recipe may override to move weights without an optimizer's step: a teacher's average, a critic's clipping.
_MAY_MOVE_WEIGHTS = ("fit_batch", "on_fit_batch_start", "on_fit_batch_end")


@dataclass(frozen=True, slots=True)
class BeforeStep:
    """The data needed to repeat a window's step, as long as the step has not changed the weights.

    random: torch's global generators; generators: the recipe's own, with their states; step: batches done before it;
    versions: of the batches' tensors, which tell whether the recipe has written to them.
    """

    batches: Sequence[Any]
    random: list[torch.Tensor]
    generators: list[tuple[str, Any, Any]]
    step: int
    versions: list[int]


def training_trial(run: Any, before: BeforeStep | None = None) -> numerics.Trial:
    """The training step, to be taken with other precisions; before: where it began (default: where the run is)."""

    @contextmanager
    def preserve(weights: bool) -> Iterator[None]:
        with rehearsal(run, weights or before is not None):
            if before is not None:
                run.current.step = before.step
                set_torch_random_state(before.random, run.device)
                for _, generator, state in before.generators:
                    set_generator_state(generator, state)
            yield

    optimizers = lambda: run.recipe.optimizers_dict  # noqa: E731
    return numerics.Trial(run.modules, run.device, partial(_try_window, run), optimizers, preserve)


def _try_window(
    run: Any, batches: Sequence[Any], updates: UpdateOwner, context: AbstractContextManager
) -> list[torch.Tensor]:
    window = Window(run, run.current, OwnWindow(*run.feed.weigh(batches), run), len(batches))
    with run.replaced(plan=run.plan.for_trial(updates, context), window=window):
        run.pending.open(window)
        losses = window.take(batches)
        run.pending.clear()
    return losses


def forward_trial(run: Any, stage: Stage) -> numerics.Trial:
    """Forward and loss of a batch, to be tried with other precisions."""

    def take(batches: Sequence[Any], _: UpdateOwner, context: AbstractContextManager) -> list[torch.Tensor]:
        run.current.stage = stage
        run.modules.train(stage is Stage.TRAIN)
        on_device = map(run.feed.to_device, batches)
        if stage is Stage.TRAIN:
            return [_training_loss(run, batch, context) for batch in on_device]
        with torch.no_grad(), run.replaced(plan=run.plan.evaluating_in(context)):
            return [run.recipe.evaluate_batch(batch, stage) for batch in on_device]

    return numerics.Trial(run.modules, run.device, take, preserve=partial(rehearsal, run, steps=False))


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
    holders = [(vars(recipe), run.recipe_state.not_the_recipes), (vars(recipe.hparams), ())]
    current = copy.copy(run.current)
    current.sums = StageMetrics()
    idle = {"log": run.idle_log, "ema": NoAverage(), "reach": None}
    plan = copy.copy(run.plan)  # a hook may set another context
    checkpointer = recipe.checkpointer
    optimizers = recipe.optimizers_dict.values()
    with (
        preserved(run.modules, optimizers, run.device, weights, holders, untouched=[recipe]),
        run.replaced(plan=plan, pending=PendingWindows(run.device), current=current, window=Window(run), **idle),
    ):
        recipe.checkpointer = None if checkpointer is None else _SavesNothing(checkpointer)
        try:
            yield
        finally:
            recipe.checkpointer = checkpointer


class _SavesNothing:
    """A checkpointer as a recipe sees it while a step is tried: it reads, and leaves saving to the run."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("save", "start_saving", "delete", "prune")):
            return lambda *_, **__: None
        return getattr(self._checkpointer, name)
