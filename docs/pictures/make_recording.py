"""Draws recording.svg, a run that is stopped by Ctrl-C and goes on: python docs/pictures/make_recording.py

The commands are run as they are shown. Of their output the lines that `SHOWN` names are drawn, and dots for the others.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("recording.svg")
REPOSITORY = PICTURE.parents[2]
TRAIN = "python train.py digits.yaml"
STOP_AT = "epoch 3 train 20/40"  # Ctrl-C comes after this line
SHOWN = re.compile(r"epoch (1|2|3|4|20) (train|valid):|epoch 3 train [12]0/|resuming from|SIGINT|test:")

COLUMNS = 88
CHARACTER, LINE_HEIGHT, MARGIN = 7.83, 19, 18  # pixels; 13 px of a monospaced font
SECONDS_PER_LINE = 0.45

STYLE = """
  text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; fill: #d4d7dd;
         white-space: pre }
  .command { fill: #ffffff; font-weight: bold }
  .note { fill: #8fd3a8 }
  .key { fill: #ffb86b; font-weight: bold }
  @media (prefers-reduced-motion: no-preference) {
    text { opacity: 0; animation: appear 0.01s forwards }
    @keyframes appear { to { opacity: 1 } }
  }
"""


def run_until(command: str, folder: Path, stop_at: str | None = None) -> list[str]:
    """What `command` writes; Ctrl-C is sent after the first line that begins with `stop_at`."""
    bin_folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {**os.environ, "PATH": bin_folders, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command.split(), cwd=folder, env=variables, **streams) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if stop_at and line.startswith(stop_at):
                process.send_signal(signal.SIGINT)
                stop_at = None
    return lines


def shown(lines: list[str]) -> list[str]:
    """The lines to draw, with dots once where others lie between them."""
    chosen: list[str] = []
    for line in lines:
        if SHOWN.search(line):
            chosen.append(line)
        elif chosen and chosen[-1] != "...":
            chosen.append("...")
    return chosen[:-1] if chosen[-1:] == ["..."] else chosen


def record() -> list[tuple[str, str]]:
    """Run the session; return its lines, each with its kind: command, output, note or key."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        new = "amp-recipes new digits --from image_classification"
        run_until(new, folder)
        session = [("command", f"$ {new}"), ("command", "$ cd digits"), ("command", f"$ {TRAIN}")]
        session += [("output", line) for line in shown(run_until(TRAIN, folder / "digits", STOP_AT))]
        stop = next(index for index, (_, line) in enumerate(session) if line.startswith(STOP_AT))
        session.insert(stop + 1, ("key", "^C"))
        session += [("note", "# The same command again:"), ("command", f"$ {TRAIN}")]
        session += [("output", line) for line in shown(run_until(TRAIN, folder / "digits"))]
    return session


def wrapped(line: str) -> list[str]:
    """The line cut as a terminal cuts it."""
    return [line[start : start + COLUMNS] for start in range(0, len(line), COLUMNS)] or [""]


def draw(session: list[tuple[str, str]]) -> str:
    """The session as an SVG whose lines appear one after another."""
    rows, texts, top = 0, [], MARGIN + 30
    for number, (kind, line) in enumerate(session):
        for part in wrapped(line):
            place = f'x="{MARGIN}" y="{top + rows * LINE_HEIGHT}"'
            delay = f"animation-delay: {number * SECONDS_PER_LINE:.2f}s"
            texts.append(f'<text {place} class="{kind}" style="{delay}">{escape(part)}</text>')
            rows += 1
    width, height = round(2 * MARGIN + COLUMNS * CHARACTER), top + rows * LINE_HEIGHT
    colours = ["#ff5f57", "#febc2e", "#28c840"]
    lights = [f'<circle cx="{MARGIN + 6 + 18 * n}" cy="18" r="6" fill="{colour}"/>' for n, colour in enumerate(colours)]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    )
    title = "A training run is stopped with Ctrl-C. The same command goes on where it stopped."
    return "\n".join(
        [
            f'{opening} role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1e2127" stroke="#5c6370"/>',
            *lights,
            *texts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(record()))
    print(f"wrote {PICTURE}, {PICTURE.stat().st_size:,} bytes")
