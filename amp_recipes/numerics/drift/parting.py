"""Finds the first op where a step in low precision and the same step in fp32 part, also where all stays finite.

An infinity that a later op swallows (x / inf is 0, tanh(inf) is 1) leaves nothing to trace back from the loss. So the
results of each op are compared, by a few of their values. Many ops part without harm: a sum that is zero but for
rounding, an output that nobody uses. So each suspect is put to the test: its result in low precision takes the place of
that in an fp32 step, and the gradients tell whether it matters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from amp_recipes.files.strict_json import as_it_is_read
from amp_recipes.files.user_code import Line
from amp_recipes.modules.nested import tensors_in
from amp_recipes.modules.torch_private import storage_id
from amp_recipes.numerics.trial import Outcome, Trial, Window, gradient_error
from amp_recipes.numerics.watch.observe import OUTSIDE, Attribution, OpWatch, Place, dtype_name
from amp_recipes.numerics.watch.op_kinds import op_kind
from amp_recipes.precision import map_tensors
from amp_recipes.precision.torch_private import Op

_SAMPLE = 256  # values of a result that are compared
_EPS = 10  # relative error, in eps of the dtype, from which a result has parted from fp32 ...
_GROWTH = 4.0  # ... if it is so many times the error of the op's inputs
_MOST_SUSPECTS = 8  # whose results are kept, and put to the test: of those with infinities, and of others
_MOST_STEPS = 4  # back to where an error was made that others only magnify
_LOW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Parting:
    """The first op whose result in low precision is wrong, from inputs that are not, and changes the gradients.

    module, phase, op, line: where; called_in: the registered modules that call one which is not; dtype: the low one;
    error: of its result, relative to that in fp32 (infinite: it is not finite); largest: the largest finite magnitude
    in the result in fp32; effect: the error that the gradients of an fp32 step have with this one result in it;
    magnified_by: the later op where the two precisions part, if that only makes this error large, and where it is.
    """

    module: str
    phase: str
    op: str
    line: Line | None
    dtype: str
    error: float
    largest: float
    effect: float
    called_in: str = ""
    magnified_by: str = ""

    def __str__(self) -> str:
        where = module_in_words(self.module)
        where += f", called in {self.called_in}," if self.called_in else ""
        line = "" if self.line is None else f" at {self.line}"
        phase = "" if self.phase == "forward" else f", {self.phase}"
        return f"{self.op} in {where}{line} ({self._what(torch.finfo(getattr(torch, self.dtype)).max)}{phase})"

    def _what(self, bound: float) -> str:
        if math.isfinite(self.error):
            later = f", which {self.magnified_by} magnifies" if self.magnified_by else ""
            return f"its result in {self.dtype} differs by {100 * self.error:.2g} % from that in fp32{later}"
        if self.largest > bound:
            return f"its result of up to {self.largest:.3g} is beyond {self.dtype}, which ends at {bound:.5g}"
        return f"its result in {self.dtype} is not finite"

    def as_dict(self) -> dict[str, Any]:
        """Return as in `diagnosis.json`."""
        return as_it_is_read({**vars(self), "line": None if self.line is None else str(self.line)})


def module_in_words(module: str) -> str:
    """Name the module of a place in a sentence."""
    return "the recipe's own code (outside of modules)" if module == OUTSIDE else module or "the model itself"


def find_parting(
    trial: Trial,
    window: Window,
    dtype: torch.dtype,
    scale: float = 1.0,
    pins: Iterable[str] | None = None,
    may_test: Callable[[], bool] = lambda: True,
) -> Parting | None:
    """The first op where the window's step in `dtype` parts from that in fp32; None: the step raises, or none does.

    An op parts if its result is nonfinite in low precision alone, or differs by more than ten times the dtype's eps and
    by four times what its inputs differ by. Results are matched by module, phase, op and the number of the call. Each
    such op is put to the test: its result alone takes the place of that in the fp32 step. The first one that makes at
    least half of the error that the gradients have in `dtype` is returned, else the one that makes most, if that is
    more than ten times the eps. If that op gives much the same in fp32 on the same inputs, it only magnifies an error.
    Then the op that made the error is returned, where its result does as much.
    may_test: asked before each test, whether there is time for one more step. Takes three steps, and one for each test,
    at most 16; for each op back, one more and its tests. Keeps a few numbers of each op, and the results tested.
    """
    pins = None if pins is None else list(pins)
    try:
        scale = trial.run_finite(window, dtype, scale, pins).scale if scale > 1.0 else scale
        suspect = _Search(trial, window, dtype, scale, pins, may_test).first()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # an op that the device lacks in this precision
        return None
    if suspect is None or suspect.effect <= _EPS * torch.finfo(dtype).eps:
        return None
    return Parting(
        *(*suspect.place, suspect.op, suspect.line, dtype_name(dtype), suspect.error, suspect.largest, suspect.effect),
        called_in=suspect.called_in,
        magnified_by=suspect.magnified_by,
    )


class _Key(NamedTuple):
    """Which of a step's ops it is: the `number`th of its kind in a place."""

    place: Place
    base: str
    number: int


class _Numbers:
    """Numbers the ops that compute, by place and kind."""

    def __init__(self, at: Attribution) -> None:
        self.at = at
        self.counts: Counter[tuple[Place, str]] = Counter()

    def next(self, base: str) -> _Key:
        place = self.at.here
        number = self.counts[place, base]
        self.counts[place, base] += 1
        return _Key(place, base, number)


class _Summary(NamedTuple):
    """What is kept of a result: how many values are not finite, the largest of the others, and some of them."""

    shape: torch.Size
    nonfinite: int
    largest: float
    sample: torch.Tensor


class _Summaries:
    """What the ops of the fp32 step gave."""

    def __init__(self, at: Attribution) -> None:
        self.at = at
        self.numbers = _Numbers(at)
        self.by_key: dict[_Key, list[_Summary]] = {}

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kind = op_kind(op)
        if kind.doing == "compute":
            self.by_key[self.numbers.next(kind.base)] = [_summary(tensor) for tensor in _floating(output)]


@dataclass(eq=False)
class _Suspect:
    """An op whose result parts from fp32 though its inputs do not.

    key, results: of what is put into the fp32 step: the op's own result, or of a cast that of the op that reads it;
    effect: the error of the gradients there; sources: the ops from which it has its error, if it only magnifies one.
    """

    place: Place
    op: str
    line: Line | None
    error: float
    largest: float
    key: _Key | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    effect: float = 0.0
    sources: frozenset[_Key] = frozenset()
    called_in: str = ""
    magnified_by: str = ""


class _Status(NamedTuple):
    """Of a tensor: how far it, or what it was made of, is from fp32; the cast that made it so; the ops that made it."""

    error: float = 0.0
    cast: _Suspect | None = None
    makers: frozenset[_Key] = frozenset()


class _Call(NamedTuple):
    """One op of the low step."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[torch.Tensor]


class _Comparison:
    """Compares the ops of the low step with those of the fp32 step.

    wanted: take these for suspects, and no others (None: those that part).
    """

    def __init__(
        self, at: Attribution, exact: _Summaries, parted: float, wanted: frozenset[_Key] | None = None
    ) -> None:
        self.at = at
        self._exact, self._parted, self._wanted = exact, parted, wanted
        self._numbers = _Numbers(at)
        self._statuses: dict[int, _Status] = {}  # by storage: each op sets that of what it writes
        self._suspects: dict[bool, list[_Suspect]] = {True: [], False: []}  # by whether the result is finite
        self._in_order: list[_Suspect] = []

    def suspects(self) -> Iterator[_Suspect]:
        """Those whose result can be put into the fp32 step, in the order of the ops."""
        for suspect in self._in_order:
            key = suspect.key
            if key is not None:
                kind = key.place, key.base
                if self._numbers.counts[kind] == self._exact.numbers.counts[kind]:
                    yield suspect

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kind = op_kind(op)
        given = self._worst(tensors_in(args, kwargs))
        results = _floating(output)
        if kind.doing == "compute":
            call = _Call(op, args, kwargs, results)
            status = self._compared(self._numbers.next(kind.base), call, given)
        elif kind.is_cast and given.error < math.inf:
            status = self._cast(kind.name, args[kind.source], results, given)
        else:
            status = given
        for result in results:
            self._statuses[storage_id(result)] = status

    def _worst(self, tensors: Iterable[torch.Tensor]) -> _Status:
        dense = (tensor for tensor in tensors if tensor.layout is torch.strided)
        known = [self._statuses.get(storage_id(tensor), _Status()) for tensor in dense]
        worst = max(known, key=lambda status: status.error, default=_Status())
        return worst._replace(makers=frozenset().union(*(status.makers for status in known if status.error)))

    def _compared(self, key: _Key, call: _Call, given: _Status) -> _Status:
        exact, results = self._exact.by_key.get(key), call.results
        if exact is None or len(exact) != len(results):
            return given
        pairs = [(_summary(result), other) for result, other in zip(results, exact, strict=True)]
        if any(one.shape != other.shape for one, other in pairs):
            return given
        error = max((_error(one, other) for one, other in pairs), default=0.0)
        if self._is_suspect(key, error, given):
            if given.cast is not None and given.cast.key is None:  # it read what a cast has spoilt
                suspect: _Suspect | None = given.cast
            else:
                largest = max(other.largest for _, other in pairs)
                suspect = self._suspect(op_kind(call.op).name, error, largest)
            if suspect is not None:
                suspect.key, suspect.results = key, [result.detach().clone() for result in results]
                suspect.sources = given.makers if _magnifies(call, error) else frozenset()
        return _Status(error, makers=frozenset((key,)))

    def _is_suspect(self, key: _Key, error: float, given: _Status) -> bool:
        if self._wanted is not None:
            return key in self._wanted
        return error > self._parted and (error > _GROWTH * given.error or given.cast is not None)

    def _cast(self, name: str, source: Any, results: list[torch.Tensor], given: _Status) -> _Status:
        """A cast to a low dtype: fp32 has none there, so that it is compared with what it is given."""
        if len(results) != 1 or results[0].dtype not in _LOW or not isinstance(source, torch.Tensor):
            return given
        if source.dtype in _LOW or not source.is_floating_point() or source.shape != results[0].shape:
            return given
        before = _summary(source)
        error = _error(_summary(results[0]), before)
        if self._wanted is None and error > max(self._parted, _GROWTH * given.error):
            return _Status(error, self._suspect(name, error, before.largest))
        return given if error < given.error / 2 else _Status(max(error, given.error))

    def _suspect(self, name: str, error: float, largest: float) -> _Suspect | None:
        alike = self._suspects[math.isfinite(error)]
        if len(alike) == _MOST_SUSPECTS:
            least = min(alike, key=lambda suspect: suspect.error)
            if error <= least.error:
                return None
            alike.remove(least)
            self._in_order.remove(least)
        suspect = _Suspect(self.at.here, name, self.at.line, error, largest)
        alike.append(suspect)
        self._in_order.append(suspect)
        return suspect


class _Search:
    """Runs the step in low precision and in fp32, and tests the suspects."""

    def __init__(
        self,
        trial: Trial,
        window: Window,
        dtype: torch.dtype,
        scale: float,
        pins: list[str] | None,
        may_test: Callable[[], bool],
    ) -> None:
        self._trial, self._window, self._dtype, self._scale, self._pins = trial, window, dtype, scale, pins
        self._may_test = may_test
        self._exact = _Summaries(self._attribution())
        self._reference = self._run(torch.float32, self._exact)

    def _attribution(self, lines: bool = False) -> Attribution:
        return Attribution(self._trial.modules, lines, self._trial.holders)

    def _run(self, dtype: torch.dtype, watch: _Summaries | _Comparison | _Put) -> Outcome:
        return self._trial.run(self._window, dtype, self._scale, self._pins, watch=[OpWatch(watch.at, watch.saw)])

    def first(self) -> _Suspect | None:
        """The first op that makes at least half of the error, or else the one that makes most."""
        suspects, outcome = self._suspects()
        enough = gradient_error(outcome, self._reference) / 2
        found = self._worst(suspects, enough)
        return None if found is None else self._origin(found)

    def _origin(self, suspect: _Suspect) -> _Suspect:
        """The op that made the error, where this one only magnifies it."""
        magnifier = suspect
        for _ in range(_MOST_STEPS):
            if not suspect.sources:
                break
            suspects, _ = self._suspects(suspect.sources)
            earlier = self._worst(suspects, math.inf)
            if earlier is None or earlier.effect < suspect.effect / 2:
                break
            suspect = earlier
            suspect.magnified_by = f"{magnifier.op} in {module_in_words(magnifier.place.module)}"
        return suspect

    def _suspects(self, wanted: frozenset[_Key] | None = None) -> tuple[list[_Suspect], Outcome]:
        low = _Comparison(self._attribution(lines=True), self._exact, _EPS * torch.finfo(self._dtype).eps, wanted)
        outcome = self._run(self._dtype, low)
        found = list(low.suspects())
        for suspect in found:
            around = low.at.ran_in.get(suspect.place.module, ())
            suspect.called_in = " and ".join(name for name in around if name != OUTSIDE)
        return found, outcome

    def _worst(self, suspects: Iterable[_Suspect], enough: float) -> _Suspect | None:
        """The first suspect whose effect is at least `enough`, or else the one with the largest."""
        tested = []
        for suspect in suspects:
            if not self._may_test():
                break
            suspect.effect = self._effect(suspect)
            tested.append(suspect)
            if suspect.effect >= enough:
                return suspect
        return max(tested, key=lambda each: each.effect, default=None)

    def _effect(self, suspect: _Suspect) -> float:
        """The error of the gradients of an fp32 step with its result in it."""
        try:
            changed = self._run(torch.float32, _Put(self._attribution(), suspect))
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the recipe checks its values
            return math.inf
        return gradient_error(changed, self._reference)


def _magnifies(call: _Call, error: float) -> bool:
    """Whether the op would give much the same in fp32, of the same inputs: it has its error from them."""
    draws = torch.Tag.nondeterministic_seeded in call.op.tags
    if not math.isfinite(error) or op_kind(call.op).writes_into or draws or call.kwargs.get("dtype") in _LOW:
        return False
    args, kwargs = map_tensors(lambda tensor: tensor.float() if tensor.dtype in _LOW else tensor, call[1:3])
    try:
        wide = _floating(call.op(*args, **kwargs))
    except RuntimeError:  # it takes no fp32
        return False
    pairs = zip(call.results, wide, strict=True)
    return max(_error(_summary(low), _summary(exact)) for low, exact in pairs) < error / 2


class _Put:
    """Puts a suspect's result into the fp32 step."""

    def __init__(self, at: Attribution, suspect: _Suspect) -> None:
        self.at = at
        self._suspect = suspect
        self._numbers = _Numbers(at)

    def saw(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        kind = op_kind(op)
        if kind.doing == "compute" and self._numbers.next(kind.base) == self._suspect.key:
            for result, low in zip(_floating(output), self._suspect.results, strict=True):
                result.copy_(low)


def _floating(output: Any) -> list[torch.Tensor]:
    """The dense floating-point tensors of a result."""
    return [
        tensor
        for tensor in tensors_in(output)
        if tensor.is_floating_point() and tensor.layout is torch.strided and tensor.numel()
    ]


def _summary(tensor: torch.Tensor) -> _Summary:
    tensor = tensor.detach()
    least, most = map(float, torch.aminmax(tensor))
    largest, nonfinite = max(-least, most), 0
    if not (math.isfinite(least) and math.isfinite(most)):
        finite = tensor.isfinite()
        nonfinite = tensor.numel() - int(finite.sum())
        largest = float(tensor.abs().masked_fill_(~finite, 0.0).amax())
    return _Summary(tensor.shape, nonfinite, largest, _sample(tensor))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.flatten()
    if flat.numel() > _SAMPLE:
        # Steps of the golden ratio meet all rows and columns, as steps of a whole number may not.
        places = (torch.arange(_SAMPLE, dtype=torch.float64) * 0.6180339887498949 % 1 * flat.numel()).long()
        flat = flat[places.to(flat.device)]
    return flat.to("cpu", torch.float64, copy=True)


def _error(low: _Summary, exact: _Summary) -> float:
    """|low - exact| / |exact| of the values compared; infinite if more of `low` are not finite."""
    if low.nonfinite > exact.nonfinite:
        return math.inf
    both = low.sample.isfinite() & exact.sample.isfinite()
    difference = torch.linalg.vector_norm((low.sample - exact.sample)[both])
    size = torch.linalg.vector_norm(exact.sample[both])
    if not float(size):
        return 1.0 if float(difference) else 0.0
    return float(difference / size)
