"""Provides what all pages share: colours, the head of a page, numbers from files, and saving.

The colours are those of M. Okabe and K. Ito (Color Universal Design, 2008), which people who see fewer colours can
distinguish; and no page gives a meaning to colour alone.
"""

from __future__ import annotations

import io
import json
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from amp_recipes.errors import ConfigError
from amp_recipes.files.run_files import regular_only, write_atomically

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#767676"
SERIES = (BLACK, BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_DOTS_PER_INCH = 110
_FILE_BYTES = 1 << 28  # the census of a model with thousands of modules has some MB
_LARGEST = 1e100  # above it, matplotlib's own arithmetic overflows
_PART_CHARACTERS = 5  # that stay of each part of a long name


def read_report(file: Path) -> dict[str, Any] | None:
    """The JSON object in `file`; None if there is no such file. Raises ConfigError for one that cannot be read."""
    try:
        with open(file, "rb", opener=regular_only) as stream:
            data = stream.read(_FILE_BYTES + 1)
        if len(data) > _FILE_BYTES:
            raise ValueError(f"it is larger than {_FILE_BYTES:,} bytes")
        found = json.loads(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: expected a JSON object, found a {type(found).__name__}.")
    return found


@contextmanager
def page(title: str, text: str, width: float, rows: Sequence[float]) -> Iterator[tuple[Any, list[Any]]]:
    """A matplotlib figure with a title and a text, and the cells of the rows below, all measured in inches.

    It has matplotlib's own style, whatever the user's settings are. Raises ConfigError where matplotlib is not
    installed.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"matplotlib is not installed ({error}): pip install 'amp-recipes[report]' draws the page."
        ) from error
    style = {name: value for name, value in matplotlib.rcParamsDefault.items() if not name.startswith("backend")}
    style |= {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.labelsize": 9,
        "font.size": 9,
        "legend.fontsize": 8.5,
        "legend.frameon": False,
    }
    heights = [0.3 + 0.155 * (text.count("\n") + 1), *rows]
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, sum(heights)), layout="constrained")
        grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
        head = figure.add_subplot(grid[0])
        head.set_axis_off()
        head.set_title(title, fontsize=12)
        head.text(0, 1, text, va="top", transform=head.transAxes)
        yield figure, [grid[row] for row in range(1, len(heights))]


def save(figure: Any, file: Path) -> Path:
    """Write the figure as a PNG in place of `file`. Raises ConfigError where it cannot be written."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # a module may have any name
        figure.savefig(stream, format="png", dpi=_DOTS_PER_INCH)  # a PNG is drawn by Agg, whatever the backend is
    try:
        write_atomically(file, stream.getvalue())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}.") from error
    return file


# ---------------------------------------------------------------------- numbers and words from a file


def finite(value: Any) -> float | None:
    """A number of a report as a float; None for null, for nonfinite ones (`"inf"`), and for what is no number.

    What no axis can hold counts as nonfinite, or as 0.
    """
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if not abs(number) < _LARGEST:  # also for a NaN
        return None
    return number if abs(number) > 1 / _LARGEST else 0.0


def finite_list(value: Any) -> list[float]:
    """The numbers of a list, NaN in place of what is none: its length stays."""
    if not isinstance(value, list):
        return []
    return [math.nan if (number := finite(item)) is None else number for item in value]


def dicts(value: Any) -> list[dict[str, Any]]:
    """The objects in a list of a report; none where there is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def part(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The object under a key of a report; an empty one where there is none."""
    value = found.get(name)
    return value if isinstance(value, dict) else {}


def percent(share: float) -> str:
    """A share as a percentage in two digits: `0.13 %`, `12 %`, `0`."""
    if share == 0:
        return "0"
    if 0 < share < 1e-5:
        return "< 0.001 %"
    return f"{100 * share:.0f} %" if 0.995 <= share < 100 else f"{100 * share:.2g} %"


def words(value: Any, length: int = 0) -> str:
    """Text from a file as a label, on one line, cut after `length` characters (0: not cut).

    A `$` is escaped, since a formula would begin there.
    """
    text = "".join(char if char.isprintable() else " " for char in ("" if value is None else str(value)))
    return (f"{text[: length - 1]}…" if 0 < length < len(text) else text).replace("$", r"\$")


def module_name(name: Any, length: int) -> str:
    """A dotted name as a label of at most `length` characters: its longest parts are cut, numbers stay.

    A cut through the middle would leave the layers of a model with the same name.
    """
    parts = str(name).split(".")
    while len(".".join(parts)) > length and max(map(len, parts)) > _PART_CHARACTERS:
        longest = max(range(len(parts)), key=lambda index: len(parts[index]) - 8 * (index == len(parts) - 1))
        if len(parts[longest]) <= _PART_CHARACTERS:
            longest = len(parts) - 1  # the last part says what the module is: cut when nothing else is left
        parts[longest] = f"{parts[longest][:-2]}…"
    text = ".".join(parts)
    return words(text if len(text) <= length else f"…{text[len(text) - length + 1 :]}")


def module_names(names: Sequence[Any], length: int) -> tuple[list[str], str]:
    """Labels of several modules, and the name of the module that they are all in, which the labels leave out."""
    split = [str(name).split(".") for name in names]
    shared = 0
    while len(split) > 1 and all(len(parts) > shared + 1 and parts[shared] == split[0][shared] for parts in split):
        shared += 1
    above = ".".join(split[0][:shared]) if split else ""
    return [module_name(".".join(parts[shared:]), length) for parts in split], words(above, 2 * length)


def wrapped(text: str, characters: int, lines: int) -> str:
    """Text in lines of at most so many characters, and at most so many lines."""
    return "\n".join(textwrap.wrap(words(text), characters, max_lines=lines, placeholder=" …"))


# ---------------------------------------------------------------------- axes


def legend_beside(axes: Any) -> None:
    """Name the curves to the right of the axes, where the names cover nothing."""
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.8)


def is_wide(values: Iterable[float]) -> bool:
    """Whether positive values differ so much that a logarithmic axis shows them better."""
    there = [value for value in values if math.isfinite(value)]
    return bool(there) and min(there) > 0 and max(there) > 20 * min(there)
