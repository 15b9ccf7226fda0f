"""Defines `Brain`, the class that recipes subclass: its methods to call and its hooks.

The loop itself is in `loop`: a `Run` for the process, a `Fit` for each call of `fit`, a `Pass` for each pass over a
loader, a `Window` for each update.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from amp_recipes.config import (
    Hparams,
    Purpose,
    RunOptions,
    ensure_experiment_directory,
    ignored_options,
    near_misses,
    without_originals,
)
from amp_recipes.config.experiment import (
    ENVIRONMENT_FILE,
    LOG_FILE,
    ORIGINAL_FILE,
    OVERRIDES_FILE,
    PINS_FILE,
    RESOLVED_FILE,
    going_on_in,
    write_pins,
)
from amp_recipes.data import batch_length
from amp_recipes.errors import RecipeError
from amp_recipes.loop.evaluation import load_weights_to_evaluate
from amp_recipes.loop.examination import diagnose
from amp_recipes.loop.fit import FitCall
from amp_recipes.loop.processes import gather_values, join_processes
from amp_recipes.loop.recipe_class import RecipeHparams, check_class, check_objects, hidden_options, without
from amp_recipes.loop.run import Run
from amp_recipes.loop.settings import Settings
from amp_recipes.loop.tasks import task_for
from amp_recipes.precision import as_scalar, clear_gradients
from amp_recipes.records import Logger, RunSummary
from amp_recipes.stage import Stage

if TYPE_CHECKING:
    from amp_recipes.checkpoint import Checkpointer
    from amp_recipes.config.options.run_options import OptionFields
    from amp_recipes.numerics import Diagnosis

    class Modules(nn.ModuleDict):
        """Types the modules as attributes; torch types each as a module or a tensor, which cannot be called."""

        def __getattr__(self, name: str) -> Any: ...
else:
    OptionFields, Modules = object, nn.ModuleDict

logger = logging.getLogger(__name__)

_FILES_OF_THE_RUN = {
    *(ORIGINAL_FILE, RESOLVED_FILE, OVERRIDES_FILE, PINS_FILE, ENVIRONMENT_FILE, LOG_FILE),
    *("metrics.jsonl", "metrics.taken_again.jsonl", "summary.json", "save"),
}


class Brain(OptionFields):
    """Trains and evaluates `modules`; subclass it with `compute_forward` and `compute_objectives`.

    modules: name -> nn.Module, moved to the device. opt_class: a function of parameters that returns an optimizer.
    hparams: the result of `load_hparams`; its keys with the names of run options are run options. run_opts: a dict or
    `RunOptions`, which overrides `hparams`. checkpointer: the recipe's own, which decides when to save. Without it, the
    Brain saves after every epoch if there is an `output_folder`, and keeps the best and the newest checkpoint.
    loggers: the recipe's own, in addition to the framework's. nonfinite_count: for recipes that count in their own
    `fit_batch`, as SpeechBrain's Brain does.

    Every run option is an attribute, unless the subclass has an attribute of that name. A subclass may use every name
    that this class does not have, also names that begin with an underscore.
    Raises ConfigError, PrecisionError or RecipeError if the run cannot work.
    """

    modules: Modules
    hparams: Any
    device: torch.device
    run_opts: RunOptions
    opt_class: Callable[..., Optimizer]
    optimizer: Optimizer
    optimizers_dict: dict[str, Optimizer]
    train_sampler: Any
    loggers: list[Logger]
    checkpointer: Any
    distributed_launch: bool
    nonfinite_count: int

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        opt_class: Callable[..., Optimizer] | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_opts: Mapping[str, Any] | RunOptions | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        of_the_subclass = set(vars(self))
        check_class(type(self), Brain)
        check_objects(modules, opt_class)
        loaded, given = hparams, dict(hparams or {})
        options = run_opts if isinstance(run_opts, RunOptions) else _options_from(run_opts or {}, loaded)
        self.run_opts = options.with_defaults_from(given)
        hidden = hidden_options(type(self), self.run_opts)
        settings = Settings(self, self.run_opts, hidden)
        for name, value in without(hidden, self.run_opts).items():
            setattr(self, name, value)
        for message in [*near_misses(given), *ignored_options(given)]:
            logger.warning("hparams: %s", message)
        self.hparams = RecipeHparams(**given)
        self.opt_class = opt_class
        self.optimizer = None
        self.optimizers_dict = {}
        self.train_sampler = None
        self.loggers = []
        self.nonfinite_count = 0
        self.device, self.distributed_launch = join_processes(settings)
        self.modules = nn.ModuleDict(dict(modules or {}))
        overrides = lambda name: getattr(type(self), name) is not getattr(Brain, name)  # noqa: E731
        place = loaded.place_of if isinstance(loaded, Hparams) else lambda name, value: ""
        self.__run = run = Run(self, settings, task_for(self.run_opts.purpose), overrides, place)
        for name, value in without(hidden, run.plan.resolved_options()).items():
            setattr(self, name, value)
        settings.note_effect()
        run.open_folder(
            checkpointer,
            lambda: ensure_experiment_directory(settings.output_folder, loaded, options),
            functools.partial(write_pins, settings.output_folder),
        )
        self.checkpointer = run.checkpoints.checkpointer if checkpointer is None else checkpointer
        run.remember_recipe(set(vars(self)) - of_the_subclass)

    if not TYPE_CHECKING:  # to a checker of types, every name would exist

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name == "_Brain__run":
                raise AttributeError(
                    f"{kind}.__init__ must call super().__init__(...) before it uses an attribute of Brain."
                )
            raise AttributeError(f"{kind!r} object has no attribute {name!r}")

    # ------------------------------------------------------------------ fit

    def fit(
        self,
        epoch_counter: Iterable[int],
        train_set: Any,
        valid_set: Any = None,
        progressbar: bool | None = None,
        train_loader_kwargs: Mapping[str, Any] = {},
        valid_loader_kwargs: Mapping[str, Any] = {},
    ) -> None:
        """Train for the epochs of `epoch_counter`, and validate after each.

        train_set, valid_set: a torch Dataset, or a list with loader kwargs, holds samples: a loader is made from it. A
        DataLoader or any other iterable yields batches. progressbar: default, not `noprogressbar`.
        """
        call = FitCall(epoch_counter, train_set, valid_set, progressbar, train_loader_kwargs, valid_loader_kwargs)
        self.__run.task.fit(self.__run, call)

    def on_fit_start(self) -> None:
        """Prepare training: wrap modules, make optimizers and schedulers, resume from a checkpoint if any."""
        run = self.__run
        run.processes.share_modules()
        if not self.optimizers_dict:
            self.init_optimizers()
        if not self.optimizers_dict and self.optimizer is not None:
            self.optimizers_dict = {"optimizer": self.optimizer}
        if not self.optimizers_dict and not run.own_fit_batch:
            raise RecipeError(
                f"{type(self).__name__} has no optimizer: give opt_class to the constructor, or fill optimizers_dict "
                "in init_optimizers."
            )
        run.adopt_optimizers()
        self.zero_grad(set_to_none=True)
        with going_on_in(run.settings.output_folder):
            run.resume.from_newest()

    def init_optimizers(self) -> None:
        """Make `optimizer` with `opt_class` from all parameters, and add it to `optimizers_dict`."""
        if self.opt_class is not None:
            self.optimizer = self.opt_class(self.modules.parameters())
            self.optimizers_dict = {"optimizer": self.optimizer}

    def freeze_optimizers(self, optimizers: dict[str, Optimizer]) -> Mapping[str, Optimizer]:
        """Return the optimizers that may step now; override it to leave some out."""
        return optimizers

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """Train on one batch; the update follows at the end of its window. Returns the detached loss (0-d)."""
        self.__run.plan.updates.begin()
        self.on_fit_batch_start(batch, self.should_step)
        with self.no_sync(not self.should_step):
            with self.training_ctx:
                outputs = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(outputs, batch, Stage.TRAIN)
            self.backward(loss)
        if self.should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, loss, self.should_step)
        return loss.detach()

    def backward(self, loss: torch.Tensor, *names: str) -> None:
        """Compute gradients of this batch's share of its window's loss, scaled if the precision needs it.

        names: only the parameters of these optimizers get gradients (a generator's loss goes through the critic, and
        would leave gradients there); default: those of all.
        """
        self.__run.window.backward(loss, names)

    def gradients(self, loss: torch.Tensor, inputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Return gradients of `loss` with respect to `inputs`: unscaled, differentiable, for a gradient penalty."""
        return self.__run.plan.updates.gradients(loss, inputs)

    def optimizers_step(self, *names: str) -> None:
        """Unscale, clip and step all optimizers, or the named ones; none of them if a value is nonfinite.

        Clears the gradients of these optimizers; without names, also those of frozen optimizers.
        """
        self.__run.window.optimizers_step(names)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every optimizer's parameters."""
        self.__run.plan.updates.drop_losses()
        for optimizer in self.optimizers_dict.values():
            clear_gradients(optimizer, set_to_none)

    def no_sync(self, use: bool = True) -> AbstractContextManager[None]:
        """Inside this context, ranks do not average gradients in backward (where `use`)."""
        return self.__run.processes.no_sync(use)

    # ------------------------------------------------------------------ evaluate

    def evaluate(
        self,
        test_set: Any,
        max_key: str | None = None,
        min_key: str | None = None,
        progressbar: bool | None = None,
        test_loader_kwargs: Mapping[str, Any] = {},
    ) -> float:
        """Return the average loss on `test_set`, weighted by `batch_weight`; NaN if no batch has a finite loss.

        If the script was started with --diagnose or --replay, returns NaN at once.

        max_key, min_key: first load the checkpoint with the best value of this metric. In a hook of `fit`, training
        continues afterwards as if there had been no evaluation.
        """
        return self.__run.task.evaluate(self.__run, test_set, max_key, min_key, progressbar, test_loader_kwargs)

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the best checkpoint by a key; without a key, the newest one if this process has not trained."""
        load_weights_to_evaluate(self.__run, max_key, min_key)

    def evaluate_batch(self, batch: Any, stage: Stage) -> torch.Tensor:
        """Return the detached loss (0-d) of one batch, in `eval_precision`."""
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage)
            loss = self.compute_objectives(outputs, batch, stage)
        return as_scalar(loss, f"{type(self).__name__}.compute_objectives").detach()

    # ------------------------------------------------------------------ what a recipe writes

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """Return the model's predictions for a batch on the device; runs in the stage's precision."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_forward(batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> torch.Tensor:
        """Return the loss (0-d) of the predictions; runs in the stage's precision."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_objectives(predictions, batch, stage)")

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """Called when a stage begins; the modules are already in train or eval mode."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> Mapping[str, float] | None:
        """Called when a stage ends. May return metrics for early stopping, the best checkpoint and the summary."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Called before the forward of a training batch."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: torch.Tensor, should_step: bool) -> None:
        """Called after the backward of a training batch, and after its update if `should_step`.

        On a GPU, the result of that update may not be known yet: counters wait for it when they are read, and the
        learning rate changes just before the next update.
        """

    def batch_weight(self, batch: Any) -> float | torch.Tensor:
        """Return the weight of a batch in averages: its leading dimension.

        If overridden (number of tokens, of frames), it is also the weight of the batch in its window; by default the
        batches of a window have the same weight. Gets the batch from the loader, before it moves to the device.
        """
        return batch_length(batch)

    def update_average(self, loss: float, avg_loss: float) -> float:
        """Return the stage's average after one more (finite) loss, weighted by `batch_weight`."""
        average = self.__run.current.average
        return avg_loss + (loss - avg_loss) * (average.weight / (average.seen or average.weight))

    def make_dataloader(
        self, dataset: Dataset, stage: Stage, ckpt_prefix: str | None = None, **loader_kwargs: Any
    ) -> DataLoader:
        """Make a loader over the samples of `dataset`; its order depends only on `seed` and the epoch.

        ckpt_prefix: has no effect; accepted for older recipes. Checkpoints store the place of every loader anyway.
        """
        return self.__run.feed.make_loader(dataset, stage, loader_kwargs)

    # ------------------------------------------------------------------ what a recipe asks and reports

    def add_metric(self, name: str, total: Any, count: Any = 1) -> None:
        """Add to a metric of the running stage: the sum of all `total` divided by the sum of all `count`.

        total, count: numbers, or tensors of any shape, which are summed: `add_metric("accuracy", scores.argmax(1) ==
        labels, len(labels))`. They stay on the device until the stage ends, so nothing waits for them. The stage
        reports the metric over all processes; a metric of the same name from `on_stage_end` replaces it. Batches whose
        update is skipped do not count, as in the average loss. A value that is not finite is left out, with a warning.
        Outside a stage it does nothing. Raises RecipeError for the name `loss`, which is the stage's average.
        """
        if name == "loss":
            raise RecipeError("add_metric('loss') would replace the average loss of the stage: use another name.")
        self.__run.window.metric_sums().add(name, total, count)

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` of every process, by rank; with one process, a list of its own value.

        Processes that share layers (`tensor_parallel`) have the same data: only the first of them counts.

        Use it for metrics that are not a ratio of sums, such as a macro F1 over all predictions. Every process must
        call it equally often and in the same order. So call it in `on_stage_end`, and not for each batch: processes may
        have different numbers of batches. `value` is pickled, with its tensors on the CPU.
        """
        return gather_values(value)

    def output_path(self, name: str | os.PathLike[str]) -> Path | None:
        """Return the path for a file of the recipe: below `output_folder`; creates the folders on the way.

        Returns None if the recipe must not write: without an `output_folder`, in all processes but the main one, in a
        read-only folder, and if the script was started with --diagnose or --replay. Raises ConfigError for a name
        outside of the folder, or of one of the run's own files.
        """
        return self.__run.path_of_the_recipe(name, _FILES_OF_THE_RUN)

    def diagnose(
        self,
        train_set: Any,
        train_loader_kwargs: Mapping[str, Any] = {},
        precisions: str | Sequence[str] = (),
        tolerance: float | None = None,
        steps: int = 100,
        minutes: float = 5.0,
        windows: int = 8,
    ) -> Diagnosis:
        """Diagnose the effect of a precision on this model, on a few batches of `train_set`; changes nothing.

        train_set, train_loader_kwargs: as for `fit`. precisions: names of the precisions to test; by default the run's
        own, and bf16 besides fp16 (both if the run is fp32). tolerance: bound on the relative error of the gradient
        (default: a fifth of the difference between batches, and at least ten times the precision's eps). steps: maximum
        number of training steps to prove a set of pins. minutes: approximate time limit.
        windows: number of windows.
        Uses the weights of the newest checkpoint of `output_folder`, or of `init_from`, if there is one.
        With `output_folder`, `diagnosis.json` and `diagnosis.png` are written there. The verdict is `str(result)`;
        `result.status` is 0 (safe as the run is set), 1 (not safe) or 2 (not decided).
        Raises DataError if there are not three windows, RecipeError inside `fit`.
        """
        run = self.__run
        return diagnose(run, train_set, train_loader_kwargs, precisions, tolerance, steps, minutes, windows)

    # ------------------------------------------------------------------ the state of the run

    @property
    def step(self) -> int:
        """Number of batches of the running stage so far; the loop counts them, whatever a recipe assigns."""
        return self.__run.current.step

    @step.setter
    def step(self, batches: int) -> None:
        self.__run.current.step = batches

    @property
    def should_step(self) -> bool:
        """Whether this batch is the last one of its window, so that the update follows."""
        return self.__run.window.should_step

    @should_step.setter
    def should_step(self, should: bool) -> None:
        self.__run.window.should_step = should

    @property
    def optimizer_step(self) -> int:
        """Number of updates so far, without skipped ones. Reading it waits for the result of the last update."""
        return self.__run.optimizer_step

    @property
    def skipped_steps(self) -> int:
        """Number of updates skipped because a value was nonfinite. Reading it waits for the last result."""
        return self.__run.skipped_steps

    @property
    def avg_train_loss(self) -> float:
        """Average loss of the epoch so far, without batches whose update was skipped; waits for the last result."""
        self.__run.pending.settle()
        average = self.__run.train_pass.average
        return average.value if average.seen > 0 else math.nan

    @property
    def stage_metrics(self) -> dict[str, float]:
        """In `on_stage_end`: the metrics of `add_metric`, by name."""
        return self.__run.stage_metrics

    @property
    def stage_seconds(self) -> float:
        """Seconds of the running stage so far, including those before an interruption."""
        return self.__run.log.seconds

    @property
    def summary(self) -> RunSummary:
        """The summary of the run so far."""
        return self.__run.summary

    @property
    def training_ctx(self) -> AbstractContextManager[Any]:
        """The context of the forward and the loss in training: autocast in the precision of the run."""
        return self.__run.plan.training_ctx

    @training_ctx.setter
    def training_ctx(self, context: AbstractContextManager[Any]) -> None:
        self.__run.plan.training_ctx = context

    @property
    def evaluation_ctx(self) -> AbstractContextManager[Any]:
        """The context of the forward and the loss in evaluation: autocast in `eval_precision`."""
        return self.__run.plan.evaluation_ctx

    @evaluation_ctx.setter
    def evaluation_ctx(self, context: AbstractContextManager[Any]) -> None:
        self.__run.plan.evaluation_ctx = context

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """The loss scaler; disabled unless the precision is fp16."""
        return self.__run.plan.scaler


def _options_from(run_opts: Mapping[str, Any], loaded: Mapping[str, Any] | None) -> RunOptions:
    """The options that a dict sets; what the script was started for comes with what `load_hparams` returned."""
    overrides = getattr(loaded, "overrides", None)
    known = getattr(overrides, "run_options", None)
    purpose = known.purpose if known is not None else Purpose()
    return RunOptions.from_mapping(without_originals(run_opts), purpose=purpose)
