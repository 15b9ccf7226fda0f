"""`amp-recipes new`: the names it takes, the folders it fills, and the recipes that come out of it."""

import ast
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import run_python
from repository import REPOSITORY

from amp_recipes.commands import cli, collection, new
from amp_recipes.errors import ConfigError

SHORT, LONG = "a", "a_name_as_long_as_a_recipe_s_name_may_be"
every_template = pytest.mark.parametrize("template", new.TEMPLATES)


def said_by_python(folder: Path, *words: object) -> str:
    """What Python says, run in that folder as by a user; it must end well."""
    done = run_python(*words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make(tmp_path: Path, name: str, template: str) -> Path:
    new.new_recipe(name, tmp_path / name, template)
    return tmp_path / name


def text_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


# --- what comes out


@every_template
def test_a_recipe_has_its_files_and_its_name_everywhere(tmp_path, template):
    texts = text_of(make(tmp_path, "speech_tags", template))
    assert set(texts) == {
        *("train.py", "model.py", "data.py", "speech_tags.yaml", "test_speech_tags.py", "README.md", ".gitignore")
    }
    assert "class SpeechTags(Brain)" in texts["train.py"] and "# speech_tags\n" in texts["README.md"]
    assert not [name for name, text in texts.items() if "my_task" in text or "MyTask" in text]


@every_template
def test_the_template_is_a_recipe_itself(tmp_path, template):
    """So that what is read and run in the template is what a user gets."""
    assert text_of(make(tmp_path, "my_task", template)) == new.read_template(template)


@every_template
@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed")
@pytest.mark.parametrize("name", [SHORT, LONG])
def test_the_code_is_clean_under_any_name(tmp_path, template, name):
    folder = make(tmp_path, name, template)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    for words in (["check"], ["format", "--check"]):
        said_by_python(folder, "-m", "ruff", *words, "--no-cache", ".")


@every_template
def test_the_script_is_short_and_leaves_precision_and_device_to_the_framework(template):
    script = new.read_template(template)["train.py"]
    assert len(script.splitlines()) <= 100
    for word in ("GradScaler", "autocast(", ".cuda(", ".to(", "device=", "unscale_", "scaler"):
        assert word not in script
    main = next(node for node in ast.parse(script).body if getattr(node, "name", "") == "main")
    assert len(main.body) <= 8


@every_template
def test_the_yaml_says_how_to_launch_and_what_each_key_means(template):
    text = new.read_template(template)["my_task.yaml"]
    header, _, body = text.partition("\n\n")
    words = re.findall(r"^# (\w+( own)?):", header, flags=re.MULTILINE)
    assert [word for word, _ in words] == ["Launch", "Hardware", "Time", "Expect", "Your own"]
    uncommented = [line for line in body.splitlines() if re.match(r" *\w+: *[^! ]", line) and "  # " not in line]
    assert uncommented == []


# --- it runs


def test_the_script_runs_from_another_folder(tmp_path):
    folder = make(tmp_path, "my_task", "basic")
    said_by_python(tmp_path, folder / "train.py", folder / "my_task.yaml", "--debug", "--precision=bf16")
    assert (tmp_path / "results" / "bf16" / "seed_1" / "debug" / "metrics.jsonl").is_file()


@every_template
def test_check_finds_no_mistake(tmp_path, template, capsys):
    folder = make(tmp_path, "my_task", template)
    assert cli.main(["check", str(folder / "train.py"), str(folder / "my_task.yaml")]) == 0
    said = capsys.readouterr()
    assert said.err == ""


# Each of the tests once, each of both templates in the nightly run: they start Python four to eight times.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("template", "chosen"),
    [
        ("basic", "bf16"),
        ("own_step", "killed"),
        *(pytest.param(template, "test", marks=pytest.mark.nightly) for template in new.TEMPLATES),
    ],
)
def test_its_own_tests_pass(tmp_path, template, chosen):
    folder = make(tmp_path, "my_task", template)
    assert " passed" in said_by_python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {
        *("train.py", "model.py", "data.py", "my_task.yaml", "test_my_task.py", "README.md", ".gitignore")
    }


@pytest.mark.nightly
@every_template
def test_the_commands_of_its_readme_run(tmp_path, template):
    folder = make(tmp_path, "my_task", template)
    blocks = re.findall(r"```bash\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if line]
    assert {words.split()[1] for words in commands} == {"train.py", "check", "diagnose", "verify-resume", "compare"}
    for command in commands:
        program, *words = command.partition("#")[0].split()
        module = [] if program == "python" else ["-m", "amp_recipes.commands.cli"]
        said_by_python(folder, *module, *words)


# --- names


def test_a_name_that_no_recipe_can_have_is_refused(subtests, tmp_path, monkeypatch, capsys):
    for name, why, better in [
        ("my-task", "expected small letters", "my_task"),
        ("my task", "expected small letters", "my_task"),
        ("MyTask", "expected small letters", "my_task"),
        ("HTTPTask", "expected small letters", "httptask"),
        ("Tâche_2", "expected small letters", "tache_2"),
        ("2d_points", "expected small letters", "task_2d_points"),
        ("_hidden", "expected small letters", "hidden"),
        ("../up", "expected small letters", "up"),
        ("任务", "expected small letters", "my_task"),
        ("", "expected small letters", "my_task"),
        ("--", "expected small letters", "my_task"),
        ("my__task", "between two words", "my_task"),
        ("task_", "between two words", "task"),
        ("a" * 41, "41 characters", "a" * 40),
        ("class", "keyword", "class_task"),
        ("true", "its class would be True", "true_task"),
        ("value_error", "its class would be ValueError", "value_error_task"),
        ("brain", "its class would be Brain", "brain_task"),
        ("stage", "its class would be Stage", "stage_task"),
        ("network", "its class would be Network", "network_task"),
        ("f", "its class would be F", "f_task"),
        ("train", "one of the recipe's files", "train_task"),
        ("data", "one of the recipe's files", "data_task"),
        ("torch", "Python has a module", "torch_task"),
        ("amp_recipes", "Python has a module", "amp_recipes_task"),
        ("json", "Python has a module", "json_task"),
        ("sys", "Python has a module", "sys_task"),
    ]:
        with subtests.test(name=name):
            monkeypatch.chdir(tmp_path)
            with pytest.raises(ConfigError) as caught:
                new.check_name(name, new.read_template("basic"))
            assert why in str(caught.value) and str(caught.value).endswith(f"For example: amp-recipes new {better}")
            new.check_name(better, new.read_template("basic"))
            if not name.startswith("-"):
                assert cli.main(["new", name]) == 1
                assert capsys.readouterr().err.count("\n") == 1
            assert list(tmp_path.iterdir()) == []


def test_a_name_is_refused_where_the_class_has_it_in_one_template_only(tmp_path):
    with pytest.raises(ConfigError, match="its class would be Critic"):
        new.new_recipe("critic", tmp_path / "critic", "own_step")
    new.new_recipe("critic", tmp_path / "critic", "basic")


def test_other_names_are_taken(subtests):
    for name in ["x", "wav2vec", "my_task_2", "match", LONG, "a" * 40]:
        with subtests.test(name=name):
            new.check_name(name, new.read_template("basic"))


# --- folders


def test_the_commands_that_are_printed_lead_to_the_recipe(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["new", "my_task", "--to", "my work/first try"]) == 0
    printed = [line.partition("#")[0].strip() for line in capsys.readouterr().out.splitlines() if line[:4] == "    "]
    assert printed == [
        "cd 'my work/first try'",
        "python train.py my_task.yaml",
        "python train.py my_task.yaml --help",
        "python -m pytest",
    ]
    script = "\n".join(["set -e", printed[0], "test -f train.py", "test -f my_task.yaml", "test -f test_my_task.py"])
    assert subprocess.run(["sh", "-c", script]).returncode == 0


def test_it_fills_the_folder_one_stands_in(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    before = tmp_path.stat().st_ino
    assert cli.main(["new", "my_task", "--to", "."]) == 0
    assert "cd " not in capsys.readouterr().out
    assert tmp_path.stat().st_ino == before and (tmp_path / "train.py").is_file()


@pytest.mark.parametrize("there", ["notes.txt", ".env", "train.py", "sub/deep.txt"])
def test_a_folder_that_holds_anything_is_left_as_it_is(tmp_path, monkeypatch, capsys, there):
    monkeypatch.chdir(tmp_path)
    kept = tmp_path / "my_task" / there
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    assert cli.main(["new", "my_task"]) == 1
    said = capsys.readouterr().err
    assert f"my_task is not empty (it holds {Path(there).parts[0]})" in said
    assert said.endswith("amp-recipes new my_task --to my_task_2\n")
    assert kept.read_text() == "mine" and len(list((tmp_path / "my_task").iterdir())) == 1
    assert cli.main(said.split("amp-recipes ")[-1].split()) == 0


def test_where_recipes_are_kept_together_the_place_for_it_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "older").mkdir(parents=True)
    assert cli.main(["new", "my_task", "--to", "recipes"]) == 1
    assert capsys.readouterr().err.endswith("amp-recipes new my_task --to recipes/my_task\n")


def test_a_file_or_a_dead_link_in_the_way_is_left_as_it_is(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="is not a folder"):
            new.new_recipe("my_task", tmp_path / name, "basic")
    with pytest.raises(ConfigError, match=r"cannot be created: .*Give another with --to"):
        new.new_recipe("my_task", tmp_path / "file" / "below", "basic")
    assert (tmp_path / "file").read_text() == "mine" and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("ends", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_what_fails_on_the_way_leaves_nothing(tmp_path, monkeypatch, exists, ends):
    folder = tmp_path / "my_task"
    if exists:
        folder.mkdir()
    opened = open

    def failing(path, *rest, **more):
        if Path(path).name == "train.py":
            raise ends
        return opened(path, *rest, **more)

    monkeypatch.setattr(new, "open", failing, raising=False)
    with pytest.raises((ConfigError, KeyboardInterrupt)) as caught:
        new.new_recipe("my_task", folder, "basic")
    if isinstance(ends, OSError):
        assert "No space left on device" in str(caught.value)
    assert [path.name for path in tmp_path.rglob("*")] == (["my_task"] if exists else [])


def test_a_file_that_comes_into_being_meanwhile_is_not_overwritten(tmp_path):
    folder = tmp_path / "my_task"
    folder.mkdir()
    contents = new.read_template("basic")
    (folder / "model.py").write_text("mine")
    with pytest.raises(FileExistsError):
        new._fill(contents, folder)
    assert text_of(folder) == {"model.py": "mine"}


def test_a_folder_that_comes_into_being_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    folder = tmp_path / "my_task"
    filled = new._fill

    def slow(contents, where):
        filled(contents, where)
        folder.mkdir()
        (folder / "mine").touch()

    monkeypatch.setattr(new, "_fill", slow)
    with pytest.raises(ConfigError, match="cannot be created"):
        new.new_recipe("my_task", folder, "basic")
    assert [path.name for path in folder.rglob("*")] == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["my_task"]


def test_the_folder_is_readable_as_any_other(tmp_path):
    (tmp_path / "other").mkdir()
    folder = make(tmp_path, "my_task", "basic")
    assert folder.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_a_run_leaves_in_a_template_is_no_part_of_it(tmp_path, monkeypatch):
    copy = tmp_path / "amp_recipes" / "templates" / "basic"
    shutil.copytree(REPOSITORY / "amp_recipes" / "templates" / "basic", copy)
    (copy / "__pycache__").mkdir(exist_ok=True)
    (copy / "__pycache__" / "train.pyc").write_bytes(b"\xff")
    monkeypatch.setattr(new, "files", lambda package: tmp_path / package)
    assert "train.py" in new.read_template("basic") and "train.pyc" not in new.read_template("basic")


def test_every_folder_of_templates_is_offered():
    folders = {path.name for path in (REPOSITORY / "amp_recipes" / "templates").iterdir() if path.is_dir()}
    assert {name for name in folders if name[0] not in "._"} == set(new.TEMPLATES)
    assert cli.make_parser().parse_args(["new", "x"]).template == "basic"


# --- copies of the recipes that come along


def test_a_copy_of_a_recipe_stands_in_one_folder(tmp_path, subtests):
    for name in collection.recipes():
        with subtests.test(name):
            folder = tmp_path / name
            new.new_recipe("copied", folder, "basic", name)
            texts = text_of(folder)
            assert {"train.py", "copied.yaml", "README.md", ".gitignore"} <= set(texts) and f"{name}.yaml" not in texts
            for path, text in texts.items():
                assert not re.search(r"(?<!amp[-_])recipes/|configs/", text), path  # the project's address may be there
            assert "# Launch:    python train.py copied.yaml" in texts["copied.yaml"]
            assert collection.recipe_called(name).needs in new.report("copied", folder, list(texts), name)


@pytest.mark.extended
@pytest.mark.parametrize("name", collection.recipes())
def test_a_copy_of_a_recipe_passes_its_check(tmp_path, name):
    new.new_recipe("copied", tmp_path / "copied", "basic", name)
    needed = ["--data_path=tokens"] if name == "language_modeling_124m" else []
    said_by_python(tmp_path / "copied", "-m", "amp_recipes", "check", "train.py", "copied.yaml", *needed)


def test_a_copy_may_have_the_name_of_a_class_in_its_code(tmp_path):
    assert "digits.yaml" in new.new_recipe("digits", tmp_path / "digits", "basic", "image_classification")
    with pytest.raises(ConfigError, match=r"model.py is one of the recipe's files"):
        new.new_recipe("model", tmp_path / "model", "basic", "image_classification")


def test_a_copy_may_have_the_name_of_another_recipe_of_the_same_scripts(tmp_path):
    new.new_recipe("speech_recognition", tmp_path / "copied", "basic", "keyword_classification")
    texts = text_of(tmp_path / "copied")
    assert [path for path in texts if path.endswith(".yaml")] == ["speech_recognition.yaml"]
    assert texts["speech_recognition.yaml"].startswith("# Tell which keyword is said")


def test_the_list_names_every_recipe_and_template_with_what_it_does(capsys):
    assert cli.main(["new", "--list"]) == 0
    listed = capsys.readouterr().out
    for name in (*collection.recipes(), *new.TEMPLATES):
        assert re.search(rf"^  {name} +\S", listed, re.MULTILINE), name


def test_without_a_name_or_with_an_unknown_recipe_the_message_says_what_there_is(capsys):
    assert cli.main(["new"]) == 1 and "--list" in capsys.readouterr().err
    for words in (["new", "mine", "--from", "image_clasification"], ["run", "image_clasification"]):
        assert cli.main(words) == 1
        assert "Did you mean 'image_classification'?" in capsys.readouterr().err


@pytest.mark.extended
def test_a_recipe_that_comes_along_runs_in_any_folder(tmp_path):
    said_by_python(tmp_path, "-m", "amp_recipes", "run", "image_classification", "--debug")
    assert (tmp_path / "results" / "image_classification").is_dir()


@pytest.mark.extended
def test_the_wheel_has_every_recipe(tmp_path):
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path]
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".git", ".venv*", "build", "*.egg-info", "results")
    shutil.copytree(REPOSITORY, source, ignore=ignore)
    subprocess.run([*wheel, source], check=True, capture_output=True, text=True)
    installed = tmp_path / "site-packages"
    shutil.unpack_archive(next(tmp_path.glob("*.whl")), installed, "zip")
    run = [sys.executable, "-m", "amp_recipes", "run", "image_classification", "--debug"]
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and str(installed) not in done.stderr, done.stdout + done.stderr
    assert (tmp_path / "results" / "image_classification").is_dir()
    for recipe in collection.recipes().values():
        for path in (recipe.hparams_file, *recipe.folder.glob("*.py"), recipe.folder / "README.md"):
            copy = installed / "amp_recipes" / "collection" / path.relative_to(REPOSITORY)
            assert copy.read_bytes() == path.read_bytes()
