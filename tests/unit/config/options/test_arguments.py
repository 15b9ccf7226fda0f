"""The command line: what is a value, what is a flag, and what ends where."""

import copy
import datetime
import pickle
import re
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import run_python
from ruamel.yaml import YAML

from amp_recipes.config import load_hparams
from amp_recipes.config.options.arguments import Overrides, Request, parse_arguments, parse_value
from amp_recipes.config.options.run_options import OPTION_NAMES, RunOptions
from amp_recipes.errors import ConfigError


def test_file_options_and_overrides_are_told_apart():
    file, options, overrides = parse_arguments(["params.yaml", "--device=cpu", "--seed=3", "--data_folder=TIMIT"])
    assert file == "params.yaml"
    assert (options.device, options.seed, options.explicit) == ("cpu", 3, {"device", "seed"})
    assert overrides == {"data_folder": "TIMIT"}
    assert overrides.run_options is options


def test_both_forms_of_an_option_mean_the_same_at_any_depth():
    joined = parse_arguments(["p.yaml", "--a.b.c=1", "--lr=-1", "--max_grad_norm=-1"])
    spaced = parse_arguments(["--a.b.c", "1", "p.yaml", "--lr", "-1", "--max_grad_norm", "-1"])
    assert joined == spaced
    assert joined[2] == {"a": {"b": {"c": 1}}, "lr": -1}
    assert joined[1].max_grad_norm == -1.0


def test_a_value_is_what_yaml_reads(subtests):
    for text, value in [
        ("1e-4", 1e-4),
        ("-5e3", -5e3),
        (".5", 0.5),
        ("3", 3),
        ("true", True),
        ("False", False),
        ("null", None),
        ("[1, 2.5, x]", [1, 2.5, "x"]),
        ("{a: 1, b: [true]}", {"a": 1, "b": [True]}),
        ("[]", []),
        ("'1'", "1"),
        ('"a\\tb"', "a\tb"),
        ("''", ""),
    ]:
        with subtests.test(text=text):
            parsed = parse_value(text)
            assert parsed == value
            assert type(parsed) is type(value)


def test_what_yaml_would_change_or_refuse_stays_as_typed(subtests):
    for text in [
        *("s3://x/y?z=1", "a: b", "#fff", "yes", "on", "1:30", "a #b", "1 # one", "", " ", " a ", "(1, 2)"),
        *("*.norm", "*a", "&a b", "!x y", "!!str 1", "!!python/object/apply:os.system [ls]", "[1, !x 2]"),
        *("{<<: {a: 1}}", "<<", "- 1", "? x", "| x", "> x", "--- 1", "...", "%YAML 1.1", "@x", "`x`"),
        *("{name}", "{a: 1, a: 2}", "[1, 2", "{[1]: 2}", "'a' 'b'", "a\nb", "2024-01-02", "<lr>", "=", "["),
        "[" * 50,
    ]:
        with subtests.test(text=text):
            assert parse_value(text) == text
            assert parse_arguments(["p.yaml", f"--key={text}"])[2] == {"key": text}


def test_a_value_beyond_a_limit_stays_what_it_is_so_that_the_limit_is_told(tmp_path):
    for text, kind in (("9" * 400, int), ("[" * 30 + "]" * 30, list), ('["<<"]', list), ("{a: '<<'}", dict)):
        assert type(parse_value(text)) is kind
    file = tmp_path / "recipe.yaml"
    file.write_text("a: 1")
    with pytest.raises(ConfigError, match="--a has 1,329 bits; a whole number has at most 1,024"):
        load_hparams(file, parse_arguments([str(file), "--a=" + "9" * 400])[2])


@settings(max_examples=150, deadline=None)
@given(st.text() | st.text(alphabet="!&*[]{}:,#'\"|>%@-? \tax1.<"))
def test_any_text_gives_plain_data_and_a_string_only_loses_its_quotes(text):
    value = parse_value(text)
    if isinstance(value, str):
        assert value == text or text.strip()[0] in "'\""
    else:
        assert value == YAML(typ="safe").load(text) or "-" in text  # a date inside a list stays text


def test_a_date_stays_text_where_yaml_has_a_date():
    assert YAML(typ="safe").load("2024-01-02") == datetime.date(2024, 1, 2)
    assert parse_value("[2024-01-02]") == ["2024-01-02"]


def test_a_bare_boolean_option_is_true_and_swallows_nothing(subtests):
    for argv in [["--debug", "p.yaml"], ["p.yaml", "--debug"], ["p.yaml", "--debug", "--a=1"]]:
        with subtests.test(argv=argv):
            file, options, _ = parse_arguments(argv)
            assert file == "p.yaml"
            assert options.debug is True


def test_a_boolean_option_takes_false(subtests):
    for argv in [["--debug", "False"], ["--debug=false"], ["--debug", "no"], ["--debug=0"]]:
        with subtests.test(argv=argv):
            assert parse_arguments([*argv, "p.yaml"])[1].debug is False


def test_text_options_keep_what_was_typed():
    options = parse_arguments(["p.yaml", "--output_folder=007", "--init_from", "0", "--early_stop_metric=null"])[1]
    assert (options.output_folder, options.init_from, options.early_stop_metric) == ("007", "0", None)
    assert "early_stop_metric" in options.explicit


def test_module_patterns_need_no_quotes(subtests):
    for text in ["[*.norm, model.head]", "['*.norm', model.head]", '["*.norm", "model.head"]']:
        with subtests.test(text=text):
            assert parse_arguments(["p.yaml", "--fp32_modules", text])[1].fp32_modules == ["*.norm", "model.head"]
            assert parse_arguments(["p.yaml", "--fp32_modules=*.norm"])[1].fp32_modules == ["*.norm"]


def test_the_last_of_a_repeated_key_wins_and_mappings_merge():
    argv = ["p.yaml", "--seed=1", "--seed=2", "--a=1", "--a=2", "--m.x.y=1", "--m={x: {z: 2}}", "--m.x.y=3"]
    _, options, overrides = parse_arguments(argv)
    assert options.seed == 2
    assert overrides == {"a": 2, "m": {"x": {"y": 3, "z": 2}}}


def test_a_mistake_is_a_config_error_that_says_what_to_do(subtests):
    for argv, message in [
        ([], "the YAML file is missing"),
        (["p.yaml", "x"], "'x' is neither an option nor a value"),
        (["p.yaml", "--debug", "maybe"], "'maybe' is neither"),
        (["p.yaml", "debug"], "Did you mean --debug?"),
        (["p.yaml", "--foo"], "--foo needs a value"),
        (["p.yaml", "--foo", "--bar=1"], "--foo needs a value"),
        (["p.yaml", "--seed"], "--seed needs a value"),
        (["p.yaml", "--acept_changes"], "there is no run option 'acept_changes'. Did you mean --accept_changes?"),
        (["p.yaml", "--accept-changes", "--a=1"], "Did you mean --accept_changes?"),
        (["p.yaml", "--model.debg"], "--model.debg needs a value"),
        (["p.yaml", "-x"], "starts with two dashes"),
        (["p.yaml", "--"], "empty name"),
        (["p.yaml", "--a..b=1"], "empty name"),
        (["p.yaml", "--seed.x=1"], "seed is a run option"),
        (["p.yaml", "--a=1", "--a.b=2"], "conflicts with --a, whose value has no keys"),
        (["p.yaml", "--a.b=2", "--a=1"], "sets a key below it"),
        (["p.yaml", "--precision=bf61"], "Did you mean bf16?"),
    ]:
        with subtests.test(argv=argv):
            with pytest.raises(ConfigError) as caught:
                parse_arguments(argv)
            assert message in str(caught.value)
            assert "\n" not in str(caught.value)


def test_all_mistakes_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        parse_arguments(["--foo", "--seed=x", "--growth_factor=0.5", "-x"])
    assert len(str(caught.value).splitlines()) == 1 + 5


def test_mistakes_in_keys_of_the_yaml_are_reported_with_those_in_run_options(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("number_of_epochs: 3\nmodel: {hidden: 4}\n")
    with pytest.raises(ConfigError) as caught:
        parse_arguments([str(file), "--precision=fp17", "--number_of_epoch=3", "--model.hiden=8", "--model.hidden=8"])
    first, *mistakes = str(caught.value).splitlines()
    assert first == "3 mistakes in the command line:" and len(mistakes) == 3
    assert "fp17" in mistakes[0]
    assert "Did you mean --number_of_epochs?" in mistakes[1] and "Did you mean --model.hidden?" in mistakes[2]
    file.write_text("number_of_epochs: 3\nnumber_of_epochs: 4\n")  # its own mistakes are told when it is loaded
    with pytest.raises(ConfigError, match=r"^command line: precision is 'fp17'"):
        parse_arguments([str(file), "--precision=fp17", "--number_of_epoch=3"])


def test_a_prefix_is_not_an_option():
    _, options, overrides = parse_arguments(["p.yaml", "--prec", "fp16"])
    assert options == RunOptions()
    assert overrides == {"prec": "fp16"}


def printed_help(capsys, *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["p.yaml", *words, "--foo"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_help_all_lists_every_option_and_exits_with_zero(capsys, subtests):
    for words in (["--help", "all"], ["--help=all"], ["-h", "all"]):
        with subtests.test(words=words):
            printed = printed_help(capsys, *words)
            assert all(f"--{name} " in printed for name in OPTION_NAMES)
            assert "Loss scale (fp16):" in printed and "{fp32,bf16,fp16,auto}" in printed


def test_help_lists_the_options_that_people_use_and_says_where_the_others_are(capsys):
    printed = printed_help(capsys, "--help", "--precision=bf16")
    shown = {name for name in OPTION_NAMES if f"--{name} " in printed}
    assert 25 <= len(shown) <= 35
    assert {"precision", "seed", "output_folder", "max_grad_norm", "resume", "device"} <= shown
    assert f"--help all shows {len(OPTION_NAMES - shown)} more options" in printed


def test_argv_defaults_to_that_of_the_process():
    code = "from amp_recipes.config import parse_arguments; print(parse_arguments()[2])"
    done = run_python("-c", code, "p.yaml", "--a.b", "1e-4")
    assert done.stdout.strip() == "{'a': {'b': 0.0001}}", done.stderr


def test_overrides_keep_their_run_options_through_copy_and_pickle():
    overrides = parse_arguments(["p.yaml", "--seed=3", "--a=1"])[2]
    for twin in (copy.deepcopy(overrides), pickle.loads(pickle.dumps(overrides))):
        assert twin == overrides
        assert isinstance(twin, Overrides) and twin.run_options.explicit == {"seed"}


# ---------------------------------------------------------------------- what is asked for beside a run


def test_words_that_are_no_options_become_a_request(subtests, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["train.py", "--trust", "a,b.c,d"])
    for words, expected in [
        ([], Request()),
        (["--check"], Request("check")),
        (["--show-config"], Request("show_config")),
        (["--show_config"], Request("show_config")),
        (["--trust", "a,b.c", "--trust=[d]", "--check"], Request("check", trust=("a", "b.c", "d"))),
        (
            ["--sweep", "lr=1e-3,1e-4", "model.hidden=64,128", "--seed", "3", "--debug", "--trust=a"],
            Request(
                "sweep",
                trust=("a",),
                axes=("lr=1e-3,1e-4", "model.hidden=64,128"),
                words=("--seed=3", "--debug=true", "--trust=a"),
            ),
        ),
        (["--sweep=lr=1,2", "--sweep-trials", "5", "--x.y=a=b"], Request("sweep", (), ("lr=1,2",), 5, ("--x.y=a=b",))),
    ]:
        with subtests.test(words=words):
            file, _, overrides = parse_arguments(["f.yaml", *words])
            assert file == "f.yaml" and overrides.request == expected


def test_requests_that_cannot_be_met_are_refused(subtests):
    for words, message in [
        (["--check", "--sweep", "lr=1,2"], "--check and --sweep cannot be combined"),
        (["--check=yes"], "--check takes no value"),
        (["--sweep-trials", "3"], "--sweep-trials needs --sweep"),
        (["--sweep", "lr=1,2", "--sweep-trials=many"], "--sweep-trials is 'many'"),
        (["--diagnose-minutes=3"], "--diagnose-minutes needs --diagnose"),
        (["--replay"], "--replay needs a value"),
        (["--diagnose", "--diagnose_minutes=0"], "--diagnose-minutes is '0', but must be a number greater than 0"),
        (["--diagnose", "--diagnose-windows=2"], "--diagnose-windows is '2', but must be a whole number, 3 or more"),
        (["--diagnose", "--diagnose-tolerance=nan"], "--diagnose-tolerance is 'nan', but must be a number"),
        (["--diagnose", "--diagnose-minutes"], "--diagnose-minutes needs a value"),
        (["--sweep"], "--sweep needs a value"),
        (["--trust"], "--trust needs a value"),
    ]:
        with subtests.test(words=words), pytest.raises(ConfigError, match=re.escape(message)):
            parse_arguments(["f.yaml", *words])


def test_the_settings_of_a_diagnosis_are_no_run_options():
    words = ["--diagnose", "--diagnose-minutes", "inf", "--diagnose_windows=4", "--diagnose-tolerance=1e-3"]
    options = parse_arguments(["f.yaml", *words])[1]
    assert options.purpose.settings == {"minutes": float("inf"), "windows": 4, "tolerance": 0.001}
    assert options.explicit == frozenset() and parse_arguments(["f.yaml"])[1].purpose.settings == {}


def test_allow_config_change_is_accept_changes():
    for words in (["--allow-config-change"], ["--allow_config_change=true"], ["--accept_changes"]):
        assert parse_arguments(["f.yaml", *words])[1].accept_changes is True


def test_a_sweeps_values_go_over_those_of_the_command_line():
    overrides = parse_arguments(["f.yaml", "--lr=1", "--model.a=2", "--seed=3", "--precision=bf16"])[2]
    new = overrides.with_values({"lr": 5, "model.b": 6, "seed": 7, "output_folder": "007"})
    assert new == {"lr": 5, "model": {"a": 2, "b": 6}} and overrides == {"lr": 1, "model": {"a": 2}}
    options = new.run_options
    assert (options.seed, options.precision, options.output_folder) == (7, "bf16", "007")
    with pytest.raises(ConfigError, match="precision"):
        overrides.with_values({"precision": "bf61"})
