"""What loggers hear of a stage, and what the summary adds up."""

import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from amp_recipes.loggers import run_log
from amp_recipes.loggers.run_log import RunLog, device_peak_memory, process_peak_memory
from amp_recipes.records import Logger, RunSummary

CPU = torch.device("cpu")


class Ear(Logger):
    """Keeps all that it is told, in order."""

    def __init__(self, fails=None):
        self.heard = []
        self.fails = fails

    def start_stage(self, stage, epoch, batches):
        self.heard.append(("start", stage, epoch, batches))

    def advance(self, step):
        self.heard.append(("advance", step))

    def log_step(self, record):
        self.heard.append(("step", record))

    def log_stage(self, record):
        self.heard.append(("stage", record))

    def log_summary(self, summary):
        self.heard.append(("summary", summary))

    def close(self):
        self.heard.append(("close",))
        if self.fails:
            raise self.fails

    def records(self, kind):
        return [entry[1] for entry in self.heard if entry[0] == kind]


@pytest.fixture
def clock(monkeypatch):
    """Stands still until it is moved, in seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(run_log, "time", SimpleNamespace(perf_counter=lambda: clock.now, time=lambda: 1e9))
    return clock


def make(*ears, interval=1):
    return RunLog(ears, RunSummary("fp32", "fp32", "ieee", "cpu"), CPU, interval)


def update(log, step=1, **changes):
    values = {
        "step": step,
        "loss": 0.5,
        "lr": {"o": 0.1},
        "grad_norm": 2.0,
        "scale": None,
        "skipped": False,
        "optimizer_step": 9,
        "skipped_steps": 1,
        "samples": 4,
    }
    log.log_update(**{**values, **changes})


def test_every_logger_hears_the_same_in_the_order_of_the_calls(clock):
    ears = Ear(), Ear()
    log = make(*ears)
    log.start_stage("train", 2, 5)
    log.advance(1, 4)
    update(log)
    log.advance(2, 8)
    log.end_stage(0.5, {}, optimizer_step=3)
    log.log_summary()
    log.close()
    expected = ["start", "advance", "step", "advance", "stage", "summary", "close"]
    assert [entry[0] for entry in ears[0].heard] == expected
    assert ears[0].heard == ears[1].heard
    assert ears[0].heard[0] == ("start", "train", 2, 5)
    assert ears[0].records("advance") == [1, 3]


def test_a_step_record_holds_what_the_loop_said_and_the_clock_of_the_stage(clock):
    ear = Ear()
    log = make(ear)
    log.start_stage("train", 2, None)
    log.advance(3, 24)
    clock.now += 4.0
    update(log, step=3, grad_norm=None, scale=1024.0, skipped=True, optimizer_step=7)
    (record,) = ear.records("step")
    assert record.as_dict() == {
        "kind": "step",
        "stage": "train",
        "epoch": 2,
        "step": 3,
        "optimizer_step": 7,
        "loss": 0.5,
        "lr": {"o": 0.1},
        "grad_norm": None,
        "scale": 1024.0,
        "skipped": True,
        "skipped_steps": 1,
        "samples": 4,
        "samples_per_second": 6.0,
        "seconds": 4.0,
        "memory_bytes": None,
        "wall_time": 1e9,
    }


def test_a_stage_tells_how_long_it_waited_for_batches(clock):
    def slow():
        for batch in range(3):
            clock.now += 2.0
            yield batch

    ear = Ear()
    log = make(ear)
    log.start_stage("train", 1, None, seconds_done=10.0, data_seconds_done=7.0)
    for _ in log.timed(slow()):
        clock.now += 5.0
    assert log.so_far["data_seconds_done"] == 13.0
    log.end_stage(0.5, {}, optimizer_step=3)
    log.start_stage("valid", 1, None)
    log.end_stage(0.5, {}, optimizer_step=3)
    train, valid = ear.records("stage")
    assert (train.data_seconds, train.seconds, train.optimizer_step, train.wall_time) == (13.0, 31.0, 3, 1e9)
    assert valid.data_seconds == 0.0


def test_a_run_that_ends_inside_a_stage_counts_what_was_done_of_it(clock):
    ear = Ear()
    log = make(ear)
    log.start_stage("train", 1, None)
    log.advance(2, 8)
    clock.now += 4.0
    log.log_summary()
    log.count_training()
    log.log_summary()
    log.end_stage(0.5, {}, optimizer_step=2)
    log.log_summary()
    told = [
        (it.seconds, it.training_seconds, it.samples, it.samples_per_second, it.epochs) for it in ear.records("summary")
    ]
    assert told == [(4.0, 4.0, 8, 2.0, 0), (4.0, 4.0, 8, 2.0, 1), (4.0, 4.0, 8, 2.0, 1)]


def test_before_the_clock_has_moved_the_rate_is_0(clock):
    ear = Ear()
    log = make(ear)
    log.start_stage("train", 1, None)
    log.advance(1, 4)
    update(log)
    assert ear.records("step")[0].samples_per_second == 0.0


def test_a_stage_record_counts_its_own_stage_alone(clock):
    ear = Ear()
    log = make(ear)
    log.start_stage("train", 1, None)
    log.advance(2, 8)
    clock.now += 5.0
    log.end_stage(0.5, {}, optimizer_step=3)
    log.start_stage("valid", 1, None)
    log.advance(1, 3)
    clock.now += 2.0
    log.end_stage(0.25, {"acc": 0.75}, optimizer_step=3)
    train, valid = ear.records("stage")
    assert (train.stage, train.loss, train.batches, train.samples, train.seconds) == ("train", 0.5, 2, 8, 5.0)
    assert (valid.stage, valid.loss, valid.batches, valid.samples, valid.seconds) == ("valid", 0.25, 1, 3, 2.0)
    assert (valid.epoch, valid.metrics) == (1, {"acc": 0.75})


def test_a_stage_resumed_in_the_middle_counts_on_from_the_batches_done():
    ear = Ear()
    log = make(ear)
    log.start_stage("train", 1, 10, batches_done=6)
    log.advance(1, 4)
    assert ear.records("advance") == [7]


def test_a_stage_that_saw_nothing_finite_has_no_loss():
    for loss, recorded in [(math.nan, None), (math.inf, math.inf), (0.0, 0.0)]:
        ear = Ear()
        log = make(ear)
        log.start_stage("valid", 1, None)
        log.end_stage(loss, {}, optimizer_step=3)
        assert ear.records("stage")[0].loss == recorded


def test_the_summary_adds_up_stages_and_of_training_its_samples(clock):
    log = make()
    for epoch, (train, valid) in enumerate([(4.0, 1.0), (6.0, 2.0)], 1):
        log.start_stage("train", epoch, None)
        log.advance(2, 50)
        clock.now += train
        log.count_training()
        log.end_stage(1.0 / epoch, {}, optimizer_step=3)
        log.start_stage("valid", epoch, None)
        log.advance(1, 1000)
        clock.now += valid
        log.end_stage(2.0 / epoch, {"acc": 0.5 * epoch}, optimizer_step=3)
    summary = log.summary
    assert (summary.epochs, summary.samples, summary.training_seconds, summary.seconds) == (2, 100, 10.0, 13.0)
    assert summary.samples_per_second == 10.0
    assert summary.last == {"train": {"loss": 0.5}, "valid": {"loss": 1.0, "acc": 1.0}}


def test_the_metrics_of_a_record_are_not_the_recipes_own_dict():
    ear = Ear()
    log = make(ear)
    log.start_stage("valid", 1, None)
    metrics = {"acc": 0.5}
    log.end_stage(1.0, metrics, optimizer_step=3)
    metrics["acc"] = 0.0
    assert ear.records("stage")[0].metrics == {"acc": 0.5}
    assert log.summary.last["valid"] == {"loss": 1.0, "acc": 0.5}


def test_the_device_is_asked_for_its_memory_at_intervals(monkeypatch, subtests):
    for interval, asked in {1: 7, 3: 3, 0: 7, 100: 1}.items():
        with subtests.test(interval):
            answers = []
            monkeypatch.setattr(
                run_log, "device_peak_memory", lambda device, to=answers: to.append(device) or 100 + len(to)
            )
            ear = Ear()
            log = make(ear, interval=interval)
            log.start_stage("train", 1, None)
            for index in range(7):
                update(log, index)
            assert answers == [CPU] * asked
            step = max(1, interval)
            assert [record.memory_bytes for record in ear.records("step")] == [101 + i // step for i in range(7)]


def test_the_peak_is_the_devices_where_it_tells_and_else_the_processes(monkeypatch):
    monkeypatch.setattr(run_log, "process_peak_memory", lambda: 456)
    for device, peak, of in [(123, 123, "device"), (0, 0, "device"), (None, 456, "process")]:
        monkeypatch.setattr(run_log, "device_peak_memory", lambda _, device=device: device)
        ear = Ear()
        log = make(ear)
        log.log_summary()
        assert ear.records("summary") == [log.summary]
        assert (log.summary.peak_memory_bytes, log.summary.peak_memory_of) == (peak, of)


def test_every_logger_is_closed_also_where_one_fails_and_the_failure_is_told():
    ears = Ear(), Ear(fails=OSError("disk full")), Ear()
    with pytest.raises(OSError, match="disk full"):
        make(*ears).close()
    assert [ear.heard for ear in ears] == [[("close",)]] * 3


def test_a_cpu_tells_no_peak_of_its_own():
    assert device_peak_memory(CPU) is None


def test_the_processes_peak_is_in_bytes_as_the_kernel_counts():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("only Linux tells in /proc")
    high_water = int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    # The peak also remembers the process that started this one, before it became this one.
    assert 0.9 * high_water < process_peak_memory() < 100 * high_water
