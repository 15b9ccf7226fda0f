"""A YAML that HyperPyYAML loads gives the same objects here, but where HyperPyYAML is unsafe or wrong."""

import collections
import datetime
import functools
import os
import random
import re
import textwrap
import types
from pathlib import Path

import pytest
import ruamel.yaml
import torch
import yaml as pyyaml
from hyperpyyaml import load_hyperpyyaml
from recipe_runs import recipe_modules
from repository import REPOSITORY

from amp_recipes.config import load_hparams, seed_everything
from amp_recipes.config.trust.late_building import LateClass
from amp_recipes.errors import ConfigError

TRUST = (__name__,)  # the classes and functions below

LIBRARY_DEFAULTS = [
    pyyaml.constructor.BaseConstructor.construct_object,
    ruamel.yaml.constructor.BaseConstructor.construct_object,
]

README = {  # HyperPyYAML's README, feature by feature
    "yaml basics": """
        string: abcd  # No quotes needed
        integer: 1
        float: 1.3
        bool: True
        none: null
        flow: {foo: 1, bar: 2.5, baz: "abc"}
        block:
          - foo
          - bar
          - baz
        flow_list: [foo, bar, baz]
        nested:
            foo:
                a: 1
                b: 2
            bar:
                - c
                - d
        """,
    "object": "model: !new:collections.Counter\n",
    "object with positional arguments": """
        foo: !new:collections.Counter
          - abracadabra
        """,
    "object with keyword arguments": """
        bar: !new:collections.Counter
          a: 2
          b: 1
          c: 5
        """,
    "name": "add: !name:operator.add\n",
    "module": f"module: !module:{__name__}\n",
    "text from references": """
        folder1: abc/def
        folder2: ghi/jkl
        whole: !ref <folder1>/<folder2>
        foo: 1024
        bar: 512
        baz: !ref <foo> // <bar> + 1
        """,
    "references below keys": """
        block_index: 1
        cnn1:
            out_channels: !ref <block_index> * 64
            kernel_size: (3, 3)
        cnn2:
            out_channels: !ref <cnn1[out_channels]>
            kernel_size: (3, 3)
        """,
    "references and copies of objects": """
        foo: !new:collections.Counter
          a: 4
        bar: !ref <foo>
        baz: !copy <foo>
        """,
    "applyref, both kinds of arguments": """
        c: !applyref:sorted
            _args:
                - [3, 4, 1, 2]
            _kwargs:
                reverse: False
        d: !ref <c>-<c>
        """,
    "applyref, keyword arguments": """
        e: !applyref:random.randint
            a: 1
            b: 3
        f: !ref <e><e>
        """,
    "applyref, positional arguments": """
        g: !applyref:random.randint
            - 1
            - 3
        h: !ref <g><g>
        """,
    "applyref, no arguments": """
        i: !applyref:random.random
        j: !ref <i><i>
        """,
}

VALUES = {
    "numbers": """
        whole: [0, 1, -1, +3, 007, 0x1F, 0o17, 1_000, 12345678901234567890]
        real: [1.0, -0.5, 1e-4, 1E5, 1.5e+3, .5, 3., 6.02e23, 1e-05]
        special: [.inf, -.inf, .nan, .Inf]
        """,
    "booleans and null": "a: [true, True, TRUE, false, False]\nn: [null, Null, NULL, ~]\nempty:\n",
    "what YAML 1.1 took for booleans": "a: [yes, no, on, off, y, n, Yes, NO]\n",
    "what YAML 1.1 took for other numbers": "a: [12:30, 1:30:00, 0b11, 010, 1e5]\n",
    "quoted text": """
        a: "1"
        b: 'true'
        c: "line\\nbreak \\u00e9 \\t tab"
        d: 'it''s'
        e: ""
        f: "null"
        g: "<a>"
        """,
    "plain text": """
        a: some words, with no trouble
        b: http://host:80/x?y=z#frag
        c: a#b
        d: "- no list"
        e: C:\\windows
        f: ünïcödé 日本語
        """,
    "text of several lines": """
        literal: |
          first
            second

          third
        stripped: |-
          no line end
        kept: |+
          all line ends

        wrapped: >
          one
          line

          another
        plain: starts here
          and goes on
        quoted: "starts here
          and goes on"
        """,
    "dates": "day: 2024-02-29\ntime: 2001-12-14T21:59:43\nspaced: 2001-12-14 21:59:43.10\n",
    "dates with a zone": "utc: 2001-12-14T21:59:43Z\nzone: 2001-12-14T21:59:43+02:00\n",
    "empty containers": "a: {}\nb: []\nc: [[], {}]\n",
    "keys that are not text": "a: {2: two, 2.5: real, true: yes, null: nothing, x: text}\n",
    "anchors": """
        base: &base {a: 1, b: [1, 2]}
        same: *base
        number: &number 3
        again: [*number, *number]
        """,
    "merge keys": """
        base: &base {a: 1, b: 2}
        other: &other {b: 3, c: 4}
        one: {<<: *base, b: 5}
        two:
          <<: [*base, *other]
          d: 6
        """,
    "standard tags": """
        text: !!str 12
        whole: !!int "12"
        real: !!float 1
        real_text: !!float "1.5"
        truth: !!bool "true"
        nothing: !!null ""
        list: !!seq [1]
        map: !!map {a: 1}
        """,
    "hidden keys": "__a: 1\nb: !ref <__a>\n__c: {d: 2}\nnested:\n  __kept: !ref <__c[d]>\n",
    "document marks": "---\na: 1\n...\n",
    "comments everywhere": """
        # above
        a: 1  # beside
        b:  # before a block
          # inside
          - 1  # an item

          - 2
        """,
}

TUPLES = {
    "implicit tuples": "a: (3, 4)\nb: (1,2,3)\nc: (1.5, x, true)\nd: ( 1 )\ne: ()\n",
    "tuples in lists and mappings": "a: [(1), (2)]\nb: {c: (3)}\n",
    "tuples with the tag": "a: !tuple (3, 4)\nb: !tuple (x, y)\n",
    "tuples as arguments": """
        conv: !new:torch.nn.Conv2d
          in_channels: 1
          out_channels: 2
          kernel_size: (3, 3)
          padding: !tuple (1, 1)
        """,
    "referred tuples": "a: (3, 4)\nb: !ref <a>\nc: !copy <a>\nd:\n  - !ref <a>\n",
    "tuples of tuples and lists": "a: ([1, 2], 3)\nb: ('x', \"y\")\n",
    "text that only begins with a parenthesis": "a: (no tuple\nb: (a) and (b) no\nc: x(1)\n",
}

REFERENCES = {
    "references keep the type": """
        a: [1, 2.5, true, null, text]
        whole: 3
        real: 1e-4
        truth: true
        nothing: null
        list: !ref <a>
        b: [!ref <whole>, !ref <real>, !ref <truth>, !ref <nothing>]
        """,
    "references in text": """
        whole: 3
        real: 1e-4
        small: 0.00001
        big: 123456789012345678.0
        truth: true
        nothing: null
        word: text
        a: !ref n <whole>, <real>, <truth>, <nothing>, <word>
        b: !ref n <small> and <big>
        """,
    "lists and tuples in text": """
        list: [1, x, {k: 2.5}]
        tuple: (1, 2)
        a: !ref n <list> and <tuple>
        b: !ref (<d>, 3)
        c: !ref (x, <d>)
        d: 4
        """,
    "numbers in text as Python writes them": """
        big: 1e10
        decimal: 1.50
        hex: 0x10
        grouped: 1_000
        day: 2024-02-29
        a: !ref <big>, <decimal>, <hex>, <grouped>, <day>
        """,
    "text that a reference makes is read as a plain value": """
        one: 1
        t: tr
        number: !ref <one><one>
        decimal: !ref <one>.<one>
        small: !ref <one>e-05
        truth: !ref <t>ue
        clock: !ref <one>:30
        quoted: '3'
        same: !ref <quoted>
        sum: !ref <quoted> + 1
        joined: !ref <quoted>0
        """,
    "text with signs of YAML": """
        comment: '#x'
        null_text: 'null'
        apostrophe: "'"
        lines: |
          one
          two
        a: [!ref <comment>y, !ref <null_text>, !ref it<apostrophe>s]
        b: !ref <lines>x
        c: !ref <comment>
        d: !ref <comment>
          and <null_text>
        """,
    "references to references": "a: 1\nb: !ref <a>\nc: !ref <b>\nd: !ref v<c>\ne: !ref <d>.<d>\n",
    "references forward": "a: !ref <c[d]>\nb: !ref <c>\nc: {d: 7}\n",
    "references deep in lists": """
        a: {b: {c: {d: 4}}}
        l: [1, [!ref "<a[b][c][d]>", {x: !ref '<a[b]>'}]]
        """,
    "shared and copied containers": """
        a: {x: [1, 2]}
        shared: !ref <a>
        inner: !ref <a[x]>
        copied: !copy <a>
        copied_inner: !copy <a[x]>
        """,
    "shared and copied objects": f"""
        a: !new:{__name__}.Keeper
          inner: !new:{__name__}.Keeper {{x: [1]}}
        shared: !ref <a>
        list: [!ref <a>, !ref <a>]
        inside: !ref <a[inner]>
        copied: !copy <a>
        """,
    "a copy of what is shared inside": """
        part: [1, 2]
        whole: {a: !ref <part>, b: !ref <part>}
        copied: !copy <whole>
        """,
    "attributes": """
        linear: !new:torch.nn.Linear {in_features: 2, out_features: 3}
        weight: !ref <linear.weight>
        size: !ref <linear.out_features>
        again: !new:torch.nn.Linear {in_features: !ref <linear.out_features>, out_features: 1}
        """,
    "attributes below keys": """
        parts: {linear: !new:torch.nn.Linear {in_features: 2, out_features: 3}}
        bias: !ref <parts[linear].bias>
        """,
}

ARITHMETIC = {
    "every operator": """
        a: 7
        b: 2
        plus: !ref <a> + <b>
        minus: !ref <a> - <b>
        times: !ref <a> * <b>
        over: !ref <a> / <b>
        floor: !ref <a> // <b>
        rest: !ref <a> % <b>
        power: !ref <a> ** <b>
        """,
    "without spaces": "a: 7\nb: !ref <a>*2\nc: !ref <a>//2\nd: !ref <a>+1\ne: !ref <a>**2\n",
    "precedence and parentheses": "a: 7\nb: !ref <a> + 2 * 3\nc: !ref (<a> + 2) * 3\nd: !ref 2 ** 3 ** 2 + <a>\n",
    "with floats": "lr: 1e-3\nb: !ref <lr> * 10\nc: !ref <lr> / 4\nd: !ref <lr> + 1e-6\ne: !ref 1.5 * <lr>\n",
    "of references below keys": "a: {b: 6, c: 4}\nd: !ref <a[b]> * <a[c]> - 1\n",
    "of results": "a: 2\nb: !ref <a> * 3\nc: !ref <b> + <a>\nd: [!ref <c> % 5]\n",
    "in arguments": """
        n: 2
        linear: !new:torch.nn.Linear
          in_features: !ref <n> * 2
          out_features: !ref <n> ** 3
        """,
    "text that is none": "a: x\nb: !ref <a> + 1\nc: !ref <a>-2\nd: !ref v<a>*\ne: 3\nf: !ref <e> files\n",
}

OBJECTS = {
    "an object in an object": f"""
        a: !new:torch.nn.Sequential
          - !new:torch.nn.Linear {{in_features: 2, out_features: 3}}
          - !new:torch.nn.ReLU
          - !new:torch.nn.Linear [3, 1]
        k: !new:{__name__}.Keeper
          x:
            y:
              - !new:{__name__}.Keeper
                z: 1
        """,
    "partial functions": """
        optimizer: !name:torch.optim.SGD {lr: 0.1, momentum: 0.9}
        positional: !name:operator.mul [3]
        bare: !name:torch.nn.ReLU
        same: !ref <optimizer>
        copied: !copy <optimizer>
        nested:
          - !name:torch.nn.functional.relu
            inplace: true
        """,
    "partial functions over objects": """
        act: !new:torch.nn.ReLU
        block: !name:torch.nn.Sequential [!ref <act>]
        """,
    "applied functions": """
        product: !apply:operator.mul [6, 7]
        tensor: !apply:torch.tensor [[[1, 2], [3, 4]]]
        zeros: !apply:torch.zeros [2, 3]
        keywords: !apply:torch.full {size: [2], fill_value: 3.0}
        none: !apply:random.random
        nested: !apply:max [!apply:operator.add [1, 2], 2]
        """,
    "an applied function that keeps what it is given": f"""
        list: [1, 2]
        same: !apply:{__name__}.itself [!ref <list>]
        """,
    "names of what is no function": "dtype: !name:torch.float32\npi: !name:math.pi\n",
    "random objects in the order of the file": """
        first: !apply:torch.rand [2]
        inner: {deep: [!new:torch.nn.Linear [2, 2], !apply:random.random ]}
        last: !new:torch.nn.Sequential [!new:torch.nn.Linear [1, 2], !new:torch.nn.Linear [2, 1]]
        """,
    "objects referred to before they stand": f"""
        holder: !new:{__name__}.Keeper {{x: !ref <part>}}
        part: !new:{__name__}.Keeper {{y: 1}}
        """,
    "a class method": "e: !apply:torch.nn.Embedding.from_pretrained [!apply:torch.zeros [2, 3]]\n",
    "one object twice in a container": """
        a: !new:torch.nn.Sequential
          - &layer !new:torch.nn.Linear [2, 2]
          - *layer
        """,
    "objects without a dict": "device: !new:torch.device [cpu]\nset: !new:frozenset [[1, 2]]\n",
    "an object over a list of the file": """
        items: [5, 6]
        set: !new:torch.utils.data.Subset [!ref <items>, [0]]
        """,
    "an object under an anchor": """
        a: &net !new:torch.nn.Linear {in_features: 1, out_features: 1}
        b: *net
        c: [*net]
        """,
    "keyword arguments from a merge key": f"""
        common: &common {{x: 1, y: [2]}}
        a: !new:{__name__}.Keeper
          <<: *common
          z: 3
        """,
    "empty arguments": "a: !new:collections.Counter {}\nb: !new:collections.Counter []\nc: !name:dict {}\n",
    "hidden objects": f"__a: !new:{__name__}.Keeper {{x: 1}}\nb: !ref <__a>\n",
    "objects in tuples of a call": f"a: !new:{__name__}.Keeper\n  x: (1, 2)\n  y: [(3), 4]\n",
}

APPLYREF = {
    "a list that is referred to": "a: !applyref:sorted [[3, 1]]\nb: !ref <a>\nc: {d: !ref <a>}\n",
    "in arithmetic": "a: !applyref:max [3, 4]\nb: !ref <a> * 2\n",
    "in a list": "a:\n  - !applyref:min [3, 4]\n  - !applyref:random.random\n  - 1\n",
}

PART = """
    hidden: 4
    layers: {a: {b: 1}, c: [1]}
    twice: !ref <hidden> * 2
    """

INCLUDES = {
    "an included file": "net: !include:part.yaml\nsize: 3\n",
    "a value given to an included file": "net: !include:part.yaml {hidden: 5, new: [1], layers: {a: {b: 2}}}\n",
    "an included file twice": "a: !include:part.yaml\nb: !include:part.yaml {hidden: 1}\n",
    "references into an included file": "net: !include:part.yaml\nsize: !ref <net[twice]> + 1\n",
    "an included file that includes": "net: !include:folder/outer.yaml\n",
    "an included file with objects": "n: !include:objects.yaml\n",
}

FILES = {
    "part.yaml": PART,
    "folder/outer.yaml": "inner: !include:../part.yaml {hidden: 7}\nname: outer\n",
    "objects.yaml": "linear: !new:torch.nn.Linear {in_features: 2, out_features: 2}\nsame: !ref <linear>\n",
}

DOCUMENTS = {
    "README": README,
    "values": VALUES,
    "tuples": TUPLES,
    "references": REFERENCES,
    "arithmetic": ARITHMETIC,
    "objects": OBJECTS,
    "applyref": APPLYREF,
    "includes": INCLUDES,
}


# What differs on purpose: text, what HyperPyYAML gives (or raises), what is given here (or said).
DIFFERENCES = {
    "an attribute is referred to, not copied": (
        "a: !new:torch.nn.ReLU\nb: !copy <a.inplace>\n",
        {"a": torch.nn.ReLU(), "b": torch.nn.ReLU()},  # a copy of the object, the attribute forgotten
        r":2:4: .*!copy.*use !ref",
    ),
    "a path that a number is part of stays a path": (
        "a: 6\nb: 3\nc: !ref <a>/<b>\nd: !ref out/<a>\n",
        {"a": 6, "b": 3, "c": 2.0, "d": "out/6"},
        {"a": 6, "b": 3, "c": "6/3", "d": "out/6"},
    ),
    "a minus before a number is arithmetic": (
        "a: -3\nb: !ref <a> + 4\nc: !ref 2 * -<a>\nd: !ref <a> - 1\n",
        {"a": -3, "b": "-3 + 4", "c": "2 * --3", "d": "-3 - 1"},
        {"a": -3, "b": 1, "c": 6, "d": -4},
    ),
    "a negative number keeps its sign in arithmetic": (
        "a: -3\nb: !ref <a> ** 2\nc: !ref 2 - <a>\n",
        {"a": -3, "b": "-3 ** 2", "c": "2 - -3"},
        {"a": -3, "b": 9, "c": 5},
    ),
    "an underscore joins numbers, it groups no digits": (
        "a: 1\nb: !ref <a>_<a>\n",
        {"a": 1, "b": 11},
        {"a": 1, "b": "1_1"},
    ),
    "text in angle brackets that a reference brings is text": (
        "x: 5\na: <x>\nb: !ref v <a>\n",
        {"x": 5, "a": "<x>", "b": "v 5"},
        {"x": 5, "a": "<x>", "b": "v <x>"},
    ),
    "what stands in quotes is no arithmetic": (
        "a: 2\nb: !ref <a> * 'x'\n",
        {"a": 2, "b": "xx"},
        {"a": 2, "b": "2 * 'x'"},
    ),
    "text with a number keeps its digits": (
        "a: 2.1\nb: !ref <a>0\nc: !ref 00<a>\nd: !ref <e>e3\ne: 1\n",
        {"a": 2.1, "b": 2.1, "c": 2.1, "d": 1000.0, "e": 1},
        {"a": 2.1, "b": "2.10", "c": "002.1", "d": "1e3", "e": 1},
    ),
    "a comma that ends a tuple halfway is told": (
        "a: {x: (1, 2)}\n",
        {"a": {"x": "(1", "2)": None}},
        r":1:\d+: .*!tuple \[1, 2\]",
    ),
    "what stands in quotes is no tuple": (  # HyperPyYAML agrees from its second load in a process on
        "a: '(1, 2)'\n",
        {"a": (1, 2)},
        {"a": "(1, 2)"},
    ),
    "a tuple is read as the rest of the file, by YAML 1.2": (
        "a: (1e-3, yes, 012)\n",
        {"a": ("1e-3", True, 10)},
        {"a": (0.001, "yes", 12)},
    ),
    "a tuple stays one where it is referred to in a list on one line": (
        "a: (3, 4)\nb: [!ref <a>]\n",
        {"a": (3, 4), "b": ["(3, 4)"]},
        {"a": (3, 4), "b": [(3, 4)]},
    ),
    "the tag of tuples takes a list": ("a: !tuple [1, 2]\n", ruamel.yaml.YAMLError, {"a": (1, 2)}),
    "no digit of a float is lost": (
        "a: 4.697088225979121e+16\n",
        {"a": 4.69708822597912e16},
        {"a": 4.697088225979121e16},
    ),
    "a reference takes an item of a list": ("a: [7, 8]\nb: !ref <a[1]>\n", ValueError, {"a": [7, 8], "b": 8}),
    "a chain of references may go forward": (
        "a: !ref <b>\nb: !ref <c>\nc: 1\n",
        ruamel.yaml.YAMLError,
        {"a": 1, "b": 1, "c": 1},
    ),
    "a reference may go forward into an included file": (
        "a: !ref <p[hidden]>\np: !include:part.yaml\n",
        ValueError,
        {"a": 4, "p": {"hidden": 4, "layers": {"a": {"b": 1}, "c": [1]}, "twice": 8}},
    ),
    "an object with one argument may stand in a list on one line": (
        "a: [!new:collections.Counter {x: 2}]\n",
        ruamel.yaml.YAMLError,  # it reads the object as a key
        {"a": [collections.Counter(x=2)]},
    ),
    "a Python tag is never executed": ("a: !!python/tuple [1, 2]\n", {"a": (1, 2)}, r":1:4: .*!!python/tuple"),
    "a Python tag in a tuple is never executed": (
        "a: (!!python/name:os.getcwd , 1)\n",
        {"a": (os.getcwd, 1)},
        r":1:4: ",
    ),
    "what is not trusted is not called": ("a: !apply:os.getcwd\n", {"a": os.getcwd()}, r":1:4: .*os\.getcwd.*trust"),
    "an unknown argument is told before anything is built": (
        "a: !new:torch.nn.Linear {in_feature: 1, out_features: 2}\n",
        TypeError,
        r":1:.*in_feature.* Did you mean in_features\?",
    ),
}

# What neither loads; here every mistake is told with its line.
REFUSED = {
    "a key twice": "a: 1\na: 2\n",
    "a reference to nothing": "a: 1\nb: !ref <nothing>\n",
    "a reference to itself": "a: !ref <a>\n",
    "a circle": "a: !ref <b>\nb: !ref <a>\n",
    "a placeholder": "a: !PLACEHOLDER\n",
    "a list at the top": "- 1\n",
    "nothing at all": "",
    "an unknown tag": "a: !neww:collections.Counter\n",
    "an unknown class": "a: !new:collections.Counterr\n",
    "a function where a class is due": "a: !new:operator.add [1, 2]\n",
    "a class where a function is due": "a: !apply:collections.Counter\n",
    "arguments of what takes none": "a: !name:math.pi [1]\n",
    "arguments of a module": f"a: !module:{__name__} [1]\n",
    "a number as keyword": "a: !new:collections.Counter {1: 2}\n",
    "a missing include": "a: !include:nowhere.yaml\n",
    "a division by zero": "a: 0\nb: !ref 1 / <a>\n",
    "bad YAML": "a: [1\nb: 2\n",
    "an applied function that raises": "a: !apply:operator.truediv [1, 0]\n",
}


class Keeper:
    """Keeps what it is given."""

    def __init__(self, *args, **kwargs):
        self.args, self.kwargs = args, kwargs


def itself(value):
    return value


def hyperpyyaml_objects(file: Path):
    """What HyperPyYAML loads, its traces in the process put back."""
    resolvers = list(ruamel.yaml.resolver.implicit_resolvers)
    defaults = [function.__defaults__ for function in LIBRARY_DEFAULTS]
    try:
        with open(file, encoding="utf-8") as stream:
            return load_hyperpyyaml(stream, loader=type("Loader", (ruamel.yaml.Loader,), {}))
    finally:
        ruamel.yaml.resolver.implicit_resolvers[:] = resolvers
        for function, default in zip(LIBRARY_DEFAULTS, defaults, strict=True):
            function.__defaults__ = default


class Comparison:
    """Whether two trees of objects are alike: types, values, and which of them are one object."""

    def __init__(self):
        self.twins, self.alive = {}, []

    def check(self, ours, theirs, path="hparams"):
        # A partial of a class that tells its place when the object cannot be built (docs/reference/yaml.md).
        kind = functools.partial if isinstance(ours, LateClass) else type(ours)
        assert kind is type(theirs), f"{path}: {ours!r} is no {type(theirs).__name__} like {theirs!r}"
        if ours is None or isinstance(ours, str | bytes | int | float | datetime.date):
            assert ours == theirs or (ours != ours and theirs != theirs), f"{path}: {ours!r} is not {theirs!r}"
        elif isinstance(ours, type | types.ModuleType | types.BuiltinFunctionType | types.FunctionType | torch.dtype):
            assert ours is theirs, f"{path}: {ours!r} is not {theirs!r}"
        elif self.seen_first(ours, theirs, path):
            self.check_inside(ours, theirs, path)

    def seen_first(self, ours, theirs, path):
        twin = self.twins.get(("ours", id(ours))), self.twins.get(("theirs", id(theirs)))
        if twin == (None, None):
            self.alive += [ours, theirs]  # so that no other object gets their identity
            self.twins["ours", id(ours)], self.twins["theirs", id(theirs)] = id(theirs), id(ours)
            return True
        # Python has one empty tuple, and may share tuples of constants.
        assert twin == (id(theirs), id(ours)) or isinstance(ours, tuple), f"{path}: shared in one of the two only"
        return isinstance(ours, tuple)

    def check_inside(self, ours, theirs, path):
        if isinstance(ours, dict):
            assert [(type(key), key) for key in ours] == [(type(key), key) for key in theirs], path
            for key, value in ours.items():
                self.check(value, theirs[key], f"{path}[{key!r}]")
        elif isinstance(ours, list | tuple):
            assert len(ours) == len(theirs), path
            for at, (left, right) in enumerate(zip(ours, theirs, strict=True)):
                self.check(left, right, f"{path}[{at}]")
        elif isinstance(ours, functools.partial):
            self.check(ours.func, theirs.func, f"{path}.func")
            self.check(ours.args, theirs.args, f"{path}.args")
            self.check(ours.keywords, theirs.keywords, f"{path}.keywords")
        elif isinstance(ours, torch.Tensor):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), path
        elif isinstance(ours, torch.nn.Module):
            assert repr(ours) == repr(theirs), path
            self.check(ours._parameters, theirs._parameters, path)
            self.check(ours._buffers, theirs._buffers, path)
            self.check(ours._modules, theirs._modules, path)
        elif not hasattr(ours, "__dict__"):  # a set, a torch.device, a slice
            assert ours == theirs, f"{path}: {ours!r} is not {theirs!r}"
        else:
            self.check(vars(ours), vars(theirs), f"vars({path})")


def same_draws():
    random.seed(3)
    torch.manual_seed(3)


@pytest.fixture
def write(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))

    def write_file(text: str) -> Path:
        file = tmp_path / "params.yaml"
        file.write_text(textwrap.dedent(text), encoding="utf-8")
        return file

    return write_file


@pytest.mark.parametrize("group", DOCUMENTS)
def test_a_document_gives_the_same_objects(write, group, subtests):
    for name, text in DOCUMENTS[group].items():
        with subtests.test(name):
            file = write(text)
            same_draws()
            theirs = hyperpyyaml_objects(file)
            drawn = random.random(), torch.rand(1)
            same_draws()
            ours = load_hparams(file, trust=TRUST)
            assert (random.random(), torch.rand(1)) == drawn
            Comparison().check(dict(ours), dict(theirs))


# The others make data or models, or refer to attributes of attributes, which HyperPyYAML has no words for.
@pytest.mark.parametrize("task", ["adversarial", "image_classification"])
def test_the_yaml_of_a_recipe_gives_the_same_objects(task):
    pytest.importorskip("sklearn", reason="the recipe's data needs the extra 'recipes'")
    file = REPOSITORY / "configs" / f"{task}.yaml"
    with recipe_modules(task):
        seed_everything(1234)
        theirs = hyperpyyaml_objects(file)
        seed_everything(1234)
        Comparison().check(dict(load_hparams(file, trust=("data", "model"))), dict(theirs))


def test_what_differs_on_purpose(write, subtests):
    for name, (text, theirs, ours) in DIFFERENCES.items():
        with subtests.test(name):
            file = write(text)
            if isinstance(theirs, type):
                with pytest.raises(theirs):
                    hyperpyyaml_objects(file)
            else:
                Comparison().check(dict(hyperpyyaml_objects(file)), theirs)
            if isinstance(ours, str):
                with pytest.raises(ConfigError, match=ours):
                    load_hparams(file)
            else:
                Comparison().check(dict(load_hparams(file)), ours)


def test_what_hyperpyyaml_refuses_is_told_with_its_line(write, subtests):
    for name, text in REFUSED.items():
        file = write(text)
        with subtests.test(name):
            with pytest.raises(Exception):  # noqa: B017  (of many kinds)
                hyperpyyaml_objects(file)
            with pytest.raises(ConfigError, match=rf"^{re.escape(str(file))}:(\d+:|.*empty)"):
                load_hparams(file, trust=TRUST)


def test_the_comparison_sees_what_differs():
    shared = [1]
    pairs = [
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([shared, shared], [[1], [1]]),
        ([[1], [1]], [shared, shared]),
        ((1, 2), [1, 2]),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (functools.partial(max, key=1), functools.partial(max, key=2)),
        (torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)),
        (Keeper(x=[1]), Keeper(x=[2])),
        (Keeper(x=1), Keeper(y=1)),
    ]
    for ours, theirs in pairs:
        with pytest.raises(AssertionError):
            Comparison().check(ours, theirs)
        Comparison().check(ours, ours)
