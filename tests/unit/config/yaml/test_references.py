"""References: what each stands for, what is shared, what is told of wrong ones, and what a hostile file cannot do."""

import math
import tracemalloc

import pytest
from hyperpyyaml import resolve_references
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML
from work import at_most

from amp_recipes.config.yaml.limits import EXPANDED_NODES, Budget, LimitError
from amp_recipes.config.yaml.nodes import Mapping, Mistakes, Scalar, Sequence, Unknown, walk
from amp_recipes.config.yaml.reading import read_text
from amp_recipes.config.yaml.references import ATTRIBUTE, resolve
from amp_recipes.errors import ConfigError


def read(text):
    mistakes = Mistakes()
    root = read_text(text, "p.yaml", mistakes, Budget())
    assert isinstance(root, Mapping) and not mistakes, list(mistakes)
    return root


def resolved(text, call=None):
    """The resolved tree of a YAML without mistakes."""
    mistakes = Mistakes()
    root = resolve(read(text), mistakes, Budget(), call)
    assert not mistakes, list(mistakes)
    return root


def values(node):
    """A tree as plain data: a tag as the first of a pair, `...` for what is not known."""
    if isinstance(node, Unknown):
        return ...
    if isinstance(node, Scalar):
        below = node.value
    elif isinstance(node, Mapping):
        below = {key: values(item) for key, item in node.items.items()}
    else:
        below = [values(item) for item in node.items]
    return (node.tag, below) if node.tag else below


def value(text, key="x", call=None):
    return values(resolved(text, call).items[key])


def mistakes_of(text, call=None):
    mistakes = Mistakes()
    resolve(read(text), mistakes, Budget(), call)
    return list(mistakes)


# Meaning

SAME_AS_HYPERPYYAML = [
    "folder1: abc/def\nfolder2: ghi/jkl\nfolder3: !ref <folder1>/<folder2>\n",
    "foo: 1024\nbar: 512\nbaz: !ref <foo> // <bar> + 1\n",
    "block_index: 1\ncnn1:\n  out: !ref <block_index> * 64\ncnn2:\n  out: !ref <cnn1[out]>\n",
    "a: 3\nb: !ref <a>\nc: !copy <a>\n",
    "b: !ref <a>\na: [1, {x: 2}]\nc: !copy <a>\n",
    "d: {a: {b: {c: 1}}}\ne: !ref <d[a][b][c]>\n",
    "a: 3\nb: !ref <a>\nc: !ref <b>\nd: !ref <c> + 1\n",
    "a: 3\nb: !copy <a> + 1\nc: !copy x<a>\n",
    "a: 2\nb: !ref 1e-3\nc: !ref 5\nd: !ref text\ne: !ref 3 + 4\n",
    "a: 1e-4\nb: !ref x<a>\nc: !ref <a> * 2\nd: !ref <a>\n",
    "a: 1.0e-5\nb: !ref lr_<a>\nc: !ref 1 - <a>\n",
    "a: 0x10\nb: !ref <a> + 1\nc: !ref v<a>\n",
    "a: 0o17\nb: !ref v<a>\n",
    "a: '3'\nb: !ref <a> + 1\nc: !ref x<a>\nd: !ref <a>\n",
    "a: true\nb: !ref <a> + 1\nc: !ref x<a>\nd: !ref <a>\n",
    "a: null\nb: !ref x<a>\nc: !ref <a>\nd: !ref <a> + 1\n",
    "a: 1e3\nb: !ref x<a>\nc: !ref <a> + 1\n",
    "a: 100000000000000000000.0\nb: !ref x<a>\n",
    "a: .inf\nb: !ref x<a>\nc: !ref -<a>x\n",
    "a: 2\nb: !ref (<a> + 1) * 2\nc: !ref (<a>)\nd: !ref <a>**<a>\ne: !ref 2 ** <a>\n",
    "a: 7\nb: !ref <a> // 2 + 1\nc: !ref <a> % 4\nd: !ref <a> / 2\ne: !ref <a>//2\nf: !ref <a>*2\ng: !ref <a>-1\n",
    "a: 2\nb: !ref <a> <a>\nc: !ref <a>-<a>\nd: !ref <a><a>\ne: !ref <a>.5\nf: !ref 1<a>5\n",
    "a: 2020\nb: !ref <a>-01-02\nc: !ref exp-<a>\nd: !ref <a>,4\ne: !ref <a>==4\nf: !ref ~<a>\ng: !ref <a> << 2\n",
    "a: 3\nb: !ref <a> + 1 - true\nc: !ref <a> + None\nd: !ref <a> if 1 else 2\n",
    "a: abc\nb: !ref <a> + <a>\nc: !ref <a> - x\nd: !ref <a><a>\ne: !ref <a>/<a>\n",
    "a: 0.1\nb: !ref <a>+<a>+<a>\n",
    "a: 3\nb: !ref '<a> + 1 '\nc: !ref ' <a>'\nd: !ref '  <a> + 1'\n",
    "a: |\n  x\n  y\nb: !ref <a>z\nc: !ref\n  <a>\n  y\n",
    "a: 2001-01-01\nb: !ref x<a>\nc: !ref <a> - 1\n",
    "a: [3, 1.5, x, null, true]\nb: !ref <a>-<a>\nc: !ref x<a>\n",
    "a: {x: 1e-4, y: [a]}\nb: !ref x<a>\n",
    "b: !ref <c>-x\nc: !ref <a>-y\na: 3\n",
    "a: &m {k: 1, l: !ref '<a[k]>'}\nb: *m\n",
]


def test_references_mean_what_they_mean_to_hyperpyyaml(subtests):
    for text in SAME_AS_HYPERPYYAML:
        with subtests.test(text=text):
            expected = YAML(typ="safe").load(resolve_references(text).getvalue())
            found = values(resolved(text))
            assert repr(found) == repr(expected)  # so that 1, 1.0 and true differ, and the order of keys counts


def test_where_hyperpyyaml_loses_something_ours_is_right(subtests):
    for text, hyperpyyaml, ours, why in [
        ("seed: 662\nrun: 1\nx: !ref <seed>/<run>\n", 662.0, "662/1", "a slash without spaces is a path"),
        ("a: 1\nx: !ref <a>/<a>/<a>\n", 1.0, "1/1/1", "a slash without spaces is a path"),
        ("a: 2\nx: !ref <a>_<a>\n", 22, "2_2", "an underscore is no part of a number"),
        ("a: 2\nb: 10\nx: !ref <a>.<b>\n", 2.1, "2.10", "the number would lose the zero"),
        ("a: -3\nx: !ref <a> + 4\n", "-3 + 4", 1, "signs are arithmetic"),
        ("a: -3\nx: !ref <a> ** 2\n", "-3 ** 2", 9, "a value is one number"),
        ("a: .inf\nx: !ref <a> * 2\n", "inf * 2", math.inf, "infinity is a number"),
        ("a: <b>\nb: 3\nx: !ref <a>\n", 3, "<b>", "a value is not a reference"),
        ("a: <b>\nb: 3\nx: !ref v<a>\n", "v3", "v<b>", "a value is not a reference"),
        ("a: 1 - 2\nx: !ref <a>0\n", -19, "1 - 20", "a value is not arithmetic"),
        ("x: !ref <b> * 2\nb: !ref <a> + 1\na: 3\n", 5, 8, "the order of keys does not matter"),
        ("a: 2\nx: !ref '\"y\" * <a>'\n", "yy", '"y" * 2', "text is not multiplied"),
        ("a: 2\nx: !ref \"'<a>'\"\n", "2", "'2'", "quotes stay"),
    ]:
        with subtests.test(text=text):
            assert YAML(typ="safe").load(resolve_references(text).getvalue())["x"] == hyperpyyaml
            assert value(text) == ours, why


def test_what_hyperpyyaml_cannot_say(subtests):
    for text, expected in [
        ("a: [5, 6]\nx: !ref <a[1]>\n", 6),
        ("a: (5, 6)\nx: !ref <a[0]>\n", 5),
        ("a: [{b: [7]}]\nx: !ref <a[0][b][0]>\n", 7),
        ("a: {1: one}\nx: !ref <a[1]>\n", "one"),
        ("a: {b.c: 2}\nx: !ref <a[b.c]>\n", 2),
        ("x: !ref <b[y]>\nb: !ref <c>\nc: {y: 1}\n", 1),
        ("x: !ref <b[y]>\nb: !copy <c>\nc: {y: 1}\n", 1),
        ("x: {k: 1, l: !ref '<x[k]>'}\n", {"k": 1, "l": 1}),
        ("a: !ref <b>\nx: &x {k: 1, l: !ref '<a[k]>'}\nb: !ref <x>\n", {"k": 1, "l": 1}),
        ("x: !ref <t[1]>\nt: !ref (<k>, <k> + 1)\nk: 2\n", 3),
        ("k: 3\nx: !ref (<k>, <k>)\n", ("!tuple", [3, 3])),
        (
            "s: 'a, b'\nk: 3\nx: !ref (<k> + 1, <s>, x<k>, 1e-3, null, [<k>, 'q'])\n",
            ("!tuple", [4, "a, b", "x3", 1e-3, None, [3, "q"]]),
        ),
        ("d: {k: [3]}\nx: !ref (<d[k][0]>,)\n", ("!tuple", [3])),
        ("o: !new:x.Y\nx: !ref (<o>, 1)\n", ("!tuple", [("!new:x.Y", ""), 1])),
        ("x: !ref (1, 2)\n", ("!tuple", [1, 2])),
        ("ref: 1\nk: 2\nx: !ref (ref0., <k>)\n", ("!tuple", ["ref0.", 2])),
        ("o: !new:x.Y {k: 2}\nx: !ref <o[k]>0\n", 20),
        ("a: (1, 2)\nx: !ref v<a>\n", "v(1, 2)"),
        ("a: 3\nb: 4\nx: !ref <a < <b>\n", "<a < 4"),
    ]:
        with subtests.test(text=text):
            assert repr(value(text)) == repr(expected)


def test_a_reference_to_an_attribute_becomes_the_call_that_reads_it():
    root = resolved(
        "o: !new:x.Y {k: 1}\nx: !ref <o.weight>\ny: !ref <o.a.b>\nz: !ref <x.c>\nl: {m: !new:x.Z }\nn: !ref <l[m].p>\n"
    )
    at, deeper = root.items["x"], root.items["y"]
    assert (at.tag, at.items[0], at.items[1].value) == (ATTRIBUTE, root.items["o"], "weight")
    assert (deeper.tag, values(deeper.items[0])[1][1], deeper.items[1].value) == (ATTRIBUTE, "a", "b")
    assert root.items["z"].items[0] is at
    assert root.items["n"].items[0] is root.items["l"].items["m"]


def test_a_reference_shares_the_node_and_a_copy_shares_only_within_itself():
    root = resolved(
        "o: !new:x.Y [1]\na: !ref <o>\nb: {c: !ref <a>, d: [!ref <o>]}\ne: !copy <b>\nf: &f [1]\ng: *f\nh: !copy <e>\n"
    )
    o, b, e, h = (root.items[key] for key in "obeh")
    assert root.items["a"] is o is b.items["c"] is b.items["d"].items[0]
    assert e is not b and e.items["c"] is e.items["d"].items[0] is not o
    assert h.items["c"] is h.items["d"].items[0] is not e.items["c"]
    assert values(e) == values(b) == values(h)
    assert root.items["f"] is root.items["g"]


def test_the_given_tree_is_not_changed_and_resolves_the_same_again():
    given_root = read("x: !ref <a> + 1\na: 1\nb: [!ref <c>, !copy <c>]\nc: {d: !ref <a>}\nt: !ref (<a>, 2)\n")
    before = [(path, node, node.tag, getattr(node, "value", None)) for path, node in walk(given_root)]
    first, second = (resolve(given_root, Mistakes(), Budget()) for _ in range(2))
    assert [(path, node, node.tag, getattr(node, "value", None)) for path, node in walk(given_root)] == before
    assert values(first) == values(second)
    assert not {id(node) for _, node in walk(first)} & {id(node) for _, node in walk(given_root)}


def test_a_value_keeps_its_own_source_and_a_computed_one_has_that_of_its_reference():
    items = resolved("a: 1\nb: !ref <a>\nc: !ref <a> + 1\nd: !ref x<a>\n").items
    assert [str(items[key].source) for key in "abcd"] == ["p.yaml:1:4", "p.yaml:1:4", "p.yaml:3:4", "p.yaml:4:4"]


def test_comments_and_the_places_of_keys_stay():
    root = resolved("a: {b: 1}  # why\nc: !copy <a>  # twice\n")
    assert root.comments == {"a": "why", "c": "twice"} and str(root.key_sources["c"]) == "p.yaml:2:1"
    assert str(root.items["c"].key_sources["b"]) == "p.yaml:1:5"


# Included files

INNER = "hidden: 4\ntwice: !ref <hidden> * 2\nlost: !ref <lr>\n"


def test_a_reference_of_an_included_file_looks_in_that_file_alone():
    mistakes, outer, inner = Mistakes(), read("hidden: 9\nlr: 1\nnet: 0\nsize: !ref <net[twice]>\n"), read(INNER)
    outer.items["net"] = inner
    root = resolve(outer, mistakes, Budget())
    assert values(root.items["size"]) == values(root.items["net"])["twice"] == 8
    assert list(mistakes) == [
        "p.yaml:3:7: net.lost: <lr> refers to a key that is missing. "
        "An included file sees only its own keys; pass it the value below its tag: lr: !ref <lr>."
    ]


# Functions

FUNCTIONS = {
    "sorted": sorted,
    "pair": lambda: (1, {"a": [2]}),
    "text": lambda: "<x>",
    "object": object,
    "fail": lambda: {}["gone"],
    "many": lambda: list(range(30_000)),
    "deep": lambda: [[[[]]]] * 2,
}


def test_what_a_function_returns_stands_as_if_it_were_written():
    calls = []

    def call(name, args, kwargs):
        calls.append((name, args, kwargs))
        return FUNCTIONS[name](*args, **kwargs)

    root = resolved(
        """
        first: !ref <b><b>
        a: !applyref:sorted [!ref <list>]
        b: !applyref:pair
        c: !applyref:sorted {_args: [!ref <a>], _kwargs: {reverse: !ref <yes>}}
        d: !ref <a>-<a>
        e: !ref <b[1][a]>
        f: !ref x<t>
        g: !ref <b>
        t: !applyref:text
        list: [3, 1]
        yes: true
        """,
        call,
    )
    assert values(root) == {
        "first": "(1, {'a': [2]})(1, {'a': [2]})",
        "a": [1, 3],
        "b": ("!tuple", [1, {"a": [2]}]),
        "c": [3, 1],
        "d": "[1, 3]-[1, 3]",
        "e": [2],
        "f": "x<x>",
        "g": ("!tuple", [1, {"a": [2]}]),
        "t": "<x>",
        "list": [3, 1],
        "yes": True,
    }
    assert root.items["g"] is root.items["b"]
    assert str(root.items["b"].source) == "p.yaml:4:12"
    assert calls == [
        ("sorted", [[3, 1]], {}),
        ("pair", [], {}),
        ("sorted", [[1, 3]], {"reverse": True}),
        ("text", [], {}),
    ]


def test_in_a_check_what_a_function_gives_is_unknown_and_no_mistake():
    text = (
        "a: !applyref:random.random\nb: !ref <a>\nc: !ref <a> * 2\nd: !ref x<a>\ne: !ref <a[b][c]>\nf: !ref <a.b>\n"
        "g: !ref (<a>, 1)\nh: [!copy <a>]\ni: !applyref:f [!ref <a>]\n"
        "j: !applyref:f {_args: !ref <a>, _kwargs: {}}\nk: 1\n"
    )
    assert values(resolved(text)) == {**dict.fromkeys("abcdefgij", ...), "h": [...], "k": 1}


def test_functions_take_and_give_plain_data_only(subtests):
    for text, said in [
        ("!applyref:object", "what !applyref:object returned (for an object, use !apply:) is <object"),
        (
            "!applyref:sorted [!new:x.Y {}]",
            "!applyref:sorted takes plain data only, not !new:x.Y; use !apply: for objects.",
        ),
        ("!applyref:sorted {_args: 1, _kwargs: {}}", "_args must be a list, and _kwargs a mapping."),
        ("!applyref:sorted {1: 2}", "1 is not a string; the name of an argument must be one."),
    ]:
        with subtests.test(text=text):
            (mistake,) = mistakes_of(f"a:\n  b: {text}\n", lambda name, args, kwargs: FUNCTIONS[name](*args, **kwargs))
            assert mistake.startswith("p.yaml:2:") and "a.b" in mistake and said in mistake


def test_the_exception_of_a_function_names_the_place():
    def call(name, args, kwargs):
        return FUNCTIONS[name](*args, **kwargs)

    with pytest.raises(ConfigError, match=r"^p.yaml:1:8: a\.b: !applyref:fail failed: KeyError: 'gone'$") as caught:
        resolved("a: {b: !applyref:fail }\n", call)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(LimitError):
        resolved("a: !applyref:many\n", call)


# Mistakes


def test_a_mistake_is_told_once_with_its_place_and_what_to_do(subtests):
    for text, expected in [
        ("hidden: 1\nx: !ref <hiden>\n", "2:4: x: <hiden> refers to a key that is missing. Did you mean hidden?"),
        ("n: {hidden: 1}\nx: !ref <n[hiden]>\n", "2:4: x: <n[hiden]>: n has no hiden. Did you mean hidden?"),
        (
            "n: {m: {hidden: 1}}\nx: !ref <hidden>\n",
            "2:4: x: <hidden> refers to a key that is missing. Did you mean <n[m][hidden]>?",
        ),
        ("a: {b: {c: 1}}\nx: !ref <a[b][d]>\n", "2:4: x: <a[b][d]>: a[b] has no d."),
        ("a: 3\nx: !ref <a[b]>\n", "2:4: x: <a[b]>: a is 3, which has no keys."),
        ("a: [1]\nx: !ref <a[1]>\n", "2:4: x: <a[1]>: a is a list of 1; expected one of its indices, from 0."),
        ("a: [1]\nx: !ref <a[-1]>\n", "2:4: x: <a[-1]>: a is a list of 1; expected one of its indices, from 0."),
        ("a: !new:x.Y [1]\nx: !ref <a[0]>\n", "2:4: x: <a[0]>: a is !new:x.Y, which is built later."),
        ("a: {b: 1}\nx: !ref <a.b>\n", "2:4: x: <a.b>: a is a mapping, which has no attributes. Write <a[b]>."),
        ("a: 1\nx: !ref <a.real>\n", "2:4: x: <a.real>: a is 1, which has no attributes."),
        (
            "a: !new:x.Y {}\nx: !ref <a.__class__>\n",
            "2:4: x: <a.__class__>: a YAML may not use attributes that begin with _.",
        ),
        ("a: !new:x.Y {}\nx: !ref <a.b._c>\n", "2:4: x: <a.b._c>: a YAML may not use attributes that begin with _."),
        ("a: !new:x.Y {}\nx: !ref <a.b c>\n", "2:4: x: <a.b c>: 'b c' cannot be the name of an attribute."),
        ("a: !new:x.Y {}\nx: !ref <a.\uff42>\n", "2:4: x: <a.\uff42>: '\uff42' cannot be the name of an attribute."),
        (
            "a: !new:x.Y {}\nx: !copy <a.b>\n",
            "2:4: x: <a.b> is an attribute of an object, which !copy cannot copy; use !ref.",
        ),
        ("x: !ref <>\n", "1:4: x: <> is not a reference; expected <key>, <key[sub]> or <key.attribute>."),
        ("x: !ref <a[b>\na: 1\n", "1:4: x: <a[b> is not a reference; expected <key>, <key[sub]> or <key.attribute>."),
        ("a: 1\nx: !ref a\n", "2:4: x: !ref a: write <a> to refer to that key."),
        ("a: {b: 1}\nx: !ref a[b]\n", "2:4: x: !ref a[b]: write <a[b]> to refer to that key."),
        ("n: 0\nx: !ref 1 / <n>\n", "2:4: x: 1 / <n>: 1 / 0 divides by zero."),
        (
            "n: 9\nx: !ref <n>**<n>**<n>\n",
            "2:4: x: <n>**<n>**<n>: 9**9**9 is too large: numbers have at most 1,024 bits.",
        ),
        ("a: 1\nx: !ref (<a>, [)\n", "2:4: x: (<a>, [) is not a tuple: expected values with commas between them."),
        (
            "a: 1\nx: !ref (<a>, !new:y.Z )\n",
            "2:4: x: (<a>, !new:y.Z ) is not a tuple: expected values with commas between them.",
        ),
        ("x: !PLACEHOLDER\n", "1:4: x is a placeholder that needs a value: --x=..."),
        (
            "a: [1, {x: !PLACEHOLDER }]\nb: !ref v<a[1][x]>\n",
            "1:12: a.1.x is a placeholder that needs a value: --a.1.x=...",
        ),
        ("a: !new:x.Y {}\nx: !ref v<a>\n", "<a> is !new:x.Y, which cannot be part of a text"),
        (
            "a: [!new:x.Y {}]\nx: !ref v<a>\n",
            "<a> is a list or mapping with an object in it, which cannot be part of a text",
        ),
        ("a: !new:x.Y {}\nx: !ref v<a.b>\n", "<a.b> is an attribute, which cannot be part of a text"),
    ]:
        with subtests.test(text=text):
            (mistake,) = mistakes_of(text)
            assert expected in mistake
            if expected[0].isdigit():
                assert mistake == f"p.yaml:{expected}"


def test_a_circle_is_told_once_with_its_whole_way(subtests):
    for text, expected in [
        ("a: !ref <a>\n", "1:4: a refers to itself: a -> a."),
        ("a: !ref <b>\nb: !ref <a>\n", "2:4: b refers to itself: a -> b -> a."),
        ("a: !ref <b>\nb: !copy <c>\nc: !ref <a>\n", "3:4: c refers to itself: a -> b -> c -> a."),
        ("a: {b: !ref <a>}\n", "1:8: a.b refers to itself: a -> a.b -> a."),
        ("a: {x: !ref <b>}\nb: {y: !ref <a>}\n", "2:8: b.y refers to itself: a -> a.x -> b.y -> a."),
        ("a: !ref x<b>\nb: !ref <a>y\n", "2:4: b refers to itself: a -> b -> a."),
        ("a: !ref <b> + 1\nb: !ref <a>\n", "2:4: b refers to itself: a -> b -> a."),
        ("a: !ref <a[b]>\n", "1:4: a refers to itself: a -> a."),
        ("a: !ref <b[x]>\nb: !ref <a[y]>\n", "2:4: b refers to itself: a -> b -> a."),
        ("a: !ref <b>\nb: !ref <a>\nc: !ref <a[x]>\n", "2:4: b refers to itself: a -> b -> a."),
        ("c: !ref <a[x]>\na: !ref <b>\nb: !ref <a>\n", "3:4: b refers to itself: a -> b -> a."),
        ("c: !ref v<a>\na: !ref <b>\nb: !ref <a>\n", "3:4: b refers to itself: a -> b -> a."),
        ("a: !ref <b>\nb: !ref v<a>\n", "2:4: b refers to itself: a -> b -> a."),
        ("c: !ref <a[x]>\na: !ref <b>\nb: !ref v<a>\n", "2:4: a refers to itself: a -> b -> a."),
        ("a: !ref <a.b>\n", "1:4: a refers to itself: a -> a."),
        ("a: !ref (<a>, 1)\n", "1:4: a refers to itself: a -> a."),
        ("a: !new:x.Y {b: !ref <c>}\nc: !ref <a.d>\n", "2:4: c refers to itself: a -> a.b -> c -> a."),
        ("a: !applyref:f [!ref <a>]\n", "1:17: a.0 refers to itself: a -> a.0 -> a."),
    ]:
        with subtests.test(text=text):
            (mistake,) = mistakes_of(text)
            assert expected in mistake


def test_many_mistakes_are_told_together():
    assert (
        len(mistakes_of("a: !ref <b>\nc: !ref <d>\ne: !PLACEHOLDER\nf: !ref <f>\ng: !ref v<a>\nh: !ref <a> + <c>\n"))
        == 4
    )


# Limits


def lines(line, count, start=""):
    return start + "".join(f"{line(at)}\n" for at in range(count))


BOMBS = {
    "lists of references": lines(lambda at: f"a{at + 1}: [{', '.join([f'!ref <a{at}>'] * 10)}]", 30, "a0: x\n"),
    "aliases": lines(lambda at: f"a{at + 1}: &a{at + 1} [{', '.join([f'*a{at}'] * 10)}]", 30, "a0: &a0 x\n"),
    "copies": lines(lambda at: f"a{at + 1}: [!copy <a{at}>, !copy <a{at}>]", 30, "a0: x\n"),
    "copies of much": lines(lambda at: f"b{at}: !copy <a>", 10, f"a: [{', '.join(['1'] * 9000)}]\n"),
    "text that doubles": lines(lambda at: f"a{at + 1}: !ref <a{at}><a{at}>", 60, "a0: xx\n"),
    "long text again and again": lines(lambda at: f"b{at}: !ref x<a>", 5000, f"a: {'y' * 90_000}\n"),
    "too long text": lines(lambda at: f"b{at}: !ref xxx<a>", 2000, f"a: {'y' * 99_999}\n"),
    "a list in text": lines(lambda at: f"b{at}: !ref x<a>", 5000, f"a: [{', '.join(['1'] * 9000)}]\n"),
    "many references in text": lines(lambda at: f"b{at}: !ref {'<a>' * 6000}x", 50, "a: 1\n"),
    "powers": lines(lambda at: f"b{at}: !ref <a>**<a>**<a>", 5000, "a: 9\n"),
    "a sum": f"a: 1\nb: !ref <a>{'+<a>' * 5000}\n",
    "parentheses": f"a: 1\nb: !ref {'(' * 5000}<a>{')' * 5000}\n",
    "forward": lines(lambda at: f"a{at}: !ref <a{at + 1}>", 5000) + "a5000: 1\n",
    "forward in text": lines(lambda at: f"a{at}: !ref x<a{at + 1}>", 5000) + "a5000: 1\n",
    "forward into keys": lines(lambda at: f"a{at}: !ref <a{at + 1}[x]>", 5000) + "a5000: 1\n",
    "forward through lists": lines(lambda at: f"a{at}: [[!ref <a{at + 1}>]]", 3000) + "a3000: 1\n",
    "backward lists": lines(lambda at: f"a{at + 1}: [!ref <a{at}>]", 5000, "a0: 1\n"),
    "attributes": f"a: !new:x.Y {{}}\nb: !ref <a{'.a' * 20_000}>\n",
    "circles": lines(lambda at: f"a{at}: !ref x<a{at}>", 5000),
    "keys that are not there": lines(lambda at: f"key_number_{at}: !ref <key_nmber_{at}>", 5000),
    "angle brackets": f"a: 1\nb: !ref '{'<' * 90_000}'\n",
    "formulas": lines(lambda at: f"b{at}: !ref <a>{' + <a>' * 150}", 900, "a: 1\n"),
    "formulas of long numbers": lines(lambda at: f"b{at}: !ref <a>{' + <a>' * 16_000}", 10, f"a: {'9' * 300}\n"),
    "formulas in parentheses": lines(lambda at: f"b{at}: !ref {'(' * 48}<a>{')' * 48}", 2000, "a: 1\n"),
    "chained formulas": lines(lambda at: f"a{at + 1}: !ref <a{at}> + <a>", 9000, "a: 1\na0: 1\n"),
    "tuples of references": lines(lambda at: f"b{at}: !ref (<a>, <a>)", 9000, "a: 1\n"),
    "names that a tuple keeps": lines(lambda at: f"b{at}: !ref (ref{'_' * 45_000}{'<a>' * 15_000})", 10, "a: 1\n"),
    "different keys that are not there": lines(
        lambda at: f"b{at}: !ref {''.join(f'<k{number}>' for number in range(13_000))}", 10, "a: 1\n"
    ),
    "tuples": lines(lambda at: f"b{at}: !ref (<a>{', 1' * 100})", 200, "a: 1\n"),
}


# One bomb of each kind is in the default tier: those that take the fewest calls to read and refuse.
SLOW_BOMBS = {
    *("tuples", "tuples of references", "a list in text", "copies of much", "keys that are not there"),
    *("chained formulas", "formulas", "powers", "backward lists", "forward in text", "forward through lists"),
    *("long text again and again", "different keys that are not there", "many references in text"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.extended) if name in SLOW_BOMBS else name for name in BOMBS]
)
def test_a_bomb_is_refused_at_once(name):
    def explode():
        mistakes = Mistakes()
        try:
            resolve(root, mistakes, Budget())
        except LimitError as error:
            assert str(error).startswith("p.yaml:") and len(str(error)) < 300
        else:
            assert mistakes or name == "angle brackets"

    root = read(BOMBS[name])
    with at_most(calls=25_000_000 if name in SLOW_BOMBS else 3_000_000):
        explode()
    if "text" in name or "copies" in name:  # all others make no more nodes than there are
        tracemalloc.start(1)
        explode()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6


def test_long_chains_that_need_no_depth_are_fine():
    text = lines(lambda at: f"a{at + 1}: !ref <a{at}> + 1", 5000, "a0: 0\n")
    assert values(resolved(text).items["a5000"]) == 5000
    text = lines(lambda at: f"a{at}: [!ref <a{at + 1}>]", 48) + "a48: 1\n"
    assert isinstance(resolved(text).items["a0"], Sequence)


def test_text_in_a_tuple_may_be_what_stands_in_for_its_references():
    found = resolved("a: 1\nb: !ref (ref0x0., <a>, ref0x<a>, ref1x1.<a>, ref2x)\n")
    assert values(found.items["b"]) == ("!tuple", ["ref0x0.", 1, "ref0x1", "ref1x1.1", "ref2x"])


def test_what_a_terminal_would_obey_in_a_key_is_shown_as_an_escape():
    def fail(*_):
        raise ValueError("\x1b[2J")

    with pytest.raises(ConfigError) as caught:
        resolve(read('"\\e[31m": !applyref:f\n'), Mistakes(), Budget(), fail)
    assert "\x1b" not in str(caught.value) and "\\x1b[31m" in str(caught.value)


def test_what_stays_just_within_the_limits_resolves():
    wide = f"a: [{', '.join(['1'] * 990)}]\nb: [{', '.join(['!ref <a>'] * 98)}]\n"
    assert len(values(resolved(wide).items["b"])) * 991 < EXPANDED_NODES


TEXTS = st.text("<>[]().ab01 +-*/,!:{}'\"_\n", max_size=30)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=4), st.sampled_from(["!ref", "!copy"]))
def test_any_text_behind_a_tag_resolves_or_is_a_mistake(texts, tag):
    root = read("a: 1\nb: {a: [0, x], 1: -2}\n'0': <a>\nab: !new:x.Y {}\n")
    for at, text in enumerate(texts):
        root.items[f"x{at}"] = Scalar(tag, text, root.source, text, root)
    try:
        found = resolve(root, Mistakes(), Budget())
    except LimitError:
        return
    left = {node.tag for _, node in walk(found) if not isinstance(node, Unknown)}
    assert left <= {"", "!tuple", "!new:x.Y", ATTRIBUTE}
