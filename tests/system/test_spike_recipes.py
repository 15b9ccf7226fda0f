"""`on_spike` in recipes of all kinds (steps of their own, several fits, counters, memories), and what is refused."""

import copy
import logging
import os

import pytest
import torch
from inside import run_of
from pairwise import each_once
from spiking_runs import (
    BATCH,
    DEFAULTS,
    Died,
    Journal,
    Recipe,
    Samples,
    Watched,
    batches,
    fit,
    make,
    rates,
    records,
    same,
    state_of,
)
from torch import nn

from amp_recipes import EpochCounter, Stage
from amp_recipes.checkpoint import Checkpointer
from amp_recipes.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# ---------------------------------------------------------------------- recipes of all kinds


class Gan(Recipe):
    """Two optimizers, each with its own step, and a teacher that follows."""

    def init_optimizers(self):
        model = self.modules.model
        self.optimizers_dict = {
            "critic": torch.optim.Adam(model[4].parameters(), 0.01),
            "generator": torch.optim.Adam(model[0].parameters(), 0.02),
        }
        self.optimizer = self.optimizers_dict["critic"]
        self.teacher = copy.deepcopy(model)

    def fit_batch(self, batch):
        for name in ("critic", "generator"):
            with self.training_ctx:
                predictions = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(predictions, batch, Stage.TRAIN)
            self.backward(loss)
            self.optimizers_step(name)
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.modules.model.parameters(), strict=True):
                mine.data.lerp_(its, 0.1)
        self.batches = getattr(self, "batches", 0) + 1
        return loss.detach()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        return {"teacher": self.teacher[0].weight.sum().item(), "batches": self.batches}


class ByHand(Recipe):
    """Steps its optimizer itself."""

    def fit_batch(self, batch):
        loss = self.compute_objectives(self.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class EvaluatesInside(Recipe):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.step in (3, 18):
            assert self.optimizer_step >= 0  # settles
            seen = self.seen
            self.evaluate(batches(2, bad=(0,)))
            self.seen = seen


WITH_STEPS = [Gan, ByHand, EvaluatesInside]


@pytest.mark.parametrize(
    ("recipe", "dies_at", "epochs"),
    [
        *((recipe, 45 if recipe is Gan else 21, 1) for recipe in WITH_STEPS),
        *(pytest.param(recipe, at, 2, marks=pytest.mark.extended) for recipe in WITH_STEPS for at in (21, 45)),
    ],
)
def test_recipes_with_steps_of_their_own_go_back_and_resume(tmp_path, recipe, dies_at, epochs):
    """Two forwards a batch in the GAN."""
    options = {"recipe": recipe, "spike_steps": 10 if recipe is Gan else 5}
    whole = fit(make(tmp_path / "whole", **options), epochs=epochs)
    assert whole.summary.went_back == epochs
    assert any("recovery" in record for record in records(tmp_path / "whole"))
    with pytest.raises(Died):
        fit(make(tmp_path / "run", dies_at=dies_at, **options), epochs=epochs)
    assert fit(make(tmp_path / "run", **options), epochs=epochs).end == whole.end


@pytest.mark.parametrize("recipe", [Gan, ByHand])
def test_every_optimizer_steps_with_lower_rates_also_by_hand(tmp_path, monkeypatch, recipe):
    used = []
    kind = torch.optim.Adam if recipe is Gan else torch.optim.AdamW
    inner = torch.optim.Adam.step

    def noted(self, closure=None):  # inside of all hooks
        used.append(self.param_groups[0]["lr"])
        return inner.__wrapped__(self, closure)

    monkeypatch.setattr(kind, "step", torch.optim.Optimizer.profile_hook_step(noted))
    brain = fit(make(tmp_path, recipe, schedule=1.0), epochs=1)
    assert brain.summary.went_back == 1
    bases = {0.01, 0.02} if recipe is Gan else {0.01}
    assert set(used) == bases | {rate * 0.1 for rate in bases}


def test_two_fits_each_have_their_own_bands_and_checkpoints(tmp_path):
    brain = make(tmp_path / "two", Watched, spike_steps=50)
    fit(brain, epochs=1)
    first = brain.journal
    assert brain.summary.went_back == 1
    brain.journal = Journal()
    fit(brain, batches(30, bad=(10,)), epochs=1)
    assert brain.summary.went_back == 2
    returned, count = brain.journal.returned
    assert count == 11 and same(returned, brain.journal.states[9]) and first.states.keys()
    again = make(tmp_path / "two", Watched)
    fit(again, epochs=1)
    assert again.journal.lines == [], "the first fit is over"


def test_a_spike_in_the_first_updates_of_a_second_fit_does_not_go_back_to_the_first(tmp_path):
    brain = make(tmp_path, Watched, ckpt_interval_steps=0)
    fit(brain, Samples(None), epochs=1, batch_size=BATCH)
    before = state_of(brain)
    fit(brain, batches(30, bad=(9,)), epochs=1)
    assert same(brain.journal.returned[0], before)


COUNTERS = {
    "EpochCounter": lambda: EpochCounter(2),
    "range": lambda: range(1, 3),
    "iterator": lambda: iter(range(1, 3)),
    "generator": lambda: (epoch for epoch in (1, 2)),
}


@pytest.mark.parametrize(("counter", "interval"), each_once([*COUNTERS], [0, 4]))
def test_every_epoch_comes_once_to_its_end_whatever_counts_them(tmp_path, counter, interval):
    brain = make(tmp_path, ckpt_interval_steps=interval)
    brain.fit(COUNTERS[counter](), Samples(), Samples(None), train_loader_kwargs={"batch_size": BATCH})
    assert [record["epoch"] for record in records(tmp_path, "stage")] == [1, 1, 2, 2]
    assert brain.summary.went_back == 2 and brain.summary.epochs == 2 and brain.optimizer_step == 48


@pytest.mark.parametrize(
    "counter",
    [lambda: EpochCounter(3), pytest.param(lambda: range(1, 4), marks=pytest.mark.extended)],
    ids=["EpochCounter", "range"],
)
def test_it_goes_back_over_the_end_of_an_epoch(tmp_path, counter):
    """The first batch of epoch 3 completes a spike that began at the end of epoch 2."""

    class Late(Recipe):
        def on_stage_start(self, stage, epoch=None):
            super().on_stage_start(stage, epoch)
            self.epoch = epoch

        def compute_objectives(self, predictions, batch, stage):
            loss = super().compute_objectives(predictions, batch, stage)
            late = stage is Stage.TRAIN and (self.epoch, self.step) in [(2, 23), (2, 24), (3, 1)]
            return loss * 1e3 if late else loss

    brain = make(tmp_path, Late, spike_patience=3)
    brain.fit(counter(), Samples(None), Samples(None), train_loader_kwargs={"batch_size": BATCH})
    assert brain.summary.went_back == 1
    assert [record["epoch"] for record in records(tmp_path, "stage")] == [1, 1, 2, 2, 2, 2, 3, 3]
    marked = [(record["epoch"], record["step"]) for record in records(tmp_path) if "recovery" in record]
    assert marked == [(2, 21), (2, 22), (2, 23), (2, 24), (3, 1), (3, 2)]


def test_the_last_update_of_a_run_may_spike(tmp_path):
    for options in ({}, {"optimizer_step_limit": 24}):
        folder = tmp_path / "-".join(options or ["plain"])
        brain = fit(make(folder, **options), batches(bad=(23,)), epochs=1)
        assert brain.summary.went_back == 1 and brain.optimizer_step == 24
        assert [record["step"] for record in records(folder)][-5:] == [24, 21, 22, 23, 24]


@pytest.mark.parametrize("epochs", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_early_stopping_and_the_best_are_those_of_the_way_that_was_kept(tmp_path, epochs):
    options = {"early_stop_metric": "loss", "early_stop_patience": 2, "ema_decay": 0.8}
    whole = fit(make(tmp_path / "whole", **options), epochs=epochs)
    with pytest.raises(Died):
        fit(make(tmp_path / "run", dies_at=45, **options), epochs=epochs)
    assert fit(make(tmp_path / "run", **options), epochs=epochs).end == whole.end


def test_the_recipes_own_checkpointer_serves_as_well(tmp_path):
    class Original(Watched):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID:
                self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])

    torch.manual_seed(11)
    model = nn.Linear(3, 1)
    checkpointer = Checkpointer(tmp_path, {"model": model})
    brain = Original({"model": model}, lambda p: torch.optim.SGD(p, 0.01), {}, DEFAULTS, checkpointer)
    brain.journal, brain.seen = Journal(), 0
    fit(brain, epochs=2)
    assert brain.summary.went_back == 2 and same(brain.journal.returned[0], brain.journal.states[17]) is False
    assert brain.journal.returned[1] == len(brain.journal.lines) - 8 + 0


class Remembers(Recipe):
    """Its memory begins after the checkpoint: numbers, a list, a tensor, a module, a table, what is new."""

    def init_optimizers(self):
        super().init_optimizers()
        self.teacher = nn.Linear(200, 200)
        self.limits, self.level, self.total = [1.0], 5, torch.zeros(())
        self.modules.model[0].register_buffer("cache", torch.zeros(200, 200), persistent=False)

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.step == 18 and not self.journal.__dict__.get("spoilt"):
            self.journal.spoilt = True
            self.limits.append(2.0)
            self.level, self.total = None, self.total + 1
            self.teacher.weight.data.zero_()
            self.modules.model[0].cache.add_(1)
            self.created = 3


def test_what_the_checkpoint_did_not_need_to_hold_is_put_back_too(tmp_path):
    class Looks(Remembers, Watched):
        def before_going_back(self):
            self.journal.teacher = self.teacher.weight.abs().sum().item()

        def after_going_back(self):
            self.journal.back = (list(self.limits), self.level, self.total.item(), hasattr(self, "created"))
            self.journal.sums = self.teacher.weight.abs().sum().item(), self.modules.model[0].cache.sum().item()

    brain = make(tmp_path, Looks)
    torch.manual_seed(11)
    brain.modules["model"][0].register_buffer("cache", torch.zeros(200, 200), persistent=False)
    run_of(brain).transient_buffers.__init__(brain.modules)
    run_of(brain).transient_buffers.keep()
    fit(brain, epochs=1)
    assert brain.summary.went_back == 1
    assert brain.journal.back == ([1.0], 5, 0.0, False)
    assert brain.journal.teacher == 0.0 and brain.journal.sums[0] > 100 and brain.journal.sums[1] == 0.0


def test_what_was_unfrozen_since_is_frozen_again(tmp_path):
    class Unfreezes(Watched):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            if self.step == 17:
                self.modules.model[0].requires_grad_(True)

        def after_going_back(self):
            self.journal.trains = [p.requires_grad for p in self.modules.parameters()]

    brain = make(tmp_path, Unfreezes)
    brain.modules.model[0].requires_grad_(False)
    fit(brain, epochs=1)
    assert brain.journal.trains == [False, False] + [True] * 4


# ---------------------------------------------------------------------- asked for, refused, told


REFUSED = [
    ({}, "no output_folder"),
    ({"on_spike": "wider_precision", "precision": "fp32", "output_folder": "there"}, "no wider one"),
    ({"on_spike": "stop"}, "off, lower_lr or wider_precision"),
    ({"spike_window": 3}, "4 or more"),
    ({"spike_lr_factor": 1.0}, "between 0 and 1"),
    ({"spike_factor": 0}, "greater than 0"),
    ({"spike_patience": 0}, "1 or more"),
    ({"spike_limit": 0}, "1 or more"),
]


def test_what_cannot_be_is_refused_in_the_constructor(tmp_path, monkeypatch, subtests):
    monkeypatch.chdir(tmp_path)
    for options, words in REFUSED:
        with subtests.test(str(options)), pytest.raises(ConfigError, match=words):
            make(**options)


def test_off_in_a_yaml_is_off():
    assert make(on_spike=False).on_spike == "off"
    assert type(make(on_spike="off").summary).__name__ == "RunSummary"


def test_where_nothing_is_saved_or_trained_it_does_nothing():
    for options in ({"debug": True}, {"test_only": True}):
        brain = make(**options)  # not even an output folder
        fit(brain, batches(), epochs=1)
        assert brain.summary.spikes == 0


def test_a_training_set_that_can_be_read_once_is_refused_before_the_first_step(tmp_path):
    brain = make(tmp_path)
    with pytest.raises(DataError, match="can be read only once"):
        fit(brain, iter(batches()), epochs=1)
    assert brain.optimizer_step == 0
    fit(make(tmp_path / "overfit", overfit_batches=5), iter(batches()), epochs=1)


def test_overfitting_some_batches_goes_back_like_any_run(tmp_path):
    brain = fit(make(tmp_path, overfit_batches=12), batches(bad=(10,)), epochs=2)
    assert brain.summary.went_back == 2 and brain.optimizer_step == 24


def test_the_log_says_what_left_which_band_and_what_is_done(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    fit(make(tmp_path), epochs=1)
    (line,) = [record.message for record in caplog.records if "Going back" in record.message]
    for words in (
        "train epoch 1, batch 18",
        "loss",
        "median",
        "CKPT+000005",
        "update 16",
        "Until update 21",
        "multiplied by 0.1",
    ):
        assert words in line
    assert "recovered" in caplog.text


def test_the_table_counts_spikes_where_there_were_any(tmp_path, capsys):
    fit(make(tmp_path, noprogressbar=False), epochs=1)
    assert "spikes       1, went back once" in capsys.readouterr().err
    fit(make(tmp_path / "none", noprogressbar=False), Samples(None), epochs=1, batch_size=BATCH)
    assert "spikes" not in capsys.readouterr().err


def test_switched_on_for_a_run_that_began_without_it(tmp_path):
    with pytest.raises(Died):
        fit(make(tmp_path, dies_at=7, on_spike="off"))
    brain = fit(make(tmp_path, Watched), epochs=1)
    assert brain.summary.went_back == 1 and brain.optimizer_step == 24
    with pytest.raises(Died):
        fit(make(tmp_path / "late", dies_at=16, on_spike="off", ckpt_interval_steps=10))
    late = fit(make(tmp_path / "late", Watched, ckpt_interval_steps=0, spike_window=4), epochs=1)
    assert late.summary.went_back == 1 and late.journal.returned[1] == 8  # to update 10, saved without a watch


def test_switched_off_for_a_run_that_is_in_a_recovery(tmp_path):
    with pytest.raises(Died):
        fit(make(tmp_path, dies_at=20))
    fit(make(tmp_path, on_spike="off"), epochs=1)
    assert rates(tmp_path)[-8:] == pytest.approx([0.01 * 0.97**step for step in range(16, 24)])
