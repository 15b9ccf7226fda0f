"""Finds the values that a recipe keeps where a checkpoint may not see them: globals, closures, class attributes.

They do not decide about equality (a clock may be among them); they show which value explains a difference.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import random
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from amp_recipes.brain import Brain
from amp_recipes.commands.verify_resume.compare import GENERATOR, TRAIN_SET
from amp_recipes.commands.verify_resume.digests import SEQUENCES, digest_of_tree, is_flat, is_scalar
from amp_recipes.state.randomness import GENERATORS

_MAX_ENTRIES = 2000
_MAX_DEPTH = 5
_MAX_ITEMS = 1000  # of one container
_MAX_BYTES = 1 << 20  # of one tensor
_MAX_TEXT = 60


def remembered_values(run: Any, script_folder: Path) -> dict[str, str]:
    """Return a mapping from the place of each value (`train.py: calls`, `train_set.rng`) to its text or digest.

    script_folder: functions, classes and objects of the modules below it are looked into, of no others.
    """
    walk = _Walk(script_folder)
    brain, framework = run.recipe, run.recipe_state.not_the_recipes
    own = {name: value for name, value in vars(brain).items() if name not in framework}
    walk.visit_all(own, "brain.")
    for kind in filter(walk.is_the_recipes, type(brain).__mro__):
        walk.visit(kind, kind.__qualname__.rpartition("<locals>.")[2])
    walk.visit_all(vars(brain.hparams), "hparams.")
    for name, module in brain.modules.named_modules():
        if walk.is_the_recipes(type(module)):
            own = {key: value for key, value in vars(module).items() if key not in _TORCHS_OWN}
            walk.visit_all(own, f"modules.{name}.")
    dataset = getattr(run.fit.loaders.get("train"), "dataset", None)
    while dataset is not None:  # a Subset holds the one that reads the samples
        walk.visit(dataset, TRAIN_SET)
        dataset = getattr(dataset, "dataset", None)
    for module in filter(walk.is_in_folder, list(sys.modules.values())):
        walk.visit_all(vars(module), f"{Path(module.__file__).name}: ")
    return walk.found


class _Walk:
    """Goes through values and the containers, functions and objects of the recipe that hold them."""

    def __init__(self, folder: Path) -> None:
        self.found: dict[str, str] = {}
        self._folder = folder.resolve()
        self._seen: dict[int, Any] = {}  # with the objects, since an id is given again once its object is gone

    def is_in_folder(self, module: Any) -> bool:
        """Whether a module is part of the recipe."""
        file = getattr(module, "__file__", None)
        if not isinstance(module, ModuleType) or not isinstance(file, str):
            return False
        path = Path(file).resolve()
        is_own = path.is_relative_to(self._folder) and "site-packages" not in path.parts
        return is_own and module.__name__.partition(".")[0] != "amp_recipes"

    def is_the_recipes(self, kind: Any) -> bool:
        """Whether a class or function was written in the recipe."""
        module = sys.modules.get(getattr(kind, "__module__", None) or "")
        return module is not None and self.is_in_folder(module)

    def visit(self, value: Any, path: str, depth: int = 0) -> None:
        """Enter `value`, or what it holds."""
        if len(self.found) >= _MAX_ENTRIES or depth > _MAX_DEPTH:
            return
        if isinstance(value, Brain):
            return  # the recipe's own attributes of it are looked at apart; the others are the framework's
        # Any object may be there, and one that cannot be read must not end the run.
        with suppress(Exception):
            text = _text(value)
            if text is not None:
                self.found.setdefault(path, text)
            elif id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit_inside(value, path, depth + 1)

    def visit_all(self, values: Mapping[str, Any], prefix: str, depth: int = 0) -> None:
        """Enter values by their names, but for what Python itself keeps under `__names__`."""
        for name, value in list(values.items()):
            if not name.startswith("__"):
                self.visit(value, f"{prefix}{name}", depth)

    def _visit_inside(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, (Mapping, *SEQUENCES)):
            if len(value) <= _MAX_ITEMS:
                for key, item in list(value.items() if isinstance(value, Mapping) else enumerate(value)):
                    self.visit(item, f"{path}[{key!r}]", depth)
        elif isinstance(value, _CODE):
            self._visit_code(value, path, depth)
        elif isinstance(value, nn.Module):
            return  # its state is compared tensor by tensor
        elif isinstance(value, SimpleNamespace) or (hasattr(value, "__dict__") and self._holds_values(value)):
            self.visit_all(vars(value), f"{path}.", depth)

    def _visit_code(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._visit_inside(part, path, depth)
        elif not isinstance(value, FunctionType):
            for name in ("__self__", "__func__", "fget", "fset"):
                if hasattr(value, name):
                    self.visit(getattr(value, name), path, depth)
        elif self.is_the_recipes(value):
            self._visit_function(value, path, depth)

    def _holds_values(self, value: Any) -> bool:
        return self.is_the_recipes(value if isinstance(value, type) else type(value))

    def _visit_function(self, function: FunctionType, path: str, depth: int) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a cell that is still empty
                continue
            if name != "__class__":
                self.visit(value, f"{path}, variable {name}", depth)
        for name, value in vars(function).items():
            self.visit(value, f"{path}.{name}", depth)
        for name, parameter in inspect.signature(function).parameters.items():
            if isinstance(parameter.default, (list, dict, set)):
                self.visit(parameter.default, f"{path}, default of {name}", depth)


_CODE = (functools.partial, FunctionType, MethodType, staticmethod, classmethod, property)
_TORCHS_OWN = frozenset(vars(nn.Module()))


def _text(value: Any) -> str | None:
    """A value as text if it is short, else its digest; None for what has to be looked into."""
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, GENERATORS):
        # The module-level generator of Python is compared as such.
        return None if value is getattr(random, "_inst", None) else f"{GENERATOR} {digest_of_tree(value)}"
    if isinstance(value, (Tensor, np.ndarray)):
        small = math.prod(value.shape) * value.itemsize <= _MAX_BYTES
        return f"{type(value).__name__} {digest_of_tree(value)}" if small else None
    return _plain_text(value) if is_flat(value) and not isinstance(value, type) else None


def _plain_text(value: Any) -> str:
    if not is_scalar(value) and hasattr(value, "__len__") and len(value) > _MAX_ITEMS:
        return f"{type(value).__name__} of {len(value)}"
    text = repr(value)
    return text if len(text) <= _MAX_TEXT else f"{type(value).__name__} {digest_of_tree(value)}"
