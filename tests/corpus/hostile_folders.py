"""Hostile folders: of a step that is to be replayed, and of runs.

How an attack is read stands in `hostile_entry_points.py`.
"""

from __future__ import annotations

from typing import Any

from hostile_entry_points import COMMAND, SECOND, Attack, training

# Folders of a step that went nonfinite, as somebody else would write them.
EVIL = "open('@CANARY@', 'w').close()\n"
OWN_SCRIPT = "import sys\n\nopen('@HERE@/ran', 'w').write(' '.join(sys.argv[1:]))\n"
OWN = {"train.py": OWN_SCRIPT}
REPLAY = (*COMMAND, "replay", "nonfinite-3")
MINE = {"@HERE@/train.py": "@SHA256:@HERE@/train.py@"}


def recorded(
    script: str = "@HERE@/train.py",
    words: tuple[Any, ...] = (),
    module: str | None = None,
    cwd: str = "@HERE@",
    sha256: dict[str, str] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What `meta.json` says of the run; by default the user's own script, unchanged."""
    sums = MINE if sha256 is None else sha256
    return {"script": script, "module": module, "words": list(words), "cwd": cwd, "masked": [], "sha256": sums, **more}


def of(path: str) -> dict[str, str]:
    """The sha256 that a file has."""
    return {path: f"@SHA256:{path}@"}


SHELL = ("--no-python", "sh", "-c", "touch @CANARY@", "--")
IN_HERE = {"evil.py": EVIL, **OWN}
REPLAYS = [
    Attack(f"replay_{name}", files={**OWN, **files}, command=command, words=REPLAY, links=links)
    for name, files, links, command in [
        ("script_outside", {}, {}, recorded("@OUTSIDE@/evil.py", sha256=of("@OUTSIDE@/evil.py"))),
        ("module_that_runs_a_word", {}, {}, recorded(words=("@OUTSIDE@/evil.py",), module="cProfile")),
        ("module_of_the_debugger", {}, {}, recorded(words=("-c", f"p {EVIL}", "-c", "q", "train.py"), module="pdb")),
        ("module_that_is_a_file_of_the_folder", {"hostile_tool.py": EVIL}, {}, recorded(module="hostile_tool")),
        ("module_that_is_a_package_of_the_folder", {"hostile/__main__.py": EVIL}, {}, recorded(module="hostile")),
        ("module_that_looks_like_an_option", {}, {}, recorded(module="-c", words=(EVIL,))),
        (
            "script_outside_with_another_scripts_sum",
            {},
            {},
            recorded("@OUTSIDE@/evil.py", sha256={"@OUTSIDE@/evil.py": "@SHA256:@HERE@/train.py@"}),
        ),
        (
            "script_outside_by_two_dots",
            {},
            {},
            recorded("@HERE@/../outside/evil.py", sha256=of("@HERE@/../outside/evil.py")),
        ),
        (
            "script_outside_by_relative_dots",
            {},
            {},
            recorded("../outside/evil.py", sha256={"../outside/evil.py": "@SHA256:@OUTSIDE@/evil.py@"}),
        ),
        (
            "script_of_a_folder_whose_name_begins_alike",
            {"@HERE@-else/evil.py": EVIL},
            {},
            recorded("@HERE@-else/evil.py", sha256=of("@HERE@-else/evil.py")),
        ),
        (
            "script_that_is_a_link",
            {},
            {"link.py": "@OUTSIDE@/evil.py"},
            recorded("@HERE@/link.py", sha256=of("@HERE@/link.py")),
        ),
        (
            "script_below_a_link",
            {},
            {"link": "@OUTSIDE@"},
            recorded("@HERE@/link/evil.py", sha256=of("@HERE@/link/evil.py")),
        ),
        (
            "script_changed_since",
            {"evil.py": EVIL},
            {},
            recorded("@HERE@/evil.py", sha256={"@HERE@/evil.py": "0" * 64}),
        ),
        ("script_without_a_sum", {"evil.py": EVIL}, {}, recorded("@HERE@/evil.py")),
        ("script_with_no_sums_at_all", {"evil.py": EVIL}, {}, recorded("@HERE@/evil.py", sha256={})),
        (
            "script_whose_sum_is_null",
            {"evil.py": EVIL},
            {},
            recorded("@HERE@/evil.py", sha256={"@HERE@/evil.py": None}),
        ),
        (
            "script_whose_sum_is_of_another_path",
            {"evil.py": EVIL},
            {},
            recorded("@HERE@/evil.py", sha256={"evil.py": "@SHA256:@HERE@/train.py@"}),
        ),
        (
            "script_of_the_same_name_elsewhere",
            {"there/train.py": EVIL},
            {},
            recorded("train.py", cwd="@HERE@/there", sha256={"train.py": "@SHA256:@HERE@/train.py@"}),
        ),
        (
            "script_in_a_working_folder_outside",
            {"evil.py": ""},
            {},
            recorded("evil.py", cwd="@OUTSIDE@", sha256={"evil.py": "@SHA256:@OUTSIDE@/evil.py@"}),
        ),
        (
            "script_of_the_replay_folder_itself",
            {"nonfinite-3/evil.py": EVIL},
            {},
            recorded("@HERE@/nonfinite-3/evil.py", sha256={"@HERE@/nonfinite-3/evil.py": "0" * 64}),
        ),
        (
            "script_named_like_an_option",
            {"-c": ""},
            {},
            recorded("-c", words=(EVIL,), sha256={"-c": "@SHA256:@HERE@/-c@"}),
        ),
        (
            "modules_beside_the_working_folder",
            {"there/sitecustomize.py": EVIL, "there/usercustomize.py": EVIL},
            {},
            recorded(
                cwd="@HERE@/there", env={"PYTHONPATH": "@HERE@/there"}, environment={"PYTHONPATH": "@HERE@/there"}
            ),
        ),
        (
            "startup_file_in_the_environment",
            {"there/evil.py": EVIL},
            {},
            recorded(env={"PYTHONSTARTUP": "@HERE@/there/evil.py", "PYTHONINSPECT": "1"}),
        ),
        ("interpreter_in_the_command", {}, {}, recorded(executable="@OUTSIDE@/evil.sh", python="@OUTSIDE@/evil.sh")),
        ("torchrun_without_python", {}, {}, recorded(words=SHELL, module="torch.distributed.run")),
        (
            "torchrun_by_its_older_name",
            {},
            {},
            recorded(words=("--use-env", *SHELL), module="torch.distributed.launch"),
        ),
        ("torchrun_of_another_script", {}, {}, recorded(words=("@OUTSIDE@/evil.py",), module="torch.distributed.run")),
        (
            "torchrun_of_a_module",
            {},
            {},
            recorded(words=("-m", "cProfile", "@OUTSIDE@/evil.py"), module="torch.distributed.run"),
        ),
    ]
]
YAML_OF_THE_FOLDER = ("@HERE@/nonfinite-3/evil.yaml", "--trust=os")
SCRIPT_SUM = of("@HERE@/recipe/train.py")
REPLAYS += [
    Attack(
        "replay_words_that_trust",
        files={"nonfinite-3/evil.yaml": SECOND},
        command=recorded("@HERE@/recipe/train.py", YAML_OF_THE_FOLDER, sha256=SCRIPT_SUM),
        words=REPLAY,
    ),
    Attack(
        "replay_words_that_trust_a_yaml_with_its_sum",
        files={"nonfinite-3/evil.yaml": SECOND},
        command=recorded(
            "@HERE@/recipe/train.py", YAML_OF_THE_FOLDER, sha256={**SCRIPT_SUM, **of("@HERE@/nonfinite-3/evil.yaml")}
        ),
        words=REPLAY,
    ),
    Attack(
        "replay_words_that_trust_a_yaml_outside",
        command=recorded("@HERE@/recipe/train.py", ("@OUTSIDE@/evil.yaml", "--trust=os"), sha256=SCRIPT_SUM),
        words=REPLAY,
    ),
    Attack(
        "replay_words_that_trust_by_two_words",
        command=recorded("@HERE@/recipe/train.py", ("second.yaml", "--trust", "os"), sha256=SCRIPT_SUM),
        words=REPLAY,
    ),
    Attack(
        "replay_of_a_yaml_that_changed",
        "changed: true\n",
        command=recorded(
            "@HERE@/recipe/train.py", ("second.yaml", "--trust=os"), sha256={**SCRIPT_SUM, "second.yaml": "0" * 64}
        ),
        words=REPLAY,
    ),
    Attack(
        "replay_of_a_linked_folder",
        files={**OWN, "@OUTSIDE@/nonfinite-3/x": ""},
        links={"linked": "nonfinite-3"},
        command=recorded("@OUTSIDE@/evil.py", sha256=of("@OUTSIDE@/evil.py")),
        words=(*COMMAND, "replay", "linked"),
    ),
    Attack(
        "replay_of_a_script_that_imports_a_changed_file",
        files={"train.py": "import helper\n", "helper.py": EVIL},
        command=recorded(sha256={**MINE, "@HERE@/helper.py": "0" * 64}),
        words=REPLAY,
        unsure="the sums are of the script and of YAML files, not of what the script imports",
    ),
    Attack(
        "replay_of_the_users_own_module",
        files={"mine/__init__.py": "", "mine/train.py": EVIL},
        command=recorded("@HERE@/mine/train.py", module="mine.train", sha256=of("@HERE@/mine/train.py")),
        words=REPLAY,
        unsure="a module of the working folder whose sum holds may be as good as a script",
    ),
    Attack(
        "replay_of_a_script_that_came_with_the_folder",
        files={"evil.py": EVIL},
        command=recorded("@HERE@/evil.py", sha256=of("@HERE@/evil.py")),
        words=REPLAY,
        unsure="whoever unpacks a folder and replays there has the script inside, with its sum",
    ),
]
# What must go on working: the user's own script, unchanged, in the folder where the command is given.
REPLAYED = Attack("replay_of_ones_own_script", files=OWN, command=recorded(words=("a.yaml",)), words=REPLAY)

ODD_COMMANDS = {
    "nothing": None,
    "a_list": [],
    "a_text": "train.py",
    "words_that_are_numbers": recorded(words=(1, 2)),
    "words_that_are_a_text": {**recorded(), "words": "x"},
    "a_script_that_is_a_list": {**recorded(), "script": ["train.py"]},
    "a_script_that_is_a_folder": recorded("@HERE@"),
    "a_script_that_is_a_device": recorded("/dev/zero", sha256={"/dev/zero": "0" * 64}),
    "a_script_with_nul": recorded("train.py\x00"),
    "a_script_that_is_too_long": recorded("x" * 100_000),
    "words_with_nul": recorded(words=("a\x00b",)),
    "a_word_that_is_half_a_character": recorded(words=("\ud800",)),
    "a_working_folder_that_is_missing": recorded(cwd="@HERE@/nothing"),
    "a_working_folder_with_nul": recorded(cwd="\x00"),
    "a_module_with_a_slash": recorded(module="../evil"),
    "a_module_that_is_a_number": recorded(module=5),  # type: ignore[arg-type]
    "sums_that_are_a_list": {**recorded(), "sha256": ["x"]},
    "sums_that_are_numbers": {**recorded(), "sha256": {"@HERE@/train.py": 5}},
    "a_sum_of_a_device": {**recorded("@HERE@/nothing.py"), "sha256": {"/dev/zero": "0" * 64}},
    "masked_that_is_a_text": {**recorded(), "masked": "x"},
}
ODD_REPLAYS = [
    Attack(f"replay_of_{name}", files=OWN, command=command, words=REPLAY) for name, command in ODD_COMMANDS.items()
]


# Finished runs: links that lead a command elsewhere. `RUN` is a run of the recipe's script.
RUN = "run"
EXPORT = (*COMMAND, "export", RUN)
LINKS = [
    Attack("export_to_a_linked_folder", run=RUN, links={"run/export": "@OUTSIDE@"}, words=EXPORT),
    Attack("export_to_a_link_to_nothing", run=RUN, links={"run/export": "@OUTSIDE@/new"}, words=EXPORT),
    Attack("export_of_linked_settings", run=RUN, links={"run/hyperparams.yaml": "@OUTSIDE@/secret.yaml"}, words=EXPORT),
    Attack(
        "export_of_settings_linked_over_a_link",
        run=RUN,
        links={"run/hyperparams.yaml": "other.yaml", "run/other.yaml": "@OUTSIDE@/secret.yaml"},
        words=EXPORT,
    ),
    Attack(
        "export_over_a_linked_file",
        run=RUN,
        links={"run/export/model.safetensors": "@OUTSIDE@/secret.yaml"},
        words=EXPORT,
    ),
    Attack(
        "export_over_a_linked_description",
        run=RUN,
        links={"run/export/export.json": "@OUTSIDE@/secret.yaml"},
        words=EXPORT,
    ),
    Attack(
        "export_over_linked_settings",
        run=RUN,
        links={"run/export/hyperparams.yaml": "@OUTSIDE@/secret.yaml"},
        words=EXPORT,
    ),
    Attack(
        "export_of_one_checkpoint_to_a_linked_folder",
        run=RUN,
        links={"run/export": "@OUTSIDE@"},
        words=(*COMMAND, "export", "run/save/CKPT+000002"),
    ),
    Attack(
        "diff_of_linked_settings",
        run=RUN,
        links={"run/hyperparams.yaml": "@OUTSIDE@/secret.yaml"},
        words=(*COMMAND, "diff", RUN, "run/../run"),
    ),
    Attack(
        "diff_with_linked_settings",
        run=RUN,
        files={"other/hyperparams.yaml": "lr: 1\n", "other/summary.json": "{}"},
        links={"run/hyperparams.yaml": "@OUTSIDE@/secret.yaml"},
        words=(*COMMAND, "diff", RUN, "other"),
    ),
]

# What a terminal obeys: clears the screen, sets the title, C1's introducer, a carriage return over what stands there.
ESCAPES = "\x1b[2J\x1b]0;x\x07\x9b31m"
HOSTILE = f"x{ESCAPES}"
NAMES = [
    Attack("export_of_a_run_so_named", run=HOSTILE, words=(*COMMAND, "export", HOSTILE)),
    Attack("export_of_no_run_so_named", words=(*COMMAND, "export", HOSTILE)),
    Attack("export_to_a_folder_so_named", run=RUN, words=(*EXPORT, "--to", HOSTILE)),
    Attack(
        "export_of_a_metric_so_named",
        run=RUN,
        words=EXPORT,
        meta={"best_by": {"metric": HOSTILE, "mode": "min"}, HOSTILE: 0.5},
    ),
    Attack("export_of_a_value_so_named", run=RUN, words=EXPORT, meta={"loss": HOSTILE}),
    Attack("export_of_an_epoch_so_named", run=RUN, words=EXPORT, meta={"epoch": HOSTILE}),
    Attack("export_of_a_state_so_named", run=RUN, words=EXPORT, contents={"recoverables": [HOSTILE]}),
    Attack(
        "export_of_a_manifest_with_such_a_name",
        run=RUN,
        words=EXPORT,
        files={
            "run/save/CKPT+000001/MANIFEST.sha256": f"{'0' * 64}  {HOSTILE}\n",
            "run/save/CKPT+000002/MANIFEST.sha256": f"{'0' * 64}  {HOSTILE}\n",
        },
    ),
    Attack(
        "export_of_a_manifest_with_such_a_line",
        run=RUN,
        words=EXPORT,
        files={"run/save/CKPT+000001/MANIFEST.sha256": HOSTILE, "run/save/CKPT+000002/MANIFEST.sha256": HOSTILE},
    ),
    Attack(
        "diff_of_a_run_so_named",
        run=HOSTILE,
        files={"other/summary.json": "{}"},
        words=(*COMMAND, "diff", HOSTILE, "other"),
    ),
    Attack("diff_of_no_run_so_named", words=(*COMMAND, "diff", HOSTILE, "other")),
    Attack(
        "diff_of_settings_so_named",
        run=RUN,
        files={"other/hyperparams.yaml": '"\\e[2J\\e]0;x\\a": "\\e[31m"\n'},
        words=(*COMMAND, "diff", RUN, "other"),
    ),
    Attack(
        "diff_of_metrics_so_named",
        run=RUN,
        files={"other/summary.json": '{"best": {"\\u001b[2J": 1, "\\u009b31m": "\\u001b[31m"}, "\\u001b[2J": 2}'},
        words=(*COMMAND, "diff", RUN, "other"),
    ),
    Attack(
        "diff_of_versions_so_named",
        run=RUN,
        files={"other/environment.json": '{"\\u001b[2J": "\\u001b[31m"}'},
        words=(*COMMAND, "diff", RUN, "other"),
    ),
    Attack(
        "check_of_a_yaml_so_named",
        files={f"{HOSTILE}.yaml": "x: !apply:os.system [ls]\n"},
        words=(*COMMAND, "check", "recipe/train.py", f"{HOSTILE}.yaml"),
    ),
    Attack("check_of_no_yaml_so_named", words=(*COMMAND, "check", "recipe/train.py", f"{HOSTILE}.yaml")),
    Attack("check_of_a_script_so_named", words=(*COMMAND, "check", f"{HOSTILE}.py", "main.yaml")),
    Attack("check_of_an_option_so_named", words=(*COMMAND, "check", "recipe/train.py", "main.yaml", f"--{HOSTILE}=1")),
    Attack("check_of_keys_so_named", '"\\e[2J": 1\n', words=(*COMMAND, "check", "recipe/train.py", "main.yaml")),
    Attack(
        "show_config_of_keys_so_named",
        '"\\e[2J\\x9b": "\\e]0;x\\a"\n',
        words=(*COMMAND, "check", "recipe/train.py", "main.yaml", "--show-config"),
    ),
    Attack(
        "script_with_a_yaml_so_named",
        files={f"{HOSTILE}.yaml": "x: !apply:os.system [ls]\n"},
        words=("@HERE@/recipe/train.py", f"{HOSTILE}.yaml"),
    ),
    Attack("script_with_no_yaml_so_named", words=("@HERE@/recipe/train.py", f"{HOSTILE}.yaml")),
    Attack("help_of_keys_so_named", '"\\e[2J": 1  # \x85\n', words=("@HERE@/recipe/train.py", "main.yaml", "--help")),
    Attack("replay_of_a_folder_so_named", words=(*COMMAND, "replay", HOSTILE)),
    Attack("replay_of_a_script_so_named", command=recorded(f"@HERE@/{HOSTILE}.py"), words=REPLAY),
    Attack("replay_of_words_so_named", files=OWN, command=recorded(words=(HOSTILE,)), words=REPLAY),
    Attack("replay_of_secrets_so_named", files=OWN, command={**recorded(), "masked": [HOSTILE]}, words=REPLAY),
    Attack("replay_of_a_working_folder_so_named", files=OWN, command=recorded(cwd=f"@HERE@/{HOSTILE}"), words=REPLAY),
    Attack("replay_of_a_command_so_named", files=OWN, command={"script": HOSTILE}, words=REPLAY),
    Attack("replay_of_a_module_so_named", files=OWN, command=recorded(module=HOSTILE), words=REPLAY),
    Attack("compare_of_a_script_so_named", words=(*COMMAND, "compare", f"{HOSTILE}.py", "main.yaml")),
    Attack("verify_resume_of_a_script_so_named", words=(*COMMAND, "verify-resume", f"{HOSTILE}.py", "main.yaml")),
    Attack("diagnose_of_a_script_so_named", words=(*COMMAND, "diagnose", f"{HOSTILE}.py", "main.yaml")),
    Attack("new_recipe_so_named", words=(*COMMAND, "new", HOSTILE)),
    Attack("command_so_named", words=(*COMMAND, HOSTILE)),
]

# What a checkpoint's `meta.json` must not be believed to be.
METAS: dict[str, dict[str, Any]] = {
    "fit_is_a_text": {"fit": "x"},
    "best_by_is_a_list": {"best_by": [1, 2]},
    "fit_is_a_list": {"fit": [1]},
    "fit_is_nothing": {"fit": None},
    "fit_is_infinite": {"fit": float("inf")},
    "fit_is_nan": {"fit": float("nan")},
    "fit_is_negative": {"fit": -1},
    "best_by_is_a_text": {"best_by": "loss"},
    "best_by_is_nothing": {"best_by": None},
    "best_by_is_empty": {"best_by": {}},
    "best_by_a_metric_that_is_a_list": {"best_by": {"metric": ["loss"], "mode": "min"}},
    "best_by_a_metric_that_is_an_object": {"best_by": {"metric": {"a": 1}, "mode": "min"}},
    "best_by_a_metric_that_is_missing": {"best_by": {"metric": "nothing", "mode": "min"}},
    "best_by_a_mode_that_is_unknown": {"best_by": {"metric": "loss", "mode": "x"}},
    "best_by_a_mode_that_is_a_list": {"best_by": {"metric": "loss", "mode": ["min"]}},
    "epoch_is_a_text": {"epoch": "x"},
    "epoch_is_an_object": {"epoch": {"a": 1}},
    "epoch_is_huge": {"epoch": 10**400},
    "optimizer_step_is_a_list": {"optimizer_step": [1]},
    "optimizer_step_is_a_text": {"optimizer_step": "x"},
    "loss_is_a_text": {"loss": "x"},
    "loss_is_a_list": {"loss": [1]},
    "loss_is_infinite": {"loss": float("inf")},
    "loss_is_huge": {"loss": 10**400},
    "inside_epoch_is_a_text": {"inside_epoch": "x"},
    "stage_is_a_number": {"stage": 5, "inside_epoch": True},
    "step_is_a_text": {"step": "x", "inside_epoch": True},
    "key_is_dunder": {"__class__": "x", "__dict__": {}},
}
CONTENTS: dict[str, dict[str, Any]] = {
    "states_are_a_text": {"recoverables": "modules"},
    "states_are_empty": {"recoverables": []},
    "a_state_is_a_number": {"recoverables": [1]},
    "a_state_lies_above": {"recoverables": ["../../../../outside/secret.yaml"]},
    "a_state_is_absolute": {"recoverables": ["/etc/passwd"]},
    "a_state_has_nul": {"recoverables": ["modules\x00"]},
    "a_state_is_named_twice": {"recoverables": ["modules", "modules"]},
    "a_state_is_half_a_character": {"recoverables": ["\ud800"]},
    "the_version_is_a_text": {"format_version": "1"},
    "the_version_is_true": {"format_version": True},
    "the_version_is_huge": {"format_version": 10**30},
    "the_version_is_negative": {"format_version": -1},
    "shards_are_negative": {"shards": -1},
    "shards_are_many": {"shards": 10**12},
    "shards_are_a_text": {"shards": "x"},
    "meta_is_a_list": {"meta": []},
    "meta_is_nothing": {"meta": None},
}
# The run is of two epochs, and this goes on for another.
TRAIN_MORE = {"train.yaml": training(output_folder="run", epochs="!new:amp_recipes.EpochCounter {limit: 3}")}
RESUME = ("@HERE@/recipe/train.py", "train.yaml", "--accept_changes")
CHECKPOINTS = [
    Attack(f"{command}_where_{name}", run=RUN, meta=meta, contents=contents, words=words, files=TRAIN_MORE)
    for name, meta, contents in [
        *((name, meta, {}) for name, meta in METAS.items()),
        *((name, {}, contents) for name, contents in CONTENTS.items()),
    ]
    for command, words in (("export", EXPORT), ("resume", RESUME))
]

FOLDERS = {"replay": REPLAYS, "odd replay": ODD_REPLAYS, "link": LINKS, "name": NAMES, "checkpoint": CHECKPOINTS}
FOLDER_ATTACKS = [attack for attacks in FOLDERS.values() for attack in attacks]
