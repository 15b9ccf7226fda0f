"""Repeats steps of a fit: to find what made them nonfinite, or what the device cannot run."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from amp_recipes import numerics
from amp_recipes.errors import AmpRecipesError, ConfigError, PrecisionError
from amp_recipes.loop.rehearsal import BeforeStep, forward_trial, training_trial
from amp_recipes.loop.window import Window
from amp_recipes.modules.torch_private import version_of
from amp_recipes.precision import Precision, Update, device_capabilities
from amp_recipes.stage import Stage
from amp_recipes.state.randomness import generator_state, torch_random_state

logger = logging.getLogger(__name__)

# Of one `fit`, beside the step that ends it: a user who trains on with broken samples has seen some of them by then.
_MOST_REPLAYS = 3


class Replays:
    """The replays of one fit.

    In a run of several processes there are none: one alone cannot take a step again, since the others would wait for
    it, or it for them.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._count = 0
        self._untried = True  # the first batch has not been run on copies yet
        self._reports: dict[tuple[Any, ...], str] = {}  # the reported facts -> the place of the report
        self._generators: tuple[Any, dict[str, Any]] = (None, {})

    # ------------------------------------------------------------------ where a nonfinite value first appeared

    def before_step(self, batches: Sequence[Any]) -> BeforeStep | None:
        """Return the data that a replay of this window would need."""
        run = self._run
        if not run.settings.locate_nonfinite or run.processes.many:
            return None
        attributes = (run.current.epoch, len(vars(run.recipe)))
        if self._generators[0] != attributes:  # else they are those of the last step
            self._generators = attributes, run.recipe_state.generators()
        own = [(name, generator, generator_state(generator)) for name, generator in self._generators[1].items()]
        return BeforeStep(batches, torch_random_state(run.device), own, run.current.step, _versions(batches))

    def cause_of_skip(self, update: Update, window: Window) -> str:
        """Return in words why the run skipped this update; empty if the fp16 scale only backs off as usual."""
        patience = self._run.plan.patience
        if window.before is None or patience.backs_off(update):
            return ""
        last = patience.in_a_row + 1 >= self._run.settings.nonfinite_patience  # the one that the error is about
        if self._count >= _MOST_REPLAYS and not last:
            return ""
        self._count += 1
        where = window.in_pass.where(window.step)
        try:
            cause = self._locate(update, window, where, last)
        except Exception as error:  # what the replay stumbles over must not hide the step that is being reported
            logger.warning("%s: could not repeat the step: %r", where, error)
            return ""
        logger.warning("%s: %s", where, cause)
        return cause

    def _locate(self, update: Update, window: Window, where: str, last: bool) -> str:
        run, before = self._run, window.before
        trial = training_trial(run, before)
        dtype = torch.float32 if run.plan.widened else run.plan.training.dtype
        generators = {name: generator for name, generator, _ in before.generators}
        report = numerics.locate(trial, before.batches, dtype, update.scale or 1.0, generators)
        report.step = run.totals.optimizer_step + run.totals.skipped_steps
        report.where = where
        if window.taken:
            report.caveats.append(
                "An optimizer had already stepped in this window, so the repeated step began from other weights."
            )
        if before.versions != _versions(before.batches):
            report.caveats.append(
                "The recipe changes the batch in place, so the repeated step began with the changed batch."
            )
        told = (report.cause, report.module, report.op, report.phase, report.line, str(report.samples))
        known = self._reports.get(told)
        if known is not None:
            return f"{report.message} (The same as in {known}.)" if last else f"the same as in {known}."
        path = self._write(report, trial, before)
        self._reports[told] = f"step {report.step}" if path is None else str(path)
        return report.message if path is None else f"{report.message} See {path}."

    def _write(self, report: Any, trial: numerics.Trial, before: BeforeStep) -> Path | None:
        folder = self._run.own_folder
        if folder is None:
            return None
        try:
            return numerics.write_report(folder, report, trial, before.batches, before.random, command=_command())
        except (OSError, ConfigError) as error:  # the message is logged all the same
            logger.warning("could not write the report of a nonfinite step: %s", error)
            return None

    # ------------------------------------------------------------------ what the device cannot run

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


def _versions(batches: Sequence[Any]) -> list[int]:
    """Return how often the tensors of the batches were written to; only of those at the top level, to lose no time."""
    found = []
    for batch in batches:
        for part in _parts(batch):
            if type(part) is torch.Tensor and not part.is_inference():
                found.append(version_of(part))
    return found


def _parts(batch: Any) -> Iterable[Any]:
    if type(batch) is dict:
        return batch.values()
    return batch if type(batch) in (tuple, list) else (batch,)


def _command() -> dict[str, Any] | None:
    """Return the command that started this process; None if there is no script (a notebook)."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return None
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return {
        "script": str(Path(script).resolve()),
        "module": None if spec is None else spec.name,  # python -m package.train
        "words": sys.argv[1:],
        "cwd": str(Path.cwd()),
    }
