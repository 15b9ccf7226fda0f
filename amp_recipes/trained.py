"""Loads the model of a finished run, to predict with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from amp_recipes.brain import Brain
from amp_recipes.checkpoint import Checkpoint, best_checkpoint, load_weights, model_weights
from amp_recipes.checkpoint.folder import Damaged, numbered_folders, read_contents
from amp_recipes.config.experiment import RESOLVED_FILE
from amp_recipes.config.hparams import caller_file, load_called_from
from amp_recipes.config.yaml.mistakes import one_line
from amp_recipes.errors import CheckpointError

WEIGHTS_FILE = "model.safetensors"  # what `amp-recipes export` writes
ASSETS_FOLDER = "assets"  # what a recipe keeps there for its prediction, such as a tokenizer; exports take it along


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
    Raises CheckpointError for a folder that holds no finished run, and for damaged weights.
    """
    folder, settings = _find(Path(run))
    hparams = load_called_from(caller_file(), settings, dict(overrides or {}), trust)
    options = {"precision": precision, "eval_precision": precision, "device": device, "output_folder": None}
    brain = Brain(hparams["modules"], hparams=hparams, run_opts=options)
    load_weights(brain.modules, _weights(folder), str(folder))
    brain.modules.eval()
    return brain


def run_folder(run: str | Path) -> Path:
    """Return the folder with the settings and the `assets` of a run or an export, found as `load_trained` does."""
    return _find(Path(run))[1].parent


def _weights(folder: Path) -> dict[str, Any]:
    file = folder / WEIGHTS_FILE
    if file.is_file():
        try:
            return load_file(file)
        except (SafetensorError, OSError, KeyError) as error:  # KeyError: a dtype that torch does not have
            what = one_line(f"{file} is damaged or not readable ({error})")
            raise CheckpointError(f"{what}. Export the run again.") from error
    if not folder.name.startswith("CKPT+") and not _checkpoint_folders(folder):
        raise CheckpointError(f"No checkpoint in '{folder}'. Train first; a run with --debug leaves no checkpoint.")
    return model_weights(usable_checkpoint(folder))


def _checkpoint_folders(run: Path) -> list[Path]:
    return list(numbered_folders(run / "save" if (run / "save").is_dir() else run).values())


def usable_checkpoint(run: Path) -> Checkpoint:
    """Return the `best_checkpoint`, with different errors for damaged checkpoints and for none."""
    try:
        return best_checkpoint(run)
    except CheckpointError as error:
        folders = _checkpoint_folders(run)
        damaged = []
        for path in folders:
            try:
                read_contents(path)
            except Damaged as found:
                damaged.append(f"{path}: {found}")
        if not folders or len(damaged) < len(folders):
            raise
        listed = "\n  ".join(damaged)
        raise CheckpointError(f"Every checkpoint in {str(run)!r} is damaged:\n  {listed}") from error


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
