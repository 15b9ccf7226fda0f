"""Walks back through a trace, from a nonfinite loss or gradient to its origin."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from amp_recipes.files.user_code import Line
from amp_recipes.numerics.nonfinite.faults import Fault
from amp_recipes.numerics.nonfinite.memory import Cause, Written
from amp_recipes.numerics.nonfinite.trace import NonfiniteTrace
from amp_recipes.numerics.nonfinite.values import INFINITE, NAN, Birth, External, kind_of
from amp_recipes.numerics.trial import Outcome
from amp_recipes.numerics.watch.observe import OUTSIDE, Place, dtype_name, op_name
from amp_recipes.numerics.watch.op_kinds import names

_MOST_ANCESTORS = 400  # that are asked for their shape
# Ops whose output may have its rows in another order than what they read.
_SHUFFLING = names(
    """
    cat copy_ embedding flip gather index index_put index_put_ index_select _index_put_impl_ roll scatter scatter_
    scatter_add scatter_add_ sort stack take topk argsort
    """
)

# Ops that take some of the values, as they are.
_MOVING = names("_to_copy alias clone expand gather index index_select permute select slice squeeze unsqueeze view")
_PROBABILITIES = names("_safe_softmax _softmax sigmoid")
_FACTORS, _SUMS = names("mul"), names("sum mean _to_copy add")
_ROOTS, _SQUARES, _DIFFERENCES = names("sqrt"), names("pow mul"), names("sub")


class Passage:
    """The rows of a nonfinite value, and how they reach the target from its origin."""

    def __init__(self, events: list[Written | External], birth: int, target: int) -> None:
        self._events, self._birth, self._target = events, birth, target

    def of(self, samples: list[int]) -> list[int]:
        """Those of the samples that were not left out on all ways: by a `where`, by a mask."""
        lineage: dict[int, set[int]] = {self._birth: set(samples)}
        shuffled: set[int] = set()  # where a row may be another sample's
        for number in range(self._birth + 1, self._target + 1):
            parents = [parent for parent, _ in self._events[number].causes if parent in lineage]
            if parents:
                lineage[number] = set().union(*(lineage[parent] for parent in parents))
                self._follow_rows(number, parents, lineage, shuffled)
        return sorted(lineage.get(self._target, ())) or samples

    def _follow_rows(self, number: int, parents: list[int], lineage: dict[int, set[int]], shuffled: set[int]) -> None:
        event = self._events[number]
        if not shuffled.isdisjoint(parents) or op_name(event.op).rpartition("::")[2] in _SHUFFLING:
            shuffled.add(number)
        elif event.rows is not None:
            lineage[number] &= set(event.rows)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a nonfinite value.

    target: what must not have been nonfinite ("loss", "gradient of head.weight"); place, op: of the birth, or of the
    first op that read the external tensor; dtype: of what the op made, or of that tensor; nan: whether it began as NaN;
    birth: what is known of it (None for an external tensor, and where memory was changed out of sight); chain: modules
    from there to the target; batch: index of the batch in the window that it was made from, None where it was made
    from none; shapes: of what it was made from, nearest first; line: of the user's code; passage: what became of its
    rows; makers: the modules that made it, nearest first; fault: what is known to be wrong; pin: the module whose pin
    cures it: empty if none was found, None if none was tried.
    """

    target: str
    place: Place
    op: str
    dtype: str
    nan: bool
    birth: Birth | None
    external: External | None
    chain: list[str]
    batch: int | None
    shapes: list[tuple[int, ...]]
    line: Line | None
    passage: Passage
    makers: tuple[str, ...] = ()
    fault: Fault | None = None
    pin: str | None = None

    @property
    def is_put_there(self) -> bool:
        """Whether it is an infinity that the code wrote on purpose, such as a mask."""
        return not self.nan and self.birth is not None and self.birth.told_to

    @property
    def was_dropped(self) -> bool:
        """Whether the forward bore it, and yet the loss is finite: only its gradient is not."""
        return self.is_gradient and self.place.phase != "backward"

    @property
    def is_gradient(self) -> bool:
        """Whether it was a gradient, with a finite loss."""
        return self.target != "loss"


@dataclass(frozen=True, slots=True)
class _Root:
    """path: from the birth on to the target, events and what kind they passed on; harmless: put there on purpose."""

    path: tuple[Cause, ...]
    harmless: bool

    @property
    def number(self) -> int:
        return self.path[0][0]


def find_origin(trace: NonfiniteTrace, outcome: Outcome) -> Origin | None:
    """Find the origin of the first nonfinite loss of a traced run, or else of the gradients; None if unknown."""
    if trace.target is not None:
        return _origin(trace, trace.target, trace.causes)
    for loss in outcome.losses:
        if not bool(torch.isfinite(loss).all()):
            return _origin(trace, "loss", trace.causes_of(loss))
    if outcome.is_finite:
        return None
    name = next(name for name, gradient in outcome.gradients.items() if kind_of(gradient))
    return _origin(trace, f"gradient of {name}", _all_that_may_be_gradients(trace.events))


def _all_that_may_be_gradients(events: list[Written | External]) -> list[Cause]:
    """What the backward wrote: the recipe took its gradients from autograd.grad, and all of it may be one."""
    bad = [(number, event) for number, event in enumerate(events) if isinstance(event, Written) and event.kind]
    of_backward = [(number, event) for number, event in bad if event.place.phase == "backward"]
    return [(number, event.kind) for number, event in of_backward or bad]  # or it spoiled them afterwards


def _origin(trace: NonfiniteTrace, target: str, causes: Iterable[Cause]) -> Origin | None:
    walk = _Walk(trace.events)
    roots = sorted(walk.roots(causes), key=lambda root: (root.harmless, walk.time_of(root)))
    return walk.describe(target, roots[0]) if roots else None


class _Walk:
    def __init__(self, events: list[Written | External]) -> None:
        self._events = events

    def roots(self, causes: Iterable[Cause]) -> list[_Root]:
        """Return the ends of all ways back."""
        towards: dict[Cause, Cause | None] = {}  # the next step on the way to the target
        queue = deque((cause, None) for cause in causes)
        found: list[_Root] = []
        while queue:
            cause, consumer = queue.popleft()
            if cause in towards:
                continue
            towards[cause] = consumer
            further = self._further(cause)
            if further:
                queue.extend((earlier, cause) for earlier in further)
            else:
                found += self._ends(cause, _path(cause, towards))
        return found

    def _further(self, cause: Cause) -> Sequence[Cause]:
        """Follow a nonfinite value back while it is of the same kind; an infinity may come from NaN, too."""
        number, kind = cause
        causes = self._events[number].causes
        return [cause for cause in causes if cause[1] == kind] or (causes if kind == INFINITE else ())

    def _ends(self, cause: Cause, path: tuple[Cause, ...]) -> list[_Root]:
        number, kind = cause
        event = self._events[number]
        if event.causes:
            return self._of_infinities(event, path)
        return [_Root(path, kind == INFINITE and event.was_meant)]

    def _of_infinities(self, event: Written, path: tuple[Cause, ...]) -> list[_Root]:
        """Find the origin of a NaN made from infinities: an unwanted infinity, or else the NaN itself."""
        roots = [_Root(root.path + path, root.harmless) for root in self.roots(event.causes)]
        masked = event.birth is not None and event.birth.masked_rows
        unwanted = [root for root in roots if not root.harmless and not (masked and self._may_mask(root.number))]
        return unwanted or [_Root(path, False)]

    def _may_mask(self, number: int) -> bool:
        """Whether an infinity can be a mask, since no weight has a part in it."""
        return not any(self._events[source].kind == "parameter" for source in self._before(number))

    def _before(self, number: int, ends: Callable[[Written | External], bool] | None = None) -> Iterator[int]:
        """The event and all that it was made from, nearest first; not what was before an event that `ends`."""
        seen, queue = {number}, deque([number])
        while queue:
            number = queue.popleft()
            yield number
            if ends is not None and ends(self._events[number]):
                continue
            new = [source for source in self._events[number].sources if source not in seen]
            seen.update(new)
            queue.extend(new)

    def time_of(self, root: _Root) -> int:
        """When it began to matter: an external tensor, when it was first read."""
        is_read_later = isinstance(self._events[root.number], External) and len(root.path) > 1
        return root.path[1 if is_read_later else 0][0]

    def describe(self, target: str, root: _Root) -> Origin:
        """The origin, in names."""
        first = self._events[root.number]
        ops = [event for number, _ in root.path if isinstance(event := self._events[number], Written)]
        place, op, line = Place(OUTSIDE, "forward"), "", None
        if ops:
            place, op, line = ops[0].place, op_name(ops[0].op), ops[0].line
        made_from = self._made_from(root)
        # Of several batches (gradients that accumulate), the newest: those before were well.
        newest = max((event.batch for event in made_from if event.batch is not None), default=None)
        return Origin(
            target,
            place=place,
            op=op,
            dtype=dtype_name(first.dtype),
            nan=root.path[0][1] == NAN,
            birth=first.birth,
            external=first if isinstance(first, External) else None,
            chain=[module for module, _ in groupby(event.place.module for event in ops)],
            batch=newest if first.batch is None else first.batch,
            shapes=[event.shape for event in made_from[:_MOST_ANCESTORS]],
            line=line,
            passage=Passage(self._events, root.number, root.path[-1][0]),
            makers=tuple(dict.fromkeys(event.place.module for event in made_from if isinstance(event, Written))),
            fault=self._fault(first),
        )

    def _fault(self, first: Written | External) -> Fault | None:
        """What is wrong, if the arguments of the op and what these were made from show it."""
        birth = first.birth
        if birth is None:
            return None
        if birth.masked_rows:
            return Fault("masked row", batch=self._mask_in_batch(first))
        if birth.node is not None and birth.node.startswith("SqrtBackward"):
            return Fault("equal points") if self._is_of_difference(first) else None
        fault = birth.fault
        if fault is None or fault.kind not in ("zero divisor", "zero probability"):
            return fault
        if fault.source is None:
            return None
        if fault.kind == "zero probability":
            return fault if self._reached([fault.source], _MOVING, _PROBABILITIES) else None
        if self._is_padding(fault.source):
            return Fault("padding")
        batch = self._batch_alone(fault.source)
        return replace(fault, batch=batch) if batch else None

    def _mask_in_batch(self, first: Written) -> tuple[str, ...]:
        """The parts of the batch that made the mask, if no weight has a part in it."""
        roots = [root.number for root in self.roots(first.causes)]
        sources = [*first.sources, *(source for number in roots for source in self._events[number].sources)]
        masks = roots + [source for source in sources if self._events[source].dtype is torch.bool]
        return tuple(dict.fromkeys(name for number in masks for name in self._batch_alone(number)))

    def _is_of_difference(self, first: Written) -> bool:
        """Whether it is the slope of a distance: the root of a sum of squares of differences."""
        roots = self._reached(first.sources, _FACTORS, _ROOTS)
        squares = self._reached(self._sources_of(roots), _SUMS, _SQUARES)
        return bool(self._reached(self._sources_of(squares), _MOVING, _DIFFERENCES))

    def _sources_of(self, numbers: Iterable[int]) -> list[int]:
        return [source for number in numbers for source in self._events[number].sources]

    def _reached(self, numbers: Iterable[int], through: frozenset[str], wanted: frozenset[str]) -> list[int]:
        """Those of the wanted ops that made these values, with nothing but the ops `through` after them."""
        found, queue = [], deque(numbers)
        while queue:
            event = self._events[number := queue.popleft()]
            name = op_name(event.op).rpartition("::")[2].rstrip("_") if isinstance(event, Written) else ""
            if name in wanted:
                found.append(number)
            elif name in through:
                queue.extend(event.sources)
        return found

    def _is_padding(self, number: int) -> bool:
        """Whether nothing but rows of an embedding was in it, among them the row of padding."""
        before = [self._events[each] for each in self._before(number, lambda event: event.padded)]
        return any(event.padded for event in before) and not any(event.kind == "parameter" for event in before)

    def _batch_alone(self, number: int) -> tuple[str, ...]:
        """The parts of the batch that it was made from; none if a weight or a buffer has a part in it."""
        outside = [event for each in self._before(number) if isinstance(event := self._events[each], External)]
        if any(event.kind in ("parameter", "buffer") for event in outside):
            return ()
        return tuple(dict.fromkeys(event.name for event in outside if event.kind == "batch"))

    def _made_from(self, root: _Root) -> list[Written | External]:
        """Return the values from which the root was made, nearest first; of an external tensor also those beside it."""
        numbers = list(self._before(root.number))
        if isinstance(self._events[root.number], External) and len(root.path) > 1:
            numbers += self._before(root.path[1][0])
        return [self._events[number] for number in numbers]


def _path(cause: Cause, towards: dict[Cause, Cause | None]) -> tuple[Cause, ...]:
    path = []
    step: Cause | None = cause
    while step is not None:
        path.append(step)
        step = towards[step]
    return tuple(path)
