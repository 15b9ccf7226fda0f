"""Runs a recipe's script and records, before each update, everything that affects it.

    python -m amp_recipes.commands.verify_resume.probe TRACE.jsonl STEPS KILL_AT SCRIPT YAML [--option value ...]

The script runs as Python itself would run it, until its first `Brain.fit` returns, which it does after STEPS updates in
all, those before a resume included. With KILL_AT > 0 the process kills itself after that many updates, once what it
was saving is on the disk. An update is a window here, whatever number of optimizers step in it. Validation is cut to a
few batches.
"""

from __future__ import annotations

import functools
import json
import os
import random
import runpy
import signal
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from amp_recipes.checkpoint import clean_names
from amp_recipes.commands.verify_resume.compare import SECTIONS, UNSEEDED_SUFFIX
from amp_recipes.commands.verify_resume.digests import Digests, digest_of_tree
from amp_recipes.commands.verify_resume.remembered import remembered_values
from amp_recipes.loop import tasks
from amp_recipes.loop.tasks import Train
from amp_recipes.stage import Stage
from amp_recipes.state.randomness import random_state

VALID_BATCHES = 3

_WINDOWS = "probed_windows"  # in the checkpoint
_PACKAGES = {"site-packages", "dist-packages"}
_NOT_THE_RECIPES = tuple(
    {str(Path(folder).resolve()) + os.sep for folder in map(sysconfig.get_path, ("stdlib", "platstdlib"))}
    | {str(Path(__file__).resolve().parents[2]) + os.sep}
)


class Probe:
    """The task of a script under the probe: trains, and writes one line per window before it, and one after it.

    One more comes when `fit` returns, which ends the program. steps: windows after which training ends; kill_at:
    windows after which the process kills itself; 0: never. windows: how many the run has trained on, those before the
    resume included.
    """

    def __init__(self, trace: TextIO, steps: int, kill_at: int, script_folder: Path) -> None:
        self._training = Train()
        self.evaluate = self._training.evaluate
        self.trains, self.watch = True, self
        self._trace = trace
        self._steps = steps
        self._kill_at = kill_at
        self._script_folder = script_folder
        self.windows = 0

    def fit(self, run: Any, call: Any) -> None:
        """Train; the program ends when the fit does."""
        self._training.fit(run, call)
        self._write("end", run, [])
        raise SystemExit(0)

    @property
    def is_over(self) -> bool:
        """Whether training is to end."""
        return self.windows >= self._steps

    def limited(self, batches: Iterator[Any], stage: Stage) -> Iterator[Any]:
        """All batches of the training, a few of a validation."""
        return batches if stage is Stage.TRAIN else islice(batches, VALID_BATCHES)

    def before_window(self, run: Any, batches: Sequence[Any]) -> None:
        """Record everything that affects the window."""
        self._write("window", run, batches)

    def after_window(self, run: Any, losses: Sequence[torch.Tensor]) -> None:
        """Record its losses; kill the process if it is time."""
        self._line({"kind": "loss", "losses": [float(loss).hex() for loss in losses]})
        self.windows += 1
        if self.windows == self._kill_at:
            run.checkpoints.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    # The count is saved: neither the Brain's count of optimizer steps nor the place of a batch gives it.

    def state_dict(self) -> dict[str, Any]:
        """The count of windows."""
        return {_WINDOWS: self.windows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.windows = state.get(_WINDOWS, 0)

    def _write(self, kind: str, run: Any, batches: Sequence[Any]) -> None:
        run.pending.settle()  # so that the schedulers and the averages of the update before have followed
        sections = _sections(run, batches)
        self._line(
            {
                "kind": kind,
                "update": self.windows + 1,
                "epoch": run.current.epoch,
                "step": run.current.step + 1,
                "batches": len(batches),
                "sections": sections,
                "sizes": {name: [found.tensors, found.bytes] for name, found in sections.items()},
                "unread": sorted(set().union(*(found.unread for found in sections.values()))),
                "remembered": remembered_values(run, self._script_folder),
            }
        )

    def _line(self, record: dict[str, Any]) -> None:
        self._trace.write(json.dumps(record) + "\n")
        self._trace.flush()


def _sections(run: Any, batches: Sequence[Any]) -> dict[str, Digests]:
    """Everything that decides about the update of these batches, in the order in which it is compared."""
    sections = {name: Digests() for name in SECTIONS}
    for index, batch in enumerate(batches):
        sections["data"].add(batch, f"batch {index + 1}" if len(batches) > 1 else "batch")
    sections["random"].update(generators(run.device))
    _add_modules(sections["modules"], run.modules)
    names = clean_names(run.modules)
    parameters = {id(parameter): names.get(name, name) for name, parameter in run.modules.named_parameters()}
    for name, optimizer in run.recipe.optimizers_dict.items():
        _add_optimizer(sections["optimizers"], name, optimizer, parameters)
    for name, scheduler in run.schedulers.by_optimizer.items():
        sections["schedulers"].add(scheduler.state_dict(), name)
    if run.plan.scaler.is_enabled():
        sections["scaler"].add(run.plan.scaler.state_dict(), "scaler")
    sections["ema"].add(run.ema.state_dict())
    return sections


def _add_modules(found: Digests, modules: torch.nn.Module) -> None:
    state, names = modules.state_dict(), clean_names(modules)
    for name, value in state.items():
        found.add(value, names.get(name, name))
    for name, buffer in modules.named_buffers():
        if name not in state:
            found.add(buffer, f"{name} (a buffer with persistent=False)")


def _add_optimizer(found: Digests, name: str, optimizer: Any, parameters: dict[int, str]) -> None:
    for number, group in enumerate(optimizer.param_groups):
        found.add({key: value for key, value in group.items() if key != "params"}, f"{name}.group {number}")
        for index, parameter in enumerate(group["params"]):
            of = parameters.get(id(parameter), f"group {number} parameter {index}")
            if parameter in optimizer.state:
                found.add(dict(optimizer.state[parameter]), f"{name}.{of}")


def generators(device: torch.device) -> dict[str, str]:
    """The digest of each global random generator's state."""
    return {name: digest_of_tree(state) for name, state in random_state(device).items()}


@contextmanager
def noting_unseeded(file: Path) -> Iterator[None]:
    """Write to `file` each place of the recipe that seeds from the machine's entropy in the block, also in workers.

    What libraries do, when they are imported above all, is not the recipe's doing.
    """
    places = [(np.random, "default_rng"), (np.random, "seed"), (random, "seed"), (torch, "seed")]
    originals = [(owner, name, getattr(owner, name)) for owner, name in places]
    written: set[str] = set()

    def note(text: str) -> None:
        if text not in written:
            written.add(text)
            with open(file, "a", encoding="utf-8") as stream:
                stream.write(text + "\n")

    for owner, name, original in originals:
        setattr(owner, name, _noting(original, f"{owner.__name__}.{name}()", note))
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _noting(original: Callable[..., Any], what: str, note: Callable[[str], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if all(value is None for value in [*args, *kwargs.values()]):
            frame = sys._getframe(1)
            if _is_the_recipes(frame.f_code.co_filename):
                note(f"{what} without a seed at {frame.f_code.co_filename}:{frame.f_lineno}")
        return original(*args, **kwargs)

    return noted


@functools.cache
def _is_the_recipes(file: str) -> bool:
    """Whether code of that file is of neither a package, the standard library, nor made by an import or at run time."""
    path = Path(file).resolve()
    if file.startswith("<") or _PACKAGES.intersection(path.parts):
        return False
    return not str(path).startswith(_NOT_THE_RECIPES)


def main(argv: Sequence[str]) -> None:
    """Run the script that `argv` names under the probe."""
    trace, steps, kill_at, script, *arguments = argv
    folder = Path(script).resolve().parent
    sys.argv = [script, *arguments]
    sys.path[0] = str(folder)
    with open(trace, "w", encoding="utf-8") as stream:
        probe = Probe(stream, int(steps), int(kill_at), folder)
        with noting_unseeded(Path(trace + UNSEEDED_SUFFIX)), tasks.given(probe):
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
