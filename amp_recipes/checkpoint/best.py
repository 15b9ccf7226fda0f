"""Finds the checkpoint that holds the model of a finished run, and reads its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from amp_recipes.checkpoint.checkpointer import Checkpointer
from amp_recipes.checkpoint.folder import STATE_SUFFIX, Checkpoint, best_by
from amp_recipes.checkpoint.loading import load_all, mismatches
from amp_recipes.checkpoint.names import clean_state
from amp_recipes.checkpoint.reading import shared_as
from amp_recipes.errors import CheckpointError


def best_checkpoint(run: str | Path) -> Checkpoint:
    """The checkpoint that stands for `run`.

    run: an output folder, or its `save` folder: the best by the metric that the run kept the best of, or the newest
        where there is no such; or one `CKPT+` folder: that one.
    Raises CheckpointError if there is none.
    """
    run = Path(run)
    if run.name.startswith("CKPT+"):
        found = [checkpoint for checkpoint in _checkpoints_in(run.parent) if checkpoint.path == run]
        if not found:
            raise CheckpointError(f"{str(run)!r} is not a readable checkpoint.")
        return found[0]
    folder = run / "save" if (run / "save").is_dir() else run
    checkpoints = _checkpoints_in(folder)
    if not checkpoints:
        raise CheckpointError(
            f"No checkpoint in {str(run)!r}. Expected the output folder of a run, or one of its CKPT+ folders."
        )
    by = next(filter(None, map(best_by, checkpoints)), None)
    if by is None:
        return checkpoints[0]
    metric, mode = by
    best = Checkpointer(folder).find_checkpoint(**{f"{mode}_key": metric})
    return best or checkpoints[0]


def _checkpoints_in(folder: Path) -> list[Checkpoint]:
    return Checkpointer(folder).list_checkpoints() if folder.is_dir() else []


def model_weights(checkpoint: Checkpoint, like: nn.Module | None = None) -> dict[str, Any]:
    """The tensors of the model by name: averaged ones (`ema_decay`) where the run kept an average, as it evaluates.

    like: modules that are to take them; of what lies in parts on several processes there, only the part of this one
    is read. Raises CheckpointError if files of it are damaged, or it holds no modules.
    """
    names = [name for name in ("modules", "ema") if (checkpoint.path / f"{name}{STATE_SUFFIX}").is_file()]
    if "modules" not in names:
        raise CheckpointError(
            f"{checkpoint.path} has no state of 'modules': it was saved by a recipe's own checkpointer."
        )
    layout = None if like is None else clean_state(like, like.state_dict())
    states = Checkpointer(checkpoint.path.parent).read(checkpoint, names, dict.fromkeys(names, layout))
    weights, averaged = states["modules"], states.get("ema", {})
    # A tied weight has one name in the average and several in the model, all for one tensor.
    by_tensor = {id(weights[name]): average for name, average in averaged.items() if name in weights}
    return {name: by_tensor.get(id(weight), weight) for name, weight in weights.items()}


def load_weights(modules: nn.Module, weights: dict[str, Any], source: str) -> None:
    """Give `modules` the weights that `model_weights` returned; source: what messages call them.

    Raises CheckpointError that lists every name or shape that differs; nothing is loaded then.
    """
    problems = mismatches("modules", modules, weights)
    if problems:
        listed = "\n  ".join(problems)
        raise CheckpointError(f"{source} is from a different model; nothing was loaded.\n  {listed}")
    load_all({"modules": modules}, {"modules": shared_as(modules, weights)}, source)
