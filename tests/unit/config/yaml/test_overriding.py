"""Overrides: which fit a YAML, what they change, and what is said of the others."""

import datetime
import enum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work import at_most

from amp_recipes.config import load_hparams
from amp_recipes.config.yaml.limits import DEPTH, NODES, TEXT_CHARACTERS, Budget, LimitError
from amp_recipes.config.yaml.nodes import COMMAND_LINE, Mapping, Mistakes, Scalar, Sequence, Source, Unknown, walk
from amp_recipes.config.yaml.overriding import apply_overrides, overrides_from_text, to_nodes
from amp_recipes.config.yaml.reading import read_text
from amp_recipes.errors import ConfigError


def tree_of(text: str) -> Mapping:
    mistakes = Mistakes()
    root = read_text(text, "x.yaml", mistakes, Budget())
    assert isinstance(root, Mapping) and not list(mistakes)
    return root


def values(node):
    if isinstance(node, Mapping):
        found = {key: values(item) for key, item in node.items.items()}
        return {node.tag: found} if node.tag else found
    if isinstance(node, Sequence):
        items = [values(item) for item in node.items]
        return tuple(items) if node.tag == "!tuple" else {node.tag: items} if node.tag else items
    return f"{node.tag} {node.value or ''}".strip() if node.tag else node.value


def override(text: str, overrides, source=COMMAND_LINE, dashes="--") -> tuple[Mapping, list[str]]:
    root, mistakes = tree_of(text), Mistakes()
    apply_overrides(root, overrides, mistakes, source, dashes)
    return root, list(mistakes)


def overridden(text: str, overrides):
    root, mistakes = override(text, overrides)
    assert mistakes == []
    return values(root)


def mistake_of(text: str, overrides) -> str:
    root, mistakes = override(text, overrides)
    assert values(root) == values(tree_of(text)), "an override with a mistake changes nothing"
    (mistake,) = mistakes
    return mistake


UNKNOWN = "is neither a key of the YAML nor a run option."
PLAIN_ONLY = "expected null, true or false, a number, a string, or lists and mappings of these."
INDICES = "expected one of its indices, from 0."
INDICES_OF_2 = f"is a list of 2; {INDICES}"
KEYS = "expected a string, a number, true or false."
MODEL = """\
lr: 0.1
sizes: [4, 8, 2]
model: !new:torch.nn.Linear
  in_features: 4
  bias: !ref <lr>
pair: (1, 2)
call: !apply:operator.mul [6, 7]
"""


def test_mappings_and_dotted_keys_override_alike(subtests):
    for overrides in [{"model": {"in_features": 5}, "lr": 0.5}, {"model.in_features": 5, "lr": 0.5}]:
        with subtests.test(overrides=overrides):
            found = overridden(MODEL, overrides)
            assert found["lr"] == 0.5
            assert found["model"] == {"!new:torch.nn.Linear": {"in_features": 5, "bias": "!ref <lr>"}}


def test_an_override_reaches_any_depth(subtests):
    for text, overrides, expected in [
        ("a: [1, 2]", {"a.0": 9}, {"a": [9, 2]}),
        ("a: [1, {b: [2]}]", {"a": {"1": {"b": {"0": 9}}}}, {"a": [1, {"b": [9]}]}),
        ("a: (1, 2)", {"a.1": 9}, {"a": (1, 9)}),
        ("a: (1, 2)", {"a": [3, 4]}, {"a": [3, 4]}),
        ("a: 1", {"a": (3, [4])}, {"a": (3, [4])}),
        ("a: !apply:f [6, 7]", {"a.0": 1}, {"a": {"!apply:f": [1, 7]}}),
        ("a: !new:X {b: {c: 1, d: 2}}", {"a.b.c": None}, {"a": {"!new:X": {"b": {"c": None, "d": 2}}}}),
        ("a: {b: 1}", {"a": 3}, {"a": 3}),
        ("a: !new:X {b: 1}", {"a": None}, {"a": None}),
        ("a: !ref <b>\nb: 1", {"a": 3}, {"a": 3, "b": 1}),
        ("a: !PLACEHOLDER", {"a": "x"}, {"a": "x"}),
        ("a: {b: 1, c: 2}", {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ("a: {b: 1}", {"a": {}}, {"a": {"b": 1}}),
        # A mapping may replace what holds nothing.
        (
            "a: null\nb: {}\nc: !PLACEHOLDER",
            {"a.x": 1, "b": {"y": 2}, "c.z.u": 3},
            {"a": {"x": 1}, "b": {"y": 2}, "c": {"z": {"u": 3}}},
        ),
        # Keys that hold dots or are numbers.
        ("f: {e.l1: true, h: true}", {"f.e.l1": False}, {"f": {"e.l1": False, "h": True}}),
        ("f: {e.l1.x.y: 1}", {"f": {"e": {"l1.x": {"y": 2}}}}, {"f": {"e.l1.x.y": 2}}),
        ("f: {e.l1: {x: 1, y: 2}}", {"f.e.l1.x": 3}, {"f": {"e.l1": {"x": 3, "y": 2}}}),
        ("a.b: 1", {"a.b": 2}, {"a.b": 2}),
        (
            "c: {1: cat, 2.5: x, null: z}",
            {"c": {"1": "dog", "2.5": "u", "None": "w"}},
            {"c": {1: "dog", 2.5: "u", None: "w"}},
        ),
        ("c: {1: cat}", {"c": {1: "dog"}}, {"c": {1: "dog"}}),
        ("n: {null: 1}", {"n": {None: 2}}, {"n": {None: 2}}),
        # Run options may be new at the top; whether their values are right is checked with all others.
        ("a: 1", {"precision": "bf61"}, {"a": 1, "precision": "bf61"}),
        ("seed: !ref <a>\na: 1", {"seed": 3}, {"seed": 3, "a": 1}),
        # Each way to give several keys.
        ("m: {x: {y: 1, z: 2}}", {"m.x.y": 5, "m": {"x": {"z": 6}}}, {"m": {"x": {"y": 5, "z": 6}}}),
        ("m: {x: 1}", {"m.x": 5, "m": {"x": 6}}, {"m": {"x": 6}}),
        # A node that two keys share is one.
        ("a: &a {k: 1}\nb: *a", {"b.k": 2}, {"a": {"k": 2}, "b": {"k": 2}}),
        (
            "base: &b {k: 1, l: 2}\nder:\n  <<: *b\n  z: 3",
            {"der.k": 5},
            {"base": {"k": 1, "l": 2}, "der": {"k": 5, "l": 2, "z": 3}},
        ),
        ("__h: 1", {"__h": 2}, {"__h": 2}),
    ]:
        with subtests.test(text=text, overrides=overrides):
            found = overridden(text, overrides)
            assert found == expected


def test_an_override_that_does_not_fit_is_told_and_changes_nothing(subtests):
    for text, overrides, expected in [
        (
            "model: {hidden: 1}",
            {"model.hiden": 2},
            f"command line: --model.hiden {UNKNOWN} Did you mean --model.hidden?",
        ),
        ("a: 1\nm:\n  - b: 1", {"m.0.c": 2}, f"command line: --m.0.c {UNKNOWN} Did you mean --m.0.b?"),
        ("a: 1", {"max-grad-norm": 1}, f"command line: --max-grad-norm {UNKNOWN} Did you mean --max_grad_norm?"),
        ("lr: 0.1", {"lr.x": 1}, "command line: --lr.x: lr (x.yaml:1) is 0.1, which has no keys."),
        ("lr: abc", {"lr": {"x": {"y": 1}}}, "command line: --lr.x: lr (x.yaml:1) is 'abc', which has no keys."),
        ("m: !new:X", {"m.a": 1}, "command line: --m.a: m (x.yaml:1) is !new:X, which has no keys."),
        ("m: 1", {"m": {}}, "command line: --m: m (x.yaml:1) is 1, which has no keys."),
        (
            "b: {lr: 1}\no: !ref <b>",
            {"o.lr": 2},
            "command line: --o.lr: o (x.yaml:2) is !ref <b>; override what it refers to.",
        ),
        (
            "o: !copy <b>\nb: {lr: 1}",
            {"o.lr": 2},
            "command line: --o.lr: o (x.yaml:1) is !copy <b>; override what it refers to.",
        ),
        ("a: 1\nitems: [1, 2]", {"items.2": 1}, f"command line: --items.2: items (x.yaml:2) {INDICES_OF_2}"),
        ("items: [1, 2]", {"items.x": 1}, f"command line: --items.x: items (x.yaml:1) {INDICES_OF_2}"),
        ("items: [1, 2]", {"items.-1": 1}, f"command line: --items.-1: items (x.yaml:1) {INDICES_OF_2}"),
        (
            "items: [1, 2]",
            {"items": {"0": {"x": 1}}},
            "command line: --items.0.x: items.0 (x.yaml:1) is 1, which has no keys.",
        ),
        (
            "p: (1, 2)",
            {"p": "(3, 4)"},
            "command line: --p is the text '(3, 4)', but would replace the list at x.yaml:1; "
            "give a list, such as [1, 2].",
        ),
        ("seed: 1", {"seed.x": 1}, "command line: --seed.x: seed (x.yaml:1) is 1, which has no keys."),
        ("a: 1", {"seed": {"x": 1}}, f"command line: --seed.x {UNKNOWN} Did you mean --seed?"),
        ("a: 1", {"a": object}, f"command line: --a is <class 'object'>, a type; {PLAIN_ONLY}"),
        ("a: 1", {"a": [1, {"x": b"1"}]}, f"command line: --a.1.x is b'1', a bytes; {PLAIN_ONLY}"),
        ("a: null", {"a": {("x",): 1}}, f"command line: --a has the key ('x',); {KEYS}"),
        (
            "a: null",
            {"a": {datetime.date(2024, 1, 2): 1}},
            f"command line: --a has the key datetime.date(2024, 1, 2); {KEYS}",
        ),
        ("a: 1", {"a": {1, 2}}, f"command line: --a is {{1, 2}}, a set; {PLAIN_ONLY}"),
        ("a: 1", {"a": "x\udcff"}, r"command line: --a is 'x\udcff', which holds a byte that is not UTF-8."),
        (
            "a: 1",
            {"a": "x" * (TEXT_CHARACTERS + 1)},
            "command line: --a has 100,001 characters; expected at most 100,000.",
        ),
        ("a: 1", {"a": 10**5000}, "command line: --a has 16,610 bits; a whole number has at most 1,024."),
        ("a: [1]", {"a": {"9" * 5000: 1}}, f"command line: --a.{'9' * 196}...: a (x.yaml:1) is a list of 1; {INDICES}"),
        ("a: [1, 2]", {"a.²": 1}, f"command line: --a.²: a (x.yaml:1) is a list of 2; {INDICES}"),
        ("a: 1", ["a"], "command line: overrides must be a mapping of keys to values, but are ['a']."),
    ]:
        with subtests.test(text=text, overrides=overrides):
            assert mistake_of(text, overrides) == expected


def test_a_value_and_another_below_it_is_a_mistake(subtests):
    for overrides in [{"a.b": 1, "a": 2}, {"a": None, "a.b": 1}, {"x": {"a": 1, "a.b": 2}}]:
        with subtests.test(overrides=overrides):
            mistakes = override("a: {b: 1}\nx: {a: {b: 1}}", overrides)[1]
            assert any("a is given both a value and values for keys below it." in mistake for mistake in mistakes)


def test_all_mistakes_are_told_and_the_others_are_written():
    root, mistakes = override("a: 1\nb: {c: 2}\n", {"a": 5, "x1": 1, "b": {"d": 1, "c": 6}, "a.y": 3, "b.c.z": 1})
    assert [mistake.partition(" --")[2].split()[0] for mistake in mistakes] == ["a", "b.c", "x1", "b.d"]
    assert root.items["b"].items["c"].value == 6


def test_overrides_of_a_script_are_named_without_dashes():
    (mistake,) = override("abc: 1", {"abd": 1}, "overrides", "")[1]
    assert mistake == f"overrides: abd {UNKNOWN} Did you mean abc?"
    (mistake,) = override("abc: 1", {"abc": [object]}, "overrides", "")[1]
    assert mistake.startswith("overrides: abc.0 is <class 'object'>")


def test_new_values_say_where_they_are_from_and_old_keys_where_they_stand():
    root = override("a: 1  # why\nb: {c: [1, 2]}\n", {"a": 2, "b.c": [5, {"x": 6}], "seed": 3})[0]
    sources = {".".join(path): str(node.source) for path, node in walk(root)}
    assert sources.pop("b") == "x.yaml:2:4"
    assert set(sources.values()) == {COMMAND_LINE} and "b.c.1.x" in sources
    assert str(root.key_sources["a"]) == "x.yaml:1:1" and root.comments["a"] == "why"
    assert str(root.key_sources["seed"]) == COMMAND_LINE


def test_what_could_not_be_included_takes_every_override():
    root, mistakes = tree_of("net: 1\n"), Mistakes()
    root.items["net"] = Unknown("!include:net.yaml", Source("x.yaml", 1, 6))
    apply_overrides(root, {"net": {"hidden": {"x": 1}}}, mistakes, COMMAND_LINE, "--")
    assert not list(mistakes) and isinstance(root.items["net"], Unknown)
    apply_overrides(root, {"net": None}, mistakes, COMMAND_LINE, "--")
    assert values(root) == {"net": None}


RECIPE = """\
seed: 1
data_folder: x
loader_kwargs: {batch_size: 32, num_workers: 0}
augment: !new:data.RandomAffine {max_shift: 0.1}
model: !new:M {dropout: 0.0, widths: [1, 2], Enc: {hidden: 4, drop-out: 1}}
decoder: {dropout: 0.5, depth: 2}
number_of_epochs: 3
lr: 0.1
opt_class: !name:torch.optim.AdamW {lr: !ref <lr>, weight_decay: 0.1, betas: !tuple [0.9, 0.99]}
a: &shared {inner_key: 1}
b: *shared
"""


def test_a_typo_suggests_what_was_meant(subtests):
    for typed, meant in [
        ("number_of_epoch", "number_of_epochs"),
        ("prec", "precision"),
        ("Seed", "seed"),
        ("LR", "lr"),
        ("batch_size", "loader_kwargs.batch_size"),
        ("loader_kwargs.batchsize", "loader_kwargs.batch_size"),
        ("loader.batch_size", "loader_kwargs.batch_size"),
        ("loader_kwarg.batch_size", "loader_kwargs.batch_size"),
        ("num_worker", "loader_kwargs.num_workers"),
        ("modle.dropout", "model.dropout"),
        ("decodr.dropout", "decoder.dropout"),
        ("model.dropuot", "model.dropout"),
        ("model[dropout]", "model.dropout"),
        ("model-dropout", "model.dropout"),
        ("enc.hidden", "model.Enc.hidden"),
        ("hidden", "model.Enc.hidden"),
        ("model.Enc.drop_out", "model.Enc.drop-out"),
        ("opt_class.weight-decay", "opt_class.weight_decay"),
        ("weight_decay", "opt_class.weight_decay"),
        ("optimizer.lr", "opt_class.lr"),
        ("betas", "opt_class.betas"),
        ("b.iner_key", "b.inner_key"),
        ("model.seed", "seed"),
        ("model.width.0", "model.widths.0"),
        ("max_grad", "max_grad_norm"),
        ("grad-accumulation", "grad_accumulation_factor"),
        ("max_shft", "augment.max_shift"),
    ]:
        with subtests.test(typed=typed):
            assert mistake_of(RECIPE, {typed: 1}).endswith(f" Did you mean --{meant}?")


def test_an_argument_that_the_yaml_does_not_have_is_told_where_to_go():
    text = "model: !new:torch.nn.Linear\n  in_features: 3\n  out_features: 2\n"
    said = mistake_of(text, {"model.bias": False})
    assert "To give model (" in said
    assert "another argument, add it to the YAML first." in said


def test_a_long_list_leaves_room_for_the_names_of_other_keys():
    text = f"classes: {list(range(2000))}\nmodel: {{name: x}}"
    assert mistake_of(text, {"model.nme": 1}).endswith(" Did you mean --model.name?")


def test_nothing_near_is_no_suggestion():
    assert mistake_of(RECIPE, {"zzzzqqq": 1}).endswith("nor a run option.")


def test_values_become_those_of_python(subtests):
    for value, expected in [
        (np.float64(0.1), 0.1),
        (Path("a/b"), "a/b"),
        (enum.Enum("E", {"A": "bf16"}, type=str).A, "bf16"),
        (enum.IntEnum("I", {"A": 3}).A, 3),
        (datetime.date(2024, 1, 2), datetime.date(2024, 1, 2)),
        ([(), {}, [None]], [(), {}, [None]]),
    ]:
        with subtests.test(value=value):
            found = values(to_nodes(value, Source("s"), Mistakes(), "a"))
            assert found == expected and type(found) is type(expected)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(PLAIN)
def test_any_plain_data_arrives_as_it_was_given(value):
    mistakes = Mistakes()
    found = values(to_nodes(value, Source("s"), mistakes, "a"))
    assert repr(found) == repr(value) and not list(mistakes)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "b", "a.b", "b.c", "b.c.0", "b.c.9", "m.n", "seed", "", ".", 1, None]), PLAIN, max_size=5
    )
)
def test_no_overrides_crash(overrides):
    override("a: 1\nb: {c: [1, {d: 2}]}\nm: !new:X {n: !ref <a>}\n", overrides)


def test_what_holds_itself_and_what_is_deep_is_a_mistake():
    loop: dict = {}
    loop["a"] = loop
    assert "more than 50 levels" in override("a: null", loop)[1][0]
    assert "more than 50 levels" in override("a: null", {"a" + ".b" * 20_000: 1})[1][0]
    listed: list = []
    listed.append(listed)
    assert "more than 50 levels" in mistake_of("a: null", {"a": listed})
    fits = {"a" + ".b" * (DEPTH - 1): 1}
    assert override("a: null", fits)[1] == []


def test_what_multiplies_is_stopped():
    bomb: list = [1]
    tree: dict = {"a": 1}
    for _ in range(40):
        bomb, tree = [bomb, bomb], {"a": tree, "b": tree}
    for value in (bomb, tree, list(range(NODES + 1))):
        with at_most(calls=1_000_000), pytest.raises(LimitError):
            override("a: null", {"a": value})


def test_hundreds_of_unknown_keys_of_a_large_yaml_take_no_time():
    text = "\n".join(f"key_number_{at}: {{x: 1, y: 2}}" for at in range(500))
    root, mistakes = tree_of(text), Mistakes()
    with at_most(calls=3_000_000):
        apply_overrides(root, {f"kye_number_{at}.x": 1 for at in range(300)}, mistakes, COMMAND_LINE, "--")
    assert len(mistakes) == 300


def test_long_keys_are_not_compared():
    keys = "".join(f'? "{"[" * 95_000}{at}"\n: {{hidden: 1}}\n' for at in range(3))
    root, mistakes = tree_of(keys + "model: {hidden: 2}\n"), Mistakes()
    with at_most(calls=10_000):
        apply_overrides(root, {"hiden": 1}, mistakes, COMMAND_LINE, "--")
    assert next(iter(mistakes)).endswith("Did you mean --model.hidden?")


def from_text(text: str, budget=None) -> tuple[dict, list[str]]:
    mistakes = Mistakes()
    return overrides_from_text(text, mistakes, budget or Budget()), list(mistakes)


def test_text_gives_plain_data(subtests):
    for text, expected in [
        ("", {}),
        ("  \n", {}),
        ("# nothing\n", {}),
        ("null", {}),
        ("model: {in_features: 5}\nlr: 1e-3\n", {"model": {"in_features": 5}, "lr": 1e-3}),
        ("model.in_features: 5", {"model.in_features": 5}),
        ("a: [1, x, null, true, 2024-01-02]", {"a": [1, "x", None, True, datetime.date(2024, 1, 2)]}),
        ("a: (1, 2)\nb: !tuple [3]\nc: '(1)'", {"a": (1, 2), "b": (3,), "c": "(1)"}),
        ("a: &x {k: [1]}\nb: *x", {"a": {"k": [1]}, "b": {"k": [1]}}),
        ("1: a", {1: "a"}),
        ("a: !!str 1", {"a": "1"}),
    ]:
        with subtests.test(text=text):
            assert from_text(text) == (expected, [])


def test_a_tag_in_text_is_a_mistake(subtests):
    for value in [
        "!ref <b>",
        "!new:torch.nn.ReLU",
        "[!apply:os.getcwd [] ]",
        "{x: !include:x.yaml }",
        "!PLACEHOLDER",
        "!name:X {a: 1}",
    ]:
        with subtests.test(value=value):
            found, mistakes = from_text(f"b: 1\na: {value}")
            (mistake,) = mistakes
            assert (
                mistake.startswith("overrides:2:")
                and "an override must be plain data, but this one has the tag !" in mistake
            )
            assert found["b"] == 1


def test_text_of_the_wrong_form_is_a_mistake(subtests):
    for text in ["[1]", "a: [", "text", "!new:x {a: 1}", "a: !!python/name:os.system", "a: 1\na: 2"]:
        with subtests.test(text=text):
            mistakes = from_text(text)[1]
            assert len(mistakes) == 1 and mistakes[0].startswith("overrides")


def test_aliases_that_multiply_in_text_are_stopped():
    text = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 30))
    with at_most(calls=500_000), pytest.raises(LimitError):
        from_text(text)


def test_what_is_overridden_by_text_is_what_the_dict_of_it_overrides():
    text = "model.in_features: 5\nsizes: {0: 7}\npair: (3, 4)\n"
    assert overridden(MODEL, from_text(text)[0]) == overridden(
        MODEL, {"model.in_features": 5, "sizes.0": 7, "pair": (3, 4)}
    )


def test_the_text_of_a_value_is_that_of_yaml():
    texts = [to_nodes(value, Source("s"), Mistakes(), "a").text for value in (None, True, 1, 0.1, "x")]
    assert texts == ["null", "true", "1", "0.1", "x"]


def test_values_are_nodes_of_their_own():
    shared = [1]
    root = override("a: 1\nb: 1\n", {"a": shared, "b": shared})[0]
    assert root.items["a"] is not root.items["b"]
    assert isinstance(root.items["a"].items[0], Scalar) and shared == [1]


def test_plain_data_takes_the_place_of_no_object(subtests, tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("model: !new:torch.nn.ReLU\nopt: !name:torch.optim.SGD {lr: 1}\nnumber: !apply:abs [-1]\n")
    for value in [3, "gelu", [1, 2], True]:
        with subtests.test(value=value):
            for key in ("model", "opt"):
                with pytest.raises(ConfigError, match=f"^overrides: {key} would replace the object !n"):
                    load_hparams(file, {key: value})
                assert load_hparams(file, {key: None})[key] is None and load_hparams(file, {key: False})[key] is False
            assert load_hparams(file, {"number": value})["number"] == value
