"""Loggers: one contract for all of them, then what each one shows, writes and survives."""

from __future__ import annotations

import gc
import inspect
import io
import json
import logging
import math
import os
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
from pairwise import pairwise
from programs import DEADLINE_SECONDS
from tqdm import TMonitor, tqdm
from work import at_most

from amp_recipes.errors import ConfigError
from amp_recipes.loggers import EpochLogger, JsonlLogger, ProgressLogger, SummaryLogger, format_summary, progress
from amp_recipes.loggers.text import format_bytes, format_rate, format_seconds, format_value
from amp_recipes.records import SCHEMA_VERSION, Logger, RunSummary, StageRecord, StepRecord

STEP = StepRecord(
    stage="train",
    epoch=3,
    step=20,
    optimizer_step=120,
    loss=0.123456,
    lr={"optimizer": 1e-3},
    grad_norm=2.5,
    scale=None,
    skipped=False,
    skipped_steps=0,
    samples=32,
    samples_per_second=1234.5,
    seconds=0.5,
    memory_bytes=None,
    wall_time=1e9,
)
STAGE = StageRecord(
    stage="train",
    epoch=3,
    loss=0.25,
    metrics={"accuracy": 0.98},
    seconds=2.0,
    batches=100,
    samples=3200,
    optimizer_step=120,
    data_seconds=0.5,
    wall_time=1e9,
)
SUMMARY = RunSummary(precision="bf16", eval_precision="fp32", float32_precision="ieee", device="cpu")

ODD_STEPS = [
    STEP,
    replace(STEP, epoch=None, grad_norm=None, lr={}, samples_per_second=0.0),
    replace(STEP, loss=math.nan, grad_norm=math.inf, scale=65536.0, skipped=True, skipped_steps=4),
    replace(STEP, lr={"generator": 1e-4, "critic": 4e-4}, memory_bytes=1 << 33),
]
ODD_STAGES = [
    STAGE,
    replace(STAGE, loss=None, metrics={}, seconds=0.0, batches=0, samples=0, epoch=None, stage="test"),
    replace(STAGE, loss=math.inf, metrics={"wer": math.nan, "größe": -math.inf, "words": 7}),
]


class Terminal(io.StringIO):
    """A stream that says it is a terminal, and can tell what a person would see on it in the end."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        lines = [""]
        column = 0
        for character in self.getvalue():
            if character == "\n":
                lines.append("")
                column = 0
            elif character == "\r":
                column = 0
            else:
                line = lines[-1].ljust(column)
                lines[-1] = line[:column] + character + line[column + 1 :]
                column += 1
        return [line.rstrip() for line in lines if line.strip()]


LOGGERS: dict[str, Callable[[Path], Logger]] = {
    "progress on a terminal": lambda folder: ProgressLogger(2, Terminal()),
    "progress in a file": lambda folder: ProgressLogger(2, io.StringIO()),
    "epochs": lambda folder: EpochLogger(io.StringIO()),
    "jsonl": lambda folder: JsonlLogger(folder),
    "summary": lambda folder: SummaryLogger(folder, io.StringIO()),
    "summary without a folder": lambda folder: SummaryLogger(None, io.StringIO()),
}


@pytest.fixture
def every_logger(subtests, tmp_path):
    """Runs a function with each of `LOGGERS`."""

    def run(function: Callable[[Logger], None]) -> None:
        for index, (name, make) in enumerate(LOGGERS.items()):
            with subtests.test(name):
                logger = make(tmp_path / f"run {index}")
                try:
                    function(logger)
                finally:
                    logger.close()

    return run


@pytest.fixture
def clock(monkeypatch):
    """What tqdm takes for the time: it stands still until it is moved, in seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    return clock


def run_epoch(logger: Logger, steps: int = 20) -> None:
    logger.start_stage("train", 3, steps)
    for step in range(1, steps + 1):
        logger.advance(step)
        logger.log_step(replace(STEP, step=step, optimizer_step=100 + step))
    logger.log_stage(STAGE)


def lines_of(folder: Path) -> list[dict]:
    """The records of a folder, read by a parser that knows strict JSON only."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


# ---------------------------------------------------------------------------------------- every logger


def test_every_logger_has_the_methods_and_signatures_of_the_protocol(every_logger):
    def check(logger):
        for name, method in inspect.getmembers(Logger, inspect.isfunction):
            if not name.startswith("_"):
                assert inspect.signature(getattr(type(logger), name)) == inspect.signature(method), name

    every_logger(check)


def test_every_logger_takes_a_whole_run_with_missing_and_nonfinite_values(every_logger):
    def run(logger):
        for epoch, batches in product((1, 2, None), (4, None)):
            logger.start_stage("train", epoch, batches)
            for step, record in enumerate(ODD_STEPS, start=1):
                logger.advance(step)
                logger.log_step(record)
            for stage in ODD_STAGES:
                logger.log_stage(stage)
        logger.log_summary(replace(SUMMARY, last={"train": {"loss": math.nan}}, best={"wer": math.inf, "epoch": 1}))
        logger.close()
        logger.close()

    every_logger(run)


def test_every_logger_closes_in_the_middle_of_a_stage_and_takes_the_next_run(every_logger):
    def run(logger):
        logger.close()
        logger.start_stage("train", 1, 10)
        logger.advance(1)
        logger.close()
        run_epoch(logger)
        logger.log_summary(SUMMARY)
        logger.close()

    every_logger(run)


def test_every_logger_takes_a_stage_without_batches(every_logger):
    def run(logger):
        logger.start_stage("valid", 1, 0)
        logger.log_stage(replace(STAGE, stage="valid", loss=None, batches=0, samples=0, seconds=0.0))
        logger.close()

    every_logger(run)


@pytest.fixture
def no_later_complaints(monkeypatch):
    """Collecting the logger raises nothing, and tqdm's lock is free for bars of other threads."""
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", complaints.append)
    yield
    gc.collect()
    assert complaints == []
    other_bar = threading.Thread(target=lambda: tqdm(total=1, file=io.StringIO()).close(), daemon=True)
    other_bar.start()
    other_bar.join(timeout=DEADLINE_SECONDS)
    assert not other_bar.is_alive()


@pytest.mark.usefixtures("no_later_complaints")
@pytest.mark.parametrize(
    ("kind", "when", "make_stream"),
    pairwise([ProgressLogger, SummaryLogger], ["before", "within a stage"], [io.StringIO, Terminal]),
)
def test_a_closed_stream_ends_the_display_and_not_the_run(kind, when, make_stream):
    stream = make_stream()
    logger = ProgressLogger(1, stream) if kind is ProgressLogger else SummaryLogger(None, stream)
    if when == "within a stage":
        logger.start_stage("train", 1, 100)
        logger.advance(1)
    stream.close()
    run_epoch(logger)
    run_epoch(logger)
    logger.log_summary(SUMMARY)
    logger.close()


@pytest.mark.usefixtures("no_later_complaints")
@pytest.mark.parametrize("isatty", [True, False])
def test_a_pipe_that_nobody_reads_any_more_ends_the_display_and_not_the_run(isatty):
    class BrokenPipe(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(32, "Broken pipe")

        def isatty(self):
            return isatty

    for logger in (ProgressLogger(1, BrokenPipe()), SummaryLogger(None, BrokenPipe())):
        run_epoch(logger)
        logger.log_summary(SUMMARY)
        logger.close()


# -------------------------------------------------------------------------------------------- progress


def test_outside_a_terminal_there_is_a_line_per_interval_and_per_stage():
    stream = io.StringIO()
    logger = ProgressLogger(8, stream)
    run_epoch(logger, steps=20)
    assert stream.getvalue().splitlines() == [
        "epoch 3 train 8/20: loss 0.1235, lr 0.001, grad norm 2.5, 1,234 samples/s",
        "epoch 3 train 16/20: loss 0.1235, lr 0.001, grad norm 2.5, 1,234 samples/s",
        "epoch 3 train: loss 0.25, accuracy 0.98, 2.0 s, 1,600 samples/s",
    ]


def test_on_a_terminal_only_the_stage_lines_stay():
    terminal = Terminal()
    logger = ProgressLogger(8, terminal)
    run_epoch(logger)
    logger.start_stage("valid", 3, 5)
    logger.advance(5)
    logger.log_stage(replace(STAGE, stage="valid", loss=0.5, metrics={}))
    logger.close()
    assert terminal.screen() == [
        "epoch 3 train: loss 0.25, accuracy 0.98, 2.0 s, 1,600 samples/s",
        "epoch 3 valid: loss 0.5, 2.0 s, 1,600 samples/s",
    ]


def test_bar_shows_stage_position_and_latest_record(monkeypatch, clock):
    monkeypatch.setenv("COLUMNS", "200")
    terminal = Terminal()
    logger = ProgressLogger(1, terminal)
    logger.start_stage("train", 3, 40)
    logger.advance(10)
    logger.log_step(replace(STEP, loss=0.75))
    clock.now += 0.15  # longer than tqdm waits between two drawings
    logger.advance(30)
    (shown,) = terminal.screen()
    assert shown.startswith("epoch 3 train:  75%")
    assert "30/40" in shown
    assert "loss 0.75, lr 0.001, grad norm 2.5, 1,234 samples/s" in shown
    assert "scale" not in shown and "skipped" not in shown


def test_bar_of_a_stage_that_did_not_end_stays():
    terminal = Terminal()
    logger = ProgressLogger(1, terminal)
    logger.start_stage("train", 2, 40)
    logger.advance(30)
    logger.close()
    (shown,) = terminal.screen()
    assert shown.startswith("epoch 2 train:  75%")


def test_scale_and_skips_are_shown_in_fp16_and_skips_wherever_there_are_any():
    in_fp16 = progress.format_step(replace(STEP, scale=65536.0))
    assert in_fp16.endswith("scale 65536, skipped 0")
    assert progress.format_step(replace(STEP, skipped_steps=2)).endswith("skipped 2")
    assert "skipped" not in progress.format_step(STEP)


def test_several_optimizers_show_their_names():
    text = progress.format_step(replace(STEP, lr={"generator": 1e-4, "critic": 4e-4}))
    assert "lr generator 0.0001, lr critic 0.0004" in text


def test_steps_between_two_drawings_are_not_put_into_words(monkeypatch, clock):
    calls = []
    monkeypatch.setattr(progress, "format_step", lambda record: calls.append(record) or "")
    logger = ProgressLogger(1, Terminal())
    logger.start_stage("train", 1, None)
    for step in range(1, 1001):
        clock.now += 0.001
        logger.advance(step)
        logger.log_step(STEP)
    assert 9 <= len(calls) <= 11  # a tenth of a second from one to the next
    logger.close()


def test_no_thread_watches_the_bar():
    logger = ProgressLogger(1, Terminal())
    logger.start_stage("train", 1, 10)
    watchers = [thread for thread in threading.enumerate() if isinstance(thread, TMonitor)]
    assert [watcher for watcher in watchers if watcher.tqdm_cls.__module__ == progress.__name__] == []
    logger.close()


def test_characters_that_the_stream_cannot_show_are_escaped():
    raw = io.BytesIO()
    logger = ProgressLogger(1, io.TextIOWrapper(raw, encoding="ascii"))
    logger.log_stage(replace(STAGE, metrics={"größe": 1.0}))
    assert b"gr\\xf6\\xdfe 1" in raw.getvalue()


def test_without_progress_there_is_one_line_per_epoch_and_one_for_a_test():
    stream = io.StringIO()
    logger = EpochLogger(stream)
    for epoch in (1, 2):
        for stage in ("train", "valid"):
            logger.start_stage(stage, epoch, 3)
            logger.log_step(STEP)
            logger.log_stage(replace(STAGE, stage=stage, epoch=epoch))
    assert stream.getvalue().count("\n") == 1, "the second is not over"
    logger.start_stage("test", None, 3)
    logger.log_stage(replace(STAGE, stage="test", epoch=None))
    logger.close()
    result = "loss 0.25, accuracy 0.98, 2.0 s, 1,600 samples/s"
    assert stream.getvalue().splitlines() == [
        f"epoch 1: train {result}; valid {result}",
        f"epoch 2: train {result}; valid {result}",
        f"test {result}",
    ]


def test_interval_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"log_interval_steps is 0.*1 or more"):
        ProgressLogger(0)


# ----------------------------------------------------------------------------------------------- jsonl


def test_file_starts_with_a_header_and_holds_every_record(tmp_path):
    logger = JsonlLogger(tmp_path / "deep" / "run")
    run_epoch(logger, steps=3)
    logger.close()
    header, *records = lines_of(tmp_path / "deep" / "run")
    assert header["kind"] == "header"
    assert header["schema_version"] == SCHEMA_VERSION
    assert [record["kind"] for record in records] == ["step"] * 3 + ["stage"]
    assert records[2] == {
        "kind": "step",
        "stage": "train",
        "epoch": 3,
        "step": 3,
        "optimizer_step": 103,
        "loss": 0.123456,
        "lr": {"optimizer": 0.001},
        "grad_norm": 2.5,
        "scale": None,
        "skipped": False,
        "skipped_steps": 0,
        "samples": 32,
        "samples_per_second": 1234.5,
        "seconds": 0.5,
        "memory_bytes": None,
        "wall_time": 1e9,
    }
    assert records[3]["metrics"] == {"accuracy": 0.98}


def test_nonfinite_values_are_strings_in_strict_json(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.log_step(replace(STEP, loss=math.nan, grad_norm=math.inf, lr={"optimizer": -math.inf}))
    logger.log_stage(replace(STAGE, metrics={"wer": math.nan, "nested": {"list": [1, math.inf]}}))
    _, step, stage = lines_of(tmp_path)
    assert (step["loss"], step["grad_norm"], step["lr"]) == ("nan", "inf", {"optimizer": "-inf"})
    assert stage["metrics"] == {"wer": "nan", "nested": {"list": [1, "inf"]}}
    assert float(step["loss"]) != float(step["loss"])


def test_numbers_of_other_libraries_and_odd_keys_do_not_end_the_run(tmp_path):
    np = pytest.importorskip("numpy")
    logger = JsonlLogger(tmp_path)
    metrics = {"a": np.float32(0.5), "b": np.int64(3), "c": np.float32("nan"), ("d", 1): 1.0, "e": object}
    logger.log_stage(replace(STAGE, metrics=metrics))
    stage = lines_of(tmp_path)[1]
    assert stage["metrics"] == {"a": 0.5, "b": 3.0, "c": "nan", "('d', 1)": 1.0, "e": str(object)}


def test_floats_come_back_bit_for_bit(tmp_path):
    logger = JsonlLogger(tmp_path)
    losses = [0.1 + 0.2, 1e-308, 5e-324, 1 / 3, -0.0]
    for loss in losses:
        logger.log_step(replace(STEP, loss=loss))
    logger.close()
    assert [record["loss"].hex() for record in lines_of(tmp_path)[1:]] == [loss.hex() for loss in losses]


def test_steps_wait_in_memory_until_the_stage_ends(tmp_path):
    logger = JsonlLogger(tmp_path, flush_seconds=3600)
    logger.log_step(STEP)
    assert len(lines_of(tmp_path)) == 1
    logger.log_stage(STAGE)
    assert len(lines_of(tmp_path)) == 3


def test_steps_wait_no_longer_than_the_flush_interval(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("amp_recipes.loggers.jsonl.time.monotonic", lambda: now)
    logger = JsonlLogger(tmp_path, flush_seconds=5)
    logger.log_step(STEP)
    now = 104.9
    logger.log_step(STEP)
    assert len(lines_of(tmp_path)) == 1
    now = 105.0
    logger.log_step(STEP)
    assert len(lines_of(tmp_path)) == 4


def test_resumed_run_appends_under_the_same_header(tmp_path):
    for _ in range(2):
        logger = JsonlLogger(tmp_path)
        run_epoch(logger, steps=2)
        logger.close()
    assert [record["kind"] for record in lines_of(tmp_path)] == ["header", *["step", "step", "stage"] * 2]


WHOLE = json.dumps({"kind": "step", "step": 1})
HEADER = json.dumps({"kind": "header", "schema_version": SCHEMA_VERSION})


TORN = {
    "half": (f'{HEADER}\n{WHOLE}\n{{"kind": "st', ["header", "step"]),
    "no newline": (f"{HEADER}\n{WHOLE}", ["header", "step"]),
    "a number": (f"{HEADER}\n{WHOLE}\n1", ["header", "step"]),
    "zeros": (f"{HEADER}\n{WHOLE}\n" + "\0" * 300_000, ["header", "step"]),
    "long half": (f'{HEADER}\n{{"kind": "' + "x" * 300_000, ["header"]),
    "half a header": ('{"kind": "hea', ["header"]),
    "header alone": (HEADER, ["header"]),
    "empty": ("", ["header"]),
}


def test_line_that_a_crash_tore_is_repaired(tmp_path, subtests):
    for name, (torn, kept) in TORN.items():
        with subtests.test(name):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "metrics.jsonl").write_text(torn)
            logger = JsonlLogger(folder)
            logger.log_stage(STAGE)
            assert [record["kind"] for record in lines_of(folder)] == [*kept, "stage"]


def test_file_of_another_schema_gets_a_header_of_this_one(tmp_path):
    old = json.dumps({"kind": "header", "schema_version": SCHEMA_VERSION - 1})
    (tmp_path / "metrics.jsonl").write_text(f"{old}\n{WHOLE}\n")
    JsonlLogger(tmp_path).log_stage(STAGE)
    records = lines_of(tmp_path)
    assert [record["kind"] for record in records] == ["header", "step", "header", "stage"]
    assert records[2]["schema_version"] == SCHEMA_VERSION


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device that is always full")
def test_full_disk_warns_once_and_logging_goes_on_when_there_is_room(tmp_path, caplog):
    logger = JsonlLogger(tmp_path)
    for _ in range(2):
        logger.close()
        logger._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        with caplog.at_level(logging.WARNING, logger="amp_recipes"):
            logger.log_stage(STAGE)
    assert len(caplog.records) == 1
    assert str(tmp_path / "metrics.jsonl") in caplog.text and "No space left" in caplog.text
    logger.log_stage(replace(STAGE, epoch=9))
    logger.close()
    assert [(record["kind"], record.get("epoch")) for record in lines_of(tmp_path)] == [("header", None), ("stage", 9)]


def test_line_torn_by_a_disk_error_is_cut_off_before_the_next(tmp_path, monkeypatch):
    logger = JsonlLogger(tmp_path)

    def write_half(file, data):
        file.write(data[: len(data) // 2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("amp_recipes.loggers.jsonl.write_all", write_half)
        logger.log_stage(STAGE)
    logger.log_stage(replace(STAGE, epoch=9))
    assert [record.get("epoch") for record in lines_of(tmp_path)] == [None, 9]


def test_folder_that_cannot_be_made_is_an_error_before_training(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        JsonlLogger(tmp_path / "file" / "run")


def test_records_are_written_into_no_file_elsewhere(tmp_path, subtests):
    """The folder may come from somebody else."""
    elsewhere = tmp_path / "bashrc"
    elsewhere.write_text("alias ll='ls -l'\n")
    place = {
        "link": lambda path: path.symlink_to("../bashrc"),
        "link to nothing": lambda path: path.symlink_to("../new"),
        "second name": lambda path: os.link(elsewhere, path),
        "pipe": os.mkfifo,
        "folder": os.mkdir,
    }
    for kind, put in place.items():
        with subtests.test(kind):
            folder = tmp_path / kind
            folder.mkdir()
            put(folder / "metrics.jsonl")
            with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
                JsonlLogger(folder)
            assert elsewhere.read_text() == "alias ll='ls -l'\n" and not (tmp_path / "new").exists()


def test_a_link_that_takes_the_place_of_the_file_costs_records_and_not_the_run(tmp_path, caplog):
    elsewhere = tmp_path / "bashrc"
    elsewhere.touch()
    logger = JsonlLogger(tmp_path / "run")
    logger.close()
    logger.path.unlink()
    logger.path.symlink_to(elsewhere)
    with caplog.at_level(logging.WARNING, logger="amp_recipes"):
        run_epoch(logger)
        logger.close()
    assert "is a link" in caplog.text and len(caplog.records) == 1
    assert elsewhere.read_text() == ""


@pytest.mark.parametrize("end", [1 << 40, (1 << 26) + (1 << 17)])
def test_a_file_of_one_endless_line_is_refused_at_once(tmp_path, end):
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.truncate(end)
    with at_most(calls=20_000), pytest.raises(ConfigError, match="not a file of records"):
        JsonlLogger(tmp_path)
    assert (tmp_path / "metrics.jsonl").stat().st_size == end


def test_a_last_line_of_brackets_is_cut_off(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(f"{HEADER}\n" + "[" * 100_000)
    JsonlLogger(tmp_path).log_stage(STAGE)
    assert [record["kind"] for record in lines_of(tmp_path)] == ["header", "stage"]


def test_record_costs_little_more_than_encoding_it(tmp_path):
    logger = JsonlLogger(tmp_path, flush_seconds=3600)
    with at_most(calls=500 * 10):
        for _ in range(500):
            logger.log_step(STEP)


# --------------------------------------------------------------------------------------------- summary

FULL_SUMMARY = RunSummary(
    precision="fp16",
    eval_precision="fp32",
    float32_precision="ieee",
    device="cuda:0",
    fp32_modules=["model.norm", "model.head"],
    seconds=3723.0,
    epochs=10,
    optimizer_steps=9970,
    skipped_steps=30,
    samples=320_000,
    samples_per_second=1234.4,
    peak_memory_bytes=1288490189,
    peak_memory_of="device",
    last={"train": {"loss": 0.01234567}, "valid": {"loss": 0.5, "accuracy": 0.98765}},
    best={"accuracy": 0.991, "epoch": 7},
)


def test_table_names_what_a_reader_asks_for():
    assert format_summary(FULL_SUMMARY).splitlines() == [
        "Summary",
        "  precision     fp16, evaluation fp32, fp32 matrix products in ieee",
        "  fp32 modules  2 (model.norm, model.head)",
        "  device        cuda:0",
        "  time          1 h 02 min for 10 epochs",
        "  updates       9,970, 30 skipped (0.30%)",
        "  throughput    1,234 samples/s over 320,000 training samples",
        "  peak memory   1.2 GiB (device)",
        "  train         loss 0.01235",
        "  valid         loss 0.5, accuracy 0.9877",
        "  best          accuracy 0.991 in epoch 7",
    ]


def test_table_of_an_evaluation_leaves_out_what_did_not_happen():
    summary = replace(SUMMARY, seconds=1.25, last={"test": {"loss": math.nan}})
    assert format_summary(summary).splitlines() == [
        "Summary",
        "  precision  bf16, evaluation fp32, fp32 matrix products in ieee",
        "  device     cpu",
        "  time       1.2 s",
        "  test       loss nan",
    ]


def test_long_lists_of_pins_are_cut():
    names = [f"layer{index}.norm" for index in range(40)]
    text = format_summary(replace(SUMMARY, fp32_modules=names))
    assert "40 (layer0.norm, " in text and "layer4.norm, and 35 more)" in text


def test_summary_file_is_strict_json_with_the_schema_version(tmp_path):
    SummaryLogger(tmp_path / "run", io.StringIO()).log_summary(replace(FULL_SUMMARY, best={"wer": math.nan}))
    read = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert read["schema_version"] == SCHEMA_VERSION
    assert read["best"] == {"wer": "nan"}
    assert read["last"] == FULL_SUMMARY.last
    assert read["optimizer_steps"] == 9970


def test_a_crash_while_writing_leaves_the_earlier_summary(tmp_path, monkeypatch, caplog):
    logger = SummaryLogger(tmp_path, io.StringIO())
    logger.log_summary(replace(SUMMARY, epochs=1))

    def fail(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("amp_recipes.files.run_files.os.replace", fail)
    logger.log_summary(replace(SUMMARY, epochs=2))
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    assert json.loads((tmp_path / "summary.json").read_text())["epochs"] == 1
    assert "No space left" in caplog.text


def test_table_is_seen_without_any_logging_set_up(capsys):
    SummaryLogger(None).log_summary(FULL_SUMMARY)
    assert capsys.readouterr().err == format_summary(FULL_SUMMARY) + "\n"


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SummaryLogger(None, io.StringIO()).log_summary(FULL_SUMMARY)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------ text


VALUES = {
    None: "-",
    True: "True",
    1234567: "1,234,567",
    0.123456: "0.1235",
    1e-5: "1e-05",
    math.nan: "nan",
    -math.inf: "-inf",
    "text": "text",
}
DURATIONS = {
    0.04: "0.0 s",
    59.94: "59.9 s",
    59.96: "1 min 00 s",
    3599.4: "59 min 59 s",
    3599.6: "1 h 00 min",
    86399: "23 h 59 min",
    273600: "3 d 04 h",
}
SIZES = {
    0: "0 B",
    1023: "1023 B",
    1024: "1.0 KiB",
    1024**2 - 1: "1.0 MiB",
    1000 * 1024**2: "1000.0 MiB",
    5 << 40: "5.0 TiB",
    1 << 52: "4,096.0 TiB",
}
RATES = {0.0: "0 samples/s", 0.512: "0.512 samples/s", 99.94: "99.9 samples/s"}


@pytest.mark.parametrize(
    ("put_into_words", "texts"),
    [(format_value, VALUES), (format_seconds, DURATIONS), (format_bytes, SIZES), (format_rate, RATES)],
    ids=["values", "durations", "sizes", "rates"],
)
def test_numbers_in_words(subtests, put_into_words, texts):
    for number, text in texts.items():
        with subtests.test(text):
            assert put_into_words(number) == text


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="pseudo-terminals are of POSIX systems")
@pytest.mark.parametrize("columns", [0, 120])
def test_a_terminal_of_no_width_gets_lines_in_place_of_a_bar(columns):
    termios, fcntl = pytest.importorskip("termios"), pytest.importorskip("fcntl")
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        logger = ProgressLogger(1, terminal)
        logger.start_stage("train", 1, 4)
        logger.advance(1)
        logger.log_step(StepRecord("train", 1, 1, 1, 0.5, {}, None, None, False, 0, 4, 1.0, 1.0, None, 1e9))
        terminal.flush()
        shown = os.read(reader, 4096).decode()
        assert ("%|" in shown) is (columns > 0)
        assert ("1/4: loss 0.5" in shown) is (columns == 0)
        logger.close()
    os.close(reader)


def test_what_is_taken_again_is_set_aside_and_tests_stay(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.log_step(STEP)
    place = logger.state_dict()
    logger.log_step(replace(STEP, step=21))
    logger.log_stage(replace(STAGE, stage="test", epoch=None))
    logger.load_state_dict(place)
    logger.log_step(replace(STEP, step=22))
    logger.close()
    lines = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert [line.get("step", line.get("stage")) for line in lines] == [None, 20, "test", 22]
    (aside,) = (tmp_path / "metrics.taken_again.jsonl").read_text().splitlines()
    assert json.loads(aside)["step"] == 21
