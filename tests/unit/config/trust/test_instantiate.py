"""From checked nodes to objects: what is called, in which order, what is shared, and what is said when it fails."""

import copy
import functools
import io
import operator
import pickle
import pydoc
import sys
import threading
import types

import pytest
import ruamel.yaml
import torch
import yaml as pyyaml
from work import at_most

from amp_recipes.config.trust import hyperpyyaml_calls
from amp_recipes.config.trust.instantiate import build
from amp_recipes.config.trust.trust import Trust
from amp_recipes.config.yaml.nodes import Mapping, Scalar, Sequence, Source
from amp_recipes.errors import ConfigError, PrecisionError

HERE = __name__
calls = []


class Kept:
    """Keeps what it is given, and notes that it was built."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs
        calls.append(kwargs.get("name"))

    @classmethod
    def made(cls, **kwargs):
        return cls(**kwargs)


def raises(kind, *words):
    errors = {"type": TypeError, "exit": KeyboardInterrupt, "precision": PrecisionError, "config": ConfigError}
    raise errors.get(kind, ValueError)(*words)


class Broken:
    def __init__(self, kind="value", *words):
        raises(kind, *words)


def read_yaml(text):
    """How YAML text is read by code that never heard of HyperPyYAML."""
    with_pyyaml = pyyaml.load(text, Loader=pyyaml.SafeLoader)
    with_ruamel = ruamel.yaml.YAML(typ="safe", pure=True).load(text)
    return with_pyyaml, with_ruamel, library_state()


def library_state():
    return (
        pyyaml.constructor.BaseConstructor.construct_object.__defaults__,
        ruamel.yaml.constructor.BaseConstructor.construct_object.__defaults__,
        list(ruamel.yaml.resolver.implicit_resolvers),
        dict(ruamel.yaml.Loader.yaml_constructors),
        dict(ruamel.yaml.Loader.yaml_multi_constructors),
        dict(pyyaml.Loader.yaml_multi_constructors),
        {char: list(found) for char, found in ruamel.yaml.Loader.yaml_implicit_resolvers.items()},
    )


class Trusting:
    """Stands for a Trust that lets everything pass, and notes what it was asked."""

    def __init__(self):
        self.asked = []

    def locate(self, name):
        self.asked.append(name)
        return pydoc.locate(name)

    module = locate

    def attribute(self, owner, name):
        self.asked.append(name)
        return f"{name} of {type(owner).__name__}"


def node(value, tag="", line=1):
    """Nodes of plain Python data; a (tag, data) pair is a tagged node, and a node stays the node it is."""
    source = Source("a.yaml", line, 3)
    if isinstance(value, Scalar | Sequence | Mapping):
        return value
    if isinstance(value, tuple):
        return node(value[1], value[0], line)
    if isinstance(value, list):
        return Sequence(tag, [node(item) for item in value], source)
    if isinstance(value, dict):
        return Mapping(tag, {key: node(item) for key, item in value.items()}, source)
    return Scalar(tag, value, source, str(value))


def built(tree, trust=None):
    calls.clear()
    return build(node(tree), trust or Trusting())


def test_plain_data_and_tuples_stay_what_they_are():
    tree = {"a": 1, "b": [1.5, None, "text", {"c": True, 2: []}], "t": ("!tuple", [1, ("!tuple", [2, [3]])]), "": {}}
    assert built(tree) == {"a": 1, "b": [1.5, None, "text", {"c": True, 2: []}], "t": (1, (2, [3])), "": {}}


def test_top_level_keys_that_begin_with_two_underscores_are_built_and_left_out():
    tree = {"__a": (f"!new:{HERE}.Kept", {"name": "a"}), "_b": 1, "c": {"__d": 2}}
    assert built(tree) == {"_b": 1, "c": {"__d": 2}}
    assert calls == ["a"]


def test_every_tag_does_what_hyperpyyaml_does():
    found = built(
        {
            "keywords": ("!new:torch.nn.Linear", {"in_features": 2, "out_features": 3}),
            "positions": ("!new:torch.nn.Linear", [2, 3]),
            "nothing": ("!new:torch.nn.ReLU", ""),
            "partial": ("!name:operator.mul", [6]),
            "named": ("!name:torch.optim.SGD", {"lr": 0.1}),
            "bare": ("!name:torch.nn.ReLU", ""),
            "empty": ("!name:torch.nn.ReLU", {}),
            "constant": ("!name:math.pi", ""),
            "applied": ("!apply:operator.mul", [6, 7]),
            "module": ("!module:torch.nn.init", ""),
        }
    )
    assert (found["keywords"].in_features, found["positions"].out_features) == (2, 3)
    assert isinstance(found["nothing"], torch.nn.ReLU)
    assert isinstance(found["partial"], functools.partial) and found["partial"](7) == 42
    assert found["named"].func is torch.optim.SGD and found["named"].keywords == {"lr": 0.1}
    assert found["bare"] is found["empty"] is torch.nn.ReLU
    assert found["constant"] == pytest.approx(3.14159265)
    assert found["applied"] == 42 and found["module"] is torch.nn.init


def test_a_method_may_be_named_though_each_look_gives_a_new_one():
    found = built(
        {"kept": (f"!apply:{HERE}.Kept.made", {"name": "x"}), "builtin": ("!apply:dict.fromkeys", [["a"], 1])}
    )
    assert found["kept"].kwargs == {"name": "x"} and found["builtin"] == {"a": 1}


def test_objects_are_built_in_the_order_of_the_file_and_arguments_first():
    kept = f"!new:{HERE}.Kept"
    tree = {
        "a": (kept, {"x": [(kept, {"name": "1"}), {"y": (kept, {"name": "2"})}], "name": "3"}),
        "b": {"c": (kept, {"name": "4"})},
        "d": (kept, {"name": "5", "last": (kept, {"name": "inner"})}),
    }
    built(tree)
    assert calls == ["1", "2", "3", "4", "inner", "5"]


def test_a_node_that_several_keys_share_is_built_once():
    items, shared = node([1]), node((f"!new:{HERE}.Kept", {"name": "one"}))
    part, pair = node(("!name:torch.optim.SGD", {"lr": 0.1})), node(("!tuple", [[1]]))
    again = (f"!new:{HERE}.Kept", {"name": "two", "inner": shared})
    found = built(
        {"a": items, "b": {"c": items}, "d": shared, "e": [shared], "f": again, "p": [part, part], "t": pair, "u": pair}
    )
    assert found["a"] is found["b"]["c"] and found["t"] is found["u"]
    assert found["d"] is found["e"][0] is found["f"].kwargs["inner"]
    assert found["p"][0] is found["p"][1]
    assert calls == ["one", "two"]


def test_nodes_that_are_alike_give_objects_of_their_own():
    found = built(
        {"a": [1], "b": [1], "c": {}, "d": {}, "e": ("!new:torch.nn.ReLU", ""), "f": ("!new:torch.nn.ReLU", "")}
    )
    assert found["a"] is not found["b"] and found["c"] is not found["d"] and found["e"] is not found["f"]


def test_a_tree_can_be_built_again():
    tree = node({"a": [1], "b": (f"!new:{HERE}.Kept", {"x": {"y": [2]}})})
    first = build(tree, Trusting())
    first["a"].append(2)
    first["b"].kwargs["x"]["y"].append(3)
    second = build(tree, Trusting())
    assert second["a"] == [1] and second["b"].kwargs == {"x": {"y": [2]}}


def test_a_wide_net_of_shared_nodes_is_built_with_little_work():
    level = node([0])
    for _ in range(40):
        level = Sequence("", [level, level], Source("a.yaml"))
    with at_most(calls=3_000):
        assert built({"a": level})["a"][0] is not None


def test_trust_is_asked_for_every_name_before_it_is_called():
    trust = Trusting()
    linear = ("!new:torch.nn.Linear", [1, 1])
    found = built({"m": ("!module:torch.nn", ""), "w": ("!apply:getattr", [linear, "weight"])}, trust)
    assert trust.asked == ["torch.nn", "torch.nn.Linear", "weight"]
    assert found["w"] == "weight of Linear"  # what trust gives, not what getattr would


def test_getattr_of_any_other_form_is_a_name_like_any_other(subtests):
    class NoGetattr(Trusting):
        def locate(self, name):
            if name == "getattr":
                raise ConfigError("getattr is not trusted")
            return super().locate(name)

    message = r"^a.yaml:1:3: k: !apply:getattr cannot be built: getattr is not trusted$"
    for arguments in ({"a": 1, "b": "x"}, [1], [1, "real", 2], [1, 2], [1, ("!new:str", "")], ""):
        with subtests.test(repr(arguments)), pytest.raises(ConfigError, match=message):
            built({"k": ("!apply:getattr", arguments)}, NoGetattr())


def test_what_trust_refuses_is_not_called():
    class Refusing(Trusting):
        def locate(self, name):
            raise ConfigError(f"{name} is not trusted")

    with pytest.raises(
        ConfigError, match=r"^a.yaml:1:3: a.x.0: !new:.*Kept cannot be built: .*Kept is not trusted$"
    ) as e:
        built({"a": {"x": [(f"!new:{HERE}.Kept", "")]}}, Refusing())
    assert calls == [] and e.value.__cause__ is None


def test_an_object_that_is_not_the_one_that_was_checked_is_not_called(subtests):
    class Deceived(Trusting):
        def locate(self, name):
            return operator.add

        module = locate

    for tag in ("!new:", "!name:", "!apply:", "!module:"):
        message = rf"^a.yaml:1:3: a: {tag}{HERE}.Kept cannot be built: .*ambiguous"
        with subtests.test(tag):
            with pytest.raises(ConfigError, match=message):
                built({"a": (f"{tag}{HERE}.Kept", "")}, Deceived())
            assert calls == []


def test_a_function_with_the_name_of_a_module_is_called():
    """From Python 3.12 on, pydoc finds the module `torch.nn.utils.spectral_norm` by that name."""
    name = "torch.nn.utils.spectral_norm"
    found = built({"f": (f"!name:{name}", ""), "late": (f"!name:{name}", {"eps": 0.5})}, Trust())
    assert found["f"] is torch.nn.utils.spectral_norm
    assert found["late"].func is torch.nn.utils.spectral_norm and found["late"].keywords == {"eps": 0.5}


def test_text_that_looks_like_a_tag_stays_text():
    texts = ["!new:os.system", "(1, !!python/object/apply:os.getcwd [])", "!ref <a>", "*a", "&a x", "{a: 1}", "- 1\n"]
    assert (
        built({"a": texts, "k": (f"!new:{HERE}.Kept", {"x": texts})})["k"].kwargs["x"]
        == texts
        == built({"a": texts})["a"]
    )


def test_no_yaml_text_is_read_while_building(monkeypatch):
    built({"a": ("!apply:operator.add", [1, 2])})  # HyperPyYAML's constructors are known from here on
    monkeypatch.setattr(pyyaml, "load", None)
    monkeypatch.setattr(hyperpyyaml_calls, "load_hyperpyyaml", None)
    assert built({"a": ("!apply:operator.add", [1, 2]), "t": ("!tuple", [1])}) == {"a": 3, "t": (1,)}


def test_a_constructor_that_raises_is_named_with_its_place_and_is_the_cause():
    inner = node((f"!new:{HERE}.Broken", ["value", "no good"]), line=7)
    with pytest.raises(ConfigError) as caught:
        built({"a": {"b": [1, (f"!new:{HERE}.Kept", {"x": inner})]}})
    assert str(caught.value) == f"a.yaml:7:3: a.b.1.x: !new:{HERE}.Broken cannot be built: ValueError: no good"
    assert isinstance(caught.value.__cause__, ValueError)
    assert calls == []


def test_a_class_that_is_built_later_is_named_with_its_place_too(subtests):
    late = built({"a": {"b": (f"!name:{HERE}.Broken", {"kind": "type"})}})["a"]["b"]
    for name, make in {
        "as it is": late,
        "copied": copy.deepcopy(late),
        "pickled": pickle.loads(pickle.dumps(late)),
        "with more": functools.partial(late, kind="value"),
    }.items():
        with subtests.test(name), pytest.raises(ConfigError) as caught:
            make()
        place = f"a.yaml:1:3: a.b: !name:{HERE}.Broken cannot be built: "
        assert str(caught.value).startswith(place) and isinstance(caught.value.__cause__, (TypeError, ValueError))


def test_how_a_late_class_is_called_is_the_callers_own_mistake():
    late = built({"a": (f"!name:{HERE}.Broken", {"kind": "type"})})["a"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'sort'"):
        late(sort=1)


def test_what_a_function_raises_is_left_alone():
    late = built({"a": (f"!name:{HERE}.raises", ["value", "no good"])})["a"]
    with pytest.raises(ValueError, match=r"^no good$") as caught:
        late()
    assert type(caught.value) is ValueError


MESSAGES = [
    (("!new:torch.nn.Linear", {"in_feature": 1}), r"TypeError: .*unexpected keyword argument 'in_feature'"),
    (("!apply:operator.add", [1]), r"TypeError: add expected 2 arguments, got 1$"),
    (("!apply:operator.truediv", [1, 0]), r"ZeroDivisionError: division by zero$"),
    ((f"!new:{HERE}.Broken", ["type"]), r"TypeError: $"),
    ((f"!new:{HERE}.Broken", ["type", "a", "b"]), r"TypeError: \('a', 'b'\)$"),
    ((f"!new:{HERE}.Broken", ["precision", "no bf16 here"]), r"!new:\S+ cannot be built: no bf16 here$"),
    ((f"!new:{HERE}.Broken", ["config", "a.yaml:1: x"]), r"!new:\S+ cannot be built: a.yaml:1: x$"),
    ((f"!new:{HERE}.raises", ""), r"ValueError: .*should be a class"),
    ((f"!apply:{HERE}.Kept", ""), r"ValueError: .*should be a callable"),
    (("!module:operator", [1]), r"ValueError: Cannot pass args to module$"),
    ((f"!module:{HERE}.Kept", ""), r"ValueError: .*should be module"),
    (("!name:math.pi", [1]), r"ValueError: .*should be class or function"),
    (("!new:collections.Counter", {1: 2}), r"TypeError: keywords must be strings$"),
    (("!new:no.such.Class", ""), r"ImportError: There is no such class as no.such.Class$"),
]


def test_the_message_says_what_the_exception_says(subtests):
    for tree, message in MESSAGES:
        with subtests.test(str(tree)):
            with pytest.raises(ConfigError, match=message) as caught:
                built({"key": tree})
            assert str(caught.value).startswith(f"a.yaml:1:3: key: {tree[0]} cannot be built: ")
            of_the_framework = tree[0].endswith("Broken") and tree[1][0] != "type"
            assert (caught.value.__cause__ is None) == of_the_framework


def test_an_attribute_that_cannot_be_read_is_named():
    class NoAttribute(Trusting):
        def attribute(self, owner, name):
            return getattr(owner, name)

    with pytest.raises(
        ConfigError, match=r"^a.yaml:1:3: k: attribute 'wieght' cannot be read: AttributeError: .*wieght"
    ):
        built({"k": ("!apply:getattr", [("!new:torch.nn.Linear", [1, 1]), "wieght"])}, NoAttribute())


def test_a_keyboard_interrupt_passes():
    with pytest.raises(KeyboardInterrupt):
        built({"a": (f"!new:{HERE}.Broken", ["exit"])})


@pytest.fixture
def first_time():
    """HyperPyYAML is asked for its constructors anew."""
    hyperpyyaml_calls._constructors.cache_clear()


TEXT = "a: {b: [1, 2]}\nc: (1, 2)\n"


def test_code_that_reads_yaml_while_objects_are_built_sees_the_libraries_as_they_are(first_time):
    expected = read_yaml(TEXT)
    state = library_state()
    assert state[:2] == ((False,), (False,))
    assert built({"read": (f"!apply:{HERE}.read_yaml", [TEXT])})["read"] == expected
    assert library_state() == state


def test_a_default_that_another_library_has_set_is_kept(first_time, monkeypatch):
    function = pyyaml.constructor.BaseConstructor.construct_object
    monkeypatch.setattr(function, "__defaults__", (True,))
    assert built({"read": (f"!apply:{HERE}.read_yaml", [TEXT])})["read"][2][0] == (True,)
    assert function.__defaults__ == (True,)


def test_the_libraries_are_as_they_were_when_building_or_hyperpyyaml_fails(first_time, monkeypatch):
    state = library_state()
    with pytest.raises(ConfigError):
        built({"a": (f"!new:{HERE}.Broken", "")})
    assert library_state() == state
    hyperpyyaml_calls._constructors.cache_clear()
    monkeypatch.setattr(hyperpyyaml_calls._Collector, "get_single_data", lambda self: raises("value", "inside"))
    with pytest.raises(ConfigError, match="inside"):
        built({"a": ("!new:torch.nn.ReLU", "")})
    assert library_state() == state


def test_threads_that_load_together_leave_the_libraries_as_they_were():
    state = library_state()
    seen = []

    def load():
        for _ in range(20):
            hyperpyyaml_calls._constructors.cache_clear()
            seen.append(build(node({"a": ("!apply:operator.add", [1, 2])}), Trusting()))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=load) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen == [{"a": 3}] * 80 and library_state() == state


def test_an_object_whose_code_loads_with_hyperpyyaml_itself_is_built(first_time):
    """A recipe in transition may read a part of its settings with HyperPyYAML."""
    module = types.ModuleType("transition_of_test_instantiate")

    def load(text):
        from hyperpyyaml import load_hyperpyyaml

        return load_hyperpyyaml(io.StringIO(text), loader=type("Loader", (ruamel.yaml.Loader,), {}))

    module.load = load
    sys.modules[module.__name__] = module
    resolvers = list(ruamel.yaml.resolver.implicit_resolvers)
    try:
        assert built({"a": (f"!apply:{module.__name__}.load", ["x: !new:collections.Counter {k: 1}\n"])}) == {
            "a": {"x": {"k": 1}}
        }
    finally:
        del sys.modules[module.__name__]
        ruamel.yaml.resolver.implicit_resolvers[:] = resolvers
