"""Every mistake in overrides and YAML, with its line, before anything is built."""

import pytest
import torch

from amp_recipes.config import load_hparams, parse_arguments
from amp_recipes.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write_file(text: str, name: str = "params.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


def mistakes_of(file: str, overrides=None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_hparams(file, overrides)
    lines = [line.strip() for line in str(caught.value).splitlines()]
    if len(lines) > 1:
        assert lines.pop(0) == f"{len(lines)} mistakes in {file}:"
    return lines


def test_every_mistake_is_reported_at_once_with_its_line_before_anything_is_built(write, tmp_path):
    built = tmp_path / "built"
    file = write(
        f"""\
lr: 0.1
precision: bf61
data: !PLACEHOLDER
model: !new:torch.nn.Linear
  in_features: 4
  out_features: !ref <hiden>
hidden: 3
made: !apply:os.mkdir [{built}]
items: [1, {{x: !PLACEHOLDER }}]
max_grad_norm: much
"""
    )
    argv = [file, "--model.in_featurs=3", "--max-grad-norm=1", "--lr.x=1", "--items.7=1", "--in_features=1"]
    assert mistakes_of(file, parse_arguments(argv)[2]) == [
        f"{file}:4: --model.in_featurs is neither a key of the YAML nor a run option. "
        "Did you mean --model.in_features?",
        f"{file}: --max-grad-norm is neither a key of the YAML nor a run option. Did you mean --max_grad_norm?",
        f"{file}:1: --lr.x: lr is 0.1, which has no keys.",
        f"{file}:9: --items.7: items is a list of 2; expected one of its indices, from 0.",
        f"{file}: --in_features is neither a key of the YAML nor a run option. Did you mean --model.in_features?",
        f"{file}:3: data is a placeholder that needs a value: --data=...",
        f"{file}:6: model.out_features: <hiden> refers to a key that is not there. Did you mean hidden?",
        f"{file}:9: items.1.x is a placeholder that needs a value: --items.1.x=...",
        f"{file}:2: precision is 'bf61', but must be fp32, bf16, fp16 or auto. Did you mean bf16?",
        f"{file}:10: max_grad_norm is 'much', but must be a number.",
    ]
    assert not built.exists()


def test_a_typo_at_the_top_suggests_run_options_and_keys_of_the_yaml(write):
    file = write("number_of_epochs: 3\n")
    argv = [file, "--prec", "fp16", "--number_of_epoch", "4"]
    lines = mistakes_of(file, parse_arguments(argv)[2])
    assert lines[0].endswith("Did you mean --precision?")
    assert lines[1].endswith("Did you mean --number_of_epochs?")


def test_an_override_below_a_reference_names_the_reference(write):
    file = write("base: {lr: 1}\nopt: !ref <base>\n")
    assert mistakes_of(file, {"opt.lr": 2}) == [f"{file}:2: opt.lr: opt is !ref <base>; override what it refers to."]


def test_a_value_that_yaml_cannot_hold_is_refused(write):
    file = write("a: 1\n")
    (line,) = mistakes_of(file, {"a": [torch.nn.ReLU()]})
    assert line.startswith(f"{file}:1: a is [ReLU()], a list; expected null, true or false")


def test_a_run_option_that_a_reference_sets_wrong_is_found(write):
    file = write("clip: much\nmax_grad_norm: !ref <clip>\n")
    assert mistakes_of(file) == [f"{file}:2: max_grad_norm is 'much', but must be a number."]


def test_mistakes_in_and_below_included_files_are_reported_with_their_lines(write, tmp_path):
    net = write("hidden: 4\nlayers: [1, 2]\ndata: !PLACEHOLDER\nbad: !ref <hiden>\n", "net.yaml")
    file = write("lr: 1\nnet: !include:net.yaml {lr: !ref <lr>}\ngone: !include:nit.yaml\nself: !include:params.yaml\n")
    argv = [file, "--net.hiden=8", "--net.layers.0=3"]
    lines = mistakes_of(file, parse_arguments(argv)[2])
    assert lines == [
        f"{net}: --net.hiden is not a key of the included file. Did you mean --net.hidden?",
        f"{net}:2: --net.layers has keys below it that only {net} itself can change.",
        f"{net}:3: net.data is a placeholder that needs a value: --net.data=...",
        f"{net}:4: net.bad: <hiden> refers to a key that is not there. Did you mean hidden?",
        f"{file}:3: gone: {tmp_path}/nit.yaml: cannot be read: No such file or directory. Did you mean {net}?",
        f"{file}:4: self: {file} includes itself.",
    ]


@pytest.mark.parametrize("overrides", [3, ["a"], "[1]", "a: ["])
def test_overrides_of_the_wrong_form_are_refused(write, overrides):
    with pytest.raises(ConfigError, match=r"^overrides"):
        load_hparams(write("a: 1\n"), overrides)
