"""Holds the counts of a census: ops and casts by module and phase, and their problems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from amp_recipes.files.user_code import Line
from amp_recipes.numerics.census.watch import Asker
from amp_recipes.numerics.watch.observe import OUTSIDE, Phase, dtype_name
from amp_recipes.numerics.watch.op_kinds import Doing

# Below float32, by name.
LOW = frozenset(
    dtype_name(value)
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and value.is_floating_point and value.itemsize < torch.float32.itemsize
)
PINNED = "pinned"  # the reason of a product that ran wide, as was asked


@dataclass(frozen=True)
class OpCount:
    """How often an op ran at a place with these dtypes. bytes: read and written by its elements; views move none.

    doing: what the op does with values; writes_into: "in place" or "out=", where it does.
    """

    module: str
    phase: Phase
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    calls: int
    bytes: int = 0
    doing: Doing = "compute"
    writes_into: str = ""
    is_product: bool = False

    @property
    def low(self) -> str | None:
        """The first dtype below float32 that it took or gave."""
        return next((dtype for dtype in (*self.inputs, *self.outputs) if dtype in LOW), None)

    @property
    def counts_as_low(self) -> bool:
        """Whether it did more in a low dtype than name, cast or copy values, or write constants."""
        return self.low is not None and self.doing in ("compute", "move")

    def as_dict(self) -> dict[str, Any]:
        """Return the row as in `diagnosis.json`."""
        told = {name: getattr(self, name) for name in ("module", "phase", "op", "calls")}
        return told | {"inputs": list(self.inputs), "outputs": list(self.outputs)}


@dataclass(frozen=True)
class CastCount:
    """Casts between floating-point dtypes. by: who asked (see CensusWatch); line: where, if it was the user's code."""

    module: str
    phase: Phase
    by: Asker
    from_: str
    to: str
    calls: int
    bytes: int
    line: Line | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as in `diagnosis.json`."""
        told = {name.rstrip("_"): value for name, value in vars(self).items()}
        return told | {"line": None if self.line is None else str(self.line)}


@dataclass(frozen=True)
class Misplaced:
    """An op in another precision than its module was meant for, and why."""

    module: str
    phase: Phase
    op: str
    dtype: str
    calls: int
    reason: str


@dataclass(frozen=True)
class FrozenRecast:
    """A parameter without gradient, or a buffer, that autocast casts anew each time: its cache holds neither.

    module: where it is cast; cast it once, or hold it in `to`.
    """

    weight: str
    module: str
    to: str
    calls: int
    bytes: int


@dataclass(frozen=True)
class RoundTripCount:
    """Values cast from `dtype` to `through` in one module and back in another, untouched between.

    loses: `through` cannot hold all values of `dtype`, so they came back rounded; else both casts were for nothing.
    """

    there: str
    back: str
    phase: Phase
    dtype: str
    through: str
    loses: bool
    calls: int
    bytes: int


@dataclass(frozen=True)
class CacheEffect:
    """The effect of autocast's cache of cast weights: forward casts of weights with it and without.

    same_gradients: whether the gradients without it are the same, bit for bit. With it, those of a weight that is used
    several times in a region add up in the low dtype.
    """

    casts: int
    casts_without: int
    bytes_saved: int
    same_gradients: bool


@dataclass
class Census:
    """The ops and casts of one window's forward and backward.

    called: names of the modules that ran; pins: of those that were pinned or decorated with `fwd_default_precision`,
    never_called: of the pins whose forward did not run. neutral: whether the watched step gave the losses and gradients
    of a bare one, bit for bit (None: there was no bare one). seconds, bare_seconds: of the watched step and the faster
    of two bare ones; cast_seconds: what the casts take when they are run alone, each on dense memory of that size.
    """

    dtype: str
    ops: list[OpCount]
    casts: list[CastCount]
    called: set[str]
    meant_low: list[Misplaced] = field(default_factory=list)
    meant_fp32: list[Misplaced] = field(default_factory=list)
    frozen_recasts: list[FrozenRecast] = field(default_factory=list)
    cancelling: list[RoundTripCount] = field(default_factory=list)
    cache: CacheEffect | None = None
    pins: list[str] = field(default_factory=list)
    never_called: list[str] = field(default_factory=list)
    neutral: bool | None = None
    neutrality_note: str = ""
    seconds: float | None = None
    bare_seconds: float | None = None
    cast_seconds: float | None = None

    def low_owners(self) -> list[str]:
        """Modules of the tree in whose own forward, not a child's, an op computes with or to a dtype below float32."""
        found = {
            row.module: None
            for row in self.ops
            if row.phase == "forward" and row.doing == "compute" and row.low is not None and row.module[:1] != "<"
        }
        return list(found)

    @property
    def outside_low(self) -> list[OpCount]:
        """The rows that compute in low precision outside of all modules: in the recipe's own methods, the loss."""
        return [row for row in self.ops if row.module == OUTSIDE and row.counts_as_low]

    @property
    def cast_bytes(self) -> int:
        return sum(cast.bytes for cast in self.casts)

    @property
    def cast_share(self) -> float:
        """The casts' share of all bytes that ops read and write."""
        return self.cast_bytes / max(1, sum(row.bytes for row in self.ops))

    @property
    def cast_time_share(self) -> float | None:
        """`cast_seconds` over `bare_seconds`: an estimate, as a cast that runs alone finds other caches."""
        return self.cast_seconds / self.bare_seconds if self.cast_seconds is not None and self.bare_seconds else None

    def as_dict(self) -> dict[str, Any]:
        """All of it in what strict JSON holds; `census` and `casts` are the lists of the schema of `diagnosis.json`."""
        return {
            "census": [row.as_dict() for row in self.ops],
            "casts": [cast.as_dict() for cast in self.casts],
            "dtype": self.dtype,
            "low_owners": self.low_owners(),
            "outside_low": sorted({row.op for row in self.outside_low}),
            "meant_low": [vars(row) for row in self.meant_low],
            "meant_fp32": [vars(row) for row in self.meant_fp32],
            "frozen_recasts": [vars(row) for row in self.frozen_recasts],
            "cancelling": [vars(row) for row in self.cancelling],
            "cache": None if self.cache is None else vars(self.cache),
            "cast_share": {"of_bytes": self.cast_share, "of_seconds": self.cast_time_share},
            "neutral": self.neutral,
            "neutrality_note": self.neutrality_note,
            "seconds": self.seconds,
            "bare_seconds": self.bare_seconds,
        }
