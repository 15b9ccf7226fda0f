"""Reads the states in a checkpoint: whole in one process, or in each of several only its part of the tensors.

Every file is compared with its sha256 before anything is read from it, once on each machine: of the processes of a
machine that read from it, one takes the sum, and all hear if it is another. From a sharded checkpoint a process reads
the files in which its own parts lie.
"""

from __future__ import annotations

import socket
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from amp_recipes.checkpoint.folder import STATE_SUFFIX, Checkpoint, Damaged, verify
from amp_recipes.checkpoint.group import ALONE, CheckpointGroup
from amp_recipes.checkpoint.names import clean_state
from amp_recipes.checkpoint.shards import OpenFiles, Stored, dtensors_exist, here, replicated_like
from amp_recipes.checkpoint.state_format import read_state
from amp_recipes.distributed.torch_private import dtensor_like
from amp_recipes.errors import CheckpointError
from amp_recipes.modules.sharded import is_sharded
from amp_recipes.modules.torch_private import tree_leaves


def read_documents(folder: Path, names: Iterable[str], group: CheckpointGroup) -> dict[str, Any]:
    """Recoverable -> its state, with a `Stored` for each tensor. Raises Damaged, on all processes."""
    files = {name: f"{name}{STATE_SUFFIX}" for name in names}
    mine = _to_verify(group, files.values())

    def read() -> dict[str, Any]:
        verify(folder, mine)
        try:
            return {name: read_state(folder / file, later=True) for name, file in files.items()}
        except CheckpointError as error:  # as its manifest says, and yet no state
            raise Damaged(str(error)) from error

    return group.all_do(read)


def fill(folder: Path, states: dict[str, Any], layouts: Mapping[str, Any], group: CheckpointGroup) -> dict[str, Any]:
    """`states`, in which now stands what their files hold for each `Stored`. Raises Damaged, on all processes.

    layouts: recoverable -> the like of its state, with a DTensor wherever one is wanted (of a tensor of another shape:
    one that all processes hold whole). What has no like there is read whole.
    """
    wanted: dict[tuple[int, int], tuple[Stored, Any]] = {}

    def note(tensor: Tensor | Stored, live: Any) -> Tensor | Stored:
        if isinstance(tensor, Stored):
            wanted[_key(tensor, live)] = (tensor, live)
        return tensor

    _walk(states, layouts, note)
    boxes = {key: _box(tensor, live) for key, (tensor, live) in wanted.items()}
    files = {file for key, (tensor, _) in wanted.items() for file in tensor.files(*boxes[key])}
    seen = {f"{name}{STATE_SUFFIX}" for name in states}
    mine = _to_verify(group, files - seen)

    def read() -> dict[str, Any]:
        if mine:
            verify(folder, mine)
        with OpenFiles(folder) as opened:
            try:
                made = {
                    key: _wrapped(tensor.read(opened, *boxes[key]), tensor.shape, live)
                    for key, (tensor, live) in wanted.items()
                }
            except Exception as error:
                raise Damaged(f"its tensors cannot be read ({type(error).__name__}: {error})") from error

        def put(tensor: Tensor | Stored, live: Any) -> Any:
            if isinstance(tensor, Stored):
                return made[_key(tensor, live)]
            if not is_sharded(live) or is_sharded(tensor):
                return tensor
            box = tuple(slice(at, at + size) for at, size in zip(*_box(tensor, live), strict=True))
            return _wrapped(tensor[box].clone(), tensor.shape, live)

        return _walk(states, layouts, put)

    return group.all_do(read)


def refuse_missing(checkpoint: Checkpoint, wanted: Iterable[str], held: Iterable[str]) -> None:
    """Raise CheckpointError if a checkpoint does not hold a recoverable that is wanted."""
    missing = [name for name in wanted if name not in held]
    if missing:
        raise CheckpointError(
            f"{checkpoint.path} has no state of {', '.join(missing)}; nothing was loaded. It has states of: "
            f"{', '.join(sorted(held)) or 'nothing'}. Was it saved with other settings (precision, ema_decay)? To "
            "start from its weights only, give another --output_folder and --init_from with the folder of that run."
        )


def shared_as(obj: Any, state: Any) -> Any:
    """A copy of a state whose tensors are whole, shared among the processes as those of `obj` are."""
    return fill(Path(), {"": copy(state)}, {"": layout_of(obj, state)}, ALONE)[""]


def layout_of(obj: Any, state: Any) -> Any:
    """The like of an object's state, for `fill`; state: as its file has it.

    An object that has `layouts()` says itself: name -> a tensor that is shared among processes as that entry is to be.
    """
    if not dtensors_exist() or not any(isinstance(value, Tensor | Stored) for value in tree_leaves(state)):
        return None
    if isinstance(obj, nn.Module):
        return clean_state(obj, obj.state_dict())
    if isinstance(obj, Optimizer):
        return _optimizer_layout(obj)
    own = getattr(obj, "layouts", None)
    return own() if callable(own) else obj.state_dict()


def _optimizer_layout(optimizer: Optimizer) -> dict[str, Any]:
    live = optimizer.state_dict()
    if not isinstance(live, Mapping) or not {"state", "param_groups"} <= live.keys():
        return live
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in live["param_groups"] for index in group["params"]]
    by_index = {
        index: _ParameterState(live["state"].get(index, {}), parameter)
        for index, parameter in zip(indices, parameters, strict=True)
        if is_sharded(parameter)
    }
    return {**live, "state": {**live["state"], **by_index}}


class _ParameterState(dict):
    """What an optimizer keeps of a DTensor parameter: what it does not keep yet will lie as the parameter does."""

    def __init__(self, live: Mapping[str, Any], parameter: Any) -> None:
        super().__init__(live)
        self._parameter = parameter

    def get(self, key: str, default: Any = None) -> Any:
        """The live value, or the parameter."""
        return super().get(key, default if key == "step" else self._parameter)


def _walk(state: Any, live: Any, at_tensor: Callable[[Any, Any], Any]) -> Any:
    """`state` with its tensors replaced by what `at_tensor` returns for them and what stands there in `live`."""
    if isinstance(state, Tensor | Stored):
        return at_tensor(state, live)

    def items() -> Iterator[Any]:
        return (_walk(item, _beneath(live, index), at_tensor) for index, item in enumerate(state))

    if isinstance(state, dict) and not isinstance(state, Counter):
        for key in state:
            state[key] = _walk(state[key], _beneath(live, key), at_tensor)
    elif isinstance(state, list):
        state[:] = items()
    elif type(state) in (tuple, set, frozenset):
        return type(state)(items())
    elif isinstance(state, deque):
        return deque(items(), state.maxlen)
    return state


def _beneath(live: Any, key: Any) -> Any:
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, list | tuple | deque):
        return live[key] if isinstance(key, int) and key < len(live) else None
    return live if is_sharded(live) else None


def _key(tensor: Stored, live: Any) -> tuple[int, int]:
    # Tied tensors are read once, and are one object again, unless they are to be shared in different ways.
    return id(tensor), hash((live.device_mesh, tuple(live.placements))) if is_sharded(live) else 0


def _box(tensor: Tensor | Stored, live: Any) -> tuple[list[int], list[int]]:
    """Return the part of a tensor that this process holds."""
    if is_sharded(live) and live.shape == tensor.shape:
        return here(live)
    return [0] * len(tensor.shape), list(tensor.shape)


def _wrapped(local: Tensor, shape: Any, live: Any) -> Any:
    if not is_sharded(live) or not shape:
        return local
    return dtensor_like(live, local) if live.shape == shape else replicated_like(live, local)


def _to_verify(group: CheckpointGroup, files: Iterable[str]) -> list[str]:
    """Return the files whose sha256 this process computes: one process of each machine checks each file."""
    host = socket.gethostname()
    of_ranks = group.of_all((host, sorted(files)))
    load: Counter[int] = Counter()
    mine = []
    for file in sorted({file for its_host, files in of_ranks if its_host == host for file in files}):
        readers = [rank for rank, (its_host, files) in enumerate(of_ranks) if its_host == host and file in files]
        chosen = min(readers, key=lambda rank: (load[rank], rank))
        load[chosen] += 1
        if chosen == group.rank:
            mine.append(file)
    return mine
