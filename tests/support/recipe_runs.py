"""How tests find a recipe, import it as its script does, and run it."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from programs import run_python
from repository import REPOSITORY

RECIPES = REPOSITORY / "recipes"
CONFIGS = REPOSITORY / "configs"


@contextmanager
def recipe_modules(task: str) -> Iterator[SimpleNamespace]:
    """The files of recipes/<task> as modules (`.train`, `.model` ...), found as in a run: by the folder on the path.

    Every recipe may call its files data, model and train, so none of them stays imported.
    """
    folder = RECIPES / task
    names = [path.stem for path in sorted(folder.glob("*.py"))]
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    sys.path.insert(0, str(folder))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(folder))
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


def run_script(
    task: str, *words: str, script: str = "train.py", cwd: Path | None = None
) -> subprocess.CompletedProcess:
    """Run a script of recipes/<task> as from the shell; its exit status must be 0."""
    finished = run_python(RECIPES / task / script, *words, cwd=cwd)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished


def stage_records(output_folder: Path) -> list[dict]:
    """The stage records of a run, in the order in which they were written."""
    lines = (Path(output_folder) / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record.get("kind") == "stage"]
