"""A run that ends at any place goes on as if it had not: the same samples, draws, weights and metrics, bit for bit."""

import copy
import functools
import json
import os
import pty
import random
import signal
import sys
import time

import numpy as np
import pytest
import torch
from device import DEVICE
from end_of_run import everything
from inside import run_of
from pairwise import each_once
from programs import DEADLINE_SECONDS, Program
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from amp_recipes import Brain, EpochCounter, Stage
from amp_recipes.errors import CheckpointError, NonfiniteError
from amp_recipes.interrupts import RunInterrupted

SAMPLES, BATCH, EPOCHS = 22, 4, 3


class Noisy(Dataset):
    """Each sample draws from every global generator, as augmentation does."""

    def __init__(self):
        self.x = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = torch.randn(3) + random.random() + np.random.rand()
        return index, self.x[index] + 0.1 * noise.float(), self.x[index].sum()


class Stream(IterableDataset):
    """Knows its place."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < SAMPLES:
            self.place += 1
            index = (7 * self.place) % SAMPLES
            yield index, torch.full((3,), float(index)), torch.tensor(1.0)
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class Died(Exception):
    pass


class Journal:
    """What happened, kept where no checkpoint finds it."""

    def __init__(self):
        self.lines = []


class Recipe(Brain):
    """Everything that could be lost: dropout, statistics, a counter over the epoch, draws in a hook."""

    ends_at: tuple = ()  # (stage, number of the batch of that stage, over all epochs)
    end_by: object = None

    def compute_forward(self, batch, stage):
        self.count[stage] += 1
        if (stage, self.count[stage]) == self.ends_at:
            self.end_by()
        self.journal.lines.append((stage.name, batch[0].tolist()))
        return self.modules.model(batch[1])

    def compute_objectives(self, predictions, batch, stage):
        self.mean_index += batch[0].double().mean()
        return nn.functional.mse_loss(predictions.squeeze(1).float(), batch[2])

    def on_stage_start(self, stage, epoch=None):
        self.mean_index = torch.zeros((), dtype=torch.float64, device=self.device)
        self.luck = torch.rand(()).item()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        return {"mean_index": self.mean_index.item(), "luck": self.luck}


def make(output_folder=None, ends_at=(), end_by=None, **options):
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 1))
    hparams = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)}
    brain = Recipe(
        {"model": model},
        lambda parameters: torch.optim.AdamW(parameters, 0.01),
        hparams,
        {"device": DEVICE, "noprogressbar": True, "seed": 5, "output_folder": output_folder, **options},
    )
    brain.count = {Stage.TRAIN: 0, Stage.VALID: 0}
    brain.journal, brain.ends_at, brain.end_by = Journal(), ends_at, end_by
    return brain


def dataset():
    return Noisy(), {"batch_size": BATCH, "shuffle": True}


def dataset_with_workers():
    return Noisy(), {"batch_size": BATCH, "shuffle": True, "num_workers": 2}


def plain_loader():
    return DataLoader(Noisy(), batch_size=BATCH, shuffle=True), {}


def batches():
    made = Noisy()
    fixed = [(i, torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(i))) for i in range(6)]
    return [(torch.full((BATCH,), i), x, made.x[:BATCH].sum(1)) for i, x in fixed], {}


def stream():
    return Stream(), {"batch_size": BATCH}


SOURCES = [dataset, dataset_with_workers, plain_loader, batches, stream]


def fit(brain, source=dataset):
    train, kwargs = source()
    brain.fit(EpochCounter(EPOCHS), train, Noisy(), train_loader_kwargs=kwargs, valid_loader_kwargs={"batch_size": 8})
    brain.end = everything(brain)
    return brain


@functools.cache
def whole_run(source=dataset, **options):
    """The Brain of a run that nothing ended."""
    return fit(make(**options), source)


def die():
    raise Died


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def interrupted(folder, ends_at, source=dataset, by=die, **options):
    """The run until it ends at `ends_at`, and again until the end: the second brain, and both brains' samples."""
    options = {"ckpt_interval_steps": 1, **options}
    first = make(str(folder), ends_at, by, **options)
    with pytest.raises((Died, RunInterrupted)):
        fit(first, source)
    second = fit(make(str(folder), **options), source)
    return second, [first.journal.lines, second.journal.lines]


@pytest.mark.parametrize(
    ("source", "ends_at", "precision"), each_once(SOURCES, [2, 6, 7, 9, 13], ["fp32", "bf16", "fp16"])
)
def test_a_run_that_dies_in_training_goes_on_bit_for_bit(tmp_path, source, ends_at, precision):
    whole = whole_run(source, precision=precision)
    resumed, (before, after) = interrupted(tmp_path, (Stage.TRAIN, ends_at), source, precision=precision)
    assert resumed.end == whole.end
    assert before + after == whole.journal.lines  # a checkpoint after each update: no sample twice, none left out


OPTIONS = [
    {"precision": "fp16", "init_scale": 2.0**10, "growth_interval": 3},
    {"precision": "bf16", "ema_decay": 0.9},
    {"grad_accumulation_factor": 4},
    {"ckpt_background": False},
    {"lr_scheduler_interval": "epoch", "early_stop_metric": "mean_index", "early_stop_mode": "max"},
    {"ckpt_interval_steps": 4},
]


@pytest.mark.parametrize(
    ("options", "ends_at"),
    each_once(OPTIONS, [(Stage.TRAIN, 10), (Stage.VALID, 5)]),
    ids=lambda it: "-".join(it) if isinstance(it, dict) else str(it),
)
def test_whatever_the_options(tmp_path, options, ends_at):
    whole = fit(make(str(tmp_path / "whole"), **options))
    resumed, _ = interrupted(tmp_path / "run", ends_at, **options)
    assert resumed.end == whole.end


def test_a_run_that_dies_twice_in_an_epoch_is_still_aligned(tmp_path):
    for source in (dataset, plain_loader):
        folder = str(tmp_path / source.__name__)
        for ends_at in (8, 3):  # the second counts from where the first ended
            with pytest.raises(Died):
                fit(make(folder, (Stage.TRAIN, ends_at), die, ckpt_interval_steps=1), source)
        assert fit(make(folder), source).end == whole_run(source).end


@pytest.mark.parametrize("ends_at", [(Stage.TRAIN, 1), (Stage.TRAIN, 6), (Stage.TRAIN, 9), (Stage.TRAIN, 18)], ids=str)
def test_a_signal_finishes_the_step_saves_and_loses_nothing(tmp_path, ends_at):
    whole = whole_run()
    resumed, (before, after) = interrupted(tmp_path, ends_at, by=terminate, ckpt_interval_steps=0)
    assert resumed.end == whole.end
    assert before + after == whole.journal.lines


@pytest.mark.parametrize(("ends_at", "options"), each_once([1, 3, 5, 9], [{}, {"ema_decay": 0.9}]))
def test_a_signal_in_a_validation_repeats_only_that(tmp_path, ends_at, options):
    whole = whole_run(**options)
    ends = (Stage.VALID, ends_at)
    resumed, (before, after) = interrupted(tmp_path, ends, by=terminate, ckpt_interval_steps=0, **options)
    assert resumed.end == whole.end
    assert [ids for stage, ids in before + after if stage == "TRAIN"] == [
        ids for stage, ids in whole.journal.lines if stage == "TRAIN"
    ]


def test_the_codes_of_exit_are_those_of_the_signals(tmp_path):
    with pytest.raises(RunInterrupted) as ended:
        fit(make(str(tmp_path), (Stage.TRAIN, 3), terminate))
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("stage", [Stage.TRAIN, Stage.VALID], ids=lambda stage: stage.name)
def test_a_signal_that_means_save_and_go_on_does_so(tmp_path, stage, caplog):
    at = 3 if stage is Stage.TRAIN else 1
    brain = make(str(tmp_path), (stage, at), save_on_request, save_signals=["SIGUSR1"], ckpt_background=False)
    saved = []
    run_of(brain).checkpoints.save_inside_epoch = watched(run_of(brain).checkpoints.save_inside_epoch, saved)
    fit(brain)
    assert brain.end == whole_run().end and brain.journal.lines == whole_run().journal.lines
    # In a validation it waits for the next window.
    assert [(meta["epoch"], meta["step"]) for meta in saved] == [(1, 3) if stage is Stage.TRAIN else (2, 1)]
    assert f"SIGUSR1: train epoch {saved[0]['epoch']}, batch {saved[0]['step']}: saving" in caplog.text


def save_on_request():
    os.kill(os.getpid(), signal.SIGUSR1)


def watched(save, saved):
    return lambda meta: [saved.append(meta), save(meta)]


def test_a_signal_that_means_save_and_go_on_says_where_nothing_can_be_saved(caplog):
    brain = make(None, (Stage.TRAIN, 3), save_on_request, save_signals=["SIGUSR1"])
    assert fit(brain).end == whole_run().end
    assert caplog.text.count("SIGUSR1") == 1 and "SIGUSR1: not saved, because there is no output_folder" in caplog.text


def test_a_terminal_that_closes_loses_nothing(tmp_path):
    """Whatever writes to it fails from then on; its session is sent SIGHUP."""
    master, slave = pty.openpty()
    script = f"""
import os, signal, sys
terminal = os.open({os.ttyname(slave)!r}, os.O_RDWR)  # the first that a new session opens is its own
for stream in (0, 1, 2):
    os.dup2(terminal, stream)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
sys.path[:0] = {sys.path!r}
import test_resume
from inside import run_of
from amp_recipes import Stage
def wait():
    open({str(tmp_path / "ready")!r}, "w").close()
    while run_of(brain).interrupts.requested is None:
        signal.pause()
brain = test_resume.make({str(tmp_path / "run")!r}, (Stage.TRAIN, 3), wait, noprogressbar=False)
test_resume.fit(brain)
"""
    program = Program("-c", script, start_new_session=True)
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline and program.poll() is None
            time.sleep(0.01)
        os.close(slave)
        os.close(master)
        assert program.wait(DEADLINE_SECONDS) == 128 + signal.SIGHUP
    finally:
        program.kill()
    assert fit(make(str(tmp_path / "run"))).end == whole_run().end


def test_a_signal_in_evaluate_ends_it(tmp_path):
    brain = fit(make(str(tmp_path)))
    brain.count[Stage.TEST] = 0
    brain.ends_at, brain.end_by = (Stage.TEST, 2), terminate
    with pytest.raises(RunInterrupted) as ended:
        brain.evaluate(Noisy(), test_loader_kwargs={"batch_size": BATCH})
    assert ended.value.code == 143 and brain.count[Stage.TEST] == 2
    again = make(str(tmp_path))
    again.count[Stage.TEST] = 0
    assert again.evaluate(Noisy(), test_loader_kwargs={"batch_size": BATCH}) > 0


def test_a_signal_without_an_output_folder_ends_the_run_and_says_that_nothing_is_saved(caplog):
    with pytest.raises(RunInterrupted):
        fit(make(None, (Stage.TRAIN, 3), terminate))
    assert "no output_folder" in caplog.text


def test_an_overflow_before_and_after_the_resume_gives_the_same_scales(tmp_path):
    def scales(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [record for record in map(json.loads, lines) if record["kind"] == "step"]
        return {(record["epoch"], record["step"]): (record["scale"], record["skipped_steps"]) for record in records}

    options = {"precision": "fp16", "init_scale": 2.0**17, "growth_interval": 2, "log_interval_steps": 1}
    whole = fit(make(str(tmp_path / "whole"), **options))
    resumed, _ = interrupted(tmp_path / "run", (Stage.TRAIN, 9), **options)
    assert whole.skipped_steps > 0, "the scale has to be too high at first for this to show anything"
    assert scales(tmp_path / "run") == scales(tmp_path / "whole")
    assert resumed.end == whole.end


def test_resume_never_sets_the_old_checkpoints_aside(tmp_path):
    fit(make(str(tmp_path)))
    old = sorted(path.name for path in (tmp_path / "save").glob("CKPT*"))
    afresh = fit(make(str(tmp_path), resume="never"))
    assert afresh.count[Stage.TRAIN] == EPOCHS * 6
    assert sorted(path.name for path in (tmp_path / "save.1").glob("CKPT*")) == old
    assert list((tmp_path / "save").glob("CKPT*"))


def test_resume_must_refuses_a_folder_without_checkpoints(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        fit(make(str(tmp_path), resume="must"))
    with pytest.raises(CheckpointError, match="no output_folder"):
        fit(make(resume="must"))


@pytest.mark.parametrize("options", [{}, {"ema_decay": 0.9}], ids=["plain", "ema"])
def test_init_from_begins_with_the_weights_that_another_run_evaluates(tmp_path, options):
    other = fit(make(str(tmp_path / "one"), **options))
    expected = dict(other.modules.state_dict())
    if options:
        expected.update(run_of(other).ema.state_dict())
    newest = max((tmp_path / "one" / "save").glob("CKPT*"))
    begins = make(str(tmp_path / "two"), (Stage.TRAIN, 1), die, init_from=str(newest), **options)
    with pytest.raises(Died):
        fit(begins)
    live = begins.modules.state_dict()
    # The statistics have moved with the first forward; parameters have not.
    assert all(torch.equal(live[name], expected[name]) for name, _ in begins.modules.named_parameters())
    assert begins.optimizer_step == 0


def test_init_from_a_folder_without_a_run_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        fit(make(str(tmp_path / "two"), init_from=str(tmp_path / "nowhere")))


def test_init_from_another_model_lists_what_differs_and_loads_nothing(tmp_path):
    fit(make(str(tmp_path / "one")))
    brain = make(init_from=str(tmp_path / "one"))
    brain.modules["model"][0] = nn.Linear(3, 9)
    before = {name: value.clone() for name, value in brain.modules.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"model\.0\.weight"):
        fit(brain)
    assert all(torch.equal(before[name], value) for name, value in brain.modules.state_dict().items())


@pytest.mark.parametrize("background", [False, True])
def test_a_parameter_that_is_nan_does_not_replace_a_good_checkpoint(tmp_path, background):
    class Breaks(Recipe):
        def on_stage_end(self, stage, stage_loss, epoch=None):
            if stage is Stage.VALID and epoch == 2:
                with torch.no_grad():
                    self.modules.model[0].weight[0, 0] = torch.nan

    brain = make(str(tmp_path), ckpt_background=background)
    brain.__class__ = Breaks
    # In the background it is told at the next save, which the nonfinite updates may forestall.
    with pytest.raises((CheckpointError, NonfiniteError) if background else CheckpointError) as raised:
        fit(brain)
    assert background or "model.0.weight" in str(raised.value)
    newest = make(str(tmp_path))
    run_of(newest).resume.from_newest()
    assert all(p.isfinite().all() for p in newest.modules.parameters())


@pytest.mark.parametrize(("ends_at", "interval"), each_once([(Stage.TRAIN, 9), (Stage.VALID, 5)], [0, 1]), ids=str)
def test_a_loaders_own_generator_goes_on_from_epoch_to_epoch(tmp_path, ends_at, interval):
    def own_generator():
        generator = torch.Generator().manual_seed(3)
        return DataLoader(Noisy(), batch_size=BATCH, shuffle=True, generator=generator), {}

    whole = fit(make(), own_generator)
    resumed, _ = interrupted(tmp_path, ends_at, own_generator, ckpt_interval_steps=interval)
    assert resumed.end == whole.end
    epochs = [ids for stage, ids in whole.journal.lines if stage == "TRAIN"]
    assert epochs[:6] != epochs[6:12], "the order has to change with the epoch for this to show anything"


class Gan(Recipe):
    """The generator's loss leaves gradients on the critic, which its next step adds to; a teacher follows."""

    def init_optimizers(self):
        model = self.modules.model
        self.optimizers_dict = {
            "critic": torch.optim.Adam(model[4].parameters(), 0.01),
            "generator": torch.optim.Adam(model[0].parameters(), 0.01),
        }
        self.optimizer = self.optimizers_dict["critic"]
        self.teacher = copy.deepcopy(model)

    def fit_batch(self, batch):
        for name in ("critic", "generator"):
            with self.training_ctx:
                predictions = self.compute_forward(batch, Stage.TRAIN)
                loss = self.compute_objectives(predictions, batch, Stage.TRAIN)
                loss = loss + (self.teacher[0](batch[1]) - self.modules.model[0](batch[1])).square().mean()
            self.backward(loss)
            self.optimizers_step(name)
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.modules.model.parameters(), strict=True):
                mine.data.lerp_(its, 0.1)
        self.lens = [*getattr(self, "lens", []), len(batch[0])]
        return loss.detach()

    def on_stage_end(self, stage, stage_loss, epoch=None):
        metrics = super().on_stage_end(stage, stage_loss, epoch)
        return {**metrics, "teacher": self.teacher[0].weight.sum().item(), "lens": len(self.lens)}


@pytest.mark.parametrize(
    ("ends_at", "by"),
    each_once([(Stage.TRAIN, 4), (Stage.TRAIN, 7), (Stage.TRAIN, 17), (Stage.VALID, 5)], [die, terminate]),
    ids=lambda it: getattr(it, "__name__", str(it)),
)
def test_gradients_that_wait_and_modules_of_the_recipe_are_kept(tmp_path, monkeypatch, ends_at, by):
    monkeypatch.setitem(globals(), "Recipe", Gan)
    whole = fit(make())
    resumed, _ = interrupted(tmp_path, ends_at, by=by)
    assert resumed.end == whole.end and resumed.lens == whole.lens


def two_fits(folder, ends_at=(), by=None):
    brain = make(str(folder), ends_at, by, ckpt_interval_steps=1)
    fit(brain)
    fit(brain)
    return brain


@pytest.fixture(scope="module")
def whole_two_fits(tmp_path_factory):
    return two_fits(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("ends_at", [22, *(pytest.param(it, marks=pytest.mark.extended) for it in (4, 18, 19, 36))])
def test_of_two_fits_in_one_script_the_one_that_died_goes_on(tmp_path, whole_two_fits, ends_at):
    with pytest.raises(Died):
        two_fits(tmp_path, (Stage.TRAIN, ends_at), die)
    assert two_fits(tmp_path).end == whole_two_fits.end


@pytest.mark.parametrize("by", [die, terminate], ids=lambda by: by.__name__)
def test_the_same_brain_may_fit_again_after_its_run_ended(tmp_path, by):
    """As in a notebook, or a loop that tries again."""
    brain = make(str(tmp_path), (Stage.TRAIN, 9), by, ckpt_interval_steps=1)
    epochs, (train, kwargs) = EpochCounter(EPOCHS), dataset()
    for _ in range(2):
        try:
            brain.fit(epochs, train, Noisy(), train_loader_kwargs=kwargs, valid_loader_kwargs={"batch_size": 8})
        except (Died, RunInterrupted):
            continue
    assert everything(brain) == whole_run().end


@pytest.mark.parametrize("ends_at", [5, 6, 7])
def test_a_signal_at_the_last_update_still_gets_its_validation(tmp_path, ends_at):
    options = {"optimizer_step_limit": 7, "ckpt_interval_steps": 0}
    resumed, _ = interrupted(tmp_path, (Stage.TRAIN, ends_at), by=terminate, **options)
    assert resumed.end == whole_run(optimizer_step_limit=7).end


def test_an_evaluation_when_a_validation_starts_does_not_end_it(tmp_path, monkeypatch):
    class Evaluates(Recipe):
        def on_stage_start(self, stage, epoch=None):
            super().on_stage_start(stage, epoch)
            if stage is Stage.VALID:
                self.count[Stage.TEST] = 0
                self.evaluate([(torch.arange(4), torch.ones(4, 3), torch.ones(4))])

    monkeypatch.setitem(globals(), "Recipe", Evaluates)
    whole = fit(make())
    resumed, _ = interrupted(tmp_path, (Stage.VALID, 4), by=terminate, ckpt_interval_steps=0)
    assert resumed.end == whole.end


def test_a_signal_whose_save_fails_still_ends_the_run_with_its_code_and_says_so(tmp_path, monkeypatch, caplog):
    brain = make(str(tmp_path), (Stage.TRAIN, 3), terminate)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(RunInterrupted) as ended:
        fit(brain)
    assert ended.value.code == 143 and "NOT saved" in caplog.text and "disk is full" in caplog.text


def test_the_records_know_every_update_that_a_checkpoint_knows(tmp_path):
    with pytest.raises(Died):
        fit(make(str(tmp_path), (Stage.TRAIN, 6), on_the_spot(tmp_path), ckpt_interval_steps=2))


def on_the_spot(folder):
    """What a kill would leave: looked at before anything is closed."""

    def look():
        steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [record["optimizer_step"] for record in steps if record["kind"] == "step"] == [1, 2, 3, 4]
        raise Died

    return look


@pytest.mark.parametrize("ends_at", [(Stage.TRAIN, 6), (Stage.TRAIN, 9), (Stage.VALID, 2)], ids=str)
def test_a_resumed_run_has_each_record_once(tmp_path, ends_at):
    def told(name):
        records = map(json.loads, (tmp_path / name).read_text().splitlines())
        measured = {"seconds", "data_seconds", "samples_per_second", "time", "wall_time", "memory_bytes"}
        return [{key: it for key, it in record.items() if key not in measured} for record in records]

    options = {"ckpt_interval_steps": 4, "log_interval_steps": 1}
    fit(make(str(tmp_path / "whole"), **options))
    with pytest.raises(Died):
        fit(make(str(tmp_path / "run"), ends_at, die, **options))
    logged = told("run/metrics.jsonl")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    fit(make(str(tmp_path / "run"), **options))
    assert told("run/metrics.jsonl") == told("whole/metrics.jsonl")
    again = told("run/metrics.taken_again.jsonl")
    assert again and again == logged[-len(again) :]


def test_resume_never_sets_the_records_aside_too(tmp_path):
    fit(make(str(tmp_path)))
    old = (tmp_path / "metrics.jsonl").read_text()
    fit(make(str(tmp_path), resume="never"))
    assert (tmp_path / "metrics.1.jsonl").read_text() == old
    new = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in new if record["kind"] == "stage"] == [1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("ends_at", [4, 9])
def test_a_seeded_generator_of_the_data_set_goes_on_where_there_are_no_workers(tmp_path, ends_at):
    class Own(Noisy):
        def __init__(self):
            super().__init__()
            self.rng = np.random.default_rng(5)

        def __getitem__(self, index):
            return index, self.x[index] + float(self.rng.random()), self.x[index].sum()

    def own():
        return Own(), {"batch_size": BATCH, "shuffle": True}

    whole = fit(make(), own)
    resumed, _ = interrupted(tmp_path, (Stage.TRAIN, ends_at), own)
    assert resumed.end == whole.end


def test_a_schedule_that_is_over_is_said(tmp_path, caplog):
    brain = make(str(tmp_path))
    brain.hparams.lr_scheduler = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.0)
    fit(brain)
    again = make(str(tmp_path))
    again.hparams.lr_scheduler = brain.hparams.lr_scheduler
    fit(again)
    assert "every learning rate is 0" in caplog.text and "--init_from" in caplog.text


class Slow(Noisy):
    """Its sample 3 takes longer than anybody would wait for after a signal."""

    def __getitem__(self, index):
        if index == 3 and self.slow:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(3600)
        return super().__getitem__(index)


def test_a_signal_does_not_wait_for_a_slow_batch(tmp_path):
    def slow():
        data = Slow()
        data.slow = True
        return data, {"batch_size": BATCH, "shuffle": True, "num_workers": 1}

    with pytest.raises(RunInterrupted) as ended:  # the loader's own limit, of 300 s, would be another error
        fit(make(str(tmp_path)), slow)
    assert ended.value.code == 143
    assert fit(make(str(tmp_path))).end == whole_run().end
