"""Defines `Brain`, the class that recipes subclass: its methods to call and its hooks.

The loop itself is in `loop`: a `Run` for the process, a `Fit` for each call of `fit`, a `Pass` for each pass over a
loader, a `Window` for each update.
"""

from __future__ import annotations

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
    RESOLVED_FILE,
    going_on_in,
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
        """The modules as attributes: to torch, each could be a tensor, which cannot be called."""

        def __getattr__(self, name: str) -> Any: ...
else:
    OptionFields, Modules = object, nn.ModuleDict

logger = logging.getLogger(__name__)

_FILES_OF_THE_RUN = {
    *(ORIGINAL_FILE, RESOLVED_FILE, OVERRIDES_FILE, ENVIRONMENT_FILE, LOG_FILE),
    *("metrics.jsonl", "metrics.taken_again.jsonl", "summary.json", "save"),
}


class Brain(OptionFields):
    """Trains and evaluates `modules`; subclass it with `compute_forward` and `compute_objectives`.

    modules: name -> nn.Module, moved to the device; opt_class: takes parameters, returns an optimizer; hparams:
    what `load_hparams` returned (keys named like run options are run options); run_opts: a dict or `RunOptions`,
    wins over `hparams`; checkpointer: the recipe's own, which then decides itself when to save. Without one, and
    with `output_folder`, the Brain keeps its own: saved after every epoch, the best and the newest kept.

    Every run option is an attribute of its name, unless the subclass has something of its own there. A subclass may use
    every name that this class does not have, also those that begin with an underscore.
    loggers: the recipe's own, beside the framework's; nonfinite_count: for recipes that count in a `fit_batch` of their
    own, as the original Brain does.
    Raises ConfigError, PrecisionError, RecipeError for what cannot run.
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
        run.open_folder(checkpointer, lambda: ensure_experiment_directory(settings.output_folder, loaded, options))
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
        """Train over the epochs of `epoch_counter`, validating after each.

        train_set, valid_set: a torch Dataset, or a list for which loader kwargs are given, yields samples (a loader is
        made of it); a DataLoader or any other iterable yields batches. progressbar: default, not `noprogressbar`.
        """
        call = FitCall(epoch_counter, train_set, valid_set, progressbar, train_loader_kwargs, valid_loader_kwargs)
        self.__run.task.fit(self.__run, call)

    def on_fit_start(self) -> None:
        """Get ready to train: wrap modules, make optimizers and schedulers, resume from a checkpoint if any."""
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
        """Make `optimizer` from `opt_class` over all parameters, and enter it in `optimizers_dict`."""
        if self.opt_class is not None:
            self.optimizer = self.opt_class(self.modules.parameters())
            self.optimizers_dict = {"optimizer": self.optimizer}

    def freeze_optimizers(self, optimizers: dict[str, Optimizer]) -> Mapping[str, Optimizer]:
        """The optimizers that may step now; leave out those that are to wait."""
        return optimizers

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """Train on one batch; the update follows at the window's end. Returns the detached loss (0-d)."""
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
        """Differentiate this batch's share of its window's loss, scaled where the precision asks for it.

        names: of the optimizers whose parameters it is for (a generator's loss goes through the critic, and would
        leave gradients there); default: all.
        """
        self.__run.window.backward(loss, names)

    def gradients(self, loss: torch.Tensor, inputs: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Gradients of `loss` with respect to `inputs`: unscaled and differentiable, for a gradient penalty."""
        return self.__run.plan.updates.gradients(loss, inputs)

    def optimizers_step(self, *names: str) -> None:
        """Unscale, clip and step all optimizers, or the named ones; none of them if anything is nonfinite.

        Gradients of the optimizers that were to step are cleared; without names, those of frozen ones as well.
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
        """The average loss on `test_set`, weighted by `batch_weight`; NaN if no batch had a finite one.

        NaN at once, too, where the script was started with --diagnose or --replay.

        max_key, min_key: load the checkpoint that is best in that metric first. Called from a hook of `fit`, training
        goes on afterwards as if it had not been.
        """
        return self.__run.task.evaluate(self.__run, test_set, max_key, min_key, progressbar, test_loader_kwargs)

    def on_evaluate_start(self, max_key: str | None = None, min_key: str | None = None) -> None:
        """Load the best checkpoint by a key; without one, the newest if this process has not trained."""
        load_weights_to_evaluate(self.__run, max_key, min_key)

    def evaluate_batch(self, batch: Any, stage: Stage) -> torch.Tensor:
        """The detached loss (0-d) of one batch, under `eval_precision`."""
        with self.evaluation_ctx:
            outputs = self.compute_forward(batch, stage)
            loss = self.compute_objectives(outputs, batch, stage)
        return as_scalar(loss, f"{type(self).__name__}.compute_objectives").detach()

    # ------------------------------------------------------------------ what a recipe writes

    def compute_forward(self, batch: Any, stage: Stage) -> Any:
        """The model's predictions for a batch on the device; runs under the stage's precision."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_forward(batch, stage)")

    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> torch.Tensor:
        """The loss (0-d) of the predictions; runs under the stage's precision."""
        raise NotImplementedError(f"{type(self).__name__} must define compute_objectives(predictions, batch, stage)")

    def on_stage_start(self, stage: Stage, epoch: int | None = None) -> None:
        """A stage begins; modules are already in the stage's mode."""

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> Mapping[str, float] | None:
        """A stage ended. May return metrics: early stopping, keep-best and the summary read them."""

    def on_fit_batch_start(self, batch: Any, should_step: bool) -> None:
        """Before a training batch's forward."""

    def on_fit_batch_end(self, batch: Any, outputs: Any, loss: torch.Tensor, should_step: bool) -> None:
        """After a training batch's backward, and after its update where `should_step`.

        On a device that queues its work the verdict on that update is still under way: counters wait for it when read,
        and the optimizer's learning rate moves just before the next update.
        """

    def batch_weight(self, batch: Any) -> float | torch.Tensor:
        """Return the weight of a batch in averages: its leading dimension.

        Overridden, it is also what the batch counts for in the accumulation window (tokens, frames); by default the
        batches of a window count the same. Gets the batch as the loader yields it, before it moves to the device.
        """
        return batch_length(batch)

    def update_average(self, loss: float, avg_loss: float) -> float:
        """The stage's running average after one more loss, weighted by `batch_weight`. Nonfinite ones never come."""
        average = self.__run.current.average
        return avg_loss + (loss - avg_loss) * (average.weight / (average.seen or average.weight))

    def make_dataloader(
        self, dataset: Dataset, stage: Stage, ckpt_prefix: str | None = None, **loader_kwargs: Any
    ) -> DataLoader:
        """A loader over the samples of `dataset`; its order depends on `seed` and the epoch alone.

        ckpt_prefix: without effect, for recipes that give it: checkpoints hold every loader's place anyway.
        """
        return self.__run.feed.make_loader(dataset, stage, loader_kwargs)

    # ------------------------------------------------------------------ what a recipe asks and reports

    def add_metric(self, name: str, total: Any, count: Any = 1) -> None:
        """Add to a metric of the running stage, which is the sum of all `total` over the sum of all `count`.

        total, count: numbers, or tensors of any shape, which are summed: `add_metric("accuracy", scores.argmax(1) ==
        labels, len(labels))`. They stay on the device: nothing waits for them before the stage ends. The stage reports
        the metric, over all processes, beside what `on_stage_end` returns (which wins). Batches whose update is skipped
        do not count, as in the average loss; a contribution that is not finite is left out as a whole, with a warning.
        Outside a stage it does nothing. Raises RecipeError for the name `loss`, which the stage's average has.
        """
        if name == "loss":
            raise RecipeError("add_metric('loss') would replace the average loss of the stage: use another name.")
        self.__run.window.metric_sums().add(name, total, count)

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in the order of their ranks; of one process, a list of its own.

        Of processes that share layers, and so the data (`tensor_parallel`), the first gives for all.

        For figures that no ratio of sums gives, such as a macro F1 over all predictions. Every process must call it, as
        often and in the same order: in `on_stage_end`, say, and not for each batch, of which one may have more than
        another. `value` is pickled on the way, its tensors on the CPU.
        """
        return gather_values(value)

    def output_path(self, name: str | os.PathLike[str]) -> Path | None:
        """Return the path for a file of the recipe: below `output_folder`; creates the folders on the way.

        None where nothing is to be written: without an `output_folder`, in all processes but the main one, in a folder
        that may only be read, and where the script was started with --diagnose or --replay. Raises ConfigError for a
        name that leads out of the folder, or is that of a file of the run's own.
        """
        return self.__run.path_of_the_recipe(name, _FILES_OF_THE_RUN)

    def diagnose(
        self,
        train_set: Any,
        train_loader_kwargs: Mapping[str, Any] = {},
        precisions: str | Sequence[str] = (),
        tolerance: float | None = None,
        steps: int = 200,
        minutes: float = 5.0,
        windows: int = 8,
    ) -> Diagnosis:
        """Diagnose the effect of a precision on this model, on a few batches of `train_set`; changes nothing.

        train_set, train_loader_kwargs: as for `fit`. precisions: names of those to look at; by default the run's own,
        and bf16 beside fp16 (both if the run is fp32). tolerance: bound on the relative error of the gradient (default:
        a fifth of what batches differ by, and at least ten times the precision's eps); steps: of training that prove a
        set of pins, at most; minutes: that all of it may take, about; windows: to look at.
        The weights are those of the newest checkpoint of `output_folder`, or of `init_from`, where there are any.
        With `output_folder`, `diagnosis.json` and `diagnosis.png` are written there. The verdict is `str(result)`.
        Raises DataError if there are not three windows, RecipeError inside `fit`.
        """
        run = self.__run
        return diagnose(run, train_set, train_loader_kwargs, precisions, tolerance, steps, minutes, windows)

    # ------------------------------------------------------------------ the state of the run

    @property
    def step(self) -> int:
        """Batches done in the running stage; a recipe may set it."""
        return self.__run.current.step

    @step.setter
    def step(self, batches: int) -> None:
        self.__run.current.step = batches

    @property
    def should_step(self) -> bool:
        """Whether the batch at hand is the last of those that accumulate, so that the update follows."""
        return self.__run.window.should_step

    @should_step.setter
    def should_step(self, should: bool) -> None:
        self.__run.window.should_step = should

    @property
    def optimizer_step(self) -> int:
        """Updates really taken, in all. Reading it waits for the last verdict."""
        return self.__run.optimizer_step

    @property
    def skipped_steps(self) -> int:
        """Updates skipped because something was nonfinite, in all. Reading it waits for the last verdict."""
        return self.__run.skipped_steps

    @property
    def avg_train_loss(self) -> float:
        """The running average loss of the epoch, over the batches whose update was taken; waits for the last one."""
        self.__run.pending.settle()
        average = self.__run.train_pass.average
        return average.value if average.seen > 0 else math.nan

    @property
    def stage_metrics(self) -> dict[str, float]:
        """In `on_stage_end`, the metrics that `add_metric` added up, by name."""
        return self.__run.stage_metrics

    @property
    def stage_seconds(self) -> float:
        """Seconds that the running stage has taken so far; also those before an interruption."""
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
