"""Defines the records of a step, a stage and a run, and the interface of a logger.

Records hold host numbers only: by the time a logger sees one, its values have left the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

SCHEMA_VERSION = 1
"""Version of the record layout in `metrics.jsonl`; it goes up when a field changes its meaning."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer update (or a skipped one) of a training stage."""

    stage: str
    epoch: int | None
    step: int  # batches done in this epoch
    optimizer_step: int  # all updates so far, without skipped ones
    loss: float  # mean over the window, as used for the backward
    lr: dict[str, float]  # per optimizer: the rate of its first group that this update used
    grad_norm: float | None  # L2 over all gradients of the update, before clipping
    scale: float | None  # loss scale that the update used; None unless fp16
    skipped: bool
    skipped_steps: int  # all skipped updates so far
    samples: int  # in the window
    samples_per_second: float  # since the stage began
    seconds: float  # since the stage began
    memory_bytes: int | None  # peak allocated on the device so far; None if the device does not report it
    wall_time: float  # seconds since 1970 (UTC)
    recovery: str | None = None  # during the recovery from a spike: the value of `on_spike`
    underflow: float | None = None  # share of the gradients that only fp16 makes zero, where it was measured
    # If the run pinned a module after it: its "module", the "step" of its report, "op" and "line".
    pinned: dict[str, str | int | None] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the record as one object of `metrics.jsonl`; has the last three only where there are any."""
        record = {"kind": "step", **{name: getattr(self, name) for name in self.__slots__}}
        return _without_absent(record, ("recovery", "underflow", "pinned"))


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One finished training epoch, validation or test."""

    stage: str
    epoch: int | None
    loss: float | None  # None: no finite loss
    metrics: dict[str, float]  # returned by `on_stage_end`
    seconds: float
    batches: int
    samples: int
    optimizer_step: int  # all updates so far, without skipped ones
    data_seconds: float  # seconds that the loop waited for batches
    wall_time: float  # seconds since 1970 (UTC)

    def as_dict(self) -> dict[str, Any]:
        """Return the record as one object of `metrics.jsonl`."""
        return {"kind": "stage", **asdict(self)}


def _without_absent(record: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The record without those of the named fields that are None."""
    return {name: value for name, value in record.items() if value is not None or name not in names}


_COUNTS = ("backed_off_steps", "pinned", "spikes", "went_back", "underflow")  # of what not every run can have
_TOTALS = ("seconds", "training_seconds", "epochs", "samples", "samples_per_second", "last", "best", "underflow")


@dataclass(slots=True)
class RunSummary:
    """The summary of a finished `fit` or `evaluate`; written to `summary.json`."""

    precision: str
    eval_precision: str
    float32_precision: str
    device: str
    fp32_modules: list[str] = field(default_factory=list)  # names of the pinned modules
    seconds: float = 0.0
    epochs: int = 0
    optimizer_steps: int = 0
    skipped_steps: int = 0
    training_seconds: float = 0.0
    samples: int = 0  # training samples seen
    samples_per_second: float = 0.0  # training samples over training time
    peak_memory_bytes: int | None = None
    peak_memory_of: str = "process"  # what the peak counts: the device's allocator, or the process
    last: dict[str, dict[str, float]] = field(default_factory=dict)  # stage -> loss and metrics
    best: dict[str, float | int] | None = None  # {"metric": value, "epoch": n} if a metric is watched
    # Of the skipped steps, those that only the loss scale was too high for. None where no replay tells them apart.
    backed_off_steps: int | None = None
    # With `on_nonfinite: pin`, the pins that the run took: module, step, op, line of each. None without it.
    pinned: list[dict[str, str | int | None]] | None = None
    # With the option `on_spike`; None without it.
    spikes: int | None = None  # number of spikes: a loss or gradient norm left its band, or nonfinite_patience ran out
    went_back: int | None = None  # number of times that the run went back to a checkpoint
    # In fp16, where most gradients became zero that are not in fp32; None if it was not measured: share of all their
    # elements, optimizer_step, scale, parameter that lost the largest share, parameter_share.
    underflow: dict[str, float | str] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the summary as one JSON object, with the schema version; a count only if it is made."""
        summary = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        return _without_absent(summary, _COUNTS)

    def totals(self) -> dict[str, Any]:
        """Return the totals that a resumed run continues to count."""
        return {name: getattr(self, name) for name in _TOTALS}

    def take_totals(self, totals: Mapping[str, Any]) -> None:
        """Continue counting from what `totals` returned."""
        for name, value in totals.items():
            setattr(self, name, value)


class Logger(Protocol):
    """Receives records; never steers the run. Subclass it and override what you need.

    The order of calls: `start_stage`, then any number of `advance` and `log_step`, then `log_stage`; at
    the very end of a fit or an evaluation `log_summary`, and `close` once.
    """

    def start_stage(self, stage: str, epoch: int | None, batches: int | None) -> None:
        """Called when a stage begins; `batches` is its length if the loader knows it."""

    def advance(self, step: int) -> None:
        """Called after `step` batches of the running stage. It is called often, so it must be fast."""

    def log_step(self, record: StepRecord) -> None:
        """Called after an update, also a skipped one; at most one update later."""

    def log_stage(self, record: StageRecord) -> None:
        """Called when the running stage ends."""

    def log_summary(self, summary: RunSummary) -> None:
        """Called when a fit or an evaluation ends."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the log for a checkpoint, as plain data. Called on the main process only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the log's state: the run resumes from a checkpoint, and logs again what came after it."""

    def close(self) -> None:
        """Release files and terminals, also after an exception. May be called twice."""
