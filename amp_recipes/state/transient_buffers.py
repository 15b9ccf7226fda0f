"""Saves buffers that modules leave out of their state (`persistent=False`), if training changes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amp_recipes.modules.torch_private import non_persistent_buffers, version_of

# Tables that never change (masks, rotary angles) are large, and statistics are small. torch's own kernels write
# statistics without telling the version counter, so small ones are always kept.
_SMALL_BYTES = 64 * 1024


class TransientBuffers:
    """The non-persistent buffers of `modules` as a recoverable: small ones, and larger ones that were written to.

    saved_name: from a buffer's name here to its name in a checkpoint (that of the model without wrappers).
    """

    def __init__(self, modules: nn.Module, saved_name: Callable[[str], str] = str) -> None:
        self._modules = modules
        self._saved_name = saved_name
        self._at_begin = {name: _mark(buffer) for name, buffer, *_ in self._find()}
        self._kept: dict[str, Tensor] = {}

    def keep(self) -> None:
        """Copy the large buffers: a load in this process then restores those that the state leaves out."""
        large = ((name, buffer) for name, buffer, *_ in self._find() if buffer.nbytes > _SMALL_BYTES)
        self._kept = {name: buffer.detach().clone() for name, buffer in large}

    def state_dict(self) -> dict[str, Tensor]:
        """The buffers by name."""
        return {
            name: buffer.detach()
            for name, buffer, *_ in self._find()
            if buffer.nbytes <= _SMALL_BYTES or _mark(buffer) != self._at_begin.get(name)
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore buffers that `state_dict` returned; one of another shape (a grown cache) replaces the live one."""
        for name, live, owner, attribute in self._find():
            saved = state.get(name)
            if saved is None and name in self._kept and _mark(live) != self._at_begin[name]:
                saved = self._kept[name]
            if saved is None:
                continue
            if live.shape == saved.shape and live.dtype == saved.dtype:
                live.copy_(saved)
            else:
                setattr(owner, attribute, saved.to(live.device, copy=True))

    def _find(self) -> Iterator[tuple[str, Tensor, nn.Module, str]]:
        """Name in the checkpoint, buffer, module and attribute of each; of shared ones the first name."""
        seen: set[int] = set()
        for prefix, owner in self._modules.named_modules():
            for attribute in sorted(non_persistent_buffers(owner)):
                buffer = getattr(owner, attribute, None)
                if isinstance(buffer, Tensor) and id(buffer) not in seen:
                    seen.add(id(buffer))
                    name = f"{prefix}.{attribute}" if prefix else attribute
                    yield self._saved_name(name), buffer, owner, attribute


def _mark(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), 0 if buffer.is_inference() else version_of(buffer)
