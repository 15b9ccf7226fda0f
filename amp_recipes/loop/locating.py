"""Repeats nonfinite steps under watch, by one process or by several together, and tells what made them so."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from amp_recipes import distributed, numerics
from amp_recipes.loop.processes import OneProcess
from amp_recipes.loop.rehearsal import BeforeStep
from amp_recipes.modules.torch_private import version_of
from amp_recipes.stage import Stage

logger = logging.getLogger(__name__)


class Suspect(NamedTuple):
    """A step to repeat.

    caveats: how the repeated one differs from it; run_scale: the loss scale of the run; test_pass: the number of the
    test that it belongs to, since each may have its own test set; history: of the fit before a step of training; the
    others are as `numerics.locate` takes them, or as the report names them.
    """

    trial: numerics.Trial
    batches: Sequence[Any]
    dtype: torch.dtype
    scale: float
    before: BeforeStep
    stage: Stage
    where: str
    files: str | None = None
    caveats: Sequence[str] = ()
    run_scale: float = 1.0
    history: numerics.History | None = None
    test_pass: int = 0


class _Facts(NamedTuple):
    """What a process tells the others of a step that it has repeated.

    order: the lower, the more it explains; facts: what makes it the same as another; where: with the rank, if there are
    several; failure: why it could not be repeated.
    """

    order: int
    facts: tuple[Any, ...]
    where: str
    failure: str = ""


class _Located(NamedTuple):
    """What repeating a step has found; pin: what the run is to pin because of it."""

    report: numerics.NonfiniteReport
    pin: dict[str, Any] | None


class Explained(NamedTuple):
    """What is told of a step; cause: None if it could not be repeated; pin: as in `Skip`."""

    cause: str | None = None
    words: str = ""
    pin: dict[str, Any] | None = None


class Locator:
    """Finds where nonfinite values first appeared, logs it and writes the reports of one fit.

    Several processes repeat their own steps at the same time, each with the whole model and without the others, and
    meet again before and after.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        self._reports: dict[tuple[Any, ...], str] = {}  # the reported facts -> the place of the report
        self._refused = False

    @property
    def step(self) -> int:
        """The updates of the run so far, whether taken or skipped."""
        return self._run.totals.optimizer_step + self._run.totals.skipped_steps

    def explain(self, suspects: Sequence[Suspect], most: int, last: bool = False) -> list[Explained]:
        """Repeat the steps of all processes; log, write and return in words what explains them, at most so many.

        last: the run ends with the error that these words go into.
        """
        if self.cannot_repeat():
            return []
        with self.whole():
            with self.alone():
                found = [self._locate(suspect) for suspect in suspects]
            own = [self._facts(*each) for each in zip(suspects, found, strict=True)]
            everyone = distributed.gather(own)
            order = sorted(
                (facts.order, index, rank)
                for rank, of_rank in enumerate(everyone)
                for index, facts in enumerate(of_rank)
            )
            return [
                self._say(
                    everyone[rank][index], rank, (suspects[index], found[index]) if rank == self._rank else None, last
                )
                for _, index, rank in order[:most]
            ]

    def cannot_repeat(self) -> bool:
        """Whether these processes cannot repeat a step; says so once."""
        run = self._run
        why_not = distributed.why_not_whole(run.modules, run.recipe.run_opts, run.device)
        if why_not and not self._refused:
            self._refused, run.summary.backed_off_steps = True, None
            if distributed.is_main_process():
                logger.warning("locate_nonfinite has no effect: %s.", why_not)
        return bool(why_not)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside this context, each process has the whole model; all enter and leave together."""
        run = self._run
        if run.processes.many:
            run.checkpoints.wait()  # what writes one beside this thread talks to the others
        with distributed.whole(run.modules, run.recipe.optimizers_dict.values()):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside this context, this process is the only one; the others take as long as they need."""
        run = self._run
        with distributed.at_own_pace(), distributed.alone(), run.replaced(processes=OneProcess(run)):
            yield

    @property
    def _rank(self) -> int:
        return distributed.rank() if self._run.processes.many else 0

    def _locate(self, suspect: Suspect) -> _Located | Exception:
        before, caveats = suspect.before, list(suspect.caveats)
        generators = {name: generator for name, generator, _ in before.generators}
        try:
            step = suspect.trial, suspect.batches, suspect.dtype, suspect.scale
            report = numerics.locate(
                *step, generators, history=suspect.history or numerics.History(), names=before.sample_names()
            )
        except Exception as error:  # what the replay stumbles over must not hide the step that is being reported
            return error
        is_changed = before.versions != versions_of(before.batches)
        if is_changed:
            caveats.append("The recipe changes the batch in place, so the repeated step began with the changed batch.")
        if report.cause == "not replayable" and not before.random_is_certain:
            caveats.append(
                "The recipe draws random numbers in this evaluation, and the repeated batch may have drawn others. "
                "From now on, the state of the generators is kept before each batch."
            )
        report.caveats += caveats
        report.step, report.where, report.files = self.step, suspect.where, suspect.files
        report.stage = suspect.stage.name.lower()
        pin = None if is_changed else self._pin(suspect, report)
        report.pinned = pin is not None
        return _Located(report, pin)

    def _pin(self, suspect: Suspect, report: numerics.NonfiniteReport) -> dict[str, Any] | None:
        """The pin that the run is to take because of the report."""
        if suspect.stage is not Stage.TRAIN:
            return None
        try:
            return self._run.pinning.proven(report, suspect.trial, suspect.batches, suspect.run_scale)
        except Exception as error:
            logger.warning("%s: could not try to pin %s: %r", suspect.where, report.module, error)
            return None

    def _facts(self, suspect: Suspect, found: _Located | Exception) -> _Facts:
        where, rank = suspect.where, None
        if self._run.processes.many:
            rank = distributed.rank()
            where = f"{where}, rank {rank}"
        if isinstance(found, Exception):
            return _Facts(2, (), where, repr(found))
        report = found.report
        report.rank, report.where = rank, where
        order = {"scale": 1, "not replayable": 3}.get(report.cause, 0)
        facts = (report.cause, report.module, report.op, report.phase, report.line, _samples_of(report, suspect), rank)
        return _Facts(order, facts, where)

    def _say(self, facts: _Facts, rank: int, own: tuple[Suspect, Any] | None, last: bool) -> Explained:
        """own: the step and its report, in the process that has found it."""
        if facts.failure:
            if distributed.is_main_process():
                logger.warning("%s: could not repeat the step: %s", facts.where, facts.failure)
            return Explained()
        known = self._reports.get(facts.facts)
        written = None if own is None else self._written(own[0], own[1].report, known is None)
        message, path = distributed.gather(written)[rank]
        if known is None:
            self._reports[facts.facts] = f"step {self.step}" if path is None else str(path)
            words = message if path is None else f"{message} See {path}."
        else:
            words = f"{message} (The same as in {known}.)" if last else f"the same as in {known}."
        if distributed.is_main_process():
            logger.warning("%s: %s", facts.where, words)
        words = f"Rank {rank}: {words}" if self._run.processes.many else words
        return Explained(facts.facts[0], words, None if own is None else own[1].pin)

    def _written(self, suspect: Suspect, report: numerics.NonfiniteReport, is_new: bool) -> tuple[str, Path | None]:
        """The message of the report, and where it is written, if it is new."""
        if self._run.processes.many and report.cause == "not replayable" and suspect.stage is Stage.TRAIN:
            report.caveats.append(
                "Each process repeated its own batches, and all were finite: the average of the gradients over the "
                "processes may be what was not."
            )
        return report.message, self._write(report, suspect) if is_new else None

    def _write(self, report: numerics.NonfiniteReport, suspect: Suspect) -> Path | None:
        folder = self._run.own_folder
        if folder is None:
            return None
        try:
            return numerics.write_report(
                folder, report, suspect.trial, suspect.batches, suspect.before.random, command=command_of_process()
            )
        except Exception as error:  # the message is logged all the same
            logger.warning("could not write the report of a nonfinite step: %s", error)
            return None


def _samples_of(report: numerics.NonfiniteReport, suspect: Suspect) -> str:
    """What tells the samples of a report from those of another; empty where none of the batch is to blame."""
    samples = report.samples
    if not samples:
        return ""
    batch = suspect.batches[samples[0][0] if isinstance(samples[0], list) else 0]
    if report.cause != "data" and len(samples) == numerics.samples_in(batch):  # it happens with every sample
        return ""
    # A place in a batch says nothing without the batch.
    names = report.dataset_indices or report.sample_files or (suspect.before.first, samples)
    return f"{suspect.stage.name} {suspect.test_pass}: {names}"


def versions_of(batches: Sequence[Any]) -> list[int]:
    """Return how often the tensors of the batches were written to; only of those at the top level, to lose no time."""
    tensors = [part for batch in batches for part in _parts(batch) if type(part) is torch.Tensor]
    return [version_of(tensor) for tensor in tensors if not tensor.is_inference()]


def _parts(batch: Any) -> Iterable[Any]:
    if type(batch) is dict:
        return batch.values()
    return batch if type(batch) in (tuple, list) else (batch,)


def command_of_process() -> dict[str, Any] | None:
    """Return the command that started this process; None if there is no script (a notebook)."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None:
        return None
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return {
        "script": str(Path(script).resolve()),
        "module": None if spec is None else spec.name,  # python -m package.train
        "words": sys.argv[1:],
        "cwd": str(Path.cwd()),
    }
