"""What a recipe's command line may ask for instead of a run, as a user types it."""

import json
import os
import re
from subprocess import PIPE, CompletedProcess

import pytest
from programs import DEADLINE_SECONDS, Program, run_python
from repository import REPOSITORY
from ruamel.yaml import YAML
from work import at_most

from amp_recipes.commands.requests import shown
from amp_recipes.config import check

SCRIPT = """\
from amp_recipes import load_hparams, parse_arguments

file, run_opts, overrides = parse_arguments()
hparams = load_hparams(file, overrides, trust=("fractions",))
print("built", hparams["model"], sorted(hparams))
"""
YAML_TEXT = """\
seed: 1  # of everything
lr: 0.1  # at the start
half: !ref <lr> / 2
part: !include:part.yaml
model: !new:parts.Model
  hidden: 4  # units
share: !name:fractions.Fraction
counted: !applyref:parts.count [3]
"""
MODULE = """\
class Model:
    def __init__(self, hidden: int):
        open("built.txt", "w").close()

def count(number):
    open("called.txt", "w").close()
    return number
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "parts.py").write_text(MODULE)
    (tmp_path / "part.yaml").write_text("width: 8\n")
    (tmp_path / "x.yaml").write_text(YAML_TEXT)

    def run(*words: str) -> CompletedProcess:
        return run_python("train.py", "x.yaml", *words, cwd=tmp_path)

    run.folder = tmp_path
    return run


def test_check_says_that_all_is_right_and_builds_nothing(recipe):
    done = recipe("--check", "--part.width=9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("x.yaml: no mistakes (") and "built" not in done.stdout
    assert not (recipe.folder / "built.txt").exists() and not (recipe.folder / "called.txt").exists()


def test_mistakes_end_the_script_without_a_traceback(recipe):
    done = recipe("--check", "--model.hiden=3", "--part.witdh=9", "--seed=x")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and done.stderr.startswith("train.py: ")
    done = recipe("--model.hiden=3", "--part.witdh=9")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "Did you mean --model.hidden?" in done.stderr and "Did you mean --part.width?" in done.stderr


def test_an_exception_of_the_recipes_own_code_keeps_its_traceback(recipe):
    (recipe.folder / "parts.py").write_text(MODULE.replace('open("built.txt", "w").close()', "1 / 0"))
    done = recipe()
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr and "x.yaml:5:" in done.stderr


def test_show_config_prints_a_yaml_with_the_source_of_each_value(recipe):
    done = recipe("--show-config", "--lr=0.5", "--precision=bf16")
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines() if ":" in line)
    assert lines["lr"].split("#")[0].strip() == "0.5" and lines["lr"].endswith("# command line")
    assert lines["half"].split("#")[0].strip() == "0.25" and lines["half"].endswith("# x.yaml:3")
    assert lines["  width"].endswith("# part.yaml:1") or lines["  width"].endswith("# ./part.yaml:1")
    assert lines["precision"].endswith("# command line")
    assert lines["# max_grad_norm"].strip() == "5"
    assert "counted" in done.stdout and not (recipe.folder / "called.txt").exists()
    assert YAML(typ="safe", pure=True).compose(done.stdout)


def test_trust_of_the_command_line_is_added_to_that_of_the_script(recipe):
    (recipe.folder / "x.yaml").write_text(YAML_TEXT + "more: !name:string.capwords\n")
    done = recipe("--check")
    assert done.returncode == 1 and "--trust string" in done.stderr
    assert recipe("--check", "--trust", "string").returncode == 0
    assert recipe("--check", "--trust=json,string").returncode == 0


def test_help_shows_the_keys_of_the_yaml_with_values_and_comments(recipe):
    done = recipe("--help")
    assert done.returncode == 0
    for words in ("--max_grad_norm", "--trust", "--sweep", "lr", "0.1", "at the start", "model.hidden", "units"):
        assert words in done.stdout
    assert not (recipe.folder / "built.txt").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["train.py", "x.yaml", "--help"],
        ["train.py", "x.yaml", "--show-config"],
        ["train.py", "x.yaml", "--check"],
        ["-m", "amp_recipes.commands.cli", "--help"],
        ["-m", "amp_recipes.commands.cli", "completion", "bash"],
    ],
    ids=" ".join,
)
def test_a_reader_that_leaves_is_no_mistake(recipe, words):
    """As `| head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with Program(*words, cwd=recipe.folder, stdout=writer, stderr=PIPE) as program:
        os.close(writer)
        _, errors = program.communicate(timeout=DEADLINE_SECONDS)
    assert (program.returncode, errors) == (0, "")


def test_a_yaml_may_name_a_class_of_the_script_if_that_only_runs_as_a_script(recipe):
    (recipe.folder / "x.yaml").write_text("model: !new:train.Own\n")
    done = recipe()
    assert done.returncode == 1 and done.stderr.count("Traceback") == 0
    assert "train.Own: the module train cannot be imported" in done.stderr and "__name__ == '__main__'" in done.stderr
    head, body = SCRIPT.split("\n\n", 1)
    body = body.replace("\n", "\n    ").rstrip()
    (recipe.folder / "train.py").write_text(
        f"{head}\n\nclass Own:\n    pass\n\nif __name__ == '__main__':\n    {body}\n"
    )
    assert "built <train.Own object" in recipe().stdout


def test_check_names_the_keys_that_nothing_reads(recipe):
    (recipe.folder / "x.yaml").write_text(YAML_TEXT + "sead: 3\nown: !ref <lr>\n")
    done = recipe("--check")
    assert done.returncode == 0
    assert "Keys that nothing seems to read: half, part, share, counted, sead, own." in done.stdout


def test_the_config_of_a_wide_yaml_is_shown_in_linear_time(tmp_path):
    # It was quadratic when the source of each key was looked up by its path.
    (tmp_path / "wide.yaml").write_text("".join(f"k{n}: v\n" for n in range(1000)))
    settings = check(tmp_path / "wide.yaml")
    with at_most(calls=1_200_000):
        text = shown(settings)
    assert text.count(f"# {tmp_path / 'wide.yaml'}:") == 1000


def test_two_commands_at_once_are_refused(recipe):
    done = recipe("--check", "--show-config")
    assert done.returncode == 1 and "cannot be combined" in done.stderr


def test_the_command_of_the_package_checks_without_running_the_script(recipe):
    (recipe.folder / "train.py").write_text("1 / 0")
    command = ["-m", "amp_recipes.commands.cli", "check", "train.py", "x.yaml", "--lr=2"]
    done = run_python(*command, cwd=recipe.folder)
    assert done.returncode == 1 and "--trust fractions" in done.stderr
    done = run_python(*command, "--trust", "fractions", cwd=recipe.folder)
    assert done.returncode == 0, done.stderr
    assert "no mistakes (" in done.stdout


# Each run of a sweep is a fresh interpreter: in the default tier it ends before it has read its YAML.
@pytest.mark.parametrize(
    "begin", ['import sys\n"--sweep" in sys.argv or sys.exit()\n', pytest.param("", marks=pytest.mark.extended)]
)
def test_a_sweep_may_give_what_the_yaml_leaves_open(recipe, begin):
    (recipe.folder / "train.py").write_text(begin + SCRIPT)
    (recipe.folder / "x.yaml").write_text("output_folder: out\nmodel: !PLACEHOLDER\n")
    done = recipe("--sweep", "model=1,2")
    assert done.returncode == 0, done.stdout + done.stderr
    folders = sorted(path.name for path in (recipe.folder / "out" / "sweep").iterdir() if path.is_dir())
    assert folders == ["model=1", "model=2"]
    done = recipe("--sweep", "modle=1,2")
    assert done.returncode == 1 and "model is a placeholder" in done.stderr


@pytest.mark.extended  # each of its runs is a fresh interpreter
def test_a_sweep_trains_each_combination_in_a_folder_of_its_own(tmp_path):
    script = REPOSITORY / "recipes/image_classification/train.py"
    yaml = REPOSITORY / "configs/image_classification.yaml"
    words = ["--debug", "--debug_epochs=1", "--noprogressbar", f"--output_folder={tmp_path / 'run'}"]
    done = run_python(script, yaml, *words, "--sweep", "lr=1e-3,1e-4", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folders = sorted(path.parent for path in (tmp_path / "run" / "sweep").glob("*/hyperparams.yaml"))
    rates = [re.search(r"^lr: (.*)$", (folder / "hyperparams.yaml").read_text(), re.M)[1] for folder in folders]
    assert sorted(map(float, rates)) == [1e-4, 1e-3]
    assert all("test" in json.loads((folder / "debug" / "summary.json").read_text())["last"] for folder in folders)
    assert "accuracy" in done.stdout


TRAINED = """\
import torch
from amp_recipes import Brain, load_hparams, parse_arguments

class Regression(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return predictions.square().mean()

if __name__ == "__main__":
    file, options, overrides = parse_arguments()
    hparams = load_hparams(file, overrides)
    data = torch.utils.data.TensorDataset(torch.ones(8, 3))
    brain = Regression({"model": hparams["model"]}, hparams["opt_class"], hparams, options)
    brain.fit(range(1), data, train_loader_kwargs={**hparams["loader_kwargs"], "shuffle": True})
"""
TRAINED_YAML = """\
lr: 0.1
batch_size: 4
device: cpu
model: !new:torch.nn.Sequential
  - !new:torch.nn.Linear {in_features: 3, out_features: 1}
  - !new:torch.nn.Dropout {p: 0.1}
opt_class: !name:torch.optim.Adam
  lr: !ref <lr>
lr_scheduler: !name:torch.optim.lr_scheduler.OneCycleLR {max_lr: 0.1, total_steps: 9}
loader_kwargs:
  batch_size: !ref <batch_size>
"""


def test_a_value_that_an_object_refuses_is_told_with_its_key_and_line(tmp_path, subtests):
    """Also where the object is built after the YAML: by the Brain."""
    (tmp_path / "train.py").write_text(TRAINED)
    (tmp_path / "x.yaml").write_text(TRAINED_YAML)
    adam = "!name:torch.optim.Adam cannot be built: ValueError: Invalid learning rate: -1"
    dropout = "!new:torch.nn.Dropout cannot be built: ValueError: dropout probability has to be between 0 and 1"
    loader = "Training set: the loader cannot be created: batch_size should be a positive integer"
    scheduler = "!name:torch.optim.lr_scheduler.OneCycleLR cannot be built: ValueError: Expected positive"
    for option, message in {
        "--lr=-1": f"train.py: x.yaml:7:12: opt_class: {adam}",
        "--model.1.p=1.5": f"train.py: x.yaml:6:5: model.1: {dropout}",
        "--batch_size=0": f"train.py: x.yaml:11: loader_kwargs.batch_size: {loader}",
        "--lr_scheduler.total_steps=-1": f"train.py: x.yaml:9:15: lr_scheduler: {scheduler}",
    }.items():
        with subtests.test(option):
            done = run_python("train.py", "x.yaml", option, "--noprogressbar", cwd=tmp_path)
            assert done.returncode == 1 and done.stderr.startswith(message), done.stderr
            assert "Traceback" not in done.stderr
