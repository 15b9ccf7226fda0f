"""What a resolved YAML names is checked before anything is built, all of it, in one go."""

import sys
import textwrap

import pytest
from test_signatures import Call

from amp_recipes.config import check as check_yaml
from amp_recipes.config.nodes import Mapping, Mistakes, Scalar, Sequence, Source, Unknown
from amp_recipes.config.targets import check_targets
from amp_recipes.config.trust import Trust
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
    (Call("!module:my_model.Model"), "my_model.Model is no module, but the class Model."),
    (("!module:torch.nn", [3]), "!module:torch.nn takes no arguments."),
    (Call("!new:torch.nn.Liner"), "Did you mean torch.nn.Linear?"),
    (Call("!new:os.system"), 'trust=("os.system",) in load_hparams, or --trust os.system'),
    (Call("!apply:getattr"), "write !ref <key.attribute>"),
    (("!apply:getattr", [3]), "write !ref <key.attribute>"),
    (("!apply:getattr", [3, "a", 4]), "write !ref <key.attribute>"),
    (("!apply:getattr", {"o": 3, "name": "real"}), "write !ref <key.attribute>"),
    (("!apply:getattr", [3, Call("!name:my_model.limit")]), "write !ref <key.attribute>"),
    (("!apply:getattr", [3, "__class__"]), "'__class__' is no public attribute"),
    (("!apply:getattr", [3, "a.b"]), "'a.b' is no public attribute"),
    (("!apply:getattr", [3, "re\u0430l"]), "is no public attribute"),
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


@pytest.mark.parametrize(("item", "text"), WRONG, ids=[text for _, text in WRONG])
def test_each_mistake_is_told(targets_in, item, text):
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
        "@dataclass\nclass Sets:\n    train: int = 1\n    size: int = 2\n    @property\n    def all(self): return 3\n"
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
        "!new:sets.Sets gives no 'trian'. Did you mean train?",
        "!apply:sets.load gives no 'sizes'. Did you mean size?",
    ]
