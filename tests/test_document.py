"""Reading a YAML file: what is refused, and where its keys stand."""

from pathlib import Path

import pytest

from amp_recipes.config import load_hparams
from amp_recipes.config.document import read_document
from amp_recipes.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "params.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


@pytest.mark.parametrize(
    ("text", "start", "message"),
    [
        ("a: 1\nb: [1, 2\nc: 3\n", ":3: not valid YAML: ", "expected"),
        ("a: 1\na: 2\n", ":2: not valid YAML: ", "duplicate key"),
        ("a: &x 1\nb: *y\n", ":2: not valid YAML: ", "undefined alias"),
        ("", ": the top level must be a mapping", "empty"),
        ("- 1\n", ": the top level must be a mapping", "CommentedSeq"),
        ("!new:torch.nn.ReLU {}\n", ": the top level must be a mapping", "!new:torch.nn.ReLU"),
        ("a: 1\n2: b\n", ":2: 2 must be a string", ""),
        ("a: !ref <a>\n", ":1: a: <a> leads back to itself", ""),
        ("x: 1\na: {b: !ref <c>}\nc: !ref <a[b]>\n", "", "3: c: <a[b]> leads back to itself"),
        ("a: !ref x<b>\nb: !ref <a>y\n", ": cannot be resolved: RecursionError", ""),
    ],
)
def test_a_file_that_is_no_hyperparameter_file_is_refused_with_its_line(write, text, start, message):
    file = write(text)
    with pytest.raises(ConfigError) as caught:
        load_hparams(file)
    assert start == "" or str(caught.value).startswith(file + start)
    assert message in str(caught.value)


def test_a_missing_file_suggests_the_nearest(write, tmp_path):
    file = write("a: 1\n")
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*Did you mean .*params\.yaml\?"):
        load_hparams(tmp_path / "parms.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_hparams(Path(file).parent)


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"a: \xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"x\.yaml.*not valid YAML"):
        load_hparams(tmp_path / "x.yaml")


def test_each_key_has_its_line_also_in_lists_and_below_anchors(write):
    file = write("a: &x {b: 1}\nc:\n  - d\n  - e: *x\n\nf:\n  <<: *x\n  g: 2\n")
    document = read_document(file)
    expected = {"a": 1, "a.b": 1, "c": 2, "c.0": 3, "c.1": 4, "c.1.e": 4, "f": 6, "f.g": 8}
    assert {".".join(path): line for path, line in document.lines.items()} == expected
    assert document.where(("f", "b")) == f"{file}:6"  # a merged key has no line of its own
    assert document.where(("nowhere",)) == file


def test_anchors_that_multiply_are_walked_once(write):
    # Ten levels of ten aliases each: 10**10 paths for whoever follows them all.
    levels = [f"l{n}: &l{n} [{', '.join(['*l' + str(n - 1)] * 10)}]" for n in range(1, 11)]
    document = read_document(write("\n".join(["l0: &l0 [x]", *levels])))
    assert len(document.lines) < 200
