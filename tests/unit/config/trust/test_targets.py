"""What a resolved YAML names is checked before anything is built, all of it, in one go."""

import sys
import textwrap

import pytest
from test_signatures import Call
from work import at_most

from amp_recipes.config import check as check_yaml
from amp_recipes.config.trust.targets import check_targets
from amp_recipes.config.trust.trust import Trust
from amp_recipes.config.yaml.nodes import Mapping, Mistakes, Scalar, Sequence, Source, Unknown
from amp_recipes.errors import ConfigError

CODE = """
import abc
import torch

canary = []


class Model(torch.nn.Module):
    def __init__(self, width: int, depth: int = 1):
        canary.append("built")


class Abstract(abc.ABC):
    @abc.abstractmethod
    def read(self): ...


def load(path: str):
    canary.append("called")


limit = 3
"""


def node(value, tag="", line=1):
    source = Source("x.yaml", line, 3)
    if isinstance(value, Call):
        return Scalar(value.tag, "", source)
    if isinstance(value, tuple):
        return node(value[1], value[0], line)
    if isinstance(value, dict):
        lines = {key: line + depth for depth, key in enumerate(value, start=1)}
        return Mapping(
            tag,
            {key: node(item, line=lines[key]) for key, item in value.items()},
            source,
            {key: Source("x.yaml", lines[key], 1) for key in value},
        )
    if isinstance(value, list):
        return Sequence(tag, [node(item, line=line) for item in value], source)
    return value if isinstance(value, Unknown) else Scalar(tag, value, source)


@pytest.fixture
def targets_in(tmp_path, monkeypatch):
    """How many objects a tree would build, and its mistakes; no code of the recipe may have been called."""
    (tmp_path / "my_model.py").write_text(textwrap.dedent(CODE))
    monkeypatch.syspath_prepend(tmp_path)

    def find(tree, *packages):
        mistakes = Mistakes()
        count = check_targets(node(tree), Trust(packages, [tmp_path]), mistakes)
        assert "my_model" not in sys.modules or sys.modules["my_model"].canary == []
        return count, [text.partition(": ")[2] for text in mistakes]

    yield find
    sys.modules.pop("my_model", None)


RIGHT = [
    ("!new:my_model.Model", {"width": 3}),
    ("!new:my_model.Model", [3, 2]),
    ("!apply:my_model.load", ["x"]),
    ("!name:my_model.load", {}),
    ("!name:my_model.Model", {"depth": 3}),
    Call("!name:my_model.limit"),
    Call("!name:torch.float32"),
    Call("!module:torch.nn.functional"),
    Call("!new:collections.Counter"),
    ("!apply:sorted", [[3, 1, 2]]),
    ("!tuple", [1, 2]),
    ("!apply:getattr", [Call("!new:torch.nn.ReLU"), "training"]),
    Unknown("!applyref:random.randint", Source("x.yaml", 1)),
]
WRONG = [
    (("!new:my_model.Model", {"widht": 3}), "Model has no argument 'widht'. Did you mean width?"),
    (("!new:my_model.Model", {"width": "wide"}), "width of Model is 'wide', but must be a whole number."),
    (Call("!new:my_model.Model"), "Model needs width: give it below."),
    (Call("!new:my_model.Modell"), "Did you mean my_model.Model?"),
    (Call("!new:my_model.Abstract"), "my_model.Abstract is abstract: name a class that also defines read."),
    (("!new:my_model.load", ["x"]), "but my_model.load is a function; !apply:my_model.load calls it."),
    (Call("!new:my_model.limit"), "but my_model.limit is a int; !name:my_model.limit gives it."),
    (("!apply:my_model.Model", [3]), "but my_model.Model is a class; !new:my_model.Model makes an object of it."),
    (("!apply:my_model.load", {"paht": "x"}), "Did you mean path?"),
    (("!name:my_model.limit", [3]), "only a class or function takes arguments, but my_model.limit is a int."),
    (("!name:my_model.Model", {"dept": 3}), "Did you mean depth?"),
    (Call("!module:my_model.Model"), "my_model.Model is not a module, but the class Model."),
    (("!module:torch.nn", [3]), "!module:torch.nn takes no arguments."),
    (Call("!new:torch.nn.Liner"), "Did you mean torch.nn.Linear?"),
    (Call("!new:os.system"), 'trust=("os.system",) in load_hparams, or --trust os.system'),
    (Call("!apply:getattr"), "write !ref <key.attribute>"),
    (("!apply:getattr", [3]), "write !ref <key.attribute>"),
    (("!apply:getattr", [3, "a", 4]), "write !ref <key.attribute>"),
    (("!apply:getattr", {"o": 3, "name": "real"}), "write !ref <key.attribute>"),
    (("!apply:getattr", [3, Call("!name:my_model.limit")]), "write !ref <key.attribute>"),
    (("!apply:getattr", [3, "__class__"]), "'__class__' is not a public attribute"),
    (("!apply:getattr", [3, "a.b"]), "'a.b' is not a public attribute"),
    (("!apply:getattr", [3, "re\u0430l"]), "is not a public attribute"),
    (("!apply:builtins.getattr", [3, "real"]), "builtins.getattr is not trusted"),
    (("!name:getattr", [3, "real"]), "getattr is not trusted"),
    (Unknown("!applyref:os.system", Source("x.yaml", 1)), "os.system is not trusted"),
    (
        Unknown("!applyref:my_model.Model", Source("x.yaml", 1)),
        "!applyref: calls a function, but my_model.Model is a class",
    ),
]


def test_right_ones_pass_and_are_counted(targets_in):
    assert targets_in({str(key): item for key, item in enumerate(RIGHT)}) == (10, [])


def test_each_mistake_is_told(targets_in, subtests):
    for item, text in WRONG:
        with subtests.test(text):
            _, (found,) = targets_in({"key": item})
            assert text in found


def test_all_mistakes_are_told_together_wherever_they_stand(targets_in):
    tree = {str(key): [{"below": item}] for key, (item, _) in enumerate(WRONG)}
    assert len(targets_in(tree)[1]) == len(WRONG)


def test_a_trusted_package_is_checked_as_well(targets_in):
    assert targets_in({"x": ("!new:sklearn.svm.SVC", {"C": 1.0})}, "sklearn") == (1, [])
    _, (found,) = targets_in({"x": ("!new:sklearn.svm.SVC", {"c_": 1.0})}, "sklearn")
    assert "SVC has no argument 'c_'" in found


def test_a_shared_object_is_checked_once(targets_in):
    shared = node(("!new:my_model.Model", {"width": "x"}))
    mistakes = Mistakes()
    root = node({})
    root.items = {"a": shared, "b": Sequence("", [shared], Source("x.yaml"))}
    assert check_targets(root, Trust(["my_model"]), mistakes) == 1
    assert len(mistakes) == 1


def test_attributes_of_a_dataclass_are_compared_before_it_is_built(tmp_path):
    (tmp_path / "sets.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\nclass Sets:\n"
        "    train: int = 1\n    size: int = 2\n    @property\n    def all(self): return 3\n"
        "def load() -> Sets: return Sets()\n"
        "class Open:\n    def __getattr__(self, name): return name\n"
        "def other(): return Sets()\n"
    )
    (tmp_path / "x.yaml").write_text(
        "a: !new:sets.Sets\nb: !apply:sets.load\nc: !new:sets.Open\nd: !apply:sets.other\ne: !new:torch.nn.ReLU\n"
        "good: [!ref <a.train>, !ref <b.size>, !ref <b.all>, !ref <c.any>, !ref <d.any>, !ref <e.any>]\n"
        "bad: [!ref <a.trian>, !ref <b.sizes>]\n"
    )
    with pytest.raises(ConfigError) as caught:
        check_yaml(tmp_path / "x.yaml", recipe_folder=tmp_path)
    head, *lines = str(caught.value).splitlines()
    assert head.startswith("2 mistakes") and [line.split(": ", 1)[1] for line in lines] == [
        "the object of !new:sets.Sets has no attribute 'trian'. Did you mean train?",
        "the object of !apply:sets.load has no attribute 'sizes'. Did you mean size?",
    ]


CERTAIN = """
import functools, typing
from collections import namedtuple
from dataclasses import dataclass, field
from typing import NamedTuple, final

@dataclass
class Plain:
    size: int = 1
    count: int = field(init=False)

@final
@dataclass
class Final:
    size: int = 1

@dataclass(frozen=True)
class Frozen:
    size: int = 1

@dataclass(frozen=True, slots=True)
class Slots:
    size: int = 1

class Pair(NamedTuple):
    size: int = 1

Old = namedtuple("Old", "size", defaults=[1])

def final_of() -> Final: return Final()
def frozen() -> Frozen: return Frozen()
def pair() -> Pair: return Pair()
"""
OPEN = """
import functools, typing
from dataclasses import dataclass

@dataclass
class Sets:
    more: typing.ClassVar
    size: int = 1
    def __post_init__(self): self.extra = 1

@dataclass
class Base:
    size: int = 1

class OwnInit(Base):
    def __init__(self): self.extra = 1

@dataclass
class KeptInit:
    size: int = 1
    def __init__(self): self.extra = 1

@dataclass(init=False)
class NoInit:
    size: int = 1

@dataclass
class PostInitOfBase(Sets):
    other: int = 1

@dataclass
class New:
    size: int = 1
    def __new__(cls):
        self = super().__new__(cls)
        self.extra = 1
        return self

@dataclass
class LooksUp:
    size: int = 1
    def __getattribute__(self, name): return 1

class Pair(typing.NamedTuple):
    size: int = 1

class MorePair(Pair):
    def __init__(self): self.extra = 1

@dataclass(frozen=True)
class Frozen:
    size: int = 1

@dataclass(frozen=True)
class MoreFrozen(Frozen):
    extra: int = 1

def base() -> Base: return OwnInit()
def frozen() -> Frozen: return MoreFrozen()
def named() -> Pair: return MorePair()
async def later() -> Frozen: ...

@dataclass(frozen=True)
class Result:
    size: int = 1

def wrapped(function):
    @functools.wraps(function)
    def wrapper():
        return OwnInit()
    return wrapper

@wrapped
def decorated() -> Result: ...
"""


@pytest.fixture
def attribute_mistakes(tmp_path, monkeypatch):
    """Writes a module and gives a function: what is wrong with an attribute of what one of its tags builds."""
    monkeypatch.syspath_prepend(tmp_path)

    def of_module(code):
        (tmp_path / "kinds.py").write_text(code)
        trust = Trust(recipe_folders=[tmp_path])

        def mistakes_of(tag, name):
            mistakes = Mistakes()
            check_targets(node({"x": ("!apply:getattr", [Call(tag), name])}), trust, mistakes)
            return list(mistakes)

        return mistakes_of

    yield of_module
    sys.modules.pop("kinds", None)


def tags_of(classes, functions):
    return [f"!new:kinds.{name}" for name in classes.split()] + [f"!apply:kinds.{name}" for name in functions.split()]


def test_attributes_that_are_certain(attribute_mistakes, subtests):
    mistakes_of = attribute_mistakes(CERTAIN)
    for tag in tags_of("Plain Final Frozen Slots Pair Old", "final_of frozen pair"):
        with subtests.test(tag):
            (text,) = mistakes_of(tag, "extra")
            assert f"the object of {tag} has no attribute 'extra'" in text
            assert mistakes_of(tag, "size") == []


def test_attributes_that_only_the_object_knows(attribute_mistakes, subtests):
    mistakes_of = attribute_mistakes(OPEN)
    classes = "Sets OwnInit KeptInit NoInit PostInitOfBase New LooksUp MorePair"
    for tag in tags_of(classes, "base frozen named later decorated"):
        with subtests.test(tag):
            assert mistakes_of(tag, "extra") == []


# Each a file of 1 MiB or less.
COSTLY = {
    "misspelt classes": [Call(f"!new:torch.nn.Linaer{number}") for number in range(19_000)],
    "misspelt packages": [Call(f"!new:torhc.X{number}") for number in range(19_000)],
    "missing packages": [Call(f"!new:nosuchmodule{number}.Linear") for number in range(19_000)],
    "refused names": [Call(f"!new:os.system{number}") for number in range(19_000)],
    "wrong keywords": [("!new:torch.nn.Linear", {f"in_featurs{number}": 1 for number in range(9_000)})],
    "right calls": [("!new:torch.nn.Linear", [1, 2]) for _ in range(6_000)],
    "right names": [Call("!name:torch.nn.ReLU") for _ in range(19_000)],
    "attributes": [("!apply:getattr", [Call("!apply:my_model.load"), "x"]) for _ in range(6_000)],
    "wrong types": [("!new:torch.nn.Linear", ["a", "b"]) for _ in range(6_000)],
}


@pytest.mark.parametrize("part", [20, pytest.param(1, marks=pytest.mark.extended)])
def test_a_file_of_nothing_but_one_kind_of_line_takes_little_work(part, tmp_path, monkeypatch, subtests):
    (tmp_path / "my_model.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    for name, tree in COSTLY.items():
        mistakes, trust = Mistakes(), Trust(recipe_folders=[tmp_path])
        root = node({"items": []})
        lines = tree[: max(1, len(tree) // part)]
        root.items["items"].items = [node(item, line=line) for line, item in enumerate(lines, start=1)]
        with subtests.test(name), at_most(calls=1_300_000):
            check_targets(root, trust, mistakes)
        assert len(mistakes) <= 310
    sys.modules.pop("my_model", None)
