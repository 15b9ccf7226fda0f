"""Whether wrong arguments are told before anything is built, and right ones never."""

import collections.abc
import enum
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union

import torch

from amp_recipes.config.trust.signatures import Callee
from amp_recipes.config.yaml.nodes import Mapping, Scalar, Sequence, Source, Unknown

HERE = Source("x.yaml", 1, 1)


def node(value, tag=""):
    """A node of a resolved tree: dicts, lists, tuples and scalars; `Call` for what is built."""
    if isinstance(value, dict):
        sources = {key: Source("x.yaml", line, 1) for line, key in enumerate(value, start=2)}
        items = {key: node(item) for key, item in value.items()}
        return Mapping(tag, items, HERE, sources)
    if isinstance(value, Call):
        return Scalar(value.tag, "", HERE)
    if isinstance(value, list | tuple):
        return Sequence(tag or ("!tuple" if isinstance(value, tuple) else ""), [node(item) for item in value], HERE)
    return value if isinstance(value, Unknown) else Scalar(tag, value, HERE)


class Call(NamedTuple):
    tag: str


def mistakes(target, arguments, partial=False):
    return [text for _, text in Callee(target).check(node(arguments, "!new:x"), partial)]


RIGHT = [
    (torch.nn.Linear, {"in_features": 3, "out_features": 4}),
    (torch.nn.Linear, {"in_features": 3, "out_features": 4.0, "bias": 1}),
    (torch.nn.Linear, [3, 4]),
    (torch.nn.LayerNorm, {"normalized_shape": [3, 4], "eps": 1e-5}),
    (torch.nn.LayerNorm, [3]),
    (torch.nn.Conv2d, [3, 4, (3, 3)]),
    (torch.nn.Conv2d, {"in_channels": 3, "out_channels": 4, "kernel_size": 3, "padding": "same"}),
    (torch.nn.AdaptiveAvgPool2d, [[None, 1]]),
    (torch.nn.Upsample, {"scale_factor": 2, "mode": "nearest"}),
    (torch.nn.Upsample, {"size": [2, 2]}),
    (torch.nn.Embedding, {"num_embeddings": 3, "embedding_dim": 3, "padding_idx": 0}),
    (torch.nn.LSTM, {"input_size": 3, "hidden_size": 4, "num_layers": 2, "bidirectional": True}),
    (torch.nn.TransformerEncoderLayer, {"d_model": 8, "nhead": 2, "activation": "gelu", "batch_first": True}),
    (torch.nn.TransformerEncoderLayer, {"d_model": 8, "nhead": 2, "activation": Call("!name:x")}),
    (torch.nn.CrossEntropyLoss, {"label_smoothing": 0, "weight": Call("!apply:torch.tensor")}),
    (torch.nn.Dropout, {"p": 0}),
    (torch.nn.Sequential, [Call("!new:a"), Call("!new:b")]),
    (torch.nn.Parameter, [Call("!apply:torch.zeros")]),
    (torch.nn.GELU, {"approximate": "tanh"}),
    (torch.utils.data.DataLoader, {"dataset": [1], "batch_size": None, "shuffle": False, "num_workers": 0}),
    (collections.Counter, {"a": 3, "b": 2}),
    (collections.OrderedDict, {"a": 3}),
    (dict, {"a": 3}),
    (max, [[1, 2]]),
    (torch.zeros, [3, 4]),
    (torch.device, ["cpu"]),
    (Path, ["a", "b"]),
    (range, [3]),
]


def test_right_arguments_pass(subtests):
    for target, arguments in RIGHT:
        with subtests.test(f"{target} {arguments}"):
            assert mistakes(target, arguments) == []
    assert mistakes(sorted, [[3, 1]]) == [] and mistakes(sorted, {"iterable": [1]}) != []


PARTIAL = [
    (torch.optim.AdamW, {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0, "fused": True}),
    (torch.optim.AdamW, {"lr": 1, "betas": (0.9, 0.98), "fused": None}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0, "nesterov": False}),
    (torch.optim.lr_scheduler.OneCycleLR, {"max_lr": [0.1, 0.2], "anneal_strategy": "cos", "total_steps": 100}),
    (torch.optim.lr_scheduler.MultiStepLR, {"milestones": [1, 2]}),
    (torch.optim.lr_scheduler.CosineAnnealingLR, {"T_max": 20, "eta_min": 0}),
    (torch.optim.lr_scheduler.ReduceLROnPlateau, {"mode": "min", "min_lr": 0}),
    (torch.utils.data.WeightedRandomSampler, {"num_samples": 10}),
    (torch.nn.functional.cross_entropy, {"label_smoothing": 0.1}),
]


def test_a_partial_leaves_arguments_to_its_caller(subtests):
    for target, arguments in PARTIAL:
        with subtests.test(f"{target} {arguments}"):
            assert mistakes(target, arguments, partial=True) == []
            assert "needs" in " ".join(mistakes(target, arguments))


def test_an_unknown_name_tells_the_nearest_and_what_is_accepted():
    linear = "It takes in_features, out_features, bias, device, dtype."
    found = list(Callee(torch.nn.Linear).check(node({"in_feature": 3, "out_features": 4}, "!new:x"), False))
    assert found == [
        (Source("x.yaml", 2, 1), f"Linear has no argument 'in_feature'. Did you mean in_features? {linear}")
    ]
    assert len(mistakes(torch.nn.Linear, {"wrong": 3, "out_features": 4})) == 2  # in_features is missing as well


def test_number_and_kind_of_arguments():
    def function(a, /, b, *, c):
        return a, b, c

    assert mistakes(function, {"a": 1, "b": 2, "c": 3}) == [
        "test_number_and_kind_of_arguments.<locals>.function takes a by position only: give its arguments as a list."
    ]
    assert len(mistakes(function, [1, 2, 3])) == 2  # too many, and c is missing
    assert "takes 2 positional arguments (a, b), but got 3" in mistakes(function, [1, 2, 3])[0]
    assert "needs c: give it below" in mistakes(function, [1, 2])[0]
    assert "must be a string" in mistakes(torch.nn.ReLU, {3: 4})[0]
    assert "It takes no named arguments" in mistakes(lambda: None, {"x": 4})[0]


HINTS = [
    (int, [3, 3.0, True, -1], ["3", 2.5, None, [3], {"a": 1}, (3,)]),
    (float, [3, 0.5, float("nan"), 1e-5], ["1e-3", None, [0.1]]),
    (bool, [True, 0, 1], ["no", "true", 2, 0.5, None]),
    (str, ["x", ""], [3, 0.5, True, None, ["x"]]),
    (Path, ["x"], [3, None, ["x"]]),
    (str | Path, ["x"], [3]),
    (None, [None], [3, "x"]),
    (Optional[int], [3, None], ["x"]),  # noqa: UP045
    (Union[int, str], [3, "x"], [None, 2.5]),  # noqa: UP007
    (int | list[int], [3, [3], (3,)], ["x", ["x"]]),
    (Literal["min", "max"], ["min"], ["mim", 3, None]),
    (Literal[1, 2], [1], ["1", 3, True]),
    (list[int], [[1], (1, 2), []], [3, ["x"], {"a": 1}, None]),
    (list, [[1], ["x"]], [3, "x"]),
    (tuple[int, int], [(1, 2), [1, 2]], [[1], 3, ["a", "b"]]),
    (tuple[int, ...], [(1, 2, 3), []], [["a"], 3]),
    (collections.abc.Sequence[int], [[1], "text"], [3, ["x"]]),
    (collections.abc.Iterable[int], [[1], {"a": 1}], [3, ["x"]]),
    (dict[str, int], [{"a": 1}, {}], [{"a": "x"}, [1], 3]),
    (collections.abc.Mapping, [{"a": 1}], [[1], 3]),
    (collections.abc.Callable, [[1]], ["relu", 3, None]),
    (torch.dtype, [], ["float32", 32]),
    (torch.nn.Module, [], ["Linear", {"in_features": 3}]),
    (torch.device, ["cpu"], []),
    (torch.Tensor, [[1.0], 3], ["abc"]),
    (float | torch.Tensor, [0.1, 1], ["0,01"]),
    (Annotated[int, "unit"], [3], ["x"]),
    (Any, [3, "x", None, [1], {"a": 1}], []),
    (object, [3, "x", [1], {"a": 1}], []),
    ("int", [3], ["x"]),
    ("NotDefinedAnywhere", [3, "x"], []),
    ("1 / 0", [3], []),
    ([1, 2], [3], []),
]


def test_types_that_are_certain(subtests):
    def function(x):
        return x

    for hint, right, wrong in HINTS:
        with subtests.test(str(hint)):
            function.__annotations__["x"] = hint
            for value in right:
                assert mistakes(function, {"x": value}) == [], value
                assert mistakes(function, [value]) == []
            for value in wrong:
                (text,) = mistakes(function, {"x": value})
                assert "x of" in text and "must be" in text
            for known_later in (Call("!new:torch.nn.ReLU"), Unknown("!applyref:x", HERE)):
                assert mistakes(function, {"x": known_later}) == []


def test_what_was_given_and_what_is_accepted_are_in_the_message():
    assert mistakes(torch.nn.Linear, {"in_features": "3", "out_features": 2.5, "bias": "no"}) == [
        "in_features of Linear is '3', but must be a whole number.",
        "out_features of Linear is 2.5, but must be a whole number.",
        "bias of Linear is 'no', but must be true or false. In YAML 1.2 this is text: write false.",
    ]
    assert mistakes(torch.optim.lr_scheduler.ReduceLROnPlateau, {"mode": "mim"}, partial=True) == [
        "mode of ReduceLROnPlateau is 'mim', but must be 'min' or 'max'. Did you mean min?"
    ]
    assert "betas of AdamW is [0.9], but must be a list of 2" in mistakes(torch.optim.AdamW, {"betas": [0.9]}, True)[0]


def test_a_default_of_none_accepts_null():
    def function(x: int = None, y: int = 3):  # noqa: RUF013
        return x, y

    assert mistakes(function, {"x": None}) == []
    assert len(mistakes(function, {"y": None})) == 1


def test_a_decorator_that_may_take_other_arguments_accepts_everything():
    def adds_an_argument(function):
        @functools.wraps(function)
        def wrapper(*args, extra=None, **kwargs):
            return function(*args, **kwargs)

        return wrapper

    @adds_an_argument
    def function(x: int):
        return x

    assert mistakes(function, {"x": 3, "extra": 1, "other": 2}) == []


def test_a_decorator_that_passes_everything_on_is_seen_through():
    for decorator in (torch.no_grad(), functools.lru_cache, functools.cache):

        @decorator
        def function(width: int):
            return width

        assert "Did you mean width?" in mistakes(function, {"widht": 3})[0]
        assert len(mistakes(function, {"width": "x"})) == 1


def test_classes_of_every_kind():
    @dataclass
    class Item:
        x: int
        y: "str" = "a"

    class Fields(NamedTuple):
        x: int

    class Inherits(torch.nn.Linear):
        pass

    class New:
        def __new__(cls, x: int):
            return super().__new__(cls)

    class Unreadable:
        @property
        def __signature__(self):
            raise ValueError

    for kind in (Item, Fields, New):
        assert len(mistakes(kind, {"x": "a"})) == 1
        assert "needs x" in mistakes(kind, {})[0]
    assert len(mistakes(Item, {"x": 1, "y": 2})) == 1
    assert len(mistakes(Inherits, {"in_features": "a", "out_features": 3})) == 1
    assert mistakes(Unreadable(), {"x": 1}) == []
    assert mistakes(functools.partial(torch.nn.Linear, 3), {"out_features": 3}) == []


def test_annotations_that_were_copied_are_not_certain():
    def takes_text(function):
        @functools.wraps(function)
        def wrapper(width, **kwargs):
            return function(int(width), **kwargs)

        return wrapper

    @takes_text
    def function(width: int):
        return width

    class Wrapped:
        @takes_text
        def __init__(self, width: int):
            pass

    for target in (function, Wrapped):
        assert mistakes(target, {"width": "3"}) == []
    assert "needs width" in mistakes(function, {})[0]


def test_fields_of_a_class_that_converts_them_are_not_certain():
    @dataclass
    class Converts:
        width: int

        def __post_init__(self):
            self.width = int(self.width)

    @dataclass
    class Inherits(Converts):
        depth: int = 1

    for target in (Converts, Inherits):
        assert mistakes(target, {"width": "3"}) == []
        assert "Did you mean width?" in mistakes(target, {"widht": 3})[0]
        assert "needs width" in mistakes(target, {})[0]


def test_a_class_whose_metaclass_takes_the_arguments_is_not_certain():
    class Meta(type):
        def __call__(cls, width):
            return super().__call__(int(width))

    class Made(metaclass=Meta):
        def __init__(self, width: int):
            pass

    assert mistakes(Made, {"width": "3"}) == []


def test_a_literal_of_enum_members_may_be_given_by_text():
    class Mode(enum.Enum):
        MIN = "min"

    def function(mode: Literal[Mode.MIN], other: Literal["a", "b"] = "a"):
        return mode, other

    assert mistakes(function, {"mode": "min"}) == []
    assert len(mistakes(function, {"mode": [1], "other": "c"})) == 2
