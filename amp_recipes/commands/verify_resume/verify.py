"""Runs a recipe whole, again, and killed and resumed, and says whether all did the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from amp_recipes.commands.verify_resume.causes import (
    SAVED,
    describe,
    suspect_lines,
    what_determinism_says,
    why_metrics_differ,
    why_not_reproducible,
    why_not_resumed,
)
from amp_recipes.commands.verify_resume.compare import (
    SECTIONS,
    Difference,
    Trace,
    differing_metrics,
    first_difference,
    not_restored,
    read_stages,
    read_trace,
    spliced,
    totals,
    unequal_generators,
)
from amp_recipes.config import parse_arguments
from amp_recipes.config.trust.checking import read_settings
from amp_recipes.errors import ConfigError

EQUAL, DIFFERENT, FAILED = 0, 1, 2
_TAIL_LINES = 20
_NOT_EQUAL = "NOT EQUAL: the resumed run did something else than the one without interruption."
_TITLES = {
    "data": "batches' contents",
    "random": "random generators",
    "modules": "modules' tensors",
    "optimizers": "optimizers' state",
    "schedulers": "schedulers' state",
    "scaler": "loss scaler",
    "ema": "averaged weights",
}


class _RunFailed(Exception):
    """A run of the recipe did not do what it was started for."""


@dataclass(frozen=True)
class _Run:
    """One process of the recipe that has ended."""

    trace: Trace
    returncode: int
    stderr: str
    seconds: float


@dataclass(frozen=True)
class ResumeCheck:
    """What is run: the recipe's command, for `steps` updates, saved after `save_at`, killed after `kill_at`."""

    script: Path
    hparams_file: Path
    options: Sequence[str]
    steps: int
    save_at: int
    kill_at: int
    folder: Path

    def run(
        self, name: str, output: str, kill_at: int = 0, more: Sequence[str] = (), env: Mapping[str, str] = {}
    ) -> _Run:
        """Start the recipe and wait for its end; its trace and what it says lie in the folder under `name`."""
        trace = self.folder / f"{name}.jsonl"
        command = [
            *(sys.executable, "-m", "amp_recipes.commands.verify_resume.probe"),
            *(str(trace), str(self.steps), str(kill_at), str(self.script), str(self.hparams_file)),
            *self.options,
            *more,
            f"--output_folder={self.folder / output}",
            f"--ckpt_interval_steps={self.save_at}",
            *("--resume=auto", "--test_only=false", "--debug=false", "--noprogressbar=true"),
        ]
        began = time.perf_counter()
        stdout, stderr = self.folder / f"{name}.stdout", self.folder / f"{name}.stderr"
        # Files and not pipes: loader workers that outlive a killed run would hold a pipe open.
        with open(stdout, "wb") as out, open(stderr, "wb") as err:
            done = subprocess.run(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env={**os.environ, **env})
        text = stderr.read_text(encoding="utf-8", errors="replace")
        return _Run(read_trace(trace), done.returncode, text, time.perf_counter() - began)

    def whole(self, name: str, output: str, more: Sequence[str] = ()) -> _Run:
        """A run that has to come to its end."""
        run = self.run(name, output, more=more)
        _refuse_failure(run, name)
        if run.trace.end is None:
            raise _RunFailed(f"{self.script} ended without a call of Brain.fit that returned.")
        return run


def verify_resume(
    script: str | Path,
    hparams_file: str | Path,
    options: Sequence[str] = (),
    steps: int = 12,
    save_at: int = 5,
    kill_at: int = 8,
    keep: str | Path | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Whether a recipe that is killed and started again does, bit for bit, what it does without: 0 yes, 1 no.

    options: of the recipe, as on its command line; steps: updates of each run; save_at: updates after which a
        checkpoint is made inside the epoch; kill_at: updates after which one run is killed (SIGKILL); all three count
        windows: one in which several optimizers step is one update. keep: folder in which the runs, their output and
        the traces stay; say: called with each line of the report.
    Returns 2, and says why, if a run failed. Raises ConfigError for numbers and options that do not fit.
    """
    if not 0 < save_at < kill_at < steps:
        raise ConfigError(
            f"save_at is {save_at}, kill_at {kill_at} and steps {steps}: the checkpoint must come before the kill, and "
            "the kill before the end (0 < save_at < kill_at < steps)."
        )
    script, hparams_file = Path(script), Path(hparams_file)
    if not script.is_file():
        raise ConfigError(f"{script} is not a file; expected the recipe's script, such as train.py.")
    options = [*options, *_seed_if_none(hparams_file, options, say)]
    with _folder(keep) as folder:
        check = ResumeCheck(script, hparams_file, options, steps, save_at, kill_at, folder)
        try:
            return _verify(check, say)
        except _RunFailed as error:
            say(str(error))
            return FAILED


def _verify(check: ResumeCheck, say: Callable[[str], None]) -> int:
    say(f"{check.script} {check.hparams_file}: {check.steps} updates, killed after {check.kill_at}, then resumed")
    one = _told(say, "without interruption", check.whole("whole", "whole"))
    if len(one.trace.windows) <= check.kill_at:
        raise _RunFailed(
            f"The recipe ended after {len(one.trace.windows)} updates, before it could be killed after "
            f"{check.kill_at}: give a larger number of epochs or steps, or smaller --kill_at and --save_at."
        )
    again = _told(say, "the same again", check.whole("again", "again"))
    difference = first_difference(one.trace, again.trace)
    if difference is not None:
        return _not_reproducible(check, difference, one.trace, again.trace, say)

    killed = _told(say, f"killed after {check.kill_at} updates", check.run("killed", "killed", check.kill_at))
    if killed.returncode != -signal.SIGKILL:
        _refuse_failure(killed, "killed")
        raise _RunFailed(f"The run that was to be killed ended after {len(killed.trace.windows)} updates.")
    difference = first_difference(one.trace, killed.trace, both_ended=False)
    if difference is not None:
        return _not_reproducible(check, difference, one.trace, killed.trace, say)
    resumed = _told(say, "that one, resumed", check.whole("resumed", "killed"))
    whole, resumed_at = spliced(killed.trace, resumed.trace)
    if resumed_at == 0:
        say("")
        say("The resumed run began at its first update: it did not go on from the checkpoint. Does the recipe give its")
        say("Brain a checkpointer of its own in another folder, or change output_folder? Its last lines were:")
        _say_tail(resumed, say)
        return DIFFERENT
    return _judge(check, one.trace, again.trace, whole, resumed_at, resumed.stderr, say)


def _judge(
    check: ResumeCheck, one: Trace, again: Trace, whole: Trace, resumed_at: int, log: str, say: Callable[[str], None]
) -> int:
    """Compare the uninterrupted run with the one that was killed and resumed."""
    difference = first_difference(one, whole)
    stages = {name: read_stages(check.folder / name / "metrics.jsonl") for name in ("whole", "again", "killed")}
    by_chance = differing_metrics(stages["whole"], stages["again"])
    metrics = differing_metrics(stages["whole"], stages["killed"])
    metrics = {name: values for name, values in metrics.items() if name not in by_chance}
    until = len(one.windows) if difference is None else difference.index
    suspects = not_restored(one, again, whole, resumed_at, until)
    say("")
    _say_table(one, resumed_at, len(stages["whole"]), say)
    _say_what_was_not_compared(one, by_chance, say)
    say("")
    if difference is None and not metrics:
        if suspects:
            say("Not restored by the resume, but without effect in these updates (without interruption | resumed):")
            _say_all(suspect_lines(suspects), say)
        say(
            f"EQUAL bit for bit: the run that was killed after update {check.kill_at} went on from update {resumed_at}."
        )
        return EQUAL
    if difference is None:
        _say_all(why_metrics_differ(metrics, suspects), say)
    else:
        _say_all(describe(difference), say)
        _say_all(why_not_resumed(difference, difference.index == resumed_at, suspects, log), say)
    say(_NOT_EQUAL)
    return DIFFERENT


def _say_what_was_not_compared(one: Trace, by_chance: Iterable[str], say: Callable[[str], None]) -> None:
    if by_chance:
        say(f"not compared, as they differ without interruption too: {', '.join(by_chance)}")
    unread = sorted({name for window in one.windows for name in window.unread})
    if unread:
        say(f"not compared, as there was nothing to read in them: objects of type {', '.join(unread)}")


def _say_all(lines: Iterable[str], say: Callable[[str], None]) -> None:
    for line in lines:
        say(line)


def _not_reproducible(
    check: ResumeCheck, difference: Difference, one: Trace, other: Trace, say: Callable[[str], None]
) -> int:
    held = [f"the generator {name}" for name in unequal_generators(one, other, difference.index)]
    suspects = sorted({*one.unseeded, *other.unseeded, *held})
    say("")
    for line in [*describe(difference), *why_not_reproducible(difference, suspects)]:
        say(line)
    computed = difference.section in SAVED and difference.index > 0
    if computed or difference.section == "loss":
        for line in _ask_determinism(check):
            say(line)
    say("NOT REPRODUCIBLE: two runs without interruption differ already, so a resume cannot be judged.")
    return DIFFERENT


def _ask_determinism(check: ResumeCheck) -> list[str]:
    """What torch says about the operations, and whether two deterministic runs are equal."""
    more, env = ["--deterministic=true"], {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    one = check.run("deterministic", "deterministic", more=more, env=env)
    if one.returncode:
        return what_determinism_says(one.returncode, one.stderr, None)
    again = check.run("deterministic_again", "deterministic_again", more=more, env=env)
    equal = again.returncode == 0 and first_difference(one.trace, again.trace) is None
    return what_determinism_says(0, "", equal)


def _seed_if_none(hparams_file: Path, options: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """`--seed=1` for a recipe that sets none. Raises ConfigError for options that the YAML does not take."""
    _, run_options, overrides = parse_arguments([str(hparams_file), *options])
    # Data only, so from anywhere: what may be included is for the script to say.
    given = read_settings(hparams_file, overrides, folders=["/"]).options
    if given.get("seed", run_options.seed) is not None:
        return []
    say("The YAML sets no seed, without which no two runs are alike: --seed=1 is added here. Set one in the YAML.")
    return ["--seed=1"]


@contextmanager
def _folder(keep: str | Path | None) -> Any:
    """The folder of the runs; one that is kept must be new or empty, since runs would go on from what is in it."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="amp-resume-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    folder = Path(keep).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--keep {folder}: {error.strerror}.") from error
    if taken:
        raise ConfigError(f"--keep {folder} is not empty; give a new folder, so that the runs begin afresh.")
    yield folder


def _told(say: Callable[[str], None], what: str, run: _Run) -> _Run:
    say(f"  {what:<26}{len(run.trace.windows):>4} updates {run.seconds:>7.1f} s")
    return run


def _refuse_failure(run: _Run, name: str) -> None:
    if run.returncode:
        tail = "\n".join(f"  {line}" for line in _tail(run))
        raise _RunFailed(f"The run '{name}' failed with status {run.returncode}:\n{tail}")


def _say_tail(run: _Run, say: Callable[[str], None]) -> None:
    for line in _tail(run):
        say(f"  {line}")


def _tail(run: _Run) -> list[str]:
    return run.stderr.rstrip().splitlines()[-_TAIL_LINES:]


def _say_table(one: Trace, resumed_at: int, stages: int, say: Callable[[str], None]) -> None:
    """What was compared, in numbers."""
    windows = [*one.windows, *([one.end] if one.end is not None else [])]
    batches = sum(window.batches for window in one.windows)
    say(f"compared: {len(one.windows)} updates of {batches} batches, {len(one.windows) - resumed_at} after the resume")
    say(f"  {'':<22}{'values':>9}{'tensors':>9}{'MB':>10}")
    for name, (entries, tensors, size) in totals(windows).items():
        if entries:
            say(f"  {_TITLES[name]:<22}{entries:>9}{tensors:>9}{size / 1e6:>10.2f}")
    losses = sum(len(window.losses) for window in one.windows)
    say(f"  {'losses':<22}{losses:>9}")
    say(f"  {'stages with metrics':<22}{stages:>9}")


assert set(_TITLES) == set(SECTIONS)
