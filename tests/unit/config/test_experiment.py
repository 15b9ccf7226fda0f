"""What a run writes down about itself, and that it can be repeated from it."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from processes import in_a_child
from programs import run_python

from amp_recipes import Brain, EpochCounter
from amp_recipes.config import (
    RunOptions,
    create_experiment_directory,
    ensure_experiment_directory,
    experiment,
    load_hparams,
    parse_arguments,
)
from amp_recipes.config.experiment import describe_environment, log_to
from amp_recipes.errors import CheckpointError, ConfigError
from amp_recipes.files.folder_lock import unlock_folder

YAML_TEXT = """\
# the recipe's own comment
precision: fp32
data_folder: !PLACEHOLDER
lr: 1e-4
half: !ref <lr> / 2
__base: 3
model: !new:collections.Counter {size: !ref <__base>}
net: !include:net.yaml
"""


pytestmark = pytest.mark.usefixtures("logging_as_before")


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "net.yaml").write_text("hidden: 4\ntwice: !ref <hidden> * 2\n")
    file = tmp_path / "params.yaml"
    file.write_text(YAML_TEXT)
    argv = [str(file), "--data_folder=a: b", "--precision=bf16", "--seed=3", "--net.hidden=7", "--lr=3e-5"]
    return file, parse_arguments(argv)[2]


def test_a_run_without_a_folder_writes_nothing(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    assert create_experiment_directory(None, *recipe) is None
    assert sorted(tmp_path.iterdir()) == before


def test_the_resolved_yaml_alone_gives_the_values_of_the_run(recipe, tmp_path):
    file, overrides = recipe
    folder = create_experiment_directory(tmp_path / "new" / "run", str(file), overrides)
    assert folder == tmp_path / "new" / "run"
    (tmp_path / "net.yaml").unlink()  # what was included is now in the resolved file
    again = load_hparams(folder / "hyperparams.yaml")
    assert again.pop("seed") == 3  # the YAML has no such key: the run option is added
    (tmp_path / "net.yaml").write_text("hidden: 4\ntwice: !ref <hidden> * 2\n")
    assert again == load_hparams(file, overrides)
    assert (again["precision"], again["half"], again["net"]["twice"]) == ("bf16", 1.5e-5, 14)


def test_the_original_is_kept_byte_for_byte(recipe, tmp_path):
    file, overrides = recipe
    folder = create_experiment_directory(tmp_path / "run", file, overrides)
    assert (folder / "hyperparams_original.yaml").read_bytes() == YAML_TEXT.encode()


def test_the_saved_overrides_can_be_given_again(recipe, tmp_path):
    file, overrides = recipe
    folder = create_experiment_directory(tmp_path / "run", file, overrides)
    again = load_hparams(file, (folder / "overrides.yaml").read_text())
    assert again == load_hparams(file, overrides) | {"seed": 3}


@pytest.mark.parametrize("overrides", [None, {"lr": 0.5}, "lr: 0.5\n"])
def test_overrides_of_every_form_are_written(tmp_path, overrides):
    file = tmp_path / "p.yaml"
    file.write_text("lr: 0.1\n")
    folder = create_experiment_directory(tmp_path / "run", file, overrides)
    expected = {"lr": 0.5 if overrides else 0.1}
    assert load_hparams(file, (folder / "overrides.yaml").read_text()) == expected
    assert load_hparams(folder / "hyperparams.yaml") == expected


def test_without_a_yaml_only_the_rest_is_written(tmp_path):
    folder = create_experiment_directory(tmp_path / "run")
    assert {file.name for file in folder.iterdir()} == {".lock", "overrides.yaml", "environment.json", "log.txt"}


def test_a_second_call_replaces_the_files_and_leaves_no_temporary_ones(recipe, tmp_path):
    file, overrides = recipe
    create_experiment_directory(tmp_path / "run", file, overrides)
    before = {path.name for path in (tmp_path / "run").iterdir()}
    create_experiment_directory(tmp_path / "run", file, {"data_folder": "x"})
    assert {path.name for path in (tmp_path / "run").iterdir()} == before
    assert load_hparams(tmp_path / "run" / "hyperparams.yaml")["data_folder"] == "x"


def test_a_wrong_yaml_makes_no_folder(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("lr: !PLACEHOLDER\n")
    with pytest.raises(ConfigError, match=r"lr is a placeholder"):
        create_experiment_directory(tmp_path / "run", file)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("blocked", ["run", "run/environment.json", "run/log.txt"])
def test_a_folder_that_cannot_be_written_is_an_error_at_once(tmp_path, blocked):
    if blocked == "run":
        (tmp_path / "run").write_text("a file stands where the folder should")
    else:
        (tmp_path / blocked).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run is not writable: |log.txt is a folder; expected a regular file"):
        create_experiment_directory(tmp_path / "run")
    if blocked != "run":
        assert not list((tmp_path / "run").glob(".*.tmp"))


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert create_experiment_directory(tmp_path / "run") == tmp_path / "run"
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("RANK", "0")
    create_experiment_directory(tmp_path / "run")
    assert (tmp_path / "run").exists()


def test_the_environment_names_versions_devices_and_command(tmp_path):
    folder = create_experiment_directory(tmp_path / "run")
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["packages"]["torch"] == torch.__version__
    assert environment["argv"] == sys.argv
    assert len(environment["gpus"]) == torch.cuda.device_count()
    assert environment["cpu"] and environment["time"].endswith("+00:00")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_git_state_of_the_working_directory_is_told(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert describe_environment()["git"] is None
    git(tmp_path, "init")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert describe_environment()["git"] == {"commit": commit, "dirty": False}
    (tmp_path / "a").write_text("2")
    assert describe_environment()["git"] == {"commit": commit, "dirty": True}
    monkeypatch.setenv("PATH", "")
    assert describe_environment()["git"] is None


def test_records_go_once_to_the_log_of_the_latest_folder(tmp_path):
    log = logging.getLogger("some.recipe")
    for name in ("a", "b", "b"):
        (tmp_path / name).mkdir(exist_ok=True)
        log_to(tmp_path / name / "log.txt")
        log.warning("in %s", name)
    lines = {name: (tmp_path / name / "log.txt").read_text().splitlines() for name in ("a", "b")}
    assert [line.split("some.recipe: ")[1] for line in lines["a"]] == ["in a"]
    assert [line.split("some.recipe: ")[1] for line in lines["b"]] == ["in b", "in b"]


def test_warnings_still_reach_stderr_where_logging_was_not_configured(tmp_path):
    code = (
        "import logging; from amp_recipes.config import create_experiment_directory as create\n"
        f"create({str(tmp_path / 'run')!r})\n"
        "logging.getLogger('amp_recipes.x').info('quiet'); logging.getLogger('recipe').warning('loud')"
    )
    done = run_python("-c", code)
    assert done.stderr == "loud\n"
    text = (tmp_path / "run" / "log.txt").read_text()
    assert "INFO amp_recipes.x: quiet" in text and "WARNING recipe: loud" in text


def test_a_second_run_in_the_folder_is_refused_before_it_writes_anything(tmp_path):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("lr: 0.1\n")
    second.write_text("lr: 0.2\n")
    folder = create_experiment_directory(tmp_path / "run", first)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}
    text = in_a_child(lambda: create_experiment_directory(folder, second))
    assert text.startswith("FolderInUseError") and f"pid {os.getpid()} " in text
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"} == before
    unlock_folder(folder)
    assert in_a_child(lambda: create_experiment_directory(folder, second)) == str(folder)


# ---------------------------------------------------------------------- what a Brain asks for


@pytest.fixture
def another_process(monkeypatch):
    """Makes this process forget what it prepared, as if the next start were in a new one."""
    return lambda: monkeypatch.setattr(experiment, "_prepared", {})


@pytest.fixture
def yaml(tmp_path):
    file = tmp_path / "p.yaml"
    file.write_text("lr: 0.1\nmomentum: 0.9\n")
    return file


def test_hparams_alone_prepare_the_folder_as_the_recipe_would(yaml, tmp_path):
    overrides = parse_arguments([str(yaml), "--lr=0.2", "--precision=bf16"])[2]
    ensure_experiment_directory(tmp_path / "a", load_hparams(yaml, overrides))
    create_experiment_directory(tmp_path / "b", yaml, overrides)
    names = {file.name for file in (tmp_path / "b").iterdir()}
    assert {file.name for file in (tmp_path / "a").iterdir()} == names
    for name in ("hyperparams.yaml", "hyperparams_original.yaml", "overrides.yaml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_changed_hparams_are_refused_and_accepted_without_a_line_of_the_recipe(yaml, tmp_path, another_process):
    run = tmp_path / "run"
    ensure_experiment_directory(run, load_hparams(yaml))
    (run / "save" / "CKPT+000001").mkdir(parents=True)
    another_process()
    ensure_experiment_directory(run, load_hparams(yaml))
    # A notebook changes its settings without a new process.
    with pytest.raises(ConfigError, match=r"lr: 0\.1 -> 0\.2"):
        ensure_experiment_directory(run, load_hparams(yaml, {"lr": 0.2}))
    another_process()
    with pytest.raises(ConfigError, match=r"lr: 0\.1 -> 0\.2"):
        ensure_experiment_directory(run, load_hparams(yaml, {"lr": 0.2}))
    ensure_experiment_directory(run, load_hparams(yaml, {"lr": 0.2, "accept_changes": True}))
    assert load_hparams(run / "hyperparams.yaml")["lr"] == 0.2


def test_settings_with_which_the_run_cannot_go_on_are_not_kept(yaml, tmp_path, another_process):
    """Accepted, but the checkpoint has no scaler: the run still has the settings that it had."""

    class Regression(Brain):
        def compute_forward(self, batch, stage):
            return self.modules.model(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.float().square().mean()

    def start(epochs, *words):
        another_process()
        words = [str(yaml), "--device=cpu", "--noprogressbar", f"--output_folder={tmp_path / 'run'}", *words]
        file, run_opts, overrides = parse_arguments(words)
        hparams = load_hparams(file, overrides)
        opt = lambda parameters: torch.optim.SGD(parameters, hparams["lr"])  # noqa: E731
        brain = Regression({"model": torch.nn.Linear(1, 1)}, opt, hparams, run_opts)
        brain.fit(EpochCounter(epochs), [torch.ones(2, 1)])
        return brain

    start(1)
    before = (tmp_path / "run" / "hyperparams.yaml").read_bytes()
    with pytest.raises(CheckpointError, match=r"no state of scaler.*--init_from"):
        start(2, "--precision=fp16", "--lr=0.2", "--accept_changes")
    assert (tmp_path / "run" / "hyperparams.yaml").read_bytes() == before
    assert start(2).optimizer_step == 2


def test_options_given_in_code_count(yaml, tmp_path, another_process):
    run = tmp_path / "run"
    ensure_experiment_directory(run, load_hparams(yaml), RunOptions(precision="bf16"))
    assert load_hparams(run / "hyperparams.yaml")["precision"] == "bf16"
    (run / "save" / "CKPT+000001").mkdir(parents=True)
    another_process()
    with pytest.raises(ConfigError, match=r"precision: bf16 -> fp32"):
        ensure_experiment_directory(run, load_hparams(yaml))
    overrides = parse_arguments([str(yaml), "--precision=fp16", "--lr=0.1"])[2]
    with pytest.raises(ConfigError, match=r"precision: bf16 -> fp16"):
        ensure_experiment_directory(run, load_hparams(yaml, overrides))
    ensure_experiment_directory(run, load_hparams(yaml, overrides), RunOptions(precision="bf16"))
    changed = load_hparams(yaml, {"momentum": 0.5})
    ensure_experiment_directory(run, changed, RunOptions(precision="bf16", accept_changes=True))
    assert load_hparams(run / "hyperparams.yaml")["momentum"] == 0.5


def test_what_the_recipe_prepared_is_left_alone(yaml, tmp_path):
    run = create_experiment_directory(tmp_path / "run", yaml, {"lr": 0.3})
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file() and file.name != ".lock"}
    (tmp_path / "link").symlink_to(run)
    ensure_experiment_directory(tmp_path / "link", load_hparams(yaml))
    after = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file() and file.name != ".lock"}
    assert after == before


def test_a_second_brain_with_the_same_settings_writes_nothing_again(yaml, tmp_path):
    ensure_experiment_directory(tmp_path / "run", load_hparams(yaml))
    (tmp_path / "run" / "hyperparams.yaml").unlink()
    ensure_experiment_directory(tmp_path / "run", load_hparams(yaml))
    assert not (tmp_path / "run" / "hyperparams.yaml").exists()
    ensure_experiment_directory(tmp_path / "other", load_hparams(yaml))
    assert (tmp_path / "other" / "hyperparams.yaml").exists()


@pytest.mark.parametrize("hparams", [None, {}, {"lr": 1}])
def test_other_hparams_prepare_nothing(hparams, tmp_path):
    ensure_experiment_directory(tmp_path / "run", hparams)
    assert not (tmp_path / "run").exists()


def test_other_ranks_prepare_nothing(yaml, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    ensure_experiment_directory(tmp_path / "run", load_hparams(yaml))
    assert not (tmp_path / "run").exists()


def test_the_yaml_is_kept_as_it_was_loaded_whatever_has_become_of_it(yaml, tmp_path):
    hparams = load_hparams(yaml, {"lr": 0.3})
    yaml.write_text("lr: 7\nnew: !applyref:random.random\n")
    create_experiment_directory(tmp_path / "a", yaml, {"lr": 0.3})
    yaml.unlink()
    ensure_experiment_directory(tmp_path / "b", hparams)
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert (folder / "hyperparams_original.yaml").read_text() == "lr: 0.1\nmomentum: 0.9\n"
        assert load_hparams(folder / "hyperparams.yaml") == {"lr": 0.3, "momentum": 0.9}


def test_a_yaml_that_is_gone_is_said_and_does_not_end_the_run(yaml, tmp_path, caplog, monkeypatch):
    hparams = load_hparams(yaml)
    yaml.unlink()
    monkeypatch.setattr("amp_recipes.config.hparams._loaded", {})  # as in a process that was given pickled hparams
    ensure_experiment_directory(tmp_path / "run", hparams)
    assert "p.yaml no longer exists" in caplog.text and not (tmp_path / "run").exists()
