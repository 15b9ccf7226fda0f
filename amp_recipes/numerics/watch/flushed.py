"""Counts the gradients of a step that are zero in fp16, and not in fp32."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from amp_recipes.numerics.trial import Trial, Window

# Elements below this share of the step's largest are not counted: fp32 itself rounds them away in a sum with that one.
_SMALLEST = 2.0**-24
_STEP, _LARGEST_SCALE = 16.0, 2.0**24  # of the scales to try
_ENOUGH = 0.01  # share of lost gradients that a scale may leave
_MUCH = 0.1  # of all counted elements
_NEARLY_ALL, _FEWEST = 0.99, 16  # of one parameter's counted elements, if it has so many: sums of few cancel by chance


@dataclass(frozen=True)
class Flushed:
    """The gradient elements that one step loses in fp16 at a loss scale.

    counted, lost: elements by parameter: those that are not zero in fp32, and those of them that are zero in fp16.
    """

    scale: float
    counted: dict[str, int]
    lost: dict[str, int]

    @property
    def share(self) -> float:
        """The lost share of all counted elements."""
        return sum(self.lost.values()) / max(1, sum(self.counted.values()))

    @property
    def worst(self) -> tuple[str, float]:
        """The parameter that loses the largest share, and this share; of equals, the one that loses most elements."""
        name = max(self.counted, key=lambda name: (self._share_of(name), self.lost[name]))
        return name, self._share_of(name)

    @property
    def is_much(self) -> bool:
        """Whether the loss can slow or stop the training of the model, or of one parameter."""
        gone = (name for name in self.counted if self._share_of(name) > _NEARLY_ALL)
        return self.share > _MUCH or any(self.counted[name] >= _FEWEST for name in gone)

    def _share_of(self, name: str) -> float:
        return self.lost[name] / max(1, self.counted[name])


class FlushCount:
    """Repeats one step: in fp32 at once, in fp16 for each loss scale that it is asked about."""

    def __init__(self, trial: Trial, window: Window) -> None:
        self._trial, self._window = trial, window
        wide = trial.run(window)
        self._counted: dict[str, torch.Tensor] = {}
        if wide.is_finite:
            sizes = {name: gradient.abs() for name, gradient in wide.gradients.items() if gradient.numel()}
            largest = max((float(size.max()) for size in sizes.values()), default=0.0)
            if largest > 0.0:
                self._counted = {name: size >= largest * _SMALLEST for name, size in sizes.items()}

    def at(self, scale: float) -> Flushed | None:
        """What fp16 loses at this scale; None if that step, or the one in fp32, is not finite or has no gradient."""
        if not self._counted:
            return None
        low = self._trial.run(self._window, torch.float16, scale)
        if not low.is_finite:
            return None
        counted = {name: counts for name, counts in self._counted.items() if name in low.gradients}
        lost = {name: counts & (low.gradients[name] == 0) for name, counts in counted.items()}
        return Flushed(scale, _sums(counted), _sums(lost))

    def better_scale(self, than: Flushed) -> Flushed | None:
        """The first larger scale, in steps of 16, that loses little; None if it would overflow, or there is none."""
        scale = than.scale * _STEP
        while scale <= _LARGEST_SCALE:
            found = self.at(scale)
            if found is None:
                return None
            if found.share <= _ENOUGH and not found.is_much:
                return found
            scale *= _STEP
        return None


def _sums(masks: dict[str, torch.Tensor]) -> dict[str, int]:
    if not masks:
        return {}
    sums = torch.stack([mask.sum() for mask in masks.values()]).tolist()
    return dict(zip(masks, sums, strict=True))
