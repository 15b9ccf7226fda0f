"""Finds pins without effect: the module is not called, is TorchScript, or no longer exists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from amp_recipes.modules.nested import tensors_in
from amp_recipes.modules.torch_script import class_before_script
from amp_recipes.numerics.census.census import lies_in
from amp_recipes.numerics.census.rows import LOW
from amp_recipes.numerics.census.watch import CensusWatch
from amp_recipes.numerics.trial import Trial, Window
from amp_recipes.numerics.watch.observe import OUTSIDE, Attribution, OpWatch, dtype_name
from amp_recipes.precision import pinned_modules
from amp_recipes.precision.autocast import has_default_precision
from amp_recipes.precision.torch_private import Op


def lost_pins(
    trial: Trial, window: Window, names: Iterable[str], dtype: torch.dtype, scale: float = 1.0, standing: bool = False
) -> list[dict[str, str]]:
    """List the pins of these modules without effect in this window, and why, as {module, reason}.

    names: of modules, as in `trial.modules.named_modules()`. standing: they are pinned now, as the run's option
    `fp32_modules` did; then one that is not any more was replaced since. Beside them, what TorchScript made of a class
    that `fwd_default_precision` decorates is named. Takes one step, watched.
    """
    named = dict(trial.modules.named_modules(remove_duplicate=False))
    lost: list[dict[str, str]] = []
    live: list[str] = []
    pinned = {*pinned_modules(trial.modules), *(name for name, module in named.items() if _is_decorated(type(module)))}
    for name in dict.fromkeys(names):
        reason = _cannot_hold(name, named)
        if reason is None and standing and _first_name(named, name) not in pinned:
            reason = "is no longer pinned: the module, or its forward, was replaced after pinning"
        if reason is None:
            live.append(name)
        else:
            lost.append({"module": name, "reason": reason})

    ops, uses = CensusWatch(trial.modules), _WeightUses(trial.modules)
    outcome = trial.run(window, dtype, scale, live, watch=[ops, OpWatch(uses.at, uses.saw)])
    for name in outcome.pins.never_called():
        lost.append({"module": name, "reason": _never_called(name, uses.users(named[name]))})
    lost += [{"module": name, "reason": reason} for name, reason in _scripted(named, ops)]
    return lost


def _cannot_hold(name: str, named: dict[str, nn.Module]) -> str | None:
    """Return why a pin of this name has no effect in any step."""
    module = named.get(name)
    if module is None:
        nearest = difflib.get_close_matches(name, named, n=3)
        return "matches no module" + (f"; did you mean {' or '.join(nearest)}?" if nearest else "")
    if isinstance(module, torch.jit.ScriptModule):
        return f"is TorchScript, made from {_origin(module)}: compiled code ignores pins"
    if "forward" not in vars(module) and type(module).forward is nn.Module.forward:
        return f"{type(module).__name__} has no forward of its own; pin the modules that it holds"
    return None


def _is_decorated(module_class: type) -> bool:
    return has_default_precision(getattr(module_class, "forward", None))  # the class of a ScriptModule has none


def _first_name(named: dict[str, nn.Module], name: str) -> str:
    """The name under which `named_modules` has a module that stands under several."""
    return next(other for other, module in named.items() if module is named[name])


def _never_called(name: str, users: list[str]) -> str:
    if not users:
        return "its forward was not called: this step does not use it"
    where = " and ".join("the recipe's own code" if user == OUTSIDE else user or "the root" for user in users)
    hint = "" if users == [OUTSIDE] else f"; pin {where} instead"
    return f"its forward was not called: {where} used its weights directly{hint}"


class _WeightUses:
    """Records which module reads which parameter in the forward."""

    def __init__(self, modules: nn.Module) -> None:
        self.at = Attribution(modules)
        self._readers: dict[int, dict[str, None]] = {id(parameter): {} for parameter in modules.parameters()}

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        for tensor in tensors_in(args, kwargs):
            readers = self._readers.get(id(tensor))
            if readers is not None and self.at.here.phase == "forward":
                readers[self.at.here.module] = None

    def users(self, module: nn.Module) -> list[str]:
        """Names of the modules that read its parameters."""
        return list({name: None for parameter in module.parameters() for name in self._readers[id(parameter)]})


def _scripted(named: dict[str, nn.Module], ops: CensusWatch) -> Iterator[tuple[str, str]]:
    """Scripted modules that were made from decorated classes; with what ran low in the script that they are part of."""
    scripts = {name: module for name, module in named.items() if isinstance(module, torch.jit.ScriptModule)}
    for name, module in scripts.items():
        made_from = class_before_script(module)
        if made_from is None or not _is_decorated(made_from):
            continue
        # Ops inside a script belong to the outermost of it, which Python calls.
        outermost = next(above for above in scripts if lies_in(name, above))
        low = _low_ops(ops, outermost)
        ran = f"; {', '.join(low)} ran in {outermost or 'the root'}" if low else ""
        yield (
            name,
            f"is TorchScript, made from {_origin(module)}: compiling it dropped its fwd_default_precision{ran}. Call "
            "the class itself, or use torch.compile",
        )


def _low_ops(ops: CensusWatch, module: str) -> list[str]:
    found = {}
    for place, signature in ops.counts:
        dtypes = map(dtype_name, (*signature.inputs, *signature.outputs))
        low = next((dtype for dtype in dtypes if dtype in LOW), None)
        if place.module == module and place.phase == "forward" and signature.kind.doing == "compute" and low:
            found[f"{signature.kind.name} in {low}"] = None
    return list(found)


def _origin(module: torch.jit.ScriptModule) -> str:
    """The class that a script was made from, in words."""
    made_from = class_before_script(module)
    return module.original_name if made_from is None else f"{made_from.__module__}.{made_from.__qualname__}"
