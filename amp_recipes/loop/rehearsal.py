"""Tries steps of a run beside the run: to say what precision does to it, and where a nonfinite value was born."""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from amp_recipes import data, distributed
from amp_recipes.commands.report import draw_diagnosis
from amp_recipes.data import close_loader, generator_states, set_epoch, set_generator_states
from amp_recipes.errors import AmpRecipesError, CheckpointError, ConfigError, DataError, PrecisionError, RecipeError
from amp_recipes.loop.gradient_reach import GradientReach
from amp_recipes.loop.hooks import Stage
from amp_recipes.loop.ledger import Ledger, Window
from amp_recipes.loop.metrics import StageMetrics
from amp_recipes.loop.resume import ResumableRun
from amp_recipes.numerics.diagnosis import WINDOWS, Diagnosis, Questions, diagnose
from amp_recipes.numerics.nonfinite import locate, read_replay, write_report
from amp_recipes.numerics.pins.unrunnable import Unrunnable, find_unrunnable, first_line
from amp_recipes.numerics.trial import Trial
from amp_recipes.precision import Patience, Precision, Update, UpdateOwner, device_capabilities
from amp_recipes.state.preserved import preserved
from amp_recipes.state.randomness import (
    generator_state,
    set_generator_state,
    set_torch_random_state,
    torch_random_state,
)

logger = logging.getLogger(__name__)

# Of one `fit`, beside the step that ends it: whoever trains on with broken samples has seen some named by then.
_MOST_REPLAYS = 3
_FEWEST_WINDOWS = 3  # of a diagnosis: two to search on, one held out
# What a step moves on the Brain itself, beside what the recipe sets there.
_OF_A_STEP = (
    *("step", "should_step", "_stage", "_epoch", "_window_size", "_window_weight", "_batch_weight", "_counts"),
    *("_stepped_by_hand", "_plan", "_ledger", "_log", "_ema", "training_ctx", "evaluation_ctx", "scaler"),
    *("_stage_so_far", "_reach"),
    *("_sums", "_window_sums"),
    "checkpointer",
)


@dataclass(frozen=True, slots=True)
class BeforeStep:
    """What it takes to take a window's step again, as long as it has not moved the weights.

    random: torch's global generators; generators: the recipe's own, with their states; step: batches done before it;
    versions: of the batches' tensors, which tell whether the recipe has written to them.
    """

    batches: Sequence[Any]
    random: list[torch.Tensor]
    generators: list[tuple[str, Any, Any]]
    step: int
    versions: list[int]


class ExaminedRun(ResumableRun):
    """Base of `Brain`: diagnoses the precision, and replays the steps that went nonfinite.

    The step itself (`_take_batches`) is Brain's.
    """

    def _set_up_counters(self) -> None:
        super()._set_up_counters()
        self._examines = False  # a step is being tried: nothing of it may reach the run
        self._asked_for_done = False  # what the script was started for
        self._untried = False  # this fit's first batch has not been run on copies yet
        self._replays = 0  # in this fit
        self._reports: dict[tuple[Any, ...], str] = {}  # of this fit: what was told, and where it is written
        self._generators: tuple[Any, dict[str, Any]] = (None, {})

    def _start_afresh(self) -> None:
        super()._start_afresh()
        self._replays, self._reports = 0, {}
        self._untried = True

    # ------------------------------------------------------------------ diagnosis

    def diagnose(
        self,
        train_set: Any,
        train_loader_kwargs: Mapping[str, Any] = {},
        precisions: str | Sequence[str] = (),
        tolerance: float | None = None,
        steps: int = 200,
        minutes: float = 5.0,
        windows: int = WINDOWS,
    ) -> Diagnosis:
        """What precision does to this model, on a few batches of `train_set`; all is afterwards as it was.

        train_set, train_loader_kwargs: as for `fit`. precisions: names of those to look at; by default the run's own,
        and bf16 beside fp16 (both if the run is fp32). tolerance: bound on the relative error of the gradient (default:
        a fifth of what batches differ by, and at least ten times the precision's eps); steps: of training that prove a
        set of pins, at most; minutes: that all of it may take, about; windows: to look at.
        The weights are those of the newest checkpoint of `output_folder`, or of `init_from`, where there are any.
        With `output_folder`, `diagnosis.json` and `diagnosis.png` are written there. The verdict is `str(result)`.
        Raises DataError if there are not three windows, RecipeError inside `fit`.
        """
        if windows < _FEWEST_WINDOWS:
            raise ConfigError(f"windows is {windows}, but a diagnosis needs at least {_FEWEST_WINDOWS}.")
        if not minutes > 0:
            raise ConfigError(f"minutes is {minutes:g}, but must be greater than 0.")
        questions = Questions(precisions or _precisions(self.precision), tolerance, steps, minutes * 60)
        with self._examination() as weights:
            chosen = self._first_windows(train_set, train_loader_kwargs, windows)
            pinned = tuple(self._plan.pinned)
            found = diagnose(self._trial(), chosen, questions, pinned, weights)
        folder = self._own_folder()
        if folder is not None:
            found.write(folder)
            try:
                draw_diagnosis(folder)
            except ConfigError as error:  # without matplotlib: the findings are written all the same
                logger.warning("%s", error)
        return found

    def _done_instead(self, train_set: Any, train_loader_kwargs: Mapping[str, Any]) -> bool:
        """Whether the script was started for something else than training; its first `fit` does it."""
        purpose = self.run_opts.purpose
        if purpose.action == "train":
            return False
        if not self._asked_for_done:
            self._asked_for_done = True
            try:
                if purpose.action == "diagnose":
                    print("diagnosing in place of training: up to about five minutes", file=sys.stderr, flush=True)
                    print(self.diagnose(train_set, train_loader_kwargs))
                else:
                    self._show_again(Path(str(purpose.folder)))
            except (CheckpointError, DataError) as error:  # of what the command line asks for: no fault of the script's
                raise ConfigError(str(error)) from None
        return True

    def _first_windows(self, train_set: Any, loader_kwargs: Mapping[str, Any], number: int) -> list[list[Any]]:
        if isinstance(train_set, Iterator) and self.run_opts.purpose.action == "train":
            logger.warning("the training set is an iterator: the batches that a diagnosis takes are gone from it")
        loader = self._batches_of(train_set, Stage.TRAIN, loader_kwargs)
        generators = generator_states(loader)
        set_epoch(loader, 1)
        try:
            chosen = [
                list(window) for window in islice(data.windows(iter(loader), self.grad_accumulation_factor), number)
            ]
        finally:
            close_loader(loader)
            set_generator_states(loader, generators)
        if len(chosen) > 1 and len(chosen[-1]) < len(chosen[0]):
            chosen.pop()  # an epoch's rest says less than a whole window
        if len(chosen) < _FEWEST_WINDOWS:
            raise DataError(
                f"a diagnosis needs at least {_FEWEST_WINDOWS} windows of {self.grad_accumulation_factor} batches "
                f"(grad_accumulation_factor), but the training set yields {len(chosen)}: give more data, or "
                "smaller batches."
            )
        return chosen

    # ------------------------------------------------------------------ where a nonfinite value was born

    def _before_step(self, batches: Sequence[Any]) -> BeforeStep | None:
        """What a replay of this window will need."""
        if not self.locate_nonfinite or distributed.initialized():
            return None  # a replay on one rank alone would wait for the others
        if self._generators[0] != (self._epoch, len(vars(self))):  # else the attributes are those of the last step
            self._generators = (self._epoch, len(vars(self))), self._recipe_state.generators()
        own = [(name, it, generator_state(it)) for name, it in self._generators[1].items()]
        return BeforeStep(batches, torch_random_state(self.device), own, self.step, _versions(batches))

    def _cause_of_skip(self, update: Update, window: Window) -> str:
        """Where the value that made the run skip this update was born, in words; empty for ordinary fp16 back-off."""
        if window.before is None or self._examines or self._plan.patience.backs_off(update):
            return ""
        last = self._plan.patience.in_a_row + 1 >= self.nonfinite_patience  # the one that the error is about
        if self._replays >= _MOST_REPLAYS and not last:
            return ""
        self._replays += 1
        try:
            cause = self._locate(update, window, last)
        except Exception as error:  # what the replay stumbles over must not hide the step that is being reported
            logger.warning("%s: the step could not be taken again: %r", self._where(window.step), error)
            return ""
        logger.warning("%s: %s", self._where(window.step), cause)
        return cause

    def _locate(self, update: Update, window: Window, last: bool) -> str:
        before: BeforeStep = window.before
        trial = self._trial(before)
        dtype = torch.float32 if self._plan.widened else self._plan.training.dtype
        generators = {name: generator for name, generator, _ in before.generators}
        report = locate(trial, before.batches, dtype, update.scale or 1.0, generators)
        report.step = self._optimizer_step + self._skipped_steps
        report.where = self._where(window.step)
        if window.taken:
            report.caveats.append(
                "An optimizer had already stepped in this window, so the replay began from other weights."
            )
        if before.versions != _versions(before.batches):
            report.caveats.append(
                "The recipe writes to the batch in place, so the replay began with what it had written there."
            )
        told = (report.cause, report.module, report.op, report.phase, report.line, str(report.samples))
        known = self._reports.get(told)
        if known is not None:
            return f"{report.message} (As in {known}.)" if last else f"as in {known}."
        folder = self._own_folder()
        path = None
        if folder is not None:
            try:
                path = write_report(folder, report, trial, before.batches, before.random, command=_command())
            except (OSError, ConfigError) as error:  # it is told all the same
                logger.warning("the report of a nonfinite step could not be written: %s", error)
        self._reports[told] = f"step {report.step}" if path is None else str(path)
        return report.message if path is None else f"{report.message} See {path}."

    def _show_again(self, folder: Path) -> None:
        """Take a step that went nonfinite in an earlier process again, and print where the value was born."""
        replay = read_replay(folder)
        with self._examination():
            replay.load_into(self.modules)
            trial = self._trial(BeforeStep((), replay.random, [], 0, []))
            report = locate(trial, replay.window, replay.dtype, replay.scale)
            print(replay.compared_with(report))

    # ------------------------------------------------------------------ what the device cannot run

    @contextmanager
    def _blaming_precision(self, batches: Sequence[Any], before: BeforeStep | None = None) -> Iterator[None]:
        """Within it, an error that only comes in low precision becomes a PrecisionError that names the cure.

        before: where the training step began.
        """
        # One rank alone cannot take a step again: the others would wait for it, or it for them.
        if self._examines or distributed.initialized():
            yield
            return
        if self._untried and self._stage is Stage.TRAIN:
            self._untried = False
            self._try_first_batch(batches[:1])
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, (AmpRecipesError, torch.OutOfMemoryError)):
                trial = self._trial(before) if self._stage is Stage.TRAIN else self._forward_trial(self._stage)
                self._check_runnable(trial, batches, self._stage, error)
            raise

    def _try_first_batch(self, batches: Sequence[Any]) -> None:
        """Before the first step: run the first batch on copies, in each low precision that this fit will use.

        A step of the recipe's own is not tried: what it does beside a forward is not known. Raises PrecisionError.
        """
        training, evaluation = self._plan.training.dtype, self._plan.evaluation.dtype
        if not self._own_fit_batch:
            self._check_runnable(self._forward_trial(Stage.TRAIN), batches, Stage.TRAIN)
        if self._loaders["valid"] is not None and (evaluation is not training or self._own_fit_batch):
            self._check_runnable(self._forward_trial(Stage.VALID), batches, Stage.VALID)

    def _check_runnable(
        self, trial: Trial, batches: Sequence[Any], stage: Stage, cause: RuntimeError | None = None
    ) -> None:
        """Raise PrecisionError if `batches` can be run in fp32, but not in the precision of `stage`."""
        training = stage is Stage.TRAIN
        precision = self._plan.training if training else self._plan.evaluation
        if precision.dtype is torch.float32 or (training and self._plan.widened):
            return
        try:
            found = find_unrunnable(trial, batches, precision.dtype, self._plan.pinned)
        except Exception as error:  # of the recipe's own: it comes again where it belongs, if it is one
            logger.debug("%s could not be tried: %r", precision.name, error)
            return
        if found is not None:
            raise PrecisionError(self._unrunnable_text(found, precision, training, cause)) from cause

    def _unrunnable_text(
        self, found: Unrunnable, precision: Precision, training: bool, cause: RuntimeError | None
    ) -> str:
        option = "precision" if training else "eval_precision"
        what = str(found) or (first_line(cause) if cause is not None else "the forward fails")
        pins = json.dumps([*self.fp32_modules, *found.errors])
        cure = f"add `fp32_modules: {pins}` to the YAML (tested: it then runs), or use" if found.errors else "use"
        return (
            f"{option} {precision.name} cannot run this model on {device_capabilities(self.device).device_name}: "
            f"{what}. In fp32 it runs: {cure} --{option} fp32."
        )

    def _forward_trial(self, stage: Stage) -> Trial:
        """Forward and loss of a batch, to be tried with other precisions."""

        def take(batches: Sequence[Any], _: UpdateOwner, context: AbstractContextManager) -> list[torch.Tensor]:
            self._stage = stage
            self.modules.train(stage is Stage.TRAIN)
            if stage is not Stage.TRAIN:
                self.evaluation_ctx = context
                with torch.no_grad():
                    return [self.evaluate_batch(self._to_device(batch), stage) for batch in batches]
            losses = []
            for batch in map(self._to_device, batches):
                self.step += 1
                with context:
                    losses.append(self.compute_objectives(self.compute_forward(batch, stage), batch, stage).detach())
            return losses

        return Trial(self.modules, self.device, take, preserve=partial(self._rehearsal, steps=False))

    # ------------------------------------------------------------------ trying a step

    def _trial(self, before: BeforeStep | None = None) -> Trial:
        """The training step, to be taken with other precisions; before: where it began (default: where the run is)."""

        @contextmanager
        def preserve(weights: bool) -> Iterator[None]:
            with self._rehearsal(weights or before is not None):
                if before is not None:
                    self.step = before.step
                    set_torch_random_state(before.random, self.device)
                    for _, generator, state in before.generators:
                        set_generator_state(generator, state)
                yield

        return Trial(self.modules, self.device, self._try_window, lambda: self.optimizers_dict, preserve)

    def _try_window(
        self, batches: Sequence[Any], updates: UpdateOwner, context: AbstractContextManager
    ) -> list[torch.Tensor]:
        plan = copy.copy(self._plan)
        plan.updates, plan.patience = updates, Patience(sys.maxsize, self.precision, self.scaler.min_scale)
        self._plan, self.training_ctx, self.scaler = plan, context, updates.scaler
        self._ledger.open((), 0)
        losses = self._take_batches(batches, self._weigh(batches)[0])
        self._ledger.clear()
        return losses

    @contextmanager
    def _rehearsal(self, weights: bool, steps: bool = True) -> Iterator[None]:
        """Within it, steps leave no trace in the run: neither in its counters nor in what the recipe remembers.

        weights: keep them too; steps: whether more than a forward will be done.
        """
        kept = {name: getattr(self, name) for name in _OF_A_STEP}
        # Its own code may move weights without an optimizer's step: a teacher's average, a critic's clipping.
        hooks = ("fit_batch", "on_fit_batch_start", "on_fit_batch_end")
        weights = weights or (steps and any(map(self._overrides, hooks)))
        optimizers = self.optimizers_dict.values()
        holders = [(vars(self), self._recipe_state.not_the_recipes), (vars(self.hparams), ())]
        with preserved(self.modules, optimizers, self.device, weights, holders, untouched=[self]):
            try:
                self._ledger = Ledger(self.device, lambda *_: None, lambda *_: None)
                self._log, self._ema, self._reach = self._idle_log, None, GradientReach(is_open=False)
                self._sums, self._window_sums = StageMetrics(), None
                self.checkpointer = None if self.checkpointer is None else _SavesNothing(self.checkpointer)
                yield
            finally:
                for name, value in kept.items():
                    setattr(self, name, value)

    @contextmanager
    def _examination(self) -> Iterator[str]:
        """Within it, the model stands as at the start of an epoch of training; yields whose weights it has."""
        if self._in_fit:
            raise RecipeError("diagnose was called inside fit: call it before or after.")
        if distributed.initialized():
            raise ConfigError("--diagnose and --replay run in one process: start the script without torchrun.")
        before = dict(self.optimizers_dict), self.optimizer, self._schedulers
        self._examines = True
        try:
            with self._rehearsal(weights=True):
                self.on_fit_start()
                with self._rehearsal(weights=True):  # now that there are optimizers
                    weights = self._load_newest()
                    self.modules.train()
                    self._stage, self._epoch = Stage.TRAIN, 1
                    self.on_stage_start(Stage.TRAIN, 1)
                    yield weights
        finally:
            self._examines = False
            self.optimizers_dict, self.optimizer, self._schedulers = before

    def _load_newest(self) -> str:
        if self._trained:
            return "as trained in this process"
        found = self._checkpoints.load_for_evaluation(None, None, ("modules", "hooked_modules"), weights_only=True)
        if found is not None:
            return f"of the checkpoint {found.path.name}"
        if self.init_from is not None:
            self._init_from_run()
            return f"of {self.init_from}"
        return "as initialised"

    def _resume(self) -> None:
        if not self._examines:  # an examination looks at a run, and does not go on with it
            super()._resume()


def _precisions(precision: str) -> tuple[str, ...]:
    """Those that a diagnosis looks at. bf16 beside fp16: where it is safe, it needs no loss scale."""
    return ("bf16",) if precision == "bf16" else ("bf16", "fp16")


class _SavesNothing:
    """A checkpointer as a recipe sees it while a step is tried: it reads, and leaves saving to the run."""

    def __init__(self, checkpointer: Any) -> None:
        self._checkpointer = checkpointer

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("save", "start_saving", "delete", "prune")):
            return lambda *_, **__: None
        return getattr(self._checkpointer, name)


def _versions(batches: Sequence[Any]) -> list[int]:
    """How often the tensors of the batches were written to; of those that stand at their top, to lose no time."""
    found = []
    for batch in batches:
        parts = batch.values() if type(batch) is dict else batch if type(batch) in (tuple, list) else (batch,)
        found += [it._version for it in parts if type(it) is torch.Tensor and not it.is_inference()]
    return found


def _command() -> dict[str, Any] | None:
    """How this process was started; None where there is no script (a notebook)."""
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
