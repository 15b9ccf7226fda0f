"""Finds the module and the phase of a step to which an op belongs, for all instruments.

A `DispatchMode` sees ops below autocast, with the dtypes that kernels really get. It does not see modules. So the
forward keeps a stack of the modules that run. Autograd numbers its nodes in the order in which they come to be; where
a module begins and ends, the number is noted, and so an op of the backward belongs to the module in whose stretch of
numbers its node lies. That costs nothing per op or node, and needs no look at inputs or outputs: what leaves a module
in a dataclass, a module that runs twice and an `autograd.Function` are all found. (torch's ModuleTracker goes by hooks
on inputs and outputs, and loses these.)
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from threading import get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import checkpoint

from amp_recipes.files.user_code import Line, user_line
from amp_recipes.modules.torch_private import parameters_of
from amp_recipes.modules.unregistered import unregistered
from amp_recipes.numerics.watch.op_kinds import op_kind
from amp_recipes.precision.torch_private import (
    BACKWARD_CODE,
    DispatchMode,
    Op,
    graph_task,
    next_node_number,
    node_number,
    running_node,
    schema_of,
)

Phase = Literal["forward", "backward", "recompute"]

# The module of what no module's forward computes: the recipe's own methods, the loss, the optimizer.
OUTSIDE = "<recipe>"
# After the name of a module that stands in a list, a dict or a closure: torch, and a pin, do not know it.
NOT_REGISTERED = " (not registered)"

ACCUMULATE_GRAD = 2**64 - 1  # the number of all nodes that add to a leaf's gradient
_NO_TASK = -2  # equal to no graph_task()


class Place(NamedTuple):
    """The place of an op in a step.

    module: name in the root's `named_modules()`; for a module that is not in it the way to it with NOT_REGISTERED, or
    else its class in angle brackets; OUTSIDE where none runs. phase: "recompute" is a forward that runs inside the
    backward, as checkpointing of activations runs it again.
    """

    module: str
    phase: Phase


def is_registered(module: str) -> bool:
    """Whether the module of a place is one that a pin can name."""
    return module[:1] != "<" and not module.endswith(NOT_REGISTERED)


def unregistered_modules(modules: nn.Module, holders: Mapping[str, object]) -> dict[str, nn.Module]:
    """The modules that `modules` does not register, by the names that places have for them."""
    found = unregistered(modules, holders)
    return {f"{name}{NOT_REGISTERED}": each for name, each in found.items() if isinstance(each, nn.Module)}


class Attribution:
    """Inside its `with`, knows the place of each running op; inside `modules`, by their names.

    holders: objects that may have modules which `modules` lacks, by name. ran_in: for each module that is not
    registered and ran, the registered ones in whose forward it did (or OUTSIDE). lines: also remember which line of the
    user's code each autograd node came from, for `line`.
    A module whose weights are used without calling it (`out_proj` of MultiheadAttention), or whose `forward` is called
    past `__call__`, does not appear: what happens there belongs to the module that does so. Gradients that add up where
    two branches met belong to the branch that came last, and a leaf's gradient to the module that holds the parameter.
    It follows the thread that entered it, as dispatch modes do; a backward of accelerators runs on that thread too.
    """

    def __init__(self, modules: nn.Module, lines: bool = False, holders: Mapping[str, object] | None = None) -> None:
        # It holds them, so that ids stay theirs.
        self._modules = {**dict(modules.named_modules()), **unregistered_modules(modules, holders or {})}
        self._names = {id(module): name for name, module in self._modules.items()}
        self._holders: dict[int, str] = {}
        for name, module in self._modules.items():
            for parameter in parameters_of(module).values():
                self._holders.setdefault(id(parameter), name)
        self.lines = lines
        self._places: dict[tuple[str, Phase], Place] = {}
        self._known = {id(module): (name, self._place(name, "forward")) for name, module in self._modules.items()}
        self._context = ExitStack()
        self._begin()

    def _begin(self) -> None:
        self.called: set[str] = set()  # names of the modules that ran
        self.ran_in: dict[str, dict[str, None]] = {}
        self.place = self._place(OUTSIDE, "forward")  # of an op that runs while graph_task() == task
        self.task = graph_task()
        self.is_inside = False  # whether a module's forward runs, and no backward that makes nodes
        self._top: tuple[nn.Module | None, str, Place, int] = (None, OUTSIDE, self.place, self.task)
        self._stack = [self._top]
        self._outer_task = self.task
        self._thread = get_ident()
        self._starts, self._owners = [next_node_number()], [OUTSIDE]  # nodes from starts[i] on belong to owners[i]
        self._line_starts, self._line_values = [next_node_number()], [None]
        self._last_number, self._last_place = -1, self.place
        self._seen = 0  # the next number when an op of a backward that makes nodes was last seen

    def __enter__(self) -> Attribution:
        self._begin()
        # Nodes are numbered, and dispatch modes live, per thread.
        self._context.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._context.callback(register_module_forward_pre_hook(self._before_forward).remove)
        self._context.callback(register_module_forward_hook(self._after_forward, always_call=True).remove)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._context.close()

    @property
    def here(self) -> Place:
        """The place of the op that runs now; for `__torch_dispatch__`."""
        task = graph_task()
        return self.place if task == self.task else self.elsewhere(task)

    @property
    def registered(self) -> str:
        """The innermost registered module whose forward runs; OUTSIDE where none does."""
        return next((name for _, name, _, _ in reversed(self._stack) if is_registered(name)), OUTSIDE)

    @property
    def line(self) -> Line | None:
        """The user's line that the op which runs now comes from; of an op of the backward, that of its forward."""
        if self.here.phase != "backward":
            return user_line(_asking_frame(sys._getframe(1)))
        node = running_node()
        index = bisect_right(self._line_starts, -1 if node is None else node_number(node)) - 1
        return self._line_values[index] if index >= 0 else None

    def note_line(self, frame: FrameType) -> None:
        """The node of the op that `frame` dispatches has been made, and comes from the line that runs now."""
        number = next_node_number()
        if number != self._line_starts[-1]:
            self._line_values[-1] = user_line(frame)
            self._line_starts.append(number)
            self._line_values.append(None)

    def elsewhere(self, task: int) -> Place:
        """The place of the op that runs now, where `task` (graph_task()) is not `self.task`."""
        if task == self._top[3]:  # back in a forward after a backward that made nodes
            self._restore(self._seen)
            return self.place
        node = running_node()
        if node is None:
            return self._place(OUTSIDE, "backward")
        if torch.is_grad_enabled():
            return self._making_nodes(node)
        return self._place_of(node)

    def of_sum(self, node: Node) -> Place:
        """The place of an `add` that runs while `node` does: a cast has none, so it is the engine's sum of gradients.

        It then belongs where the summed gradients go, not to the cast that gave one of them.
        """
        if node.name() == "ToCopyBackward0" and node.next_functions[0][0] is not None:
            return self._place_of(node.next_functions[0][0])
        return self._place_of(node)

    def place_of(self, number: int) -> Place:
        """The place in the backward of the node with this number, which was not ACCUMULATE_GRAD."""
        index = bisect_right(self._starts, number) - 1
        return self._place(self._owners[index] if index >= 0 else OUTSIDE, "backward")

    def _place_of(self, node: Node) -> Place:
        """The place of what `node` computes in the backward."""
        number = node_number(node)
        if number == ACCUMULATE_GRAD:
            return self._place(self._holder(node.variable), "backward")
        if number != self._last_number:
            self._last_number, self._last_place = number, self.place_of(number)
        return self._last_place

    def _holder(self, leaf: torch.Tensor) -> str:
        """Return the module that holds `leaf`, or the nearest module above that ran; else OUTSIDE."""
        name = self._holders.get(id(leaf))
        while name and name not in self.called:
            name = name.rpartition(".")[0]
        return OUTSIDE if name is None or name not in self.called else name

    def _making_nodes(self, node: Node) -> Place:
        """The place of an op of the backward that may be differentiated itself: a recompute, or `create_graph=True`."""
        recomputing, name = self._recomputing()
        place = self._place_of(node)
        if recomputing:
            place = self._place(place.module if name is None else name, "recompute")
        number = next_node_number()
        if self._owners[-1] != place.module:
            # The op's own node was made just before it came here.
            start = self._seen if self.task == _NO_TASK else max(self._starts[-1], number - 1)
            self._starts.append(start)
            self._owners.append(place.module)
        self._seen = number
        self.is_inside = False
        self.task = _NO_TASK  # so that the next op of the forward comes to `elsewhere`, and marks its own
        return place

    def _recomputing(self) -> tuple[bool, str | None]:
        """Whether a checkpoint's recompute runs, and of which module's own code: what was not in a module's call."""
        name = None
        for frame, _ in walk_stack(sys._getframe(1)):
            code = frame.f_code
            if code.co_filename == checkpoint.__file__:
                return True, name
            if code is BACKWARD_CODE:
                return False, None
            if name is None and "self" in code.co_varnames + code.co_freevars:
                name = self._names.get(id(frame.f_locals.get("self")))
        return False, None

    def _place(self, module: str, phase: Phase) -> Place:
        place = self._places.get((module, phase))
        if place is None:
            place = self._places[module, phase] = Place(module, phase)
        return place

    def _restore(self, number: int) -> None:
        """Nodes from `number` on, and the ops that make them, belong to the module on top of the stack."""
        module, name, self.place, self.task = self._top
        self.is_inside = module is not None
        if self._starts[-1] == number:
            self._owners[-1] = name
        else:
            self._starts.append(number)
            self._owners.append(name)

    def _before_forward(self, module: nn.Module, _: Any) -> None:
        if get_ident() != self._thread:
            return
        known = self._known.get(id(module))
        if known is None:  # not in the tree, or made since
            known = (f"<{type(module).__name__}>", self._place(f"<{type(module).__name__}>", "forward"))
        name, place = known
        self.called.add(name)
        if not is_registered(name):
            self.ran_in.setdefault(name, {})[self.registered] = None
        task = graph_task()
        if task != self._outer_task:
            place = self._place(name, "recompute")
        self._top = top = (module, name, place, task)
        self._stack.append(top)
        self._restore(next_node_number())

    def _after_forward(self, module: nn.Module, _: Any, __: Any) -> None:
        # A pre-hook that raised before ours leaves nothing to take away.
        if self._top[0] is module and get_ident() == self._thread:
            self._stack.pop()
            self._top = self._stack[-1]
            self._restore(next_node_number())


class OpWatch(DispatchMode):
    """Inside its `with`, calls `saw(op, args, kwargs, output)` after each op, and does not change it.

    at: entered with it; tells `saw` the place of the op. about_to_see: called with (op, args, kwargs) before each op,
    the last moment to look at what it changes in place.
    Enter it outside of autocast or inside: it sees what autocast made of an op either way. Ops that `saw` itself runs
    are not seen; neither is what runs inside a higher-order op.
    """

    supports_higher_order_operators = True  # they run as if no instrument watched

    def __init__(
        self, at: Attribution, saw: Callable[..., None], about_to_see: Callable[..., None] | None = None
    ) -> None:
        super().__init__()
        self.at = at
        self._saw, self._about_to_see = saw, about_to_see

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Skipping imports the compiler (2 s) and costs at each op. Nothing is compiled while a Trial runs.
        return False

    def __enter__(self) -> OpWatch:
        self.at.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.at.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not op_kind(func).is_counted:
            return func(*args, **kwargs)
        if self.at.lines:
            self.at.note_line(sys._getframe(1))
        task = graph_task()
        if task != self.at.task:
            self.at.elsewhere(task)  # also where `saw` does not ask: it marks the nodes that a backward makes
        if self._about_to_see is not None:
            self._about_to_see(func, args, kwargs)
        output = func(*args, **kwargs)
        self._saw(func, args, kwargs, output)
        return output


def _asking_frame(frame: FrameType) -> FrameType:
    """Return the frame that runs the op: the first one outside of the instrument that `frame` belongs to."""
    dispatching = (outer for outer, _ in walk_stack(frame) if outer.f_code.co_name == "__torch_dispatch__")
    outer = next(dispatching, None)
    return frame if outer is None or outer.f_back is None else outer.f_back


def dtype_name(dtype: torch.dtype) -> str:
    """`float16`, without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def op_name(op: Op) -> str:
    """`aten::mm` for any overload of it."""
    return schema_of(op).name
