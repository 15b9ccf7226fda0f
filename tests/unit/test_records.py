"""Records as files and loggers see them."""

import inspect
import json
from dataclasses import FrozenInstanceError, asdict, fields, replace

import pytest

from amp_recipes.records import SCHEMA_VERSION, Logger, RunSummary, StageRecord, StepRecord

STEP = StepRecord(
    stage="train",
    epoch=3,
    step=20,
    optimizer_step=120,
    loss=0.25,
    lr={"optimizer": 1e-3},
    grad_norm=None,
    scale=1024.0,
    skipped=False,
    skipped_steps=1,
    samples=32,
    samples_per_second=64.0,
    seconds=0.5,
    memory_bytes=None,
    wall_time=1e9,
)
STAGE = StageRecord(
    stage="valid",
    epoch=3,
    loss=None,
    metrics={"acc": 0.5},
    seconds=2.0,
    batches=4,
    samples=64,
    optimizer_step=120,
    data_seconds=0.5,
    wall_time=1e9,
)
SUMMARY = RunSummary(precision="bf16", eval_precision="fp32", float32_precision="ieee", device="cpu")

# What readers of the files of version 1 rely on, in the order of the lines.
LAYOUT_1 = {
    "step": "kind stage epoch step optimizer_step loss lr grad_norm scale skipped skipped_steps samples "
    "samples_per_second seconds memory_bytes wall_time",
    "stage": "kind stage epoch loss metrics seconds batches samples optimizer_step data_seconds wall_time",
    "summary": "schema_version precision eval_precision float32_precision device fp32_modules seconds epochs "
    "optimizer_steps skipped_steps training_seconds samples samples_per_second peak_memory_bytes peak_memory_of "
    "last best",
}


def test_the_layout_changes_with_the_schema_version_only():
    found = {"step": STEP.as_dict(), "stage": STAGE.as_dict(), "summary": SUMMARY.as_dict()}
    assert (SCHEMA_VERSION, {name: " ".join(record) for name, record in found.items()}) == (1, LAYOUT_1)


PIN = {"module": "model.pool", "step": 7, "op": "aten::mm", "line": None}
SPIKY_STEP = replace(STEP, recovery="lower_lr", pinned=PIN, underflow=0.25)
SPIKY_SUMMARY = replace(SUMMARY, spikes=2, went_back=1, backed_off_steps=0, pinned=[PIN], underflow={"share": 0.25})


def test_a_record_is_its_fields_and_its_kind_and_survives_json():
    """Fields that not every run has are in it only where there is one."""
    step, stage, summary = {"kind": "step"}, {"kind": "stage"}, {"schema_version": 1}
    for record, head in [
        *((STEP, step), (SPIKY_STEP, step), (STAGE, stage), (SUMMARY, summary), (SPIKY_SUMMARY, summary))
    ]:
        sometimes = {"recovery", "backed_off_steps", "pinned", "spikes", "went_back", "underflow"}
        absent = sometimes if record in (STEP, SUMMARY) else set()
        fields = {name: value for name, value in asdict(record).items() if name not in absent}
        assert record.as_dict() == {**head, **fields}
        assert json.loads(json.dumps(record.as_dict(), allow_nan=False)) == record.as_dict()


def test_a_logger_cannot_change_a_record():
    for record in (STEP, STAGE):
        with pytest.raises(FrozenInstanceError):
            record.loss = 0.0


def test_summaries_do_not_share_what_they_collect():
    first, second = (RunSummary("fp32", "fp32", "ieee", "cpu") for _ in range(2))
    first.last["train"] = {"loss": 1.0}
    first.fp32_modules.append("norm")
    assert (second.last, second.fp32_modules) == ({}, [])


def test_the_summary_as_a_dict_is_a_snapshot():
    summary = RunSummary("fp32", "fp32", "ieee", "cpu")
    before = summary.as_dict()
    summary.last["train"] = {"loss": 1.0}
    summary.epochs += 1
    assert (before["last"], before["epochs"]) == ({}, 0)


def test_a_logger_may_leave_out_every_method():
    class Silent(Logger):
        pass

    silent = Silent()
    calls = {
        "start_stage": ("train", 1, None),
        "advance": (1,),
        "log_step": (STEP,),
        "log_stage": (STAGE,),
        "log_summary": (SUMMARY,),
        "load_state_dict": ({},),
        "close": (),
    }
    assert silent.state_dict() == {}
    methods = {name for name, _ in inspect.getmembers(Logger, inspect.isfunction) if not name.startswith("_")}
    assert methods == {*calls, "state_dict"}
    assert [getattr(silent, name)(*args) for name, args in calls.items()] == [None] * len(calls)


def test_records_hold_no_field_that_might_be_on_a_device():
    hints = {field.type for kind in (StepRecord, StageRecord, RunSummary) for field in fields(kind)}
    assert not [hint for hint in hints if "Tensor" in hint or "Any" in hint]
