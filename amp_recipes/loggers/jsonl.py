"""Appends every record to `metrics.jsonl`, one JSON object per line."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from io import FileIO
from os import SEEK_END, PathLike
from pathlib import Path
from typing import Any, BinaryIO

from amp_recipes.errors import ConfigError
from amp_recipes.files.run_files import regular_only
from amp_recipes.files.strict_json import encode
from amp_recipes.records import SCHEMA_VERSION, Logger, RunSummary, StageRecord, StepRecord

log = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
SET_ASIDE_NAME = "metrics.taken_again.jsonl"
FLUSH_SECONDS = 5.0
_BLOCK_BYTES = 1 << 16
_RECORD_BYTES = 1 << 20  # a record has some hundred
_TORN_BYTES = 1 << 26  # of zeros, which a power loss can leave behind the last record


class JsonlLogger(Logger):
    """Writes `<folder>/metrics.jsonl`: a header, then each step and stage record as it comes.

    A run that resumes appends. First it repairs a line that a crash left incomplete. Records after the checkpoint from
    which it resumes will be logged again, so the old ones move to `metrics.taken_again.jsonl`.

    Records wait in memory until the stage ends, `flush_seconds` have passed or the logger is closed. A disk
    that fails during the run costs records, not the run: one warning, then each flush tries again. Only the
    constructor raises: OSError where the folder cannot be made or written, ConfigError where the file's place is
    taken by something else (a link, a named pipe), or by a file that is none of records.
    """

    def __init__(self, folder: str | PathLike[str], flush_seconds: float = FLUSH_SECONDS) -> None:
        self.path = Path(folder) / FILE_NAME
        self._flush_seconds = flush_seconds
        self._records: list[StepRecord | StageRecord] = []  # encoded at the flush, out of the step
        self._flushed_at = time.monotonic()
        self._warned = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: FileIO | None = open_records(self.path)

    def log_step(self, record: StepRecord) -> None:
        """Keep the record for the next flush."""
        self._records.append(record)
        if time.monotonic() - self._flushed_at >= self._flush_seconds:
            self.flush()

    def log_stage(self, record: StageRecord) -> None:
        """Write the record and all that waits."""
        self._records.append(record)
        self.flush()

    def log_summary(self, summary: RunSummary) -> None:
        """Write what waits; the summary itself has a file of its own."""
        self.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the file in bytes, after writing the waiting records."""
        self.flush()
        return {} if self._file is None else {"bytes": self._file.seek(0, SEEK_END)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set aside what the file has had since; a disk that fails, or a file that was exchanged, keeps it all."""
        self.flush()
        try:
            if self._file is not None:
                set_aside(self.path, state["bytes"])
        except (OSError, ConfigError) as error:
            log.warning("%s has the records of updates that are now repeated (%s).", self.path, error)

    def close(self) -> None:
        """Write what waits and close the file. A record that comes later opens it again."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def flush(self) -> None:
        """Hand the waiting lines to the operating system; a disk error becomes one warning."""
        self._flushed_at = time.monotonic()
        if not self._records:
            return
        data = "".join(encode(record.as_dict()) + "\n" for record in self._records).encode()
        self._records.clear()
        try:
            if self._file is None:
                self._file = open_records(self.path)
            write_all(self._file, data)
        except (OSError, ConfigError) as error:
            self._give_up_file(error)

    def _give_up_file(self, error: Exception) -> None:
        """Drop the file, which may end in half a line; the next flush repairs and opens it again."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
        if not self._warned:
            self._warned = True
            log.warning("Metrics are missing from %s (%s). Training continues.", self.path, error)


def open_records(path: Path) -> FileIO:
    """The file at `path`, ending in a whole line and headed by a record with the current schema version."""
    # Unbuffered: a buffer of Python's would keep what a full disk refused, and raise again at every close.
    file = open(path, "ab", buffering=0, opener=regular_only)  # noqa: SIM115
    try:
        if file.tell() > 0:
            repair_last_line(path)
        if schema_version(path) != SCHEMA_VERSION:
            write_all(file, (encode(header()) + "\n").encode())
    except BaseException:
        file.close()
        raise
    return file


def set_aside(path: Path, start: int) -> None:
    """Move what the file has from byte `start` on, where a line ends there, to a file beside it.

    Records of tests stay: no resumed run takes a test again. A crash between the two leaves lines in both.
    Raises OSError, ConfigError.
    """
    with open(path, "r+b", opener=regular_only) as file:
        if not 0 < start < file.seek(0, SEEK_END):
            return
        file.seek(start - 1)
        if file.read(1) != b"\n":
            return
        lines = file.readlines()
        stays = [(parsed(line) or {}).get("stage") == "test" for line in lines]
        with open(path.with_name(SET_ASIDE_NAME), "ab", opener=regular_only) as aside:
            aside.writelines(line for line, kept in zip(lines, stays, strict=True) if not kept)
        file.seek(start)
        file.writelines(line for line, kept in zip(lines, stays, strict=True) if kept)
        file.truncate()


def header() -> dict[str, Any]:
    """The record that says how to read those after it."""
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"kind": "header", "schema_version": SCHEMA_VERSION, "time": now}


def schema_version(path: Path) -> int | None:
    """The version in the file's first line; None for an empty file or a first line that is no header."""
    with open(path, "rb", opener=regular_only) as file:
        record = parsed(file.readline(_BLOCK_BYTES))
    return record.get("schema_version") if record is not None else None


def repair_last_line(path: Path) -> None:
    """Make the file end in a newline: end a whole last record that lacks one, cut off half a record.

    Raises ConfigError for a file whose last line is longer than what a crash leaves.
    """
    with open(path, "r+b", opener=regular_only) as file:
        end = file.seek(0, SEEK_END)
        start = start_of_last_line(file, end)
        if start is None:
            raise ConfigError(
                f"{path}: the last line has more than {_TORN_BYTES:,} bytes, so this is not a file of records. "
                "Remove it."
            )
        if start == end:
            return
        file.seek(start)
        if end - start <= _RECORD_BYTES and parsed(file.read()) is not None:
            file.write(b"\n")
        else:
            file.truncate(start)


def start_of_last_line(file: BinaryIO, end: int) -> int | None:
    """Return the position after the last newline before `end`; `end` if a newline ends the file.

    None if that is too far from the end to be worth the search.
    """
    block_start = end
    while block_start > 0 and end - block_start <= _TORN_BYTES:
        block_end, block_start = block_start, max(0, block_start - _BLOCK_BYTES)
        file.seek(block_start)
        newline = file.read(block_end - block_start).rfind(b"\n")
        if newline >= 0:
            return block_start + newline + 1
    return None if block_start > 0 else 0


def parsed(line: bytes) -> dict[str, Any] | None:
    """The record in a line; None if it is not a whole JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def write_all(file: FileIO, data: bytes) -> None:
    """Write every byte: an unbuffered file may take fewer than it is given."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
