"""Reading YAML text: values as HyperPyYAML has them, every mistake with its place, and nothing executed."""

import contextlib
import datetime
import math
import os

import pytest
from hyperpyyaml import load_hyperpyyaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from programs import run_python
from work import at_most

from amp_recipes.config.yaml.limits import FILE_BYTES, NODES, Budget, LimitError
from amp_recipes.config.yaml.nodes import Mapping, Mistakes, Scalar, Sequence, Source
from amp_recipes.config.yaml.reading import plain_value, read_file, read_text
from amp_recipes.errors import ConfigError


def read(text: str):
    """The tree of a text in which nothing is wrong."""
    mistakes = Mistakes()
    root = read_text(text, "f.yaml", mistakes, Budget())
    assert list(mistakes) == []
    return root


def mistakes_in(text: str) -> list[str]:
    mistakes = Mistakes()
    read_text(text, "f.yaml", mistakes, Budget())
    return [mistake.removeprefix("f.yaml:") for mistake in mistakes]


def data(node):
    """The plain data of a tree; a node with a tag as (tag, data)."""
    if isinstance(node, Scalar):
        return (node.tag, node.value) if node.tag else node.value
    if isinstance(node, Sequence):
        items = [data(item) for item in node.items]
        return tuple(items) if node.tag == "!tuple" else (node.tag, items) if node.tag else items
    items = {key: data(item) for key, item in node.items.items()}
    return (node.tag, items) if node.tag else items


PLAIN = (
    "0 -1 +2 08 010 0777 0o17 0b11 0xfF 0x_F 1_000 1__0 1e3 1.5e3 1e-05 12e03 -.5 .5 1. -0.0 .inf -.inf +.inf true "
    "False TRUE yes no on off y ~ null Null 2001-01-01 2001-12-14T21:59:43Z 1:20 a .. -a 1-2 1.2.3 nan inf none é 1e"
)


def test_plain_values_are_those_of_hyperpyyaml(subtests):
    for text in [*PLAIN.split(), "", "2001-12-14 21:59:43.10 -5", "2001-12-14 21:59:43", "a b", "a#b", "it's"]:
        with subtests.test(text=text):
            expected = load_hyperpyyaml(f"a: {text}\n")["a"]
            for value in (data(read(f"a: {text}\n"))["a"], plain_value(text)):
                assert value == expected
                assert type(value) is type(expected)


DOCUMENTS = [
    "a: 1\nb: {c: [x, 2.0, null], d: {}}\ne: []\n",
    "a: 'it''s'\nb: \"x\\ty\\u00e9\"\nc: 'null'\nd: '1e3'\n",
    "a: |\n  two\n  lines\nb: >-\n  fol\n  ded\nc: |+\n  kept\n\n\nd: x\n  y\n",
    "a: (1, 2)\nb: ()\nc: (1,)\nd: (3)\ne: (a, 'b, c', [2, 3])\nf: (see below)\ng: !tuple (3, 4)\n",
    "a: !tuple '(1, \"a: b\", {x: 2})'\n",
    "a: !!str (1, 2)\nb: !!str 3\nc: !!float 3\nd: !!int '3'\ne: !!bool yes\nf: !!null x\ng: !!str\nh: !!seq [1]\n",
    "a: &x {b: 1}\nc: *x\nd: &y 3\ne: *y\nf: [*x, *y]\n",
    "x: &x {b: 1, c: 5}\ny: &y {c: 2, d: 3}\na: {c: 9, <<: [*x, *y], e: 1}\nb: {<<: *x}\nc: {<<: {z: 1}}\n",
    "a: {<<: &m {b: 1, <<: {c: 2}}, d: 3}\n",
    "a: ! 12\nb: ! {c: 1}\n",
    "a: {1: x, 2.5: y, null: z, false: w, '3': v}\n",
    "a:\n- 1\n-\n  - 2\n- b: 3\n  c:\n? d\n: e\n",
    "\ufeffa: 1\n",
    "---\na: 1\n...\n",
    "a: [x, y: 1, {z}]\n",
]


def test_documents_are_read_as_hyperpyyaml_reads_them(subtests):
    for text in DOCUMENTS:
        with subtests.test(text=text):
            expected, got = load_hyperpyyaml(text), data(read(text.removeprefix("\ufeff")))
            assert repr(got) == repr(expected)  # also types, and the order of keys


def test_tuples_are_of_yaml_1_2():
    # HyperPyYAML reads the inside as YAML 1.1: ('1e-3', True, 8, 80).
    assert data(read("a: (1e-3, yes, 010, 1:20)"))["a"] == (0.001, "yes", 10, "1:20")
    assert data(read("a: !tuple [3, !tuple [4], !new:x.Y ]"))["a"] == (3, (4,), ("!new:x.Y", ""))


def test_text_in_quotes_is_never_a_tuple():
    assert data(read("a: \"(1, 2)\"\nb: '(1, 2)'\nc: |\n  (1, 2)\n")) == {"a": "(1, 2)", "b": "(1, 2)", "c": "(1, 2)\n"}


def test_tags_text_places_and_scopes_are_kept():
    root = read("lr: 1e-3\nm: !new:a.B\n  lr: !ref <lr>\n  n: [!copy <m> , !name:a.c ]\np: !PLACEHOLDER\n")
    assert data(root.items["m"]) == ("!new:a.B", {"lr": ("!ref", "<lr>"), "n": [("!copy", "<m>"), ("!name:a.c", "")]})
    assert root.items["lr"].text == "1e-3"
    model = root.items["m"]
    assert model.source == Source("f.yaml", 2, 4)
    assert model.key_sources["lr"] == Source("f.yaml", 3, 3)
    assert model.items["lr"].scope is root
    assert model.items["n"].items[0].scope is root
    assert model.items["n"].items[1].scope is None
    assert str(model.items["n"].items[1].source) == "f.yaml:4:19"


def test_an_alias_is_the_same_node_and_so_are_merged_values():
    root = read("a: &x [1]\nb: *x\nc: &y {d: *x}\ne: {<<: *y}\n").items
    assert root["a"] is root["b"] is root["c"].items["d"] is root["e"].items["d"]
    assert root["e"].key_sources["d"].line == 3


def test_the_comment_behind_a_key_is_kept():
    root = read(
        "lr: 0.1  # rate # of learning\n"
        "s: 'a # b'\n"
        't: "x # y"   #z\n'
        "m: !new:a.B  # the model\n"
        "  h: {a: 1, b: 2}  # both\n"
        "# not this\n"
        "u: |  # text\n  x # y\n"
        "v: 'a\n  # b'\n"
        "w: # empty\n"
        "x:\n  - 1  # one\n"
        "y: a#b\n"
        "z: *x  # alias\n".replace("*x", "!ref <lr>")
    )
    assert root.comments == {
        "lr": "rate # of learning",
        "t": "z",
        "m": "the model",
        "u": "text",
        "w": "empty",
        "z": "alias",
    }
    assert root.items["m"].comments == {"h": "both"}
    assert root.items["m"].items["h"].comments == {}


MISTAKES = [
    ("lr: 1\nb: 2\nlr: 3\n", "3:1: lr is given at line 1 and again at line 3; keep one."),
    ("m: {a: 1, 'a': 2}\n", "1:11: a is given at line 1 and again at line 1; keep one."),
    ("m: {1: a, true: b}\n", "1:11: true at line 1 is the same key as 1 at line 1; put one of them in quotes."),
    ("m: {1: a,\n 1.0: b}\n", "2:2: 1.0 at line 2 is the same key as 1 at line 1; put one of them in quotes."),
    ("a: !nwe:torch.nn.ReLU\n", "1:4: there is no tag !nwe:torch.nn.ReLU. Did you mean !new:torch.nn.ReLU?"),
    ("a: !reff <b>\n", "1:4: there is no tag !reff. Did you mean !ref?"),
    ("a: !Ref <b>\n", "1:4: there is no tag !Ref. Did you mean !ref?"),
    ("a: !ref: <b>\n", "1:4: there is no tag !ref:. Did you mean !ref?"),
    ("a: !placeholder\n", "1:4: there is no tag !placeholder. Did you mean !PLACEHOLDER?"),
    ("a: !PLACEHOLDR\n", "1:4: there is no tag !PLACEHOLDR. Did you mean !PLACEHOLDER?"),
    ("a: !new torch.nn.ReLU\n", "1:4: there is no tag !new. Did you mean !new:torch.nn.ReLU?"),
    ("a: !new.torch.nn.ReLU\n", "1:4: there is no tag !new.torch.nn.ReLU. Did you mean !new:torch.nn.ReLU?"),
    ("a: !!new:torch.nn.ReLU\n", "1:4: there is no tag !!new:torch.nn.ReLU. Did you mean !new:torch.nn.ReLU?"),
    ("a: !includ:b.yaml\n", "1:4: there is no tag !includ:b.yaml. Did you mean !include:b.yaml?"),
    ("a: !new: torch.nn.ReLU\n", "1:4: !new: needs a name directly after it, without a space: !new:torch.nn.ReLU."),
    ("a: ! ref <b>\n", "1:4: there is a space after the !; write !ref <b>."),
    ("a: !new:x.Y 3\n", "1:4: !new:x.Y has 3 after it; arguments must be a list or a mapping."),
    ("a: !include:x.yaml 3\n", "1:4: !include:x.yaml has 3 after it; arguments must be a list or a mapping."),
    ("a: [!new:x.Y, 3]\n", "1:5: a space is missing between !new:x.Y and ,"),
    ("a: [!name:x.Y]\n", "1:5: a space is missing between !name:x.Y and ]"),
    ("a: {b: !name:x.Y,c: 1}\n", "1:8: a space is missing between !name:x.Y and ,"),
    ("a: !ref [b]\n", "1:4: !ref takes a text, but has a list below it."),
    ("a: !ref\n", "1:4: !ref needs a reference after it: !ref <key>."),
    ("a: !tuple 3\n", "1:4: !tuple takes (1, 2), or a list: !tuple [1, 2]."),
    ("a: !!int x\n", "1:4: x is not a whole number; put it in quotes if it is text."),
    ("a: !!map [1]\n", "1:4: !!map takes a mapping, but this is a list."),
    ("a: 2001-99-99\n", "1:4: 2001-99-99 is not a date; put it in quotes if it is text."),
    (f"a: {'9' * 400}\n", f"1:4: {'9' * 77}... is too large a number; put it in quotes if it is text."),
    ("a: -_\n", "1:4: -_ is not a whole number; put it in quotes if it is text."),
    ("a: {[1]: 2}\n", "1:5: a key must be text or a number, but is a list; put it in quotes."),
    ("!ref <x> : 2\n", "1:1: a key must be text or a number, but is a !ref; put it in quotes."),
    ("2001-01-01: 2\n", "1:1: a key must be text or a number, but is the value 2001-01-01; put it in quotes."),
    ("(1): 2\n", "1:1: a key must be text or a number, but is a !tuple; put it in quotes."),
    ("a: *anhor\nb: &anchor 1\n", "1:4: *anhor is used, but &anhor is not defined above it."),
    ("b: &anchor 1\na: *anhor\n", "2:4: *anhor is used, but &anhor is not defined above it. Did you mean *anchor?"),
    ("a: &x [1, *x]\n", "1:11: *x is used inside &x, so the value would contain itself."),
    ("a: &x {<<: *x}\n", "1:12: *x is used inside &x, so the value would contain itself."),
    ("a: {<<: 3}\n", "1:9: << takes a mapping, or a list of them, but got the value 3."),
    ("a: {<<: {x: 1}, <<: {y: 1}}\n", "1:21: << is used twice in this mapping; write <<: [*first, *second]."),
    ("a: [(1, 2)]\n", "1:5: (1 ends here; write !tuple [1, 2], or put text in quotes."),
    ("a: ((1, 2), 3)\n", "1:4: (1 ends here; write !tuple [1, 2], or put text in quotes."),
    ("a: (1, !new:x.Y )\n", "1:4: a tuple in parentheses holds plain data only; to use tags, write !tuple [...]."),
    ("a: 1\n---\nb: 2\n", "2:1: a second document begins here; a file must hold only one."),
    ("# x\n%YAML 1.1\n---\na: 1\n", "2:1: directives (%) are not supported: YAML is read as 1.2; delete this line."),
    ('a: "\\ud800"\n', "1:4: the escapes \\ud800 to \\udfff are not characters; write \\U and 8 digits."),
    ("a: 1\nb: x\x07y\n", "2:5: the character U+0007 is not allowed in YAML; in quotes, write \\x.."),
]


def test_a_mistake_is_told_with_its_place_and_what_to_write(subtests):
    for text, mistake in MISTAKES:
        with subtests.test(text=text):
            first, *others = mistakes_in(text)
            assert first == mistake
            # A merge key without its mapping is a mistake of its own.
            assert [other for other in others if "<<" not in other] == []


def test_python_tags_are_never_executed_and_told_what_does_it_here(subtests):
    for tag, advice in [
        ("!!python/object/apply:os.system", "write !apply:os.system."),
        ("!!python/object/new:os.X", "write !new:os.X."),
        ("!!python/name:os.system", "write !name:os.system."),
        ("!!python/module:os", "write !module:os."),
        ("!!python/tuple", "write !tuple."),
        ("!!python/str", "write the plain value."),
        ("!<tag:yaml.org,2002:python/name:os.system>", "write !name:os.system."),
    ]:
        with subtests.test(tag=tag):
            for text in (f"a: {tag} [x]", f"a: {tag} x", f"{{{tag} : 1}}", f"a: {tag} {{b: 1}}"):
                assert any(found.endswith(f"Python tags are never executed; {advice}") for found in mistakes_in(text))


SYNTAX = [
    ("a:\n\tb: 2\n", "2:1", "this line is indented with a tab; use spaces."),
    ("a: b: c\n", "1:5", "a second colon followed by a space; put the value in quotes."),
    ("a: 1\n  b: 2\n", "2:4", "a key below a value; is the line above complete, and is the indentation right?"),
    ("lr:1\nb: 2\n", "2:2", "a space is missing after `lr:` in the line above."),
    ("a: 1\nlr:2\nc: 3\n", "2:1", "a space is missing after `lr:`."),
    ("a: 1\nlr 2\nc: 3\n", "2:1", "a key without its colon."),
    ('a: "x\nb: 2\n', "1:4", "the quote that opens here is never closed."),
    ("b: 1\na: [1, 2\nc: 3\n", "2:4", "the bracket that opens here is not closed."),
    ("a: {x: 1\nb: 3\n", "1:4", "the bracket that opens here is not closed."),
    ("a: [1, 2]]\n", "1:10", "a closing bracket or a comma, but no [ or { is open."),
    ("a: 'it's'\n", "1:8", "text after the end of a value; put all of it in quotes."),
    ("a:\n  b: 1\n c: 2\n", "3:2", "the indentation matches none of the lines above."),
    ("a: - 1\n", "1:4", "a list item (-) on the line of its key; put it on the next line, or write [ ]."),
    ("a: *\n", "1:4", "* and & start an alias or an anchor; put text in quotes."),
    ("a: @x\n", "1:4", "a value cannot begin with this character; put it in quotes."),
    ('a: "\\d"\n', "1:6", "not an escape of YAML; write \\\\ for a backslash, or use single quotes."),
    ("a: !ref<a>\n", "1:8", "a space is missing between !ref and <"),
    ("a: {x: !new:a.B}\n", "1:16", "a space is missing between !new:a.B and }"),
    ("a: {e: 1, d: !name:torch.float64}\n", "1:33", "a space is missing between !name:torch.float64 and }"),
    ("a: !new:b.C\n  d: !new:e.F {g: 1, h: !name:i.j}\n", "2:34", "a space is missing between !name:i.j and }"),
    ("a: {b: [!name:x.Y]}\n", "1:19", "a space is missing between !name:x.Y and ]"),
    ("a: !new:b.C{d: 1}\n", "1:12", "a space is missing between !new:b.C and {"),
    ("a: !new:b.Cé\n", "1:12", "é is not allowed in a tag."),
    ("a: [!ref <a[b]>]\n", "1:15", 'inside [ ] or { } this needs quotes: !ref "<a[b]>".'),
    ("a: {x: !ref <a[b]>}\n", "1:15", 'inside [ ] or { } this needs quotes: !ref "<a[b]>".'),
    ("a: [,]\n", "1:5", "a value is missing here."),
    ("a: ?\n", "1:4", "mapping keys are not allowed here."),
]


def test_bad_yaml_is_told_in_plain_words_with_a_caret(subtests):
    for text, place, meaning in SYNTAX:
        with subtests.test(text=text):
            line, column = map(int, place.split(":"))
            shown = text.split("\n")[line - 1].replace("\t", "→")
            expected = f"{place}: not valid YAML: {meaning}\n      {shown}\n      {' ' * (column - 1)}^"
            assert mistakes_in(text) == [expected]


def test_a_long_line_is_cut_around_the_caret():
    (mistake,) = mistakes_in("a: [" + "x, " * 3000 + "@]\n")
    _, shown, caret = mistake.split("\n")
    assert len(shown) < 120
    assert shown[caret.index("^")] == "@"


def test_all_mistakes_before_a_broken_line_are_told_with_it():
    found = mistakes_in("a: 1\na: 2\nb: !nwe:x\nc: *d\ne: [1\n")
    assert [mistake.split(":")[0] for mistake in found] == ["2", "3", "4", "5"]


def test_files(tmp_path):
    def mistake_of(content: bytes | None, name: str = "params.yaml", where: Source | None = None) -> str:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        mistakes = Mistakes()
        assert read_file(str(tmp_path / name), mistakes, Budget(), where) is None
        (mistake,) = mistakes
        return mistake.replace(f"{tmp_path}{os.sep}", "")

    top = "the top level must be a mapping of names to values (lr: 0.1), but is"
    assert mistake_of(b"") == f"params.yaml: {top} empty."
    assert mistake_of(b"# nothing\n") == f"params.yaml: {top} empty."
    assert mistake_of(b"- 1\n") == f"params.yaml:1:1: {top} a list."
    assert mistake_of(b"lr:1\n") == f"params.yaml:1:1: {top} the text lr:1."
    assert mistake_of(b"!new:torch.nn.ReLU {}\n") == f"params.yaml:1:1: {top} a !new:torch.nn.ReLU."
    assert mistake_of(b"a: 1\nb: \xff\n") == "params.yaml:2:4: byte 0xff is not UTF-8; save it as UTF-8."
    assert mistake_of("a: 1".encode("utf-16")) == "params.yaml:1:1: byte 0xff is not UTF-8; save it as UTF-8."
    where = Source("main.yaml", 3, 4)
    missing = "main.yaml:3:4: parms.yaml cannot be read: No such file or directory. Did you mean params.yaml?"
    assert mistake_of(None, "parms.yaml", where) == missing
    (tmp_path / "folder").mkdir()
    assert "folder cannot be read: " in mistake_of(None, "folder")
    assert "cannot be read: " in mistake_of(None, "x\0y")
    os.mkfifo(tmp_path / "pipe")
    assert mistake_of(None, "pipe") == "pipe: pipe cannot be read: it is not a regular file."
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert mistake_of(None, "zero").endswith("it is not a regular file.")


def test_keys_of_the_top_level_are_strings_and_a_byte_order_mark_is_no_key(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("\ufeffa: 1\n2: b\n")
    mistakes = Mistakes()
    root = read_file(str(file), mistakes, Budget())
    assert isinstance(root, Mapping)
    assert list(root.items) == ["a", 2]
    assert list(mistakes) == [f"{file}:2:1: 2 must be a string, as every key at the top level; put it in quotes."]


SIZE = FILE_BYTES
BOMBS = {
    "text": "a: " + "x" * (SIZE - 3),
    "words": "a: " + "x " * (SIZE // 2 - 2),
    "lines": "a: |\n" + " x\n" * (SIZE // 3 - 2),
    "newlines": "\n" * SIZE,
    "comments": "#\n" * (SIZE // 2),
    "brackets": "[" * SIZE,
    "braces": "{" * SIZE,
    "dashes": "- " * (SIZE // 2),
    "questions": "? " * (SIZE // 2),
    "items": "[" + "a," * (SIZE // 2 - 1),
    "anchors": "a: [" + "&a x, " * (SIZE // 6 - 1),
    "aliases": "a: &a [1]\nb: [" + "*a , " * (SIZE // 5 - 10),
    "keys": "".join(f"k{number}: 1\n" for number in range(SIZE // 12)),
    "directives": "a: 1\n...\n" + "%a\n" * (SIZE // 3 - 4),
    "tuple": "a: (" + "1," * 49_000 + ")",
    "deep tuple": "a: (" + "[" * 49_990 + ")",
    "merged keys": "a: &a {"
    + ", ".join(f"k{number}: 1" for number in range(1000))
    + "}\nb: ["
    + "{<<: *a}, " * 1000
    + "]",
    "merge chain": "a0: &a0 {k: 1}\n" + "".join(f"a{n}: &a{n} {{<<: *a{n - 1}, x{n}: 1}}\n" for n in range(1, 3000)),
    "five megabytes": "a: 1\n" * (1 << 20),
}
QUICK_BOMBS = {"text", "brackets", "dashes", "deep tuple", "merged keys", "merge chain", "five megabytes"}
MEASURE = """
import resource, sys
from amp_recipes.config.yaml.limits import NODES, Budget, LimitError
from amp_recipes.config.yaml.nodes import Mistakes
from amp_recipes.config.yaml.reading import read_file
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read_file(sys.argv[1], Mistakes(), Budget())
except LimitError:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.parametrize(
    "name", [name if name in QUICK_BOMBS else pytest.param(name, marks=pytest.mark.extended) for name in BOMBS]
)
def test_a_small_file_cannot_fill_the_machine(tmp_path, name):
    file = tmp_path / f"{name}.yaml"
    file.write_text(BOMBS[name])
    with at_most(calls=25_000_000), pytest.raises(LimitError) as caught:
        read_file(str(file), Mistakes(), Budget())
    assert str(caught.value).startswith(str(file)) and len(str(caught.value)) < 400
    done = run_python("-c", MEASURE, file)
    megabytes = int(done.stdout)
    assert megabytes < 200, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "".join(f"a{number}: &anchor{number} 1\n" for number in range(500))
        + "".join(f"b{number}: *ancho{number}\n" for number in range(500)),
        "a: !" + "!" * 90_000 + "] x: [\n",
        "a: " + "<[" * 40_000 + "\n  @: b\n@\n",
        "a: 0" + "_" * 90_000 + "\n",
        "a: 2001-01-01" + " " * 90_000 + "x\n",
    ],
)
def test_mistakes_are_told_in_time_too(text):
    with at_most(calls=6_000_000):
        mistakes_in(text)


@pytest.mark.parametrize(
    "text",
    [
        "lr: 1 # x" + " " * 90_000 + "y\n",
        "lr: 1" + " # " * 30_000 + "\n",
        'lr: "1"' + " " * 90_000 + "#\n",
        "lr: (1" + " " * 90_000 + "y)\n",
        "lr: (1" + " , 1" * 5_000 + ")\n",
        "a: " + "[" * 1_000_000,
        "a: " + "{" * 1_000_000,
        "a: [" + "!nwe:x.Y a, " * 3_000 + "]\n",
        "".join(f"a{n}: &anchor{n} 1\n" for n in range(99)) + "".join(f"b{n}: *ancho{n}\n" for n in range(1_500)),
        "".join(f"a{n}: (1, 2)\n" for n in range(1_500)),
        "".join(f"a{n}: {'# ' * 1_000}\n" for n in range(150)),
    ],
)
def test_no_text_takes_more_time_than_its_length(text):
    with at_most(calls=8_000_000), contextlib.suppress(LimitError):
        mistakes_in(text)


def test_a_long_comment_is_cut():
    assert read(f"a: 1 # {'x' * 9_000}\n").comments == {"a": "x" * 500}


def test_what_is_nested_too_deeply_is_told_where_it_is():
    for text in ("b: 1\na: " + "[" * 60, "b: 1\na: " + "{x: " * 60, "b: 1\na: (" + "[" * 60 + "]" * 60 + ")"):
        with pytest.raises(LimitError, match=r"^f.yaml:2:[0-9]+: lists and mappings are nested more than 50 levels"):
            mistakes_in(text)


def test_what_a_terminal_would_obey_is_shown_as_an_escape_by_limits_too():
    with pytest.raises(LimitError) as caught:
        read_text("a: 1\n" * FILE_BYTES, "x\x1b[31m.yaml", Mistakes(), Budget())
    assert str(caught.value).startswith("x\\x1b[31m.yaml: ")


FLAT_TUPLES = st.text("aZ01_.+-eE, ", max_size=12) | st.lists(
    st.sampled_from(
        ["1", "-2", "1e-3", ".5", "+.inf", "true", "~", "x.Y", "1 2", "-", "-x", "0o7", "1_0", "...", "", " "]
    )
).map(",".join)


@given(FLAT_TUPLES)
@example("1,")
@example(" 1 , 2 ,")
@example("1,,2")
def test_a_tuple_without_brackets_in_it_is_read_as_the_parser_reads_it(inside):
    known, mistakes = Mistakes(), Mistakes()
    by_parser = read_text(f"[{inside}]", "f.yaml", known, Budget())
    node = read_text(f"({inside})", "f.yaml", mistakes, Budget())
    assert bool(known) == bool(mistakes)
    if not known:
        assert repr(data(node)) == repr(tuple(data(by_parser)))


def test_200_lines_are_read_in_no_time():
    text = "".join(f"k{number}: !new:torch.nn.Linear  # why\n  in: (1, 2)\n  out: 1e-3\n" for number in range(67))
    read(text)
    with at_most(calls=600_000):
        read(text)


def test_the_limit_of_nodes_counts_over_all_files():
    assert Budget().nodes == NODES
    budget = Budget(nodes=2_000)
    for _ in range(2):
        read_text("a: [" + "1, " * 990 + "]", "f", Mistakes(), budget)
    with pytest.raises(LimitError, match="more than 20,000 keys and values"):
        read_text("a: [" + "1, " * 20 + "]", "f", Mistakes(), budget)


def test_the_parser_leaves_no_trace_on_the_next_text():
    assert mistakes_in("a: (1, [2)\nb: [")
    assert data(read("a: (1, 2)\nb: (3)\nd: 2001-01-01")) == {"a": (1, 2), "b": (3,), "d": datetime.date(2001, 1, 1)}
    assert math.isnan(plain_value(".nan"))


# Separated by spaces; \xb7 stands for a space.
PIECES = (
    ": # ' \" [ ] { } , & * ! | > % @ ` ? - < ( ) ~ = . \\ a: b: -\xb7 ?\xb7 ---\xb7 ... !ref\xb7 !new:x "
    "!!python/name:a !!str\xb7 &a\xb7 *a <<:\xb7 <a[b]> (1,\xb72) 1e3 !tuple\xb7 \\x41 \\U0011 %41 é \ufeff \x85 "
    "\u2028 \U0001f600 \ud800 \0 2001-99-99 0x_ \xb7"
)
TOKENS = [*(piece.replace("\xb7", " ") for piece in PIECES.split(" ")), "\n", "\r\n", "\t", "\n  "]


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.lists(st.sampled_from(TOKENS), max_size=40).map("".join), st.text(max_size=60)))
@example("a: !new:%25 \n")
@example('a: "\\UFFFFFFFF"\n')
@example("a: (1] , [2)\n")
@example("a: !tuple '(1]\n--- [2)'\n")
@example('a: (1, "\\UFFFFFFFF")\n')
def test_random_text_is_a_tree_or_has_mistakes_and_never_another_error(text):
    mistakes = Mistakes()
    try:
        root = read_text(text, "f", mistakes, Budget())
    except ConfigError:
        return
    assert root is None or repr(data(root))
    assert all(mistake.startswith("f") for mistake in mistakes)
