"""A run that spikes goes back to the last good checkpoint and on with care; nothing else about it changes."""

import copy
import json
import os

import pytest
import torch
from device import DEVICE, QUEUES
from hosts import hosts_in_turn
from inside import run_of
from pairwise import each_once
from spiking_runs import BATCH, SAMPLES, Died, Recipe, Samples, Watched, batches, fit, make, rates, records, same, saved
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from amp_recipes import EpochCounter, Stage
from amp_recipes.checkpoint import Checkpointer
from amp_recipes.data import to_device
from amp_recipes.errors import CheckpointError, NonfiniteError


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


# ---------------------------------------------------------------------- against a loop written by hand


@pytest.mark.usefixtures("host")  # verdicts known at once, and queued
@hosts_in_turn(on_spike=["lower_lr", "wider_precision"])
def test_a_run_with_a_spike_is_the_loop_one_would_write_by_hand(tmp_path, on_spike):
    precision = "fp32" if on_spike == "lower_lr" else "bf16"
    brain = make(tmp_path, on_spike=on_spike, precision=precision, max_grad_norm=1.0)
    brain.modules["model"][2] = nn.Identity()
    by_hand = copy.deepcopy(brain.modules.model)
    brain.fit(range(1), batches())

    optimizer = torch.optim.AdamW(by_hand.parameters(), 0.01, fused=QUEUES or None)  # as Brain chooses
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)

    def update(index, careful=False):
        _, x, y = to_device(batches()[index], DEVICE)
        low = precision == "bf16" and not careful
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=low):
            loss = nn.functional.mse_loss(by_hand(x).squeeze(1).float(), y)
        loss.backward()
        nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        rate = optimizer.param_groups[0]["lr"]
        if careful and on_spike == "lower_lr":
            optimizer.param_groups[0]["lr"] = rate * 0.1
        optimizer.step()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        schedule.step()

    for index in range(16):
        update(index)
    for index in range(16, 21):  # back from the batch after the spike to the checkpoint after the 16th
        update(index, careful=True)
    for index in range(21, 24):
        update(index)
    assert same(dict(brain.modules.model.state_dict()), dict(by_hand.state_dict()))
    assert (brain.summary.spikes, brain.summary.went_back) == (1, 1)
    indices = [line[0][0] for line in brain.journal.lines]
    assert indices == [*range(19 + QUEUES), *range(16, 24)]


# ---------------------------------------------------------------------- no spike, no difference


def plain_loader():
    return DataLoader(Samples(88), batch_size=BATCH, shuffle=True), {}


def with_workers():
    return Samples(), {"batch_size": BATCH, "shuffle": True, "num_workers": 1}


def shuffled():
    return Samples(), {"batch_size": BATCH, "shuffle": True}


class Stream(IterableDataset):
    """Knows its place, and goes on after it when it is iterated again."""

    def __init__(self):
        self.place, self.samples = 0, Samples()

    def __iter__(self):
        while self.place < SAMPLES:
            self.place += 1
            yield self.samples[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def stream():
    return Stream(), {"batch_size": BATCH}


def loader_over_stream():
    return DataLoader(Stream(), batch_size=BATCH), {}


def stateful():
    class Own:
        place = 0

        def __iter__(self):
            while self.place < 24:
                self.place += 1
                yield batches()[self.place - 1]
            self.place = 0

        def state_dict(self):
            return {"place": self.place}

        def load_state_dict(self, state):
            self.place = state["place"]

    return Own(), {}


def anew_each_time():
    class Own:
        def __iter__(self):
            return iter(batches())

    return Own(), {}


def in_a_list():
    return batches(), {}


SOURCES = [plain_loader, shuffled, stream, loader_over_stream, stateful, anew_each_time, in_a_list, with_workers]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.extended),
        {"precision": "fp16", "init_scale": 2.0**10, "growth_interval": 3, "on_spike": "wider_precision"},
        {"ema_decay": 0.9, "grad_accumulation_factor": 5, "lr_scheduler_interval": "epoch", "ckpt_background": True},
        pytest.param({"overfit_batches": 3}, marks=pytest.mark.extended),
        {"early_stop_metric": "seen", "early_stop_mode": "max", "ckpt_interval_steps": 0},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_without_a_spike_the_run_is_the_one_without_the_option(tmp_path, options):
    ends = []
    for on_spike in ("off", options.get("on_spike", "lower_lr")):
        brain = make(tmp_path / on_spike, **{**options, "on_spike": on_spike})
        ends.append(fit(brain, Samples(None), batch_size=BATCH, shuffle=True).end)
    assert ends[0] == ends[1] and ends[0]["spikes"] == (0, 0)
    without, with_ = records(tmp_path / "off"), records(tmp_path / on_spike)
    measured = {"seconds", "data_seconds", "samples_per_second", "wall_time", "memory_bytes"}
    assert all(
        {**a, **{name: b[name] for name in measured & b.keys()}} == b for a, b in zip(without, with_, strict=True)
    )


# ---------------------------------------------------------------------- what comes back


@pytest.mark.parametrize(
    ("source", "interval"), each_once(SOURCES, [0, 4]), ids=lambda value: getattr(value, "__name__", None)
)
def test_weights_and_batches_are_those_of_the_checkpoint(tmp_path, source, interval):
    data, kwargs = source()
    brain = make(tmp_path, Watched, ckpt_interval_steps=interval)
    brain.fit(EpochCounter(1), data, train_loader_kwargs=kwargs)
    returned, count = brain.journal.returned
    spiked = count - 1  # batches before the bad one, from 0
    back_to = spiked // interval * interval if interval else 0
    assert brain.summary.went_back == 1 and same(returned, brain.journal.states[back_to + 1])
    ids = [line[0] for line in brain.journal.lines]
    assert ids[count : count + spiked - back_to + 1] == ids[back_to:count]
    assert len(ids) == 24 + spiked - back_to + 1


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_learning_rates_are_those_of_the_schedule_but_in_the_recovery(tmp_path, interval):
    brain = fit(make(tmp_path, lr_scheduler_interval=interval), epochs=2)
    at = 17  # the batch of sample 70, from 0; the checkpoint before it is after 16
    schedule = [0.01]
    for count in range(2 * 24):
        moves = interval == "step" or count % 24 == 23
        schedule.append(schedule[-1] * 0.97 if moves else schedule[-1])
    expected, place = [], 0
    for epoch in range(2):
        bad = 24 * epoch + at
        expected += schedule[place : bad + 1]
        expected += [rate * 0.1 for rate in schedule[bad - 1 : bad + 4]]
        place = bad + 4
    expected += schedule[place : 2 * 24]
    assert rates(tmp_path) == expected
    assert brain.optimizer.param_groups[0]["lr"] == schedule[-1]
    marked = [record.get("recovery") for record in records(tmp_path)]
    assert marked.count("lower_lr") == 10 and marked.count(None) == len(marked) - 10
    assert all("recovery" not in record for record in records(tmp_path)[:18])


def test_the_recovery_lasts_at_least_past_the_update_that_spiked(tmp_path):
    brain = make(tmp_path, ckpt_interval_steps=0, spike_steps=3)
    fit(brain, epochs=1)
    assert brain.summary.went_back == 1  # and not again and again
    marked = [record["step"] for record in records(tmp_path) if "recovery" in record]
    assert marked == list(range(1, 20))


def test_wider_precision_computes_in_fp32_and_leaves_the_loss_scale_as_it_was(tmp_path):
    options = {"precision": "fp16", "init_scale": 2.0, "growth_interval": 6, "on_spike": "wider_precision"}
    brain = fit(make(tmp_path, max_grad_norm=1.0, **options), batches(bad=(18,), size=40.0), epochs=1)
    assert brain.summary.went_back == 1 and brain.skipped_steps == 0
    found = records(tmp_path)
    assert [record["scale"] for record in found[:18]] == [2.0] * 6 + [4.0] * 6 + [8.0] * 6
    careful = [record for record in found if "recovery" in record]
    assert [record["step"] for record in careful] == [17, 18, 19, 20, 21]
    assert all(record["scale"] is None for record in careful)
    # At the checkpoint the growth tracker stood at 4 of 6: two more good updates, then it grows.
    assert [record["scale"] for record in found[-3:]] == [8.0, 8.0, 16.0]
    lines = brain.journal.lines
    back = 19 + QUEUES
    assert [(dtype, scaled) for _, dtype, scaled in lines[back : back + 5]] == [(torch.float32, False)] * 5
    assert all(it[1:] == (torch.float16, True) for it in [*lines[:back], *lines[back + 5 :]])
    assert brain.training_ctx.dtype is torch.float16 and brain.scaler.is_enabled()


def test_after_a_fit_that_ends_in_a_recovery_precision_and_rates_are_as_before(tmp_path):
    options = {"precision": "bf16", "on_spike": "wider_precision", "spike_steps": 1000}
    brain = fit(make(tmp_path, **options), epochs=1)
    assert brain.summary.went_back == 1 and brain.training_ctx.dtype is torch.bfloat16
    assert records(tmp_path)[-1]["recovery"] == "wider_precision"


# ---------------------------------------------------------------------- checkpoints


def test_the_checkpoint_gone_back_to_is_written_again_and_differs_in_the_recovery_alone(tmp_path):
    with pytest.raises(Died):
        fit(make(tmp_path, dies_at=19 + QUEUES))
    names = saved(tmp_path)
    first, copied = (tmp_path / "save" / name for name in names[-2:])
    sums = [
        dict(reversed(line.split("  ")) for line in (it / "MANIFEST.sha256").read_text().splitlines())
        for it in (first, copied)
    ]
    assert {name for name in sums[0] if sums[0][name] != sums[1][name]} == {"brain.safetensors"}
    states = [
        Checkpointer(tmp_path / "save").read(it)["brain"]
        for it in Checkpointer(tmp_path / "save").list_checkpoints()[:2]
    ]
    spikes = [state.pop("spikes") for state in states]
    assert repr(states[0]) == repr(states[1])
    assert spikes[0] == {**spikes[1], "until": 21, "went_back_to": 16, "spikes": 1, "went_back": 1}


def test_what_was_saved_since_the_band_was_left_is_deleted_and_said(tmp_path, caplog):
    class Saves(Recipe):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            self.numbers = [*getattr(self, "numbers", []), self.checkpointer.save_checkpoint({"epoch": 1}).number]

    class Looks(Saves, Watched):
        def before_going_back(self):
            self.journal.names = saved(tmp_path)

    brain = fit(make(tmp_path, Looks, ckpt_interval_steps=0, spike_patience=2), batches(bad=(16, 17)), epochs=1)
    assert brain.summary.went_back == 1
    # Numbers: 1 before the first batch, then one in each. The spike's two are gone, and so is the one of the batch
    # before them: it was saved before it was known whether its update was good. A copy of the one before has come.
    assert brain.journal.names == [f"CKPT+{number:06d}" for number in [*range(1, 17), 20]]
    deleted = [record.message for record in caplog.records if record.message.startswith("deleted")]
    assert [message.split(":")[0][-6:] for message in deleted] == ["000019", "000018", "000017"]


def test_with_patience_what_was_saved_before_the_values_left_stays_until_it_is_known(tmp_path):
    """Saved after each update, the two newest would be of the spike already."""
    brain = fit(
        make(tmp_path, Watched, ckpt_interval_steps=1, spike_patience=4), batches(bad=(16, 17, 18, 19)), epochs=1
    )
    returned, count = brain.journal.returned
    assert count == 20 and same(returned, brain.journal.states[17]) and brain.summary.went_back == 1


def test_fewer_in_a_row_than_patience_are_no_spike(tmp_path):
    brain = fit(make(tmp_path, spike_patience=3), batches(bad=(16, 17)), epochs=1)
    assert brain.summary.spikes == 0 and len(brain.journal.lines) == 24


def test_epochs_that_end_outside_the_band_do_not_push_the_good_checkpoint_out(tmp_path):
    """One update an epoch, patience 4: four checkpoints of the spike, of which the two newest stay otherwise."""

    class One(Recipe):
        def on_stage_start(self, stage, epoch=None):
            super().on_stage_start(stage, epoch)
            self.epoch = epoch

        def compute_objectives(self, predictions, batch, stage):
            loss = super().compute_objectives(predictions, batch, stage)
            return loss * 1e3 if stage is Stage.TRAIN and 12 <= self.epoch <= 15 else loss

    brain = make(
        tmp_path,
        One,
        spike_patience=4,
        ckpt_interval_steps=0,
        early_stop_metric="later",
        early_stop_mode="max",
        early_stop_patience=None,
    )
    brain.on_stage_end = lambda stage, loss, epoch=None: {"later": epoch}
    brain.epoch = 0
    brain.fit(EpochCounter(18), batches(1))
    assert brain.summary.went_back == 1
    marked = [record["epoch"] for record in records(tmp_path) if "recovery" in record]
    assert marked == [12, 13, 14, 15, 16]


def test_a_damaged_checkpoint_is_not_gone_back_to(tmp_path, caplog):
    class Damages(Watched):
        def compute_forward(self, batch, stage):
            if stage is Stage.TRAIN and len(self.journal.lines) == 17:
                newest = tmp_path / "save" / saved(tmp_path)[-1]
                (newest / "modules.safetensors").write_bytes(b"no")
            return super().compute_forward(batch, stage)

    brain = fit(make(tmp_path, Damages), epochs=1)
    returned, count = brain.journal.returned
    assert count == 18 + QUEUES and same(returned, brain.journal.states[13]) and "is damaged" in caplog.text


def test_a_disk_that_is_full_ends_the_run_and_what_is_there_is_intact(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    brain = make(tmp_path)
    recovery = run_of(brain).recovery
    prepare = recovery._prepare

    def prepare_on_full_disk(error):
        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", full)
            return prepare(error)

    recovery._prepare = prepare_on_full_disk
    with pytest.raises(CheckpointError, match="disk is full"):
        fit(brain, epochs=1)
    resumed = fit(make(tmp_path), epochs=1)
    assert resumed.end["weights"] == fit(make(tmp_path / "whole"), epochs=1).end["weights"]


# ---------------------------------------------------------------------- what is not tried for ever


def test_after_spike_limit_it_goes_on_as_it_is(tmp_path, caplog):
    brain = fit(make(tmp_path, spike_limit=1), epochs=3)
    assert (brain.summary.spikes, brain.summary.went_back) == (3, 1)
    assert caplog.text.count("spike_limit is 1") == 2 and brain.optimizer_step == 3 * 24
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["spikes"], summary["went_back"]) == (3, 1)


def test_a_level_that_stays_is_not_gone_back_from_twice_and_becomes_the_usual(tmp_path, caplog):
    """From the 17th batch on the task is another one: no recovery helps."""
    data = batches(60, bad=range(16, 60))
    brain = fit(make(tmp_path, ckpt_interval_steps=4), data, epochs=1)
    assert (brain.summary.spikes, brain.summary.went_back) == (2, 1)
    assert "did not help" in caplog.text and "already went back to update 16" in caplog.text
    assert brain.optimizer_step == 60 and (tmp_path / "save").exists()
    newest = Checkpointer(tmp_path / "save").list_checkpoints()
    assert any(it.meta.get("step", 0) > 40 for it in newest) or newest[0].meta["epoch"] == 1


def test_a_schedule_that_jumps_does_not_end_in_a_loop(tmp_path):
    class Jumps(Recipe):
        def init_optimizers(self):
            self.optimizer = torch.optim.SGD(self.modules.parameters(), 0.01)
            self.optimizers_dict = {"optimizer": self.optimizer}

    def jump(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1000.0 if 30 <= step < 34 else 1.0)

    ends = {}
    for on_spike in ("off", "lower_lr"):
        brain = make(
            tmp_path / on_spike, Jumps, on_spike=on_spike, spike_lr_factor=0.001, max_grad_norm=0.0, spike_steps=12
        )
        brain.hparams.lr_scheduler = jump
        try:
            ends[on_spike] = fit(brain, Samples(None), epochs=2, batch_size=BATCH).summary.last["valid"]["loss"]
        except NonfiniteError:
            ends[on_spike] = float("inf")
    assert brain.summary.went_back >= 1
    assert ends["lower_lr"] < 3.0 and ends["lower_lr"] < 0.5 * ends["off"]


# ---------------------------------------------------------------------- nonfinite


def with_nan(*bad, count=24):
    made = batches(count, bad=())
    return [(i, x * torch.nan if index in bad else x, y) for index, (i, x, y) in enumerate(made)]


@pytest.mark.usefixtures("host")
def test_patience_that_runs_out_is_a_spike_and_ends_the_run_if_it_does_so_again(tmp_path):
    brain = make(tmp_path, nonfinite_patience=2)
    with pytest.raises(NonfiniteError, match="2 updates in a row"):
        fit(brain, with_nan(17, 18), epochs=1)
    assert (brain.summary.spikes, brain.summary.went_back) == (1, 1)
    assert [line[0][0] for line in brain.journal.lines] == [*range(19 + QUEUES), *range(16, 19)]
    assert all(p.isfinite().all() for p in brain.modules.parameters())


def test_a_nonfinite_update_that_patience_bears_is_no_spike(tmp_path):
    brain = fit(make(tmp_path, nonfinite_patience=3), with_nan(17, 18), epochs=1)
    assert brain.summary.spikes == 0 and brain.skipped_steps == 2


def test_what_overflows_in_fp16_gets_through_in_fp32(tmp_path):
    """Activations beyond 65504, which no loss scale helps."""

    class Overflows(Recipe):
        def compute_forward(self, batch, stage):
            hidden = super().compute_forward(batch, stage)
            large = 1e7 if stage is Stage.TRAIN and batch[0][0] in (17, 18, 19) else 1.0
            return (self.modules.last(hidden) * large) / large

    def overflowing(folder, **options):
        brain = make(
            folder, Overflows, precision="fp16", init_scale=2.0, min_scale=2.0, nonfinite_patience=2, **options
        )
        brain.modules["last"] = nn.Linear(1, 1, device=DEVICE)
        return brain

    data = batches(bad=())
    with pytest.raises(NonfiniteError):
        fit(overflowing(tmp_path / "off", on_spike="off"), data, epochs=1)
    brain = fit(overflowing(tmp_path / "on", on_spike="wider_precision"), data, epochs=1)
    assert brain.summary.went_back == 1 and brain.optimizer_step == 24
    assert brain.scaler.state_dict()["scale"] == 2.0


def test_at_the_limit_patience_ends_the_run_as_ever(tmp_path):
    data = [*batches(), *with_nan(*range(24))]
    brain = make(tmp_path, spike_limit=1, spike_steps=1)
    with pytest.raises(NonfiniteError):
        fit(brain, data, epochs=1)
    assert brain.summary.went_back == 1 and brain.summary.spikes == 2


def test_in_fp16_ordinary_back_off_is_no_spike(tmp_path):
    brain = fit(
        make(tmp_path, precision="fp16", init_scale=2.0**24, on_spike="wider_precision"),
        Samples(None),
        epochs=1,
        batch_size=BATCH,
    )
    assert brain.skipped_steps > 3 and brain.summary.spikes == 0
