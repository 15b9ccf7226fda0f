"""A recipe that notes all that happens to it, for tests/system/test_golden_trace.py."""

import math
import re

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR

from amp_recipes import AMPConfig, Brain, Stage
from amp_recipes.records import Logger

HOOKS = (
    *("compute_forward", "compute_objectives", "evaluate_batch", "freeze_optimizers", "init_optimizers"),
    *("make_dataloader", "no_sync", "on_evaluate_start", "on_fit_batch_end", "on_fit_batch_start", "on_fit_start"),
    *("on_stage_end", "on_stage_start", "optimizers_step", "update_average", "zero_grad"),
)
DECISIVE_HOOKS = ("backward", "batch_weight", "fit_batch")  # a recipe that has one of these is trained differently
OF_THE_MACHINE = re.compile(r"\w*seconds|samples_per_second|wall_time|\w*memory\w*|device|float32_precision")


class Died(Exception):
    pass


class Trace:
    """The lines, and what the last of them knew of checkpoints and counters.

    Not an attribute of the Brain, which would save it, and put it back after steps that are only tried.
    """

    def begin(self, checkpointer):
        self.lines, self.checkpointer = [], checkpointer
        self.checkpoints, self.counters = [], ""

    def add(self, line, counters=None):
        self.look_at_disk()
        if counters is not None and counters != self.counters:
            self.counters, line = counters, f"{line:<58} | {counters}"
        self.lines.append(line)

    def look_at_disk(self):
        """Note which checkpoints have come and gone."""
        before, folder = self.checkpoints, self.checkpointer.checkpoints_dir
        self.checkpoints = sorted(path.name for path in folder.glob("CKPT+*"))
        if self.checkpoints != before:
            metas = {saved.path.name: words(saved.meta) for saved in self.checkpointer.list_checkpoints()}
            self.lines += [f"disk: + {name} {metas[name]}" for name in self.checkpoints if name not in before]
            self.lines += [f"disk: - {name}" for name in before if name not in self.checkpoints]

    def ema(self):
        """The averaged weight, as a checkpoint would hold it now."""
        average = self.checkpointer.recoverables.get("ema")
        return "" if average is None else f"; ema {words(average.state_dict()['model.weight'].squeeze())}"


TRACE = Trace()


def words(value):
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return f"[{' '.join(map(words, value.flatten()))}]"
    if isinstance(value, (float, torch.Tensor)):
        return f"{value:g}" if isinstance(value, float) else f"{value.item():g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} {words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return f"list({len(value)})"
    if isinstance(value, Optimizer):
        return type(value).__name__
    return value.name if isinstance(value, Stage) else str(value)


def fields(record):
    values = {name: value for name, value in record.as_dict().items() if not OF_THE_MACHINE.fullmatch(name)}
    return " ".join(f"{name}={words(value)}" for name, value in values.items())


class Ear(Logger):
    """Its state is the number of steps that it has heard of."""

    steps = 0

    def start_stage(self, stage, epoch, batches):
        TRACE.add(f"log: start_stage {stage} {epoch} {batches}")

    def advance(self, step):
        TRACE.add(f"log: advance {step}")

    def log_step(self, record):
        self.steps += 1
        TRACE.add(f"log: {fields(record)}{TRACE.ema()}")

    def log_stage(self, record):
        TRACE.add(f"log: {fields(record)}")

    def log_summary(self, summary):
        TRACE.add(f"log: summary {fields(summary)}")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        TRACE.add(f"log: load_state_dict {words(state)}")

    def close(self):
        TRACE.add("log: close")


class Recoverable:
    """Of the recipe's own."""

    def state_dict(self):
        TRACE.add("recoverable: state_dict")
        return {}

    def load_state_dict(self, state):
        TRACE.add("recoverable: load_state_dict")


class Halving(StepLR):
    """Divides the learning rate by 2 after every `step_size` steps."""

    def __init__(self, optimizer, step_size, total_updates=None):
        TRACE.add(f"scheduler: made for {total_updates} updates")
        super().__init__(optimizer, step_size, 0.5)

    def step(self, *arguments):
        if self.last_epoch >= 0:  # else it is being made
            TRACE.add(f"scheduler: step {self.last_epoch + 1}{TRACE.ema()}")
        super().step(*arguments)


def make_optimizer(parameters, fused):
    optimizer = SGD(parameters, 0.5, fused=fused)
    optimizer.register_step_post_hook(note_step)
    return optimizer


def note_step(optimizer, *_):
    TRACE.add(f"optimizer: step lr {words(optimizer.param_groups[0]['lr'])}")


class Model(nn.Linear):
    """One weight, and a buffer that training moves."""

    def __init__(self, weight):
        super().__init__(1, 1, bias=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        nn.init.constant_(self.weight, weight)

    def forward(self, x):
        self.forwards += self.training
        return super().forward(x)


class Recipe(Brain):
    """factors: (epoch, step) -> what the loss is multiplied by; dies_at: (epoch, step) whose batch ends the process.

    reads: whether every hook reads the counters; else those of stages only.
    """

    epoch, batches = None, 0

    def compute_forward(self, batch, stage):
        weight, forwards = words(self.modules.model.weight.squeeze()), words(self.modules.model.forwards)
        predictions = self.modules.model(batch)
        usual = stage is Stage.TRAIN and predictions.dtype == AMPConfig.from_name(self.precision).dtype
        TRACE.add(f"model: weight {weight}, {forwards} forwards, {'<precision>' if usual else predictions.dtype}")
        self.batches += 1
        return predictions

    def compute_objectives(self, predictions, batch, stage):
        self.add_metric("mean", batch.sum(), len(batch))
        factor = self.factors.get((self.epoch, self.step), 1.0) if stage is Stage.TRAIN else 1.0
        return predictions.float().mean() * factor

    def on_fit_batch_start(self, batch, should_step):
        if self.dies_at == (self.epoch, self.step):
            raise Died

    def on_stage_start(self, stage, epoch=None):
        self.epoch = epoch

    def on_stage_end(self, stage, stage_loss, epoch=None):
        TRACE.add(f"recipe: {self.batches} batches in all")
        return {"score": {1: 0.5, 2: 0.75}.get(epoch, 0.25)} if stage is Stage.VALID else None

    def counters(self, name):
        text = f"step={self.step} should_step={self.should_step}"
        if not self.reads and "stage" not in name:
            return text
        average = "finite" if math.isfinite(self.avg_train_loss) else "nan"
        return f"{text} optimizer_step={self.optimizer_step} skipped={self.skipped_steps} avg_train_loss={average}"


def traced(name):
    def hook(self, *arguments, **keywords):
        if name == "update_average":  # comes while updates settle, where counters promise nothing
            TRACE.add(f"update_average {words(arguments[0])}")
        else:
            given = [*map(words, arguments), *(f"{key}={words(value)}" for key, value in keywords.items())]
            TRACE.add(" ".join([name, *given]), self.counters(name))
        return getattr(Recipe, name)(self, *arguments, **keywords)

    return hook


# Classes with the hooks around those of Recipe.
Traced = type("Traced", (Recipe,), {name: traced(name) for name in HOOKS})
TracedInAll = type("TracedInAll", (Recipe,), {name: traced(name) for name in (*HOOKS, *DECISIVE_HOOKS)})
