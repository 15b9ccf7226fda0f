"""Makes the default model and the default data once, and keeps them for later runs."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from stdlib_texts import labelled_functions

from amp_recipes import needs_extra
from amp_recipes.errors import ConfigError, DataError

with needs_extra("finetuning"):
    from filelock import FileLock

logger = logging.getLogger(__name__)

RECIPE = Path(__file__).resolve().parent
# Set by torchrun; the process that pretrains is not one of its ranks.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def make_functions(cache_folder: str | Path) -> Path:
    """Return a CSV of functions of the standard library in cache_folder, made if it is not there."""
    return make_once(cache_folder, "functions.csv", write_functions)


def find_model(model_folder: str | Path | None, cache_folder: str | Path, pretraining_updates: int) -> Path:
    """Return model_folder, or that of a tiny model in cache_folder, pretrained if it is not there."""
    if model_folder:
        return Path(model_folder)
    if pretraining_updates < 1:
        raise ConfigError(f"pretraining_updates is {pretraining_updates}; expected 1 or more")
    pretrain = partial(pretrain_apart, updates=pretraining_updates)
    return make_once(cache_folder, f"tiny_llama_{pretraining_updates}", pretrain)


def make_once(cache_folder: str | Path, name: str, make: Callable[[Path], None]) -> Path:
    """Return a file or folder in the cache that `make` writes where it is missing.

    It appears whole or not at all, and of several processes one makes it while the others wait. Another version of
    Python (its library differs) or of this recipe makes its own.
    """
    folder = Path(cache_folder).expanduser().resolve() / recipe_version()
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / name
    with FileLock(folder / f".{name}.lock"):  # the system releases it if this process is killed
        if not found.exists():
            unfinished = folder / f".{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(found)
    return found


def recipe_version() -> str:
    """Return a short hash of the Python version and the code that make the content of the cache."""
    parts = [
        sys.version,
        *((RECIPE / name).read_text(encoding="utf-8") for name in ("stdlib_texts.py", "tiny_model.py")),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def write_functions(path: Path) -> None:
    """Write the labelled functions as CSV."""
    path.write_text(labelled_functions(), encoding="utf-8")


def pretrain_apart(folder: Path, updates: int) -> None:
    """Run tiny_model.py in another process, so that it does not use the random generators of this one."""
    logger.warning(
        "no model_folder is given: pretraining a tiny model, once, for about a minute, into %s", folder.parent
    )
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(RECIPE / "tiny_model.py"), str(folder), str(updates)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    if finished.returncode != 0:
        raise DataError(f"the tiny model could not be made by {' '.join(command)}:\n{finished.stderr[-2000:]}")
