"""Runs a recipe twice without interruption, and once killed and resumed; reports whether all are equal."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from amp_recipes.commands.child_runs import ChildRuns, EndedChild
from amp_recipes.commands.run_records import require_script
from amp_recipes.commands.tables import columns
from amp_recipes.commands.verify_resume import causes, compare
from amp_recipes.commands.verify_resume.compare import Difference, Trace, first_difference, read_trace
from amp_recipes.config import parse_arguments
from amp_recipes.config.trust.checking import read_settings
from amp_recipes.errors import ConfigError

EQUAL, DIFFERENT, FAILED = 0, 1, 2
_TAIL_LINES = 20


class _RunFailed(Exception):
    """Raised if a run of the recipe did not do what it was started for."""


@dataclass(frozen=True)
class _Run:
    """The trace of a run of the recipe, and how it ended."""

    trace: Trace
    ended: EndedChild

    @property
    def last_words(self) -> list[str]:
        return [f"  {line}" for line in self.ended.last_lines[-_TAIL_LINES:]]

    def refuse_failure(self, name: str) -> None:
        """Raise _RunFailed if it ended with a failure."""
        if self.ended.status:
            tail = "\n".join(self.last_words)
            raise _RunFailed(f"The run '{name}' failed with status {self.ended.status}:\n{tail}")


@dataclass(frozen=True)
class ResumeCheck:
    """The runs to make: the recipe's command, for `steps` updates, saved after `save_at`, killed after `kill_at`.

    say: called with each line for the user.
    """

    script: Path
    hparams_file: Path
    options: Sequence[str]
    steps: int
    save_at: int
    kill_at: int
    folder: Path
    children: ChildRuns
    say: Callable[[str], None]

    def say_all(self, lines: Iterable[str]) -> None:
        """Say each of the lines."""
        for line in lines:
            self.say(line)

    def run(self, name: str, resumes: str = "", kill_at: int = 0, more: Sequence[str] = ()) -> _Run:
        """Start the recipe and wait for its end; its trace and what it says lie in the folder under `name`.

        resumes: the name of the run that it resumes. Raises SystemExit if a signal asked this process to end
        meanwhile.
        """
        trace = self.folder / f"{name}.jsonl"
        command = [
            *(sys.executable, "-m", "amp_recipes.commands.verify_resume.probe"),
            *(str(trace), str(self.steps), str(kill_at), str(self.script), str(self.hparams_file)),
            *self.options,
            *more,
            f"--output_folder={self.folder / (resumes or name)}",
            f"--ckpt_interval_steps={self.save_at}",
            *("--resume=auto", "--test_only=false", "--debug=false", "--noprogressbar=true"),
        ]
        output_file, errors_file = self.folder / f"{name}.stdout", self.folder / f"{name}.stderr"
        ended = self.children.run(command, output_file, errors_file)
        if self.children.requested is not None:
            raise SystemExit(128 + self.children.requested)
        return _Run(read_trace(trace), ended)

    def reported(self, what: str, name: str, resumes: str = "", kill_at: int = 0) -> _Run:
        """Run it, and print its length."""
        run = self.run(name, resumes, kill_at)
        self.say(f"  {what:<26}{len(run.trace.windows):>4} updates {run.ended.seconds:>7.1f} s")
        return run

    def whole(self, what: str, name: str, resumes: str = "") -> _Run:
        """Run it, and raise if it does not finish."""
        run = self.reported(what, name, resumes)
        run.refuse_failure(name)
        if run.trace.end is None:
            raise _RunFailed(f"{self.script} ended, but no call of Brain.fit() returned.")
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
    """Return 0 if a killed and resumed recipe equals, bit for bit, one that was not killed; else 1.

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
    require_script(script)
    options = [*options, *_seed_if_none(hparams_file, options, say)]
    with _folder(keep) as folder, ChildRuns() as children:
        check = ResumeCheck(script, hparams_file, options, steps, save_at, kill_at, folder, children, say)
        try:
            return _verify(check)
        except _RunFailed as error:
            say(str(error))
            return FAILED


def _verify(check: ResumeCheck) -> int:
    check.say(f"{check.script} {check.hparams_file}: {check.steps} updates, killed after {check.kill_at}, then resumed")
    one = check.whole("without interruption", "whole").trace
    if len(one.windows) <= check.kill_at:
        raise _RunFailed(
            f"The recipe ended after {len(one.windows)} updates, before it could be killed after {check.kill_at}: give "
            "a larger number of epochs or steps, or smaller --kill_at and --save_at."
        )
    again = check.whole("the same again", "again").trace
    if difference := first_difference(one, again):
        return _not_reproducible(check, difference, one, again)

    killed = check.reported(f"killed after {check.kill_at} updates", "killed", kill_at=check.kill_at)
    if killed.ended.status != -signal.SIGKILL:
        killed.refuse_failure("killed")
        raise _RunFailed(f"The run that was to be killed ended after {len(killed.trace.windows)} updates.")
    if difference := first_difference(one, killed.trace, both_ended=False):
        return _not_reproducible(check, difference, one, killed.trace)
    resumed = check.whole("that one, resumed", "resumed", resumes="killed")
    whole, resumed_at = compare.spliced(killed.trace, resumed.trace)
    check.say("")
    if resumed_at == 0:
        check.say(
            "The resumed run began at its first update: it did not continue from the checkpoint. Does the recipe give "
            "its\nBrain a checkpointer of its own in another folder, or change output_folder? Its last lines were:"
        )
        check.say_all(resumed.last_words)
        return DIFFERENT
    return _judge(check, one, again, whole, resumed_at, resumed.ended.said)


def _judge(check: ResumeCheck, one: Trace, again: Trace, whole: Trace, resumed_at: int, log: str) -> int:
    """Compare the uninterrupted run with the one that was killed and resumed."""
    difference = first_difference(one, whole)
    stages = {name: compare.read_stages(check.folder / name / "metrics.jsonl") for name in ("whole", "again", "killed")}
    by_chance = compare.differing_metrics(stages["whole"], stages["again"])
    metrics = compare.differing_metrics(stages["whole"], stages["killed"])
    metrics = {name: values for name, values in metrics.items() if name not in by_chance}
    until = len(one.windows) if difference is None else difference.index
    suspects = compare.not_restored(one, again, whole, resumed_at, until)
    check.say_all(_what_was_compared(one, resumed_at, len(stages["whole"])))
    check.say_all(_what_was_not_compared(one, by_chance))
    check.say("")
    if difference is not None:
        check.say_all(causes.describe(difference))
        check.say_all(causes.why_not_resumed(difference, difference.index == resumed_at, suspects, log))
    elif metrics:
        check.say_all(causes.why_metrics_differ(metrics, suspects))
    else:
        check.say_all(_equal(check, resumed_at, suspects))
        return EQUAL
    check.say("NOT EQUAL: the resumed run differs from the run without interruption.")
    return DIFFERENT


def _equal(check: ResumeCheck, resumed_at: int, suspects: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    if suspects:
        yield "Not restored by the resume, but without effect in these updates (without interruption | resumed):"
        yield from causes.suspect_lines(suspects)
    yield f"EQUAL bit for bit: the run that was killed after update {check.kill_at} resumed from update {resumed_at}."


def _what_was_compared(one: Trace, resumed_at: int, metrics: int) -> Iterator[str]:
    batches = sum(window.batches for window in one.windows)
    yield f"compared: {len(one.windows)} updates of {batches} batches, {len(one.windows) - resumed_at} after the resume"
    windows = [*one.windows, *([one.end] if one.end is not None else [])]
    rows = [["", "values", "tensors", "MB"]]
    for name, (entries, tensors, size) in compare.totals(windows).items():
        if entries:
            rows.append([f"  {causes.KINDS[name]}", str(entries), str(tensors), f"{size / 1e6:.2f}"])
    rows.append(["  losses", str(sum(len(window.losses) for window in one.windows)), "", ""])
    rows.append(["  metrics of stages", str(metrics), "", ""])
    yield columns(rows)


def _what_was_not_compared(one: Trace, by_chance: Iterable[str]) -> Iterator[str]:
    if by_chance:
        yield f"not compared, since they differ without interruption too: {', '.join(by_chance)}"
    unread = sorted({name for window in one.windows for name in window.unread})
    if unread:
        yield f"not compared, since their state cannot be read: objects of type {', '.join(unread)}"


def _not_reproducible(check: ResumeCheck, difference: Difference, one: Trace, other: Trace) -> int:
    held = [f"the generator {name}" for name in compare.unequal_generators(one, other, difference.index)]
    suspects = sorted({*one.unseeded, *other.unseeded, *held})
    check.say("")
    check.say_all(causes.describe(difference))
    check.say_all(causes.why_not_reproducible(difference, suspects))
    if difference.section == "loss" or (difference.section in causes.SAVED and difference.index > 0):  # it was computed
        check.say_all(_ask_determinism(check))
    check.say("NOT REPRODUCIBLE: two runs without interruption differ already, so a resume cannot be judged.")
    return DIFFERENT


def _ask_determinism(check: ResumeCheck) -> list[str]:
    """Return what torch reports about the operations, and whether two deterministic runs are equal."""
    more = ["--deterministic=true"]
    one = check.run("deterministic", more=more)
    if one.ended.status:
        return causes.what_determinism_says(one.ended.status, one.ended.said, None)
    again = check.run("deterministic_again", more=more)
    equal = again.ended.status == 0 and first_difference(one.trace, again.trace) is None
    return causes.what_determinism_says(0, "", equal)


def _seed_if_none(hparams_file: Path, options: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """`--seed=1` for a recipe that sets none. Raises ConfigError for options that the YAML does not take."""
    _, run_options, overrides = parse_arguments([str(hparams_file), *options])
    # Data only, so from anywhere: what may be included is for the script to say.
    given = read_settings(hparams_file, overrides, folders=["/"]).options
    if given.get("seed", run_options.seed) is not None:
        return []
    say("The YAML sets no seed, so no two runs would be equal. This check adds --seed=1; set a seed in the YAML.")
    return ["--seed=1"]


@contextmanager
def _folder(keep: str | Path | None) -> Iterator[Path]:
    """The folder of the runs; one that is kept must be new or empty, since runs would resume from what is in it."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="amp-resume-", ignore_cleanup_errors=True) as temporary:
            yield Path(temporary)
        return
    folder = Path(keep).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = any(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"--keep {folder}: {error.strerror}.") from error
    if taken:
        raise ConfigError(
            f"--keep {folder} is not empty, and the runs would resume from what it holds. Give a new folder."
        )
    yield folder
