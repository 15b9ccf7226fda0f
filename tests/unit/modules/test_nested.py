"""Nested values are taken apart and put together again as what they were."""

import time
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence

from amp_recipes.modules.nested import parts_of, tensors_in

Point = namedtuple("Point", "x y")


class Named(dict):
    pass


class Itself(dict):
    def __init__(self, *args):
        super().__init__(*args)
        self.__dict__ = self


class Tagged(tuple):
    pass


class Row(list):
    pass


@dataclass(frozen=True)
class Frozen:
    x: int
    y: int = field(init=False, default=7)

    def __post_init__(self):
        assert self.x == 1, "is not run again"


@dataclass(slots=True)
class Slotted:
    x: int
    y: int


def tagged():
    value = Tagged((1, 2))
    value.tag = "kept"
    return value


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, "b": 2},
        [1, 2],
        (1, 2),
        Point(1, 2),
        OrderedDict(a=1, b=2),
        defaultdict(list, a=1, b=2),
        Named(a=1, b=2),
        Itself({"a": 1, "b": 2}),
        tagged(),
        Row([1, 2]),
        Frozen(1),
        Slotted(1, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_comes_back_as_its_class_with_other_contents(value):
    items, rebuild = parts_of(value)
    before = list(items)
    again, other = rebuild(before), rebuild([item * 10 for item in before])
    assert type(again) is type(value) and again == value and again is not value
    assert list(parts_of(other)[0]) == [item * 10 for item in before]
    assert list(parts_of(value)[0]) == before, "the original stays"
    if isinstance(value, Tagged):
        assert other.tag == "kept"
    if isinstance(value, defaultdict):
        assert other.default_factory is list
    if isinstance(value, Itself):
        assert other.a == 10


def test_a_packed_sequence_is_a_container():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    items, rebuild = parts_of(packed)
    assert isinstance(rebuild([None if it is None else it * 2 for it in items]), PackedSequence)


@pytest.mark.parametrize("value", [None, 1, "text", b"bytes", torch.ones(2), {1}, UserDict(a=1), Frozen, object()])
def test_what_is_no_container(value):
    assert parts_of(value) is None


def test_records_of_pythons_own_have_parts():
    assert list(parts_of(time.gmtime(0))[0])[:3] == [1970, 1, 1]


def test_tensors_in_order():
    first, second = torch.ones(1), torch.ones(2)
    assert [it.numel() for it in tensors_in({"a": [first, 3], "b": (None, second)}, "text")] == [1, 2]
