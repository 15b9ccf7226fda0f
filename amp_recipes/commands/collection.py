"""Finds the recipes that come along with the package: a folder of scripts each, and the YAML files that set them up."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from amp_recipes.errors import ConfigError, did_you_mean

# The header of each YAML begins with what the recipe does, and tells what to install and how it is started.
_NEEDS = re.compile(r"^# Needs: +(.+)$", re.MULTILINE)
_LAUNCH = re.compile(r"^# Launch: +python recipes/(\w+)/train\.py ", re.MULTILINE)


@dataclass(frozen=True)
class Recipe:
    """A recipe that comes along; summary: what it does; needs: the command that installs what it imports."""

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
    """By the name of the YAML file."""
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
    """Raises ConfigError for a name that no recipe has."""
    found = recipes().get(name)
    if found is None:
        names = ", ".join(recipes()) or "(none was installed)"
        raise ConfigError(f"there is no recipe '{name}'; expected one of {names}.{did_you_mean(name, recipes())}")
    return found


def _root() -> Path:
    """Where `recipes` and `configs` lie: in the package once it is installed, beside it in a checkout."""
    package = Path(str(files("amp_recipes")))
    installed = package / "collection"
    return installed if installed.is_dir() else package.parent
