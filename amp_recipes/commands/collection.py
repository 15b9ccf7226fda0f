"""Finds the recipes of the package: each is a folder of scripts, with one or more YAML files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from amp_recipes.errors import ConfigError, did_you_mean

# The header of each YAML says what the recipe does, what to install and how to start it.
_NEEDS = re.compile(r"^# Needs: +(.+)$", re.MULTILINE)
_LAUNCH = re.compile(r"^# Launch: +python recipes/(\w+)/train\.py ", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """A recipe of the package; summary: its purpose; needs: the command that installs what it imports."""

    name: str
    summary: str
    needs: str
    folder: Path
    hparams_file: Path

    @property
    def script(self) -> Path:
        """What trains it."""
        return self.folder / "train.py"


@cache
def recipes() -> dict[str, Recipe]:
    """Return the recipes by the name of their YAML file."""
    found = {}
    root = _root()
    for hparams_file in sorted((root / "configs").glob("*.yaml")):
        text = hparams_file.read_text(encoding="utf-8")
        summary, needs, launch = text.partition("\n")[0], _NEEDS.search(text), _LAUNCH.search(text)
        if needs is not None and launch is not None:
            folder = root / "recipes" / launch[1]
            found[hparams_file.stem] = Recipe(
                hparams_file.stem, summary.removeprefix("# "), needs[1], folder, hparams_file
            )
    return found


def recipe_called(name: str) -> Recipe:
    """Return the recipe of that name. Raises ConfigError if there is none."""
    found = recipes().get(name)
    if found is None:
        names = ", ".join(recipes()) or "(none was installed)"
        raise ConfigError(f"there is no recipe '{name}'; expected one of {names}.{did_you_mean(name, recipes())}")
    return found


def _root() -> Path:
    """Return the folder of `recipes` and `configs`: the installed package, or its parent in a checkout."""
    package = Path(str(files("amp_recipes")))
    installed = package / "collection"
    return installed if installed.is_dir() else package.parent
