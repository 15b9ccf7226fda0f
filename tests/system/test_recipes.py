"""What holds for every recipe: short scripts without precision code, YAMLs that tell what they do, exact resumes."""

import ast
import os
import re
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from PIL import Image
from programs import Program, run_python
from recipe_runs import CONFIGS, RECIPES, REPOSITORY, recipe_modules, stage_records

from amp_recipes.commands import child_runs
from amp_recipes.commands.verify_resume import verify
from amp_recipes.config import check

TASKS = sorted(path.name for path in RECIPES.iterdir() if (path / "train.py").is_file())
YAMLS = sorted(path.name for path in CONFIGS.glob("*.yaml"))
HEADER = ("Launch", "Hardware", "Time", "Expect", "Your own")

# Too large for a CPU: the header says that it was not measured. Its script is run with the small YAML.
NOT_RUN = {"language_modeling_124m.yaml"}

# The smallest run of each YAML that still does all that the recipe does: words of the command line.
TINY = {
    "adversarial.yaml": ["--width=4", "--precision=fp16"],
    "finetuning.yaml": [
        *("--pretraining_updates=2", "--max_tokens=16", "--batch_size=4", "--tuning=lora", "--precision=bf16")
    ],
    "image_classification.yaml": ["--model.widths=[4, 8]", "--precision=bf16"],
    "keyword_classification.yaml": [
        *("--width=16", "--model.channels=[4, 4]", "--synthetic.counts=[30, 10, 10]"),
        *("--batches.max_total_length=3", "--precision=bf16"),
    ],
    "language_modeling.yaml": [
        *("--number_of_epochs=3", "--steps_per_epoch=5", "--max_valid_windows=8", "--window_tokens=32"),
        *("--batch_size=4", "--windows_per_update=8", "--model.layers=1", "--model.features=32", "--model.heads=2"),
        *("--model.dropout=0.1", "--peak_flops=1e11", "--precision=bf16"),
    ],
    "speech_recognition.yaml": [
        *("--width=16", "--model.front.channels=[4, 4]", "--synthetic.counts=[24, 4, 4]"),
        *("--batches.max_total_length=4", "--precision=bf16"),
    ],
}


def launched_by(config: str) -> Path:
    """The script that the YAML's header names."""
    launch = re.search(r"^# Launch:\s+python (\S+\.py) (\S+)", (CONFIGS / config).read_text(), re.MULTILINE)
    assert launch, f"configs/{config}: its header must open the line 'Launch:' with python SCRIPT YAML"
    assert launch[2] == f"configs/{config}"
    return REPOSITORY / launch[1]


def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


# ---------------------------------------------------------------------- the script


def test_the_scripts_are_short(subtests):
    for task in TASKS:
        with subtests.test(task):
            script = RECIPES / task / "train.py"
            assert len(script.read_text().splitlines()) <= 150
            main = next(node for node in nodes(script) if getattr(node, "name", "") == "main")
            lines = main.end_lineno - main.body[0].end_lineno
            assert lines <= 18, "main is for the framework to shorten: it should not grow"


def test_no_recipe_scales_or_casts_by_itself():
    """Pins (`fwd_default_precision`) are the one precision code that a recipe may have."""
    forbidden = {"GradScaler", "autocast", "TorchAutocast", "amp", "scaler", "unscale_", "half", "bfloat16", "cuda"}
    found = []
    for path in sorted(RECIPES.glob("*/*.py")):
        for node in nodes(path):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if isinstance(node, ast.alias):
                name = node.name.split(".")[-1]
            if name in forbidden:
                found.append(f"{path}:{getattr(node, 'lineno', '?')} has {name}")
    assert found == []


def test_no_script_knows_a_device():
    found = []
    for task in TASKS:
        for node in nodes(RECIPES / task / "train.py"):
            keywords = {keyword.arg for keyword in node.keywords} if isinstance(node, ast.Call) else set()
            attribute = node.attr if isinstance(node, ast.Attribute) else None
            if "device" in keywords or attribute in {"to", "cpu", "device"}:
                found.append(f"{task}/train.py:{node.lineno}")
    assert found == []


# ---------------------------------------------------------------------- the YAML


def test_each_yaml_opens_with_what_a_user_must_know(subtests):
    for config in YAMLS:
        with subtests.test(config):
            text = (CONFIGS / config).read_text()
            header = text[: re.search(r"^[^#\n]", text, re.MULTILINE).start()]
            told = {word: re.search(rf"^# {word}:\s+(\S.*)", header, re.MULTILINE) for word in HEADER}
            assert [word for word, found in told.items() if not found] == []
            measured = config not in NOT_RUN
            assert all(re.search(r"\d", told[word][1]) for word in ("Time", "Expect")) == measured
            assert "TODO" not in text
            assert launched_by(config).is_file()


def uncommented(config: str) -> list[str]:
    text = (CONFIGS / config).read_text()
    lines = text.splitlines()
    bare = []
    stack = [yaml.compose(re.sub(r"![\w:.]+", "", text))]
    while stack:
        for key, value in stack.pop().value:
            line = lines[key.start_mark.line]
            # An object, or a key that has a comment, tells by itself what it is.
            tells_itself = re.search(r"(:|![a-z]+:\S+|!ref <[\w.]+>)\s*$", line)
            if "#" not in line and not tells_itself:
                bare.append(f"configs/{config}:{key.start_mark.line + 1}: {line.strip()}")
            if isinstance(value, yaml.MappingNode):
                stack.append(value)
    return bare


def test_every_key_of_each_yaml_has_a_comment():
    assert [line for config in YAMLS for line in uncommented(config)] == []


@pytest.mark.parametrize("config", YAMLS)
def test_the_yaml_passes_its_check(config):
    asked_for = {"data_path": "shards"} if "data_path: !PLACEHOLDER" in (CONFIGS / config).read_text() else None
    check(CONFIGS / config, asked_for, recipe_folder=launched_by(config).parent)


# ---------------------------------------------------------------------- the README


def test_each_readme_has_a_table_a_picture_and_files_that_exist(subtests):
    for task in TASKS:
        with subtests.test(task):
            folder = RECIPES / task
            text = (folder / "README.md").read_text()
            for precision in ("fp32", "bf16", "fp16"):
                row = re.search(rf"^\| *{precision}\b.*\d", text, re.MULTILINE)
                assert row, f"no row of results for {precision}"
            pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
            assert pictures
            for picture in pictures:
                assert (folder / picture).stat().st_size < 200_000
                with Image.open(folder / picture) as image:
                    image.verify()
            targets = re.findall(r"\]\((?!http)([^)#]+)", text)
            assert [target for target in targets if not (folder / target).exists()] == []


SECTIONS = ["What it trains", "Run it", "Your own data", "Results", "Options to know", "Predict", "Files"]


def test_each_readme_has_the_same_short_form(subtests):
    for task in TASKS:
        with subtests.test(task):
            text = (RECIPES / task / "README.md").read_text()
            predict = "Sample" if task == "adversarial" else "Predict"  # a generator predicts nothing
            assert re.findall(r"^## (.+)$", text, re.MULTILINE) == [
                predict if it == "Predict" else it for it in SECTIONS
            ]
            assert (RECIPES / task / f"{predict.lower()}.py").is_file() and f"/{predict.lower()}.py results/" in text
            prose = re.sub(r"```.*?```|^\|.*$", "", text, flags=re.DOTALL | re.MULTILINE)
            assert len(prose.split()) <= 300
            files = re.findall(r"`([\w./]+\.(?:py|yaml))`", text.partition("## Files")[2])
            assert [name for name in files if not (RECIPES / task / name).is_file()] == []
            assert {path.name for path in (RECIPES / task).glob("*.py")} <= set(files)


def test_the_readme_of_the_project_names_every_recipe():
    text = (REPOSITORY / "README.md").read_text()
    assert [task for task in TASKS if f"recipes/{task}/README.md" not in text] == []


# ---------------------------------------------------------------------- the run


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import train

def die(brain, *_):
    if brain.optimizer_step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

train.Brain.on_fit_batch_end = die
train.main(sys.argv[2:])
"""


def test_a_killed_run_ends_with_the_weights_and_metrics_of_one_that_was_not(tmp_path):
    recipe, config = RECIPES / "image_classification", CONFIGS / "image_classification.yaml"
    words = [*TINY[config.name], "--noprogressbar", "--number_of_epochs=1", "--ckpt_interval_steps=2"]
    words.append("--loader_kwargs.batch_size=128")

    def ends(folder: str, *options: str) -> tuple[bytes, list]:
        with recipe_modules("image_classification") as modules:
            modules.train.main([str(config), *words, *options, f"--output_folder={tmp_path / folder}"])
        newest = max((tmp_path / folder / "save").glob("CKPT+*"))
        records = stage_records(tmp_path / folder)
        return (newest / "modules.safetensors").read_bytes(), [(it["loss"], it["metrics"]) for it in records]

    killed = run_python(
        "-c", KILLED, recipe, config, *words, "--ckpt_background=false", f"--output_folder={tmp_path / 'killed'}"
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert ends("killed", "--resume=must") == ends("whole")


@pytest.fixture
def forked_runs(monkeypatch):
    """The runs of a resume check come from the server of Python programs."""

    def started(command, env=None, **options):
        added = {name: value for name, value in (env or {}).items() if os.environ.get(name) != value}
        return Program(*command[1:], env=added, **options)

    monkeypatch.setattr(child_runs, "subprocess", SimpleNamespace(Popen=started, DEVNULL=subprocess.DEVNULL))


@pytest.mark.extended
@pytest.mark.parametrize("config", sorted(TINY))
def test_a_killed_run_ends_as_if_it_had_not_been(config, tmp_path, forked_runs):
    said = []
    script = launched_by(config)
    words = [*TINY[config], "--noprogressbar"]
    if config == "finetuning.yaml":  # where its tiny model is made
        words.append(f"--cache_folder={tmp_path / 'cache'}")
    status = verify.verify_resume(script, CONFIGS / config, words, 6, 2, 5, tmp_path / "runs", said.append)
    assert status == 0, "\n".join(said)


def test_every_yaml_is_resumed_here_or_says_why_not():
    assert set(YAMLS) - NOT_RUN == set(TINY)
