"""Loads the model of a finished run, to predict with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from amp_recipes.brain import Brain
from amp_recipes.checkpoint import best_checkpoint, load_weights, model_weights
from amp_recipes.config.experiment import RESOLVED_FILE
from amp_recipes.config.hparams import caller_file, load_called_from
from amp_recipes.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"  # what `amp-recipes export` writes


def load_trained(
    run: str | Path,
    precision: str = "fp32",
    device: str | torch.device | None = None,
    overrides: Mapping[str, Any] | None = None,
    trust: Iterable[str] = (),
) -> Brain:
    """Return a Brain with the best weights of a finished run (the averaged ones, if the run averaged them).

    run: an output folder, one of its `CKPT+` folders, a folder with one run in it, or what `amp-recipes export` wrote.
    precision: of `brain.evaluation_ctx`; call the modules inside it. device: the best one if None.
    overrides, trust: changes of the run's settings, and what they may name besides, as for `load_hparams`.
    The modules are on the device, in evaluation mode. Nothing is written.
    Raises CheckpointError for a folder that holds no finished run.
    """
    folder, settings = _find(Path(run))
    hparams = load_called_from(caller_file(), settings, dict(overrides or {}), trust)
    options = {"precision": precision, "eval_precision": precision, "device": device, "output_folder": None}
    brain = Brain(hparams["modules"], hparams=hparams, run_opts=options)
    load_weights(brain.modules, _weights(folder), str(folder))
    brain.modules.eval()
    return brain


def _weights(folder: Path) -> dict[str, Any]:
    if (folder / WEIGHTS_FILE).is_file():
        return load_file(folder / WEIGHTS_FILE)
    try:
        return model_weights(best_checkpoint(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{error} Train first; a run with --debug leaves no checkpoint.") from error


def _find(folder: Path) -> tuple[Path, Path]:
    """Return the folder with the weights, and the file of the run's settings."""
    if not folder.is_dir():
        raise CheckpointError(f"'{folder}' is not a folder; expected the output folder of a run")
    homes = [folder, *folder.absolute().parents[:2]] if folder.name.startswith("CKPT+") else [folder]
    for home in homes:
        if (home / RESOLVED_FILE).is_file():
            return folder, home / RESOLVED_FILE
    inside = {path.parent for path in folder.rglob(RESOLVED_FILE)}
    runs = sorted(each for each in inside if inside.isdisjoint(each.parents))  # not a run's own `debug` or `export`
    if len(runs) == 1:
        return runs[0], runs[0] / RESOLVED_FILE
    if runs:
        listed = "\n  ".join(map(str, runs))
        raise CheckpointError(f"'{folder}' holds {len(runs)} runs; give one of them:\n  {listed}")
    raise CheckpointError(f"'{folder}' has no {RESOLVED_FILE}; expected the output folder of a finished run")
