"""From a YAML and overrides to hyperparameters, and every mistake on the way."""

import collections
import copy
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import ruamel.yaml
import torch
import yaml as pyyaml
from hyperpyyaml import load_hyperpyyaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amp_recipes.config import Hparams, load_hparams, parse_arguments, seed_everything
from amp_recipes.config.hparams import find_loaded, resolved_text
from amp_recipes.errors import ConfigError

MODEL = """\
seed: 3
lr: 1e-4
__hidden: 8
sizes: [4, !ref <__hidden>, 2]
model: !new:torch.nn.Linear
  in_features: 4
  out_features: !ref <__hidden>
optimizer: !name:torch.optim.SGD
  lr: !ref <lr>
  momentum: 0.9
half: !ref <lr> / 2
name: !ref run-<seed>
copied: !copy <sizes>
betas: !tuple (0.9, 0.999)
pair: (1, 2)
weight: !ref <model.weight>
product: !apply:operator.mul [6, 7]
"""


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "params.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def test_a_package_to_trust_that_is_not_installed_is_refused(write, tmp_path, subtests, monkeypatch):
    file = write("lr: 1\n")
    for name, wrong in [
        ("nosuchpkg", "--trust nosuchpkg: no package or module of that name is installed."),
        ("nunpy.linalg", "--trust nunpy.linalg: no package or module of that name is installed. Did you mean numpy?"),
        ("numpy", None),
        ("eval", None),
        (str(tmp_path), None),
    ]:
        with subtests.test(name):
            monkeypatch.setattr("sys.orig_argv", ["python", "train.py", file, "--trust", name])
            path, _, overrides = parse_arguments([file, "--trust", name])
            if wrong is None:
                assert load_hparams(path, overrides) == {"lr": 1}
            else:
                with pytest.raises(ConfigError) as refused:
                    load_hparams(path, overrides)
                assert str(refused.value) == f"command line: {wrong}"


def test_a_wrong_argument_names_the_key_or_the_option_that_its_value_came_from(write, subtests):
    text = "number_of_epochs: 3\nlr: 0.1\nopt_class: !name:torch.optim.AdamW {lr: !ref <lr>}\n"
    file = write(text + "counter: !new:amp_recipes.EpochCounter {limit: !ref <number_of_epochs>}\n")
    wrong = write(text.replace("0.1", "abc"), "wrong.yaml")
    direct = write("opt_class: !name:torch.optim.AdamW {lr: abc}\n", "direct.yaml")
    for words, end in [
        ([file, "--number_of_epochs=two"], "must be a whole number. It was given as --number_of_epochs."),
        ([file, "--opt_class.lr=abc"], "must be a number or a tensor. It was given as --opt_class.lr."),
        ([wrong], "must be a number or a tensor. It is the value of the key lr."),
        ([direct], "direct.yaml:1:41: lr of AdamW is 'abc', but must be a number or a tensor."),
    ]:
        with subtests.test(words=words), pytest.raises(ConfigError) as caught:
            path, _, overrides = parse_arguments(words)
            load_hparams(path, overrides)
        assert str(caught.value).endswith(end), str(caught.value)


def hparams_of(file: str, *options: str) -> dict:
    return load_hparams(file, parse_arguments([file, *options])[2])


def test_without_overrides_the_values_are_those_of_hyperpyyaml(write):
    file = write(MODEL)
    resolvers = list(ruamel.yaml.resolver.implicit_resolvers)
    reference = load_hyperpyyaml(MODEL, loader=type("Loader", (ruamel.yaml.Loader,), {}))
    ruamel.yaml.resolver.implicit_resolvers[:] = resolvers  # HyperPyYAML adds to it for the whole process
    found = load_hparams(file)
    assert list(found) == list(reference)
    objects = {"model", "weight", "optimizer"}
    assert {k: found[k] for k in found.keys() - objects} == {k: reference[k] for k in reference.keys() - objects}
    assert found["lr"] == 1e-4 and found["half"] == 5e-5 and found["product"] == 42
    assert found["betas"] == (0.9, 0.999) and found["pair"] == (1, 2)
    assert found["model"].weight.shape == (8, 4) and found["weight"] is found["model"].weight
    assert found["optimizer"].keywords == {"lr": 1e-4, "momentum": 0.9}
    assert "__hidden" not in found


def test_overrides_reach_any_depth_and_references_follow(write):
    file = write(MODEL)
    argv = ["--lr=1e-2", "--model.in_features=5", "--sizes.0=9", "--__hidden=16", "--optimizer.momentum=0"]
    found = hparams_of(file, *argv)
    assert found["half"] == 5e-3
    assert found["model"].weight.shape == (16, 5)
    assert found["sizes"] == found["copied"] == [9, 16, 2]
    assert found["optimizer"].keywords == {"lr": 1e-2, "momentum": 0}


def test_mappings_dotted_keys_and_yaml_text_override_alike(subtests, write):
    for overrides in [
        {"model": {"in_features": 5}, "lr": 0.5},
        {"model.in_features": 5, "lr": 0.5},
        "model: {in_features: 5}\nlr: 0.5\n",
        "model.in_features: 5\nlr: 0.5\n",
    ]:
        with subtests.test(overrides=overrides):
            found = load_hparams(Path(write(MODEL)), overrides)
            assert (found["model"].in_features, found["half"]) == (5, 0.25)


def test_overrides_are_plain_data_whatever_their_form(subtests, write):
    message = r"^overrides:1:\d+: .*an override must be plain data"
    for text in ["half: !ref <lr>", "optimizer: !new:torch.nn.ReLU", "sizes: [1, !ref <lr>]"]:
        with subtests.test(text=text), pytest.raises(ConfigError, match=message):
            load_hparams(write(MODEL), text)


def test_a_value_of_the_command_line_never_becomes_a_tag(write):
    found = hparams_of(write("a: 1\nb: 2\n"), "--a=!ref <b>", "--b=!!python/name:os.system")
    assert found == {"a": "!ref <b>", "b": "!!python/name:os.system"}


@settings(max_examples=60, deadline=None)
@given(st.text() | st.floats() | st.integers() | st.booleans() | st.none())
@example("a:  b # c\n\n d ")
@example("null")
@example(4.697088225979121e16)
@example(6.628520000000001e-10)
@example("é\u2028\x85\x07 ")
def test_an_override_arrives_as_the_value_that_was_given(tmp_path_factory, value):
    file = tmp_path_factory.getbasetemp() / "roundtrip.yaml"
    file.write_text("a: 1\nb: !ref <a>\n")
    found = load_hparams(file, {"a": value})["a"]
    assert found == value or value != value
    assert type(found) is type(value)


def test_paths_and_tuples_are_plain_values(write, tmp_path):
    assert load_hparams(write("a: 1\nb: 1\n"), {"a": tmp_path, "b": (1, 2)}) == {"a": str(tmp_path), "b": (1, 2)}


def test_a_mapping_may_replace_what_holds_nothing(write):
    found = hparams_of(write("a: null\nb: {}\nc: !PLACEHOLDER\n"), "--a.x=1", "--b={y: 2}", "--c.z.u=3")
    assert found == {"a": {"x": 1}, "b": {"y": 2}, "c": {"z": {"u": 3}}}


def test_anything_may_be_replaced_by_null(write):
    assert hparams_of(write(MODEL.replace("weight: !ref <model.weight>\n", "")), "--model=null")["model"] is None


def test_keys_that_hold_dots_or_numbers_can_be_overridden(write):
    file = write("freeze: {encoder.layer1: true, head: true}\nclasses: {1: cat}\n")
    assert hparams_of(file, "--freeze.encoder.layer1=false", "--classes.1=dog") == {
        "freeze": {"encoder.layer1": False, "head": True},
        "classes": {1: "dog"},
    }


def test_an_anchored_number_stays_the_number(write):
    assert load_hparams(write("a: &lr 1e-4\nb: *lr\nc: !ref <b>\n")) == {"a": 1e-4, "b": 1e-4, "c": 1e-4}


def test_merged_keys_can_be_overridden(write):
    file = write("base: &base {k: 1, l: 2}\nderived:\n  <<: *base\n  z: 3\n")
    assert hparams_of(file, "--derived.k=5") == {"base": {"k": 1, "l": 2}, "derived": {"k": 5, "l": 2, "z": 3}}


def test_a_run_option_overrides_the_key_of_its_name_and_only_where_there_is_one(write):
    file = write("precision: fp32\nshown: !ref at <precision>\n")
    assert hparams_of(file, "--precision=bf16", "--max_grad_norm=1") == {"precision": "bf16", "shown": "at bf16"}
    assert hparams_of(file) == {"precision": "fp32", "shown": "at fp32"}  # a default overrides nothing


def test_a_run_option_in_a_mapping_of_overrides_is_added_and_checked(write):
    file = write("lr: 1\n")
    assert load_hparams(file, {"precision": "bf16"}) == {"lr": 1, "precision": "bf16"}
    with pytest.raises(ConfigError, match=r"precision is 'bf61'.* Did you mean bf16\?$"):
        load_hparams(file, {"precision": "bf61"})


def test_an_object_that_cannot_be_built_is_named_with_file_line_and_key(write):
    file = write("a: 1\nouter:\n  inner: !apply:operator.truediv [1, 0]\n")
    with pytest.raises(ConfigError) as caught:
        load_hparams(file)
    assert str(caught.value).startswith(f"{file}:3:10: outer.inner: !apply:operator.truediv cannot be built: ")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_what_would_fail_is_found_before_anything_is_built(subtests, write, tmp_path):
    for line, message in [
        ("!new:torch.nn.Liner {a: 1}", "Did you mean torch.nn.Linear?"),
        ("!new:torch.nn.Linear {in_feature: 1, out_features: 2}", "Did you mean in_features?"),
        ("!new:torch.nn.Linear {in_features: x, out_features: 2}", "in_features of Linear is 'x', but must be a whole"),
        ("!new:torch.nn.Linear {in_features: 1}", "Linear needs out_features"),
        ("!unknown:x 1", "!unknown:x"),
        ("!new:sklearn.svm.SVC {}", "--trust sklearn"),
        ("!applyref:torch.load [x]", "--trust torch.load"),
    ]:
        with subtests.test(line=line):
            canary = tmp_path / "built"
            file = write(f"first: !apply:os.mkdir [{canary}]\nouter:\n  inner: {line}\n")
            with pytest.raises(ConfigError) as caught:
                load_hparams(file, trust=["os.mkdir"])
            assert all(text.strip().startswith(f"{file}:3:") for text in str(caught.value).splitlines()[-1:])
            assert message in str(caught.value)
            assert not canary.exists()


def test_every_mistake_is_told_at_once_with_its_line(write, tmp_path):
    built = tmp_path / "built"
    file = write(
        f"""\
lr: 0.1
precision: bf61
data: !PLACEHOLDER
model: !new:torch.nn.Linear
  in_features: 4
  out_features: !ref <hiden>
  bais: true
hidden: 3
made: !apply:os.mkdir [{built}]
items: [1, {{x: !PLACEHOLDER }}]
max_grad_norm: much
act: !new:torch.nn.Relu
lr: 0.2
"""
    )
    argv = [file, "--model.in_featurs=3", "--max-grad-norm=1", "--lr.x=1", "--items.7=1", "--in_features=1"]
    with pytest.raises(ConfigError) as caught:
        load_hparams(file, parse_arguments(argv)[2], trust=["os.mkdir"])
    head, *lines = str(caught.value).splitlines()
    expected = [
        ("command line", f"lr ({file}:1) is 0.1, which has no keys"),
        (":2:", "Did you mean bf16?"),
        (":3:", "--data=..."),
        ("command line", "Did you mean --model.in_features?"),
        (":6:", "Did you mean hidden?"),
        (":7:", "Did you mean bias?"),
        ("command line", f"items ({file}:10) is a list of 2; expected one of its indices"),
        (":10:", "--items.1.x=..."),
        (":11:", "max_grad_norm is 'much'"),
        (":12:", "Did you mean torch.nn.ReLU?"),
        (":13:", "lr is given at line 1 and again at line 13"),
        ("command line", "Did you mean --max_grad_norm?"),
        ("command line", "--in_features is neither a key"),
    ]
    assert head == f"{len(expected)} mistakes in {file}:"
    for place, words in expected:
        assert any(
            line.strip().startswith(f"{file}{place}" if place.startswith(":") else place) and words in line
            for line in lines
        ), (place, words, lines)
    assert not built.exists()


def test_each_value_knows_where_it_was_written(write):
    write("width: 8\n", "net.yaml")
    file = write("lr: 1\nhalf: !ref <lr> / 2\nnet: !include:net.yaml\nmodel: !new:torch.nn.ReLU\nsame: !ref <lr>\n")
    sources = hparams_of(file, "--lr=2").sources
    net = str(Path(file).with_name("net.yaml"))
    assert sources == {
        "lr": "command line",
        "half": f"{file}:2",
        "net": sources["net"],
        "net.width": f"{net}:1",
        "model": f"{file}:4",
        "same": "command line",
    }


@pytest.mark.parametrize(
    "text", ["a: !new:torch.nn.Linear {in_features: 1, out_features: 2}\n", "a: !new:no.such {x: 1}\n"]
)
def test_loading_leaves_the_yaml_libraries_as_they_were(write, text):
    def state():
        return (
            pyyaml.constructor.BaseConstructor.construct_object.__defaults__,
            ruamel.yaml.constructor.BaseConstructor.construct_object.__defaults__,
            list(ruamel.yaml.resolver.implicit_resolvers),
            dict(ruamel.yaml.Loader.yaml_constructors),
            dict(ruamel.yaml.Loader.yaml_multi_constructors),
            dict(ruamel.yaml.RoundTripRepresenter.yaml_representers),
            {char: list(found) for char, found in ruamel.yaml.Loader.yaml_implicit_resolvers.items()},
        )

    before = state()
    try:
        load_hparams(write(text))
    except ConfigError:
        assert "no.such" in text
    assert state() == before
    assert pyyaml.load("(1, 2)", Loader=ruamel.yaml.Loader) == "(1, 2)"


def test_an_included_file_stands_beside_the_yaml_and_takes_overrides(write, tmp_path, monkeypatch):
    (tmp_path / "parts").mkdir()
    write("hidden: 4\nlayers: {a: {b: 1}, c: [1]}\ntwice: !ref <hidden> * 2\n", "parts/net.yaml")
    file = write("net: !include:parts/net.yaml\nother: !include:parts/net.yaml {hidden: 5}\nsize: !ref <net[twice]>\n")
    monkeypatch.chdir("/")
    found = hparams_of(file, "--net.hidden=8", "--net.layers.a.b=2", "--other.layers.c=[7]")
    assert found == {
        "net": {"hidden": 8, "layers": {"a": {"b": 2}, "c": [1]}, "twice": 16},
        "other": {"hidden": 5, "layers": {"a": {"b": 1}, "c": [7]}, "twice": 10},
        "size": 16,
    }


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_the_seed_is_applied_before_anything_is_instantiated(subtests, write):
    for text, options in [
        ("seed: 5\n", []),
        ("seed: 1\n", ["--seed=5"]),
        ("lr: 1\n", ["--seed=5"]),
        ("base: 4\nmiddle: !ref <base> + 1\nseed: !ref <middle>\n", []),
        ("common: !include:common.yaml\nseed: !ref <common[seed]>\n", []),
    ]:
        with subtests.test(text=text, options=options):
            write("seed: 5\n", "common.yaml")
            file = write(text + "drawn: !apply:random.random\n__drawn2: !apply:torch.rand [1]\n")
            drawn = hparams_of(file, *options)["drawn"]
            random.seed(5)
            assert drawn == random.random()
            torch.manual_seed(5)
            torch.rand(1)
            rest = torch.rand(1)
            hparams_of(file, *options)
            assert torch.equal(torch.rand(1), rest)


def test_without_a_seed_nothing_is_seeded_and_nothing_drawn(write):
    file = write("seed: 1\nlr: 1\n")
    seed_everything(9)
    expected = draws()
    seed_everything(9)
    hparams_of(file, "--seed=null")
    assert draws() == expected


def test_seed_everything_seeds_all_three_generators():
    seed_everything(11)
    found = draws()
    random.seed(11)
    np.random.seed(11)
    torch.manual_seed(11)
    assert draws() == found


def test_a_seed_that_some_generator_cannot_take_is_refused(subtests):
    for seed in [-1, 2**32, 1.0, True, "3", None]:
        with subtests.test(seed=seed), pytest.raises(ConfigError, match=r"must be a whole number from 0"):
            seed_everything(seed)


def test_trust_of_the_wrong_type_is_refused(subtests, write):
    for trust in ["torch", 3, None, [1], {"torch": 1}]:
        with subtests.test(trust=trust):
            with pytest.raises(ConfigError, match=r"^trust "):
                load_hparams(write("a: 1\n"), trust=trust)
            assert load_hparams(write("a: 1\n"), trust=["torch"]) == {"a": 1}


def test_neither_the_overrides_nor_the_file_are_changed(write):
    text = "a: {b: [1]}\nc: null\n"
    file, overrides = write(text), {"a": {"b": [2]}, "c": {"d": {}}}
    found = load_hparams(file, overrides)
    found["a"]["b"].append(3)
    assert overrides == {"a": {"b": [2]}, "c": {"d": {}}}
    assert Path(file).read_text() == text


def test_counter_and_reference_share_one_object(write):
    found = load_hparams(write("a: !new:collections.Counter {x: 1}\nb: !ref <a>\nc: !copy <a>\n"))
    assert found["b"] is found["a"] == collections.Counter(x=1)
    assert found["c"] == found["a"] and found["c"] is not found["a"]


def test_what_is_loaded_is_a_dict_that_remembers_its_file_and_overrides(write, tmp_path, monkeypatch):
    file = write("lr: 1\nnested: {a: 2}\n")
    overrides = parse_arguments([file, "--nested.a=3", "--precision=bf16"])[2]
    monkeypatch.chdir(tmp_path)
    found = load_hparams(Path(file).name, overrides)
    assert found == {"lr": 1, "nested": {"a": 3}} and isinstance(found, dict)
    overrides["lr"] = 9  # what comes later is not what was loaded
    monkeypatch.chdir("/")
    for twin in (found, copy.copy(found), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert type(twin) is Hparams and twin == found
        assert twin.path == file and twin.overrides == {"nested": {"a": 3}}
        assert twin.overrides.run_options.explicit == {"precision"}
        assert load_hparams(twin.path, twin.overrides) == found


@pytest.mark.parametrize("seed", ["", "seed: 5\n"])
def test_writing_settings_down_draws_what_the_run_drew_and_leaves_the_generators(write, seed):
    calls = ["random.random", "numpy.random.randint [1000000]"]
    file = write(seed + "".join(f"x{at}: !applyref:{call}\n" for at, call in enumerate(calls)))
    seed_everything(5)
    run = load_hparams(file, trust=["numpy"])
    seed_everything(8)
    expected = draws()
    seed_everything(8)
    text = resolved_text(file, None, find_loaded(file, None))
    assert draws() == expected
    assert load_hparams(write(text, "again.yaml")) == run


def test_a_yaml_cannot_start_the_recipe_with_a_command_line_of_its_own(write, tmp_path):
    canary = tmp_path / "canary"
    evil = write(f"a: !apply:os.mkdir [{canary}]\n", "evil.yaml")
    file = write(f"a: !apply:test_hparams.start [['{evil}', --trust, os]]\n")
    with pytest.raises(ConfigError, match=r"start is not trusted: .* which starts a script"):
        load_hparams(file)
    with pytest.raises(ConfigError, match="was called by code that a YAML names"):
        load_hparams(file, trust=["test_hparams"])
    assert not canary.exists()
    assert parse_arguments([file])[0] == file  # only while the YAML was built


def start(argv: list[str]) -> dict:
    """What every recipe's `main` begins with."""
    file, _, overrides = parse_arguments(argv)
    return load_hparams(file, overrides)


def test_the_resolved_yaml_alone_draws_what_the_run_drew_after_its_functions(write):
    text = "seed: 3\na: !applyref:random.random\nb: !apply:random.random\nc: !apply:torch.rand [2]\n"
    file = write(text)
    run = load_hparams(file)
    again = load_hparams(write(resolved_text(file, None, find_loaded(file, None)), "again.yaml"))
    assert (again["a"], again["b"]) == (run["a"], run["b"]) and torch.equal(again["c"], run["c"])


def test_an_override_of_a_resolved_file_is_said_to_change_that_key_alone(write, caplog):
    text = resolved_text(write("lr: 1\nhalf: !ref <lr> / 2\nseed: 1\n"), None)
    file = write(text, "hyperparams.yaml")
    assert hparams_of(file, "--seed=2") == {"lr": 1, "half": 0.5, "seed": 2} and not caplog.records
    assert hparams_of(file, "--lr=4") == {"lr": 4, "half": 0.5, "seed": 1}
    assert "an override (lr) changes only that key" in caplog.text


def test_a_key_that_a_recipe_reads_and_the_yaml_lacks_is_named_with_the_nearest(write):
    hparams = load_hparams(write("modle: 1\nlr: 2\n"))
    with pytest.raises(ConfigError, match=r"params\.yaml has no key 'model'\. Did you mean modle\?$") as caught:
        hparams["model"]
    assert isinstance(caught.value, KeyError) and hparams.get("model") is None and "model" not in hparams
