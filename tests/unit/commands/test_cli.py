"""The amp-recipes command: its help, its errors, its exit status."""

import json
import subprocess
import sys

import pytest
from programs import run_python
from repository import REPOSITORY

from amp_recipes import __version__
from amp_recipes.commands import cli
from amp_recipes.errors import CheckpointError


@pytest.fixture
def calls(monkeypatch):
    """What `verify_resume` is called with."""
    found = []
    monkeypatch.setattr(
        "amp_recipes.commands.subcommands.verify_resume", lambda *arguments, say: found.append(arguments) or 1
    )
    return found


def test_help_of_each_command_shows_an_example_that_parses(subtests, capsys):
    for command in cli.COMMANDS:
        with subtests.test(command=command.name):
            with pytest.raises(SystemExit) as ended:
                cli.main([command.name, "--help"])
            shown = " ".join(capsys.readouterr().out.split())
            assert ended.value.code == 0
            assert f"Example: {command.example}." in shown
            program, *words = command.example.split()
            arguments, unknown = cli.make_parser().parse_known_args(words)
            assert program == "amp-recipes" and arguments.chosen is command
            assert command.passes_options or not unknown


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"    {command.name}" in shown for command in cli.COMMANDS)


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"amp-recipes {__version__}\n"


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["completion", "bash"]], ids=" ".join)
def test_what_needs_no_torch_does_not_import_it(words):
    code = """if True:
        import sys
        from amp_recipes.commands import cli
        try:
            cli.main()
        finally:
            assert "torch" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0 and "amp-recipes" in done.stdout, done.stderr


def test_the_package_has_its_names_and_its_submodules_when_they_are_asked_for():
    code = """if True:
        import amp_recipes, amp_recipes.config
        assert not hasattr(amp_recipes, "nothing") and not hasattr(amp_recipes.config, "nothing")
        assert amp_recipes.data.DynamicBatches and amp_recipes.Brain.__module__ == "amp_recipes.brain"
        from amp_recipes import *
        assert load_hparams is amp_recipes.config.load_hparams
    """
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_command_line_that_does_not_parse_ends_with_status_2(subtests, capsys):
    for words in [[], ["exprot", "x"], ["export"], ["export", "x", "--precision", "bf16"]]:
        with subtests.test(words=words):
            with pytest.raises(SystemExit) as ended:
                cli.main(words)
            assert ended.value.code == 2 and "usage: amp-recipes" in capsys.readouterr().err


def test_an_error_of_the_framework_is_one_message_without_traceback(tmp_path, capsys):
    assert cli.main(["export", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("amp-recipes: No checkpoint in ")
    assert "Traceback" not in said.err


def test_another_error_is_a_bug_and_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("amp_recipes.commands.subcommands.export_run", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["export", "x"])


def test_an_error_that_names_several_things_comes_whole(monkeypatch, capsys):
    def fail(*_):
        raise CheckpointError("one\n  two")

    monkeypatch.setattr("amp_recipes.commands.subcommands.export_run", fail)
    assert cli.main(["export", "x"]) == 1
    assert capsys.readouterr().err == "amp-recipes: one\n  two\n"


def test_the_commands_status_is_the_programs(calls):
    assert cli.main(["verify-resume", "train.py", "x.yaml"]) == 1


def test_options_of_the_recipe_pass_through_in_order(subtests, calls):
    for words, options in [
        ("train.py x.yaml", []),
        ("train.py x.yaml --steps 20 --precision bf16 --model.width=3", ["--precision", "bf16", "--model.width=3"]),
        ("train.py x.yaml --precision bf16 --steps=20", ["--precision", "bf16"]),
        ("--steps 20 train.py x.yaml --debug -- --steps 3 --keep 1", ["--debug", "--steps", "3", "--keep", "1"]),
        ("train.py x.yaml --step 3", ["--step", "3"]),  # no abbreviation: it is a key of the YAML
        ("train.py x.yaml --lr -1", ["--lr", "-1"]),
    ]:
        with subtests.test(words=words):
            calls.clear()
            cli.main(["verify-resume", *words.split()])
            [[script, yaml, passed, steps, save_at, kill_at, keep]] = calls
            assert (str(script), str(yaml), passed) == ("train.py", "x.yaml", options)
            assert (steps, save_at, kill_at, keep) == (20 if "steps" in words.partition(" -- ")[0] else 12, 5, 8, None)


def test_diff_ends_with_the_status_of_diff(tmp_path, capsys):
    for name, lr in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hyperparams.yaml").write_text(f"output_folder: {tmp_path}/{name}\nlr: {lr}\n")
    a, b, c, none = (str(tmp_path / name) for name in "abcd")
    assert cli.main(["diff", a, b]) == 0 and "the same: settings" in capsys.readouterr().out
    assert cli.main(["diff", a, c]) == 1 and "lr: 1 -> 2" in capsys.readouterr().out
    assert cli.main(["diff", a, c, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["settings"] == {"lr": ["1", "2"]}
    assert cli.main(["diff", a, none]) == 2
    said = capsys.readouterr()
    assert (
        said.out == ""
        and said.err == f"amp-recipes: {none}: there is no such folder; expected the output folder of a run.\n"
    )


def test_completion_prints_a_script_with_every_command_and_its_options(subtests, capsys):
    for shell in ["bash", "zsh"]:
        with subtests.test(shell=shell):
            assert cli.main(["completion", shell]) == 0
            script = capsys.readouterr().out
            assert script.startswith(f"# Completion for {shell}.")
            assert all(word in script for word in ("verify-resume", "--save_at", "--json", "--precision", "bash zsh"))
            with pytest.raises(SystemExit) as ended:
                cli.main(["completion", "fish"])
            assert ended.value.code == 2 and "bash, zsh" in capsys.readouterr().err.replace("'", "")


def fresh_python(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True)


@pytest.mark.parametrize("start", [run_python, pytest.param(fresh_python, marks=pytest.mark.extended)])
def test_the_module_runs_as_a_program(start):
    done = start("-m", "amp_recipes.commands.cli", "export", "/nowhere")
    assert (done.returncode, done.stdout) == (1, "") and done.stderr.startswith("amp-recipes: No checkpoint")


def test_no_name_in_an_error_commands_the_terminal(capsys):
    for words in (["export", "\x1b[2Jrun"], ["diff", "\x1b[2Jrun", "other"], ["replay", "\x1b[2Jrun"]):
        assert cli.main(words) != 0
        told = capsys.readouterr().err
        assert r"\x1b[2Jrun" in told and "\x1b" not in told
