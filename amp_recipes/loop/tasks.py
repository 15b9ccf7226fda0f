"""Runs the task for which a script was started: training, or examining the run instead."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from amp_recipes import distributed
from amp_recipes.errors import CheckpointError, ConfigError, DataError
from amp_recipes.loggers import show_notices
from amp_recipes.loop.evaluation import evaluate_set
from amp_recipes.loop.examination import replay
from amp_recipes.loop.fit import Fit, FitCall
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)


class Unwatched:
    """Records nothing of a task's windows, in checkpoints either; `verify-resume` has another watch.

    is_over: whether training is to end now.
    """

    is_over = False

    def limited(self, batches: Iterator[Any], stage: Stage) -> Iterator[Any]:
        """The batches of a pass, or fewer."""
        return batches

    def before_window(self, run: Any, batches: Sequence[Any]) -> None:
        """A window is about to be trained on."""

    def after_window(self, run: Any, losses: Sequence[torch.Tensor]) -> None:
        """It was trained on, with these losses."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values for a checkpoint, beside the loop's own numbers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values from a checkpoint's numbers."""


class Train:
    """Trains and evaluates. Another task has the same methods and attributes.

    trains: whether the run trains, and so writes into its folder; watch: see `Unwatched`.
    """

    trains, watch = True, Unwatched()

    def fit(self, run: Any, call: FitCall) -> None:
        """`fit` was called: train, unless the script is only to test."""
        if run.settings.test_only:
            logger.info("test_only is set: skipping fit")
            return
        Fit.of(run, call).train(call.progressbar)

    def evaluate(self, run: Any, *asked: Any) -> float:
        """`evaluate` was called; the arguments are those of `evaluate_set`."""
        return evaluate_set(run, *asked)


class Examine:
    """Examines the run at its first `fit`; the others, and evaluations, do nothing.

    say: examines the run, which the arguments of `fit` belong to, and returns what to print, and the exit status with
    which the script is to end there. None: it goes on.
    """

    trains, watch = False, Unwatched()

    def __init__(self, say: Callable[[Any, FitCall], tuple[str, int | None]]) -> None:
        self._say = say
        self._done = False

    def fit(self, run: Any, call: FitCall) -> None:
        """Examine the run, once. Raises SystemExit where the task has an exit status; 0 in several processes."""
        if self._done:
            return
        self._done = True
        try:
            said, status = self._say(run, call)
        except (CheckpointError, DataError) as error:  # of what the command line asks for: no fault of the script's
            raise ConfigError(str(error)) from None
        if distributed.is_main_process():
            print(said, flush=True)
        if status is not None:
            # torchrun takes any other status for a failure, and ends with 1.
            raise SystemExit(0 if run.processes.many else status)

    def evaluate(self, run: Any, *asked: Any) -> float:
        """Nothing was trained that could be tested."""
        return math.nan


def _diagnosis(settings: Mapping[str, float], run: Any, call: FitCall) -> tuple[str, int]:
    show_notices()  # which part runs, also without a progress bar
    logger.info("running a diagnosis instead of training; --diagnose-minutes is %g", settings.get("minutes", 5))
    found = run.recipe.diagnose(call.train_set, call.train_loader_kwargs, **settings)
    return str(found), found.status


def task_for(purpose: Any) -> Any:
    """The task of a script; purpose: its `action`, and the `folder` that `--replay` was given."""
    if _given:
        return _given[-1]
    if purpose.action == "diagnose":
        return Examine(partial(_diagnosis, purpose.settings))
    if purpose.action == "replay":
        return Examine(lambda run, call: (replay(run, Path(str(purpose.folder))), None))
    return Train()


_given: list[Any] = []


@contextmanager
def given(task: Any) -> Iterator[None]:
    """Inside this context, scripts do this task instead of training."""
    _given.append(task)
    try:
        yield
    finally:
        _given.remove(task)
