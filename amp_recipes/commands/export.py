"""Exports the model of a finished run as files that can be read without this package."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from amp_recipes import __version__
from amp_recipes.checkpoint import Checkpoint, model_weights
from amp_recipes.checkpoint.folder import best_by
from amp_recipes.checkpoint.hashed_file import file_sha256
from amp_recipes.commands.run_records import write_object
from amp_recipes.config.experiment import RESOLVED_FILE
from amp_recipes.config.yaml.mistakes import one_line
from amp_recipes.errors import CheckpointError
from amp_recipes.files.run_files import refuse_irregular, refuse_link, write_atomically
from amp_recipes.trained import ASSETS_FOLDER, WEIGHTS_FILE, usable_checkpoint

ABOUT_FILE = "export.json"


@dataclass(frozen=True)
class Exported:
    """The result of an export: folder, names of the files in it, and the content of `export.json`.

    left_out: entries of the model's state that are no tensors, which safetensors does not hold.
    """

    folder: Path
    files: tuple[str, ...]
    about: dict[str, Any]
    left_out: tuple[str, ...]

    def report(self) -> str:
        """Return text on what was written and how to load it."""
        lines = [f"{self.about['checkpoint']}: {self._which()}"]
        for name in self.files:
            lines.append(f"  wrote {self.folder / name} ({(self.folder / name).stat().st_size / 1e6:.2f} MB)")
        if RESOLVED_FILE not in self.files:
            lines.append(f"  no {RESOLVED_FILE}: the run saved none (a Brain saves what load_hparams returned)")
        if self.left_out:
            lines.append(f"  left out, since they are not tensors: {', '.join(self.left_out)}")
        strict = ", strict=False" if self.left_out else ""
        lines += [
            "To load it, where `modules` is the dict of modules that the recipe gives to its Brain:",
            "  from safetensors.torch import load_file",
            f"  torch.nn.ModuleDict(modules).load_state_dict(load_file({str(self.folder / WEIGHTS_FILE)!r}){strict})",
        ]
        return "\n".join(map(one_line, lines))  # a metric's or a folder's name may hold anything

    def _which(self) -> str:
        which = f"best {self.about['metric']}, {self.about['value']}" if self.about["metric"] else "the newest"
        epoch = "" if self.about["epoch"] is None else f", epoch {self.about['epoch']}"
        return f"{which}{epoch}" + (", averaged weights" if self.about["averaged"] else "")


def export_run(run: str | Path, to: str | Path | None = None) -> Exported:
    """Write the weights of the run's best checkpoint, its resolved settings, and where they come from.

    run: an output folder, or one `CKPT+` folder. to: default, the folder `export` in the run's.
    `model.safetensors` holds every tensor under its name in `modules` (tied ones under each of their names);
    `hyperparams.yaml` is a copy of the run's; `export.json` has source, metric, epoch, versions and sha256;
    the files in the run's `assets` are copied.
    Each file is written whole or not at all, `export.json` last.
    Raises CheckpointError if there is no checkpoint, it is damaged, or the folder cannot be written; ConfigError where
    in the run's folder a file is a link, or is not a regular file.
    """
    _refuse_linked_checkpoints(Path(run))
    checkpoint = usable_checkpoint(Path(run))
    refuse_link(checkpoint.path)
    home = _home(Path(run), checkpoint.path)
    refuse_irregular(home / RESOLVED_FILE)
    refuse_link(home / ASSETS_FOLDER)
    assets = sorted(path for path in (home / ASSETS_FOLDER).glob("*") if not path.name.startswith("."))
    for path in assets:
        refuse_irregular(path)
    weights = model_weights(checkpoint)
    tensors = _storable(weights, checkpoint.path)
    about = _about(checkpoint, home)
    folder = home / "export" if to is None else Path(to)
    if to is None:
        refuse_link(folder)
    try:
        files = _write_export(folder, home, tensors, about, assets)
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that it does not know
        raise CheckpointError(f"{checkpoint.path}: safetensors cannot hold its weights: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"The export to {str(folder)!r} failed: {error.strerror or error}. Give another folder with --to."
        ) from error
    return Exported(folder, files, about, tuple(name for name in weights if name not in tensors))


def _refuse_linked_checkpoints(run: Path) -> None:
    for folder in (run / "save", run):
        if folder.name == "save" or folder.name.startswith("CKPT+"):
            refuse_link(folder)


def _about(checkpoint: Checkpoint, home: Path) -> dict[str, Any]:
    """Return the origin of exported weights. home: the run's folder."""
    metric, _ = best_by(checkpoint) or (None, None)
    return {
        "run": str(home.resolve()),
        "checkpoint": str(checkpoint.path.resolve()),
        "metric": metric,
        "value": checkpoint.meta.get(metric),
        "epoch": checkpoint.meta.get("epoch"),
        "averaged": (checkpoint.path / "ema.safetensors").is_file(),
        "amp_recipes": __version__,
        "torch": torch.__version__,
    }


def _write_export(
    folder: Path, home: Path, tensors: dict[str, Tensor], about: dict[str, Any], assets: list[Path]
) -> tuple[str, ...]:
    """Write the files of an export, whose names are returned; the digest of the weights is added to `about`."""
    folder.mkdir(parents=True, exist_ok=True)
    # safetensors takes strings only.
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    _write_weights(tensors, folder / WEIGHTS_FILE, {"format": "pt", **words})
    about["sha256"] = file_sha256(folder / WEIGHTS_FILE)
    has_settings = (home / RESOLVED_FILE).is_file()
    if has_settings:
        write_atomically(folder / RESOLVED_FILE, (home / RESOLVED_FILE).read_bytes())
    if assets:
        refuse_link(folder / ASSETS_FOLDER)
        (folder / ASSETS_FOLDER).mkdir(exist_ok=True)
    for path in assets:
        write_atomically(folder / ASSETS_FOLDER / path.name, path.read_bytes())
    write_object(folder / ABOUT_FILE, about)
    copied = [f"{ASSETS_FOLDER}/{path.name}" for path in assets]
    return (WEIGHTS_FILE, *([RESOLVED_FILE] if has_settings else []), *copied, ABOUT_FILE)


def _home(run: Path, checkpoint: Path) -> Path:
    """The output folder: the one above the checkpoint that has the run's settings, else the one that was given."""
    folder = next((above for above in list(checkpoint.parents)[:3] if (above / RESOLVED_FILE).is_file()), None)
    if folder is not None:
        return folder
    beside = checkpoint.parent.parent if checkpoint.parent.name == "save" else checkpoint.parent
    return beside if run.name.startswith("CKPT+") or run.name == "save" else run


def _storable(weights: Mapping[str, Any], source: Path) -> dict[str, Tensor]:
    """The tensors on the host, each with memory of its own: safetensors refuses two that share it."""
    found = {name: value.detach().cpu().contiguous() for name, value in weights.items() if isinstance(value, Tensor)}
    if not found:
        raise CheckpointError(f"{source} holds no tensor of the model: there is nothing to export.")
    taken: set[int] = set()
    for name, tensor in found.items():
        memory = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if memory in taken else tensor
        taken.add(memory)
    return found


def _write_weights(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    """Write `file` in a folder that nobody else can write to, and move it here once it is whole on the disk."""
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as private:
        written = Path(private, file.name)
        save_file(tensors, written, metadata=metadata)
        with open(written, "rb+") as stream:
            os.fsync(stream.fileno())
        os.chmod(written, file.parent.stat().st_mode & 0o666)  # safetensors leaves it to its owner alone
        os.replace(written, file)
