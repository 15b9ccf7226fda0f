"""Extends torch's GradScaler: a minimum scale, several rounds of one optimizer, a pause."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from amp_recipes.modules.sharded import is_sharded, local
from amp_recipes.precision.optimizers import parameters_with_gradient
from amp_recipes.precision.sharded_gradients import by_format
from amp_recipes.precision.torch_private import current_scale, rounds_of, scaler_is_on, switch_scaler, unscale_and_check


class LossScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` with a floor, and with several rounds of one optimizer in an iteration.

    min_scale: the scale never falls below it. At 1 a gradient that still overflows is beyond fp16 itself (65504),
    and halving on would only flush the small ones to zero.
    """

    def __init__(self, device: str, min_scale: float = 1.0, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self.min_scale = min(min_scale, kwargs.get("init_scale", 2.0**16))
        self._scales = scaler_is_on(self)
        self._put_back_to: float | None = None  # from the next update on
        self._was_put_back_to = 0.0  # in the last one

    def pause(self, paused: bool) -> None:
        """While paused nothing is scaled and the state stays as it is; it is saved and loaded all the same."""
        switch_scaler(self, self._scales and not paused)

    def put_back(self, scale: float) -> None:
        """Take back one fall of the scale, which another fault than the scale has caused.

        It takes effect with the next `update`: gradients under way may carry the present scale. scale: the one that
        was in force, which is not exceeded.
        """
        self._put_back_to = max(scale, self._was_put_back_to)  # a fault right after another has seen the fallen scale

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `GradScaler` does, also while paused."""
        beside = {} if self._put_back_to is None else {"put_back_to": self._put_back_to}
        return {**self._unpaused(super().state_dict), **beside}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state as `GradScaler` does, also while paused."""
        self._unpaused(super().load_state_dict, state_dict)
        self._put_back_to = state_dict.get("put_back_to")

    def _unpaused(self, call: Callable[..., Any], *args: Any) -> Any:
        enabled = scaler_is_on(self)
        switch_scaler(self, self._scales)
        try:
            return call(*args)
        finally:
            switch_scaler(self, enabled)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Update as `GradScaler` does, then keep the minimum scale; reads nothing from the device."""
        super().update(new_scale)
        scale = self.scale_tensor
        if scale is None:
            return
        scale.clamp_(min=self.min_scale)
        target, self._put_back_to = self._put_back_to, None
        self._was_put_back_to = target or 0.0
        if target is not None:
            torch.maximum(scale, (scale / self.get_backoff_factor()).clamp_(max=target), out=scale)

    def unscale_round_(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of `optimizer`, also when it has already stepped since the last update.

        torch allows one unscale between two updates. A further round's gradients carry the scale that is in force
        now, so they are divided by it first; then the earlier round's verdict moves the scale. What the recipe has
        unscaled itself is left as it is.
        """
        states = rounds_of(self)
        if states[id(optimizer)]["stage"] is OptState.UNSCALED:
            return
        earlier = states.pop(id(optimizer))
        self.unscale_(optimizer)
        if earlier["found_inf_per_device"]:
            this_round = states[id(optimizer)]
            states[id(optimizer)] = earlier
            self.update()
            rounds_of(self)[id(optimizer)] = this_round  # another dict since the update

    def found_infs(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """Whether the gradients of `optimizer` overflowed, on each of their devices (0-d float32; 0: no).

        Of sharded gradients each process knows its part, so all are to agree on it before the scale moves.
        """
        return list(rounds_of(self)[id(optimizer)]["found_inf_per_device"].values())

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        """Unscale as `GradScaler` does; of sharded gradients, this process's part.

        torch's own way over sharded ones lets the processes agree on the spot, in a collective per format and layout.
        """
        parameters = parameters_with_gradient(optimizer)
        if not any(is_sharded(parameter) for parameter in parameters):
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        found: dict[torch.device, torch.Tensor] = {found_inf.device: found_inf}
        for (device, _), parts in by_format(local(parameter.grad) for parameter in parameters).items():
            # Waits where the device is the CPU (offloaded gradients): a copy still under way would be read as it is.
            here = found.setdefault(device, found_inf.to(device))
            unscale_and_check(parts, here, inv_scale.to(device))
        return found

    def note_step(self, optimizer: Optimizer) -> None:
        """`optimizer` has stepped, or was skipped, outside of `GradScaler.step`."""
        rounds_of(self)[id(optimizer)]["stage"] = OptState.STEPPED

    @property
    def awaits_update(self) -> bool:
        """Whether a step's verdict has not moved the scale yet."""
        return scaler_is_on(self) and any(state["found_inf_per_device"] for state in rounds_of(self).values())

    @property
    def scale_tensor(self) -> torch.Tensor | None:
        """The scale on the device (0-d float32); None before the first `scale` and when disabled."""
        return current_scale(self) if scaler_is_on(self) else None
