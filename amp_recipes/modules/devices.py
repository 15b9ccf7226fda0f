"""Lists the types of devices: which run asynchronously to the host, and which have autocast."""

from __future__ import annotations

import torch

from amp_recipes.modules.torch_private import assume_constant_result, out_of_tree_device_type

_QUEUE_WORK = ("cuda", "xpu")
_IN_TREE = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu")
_with_autocast: dict[str, tuple[str, ...]] = {}  # by the name of what is out of torch's own tree


def queues_work(device: torch.device) -> bool:
    """Whether kernels, and copies to and from pinned memory, run asynchronously to the host; an event marks their end.

    On any other device the host waits for a copy. One out of torch's own tree is taken to have events.
    """
    return device.type in (*_QUEUE_WORK, out_of_tree_device_type())


def has_autocast(device_type: str) -> bool:
    """Whether torch knows autocast on `device_type`; not where it does not know the type at all."""
    try:
        return torch.amp.is_autocast_available(device_type)
    except RuntimeError:
        return False


@assume_constant_result
def autocast_device_types() -> tuple[str, ...]:
    """Device types that have an autocast state, whether or not this machine has such a device.

    A device out of torch's own tree may come, and get its name, at any time.
    """
    out_of_tree = out_of_tree_device_type()
    if out_of_tree not in _with_autocast:
        _with_autocast[out_of_tree] = tuple(filter(has_autocast, (*_IN_TREE, out_of_tree)))
    return _with_autocast[out_of_tree]
