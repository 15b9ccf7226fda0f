"""Holds what a diagnosis found out about one precision, and decides what follows: safe, not safe, or not decided."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from amp_recipes.numerics.census.census import Census
from amp_recipes.numerics.drift.drift import ModuleDrift
from amp_recipes.numerics.pins.proof import Training
from amp_recipes.numerics.pins.search import PinSearch
from amp_recipes.numerics.pins.unrunnable import Raised

Decision = Literal["safe", "not safe", "cannot run", "not decided"]
# Exit statuses, as scripts test them; of several precisions the worst counts, in this order.
NOT_SAFE, NOT_DECIDED, SAFE = 1, 2, 0

# A scale that turns more of the gradients into zeros than another one does is called too low. Their share of |g|^2 may
# be small, so the gradient's error does not show it; an optimizer such as Adam steps by them as by large ones.
FLUSHED_TOLERANCE = 0.1
# A share of them that makes no difference.
ACCEPTED_LOSS = 1e-3


@dataclass(frozen=True)
class LossScale:
    """The loss scale of fp16, as the options of a run set it."""

    init: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


@dataclass(frozen=True)
class ScaleFound:
    """What a run's loss scale meets.

    init: where the run begins; met: the first scale at which the batches do not overflow, after backing off; skipped:
    updates until then; advised: the scale to begin with; lost, lost_advised: shares of the gradients that become zero
    at `met` and at `advised`; updates: without overflow until the scale has grown from `met` to `advised`; pins: those
    modules that overflow in the forward; they were in fp32 meanwhile, since they hide what the gradients need.
    """

    init: float
    met: float
    skipped: int
    advised: float
    lost: float
    lost_advised: float
    updates: int
    pins: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """The share of the gradients that the advised scale keeps, and the run's own does not."""
        return self.lost - self.lost_advised if self.advised > self.met else 0.0


@dataclass(frozen=True)
class Failure:
    """The reason why a step does not run in a precision, and what cures it.

    patterns: for `fp32_modules`, with which it runs; modules: those that they pin. Empty: no such pins are known.
    """

    raised: Raised
    patterns: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return as in `diagnosis.json`."""
        found = self.raised
        where = {"module": found.module, "op": found.op, "line": "" if found.line is None else str(found.line)}
        return {"error": found.error, **where, "fp32_modules": list(self.patterns)}


@dataclass
class Answer:
    """The results for one precision.

    scale: the loss scale of the steps; drift: the most sensitive modules first; pins: the search at this scale; noise:
    what the gradients of batches differ by, relative to their size; failure: why the step does not run as it is;
    loss_scale: of fp16; at_advised: the search at the advised scale, where the run's own is too low.
    """

    name: str
    scale: float
    pins: PinSearch
    noise: float
    census: Census | None = None
    drift: list[ModuleDrift] = field(default_factory=list)
    failure: Failure | None = None
    loss_scale: ScaleFound | None = None
    at_advised: PinSearch | None = None

    @property
    def nonfinite(self) -> list[ModuleDrift]:
        """The modules that this precision makes nonfinite."""
        return [row for row in self.drift if not (math.isfinite(row.sensitivity) and math.isfinite(row.local_error))]

    @property
    def loses_gradients(self) -> bool:
        """Whether the run's own loss scale turns gradients into zeros that another scale keeps."""
        return self.loss_scale is not None and self.loss_scale.gain > FLUSHED_TOLERANCE

    @property
    def advised(self) -> PinSearch:
        """The search whose pins are to be used."""
        return self.pins if self.at_advised is None else self.at_advised

    @property
    def is_cured(self) -> bool:
        """Whether the step was shown to be safe with `advised`: its scale, and its pins."""
        return self.advised.verified

    @property
    def new_pins(self) -> list[str]:
        """Patterns for `fp32_modules` that the run does not have yet."""
        return [*([] if self.failure is None else self.failure.patterns), *self.advised.modules]

    @property
    def decision(self) -> Decision:
        """What follows for the run as it is set."""
        if self.failure is not None:
            return "cannot run"
        if self.pins.decision == "safe" and not self.loses_gradients:
            return "safe"
        exceeds = self.pins.needed or bool(self.pins.modules)
        return "not safe" if exceeds or self.loses_gradients or is_refuted(self.pins.proof) else "not decided"

    @property
    def status(self) -> int:
        """The exit status for a script."""
        return {"safe": SAFE, "not decided": NOT_DECIDED}.get(self.decision, NOT_SAFE)

    @property
    def fp32_modules(self) -> list[str]:
        """The value of the run option with which the step is safe: earlier pins that are needed, and the new ones."""
        new = self.new_pins
        cured = () if self.failure is None else self.failure.modules
        return [name for name in self.advised.fp32_modules if name not in (*cured, *new)] + new

    def as_dict(self) -> dict[str, Any]:
        """Return the results as in `diagnosis.json`."""
        census = {"census": [], "casts": []} if self.census is None else self.census.as_dict()
        return {
            **census,
            "precision": self.name,
            "decision": self.decision,
            "scale": self.scale,
            "failure": None if self.failure is None else self.failure.as_dict(),
            "gradient_noise": self.noise,
            "drift": [row.as_dict() for row in self.drift],
            "pins": self.advised.as_dict(),
            "loss_scale": None if self.loss_scale is None else vars(self.loss_scale),
            "pins_at_own_scale": None if self.at_advised is None else self.pins.as_dict(),
        }


def is_refuted(proof: Training) -> bool:
    """Whether training ended worse than in fp32, or diverged where fp32 did not."""
    finite = [all(math.isfinite(loss) for curve in curves for loss in curve) for curves in (proof.reference, proof.low)]
    return proof.worse or finite == [True, False]


def worst_status(statuses: list[int]) -> int:
    """The status of several precisions together; of none: not decided."""
    return next((status for status in (NOT_SAFE, NOT_DECIDED) if status in statuses), SAFE if statuses else NOT_DECIDED)
