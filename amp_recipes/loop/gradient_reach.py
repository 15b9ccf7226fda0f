"""Reports after the first update parameters without an optimizer, and parameters without a gradient."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from amp_recipes.errors import listed
from amp_recipes.modules.unregistered import unregistered
from amp_recipes.precision.optimizers import parameters_of_optimizer

logger = logging.getLogger(__name__)

_NAMED = 8  # a line, not a page


class GradientReach:
    """The parameters that the losses of the first window depend on, and the optimizers that they were for."""

    def __init__(self) -> None:
        self._is_whole = True  # a function with a backward in Python may hide its inputs, as checkpointing does
        self._reached: dict[int, torch.Tensor] = {}
        self._optimizers: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether no loss that depends on a parameter was differentiated yet."""
        return not self._reached

    def follow(self, loss: torch.Tensor, optimizers: Iterable[str]) -> None:
        """Note the parameters behind a loss that is about to be differentiated for these optimizers."""
        self._optimizers.update(optimizers)
        pending, seen = [getattr(loss, "grad_fn", None)], set()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self._is_whole &= not isinstance(node, torch.autograd.function.BackwardCFunction)
            variable = getattr(node, "variable", None)
            if variable is not None:
                self._reached[id(variable)] = variable
            pending += [before for before, _ in node.next_functions]

    def report(self, holder: object, modules: nn.Module, optimizers: Mapping[str, Optimizer]) -> None:
        """Warn of what does not fit; holder: the object on which a recipe may keep modules of its own."""
        own = [value for value in vars(holder).values() if isinstance(value, Optimizer)]
        held = _held([*optimizers.values(), *own])
        # Of sharded ones the graph holds others, which are whole. None in common: copies in another precision, perhaps.
        sharded = any(hasattr(each, "device_mesh") for each in held.values())
        if sharded or held.keys().isdisjoint(self._reached):
            return
        if unused := self._not_in(held):
            logger.warning(
                "these parameters get gradients, but no optimizer holds them, so they are not trained: %s. To train "
                "them, register their module (in `modules`, or inside one of these modules, as an attribute or in a "
                "ModuleList) or give them to an optimizer. Otherwise freeze them with requires_grad_(False).",
                _listed(unused, holder, modules),
            )
        stepped = [optimizer for name, optimizer in optimizers.items() if name in self._optimizers]
        if self._is_whole and (idle := self._not_reached(stepped)):
            logger.warning(
                "an optimizer holds these parameters, but the loss of the first update does not depend on them: %s. "
                "They do not change unless a later batch uses them.",
                _listed(idle, holder, modules),
            )

    def _not_in(self, held: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        reached = self._reached.items()
        return [each for key, each in reached if key not in held and isinstance(each, nn.Parameter)]

    def _not_reached(self, optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
        return [each for key, each in _held(optimizers).items() if each.requires_grad and key not in self._reached]


def _held(optimizers: Iterable[Optimizer]) -> dict[int, torch.Tensor]:
    return {id(each): each for optimizer in optimizers for each in parameters_of_optimizer(optimizer)}


def _listed(parameters: Sequence[torch.Tensor], holder: object, modules: nn.Module) -> str:
    names = {id(parameter): name for name, parameter in _unregistered(holder, modules)}
    names |= {id(parameter): name for name, parameter in modules.named_parameters()}
    return listed(
        (names.get(id(each), f"an unnamed parameter of shape {list(each.shape)}") for each in parameters), _NAMED
    )


def _unregistered(holder: object, modules: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that hang on the recipe itself, or in a list or dict that a module has: torch does not see them."""
    holders = {"self": holder, "self.hparams": getattr(holder, "hparams", None)}
    for name, found in unregistered(modules, holders).items():
        if isinstance(found, nn.Parameter):
            yield name, found
        else:
            yield from ((f"{name}.{below}", each) for below, each in found.named_parameters(recurse=False))
