"""Divides layers over several processes, which compute them together on the same data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from amp_recipes.distributed.meshes import TENSOR
from amp_recipes.errors import ConfigError
from amp_recipes.modules.names import matching

OPTION = "tensor_parallel_plan"
COLWISE, ROWWISE, GATHERED = "colwise", "rowwise", "colwise_gathered"
STYLES = {
    COLWISE: "each process computes a part of the outputs, which a `rowwise` layer reads",
    ROWWISE: "each process reads a part of the inputs, and all get the sum",
    GATHERED: "like `colwise`, but every process gets all outputs (for the model's last layer)",
}


def styles_of(modules: nn.ModuleDict, plan: Mapping[str, str] | None) -> dict[nn.Module, str]:
    """The layers that `plan` (pattern of names -> style) divides; where several patterns match, the last one counts.

    Raises ConfigError for unknown styles, patterns that match nothing, and layers that cannot be divided.
    """
    if not plan:
        return {}
    if not isinstance(plan, Mapping):
        raise ConfigError(f"{OPTION} is {plan!r}; expected a mapping from patterns of module names to {_accepted()}")
    found: dict[nn.Module, str] = {}
    problems = []
    places: dict[nn.Parameter, list[str]] = {}
    for name, parameter in modules.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    for pattern, style in plan.items():
        if style not in STYLES:
            problems.append(f"{OPTION}: {pattern!r}: {style!r} is not a style; expected {_accepted()}")
            continue
        for name, module in matching(OPTION, modules, [pattern]).items():
            problems += _why_undivided(pattern, name, module, places)
            found[module] = style
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _why_undivided(
    pattern: str, name: str, module: nn.Module, places: Mapping[nn.Parameter, list[str]]
) -> Iterator[str]:
    """List the reasons why a layer cannot be divided; places: the names of each parameter."""
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        kind = type(module).__name__
        yield f"{OPTION}: {pattern!r} matches {name} ({kind}); only Linear and Embedding can be divided"
    shared = [place for parameter in module.parameters() if len(places[parameter]) > 1 for place in places[parameter]]
    if shared:
        yield f"{OPTION}: {name} shares a parameter ({' = '.join(shared)}), which cannot be divided"


def divide(module: nn.Module, style: str, mesh: DeviceMesh) -> dict[nn.Parameter, nn.Parameter]:
    """Let the processes of the mesh's tensor dimension share `module`, whose weights are equal on all of them.

    Returns what its parameters were replaced with.
    """
    # Imported here, as all of FSDP: see fsdp.py.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    if style == ROWWISE:
        # An embedding's rows are symbols, whose numbers every process has.
        parallel = RowwiseParallel(input_layouts=Replicate()) if isinstance(module, nn.Embedding) else RowwiseParallel()
    else:
        parallel = ColwiseParallel(output_layouts=Replicate()) if style == GATHERED else ColwiseParallel()
    before = dict(module.named_parameters())
    parallelize_module(module, mesh[TENSOR], parallel, src_data_rank=None)
    return {parameter: module.get_parameter(name) for name, parameter in before.items()}


def _accepted() -> str:
    *others, last = STYLES
    return f"{', '.join(others)} or {last}"
