"""Checks the parts of a recipe: the names that its class defines, its modules, and its `opt_class`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import isroutine, unwrap
from types import CodeType, SimpleNamespace
from typing import Any

from torch import nn

from amp_recipes.errors import RecipeError, did_you_mean

logger = logging.getLogger(__name__)

# What the loop calls, and a recipe may define.
HOOKS = (
    *("compute_forward", "compute_objectives", "fit_batch", "evaluate_batch", "batch_weight", "update_average"),
    *("init_optimizers", "freeze_optimizers", "on_fit_start", "on_evaluate_start", "on_stage_start", "on_stage_end"),
    *("on_fit_batch_start", "on_fit_batch_end"),
)
# Hooks of other frameworks, which the loop does not call, and what does their work here.
_STEP = "compute_forward and compute_objectives"
_FOREIGN = {
    **dict.fromkeys(("training_step", "validation_step", "test_step"), _STEP),
    "configure_optimizers": "opt_class, or init_optimizers",
    **dict.fromkeys(("on_train_start", "on_train_begin"), "on_fit_start"),
    **dict.fromkeys(
        (
            "on_epoch_start",
            "on_epoch_begin",
            "on_train_epoch_start",
            "on_validation_start",
            "on_validation_epoch_start",
        ),
        "on_stage_start",
    ),
    **dict.fromkeys(("on_test_start", "on_test_epoch_start"), "on_stage_start"),
    **dict.fromkeys(
        ("on_epoch_end", "on_train_epoch_end", "on_validation_end", "on_validation_epoch_end", "on_test_epoch_end"),
        "on_stage_end",
    ),
    **dict.fromkeys(("training_epoch_end", "validation_epoch_end", "test_epoch_end", "on_test_end"), "on_stage_end"),
    **dict.fromkeys(("on_train_batch_start", "on_batch_begin"), "on_fit_batch_start"),
    **dict.fromkeys(("on_train_batch_end", "on_batch_end"), "on_fit_batch_end"),
}
_NEAR = 0.88  # `fit_bacth` is this near to `fit_batch`; `compute_forward_pass` is a name of its own


def check_class(recipe_class: type, base: type) -> None:
    """Raise RecipeError if the recipe's class misspells a hook, or gives a public name of `base` another meaning."""
    _check_hooks([kind for kind in recipe_class.__mro__ if kind not in base.__mro__])
    for name, meant in vars(base).items():
        own = getattr(recipe_class, name)
        if not name.startswith("_") and own is not meant:
            _check_meaning(recipe_class, name, own, meant)
    for name in base.__annotations__:
        own = getattr(recipe_class, name, None)
        if isroutine(own):
            raise _other_meaning(recipe_class, name, "a method", "an attribute")
        if isinstance(own, property) and own.fset is None:
            raise _other_meaning(recipe_class, name, "a property without a setter", "an attribute")


def _check_hooks(recipe_classes: Sequence[type]) -> None:
    """Raise RecipeError for a method that nothing calls and that has nearly the name of a hook.

    Warn of one that has the name of another framework's hook. A helper of the recipe is mentioned somewhere in its
    class.
    """
    methods = {name: own for kind in reversed(recipe_classes) for name, own in vars(kind).items() if isroutine(own)}
    missing = [name for name in HOOKS if name not in methods]
    foreign = sorted(methods.keys() & _FOREIGN.keys())
    for name in foreign:
        if name not in _mentioned(methods.values()):
            kind = recipe_classes[0].__name__
            logger.warning("%s.%s is not called: here, use %s instead.", kind, name, _FOREIGN[name])
    for name in sorted(methods.keys() - set(HOOKS) - set(foreign)):
        near = [] if name.startswith("_") else get_close_matches(name, missing, 1, _NEAR)
        if near and name not in _mentioned(methods.values()):
            kind = recipe_classes[0].__name__
            raise RecipeError(
                f"{kind}.{name} is not called by the loop, nor by {kind}. Did you mean {near[0]}? If it is a helper "
                "for other code, give it a name that is less like a hook's."
            )


def _mentioned(methods: Iterable[Any]) -> set[str]:
    """All names and strings in the code of these methods."""
    found: set[str] = set()
    codes = [getattr(unwrap(getattr(method, "__func__", method)), "__code__", None) for method in methods]
    while codes:
        code = codes.pop()
        if code is not None:
            found.update(code.co_names, (value for value in code.co_consts if isinstance(value, str)))
            codes += [value for value in code.co_consts if isinstance(value, CodeType)]
    return found


def _check_meaning(recipe_class: type, name: str, own: Any, meant: Any) -> None:
    if isroutine(meant) and not (callable(own) or hasattr(own, "__get__")):
        raise _other_meaning(recipe_class, name, f"an attribute ({own!r:.50})", "a method")
    if isinstance(meant, property) and not hasattr(own, "__get__"):
        raise _other_meaning(
            recipe_class, name, f"{own!r:.50} for all objects of the class", "an attribute that the loop sets"
        )
    if isinstance(meant, property) and isroutine(own):
        raise _other_meaning(recipe_class, name, "a method", "an attribute")


def _other_meaning(recipe_class: type, name: str, given: str, expected: str) -> RecipeError:
    kind = recipe_class.__name__
    return RecipeError(f"{kind}.{name} is {given}, but Brain.{name} is {expected}. Rename it in {kind}.")


def hidden_options(recipe_class: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """The run options whose names the recipe's class uses for something of its own, with a warning."""
    hidden = {name: value for name, value in options.items() if _has_its_own(recipe_class, name)}
    if hidden:
        names = ", ".join(sorted(hidden))
        logger.warning(
            "%s has attributes with the names of run options: %s. The options keep their values: read them as "
            "self.run_opts['...'].",
            recipe_class.__name__,
            names,
        )
    return hidden


def _has_its_own(recipe_class: type, name: str) -> bool:
    """Whether the class has something under the name that an object of it cannot take the option in."""
    own = getattr(recipe_class, name, None)
    takes_values = isinstance(own, property) and own.fset is not None
    return hasattr(recipe_class, name) and not takes_values


class RecipeHparams(SimpleNamespace):
    """The hyperparameters as attributes; one that is missing is an AttributeError that names the nearest."""

    def __getattr__(self, name: str) -> Any:
        near = "" if name.startswith("__") else did_you_mean(name, vars(self))
        raise AttributeError(f"hparams has no {name!r}.{near}")


def without(hidden: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values whose names are not hidden."""
    return {name: value for name, value in values.items() if name not in hidden}


def check_objects(modules: Any, opt_class: Any) -> None:
    """Raise RecipeError for modules without names, and for what makes no optimizer."""
    if not isinstance(modules, (Mapping, nn.ModuleDict, type(None))):
        raise RecipeError(
            f"modules is a {type(modules).__name__}; expected a dict from names to modules: {{'model': ...}}."
        )
    for name, module in (modules or {}).items():
        if not isinstance(module, (nn.Module, type(None))):
            raise RecipeError(
                f"modules['{name}'] is {module!r:.200}; expected a torch.nn.Module. In a YAML, `!new:` creates an "
                "object, while `!name:` only creates a function that does."
            )
    if opt_class is not None and not callable(opt_class):
        raise RecipeError(
            f"opt_class is an object of {type(opt_class).__name__}; expected a function or class that makes an "
            "optimizer from parameters: torch.optim.Adam, functools.partial(torch.optim.Adam, lr=1e-3), or "
            "`!name:torch.optim.Adam` in a YAML."
        )
