"""Examines a run instead of training it: diagnoses its precision, or replays a nonfinite step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from amp_recipes import data, numerics
from amp_recipes.data import close_loader, generator_states, set_epoch, set_generator_states
from amp_recipes.errors import ConfigError, DataError, RecipeError
from amp_recipes.files.lazy_names import from_commands
from amp_recipes.loop.loader_pass import Pass
from amp_recipes.loop.rehearsal import BeforeStep, rehearsal, training_trial
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)

_FEWEST_WINDOWS = 3  # of a diagnosis: two to search on, one held out


def diagnose(
    run: Any,
    train_set: Any,
    train_loader_kwargs: Mapping[str, Any],
    precisions: str | Sequence[str],
    tolerance: float | None,
    steps: int,
    minutes: float,
    windows: int,
) -> numerics.Diagnosis:
    """Diagnose the effect of a precision on the run's model; see `Brain.diagnose`."""
    if windows < _FEWEST_WINDOWS:
        raise ConfigError(f"windows is {windows}, but a diagnosis needs at least {_FEWEST_WINDOWS} windows.")
    if not minutes > 0:
        raise ConfigError(f"minutes is {minutes:g}; expected a number greater than 0.")
    questions = numerics.Questions(precisions or _precisions(run.plan.training.name), tolerance, steps, minutes * 60)
    with _examination(run) as weights:
        chosen = _first_windows(run, train_set, train_loader_kwargs, windows)
        found = numerics.diagnose(training_trial(run), chosen, questions, tuple(run.plan.pinned), weights)
    if run.own_folder is not None:
        found.write(run.own_folder)
        _draw(run.own_folder)
    return found


def _draw(folder: Path) -> None:
    try:
        from_commands("report", "draw_diagnosis")(folder)
    except ConfigError as error:  # without matplotlib, only the picture is missing
        logger.warning("%s", error)


def replay(run: Any, folder: Path) -> str:
    """Repeat a nonfinite step of an earlier process, and return in words where its first NaN or Inf appeared."""
    saved = numerics.read_replay(folder)
    with _examination(run):
        saved.load_into(run.modules)
        trial = training_trial(run, BeforeStep((), saved.random, [], 0, []))
        report = numerics.locate(trial, saved.window, saved.dtype, saved.scale)
        return saved.compared_with(report)


def _precisions(precision: str) -> tuple[str, ...]:
    """Return the precisions to diagnose: bf16 beside fp16, since bf16 needs no loss scale where it is safe."""
    return ("bf16",) if precision == "bf16" else ("bf16", "fp16")


def _first_windows(run: Any, train_set: Any, loader_kwargs: Mapping[str, Any], number: int) -> list[list[Any]]:
    size = run.settings.grad_accumulation_factor
    if isinstance(train_set, Iterator) and run.task.trains:
        logger.warning("the training set is an iterator: a diagnosis uses up the batches that it reads")
    loader = run.feed.batches_of(train_set, Stage.TRAIN, loader_kwargs)
    generators = generator_states(loader)
    set_epoch(loader, 1)
    try:
        chosen = [list(window) for window in islice(data.windows(iter(loader), size), number)]
    finally:
        close_loader(loader)
        set_generator_states(loader, generators)
    if len(chosen) > 1 and len(chosen[-1]) < len(chosen[0]):
        chosen.pop()  # an epoch's rest says less than a whole window
    if len(chosen) < _FEWEST_WINDOWS:
        raise DataError(
            f"a diagnosis needs at least {_FEWEST_WINDOWS} windows of {size} batches (grad_accumulation_factor), but "
            f"the training set has only {len(chosen)}. Give more data, or smaller batches."
        )
    return chosen


@contextmanager
def _examination(run: Any) -> Iterator[str]:
    """Inside this context, the model is as at the start of a training epoch; yields whose weights it has."""
    recipe = run.recipe
    if run.in_fit:
        raise RecipeError("diagnose was called inside fit: call it before or after fit.")
    if run.processes.many:
        raise ConfigError("--diagnose and --replay run in one process only: start the script without torchrun.")
    before = dict(recipe.optimizers_dict), recipe.optimizer
    try:
        with rehearsal(run, weights=True), run.replaced(schedulers=run.schedulers, resume=_NoResume(run.resume)):
            recipe.on_fit_start()
            with rehearsal(run, weights=True):  # now that there are optimizers
                weights = _load_newest(run)
                run.modules.train()
                with run.replaced(current=Pass(Stage.TRAIN, 1)):
                    recipe.on_stage_start(Stage.TRAIN, 1)
                    yield weights
    finally:
        recipe.optimizers_dict, recipe.optimizer = before


class _NoResume:
    """Does not resume: an examination only reads the run."""

    def __init__(self, resume: Any) -> None:
        self.init_from_run = resume.init_from_run
        self.snapshot = resume.snapshot

    def from_newest(self) -> None:
        """Stay at the start."""


def _load_newest(run: Any) -> str:
    if run.totals.trained:
        return "as trained in this process"
    found = run.checkpoints.load_for_evaluation(None, None, ("modules", "hooked_modules"), weights_only=True)
    if found is not None:
        return f"from the checkpoint {found.path.name}"
    if run.settings.init_from is not None:
        run.resume.init_from_run()
        return f"of {run.settings.init_from}"
    return "as initialised"
