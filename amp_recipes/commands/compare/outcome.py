"""Reads the results of one run: losses, metrics, time per step, memory."""

from __future__ import annotations

import math
import statistics
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from amp_recipes.commands.run_records import as_number, read_object
from amp_recipes.config.experiment import ENVIRONMENT_FILE
from amp_recipes.errors import ConfigError
from amp_recipes.files.run_files import regular_only
from amp_recipes.loggers.jsonl import FILE_NAME as RECORDS_FILE
from amp_recipes.loggers.jsonl import parsed
from amp_recipes.loggers.summary import FILE_NAME as SUMMARY_FILE
from amp_recipes.records import SCHEMA_VERSION

# Where a final metric is looked up, the best place first: what was tested is what would be published.
PLACES = ("test", "best", "valid", "train")

_WARM_UP_SHARE = 0.1  # of the updates, which allocate memory, choose kernels and fill caches
_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Epoch:
    """The record of one finished stage. number: None where the stage has no epoch (a test)."""

    stage: str
    number: int | None
    values: dict[str, float]


class Step(NamedTuple):
    """The record of one update, as far as it is looked at: a long run has a million of them."""

    stage: tuple[Any, Any]  # with its epoch
    loss: float
    seconds: float  # since the stage began
    skipped: bool
    memory_bytes: int | None


@dataclass
class Outcome:
    """The results of one run.

    message: why it did not finish; empty if it did. losses: of each update, skipped ones too, in their order (NaN where
    there was none). step_seconds: the median over the updates after the first tenth. memory_of: what the peak counts,
    "device" or "process". script: a digest of the recipe's script as it was run.
    """

    precision: str
    seed: int
    folder: Path
    message: str = ""
    losses: Sequence[float] = ()
    skipped: int = 0
    epochs: list[Epoch] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)
    step_seconds: float | None = None
    memory_bytes: int | None = None
    memory_of: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    script: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return not self.message

    def final(self, place: str) -> dict[str, float]:
        """The metrics of the newest stage of that name, or, for "best", those of the epoch that was best."""
        if place == "best":
            return self.best
        return next((epoch.values for epoch in reversed(self.epochs) if epoch.stage == place), {})


def read_outcome(precision: str, seed: int, folder: Path, records: Path, message: str) -> Outcome:
    """The outcome of the run in `folder`, from `metrics.jsonl` and `summary.json` in `records`.

    message: why the run did not finish, if it did not. A file that is missing leaves its part empty.
    Raises ConfigError for a file that cannot be read, or of another version.
    """
    steps, epochs = read_records(records / RECORDS_FILE)
    summary = read_object(records / SUMMARY_FILE)
    best = summary.get("best")
    memory_bytes, memory_of = _memory(steps, summary)
    return Outcome(
        precision,
        seed,
        folder,
        message,
        losses=array("d", (step.loss for step in steps)),
        skipped=sum(step.skipped for step in steps),
        epochs=epochs,
        best={name: as_number(value) for name, value in best.items()} if isinstance(best, dict) else {},
        step_seconds=_step_seconds(steps),
        memory_bytes=memory_bytes,
        memory_of=memory_of,
        environment=read_object(folder / ENVIRONMENT_FILE),
    )


def read_records(file: Path) -> tuple[list[Step], list[Epoch]]:
    """The updates and the finished stages, each of them once, in order; nothing if there is no file.

    A run that resumed has logged again what it did again: the last record of a stage, epoch and step counts.
    """
    steps: dict[tuple[str, ...], Step] = {}
    epochs: dict[tuple[str, ...], Epoch] = {}
    for record in _lines(file):
        kind = record.get("kind")
        key = (repr(record.get("stage")), repr(record.get("epoch")))
        if kind == "header" and record.get("schema_version") != SCHEMA_VERSION:
            raise ConfigError(
                f"{file}: its records have version {record.get('schema_version')}, this amp_recipes reads version "
                f"{SCHEMA_VERSION}: compare the runs with the amp_recipes that made them."
            )
        if kind == "step":
            steps[(*key, repr(record.get("step")))] = _step(record)
        elif kind == "stage":
            epochs[key] = _epoch(record)
    return list(steps.values()), list(epochs.values())


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the records; a line that a crash cut off is left out."""
    try:
        with suppress(FileNotFoundError), open(file, "rb", opener=regular_only) as stream:
            while line := stream.readline(_LINE_BYTES):
                record = parsed(line)
                if record is not None:
                    yield record
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}.") from error


def _epoch(record: dict[str, Any]) -> Epoch:
    metrics = record.get("metrics")
    values = {"loss": record.get("loss"), **(metrics if isinstance(metrics, dict) else {})}
    epoch = record.get("epoch")
    return Epoch(
        str(record.get("stage")),
        epoch if isinstance(epoch, int) else None,
        {name: as_number(value) for name, value in values.items()},
    )


def _step(record: dict[str, Any]) -> Step:
    memory = record.get("memory_bytes")
    return Step(
        (record.get("stage"), record.get("epoch")),
        as_number(record.get("loss")),
        as_number(record.get("seconds")),
        bool(record.get("skipped")),
        memory if isinstance(memory, int) else None,
    )


def _step_seconds(steps: Sequence[Step]) -> float | None:
    """The median time between updates; None where too few were logged.

    A record has the seconds since its stage began, so the first update of an epoch counts from there.
    """
    starts = [before.seconds if step.stage == before.stage else 0.0 for before, step in pairwise(steps)]
    durations = [step.seconds - start for step, start in zip(steps, [0.0, *starts], strict=False)]
    warm = durations[math.ceil(_WARM_UP_SHARE * len(durations)) :]
    timed = [seconds for seconds in warm if math.isfinite(seconds) and seconds > 0]
    return statistics.median(timed) if timed else None


def _memory(steps: Sequence[Step], summary: dict[str, Any]) -> tuple[int | None, str]:
    """Return the peak bytes and what they count: from the summary, else from the device during the run."""
    peak = summary.get("peak_memory_bytes")
    if isinstance(peak, int):
        return peak, str(summary.get("peak_memory_of") or "process")
    logged = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    return (max(logged), "device") if logged else (None, "")
