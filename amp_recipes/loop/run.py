"""What a `Brain` is made of: options, device, modules, precision, counters, checkpoints, logs."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from difflib import get_close_matches
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_recipes import distributed
from amp_recipes.checkpoint import (
    Checkpointer,
    CheckpointKeeper,
    HookedModules,
    clean_name,
    hooked_state,
    plain_problem,
)
from amp_recipes.config import (
    Hparams,
    Purpose,
    RunOptions,
    ensure_experiment_directory,
    near_misses,
    unheeded,
    without_originals,
)
from amp_recipes.distributed.interrupts import Interrupts
from amp_recipes.distributed.rounds import Round
from amp_recipes.errors import ConfigError, RecipeError
from amp_recipes.files.file_system import check_file_system
from amp_recipes.files.folder_lock import lock_folder
from amp_recipes.files.run_files import refuse_link
from amp_recipes.loggers import RunLog, make_loggers, show_notices
from amp_recipes.loop.ema import WeightAverage
from amp_recipes.loop.gradient_reach import GradientReach
from amp_recipes.loop.hooks import Hooks, Stage
from amp_recipes.loop.ledger import Ledger
from amp_recipes.loop.loss_average import LossAverage
from amp_recipes.loop.schedulers import Schedulers
from amp_recipes.loop.stopping import MetricWatch
from amp_recipes.precision import PrecisionPlan, check_optimizers
from amp_recipes.precision.host_copy import HostCopy
from amp_recipes.records import Logger, RunSummary, WatchedSummary
from amp_recipes.state.outstanding_gradients import OutstandingGradients
from amp_recipes.state.position import Position
from amp_recipes.state.recipe import RecipeState
from amp_recipes.state.transient_buffers import TransientBuffers

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from amp_recipes.config.options.run_options import OptionFields

    class Modules(nn.ModuleDict):
        """The modules as attributes: to torch, each could be a tensor, which cannot be called."""

        def __getattr__(self, name: str) -> Any: ...
else:
    OptionFields, Modules = object, nn.ModuleDict


class RunSetup(Hooks, OptionFields):
    """Base of `Brain`: builds the collaborators of the loop.

    The loop itself, with what follows from updates (`_on_update`, `_on_window`), and `_overrides` are Brain's; what
    goes into checkpoints and comes back (`_numbers`, `_take_numbers`, `_moment`, `_own_part`) is `ResumableRun`'s.
    """

    device: torch.device  # what the option of the same name means here
    modules: Modules
    hparams: Any
    opt_class: Callable[..., Optimizer]
    optimizer: Optimizer

    def __init__(
        self,
        modules: Mapping[str, nn.Module] | None = None,
        opt_class: Callable[..., Optimizer] | None = None,
        hparams: Mapping[str, Any] | None = None,
        run_opts: Mapping[str, Any] | RunOptions | None = None,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        before = set(vars(self))
        _refuse_wrong_kinds(modules, opt_class)
        loaded, hparams = hparams, dict(hparams or {})
        options = run_opts if isinstance(run_opts, RunOptions) else _options_from(run_opts or {}, loaded)
        self.run_opts = options.with_defaults_from(hparams)
        for name, value in self.run_opts.items():
            setattr(self, name, value)
        for message in [*near_misses(hparams), *unheeded(hparams)]:
            logger.warning("hparams: %s", message)
        self.hparams = SimpleNamespace(**hparams)
        self._place_in_yaml = loaded.place_of if isinstance(loaded, Hparams) else lambda name, value: ""
        self.opt_class = opt_class
        self.device = distributed.pick_device(self.run_opts.device)
        self.distributed_launch = distributed.launched()
        if not self.noprogressbar:
            show_notices()
        distributed.start(self.device, self.distributed_backend, self.distributed_timeout_minutes, self.tensor_parallel)
        self.modules = nn.ModuleDict(dict(modules or {}))
        distributed.check(self.run_opts, self.device, self.modules, self._tensor_parallel_plan)
        if not self._shards:
            self.modules.to(self.device)
        self._set_up_precision()
        self._set_up_counters()
        self._set_up_folder(loaded, options)
        self._set_up_checkpoints(checkpointer)
        own = {*vars(self), "_recipe_state"} - before
        elsewhere = lambda: [self._epoch_counter, *self._checkpoints.recoverables]  # noqa: E731
        self._recipe_state = RecipeState(self, own, elsewhere, plain_problem, hooked_state)

    def _set_up_precision(self) -> None:
        agree = distributed.agree if distributed.initialized() else None
        self._plan = PrecisionPlan(self.run_opts, self.modules, self.device, agree, distributed)
        self.precision, self.eval_precision = self._plan.training.name, self._plan.evaluation.name
        self.float32_precision = self._plan.float32_precision
        self.scaler = self._plan.scaler
        self.training_ctx, self.evaluation_ctx = self._plan.training_ctx, self._plan.evaluation_ctx
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
            torch.backends.cudnn.benchmark = False

    @property
    def _shards(self) -> bool:
        """Whether each process is to hold a part of the modules only: where it is on its device, and no more."""
        return self.strategy == "fsdp" and distributed.initialized()

    @property
    def _tensor_parallel_plan(self) -> Mapping[str, str] | None:
        return getattr(self.hparams, "tensor_parallel_plan", None)

    def _share_modules(self) -> None:
        """Share the modules among the processes; where they are shared already, nothing happens."""
        sharded = distributed.is_sharded(self.modules)
        distributed.wrap(
            self.modules,
            self.device,
            self.run_opts,
            self._plan.training.dtype,
            self._plan.fp32_modules,
            self._tensor_parallel_plan,
        )
        if self._ema is not None and distributed.is_sharded(self.modules) and not sharded:
            self._ema.take_over(self.modules)
        elif self._ema is not None and distributed.initialized() and not self._shared:
            self._ema.restart()  # at the first process's weights, which all have now
        self._shared = True

    def _share_untrained(self) -> None:
        """Have all processes evaluate the same model, also where nothing was trained and nothing will be loaded."""
        if self._shards:
            self._share_modules()  # the whole may be larger than the device
        elif distributed.initialized() and not self._shared:
            distributed.start_alike(self.modules)  # what averages gradients would take memory for nothing

    def _warn_of_differing_weights(self) -> None:
        """Say so where the processes have come to hold different models."""
        if self.strategy != "ddp" or not distributed.initialized():
            return
        names = distributed.differing(self.modules)
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            logger.warning(
                "the processes hold different weights: %s%s. Something that is not averaged moves them: a "
                "loss.backward() past self.backward, weights set by hand, a schedule that depends on the rank.",
                ", ".join(names[:5]),
                more,
            )

    def _averaged(self, loss: torch.Tensor, optimizers: Sequence[Optimizer] | None) -> AbstractContextManager[None]:
        """Around a backward that leaves gradients with the parameters of `optimizers` (default: all): averages them."""
        if not distributed.initialized():
            return nullcontext()
        groups = None if optimizers is None else [group for it in optimizers for group in it.param_groups]
        parameters = None if groups is None else [parameter for group in groups for parameter in group["params"]]
        return distributed.averaging(self.modules, loss, parameters)

    def _set_up_counters(self) -> None:
        self.optimizer: Optimizer | None = None
        self.optimizers_dict: dict[str, Optimizer] = {}
        self.train_sampler: Any = None
        self.loggers: list[Logger] = []  # the recipe's own, beside the framework's
        self.step = 0
        self.should_step = True
        self._optimizer_step = self._skipped_steps = 0
        self._average = self._train_average = LossAverage()
        self._window_size, self._window_weight, self._batch_weight = 1, 1.0, 1.0
        self._shared = False  # the modules, among the processes
        self._compared = False  # the first batch was compared with those of other processes
        self._counts = True  # the batch at hand counts; another only keeps up with other processes
        self._round: Round | None = None  # of several processes: what they have in the window under way
        self._ledger = Ledger(self.device, self._on_update, self._on_window)
        self._reach = GradientReach()
        self._host = HostCopy(self.device)
        self._schedulers = Schedulers(None, {}, self.lr_scheduler_interval)
        self._stage, self._epoch, self._trained = Stage.TRAIN, None, False
        self._metrics: dict[str, float] = {}
        self._epoch_counter: Iterable[int] = ()
        self._loaders: dict[str, Iterable[Any]] = {}  # of the fit that runs: train, valid
        self._stage_so_far: Mapping[str, float] = {}
        self._logs_at: Mapping[str, Any] = {}  # where the logs stood when the checkpoint was saved that is gone on from
        self._interrupts = Interrupts(self.save_signals)
        self._asked = False  # a signal asks the run to end, and all processes know
        self._in_fit = False
        self._goes_back = False  # a fit may go back to an earlier checkpoint
        self._fits = 0
        self._apart = 0  # not 0: this process draws from a state that another one saved
        self._at_its_place = False  # the epoch's loader gives the next batch to train on
        self._stepped_by_hand = False
        self.nonfinite_count = 0  # for recipes that count in a `fit_batch` of their own, as the original Brain does
        self._own_batch_weight = self._overrides("batch_weight")
        self._own_fit_batch = self._overrides("fit_batch")
        self._plain_losses = not (self._own_fit_batch or self._overrides("backward"))
        saved_name = functools.partial(clean_name, self.modules)
        self._transient_buffers = TransientBuffers(self.modules, saved_name)
        self._gradients = OutstandingGradients(self.modules, lambda: self.optimizers_dict, saved_name)
        self._ema = WeightAverage(self.modules, self.ema_decay, saved_name) if self.ema_decay else None
        self._watch = MetricWatch(self.early_stop_metric or "loss", self.early_stop_mode, self.early_stop_patience)
        kind = RunSummary if self.on_spike == "off" else WatchedSummary
        self.summary = kind(
            precision=self.precision,
            eval_precision=self.eval_precision,
            float32_precision=self.float32_precision,
            device=str(self.device),
            fp32_modules=self._plan.pinned,
        )
        self._log = self._idle_log = RunLog([], self.summary, self.device, self.log_interval_steps)

    def _set_up_folder(self, hparams: Mapping[str, Any] | None, options: RunOptions) -> None:
        """Make the output folder this run's, and write down its settings if `hparams` came from a YAML."""
        folder = self.output_folder
        if folder is None or not distributed.is_main_process() or self.run_opts.purpose.action != "train":
            return
        if self.test_only and os.path.isdir(folder) and not os.access(folder, os.W_OK):
            return  # somebody else's run, to evaluate
        lock_folder(folder)
        if not self.debug:
            check_file_system(folder)
            ensure_experiment_directory(folder, hparams, options)

    def _set_up_checkpoints(self, checkpointer: Checkpointer | None) -> None:
        writes = self.run_opts.purpose.action == "train"
        folder = None if self.output_folder is None or self.debug else Path(self.output_folder) / "save"
        if folder is not None and self.run_opts.purpose.action != "train" and not folder.is_dir():
            folder = None  # only looked at
        if folder is not None and checkpointer is None:
            refuse_link(folder)  # a copied run folder may have one, and old checkpoints are deleted
        self._checkpoints = CheckpointKeeper(checkpointer, folder, writes, self.ckpt_background, self.debug)
        by_interval = self.ckpt_interval_steps > 0 or self.ckpt_interval_minutes > 0
        if by_interval and self._checkpoints.theirs and distributed.world_size() > 1:
            logger.warning(
                "SpeechBrain's Checkpointer saves inside an epoch in runs of one process only: ckpt_interval_steps and "
                "ckpt_interval_minutes do nothing. Leave `checkpointer` out and give an output_folder to have it."
            )
        self.checkpointer = self._checkpoints.checkpointer if checkpointer is None else checkpointer
        if self._checkpoints.owned:
            # As they are before a wrapper for several processes adds its prefix to every name.
            self._checkpoints.register("modules", nn.ModuleDict(dict(self.modules)))
            hooked = HookedModules(nn.ModuleDict(dict(self.modules)))
            if hooked.states:
                self._checkpoints.register("hooked_modules", hooked)
        self._checkpoints.register("transient_buffers", self._transient_buffers)
        self._checkpoints.register("gradients", self._gradients)
        self._position = Position(self._numbers, self._take_numbers, self._moment, self._own_part)
        self._checkpoints.register("brain", self._position)
        if self._ema is not None:
            self._checkpoints.register("ema", self._ema)

    def _adopt_optimizers(self) -> None:
        """Check the optimizers, make their schedulers and save them with checkpoints, where they are new."""
        if self._schedulers.optimizers == self.optimizers_dict:
            return
        check_optimizers(self.optimizers_dict, self.modules, self.scaler.is_enabled(), distributed.initialized())
        make = getattr(self.hparams, "lr_scheduler", None)
        self._schedulers = Schedulers(make, self.optimizers_dict, self.lr_scheduler_interval, self._count_updates)
        for name, optimizer in self.optimizers_dict.items():
            self._checkpoints.register(f"optimizer.{name}", optimizer, replace=True)
            if self._own_fit_batch:
                optimizer.register_step_post_hook(self._note_step)
        for name, scheduler in self._schedulers.by_optimizer.items():
            self._checkpoints.register(f"scheduler.{name}", scheduler, replace=True)

    @contextmanager
    def _set_aside(self, weights: bool) -> Iterator[None]:
        """Within it, an evaluation may change the loop's state (and weights): all is put back afterwards."""
        names = ("_stage", "_epoch", "step", "_average", "_sums", "_window_sums", "_metrics", "stage_metrics")
        state = {name: getattr(self, name) for name in names}
        modes = [(module, module.training) for module in self.modules.modules()]
        holders = [self.modules, *([self._ema] if self._ema is not None else [])] if weights else []
        kept = [{name: value.clone() for name, value in holder.state_dict().items()} for holder in holders]
        try:
            yield
        finally:
            vars(self).update(state)
            for module, training in modes:
                module.training = training
            for holder, values in zip(holders, kept, strict=True):
                holder.load_state_dict(values)

    @contextmanager
    def _logging(self, progressbar: bool | None) -> Iterator[None]:
        """The loggers of one fit or evaluation, closed whatever happens."""
        show = not self.noprogressbar if progressbar is None else progressbar
        if show:
            show_notices()
        loggers: list[Logger] = []
        if distributed.is_main_process():
            folder = self.output_folder
            if folder is not None and self.debug:
                folder = Path(folder) / "debug"  # trying out leaves a real run's records alone
                refuse_link(folder)
            # After a fit the table has been seen; the evaluation adds one line, which progress shows.
            table = self._in_fit or not self._trained
            loggers = [*make_loggers(folder, show, self.log_interval_steps, table), *self.loggers]
        outer, self._log = self._log, RunLog(loggers, self.summary, self.device, self.log_interval_steps)
        try:
            yield
            self._ledger.settle()
        except BaseException:
            # What is under way has changed the weights already, so it counts; the first exception is the one to raise.
            with suppress(Exception):
                self._ledger.settle()
            raise
        finally:
            self.summary.optimizer_steps, self.summary.skipped_steps = self._optimizer_step, self._skipped_steps
            if not self._in_fit or outer is self._idle_log:
                self._log.log_summary()
            self._log.close()
            self._log = outer

    def _note_step(self, *_: Any) -> None:
        self._stepped_by_hand = True

    def _check_names(self, names: Sequence[str]) -> None:
        """Refuse names that no optimizer has."""
        for name in names:
            if name not in self.optimizers_dict:
                near = get_close_matches(name, self.optimizers_dict, n=1)
                raise ConfigError(
                    f"there is no optimizer '{name}'; expected one of "
                    f"{', '.join(self.optimizers_dict) or '(none)'}." + (f" Did you mean '{near[0]}'?" if near else "")
                )


def _refuse_wrong_kinds(modules: Any, opt_class: Any) -> None:
    """Raise RecipeError for modules without names, and for what makes no optimizer."""
    if not isinstance(modules, (Mapping, nn.ModuleDict, type(None))):
        raise RecipeError(f"modules is a {type(modules).__name__}; expected names and modules: {{'model': ...}}.")
    for name, module in (modules or {}).items():
        if not isinstance(module, (nn.Module, type(None))):
            raise RecipeError(
                f"modules['{name}'] is {module!r:.200}; expected a torch.nn.Module. In a YAML `!new:` makes one, and "
                "`!name:` what makes them."
            )
    if opt_class is not None and not callable(opt_class):
        raise RecipeError(
            f"opt_class is an object of {type(opt_class).__name__}; expected what makes an optimizer of parameters: "
            "torch.optim.Adam, functools.partial(torch.optim.Adam, lr=1e-3), in a YAML `!name:torch.optim.Adam`."
        )


def _options_from(run_opts: Mapping[str, Any], loaded: Mapping[str, Any] | None) -> RunOptions:
    """The options that a dict sets; what the script was started for comes with what `load_hparams` returned."""
    overrides = getattr(loaded, "overrides", None)
    known = getattr(overrides, "run_options", None)
    purpose = known.purpose if known is not None else Purpose()
    return RunOptions.from_mapping(without_originals(run_opts), purpose=purpose)
