"""Formats numbers for people, and writes to a stream that may break."""

from __future__ import annotations

import os
from typing import Any, TextIO

from amp_recipes.records import StageRecord

_BYTE_UNITS = ("KiB", "MiB", "GiB", "TiB")


def format_value(value: Any) -> str:
    """A number in four significant digits, an integer with thousands separators; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    try:
        return f"{value:.4g}"
    except (TypeError, ValueError):
        return str(value)


def format_values(values: dict[str, Any]) -> str:
    """Names and numbers in one line: `loss 0.1234, accuracy 0.98`."""
    return ", ".join(f"{name} {format_value(value)}" for name, value in values.items())


def format_rate(per_second: float) -> str:
    """Samples per second: `12,345 samples/s`, or `0.51 samples/s` where they are few."""
    number = f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"
    return f"{number} samples/s"


def format_seconds(seconds: float) -> str:
    """A duration in its two largest units: `0.4 s`, `1 min 23 s`, `2 h 05 min`, `3 d 04 h`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def format_bytes(count: int) -> str:
    """A size in the largest binary unit that leaves at least one: `512 B`, `1.3 GiB`."""
    if count < 1024:
        return f"{count} B"
    size = count / 1024
    for unit in _BYTE_UNITS[:-1]:
        if size < 1023.95:  # from there on one decimal rounds to the next unit
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} {_BYTE_UNITS[-1]}"


class QuietStream:
    """A text stream whose failure ends the writing, not the run.

    stream: None where the process has none, as under a service. Characters that the stream's encoding lacks
    are escaped. Guarding here, and not around each caller, keeps errors out of tqdm: one would leave its lock
    taken.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """The stream's encoding; ASCII where it has none."""
        return getattr(self._stream, "encoding", None) or "ascii"

    def isatty(self) -> bool:
        """Whether the stream is a terminal that is open."""
        try:
            return self._stream is not None and self._stream.isatty()
        except (AttributeError, OSError, ValueError):
            return False

    def holds_a_bar(self) -> bool:
        """Whether it is a terminal, and not one of no width, as a container's may be: a bar would not show there."""
        if not self.isatty():
            return False
        try:
            return os.get_terminal_size(self.fileno()).columns > 0
        except (AttributeError, OSError, ValueError):
            return True  # a terminal without a descriptor, as a notebook's: it does not tell its width

    def fileno(self) -> int:
        """The descriptor, by which tqdm asks for the terminal's width. Raises OSError where there is none."""
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Write what can be written; returns the length of `text` as streams do."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError):  # a closed stream raises ValueError
                self._stream = None
        return len(text)

    def flush(self) -> None:
        """Flush what was written."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None

    def write_line(self, text: str) -> None:
        """Write one line and flush it."""
        self.write(text + "\n")
        self.flush()


def stage_name(stage: str, epoch: int | None) -> str:
    """`epoch 3 train`; `test` where there are no epochs."""
    return stage if epoch is None else f"epoch {epoch} {stage}"


def format_stage(record: StageRecord) -> str:
    """Loss, metrics, time and speed of a finished stage."""
    parts = [format_values({"loss": record.loss, **record.metrics}), format_seconds(record.seconds)]
    if record.seconds > 0 and record.samples > 0:
        parts.append(format_rate(record.samples / record.seconds))
    return ", ".join(parts)
