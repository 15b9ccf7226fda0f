"""Runs that spike at a known place, for the tests of `on_spike`."""

import json
import os
import random
import signal

import numpy as np
import torch
from device import DEVICE
from end_of_run import everything
from inside import run_of
from torch import nn
from torch.utils.data import Dataset

from amp_recipes import Brain, EpochCounter, Stage

SAMPLES, BATCH, BAD = 96, 4, 70  # 24 batches; one sample is a thousand times too large


class Died(Exception):
    pass


class Journal:
    """What happened, kept where no checkpoint finds it."""

    def __init__(self):
        self.lines, self.states = [], {}


class Samples(Dataset):
    """Each draws, as augmentation does; unless it is None, `bad` is the number of the bad one."""

    def __init__(self, bad=BAD, size=1e3):
        self.x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))
        self.bad, self.size = bad, size

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x = self.x[index] + 0.1 * torch.randn(3) + 0.01 * random.random() + 0.01 * float(np.random.rand())
        return index, x, self.x[index].sum() * (self.size if index == self.bad else 1.0)


class Recipe(Brain):
    """Dropout, statistics, a counter over the epoch, and a note of each update and of the weights before it."""

    dies_at = None  # number of the training batch, over all

    def compute_forward(self, batch, stage):
        if stage is Stage.TRAIN:
            self.journal.lines.append((batch[0].tolist(), self.training_ctx.dtype, self.scaler.is_enabled()))
            if self.step not in self.journal.states:
                self.journal.states[self.step] = state_of(self)
            if len(self.journal.lines) == self.dies_at:
                self.end_by()
        return self.modules.model(batch[1])

    def compute_objectives(self, predictions, batch, stage):
        self.seen += len(batch[0])
        return nn.functional.mse_loss(predictions.squeeze(1).float(), batch[2])

    def on_stage_start(self, stage, epoch=None):
        self.seen = 0

    def on_stage_end(self, stage, stage_loss, epoch=None):
        return {"seen": self.seen}


def state_of(brain):
    return {name: value.clone() for name, value in brain.modules.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def die():
    raise Died


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


DEFAULTS = {
    "device": DEVICE,
    "noprogressbar": True,
    "seed": 5,
    "on_spike": "lower_lr",
    "spike_window": 8,
    "spike_steps": 5,
    "ckpt_interval_steps": 4,
    "ckpt_background": False,
}


def make(folder=None, recipe=Recipe, dies_at=None, end_by=die, schedule=0.97, **options):
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    hparams = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, schedule)}
    folder = None if folder is None else str(folder)
    brain = recipe(
        {"model": model},
        lambda parameters: torch.optim.AdamW(parameters, 0.01),
        hparams,
        {**DEFAULTS, "output_folder": folder, **options},
    )
    brain.journal, brain.dies_at, brain.end_by, brain.seen = Journal(), dies_at, end_by, 0
    return brain


def fit(brain, data=None, epochs=2, **loader_kwargs):
    if data is None:
        data, loader_kwargs = Samples(), {"batch_size": BATCH}
    brain.fit(EpochCounter(epochs), data, Samples(None), None, loader_kwargs, {"batch_size": 32})
    brain.end = everything(brain)
    return brain


def records(folder, kind="step"):
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in found if record["kind"] == kind]


def saved(folder):
    return sorted(path.name for path in (folder / "save").glob("CKPT+*"))


def rates(folder):
    return [record["lr"]["optimizer"] for record in records(folder)]


def batches(count=24, bad=(18,), size=1e3):
    generator = torch.Generator().manual_seed(0)
    made = []
    for index in range(count):
        x = torch.randn(BATCH, 3, generator=generator)
        made.append((torch.full((BATCH,), index), x, x.sum(1) * (size if index in bad else 1.0)))
    return made


class Watched(Recipe):
    """Notes where it goes back."""

    def on_fit_start(self):
        recovery = run_of(self).recovery
        go_back = type(recovery).go_back

        def noted():
            self.before_going_back()
            go_back(recovery)
            self.after_going_back()

        recovery.go_back = noted
        super().on_fit_start()

    def before_going_back(self):
        """Nothing has been put back yet."""

    def after_going_back(self):
        self.journal.returned = state_of(self), len(self.journal.lines)
