"""Lets Optuna choose the values of a sweep's runs, each from the results of those before it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from amp_recipes.commands.sweep.axes import Axis, Choice, Choices, Combination
from amp_recipes.errors import ConfigError

STUDY_FILE = "study.journal"


def import_optuna() -> ModuleType:
    """Optuna, which from here on logs warnings only. Raises ConfigError where it is not installed."""
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"--sweep-trials needs Optuna ({error}): pip install 'amp_recipes[sweep]'. A grid, without it, does not."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def open_study(optuna: ModuleType, folder: Path, mode: str, of: Sequence[Any]) -> Any:
    """The study of just this sweep in `folder`, new or as it was left.

    of: JSON values that distinguish this sweep from others in the folder; mode: "min" or "max".
    """
    file = folder / STUDY_FILE
    with suppress(FileNotFoundError):
        lines = file.read_bytes()
        if not lines.endswith(b"\n"):  # a crash of the machine can leave half a line, which Optuna does not get over
            os.truncate(file, lines.rfind(b"\n") + 1)
    # The sweep holds the lock of its folder. Optuna's own outlives a process that is killed.
    backend = optuna.storages.journal.JournalFileBackend(str(file), lock_obj=threading.Lock())
    return optuna.create_study(
        storage=optuna.storages.JournalStorage(backend),
        study_name=hashlib.sha256(json.dumps([mode, *of]).encode()).hexdigest()[:16],
        direction="maximize" if mode == "max" else "minimize",
        load_if_exists=True,
    )


def run_trials(
    optuna: ModuleType,
    study: Any,
    axes: Sequence[Axis],
    trials: int,
    seed: int | None,
    score: Callable[[Combination, int, int], float | None],
    interrupted: Callable[[], bool],
) -> None:
    """Call `score(values, number, trials)` for each trial, until there are `trials` of them or `interrupted()`.

    A score of None is a failed trial. One that was interrupted stays open, and continues next time. One that failed is
    tried again next time, as a run of a grid is, and is added to the study once more when it succeeds.
    """
    states = optuna.trial.TrialState
    distributions = {axis.key: _distribution(optuna, axis) for axis in axes}
    earlier, mended = _earlier_trials(optuna, study, set(distributions))
    for slot in range(trials):
        if interrupted():
            return
        is_new = slot >= len(earlier)
        trial = _new_trial(optuna, study, distributions, seed, slot) if is_new else earlier[slot]
        value = score(_values(axes, trial.params), slot + 1, trials)
        if value is None and interrupted():
            return
        if is_new or trial.state == states.RUNNING:
            study.tell(trial.number, value, states.FAIL if value is None else states.COMPLETE)
        elif trial.state == states.FAIL and value is not None and trial.number not in mended:
            mend = {"value": value, "user_attrs": {"again": trial.number}}
            study.add_trial(optuna.trial.create_trial(params=trial.params, distributions=distributions, **mend))


def _new_trial(optuna: ModuleType, study: Any, distributions: dict[str, Any], seed: int | None, slot: int) -> Any:
    """A trial with a seed of its own: a continued sweep chooses the same values as one that was never stopped."""
    own_seed = None if seed is None else int(np.random.SeedSequence([seed, slot]).generate_state(1)[0])
    study.sampler = optuna.samplers.TPESampler(seed=own_seed)
    return study.ask(distributions)


def _earlier_trials(optuna: ModuleType, study: Any, keys: set[str]) -> tuple[list[Any], set[int]]:
    """The trials that earlier starts chose, and the numbers of the failed ones that have succeeded since."""
    chosen, mended = [], set()
    for trial in study.get_trials(deepcopy=True):
        if "again" in trial.user_attrs:
            mended.add(trial.user_attrs["again"])
        elif set(trial.params) == keys:
            chosen.append(trial)
        elif trial.state == optuna.trial.TrialState.RUNNING:  # the process was killed while it noted the values
            study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return chosen, mended


def _distribution(optuna: ModuleType, axis: Axis) -> Any:
    if isinstance(axis, Choices):
        return optuna.distributions.CategoricalDistribution([choice.text for choice in axis.choices])
    if axis.whole:
        return optuna.distributions.IntDistribution(axis.low, axis.high, log=axis.log)
    return optuna.distributions.FloatDistribution(axis.low, axis.high, log=axis.log)


def _values(axes: Sequence[Axis], params: Mapping[str, Any]) -> Combination:
    values = {}
    for axis in axes:
        chosen = params[axis.key]
        if isinstance(axis, Choices):
            values[axis.key] = next(choice for choice in axis.choices if choice.text == chosen)
        else:
            values[axis.key] = Choice(repr(chosen), chosen)
    return values
