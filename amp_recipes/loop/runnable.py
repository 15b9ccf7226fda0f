"""Tells which precision the device cannot run: the first batch is tried on copies, and errors are explained."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from amp_recipes import numerics
from amp_recipes.errors import AmpRecipesError, PrecisionError
from amp_recipes.loop.rehearsal import BeforeStep, forward_trial, training_trial
from amp_recipes.precision import Precision, device_capabilities
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)


class Runnable:
    """Finds the modules of a fit that cannot run in its precision. In a run of several processes, it finds none."""

    def __init__(self, run: Any) -> None:
        self._run = run
        self._untried = True  # the first batch has not been run on copies yet

    @contextmanager
    def blaming_precision(self, batches: Sequence[Any], before: BeforeStep | None = None) -> Iterator[None]:
        """Inside this context, an error that only low precision causes becomes a PrecisionError that names the cure.

        before: where the training step began.
        """
        run = self._run
        if run.processes.many:
            yield
            return
        stage = run.current.stage
        if self._untried and stage is Stage.TRAIN:
            self._untried = False
            self._try_first_batch(batches[:1])
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, (AmpRecipesError, torch.OutOfMemoryError)):
                trial = training_trial(run, before) if stage is Stage.TRAIN else forward_trial(run, stage)
                self._check_runnable(trial, batches, stage, error)
            raise

    def _try_first_batch(self, batches: Sequence[Any]) -> None:
        """Before the first step: run the first batch on copies, in each low precision that this fit will use.

        A step of the recipe's own is not tried: what it does beside a forward is not known. Raises PrecisionError.
        """
        run = self._run
        if not run.own_fit_batch:
            self._check_runnable(forward_trial(run, Stage.TRAIN), batches, Stage.TRAIN)
        same = run.plan.evaluation.dtype is run.plan.training.dtype
        if run.fit.loaders["valid"] is not None and (run.own_fit_batch or not same):
            self._check_runnable(forward_trial(run, Stage.VALID), batches, Stage.VALID)

    def _check_runnable(
        self, trial: numerics.Trial, batches: Sequence[Any], stage: Stage, cause: RuntimeError | None = None
    ) -> None:
        """Raise PrecisionError if `batches` can be run in fp32, but not in the precision of `stage`."""
        plan, training = self._run.plan, stage is Stage.TRAIN
        precision = plan.training if training else plan.evaluation
        if precision.dtype is torch.float32 or (training and plan.widened):
            return
        try:
            found = numerics.find_unrunnable(trial, batches, precision.dtype, plan.pinned)
        except Exception as error:  # the recipe's own error: it is raised again by the step itself
            logger.debug("could not try %s: %r", precision.name, error)
            return
        if found is not None:
            raise PrecisionError(self._unrunnable_text(found, precision, training, cause)) from cause

    def _unrunnable_text(
        self, found: numerics.Unrunnable, precision: Precision, training: bool, cause: RuntimeError | None
    ) -> str:
        run = self._run
        option = "precision" if training else "eval_precision"
        what = str(found)
        if not what:
            what = "the forward fails" if cause is None else numerics.first_line(cause)
        pins = json.dumps([*run.settings.fp32_modules, *found.errors])
        cure = (
            f"add `fp32_modules: {pins}` to the YAML (the model was tested with it), or use" if found.errors else "use"
        )
        return (
            f"{option} {precision.name} cannot run this model on {device_capabilities(run.device).device_name}: "
            f"{what}. It runs in fp32: {cure} --{option} fp32."
        )
