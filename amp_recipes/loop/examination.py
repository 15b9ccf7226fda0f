"""Examines a run instead of training it: diagnoses its precision, or replays a nonfinite step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from amp_recipes import data, distributed, numerics
from amp_recipes.data import close_loader, generator_states, set_epoch, set_generator_states
from amp_recipes.errors import AmpRecipesError, ConfigError, DataError, ProcessError, RecipeError
from amp_recipes.files.lazy_names import from_commands
from amp_recipes.loop.loader_pass import Pass
from amp_recipes.loop.locating import command_of_process
from amp_recipes.loop.processes import OneProcess
from amp_recipes.loop.rehearsal import BeforeStep, forward_trial, rehearsal, training_trial
from amp_recipes.modules.nested import tensors_in
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)

_FEWEST_WINDOWS = 3  # of a diagnosis: two to search on, one held out
# Windows that only the proof by training takes: at most so many, and of so many bytes, since they stay in memory.
_FURTHER_WINDOWS, _FURTHER_BYTES = 24, 2**30


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
    name = run.plan.training.name
    asked = () if precisions or name == "fp32" else (name,)
    questions = numerics.Questions(
        precisions or _precisions(name), tolerance, steps, minutes * 60, _loss_scale(run.settings), asked
    )

    def examine() -> numerics.Diagnosis:
        with _examination(run) as weights:
            chosen = _first_windows(run, train_set, train_loader_kwargs, windows, _FURTHER_WINDOWS if steps else 0)
            trial, pinned = training_trial(run), tuple(run.plan.pinned)
            found = numerics.diagnose(trial, chosen[:windows], questions, pinned, weights, further=chosen[windows:])
        if run.own_folder is not None:
            found.write(run.own_folder)
            _draw(run.own_folder)
        return found

    return _by_main_process(run, examine)


def _loss_scale(settings: Any) -> numerics.LossScale:
    """The loss scale with which a run in fp16 begins."""
    return numerics.LossScale(
        settings.init_scale, settings.growth_factor, settings.backoff_factor, settings.growth_interval
    )


def _draw(folder: Path) -> None:
    try:
        from_commands("report", "draw_diagnosis")(folder)
    except ConfigError as error:  # without matplotlib, only the picture is missing
        logger.warning("%s", error)


def replay(run: Any, folder: Path) -> str:
    """Repeat a nonfinite step of an earlier process, and return in words where its first NaN or Inf appeared."""

    def examine() -> str:
        saved = numerics.read_replay(folder)
        stage = Stage[saved.report.get("stage", "train").upper()]
        with _examination(run, stage):
            saved.load_into(run.modules)
            before = BeforeStep((), saved.random, [], 0, [])
            trial = training_trial(run, before) if stage is Stage.TRAIN else forward_trial(run, stage, before)
            report = numerics.locate(trial, saved.window, saved.dtype, saved.scale)
            command = command_of_process()
            return saved.compared_with(report, command and command["words"])

    return _by_main_process(run, examine)


def _by_main_process(run: Any, examine: Callable[[], Any]) -> Any:
    """Let the main process examine the run, as if it were the only one; all processes get what it finds, or raises."""
    if not run.processes.many:
        return examine()
    _refuse_inside_fit(run)
    run.pending.settle()
    run.checkpoints.wait()
    found = error = None
    with distributed.whole(run.modules, run.recipe.optimizers_dict.values()), distributed.at_own_pace():
        if distributed.is_main_process():
            with distributed.alone(), run.replaced(processes=OneProcess(run)), _on_device(run):
                try:
                    found = examine()
                except Exception as raised:
                    error = raised
    told = error
    if not isinstance(error, AmpRecipesError | None):  # others may not survive the way to another process
        told = ProcessError(f"rank 0 could not examine the run: {type(error).__name__}: {error}")
    found, told = distributed.from_main_process((found, told))
    if told is not None:
        raise error or told
    return found


@contextmanager
def _on_device(run: Any) -> Iterator[None]:
    """Inside this context, the modules are on the device: before it shards them, fsdp leaves them where they are."""
    if distributed.is_sharded(run.modules):  # and whole for a while
        yield
        return
    devices = {parameter.device for parameter in run.modules.parameters()}
    run.modules.to(run.device)
    try:
        yield
    finally:
        if len(devices) == 1:
            run.modules.to(*devices)


def _precisions(precision: str) -> tuple[str, ...]:
    """Return the precisions to diagnose: bf16 beside fp16, since bf16 needs no loss scale where it is safe."""
    return ("bf16",) if precision == "bf16" else ("bf16", "fp16")


def _first_windows(
    run: Any, train_set: Any, loader_kwargs: Mapping[str, Any], number: int, further: int = 0
) -> list[list[Any]]:
    size = run.settings.grad_accumulation_factor
    if isinstance(train_set, Iterator) and run.task.trains:
        logger.warning("the training set is an iterator: a diagnosis uses up the batches that it reads")
    loader = run.feed.batches_of(train_set, Stage.TRAIN, loader_kwargs)
    generators = generator_states(loader)
    set_epoch(loader, 1)
    try:
        windows = map(list, data.windows(iter(loader), size))
        chosen = list(islice(windows, number))
        chosen += _within(islice(windows, further), _FURTHER_BYTES)
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


def _within(windows: Iterable[list[Any]], most_bytes: int) -> Iterator[list[Any]]:
    """The windows, up to the one with which their tensors have more bytes."""
    total = 0
    for window in windows:
        total += sum(tensor.nbytes for tensor in tensors_in(window))
        if total > most_bytes:
            return
        yield window


def _refuse_inside_fit(run: Any) -> None:
    if run.in_fit:
        raise RecipeError("diagnose was called inside fit: call it before or after fit.")


@contextmanager
def _examination(run: Any, stage: Stage = Stage.TRAIN) -> Iterator[str]:
    """Inside this context, the model is as at the start of a stage; yields whose weights it has."""
    recipe = run.recipe
    _refuse_inside_fit(run)
    before = dict(recipe.optimizers_dict), recipe.optimizer
    try:
        with rehearsal(run, weights=True), run.replaced(schedulers=run.schedulers, resume=_NoResume(run.resume)):
            recipe.on_fit_start()
            with rehearsal(run, weights=True):  # now that there are optimizers
                weights = _load_newest(run)
                run.modules.train(stage is Stage.TRAIN)
                with run.replaced(current=Pass(stage, 1)):
                    recipe.on_stage_start(stage, 1)
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
    if run.settings.resume == "never":
        return "as initialised"
    found = run.checkpoints.load_for_evaluation(None, None, ("modules", "hooked_modules"), weights_only=True)
    if found is not None:
        return f"from the checkpoint {found.path.name}"
    if run.settings.init_from is not None:
        run.resume.init_from_run()
        return f"of {run.settings.init_from}"
    return "as initialised"
