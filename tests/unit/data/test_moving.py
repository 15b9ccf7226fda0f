"""Any batch structure reaches the device with its types kept, and tells how many samples it holds."""

from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils import _pytree as pytree

from amp_recipes.data import batch_length, to_device

META = torch.device("meta")  # a second device that every machine has
Pair = namedtuple("Pair", "x y")


@dataclass
class Item:
    x: Any
    name: str = "item"
    derived: Any = field(default=None, init=False)

    def __post_init__(self):
        self.inits = getattr(self, "inits", 0) + 1


@dataclass(frozen=True)
class Frozen:
    x: Any


class Registered:
    def __init__(self, x):
        self.x = x


pytree.register_pytree_node(Registered, lambda r: ([r.x], None), lambda values, _: Registered(*values))


class DictChild(dict):
    pass


class ListChild(list):
    pass


def x(*shape):
    return torch.zeros(*shape)


CONTAINERS = {
    "tensor": (lambda t: t, lambda c: c),
    "tuple": (lambda t: (t, 1), lambda c: c[0]),
    "list": (lambda t: [t, "a"], lambda c: c[0]),
    "dict": (lambda t: {"x": t, "y": None}, lambda c: c["x"]),
    "namedtuple": (lambda t: Pair(t, 2), lambda c: c.x),
    "OrderedDict": (lambda t: OrderedDict(x=t), lambda c: c["x"]),
    "defaultdict": (lambda t: defaultdict(list, x=t), lambda c: c["x"]),
    "deque": (lambda t: deque([t], maxlen=3), lambda c: c[0]),
    "UserDict": (lambda t: UserDict(x=t), lambda c: c["x"]),
    "UserList": (lambda t: UserList([t]), lambda c: c[0]),
    "dict subclass": (lambda t: DictChild(x=t), lambda c: c["x"]),
    "list subclass": (lambda t: ListChild([t]), lambda c: c[0]),
    "dataclass": (lambda t: Item(t), lambda c: c.x),
    "frozen dataclass": (lambda t: Frozen(t), lambda c: c.x),
    "registered pytree": (lambda t: Registered(t), lambda c: c.x),
    "return type of torch": (lambda t: torch.max(torch.zeros(3, 2), 0)._replace(values=t), lambda c: c.values)
    if hasattr(torch.return_types.max, "_replace")
    else (lambda t: torch.return_types.max((t, t)), lambda c: c.values),
}


def test_every_container_is_moved_and_keeps_its_type_and_the_original(subtests):
    for name, non_blocking in product(CONTAINERS, [False, True]):
        build, tensor_in = CONTAINERS[name]
        with subtests.test(name, non_blocking=non_blocking):
            assert_moved(build(x(3, 2)), tensor_in, non_blocking)
            assert_moved([{"k": (build(x(3, 2)),)}], lambda c: tensor_in(c[0]["k"][0]), non_blocking)  # noqa: B023


def assert_moved(batch, tensor_in, non_blocking):
    before = tensor_in(batch)
    moved = to_device(batch, META, non_blocking)
    assert type(moved) is type(batch)
    assert tensor_in(moved).device == META and tensor_in(moved).shape == (3, 2)
    assert tensor_in(batch) is before and before.device.type == "cpu"


def test_a_tensor_that_is_already_there_comes_back_untouched(subtests):
    for name, device in product(CONTAINERS, ["cpu", torch.device("cpu")]):
        build, tensor_in = CONTAINERS[name]
        with subtests.test(name, device=device):
            t = x(3, 2)
            for non_blocking in (False, True):
                assert tensor_in(to_device(build(t), device, non_blocking)) is t


def test_containers_come_back_new_so_that_a_step_cannot_change_the_data_set():
    for batch in ([x(1)], {"x": x(1)}, Item(x(1)), DictChild(x=x(1))):
        assert to_device(batch, "cpu") is not batch


def test_particulars_of_containers_are_kept():
    moved = to_device(defaultdict(list, x=x(1)), META)
    assert moved.default_factory is list
    assert to_device(deque([x(1)], maxlen=3), META).maxlen == 3
    child = DictChild(x=x(1))
    child.note = "kept"
    assert to_device(child, META).note == "kept"
    item = Item(x(1))
    item.derived = x(2)
    moved = to_device(item, META)
    assert (moved.derived.device, moved.name, moved.inits) == (META, "item", 1)


def test_a_packed_sequence_moves_its_data():
    packed = pack_padded_sequence(x(4, 3, 2), [4, 3, 1])
    moved = to_device((packed, x(3)), META)[0]
    assert type(moved) is type(packed)
    assert moved.data.device == META and moved.batch_sizes.device.type == "cpu"


def test_everything_else_passes_as_it_is():
    for value in ["a", 1, 2.5, None, b"b", np.ones(2), object(), {1, 2}, int, torch.float32, torch.Size([2, 3])]:
        assert to_device(value, META) is value
        assert to_device([value], META)[0] is value


class WithTo:
    """A batch object as other packages make them; the variants differ in `to`."""

    def __init__(self):
        self.calls = []


class Plain(WithTo):
    def to(self, device):
        self.calls.append((device,))
        return self


class Keyword(WithTo):
    def to(self, device, *, non_blocking=False):
        self.calls.append((device, non_blocking))
        return self


class Anything(WithTo):
    def to(self, *args, **kwargs):
        self.calls.append((*args, kwargs["non_blocking"]))
        return self


class InPlace(WithTo):
    def to(self, device):
        self.calls.append((device,))


class Fresh(WithTo):
    def to(self, device):
        fresh = Fresh()
        fresh.calls = [(device,)]
        return fresh


def test_an_object_with_to_moves_itself_as_its_signature_allows(subtests):
    for kind, call in {Plain: (), Keyword: (True,), Anything: (True,), InPlace: (), Fresh: ()}.items():
        with subtests.test(kind.__name__):
            batch = kind()
            moved = to_device([batch], META, non_blocking=True)[0]
            assert moved.calls == [(META, *call)]
            assert (moved is batch) == (kind is not Fresh)


def test_copies_to_the_cpu_always_block():
    batch = Keyword()
    to_device(batch, "cpu", non_blocking=True)
    assert batch.calls == [("cpu", False)]


def test_something_called_to_that_is_no_method_is_left_alone():
    @dataclass
    class Mail:
        text: Any
        to: str = "you"

    assert to_device(Mail(x(1)), META).text.device == META


# --- batch_length


class Padded:
    """As PaddedBatch: attributes that hold tensors, and a length."""

    def __init__(self, n, **attributes):
        self.__dict__.update(attributes)
        self.n = n

    def __len__(self):
        return self.n


class Told:
    def __init__(self, name, value):
        setattr(self, name, value)
        self.graph = torch.zeros(99, 2)


class SelfReference:
    def __init__(self):
        self.me = self


def test_batch_length(subtests):
    for number, (batch, expected) in enumerate(LENGTHS):
        with subtests.test(type(batch).__name__, number=number):
            assert batch_length(batch) == expected
            assert type(batch_length(batch)) is int


LENGTHS = [
    (x(5, 2), 5),
    ((x(5, 2), x(7)), 5),
    ([x(5)], 5),
    ({"id": ["a", "b"], "x": x(5)}, 5),
    ({"x": x(4), "y": x(5)}, 4),
    (("a", 3, {"deep": [None, x(6, 1)]}), 6),
    (Pair(x(3), x(4)), 3),
    (Item(x(3)), 3),
    (UserDict(x=x(3)), 3),
    (np.zeros((4, 2)), 4),
    ({"x": np.zeros(4)}, 4),
    (x(0, 3), 0),
    (torch.tensor(2.0), 1),
    ((torch.tensor(2.0), torch.tensor(3.0)), 1),
    ((torch.tensor(0.5), x(8, 3)), 8),
    (pack_padded_sequence(x(4, 3, 2), [4, 3, 1]), 3),
    ((pack_padded_sequence(x(4, 3, 2), [4, 3, 1]), x(3)), 3),
    (Padded(5, wav=Pair(x(5, 100), x(5))), 5),
    (Padded(5, ids=["a"] * 5), 5),
    (Told("batchsize", 6), 6),
    (Told("batch_size", np.int64(6)), 6),
    (Told("batch_size", None), 99),
    ((Told("batchsize", 6), x(2)), 6),
    (SelfReference(), 1),
    (["a", "b", "c"], 3),
    ({"text": ["a", "b", "c"], "note": "long string"}, 3),
    ((), 1),
    ({}, 1),
    ("abc", 1),
    (3, 1),
    (None, 1),
    (object(), 1),
]


def test_batch_length_reads_nothing_from_the_device():
    # A meta tensor has no values to read.
    assert batch_length({"x": torch.zeros(5, 2, device=META)}) == 5
