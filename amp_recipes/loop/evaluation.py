"""Evaluates a validation or test set, and loads the weights to evaluate."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch

from amp_recipes import distributed
from amp_recipes.data import LoadingStopped, batch_length, loader_faults
from amp_recipes.data.sample_names import forget_recorded
from amp_recipes.errors import CheckpointError, DataError
from amp_recipes.loop.loader_pass import Pass
from amp_recipes.loop.rehearsal import BeforeStep
from amp_recipes.loop.replays import NonfiniteBatches
from amp_recipes.loop.window import Window
from amp_recipes.precision.host_copy import HostFuture
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)


def evaluate(run: Any, loader: Iterable[Any], stage: Stage, epoch: int | None) -> float:
    """Evaluate once over the loader, with the averaged weights where there are some; returns the average loss."""
    current, position = Pass(stage, epoch), run.fit.position
    if stage is Stage.VALID:
        position.validation_begins()
    run.start_pass(current, loader)
    forget_recorded(loader)
    sharing = distributed.evaluating(run.modules)
    posted: deque[_Evaluated] = deque()
    nonfinite = NonfiniteBatches(run, current)
    with torch.no_grad(), run.ema.applied(), sharing, loader_faults(loader), suppress(LoadingStopped):
        for batch, counts in run.processes.to_evaluate(run.log.timed(run.feed.limited(loader)), current):
            if not counts:
                with current.not_counting():
                    run.recipe.evaluate_batch(run.feed.to_device(batch), stage)
                continue
            posted.append(_evaluated(run, nonfinite, batch, loader))
            if len(posted) > 2:  # two behind, so that the host reads what has long arrived
                _add_loss(run, nonfinite, posted.popleft())
            run.log.advance(1, batch_length(batch))
        for evaluated in posted:
            _add_loss(run, nonfinite, evaluated)
        if not run.processes.is_to_end():
            nonfinite.explain()
    if run.processes.is_to_end():
        _leave(run, current)
    if stage is Stage.VALID:
        position.validation_ends()
    if not any(distributed.gather(current.step)):
        raise DataError(f"the {stage.name.lower()} set has no batches")
    # Its hook sees the weights that were tested; that of a validation may save, and saves those that train.
    with run.ema.applied() if stage is Stage.TEST else nullcontext():
        loss = run.end_pass(current)
    current.step = 0
    return loss


class _Evaluated(NamedTuple):
    """A batch whose loss is on its way to the host, and what it counts for; before: what it takes to repeat it."""

    loss: HostFuture
    weight: float
    before: BeforeStep | None


def _evaluated(run: Any, nonfinite: NonfiniteBatches, batch: Any, loader: Iterable[Any]) -> _Evaluated:
    current = nonfinite.current
    current.step = done = current.step + 1
    weight = float(run.recipe.batch_weight(batch))
    before = nonfinite.before(batch, loader)
    with run.fit.runnable.blaming_precision([batch]):
        loss = run.returned_loss(run.recipe.evaluate_batch(run.feed.to_device(batch), current.stage), "evaluate_batch")
    current.step = done  # the recipe may count its steps, too
    current.sums.send(run.host)
    current.sums.take_in(but_newest=2)
    return _Evaluated(run.host.post(loss), weight, before)


def _add_loss(run: Any, nonfinite: NonfiniteBatches, evaluated: _Evaluated) -> None:
    loss = evaluated.loss.read()[0]
    nonfinite.current.average.add(loss, evaluated.weight, run.recipe.update_average)
    if not math.isfinite(loss):
        nonfinite.note(evaluated.before)


def _leave(run: Any, current: Pass) -> None:
    """A signal asks the run to end: save if it is a validation, and end."""
    if current.stage is Stage.VALID:
        run.saving.save_and_leave()
    if not run.in_fit:
        run.interrupts.leave(f"{current.where()}: stopping here; an evaluation changes nothing")


def evaluate_set(
    run: Any,
    test_set: Any,
    max_key: str | None,
    min_key: str | None,
    progressbar: bool | None,
    loader_kwargs: Mapping[str, Any],
) -> float:
    """Evaluate a test set; inside `fit`, training continues afterwards as if nothing had happened."""
    loader = run.feed.batches_of(test_set, Stage.TEST, loader_kwargs)
    run.pending.settle()
    run.processes.share_untrained()
    # A test whose hook calls this has the averaged weights applied.
    model = _model_set_aside(run, bool(max_key or min_key)) if run.in_fit else run.interrupts
    with run.ema.set_aside(), _pass_set_aside(run), model:
        run.recipe.on_evaluate_start(max_key, min_key)
        with run.logging(progressbar):
            return evaluate(run, loader, Stage.TEST, None)


def _pass_set_aside(run: Any) -> AbstractContextManager[None]:
    """Inside this context, an evaluation inside a hook of another pass has its own pass."""
    if not run.in_fit and run.log is run.idle_log:
        return nullcontext()
    return run.replaced(current=run.current, window=Window(run), stage_metrics=run.stage_metrics)


@contextmanager
def _model_set_aside(run: Any, weights: bool) -> Iterator[None]:
    """Inside this context, an evaluation may change modes (and weights): all is restored afterwards."""
    modes = [(module, module.training) for module in run.modules.modules()]
    holders = [run.modules, run.ema] if weights else []
    kept = [{name: value.clone() for name, value in holder.state_dict().items()} for holder in holders]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for holder, values in zip(holders, kept, strict=True):
            holder.load_state_dict(values)


def load_weights_to_evaluate(run: Any, max_key: str | None, min_key: str | None) -> None:
    """Load the best checkpoint by a key; without one, the newest if this process has not trained."""
    settings, trained = run.settings, run.totals.trained
    wanted = bool(max_key or min_key)
    if trained and not wanted:
        return
    run.checkpoints.wait()
    distributed.wait_for_all()  # the others look only when the main process has written
    newest = () if trained else ("brain",)  # the totals of the run that is evaluated
    names = ("modules", "hooked_modules", "ema")
    found = run.checkpoints.load_for_evaluation(max_key, min_key, names, newest, weights_only=run.in_fit)
    if found is None:
        if settings.init_from is not None and not trained:
            run.resume.init_from_run()
            return
        _say_that_none_was_loaded(run, wanted)
    if not run.in_fit:  # inside fit, all is put back as it was
        run.plan.updates.forget_state()


def _say_that_none_was_loaded(run: Any, wanted: bool) -> None:
    settings = run.settings
    if settings.test_only and run.checkpoints.owned:
        raise CheckpointError(
            f"test_only: there is no checkpoint in {settings.output_folder}/save, so the model is untrained. Train "
            "first, or give the output_folder of a trained run."
        )
    if (settings.test_only or wanted) and not settings.debug:
        logger.warning("no checkpoint was loaded: evaluating the current weights")
