"""Runs the code blocks of a Markdown page, in an empty folder and in their order: python tests/docs/run_page.py PAGE...

- A block whose first line is a comment with a file name (`# train.py`) is written as that file.
- `bash`: the lines are run; each must end with 0. Lines that install or clone are left out.
- `text` straight after a block that was run: its output. Each line must occur, in this order. `...` stands for
  anything, white space for any white space, and a figure for any figure. But a line's first word `epoch` has its own
  figure, and what follows `loss` or `accuracy` must be near: machines round differently, and take other times.
- `python` without a file name: run in the page's one namespace. `yaml`, `json` and `toml`: read.
- `diff`: not run. `text` elsewhere is an error: nothing would check it.

HTML comments before a block: `<!-- not run: REASON -->`; `<!-- fails -->`, whose last command must fail;
`<!-- setup` with lines of bash up to `-->`, which no reader sees.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_SECONDS = 600  # of a block that hangs

STEP = re.compile(
    r"^(?P<indent> *)(?P<fence>```+)(?P<language>[\w+-]*)[^\n`]*\n(?P<code>.*?)^(?P=indent)(?P=fence) *$"
    r"|^<!--(?P<comment>.*?)-->",
    re.M | re.S,
)
FILE_NAME = re.compile(r"# ([\w./-]+\.\w+)\n")
NOT_RUN = re.compile(r"^\s*((python3? -m )?pip install|git clone)\b.*$", re.M)
FIGURE = re.compile(r"(?<![A-Za-z_\d.])[-+]?\d[\d,]*(\.\d+)*([eE][-+]?\d+)?")
NEAR = {"accuracy": (0.15, 0.0), "loss": (0.1, 0.3)}  # absolute tolerance, relative tolerance
ANY_FIGURE = r"[-+]?\d[\d,]*(?:\.\d+)*(?:[eE][-+]?\d+)?"

# Reads blocks from its input and runs them in one namespace. After each it prints a line: MARK and whether it worked.
MARK = "\x00end of block"
NAMESPACE = f"""
import json, sys, traceback
names = {{"__name__": "__main__"}}
for line in sys.stdin:
    page, first_line, code = json.loads(line)
    works = True
    try:
        exec(compile("\\n" * first_line + code, page, "exec"), names)
    except BaseException:
        traceback.print_exc()
        works = False
    sys.stderr.flush()
    print({MARK!r}, works, flush=True)
"""


class PageError(AssertionError):
    """A block does not do what the page says."""


@dataclass
class Block:
    """A fenced block, or a comment with commands ("setup"), and the comments before it."""

    language: str
    code: str
    line: int  # of its first line of code, counted from 1
    follows_block: bool  # nothing but white space lies between it and the block before
    not_run: bool = False
    fails: bool = False

    @property
    def file_name(self) -> str | None:
        named = FILE_NAME.match(self.code)
        return named[1] if named and self.language not in ("bash", "text", "setup") else None


def blocks_of(text: str) -> Iterator[Block]:
    """The blocks of a page, in their order."""
    end_of_last = None
    not_run = fails = False
    for step in STEP.finditer(text):
        comment = (step["comment"] or "").strip()
        if comment.startswith("not run:") and comment != "not run:":
            not_run = True
        elif comment == "fails":
            fails = True
        elif comment.startswith("setup\n"):
            yield Block("setup", comment.removeprefix("setup\n"), text.count("\n", 0, step.start()) + 2, False)
        elif step["fence"]:
            follows = end_of_last is not None and not text[end_of_last : step.start()].strip()
            code = re.sub(rf"^{step['indent']}", "", step["code"], flags=re.M)
            yield Block(step["language"], code, text.count("\n", 0, step.start()) + 2, follows, not_run, fails)
            end_of_last = step.end()
            not_run = fails = False


class PageRun:
    """One run of a page's blocks in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.output: str | None = None  # of the last block, if it was run
        self.namespace: subprocess.Popen[str] | None = None
        state = tempfile.mkdtemp(prefix="amp_recipes_state")  # where runs keep the key that signs their records
        bin_folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        self.variables = {
            "XDG_STATE_HOME": state,
            **os.environ,
            "PATH": os.pathsep.join(bin_folders),
            "PYTHONPATH": str(REPOSITORY),
            "REPOSITORY": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
        }
        self.place = Path(state) / "place"

    def run(self, text: str) -> None:
        """Run all blocks; raises PageError at the first that does not do what the page says."""
        try:
            for block in blocks_of(text):
                self.run_block(block)
        finally:
            if self.namespace:
                self.namespace.kill()
                self.namespace.wait()

    def run_block(self, block: Block) -> None:
        if block.language == "text":
            if not block.follows_block and not block.not_run:
                raise self.error(block, "follows no block: put it straight after one, or give <!-- not run: REASON -->")
            if not block.not_run and self.output is not None:
                self.check_output(block)
            return
        self.output = None
        if block.not_run or block.language == "diff":
            return
        if block.file_name:
            path = self.folder / block.file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code)
        elif block.language in ("bash", "setup"):
            self.run_commands(block)
        elif block.language == "python":
            self.run_python(block)
        else:
            self.read(block)

    def run_commands(self, block: Block) -> None:
        commands = NOT_RUN.sub("", block.code)
        script = (
            f"cd {shlex.quote(str(self.folder))}\ntrap 'pwd > {shlex.quote(str(self.place))}' EXIT\nset -eo pipefail\n"
        )
        if block.fails:
            lines = re.findall(r"(?:.*\\\n)*.*\S.*", commands)
            script += "\n".join(lines[:-1]) + f"\nset +e\n{lines[-1]}\ntest $? != 0"
        else:
            script += commands
        done = subprocess.run(
            ["bash", "-c", script],
            env=self.variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        if done.returncode:
            says = "should fail in its last command, and only there" if block.fails else f"ends with {done.returncode}"
            raise self.error(block, f"{says}:\n{block.code}\n{done.stdout}")
        self.output = done.stdout
        self.folder = Path(self.place.read_text().rstrip("\n"))

    def run_python(self, block: Block) -> None:
        if self.namespace is None:
            self.namespace = subprocess.Popen(
                [sys.executable, "-u", "-c", NAMESPACE],
                cwd=self.folder,
                env=self.variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        stdin, stdout = self.namespace.stdin, self.namespace.stdout
        assert stdin and stdout
        print(json.dumps([self.name, block.line - 1, block.code]), file=stdin, flush=True)
        self.output = ""
        for line in stdout:
            before, mark, works = line.partition(MARK)
            self.output += before
            if mark:
                if works.strip() != "True":
                    raise self.error(block, f"fails:\n{self.output}")
                return
        raise self.error(block, f"ends the interpreter:\n{self.output}")

    def read(self, block: Block) -> None:
        readers = {"yaml": yaml.compose, "json": json.loads, "toml": tomllib.loads}
        if block.language not in readers:
            raise self.error(block, f"is {block.language or 'of no language'}: mark it with <!-- not run: REASON -->")
        try:
            readers[block.language](block.code)
        except (yaml.YAMLError, ValueError) as error:
            raise self.error(block, f"cannot be read: {error}") from error

    def check_output(self, block: Block) -> None:
        output = self.output or ""
        position = 0
        for number, line in enumerate(block.code.splitlines()):
            if not line.strip() or line.strip() == "...":
                continue
            pattern, near = pattern_of(line)
            candidates = re.compile(pattern).finditer(output, position)
            found = next((match for match in candidates if all_near(match.groups(), near)), None)
            if not found:
                where = f"line {block.line + number} is not in the output, or not there: {line}"
                raise self.error(block, f"{where}\n--- output:\n{output}")
            position = found.end()

    def error(self, block: Block, says: str) -> PageError:
        return PageError(f"{self.name}:{block.line}: this block {says}")


def pattern_of(line: str) -> tuple[str, list[tuple[str, float]]]:
    """A regular expression for a line of output, and what its groups must be near: (word before, figure)."""
    parts, near, before = [], [], "the line's begin"
    for part in line.strip().split("..."):
        words = []
        for word in re.split(r"\s+", part):
            first = FIGURE.match(word)
            if before == "epoch" and line.startswith("epoch "):
                words.append(re.escape(word))
            elif first and before in NEAR:
                near.append((before, float(first[0].replace(",", ""))))
                words.append(f"({ANY_FIGURE}){pattern_of_word(word[first.end() :])}")
            else:
                words.append(pattern_of_word(word))
            before = word
        parts.append(r"\s+".join(words))
    return r"(?<!\w)" + r"[\s\S]*?".join(parts) + r"(?!\w)", near


def pattern_of_word(word: str) -> str:
    pattern, position = "", 0
    for figure in FIGURE.finditer(word):
        pattern += re.escape(word[position : figure.start()]) + ANY_FIGURE
        position = figure.end()
    return pattern + re.escape(word[position:])


def all_near(found: Iterable[str], near: Iterable[tuple[str, float]]) -> bool:
    """Whether the figures of an output are near those of the page."""
    return all(
        math.isclose(float(text.replace(",", "")), figure, abs_tol=NEAR[word][0], rel_tol=NEAR[word][1])
        for text, (word, figure) in zip(found, near, strict=True)
    )


def run_page(path: Path, folder: Path) -> None:
    """Run the blocks of the page `path` in `folder`, which is empty."""
    resolved = path.resolve()
    name = str(resolved.relative_to(REPOSITORY)) if resolved.is_relative_to(REPOSITORY) else str(path)
    PageRun(name, folder).run(resolved.read_text(encoding="utf-8"))


def main() -> None:
    for name in sys.argv[1:]:
        folder = Path(tempfile.mkdtemp(prefix="page"))
        try:
            run_page(Path(name), folder)
        except PageError as error:
            sys.exit(f"{error}\n(run in {folder})")
        print(f"{name}: all blocks do what the page says (run in {folder})")


if __name__ == "__main__":
    main()
