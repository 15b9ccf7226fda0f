"""Whatever a YAML says: a result or a ConfigError, and nothing is run, written or imported on the way.

12 examples of each of five kinds by default, 250 in the extended tier, 5,000 by night.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from repository import REPOSITORY

from amp_recipes.config import check, load_hparams, parse_arguments
from amp_recipes.errors import ConfigError

REAL = (REPOSITORY / "configs" / "image_classification.yaml").read_text(encoding="utf-8")


class Guard:
    """Hears what Python itself reports of a load: programs started, files opened for writing, code compiled.

    An audit hook stays for the life of the process, so there is one, and it listens only inside a `with`.
    """

    def __init__(self) -> None:
        self.thread: int | None = None
        self.heard: list[str] = []
        sys.addaudithook(self)

    def __enter__(self) -> Guard:
        self.heard, self.thread = [], threading.get_ident()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread = None

    def __call__(self, event: str, arguments: tuple) -> None:
        if self.thread != threading.get_ident():
            return
        if event == "open":
            path, mode, flags = arguments
            if (mode and set(mode) & set("wax+")) or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self.heard.append(f"open {path} {mode} {flags}")
        elif event == "import" and arguments[0].partition(".")[0] in FORBIDDEN_MODULES:
            self.heard.append(f"import {arguments[0]}")
        elif event.partition(".")[0] in FORBIDDEN_EVENTS or event in FORBIDDEN_EVENTS:
            self.heard.append(f"{event} {arguments}"[:200])


FORBIDDEN_MODULES = frozenset({"antigravity", "this", "pty", "turtle", "fuzz_side_effect", "idlelib", "lib2to3"})
FORBIDDEN_EVENTS = frozenset(
    {
        *("subprocess", "shutil", "socket", "ctypes", "urllib", "sqlite3", "webbrowser", "tempfile"),
        *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.kill", "os.remove"),
        *("os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.putenv", "os.truncate"),
        *("os.chdir", "pty.spawn", "pickle.find_class", "builtins.input", "signal.pthread_kill"),
    }
)
guard = Guard()
names = itertools.count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("fuzz")
    (root / "configs").mkdir()
    (root / "configs" / "other.yaml").write_text("x: 1\ny: !ref <x> + 1\nz: {w: [1, 2]}\n")
    (root / "configs" / "hostile.yaml").write_text("x: !apply:os.system [ls]\n")
    (root / "secret.yaml").write_text("password: 1\n")
    (root / "fuzz_side_effect.py").write_text("open('fuzz_was_here', 'w')\n")
    sys.path.insert(0, str(root))
    with suppress(ValueError, TypeError):
        torch.optim.SGD([[1e3]])  # the first optimizer of a process makes a folder for torch's compiler
    yield root / "configs"
    sys.path.remove(str(root))


def run(folder: Path, text: str | bytes, overrides=None, through=None) -> None:
    """Check and load a text: only a ConfigError may come, and the guard must have heard nothing."""
    file = folder / "main.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    state = random.getstate()
    ended = []
    for read in (check, load_hparams):
        with guard:
            try:
                given_overrides = parse_arguments([str(file), *through])[2] if through else overrides
                read(str(file), given_overrides)
                ended.append(True)
            except ConfigError as error:
                str(error).encode("utf-8", "backslashreplace")
                ended.append(False)
        assert not guard.heard
    random.setstate(state)
    if ended[1]:  # what loads has nothing that a check would report
        assert ended[0]


# Text that means something to YAML, to HyperPyYAML or to Python.
ODD = st.sampled_from(
    [
        *(
            "1",
            "1.5",
            "-0",
            "1e3",
            "1e-3",
            ".inf",
            ".nan",
            "0x1f",
            "0o17",
            "1_000",
            "0b11",
            "null",
            "~",
            "",
            "true",
            "yes",
        ),
        *("on", "2024-01-02", "2024-13-45", "2024-01-02T03:04:05Z", "12:30:45", "(1, 2)", "((1,), 2)", "(", "()", "(a"),
        *("<a>", "<a[b]>", "<a.b>", "<a><b>", "<a>/<b>", "<a> / <b>", "<a> ** <a>", "9**9**9", "<<", "=", "x" * 50),
        *("'1'", '"1"', "'(1, 2)'", '"\\x41\\u0042"', "'it''s'", "|-\n  text", ">\n  text", "*a", "&a 1", "&a [1, *a]"),
        *(
            "!!str 1",
            "!!int x",
            "!!float 1",
            "!!binary aGk=",
            "!!set {a, b}",
            "!!omap [a: 1]",
            "!!timestamp 2024-01-02",
        ),
        *(
            "!!python/object/apply:os.system [ls]",
            "(1, !!python/name:os.system )",
            "[1, 2",
            "{a: 1",
            "]",
            "}",
            "%x",
            "@x",
        ),
        *("\t1", "# x", "é", "\u2028", "\U0001f600", "\x07", "\ud800", "9" * 5000, "0x" + "f" * 5000, "-", "?", ":"),
    ]
)
TARGETS = st.sampled_from(
    [
        *(
            "torch.nn.Linear",
            "torch.nn.ReLU",
            "torch.nn.Sequential",
            "torch.optim.SGD",
            "torch.optim.Adam",
            "torch.float32",
        ),
        *(
            "torch.nn.functional.relu",
            "torch.nn.Module.apply",
            "torch.load",
            "torch.hub.load",
            "torch.os.system",
            "torch",
        ),
        *(
            "torch.nn.Lineer",
            "torch.nn",
            "torch.zeros",
            "torch.device",
            "torch.nn.Parameter",
            "torch.utils.data.DataLoader",
        ),
        *(
            "collections.Counter",
            "collections.OrderedDict",
            "collections.namedtuple",
            "collections.defaultdict",
            "math.pi",
        ),
        *(
            "math.sqrt",
            "operator.add",
            "operator.attrgetter",
            "dict",
            "list",
            "int",
            "str",
            "type",
            "object",
            "eval",
            "open",
        ),
        *(
            "os.system",
            "os.path.join",
            "os",
            "subprocess.run",
            "pathlib.Path",
            "pathlib.Path.touch",
            "functools.partial",
        ),
        *(
            "fuzz_side_effect",
            "fuzz_side_effect.x",
            "amp_recipes.EpochCounter",
            "amp_recipes.load_hparams",
            "antigravity.x",
        ),
        *(
            "getattr",
            "builtins.getattr",
            "random.Random",
            "datetime.date",
            "",
            ".",
            "a..b",
            "__main__.x",
            "tests.x",
            "this",
        ),
        *(
            "test_yaml_fuzz.Guard",
            "test_yaml_fuzz.guard.heard.append",
            "conftest.pytest.main",
            "numpy.load",
            "é.x",
            "a b",
        ),
        *(
            "fractions.Fraction",
            "complex",
            "slice",
            "frozenset",
            "zip",
            "sorted",
            "max",
            "len",
            "round",
            "abs",
            "divmod",
        ),
    ]
)
KEYS = st.sampled_from(
    [*"abcde", "lr", "seed", "precision", "__a", "x.y", "1", "null", "true", "<<", "'q'", "? [1]", "é"]
)
TAGS = st.sampled_from(
    ["!new:", "!name:", "!apply:", "!applyref:", "!module:", "!nwe:", "!!", "!", "!<tag:x>", "!python/x:"]
)
PLAIN_TAGS = st.sampled_from(
    ["!ref", "!copy", "!tuple", "!PLACEHOLDER", "!include:other.yaml", "!include:hostile.yaml", "!reff"]
)
INCLUDES = st.sampled_from(
    ["other.yaml", "main.yaml", "../secret.yaml", "/etc/passwd", "/dev/zero", ".", "nothing.yaml", ""]
)
REFERENCES = st.sampled_from(
    [
        *(
            "<a>",
            "<b>",
            "<c[a]>",
            "<a[0]>",
            "<a[b][c]>",
            "<a.b>",
            "<a.__class__>",
            "<d.weight>",
            "<>",
            "<a",
            "<a>x",
            "x<a>",
        ),
        *(
            "<a> + 1",
            "<a> * <b>",
            "<a>/<b>",
            "<a> / 0",
            "-<a>",
            "<a>**<b>**<c>",
            "(<a> + 2) * 3",
            "<nothing>",
            "1 + 1",
            "",
        ),
    ]
)


@st.composite
def flow(draw, depth=3):
    """A value in flow style, as HyperPyYAML would read it, or nearly."""
    kind = draw(st.integers(0, 9))
    if depth == 0 or kind <= 2:
        return draw(ODD).replace("\n", " ")
    if kind == 3:
        return f"{draw(PLAIN_TAGS)} {draw(REFERENCES)}"
    inner = flow(depth=depth - 1)
    if kind == 4:
        return "[" + ", ".join(draw(st.lists(inner, max_size=3))) + "]"
    if kind == 5:
        return "{" + ", ".join(f"{draw(KEYS)}: {draw(inner)}" for _ in range(draw(st.integers(0, 3)))) + "}"
    if kind == 6:
        return f"!include:{draw(INCLUDES)}"
    if kind == 7:
        return f"&{draw(st.sampled_from('ab'))} {draw(inner)}"
    arguments = draw(st.sampled_from(["", " {}", " []"])) if draw(st.booleans()) else f" [{draw(inner)}, {draw(inner)}]"
    if draw(st.booleans()):
        arguments = f" {{{draw(KEYS)}: {draw(inner)}}}"
    return f"{draw(TAGS)}{draw(TARGETS)}{arguments}"


@st.composite
def document(draw):
    """A whole YAML of a few keys, in block style, some with blocks below them."""
    lines = []
    for _ in range(draw(st.integers(1, 6))):
        key = draw(KEYS)
        if draw(st.integers(0, 3)) == 0:
            head = draw(st.sampled_from(["", " &a", " !include:other.yaml"])) or f" {draw(TAGS)}{draw(TARGETS)}"
            lines.append(f"{key}:{head}")
            item = draw(st.booleans())
            for _ in range(draw(st.integers(1, 3))):
                lines.append(f"  - {draw(flow())}" if item else f"  {draw(KEYS)}: {draw(flow())}")
        else:
            lines.append(f"{key}: {draw(flow())}")
    return "\n".join(lines) + draw(st.sampled_from(["\n", "", "\n...\n", "\n---\nb: 1\n", "\n# end"]))


# Objects that do load, so that most documents get as far as being built.
OBJECTS = [
    *(
        "!new:torch.nn.Linear [2, 3]",
        "!new:torch.nn.Linear {in_features: 2, out_features: !ref <n>}",
        "!new:torch.nn.ReLU",
    ),
    *(
        "!new:torch.nn.Sequential [!new:torch.nn.ReLU {}, !ref <model>]",
        "!name:torch.optim.SGD {lr: 0.1}",
        "!module:torch.nn.functional",
    ),
    *(
        "!name:torch.nn.functional.relu",
        "!apply:torch.zeros [2, 3]",
        "!name:torch.float32",
        "!new:collections.Counter {x: 1}",
    ),
    *(
        "!apply:math.sqrt [!ref <n>]",
        "!apply:operator.add [1, 2]",
        "!new:dict {x: !ref <sizes>}",
        "!new:list [!ref <sizes>]",
    ),
    *("!applyref:math.sqrt [4]", "!applyref:os.path.join [a, !ref <name>]", "!new:amp_recipes.EpochCounter {limit: 3}"),
    *(
        "!copy <sizes>",
        "!ref <sizes>",
        "!ref <n> * 2",
        "!ref <name>/<n>",
        "!ref <model.weight>",
        "!ref <nested[x]>",
        "(1, 2.5)",
    ),
    *("!tuple [1, !ref <n>]", "!include:other.yaml", "!include:other.yaml {x: 3}", "!new:random.Random [1]", "*anchor"),
    *("!new:torch.nn.ModuleDict {modules: {a: !ref <model>}}", "!new:torch.utils.data.DataLoader {dataset: [1, 2]}"),
]
SOUND = """\
n: &anchor 3
name: run
sizes: [1, 2, !ref <n>]
nested: {x: 1, y: [a, b]}
model: !new:torch.nn.Linear {in_features: 2, out_features: 2}
"""


@st.composite
def sound(draw):
    """A YAML that loads, but for what is put into one value in three."""
    values = draw(st.lists(st.sampled_from(OBJECTS), min_size=1, max_size=8))
    if draw(st.integers(0, 2)) == 0:
        values.append(draw(flow(depth=2)))
    return SOUND + "".join(f"k{number}: {value}\n" for number, value in enumerate(values))


@st.composite
def mutated(draw):
    """A YAML that would load, with pieces lost, doubled, moved or replaced."""
    whole = SOUND + "".join(f"k{number}: {value}\n" for number, value in enumerate(OBJECTS))
    text = draw(st.sampled_from([REAL, whole, whole]))
    for _ in range(draw(st.integers(1, 2))):
        start = draw(st.integers(0, len(text)))
        end = min(len(text), start + draw(st.integers(0, 12)))
        piece = draw(
            st.sampled_from([text[start:end] * 2, "", text[start:end][::-1]]) | ODD | REFERENCES | flow(depth=1)
        )
        text = text[:start] + piece + text[end:]
    return text


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | ODD
VALUES = st.recursive(
    PLAIN | st.binary(max_size=3) | st.just(object()) | st.just(os.system) | st.dates(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | PLAIN, inner, max_size=3) | st.tuples(inner, inner)
    ),
    max_leaves=6,
)
OVERRIDES = (
    st.none()
    | st.dictionaries(
        KEYS | st.sampled_from(["n", "name", "sizes.0", "nested.x", "k0", "model.bias", "a..b", ".", ""]),
        VALUES,
        max_size=3,
    )
    | document()
    | st.text(max_size=30)
)
ARGUMENTS = st.lists(
    st.builds(
        "--{}={}".format,
        KEYS | st.sampled_from(["n", "name", "sizes.0", "nested.x", "k0", "precision", "seed"]),
        ODD | flow(),
    )
    | st.sampled_from(["--lr", "1", "--debug", "-x", "--", "--=1", "x"]),
    min_size=1,
    max_size=3,
)
RAW = (
    st.text(max_size=200)
    | st.text(alphabet="!&*[]{}:,#'\"|>%@-?<>() \t\nax1.~=\\", max_size=200)
    | st.binary(max_size=200)
)


KINDS = {
    "a structured document": {"text": document(), "overrides": OVERRIDES},
    "a document that nearly loads": {"text": sound(), "overrides": OVERRIDES},
    "a structured document with a command line": {"text": sound() | mutated(), "through": ARGUMENTS},
    "a mutated recipe": {"text": mutated(), "overrides": OVERRIDES},
    "any text": {"text": RAW, "overrides": OVERRIDES},
}


@pytest.mark.parametrize(
    "examples",
    [
        8,
        pytest.param(250, marks=pytest.mark.extended),
        pytest.param(5_000, marks=[pytest.mark.extended, pytest.mark.nightly]),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_yaml_is_loaded_or_refused_and_nothing_else_happens(folder, kind, examples):
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(**KINDS[kind])
    def attempt(**drawn):
        run(folder, **drawn)

    attempt()


def test_the_guard_hears_what_it_is_for(tmp_path):
    with guard:
        (tmp_path / "x").write_text("x")
        os.system("true")
        __import__("antigravity") if False else sys.audit("import", "antigravity", None, None, None, None)
    assert [line.split()[0] for line in guard.heard] == ["open", "os.system", "import"]
