"""Export: the files it writes, read back with the safetensors library alone."""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from amp_recipes import Brain, Checkpointer, __version__, create_experiment_directory
from amp_recipes.checkpoint import Checkpoint, CheckpointPolicy, fit_of
from amp_recipes.commands import cli
from amp_recipes.commands.export import export_run
from amp_recipes.errors import CheckpointError, ConfigError
from amp_recipes.loop.ema import WeightAverage


class Tied(nn.Module):
    """Embedding and head share their weight; a buffer, a scalar and an empty tensor beside them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("nothing", torch.empty(0, 2))


class WithExtra(nn.Linear):
    """Keeps a word in its state, which is no tensor."""

    def get_extra_state(self):
        return {"word": "x"}

    def set_extra_state(self, state):
        pass


def save_run(run: Path, model: nn.Module, losses=(1.0, 2.0), metric="loss", mode="min", **recoverables) -> list[dict]:
    """A run that saved after each epoch; returns the state of the model at each, made new by chance."""
    modules = nn.ModuleDict({"model": model})
    keeper = CheckpointPolicy(None, run / "save", writes=True)
    keeper.register("modules", modules)
    for name, obj in recoverables.items():
        keeper.register(name, obj)
    states = []
    for epoch, loss in enumerate(losses, 1):
        with torch.no_grad():
            for parameter in modules.parameters():
                parameter.normal_()
        states.append({name: it.clone() for name, it in modules.state_dict().items() if isinstance(it, torch.Tensor)})
        keeper.save_epoch({"epoch": epoch, metric: loss}, metric, mode)
    keeper.wait()
    return states


def assert_equal_states(found, expected):
    assert list(sorted(found)) == list(sorted(expected))
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 1)])
def test_the_best_checkpoints_weights_are_written_under_their_names(tmp_path, mode, best):
    states = save_run(tmp_path, nn.Linear(2, 3), losses=(3.0, 1.0, 2.0), mode=mode)
    exported = export_run(tmp_path)
    assert exported.folder == tmp_path / "export"
    assert_equal_states(load_file(tmp_path / "export" / "model.safetensors"), states[best - 1])


def test_a_single_checkpoint_can_be_named(tmp_path):
    states = save_run(tmp_path / "run", nn.Linear(2, 3), losses=(1.0, 2.0))
    newest = Checkpointer(tmp_path / "run" / "save").find_checkpoint()
    export_run(newest.path, tmp_path / "there")
    assert_equal_states(load_file(tmp_path / "there" / "model.safetensors"), states[1])
    assert export_run(newest.path).folder == tmp_path / "run" / "export"
    assert export_run(tmp_path / "run" / "save").folder == tmp_path / "run" / "export"


def test_tied_tensors_are_there_under_both_names_and_load_strictly(tmp_path):
    model = Tied()
    states = save_run(tmp_path, model, losses=(1.0,))
    export_run(tmp_path)
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert_equal_states(found, states[0])
    fresh = nn.ModuleDict({"model": Tied()})
    fresh.load_state_dict(found)
    assert fresh["model"].head.weight is fresh["model"].embed.weight
    assert torch.equal(fresh["model"].head.weight, model.head.weight)


def test_averaged_weights_are_exported_where_the_run_kept_them(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    average = WeightAverage(nn.ModuleDict({"model": model}), decay=0.5)
    [state] = save_run(tmp_path, model, losses=(1.0,), ema=average)
    expected = {**state, **{name: it.clone() for name, it in average.state_dict().items()}}
    exported = export_run(tmp_path)
    assert exported.about["averaged"] is True and "averaged weights" in exported.report()
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert_equal_states(found, expected)
    assert not torch.equal(found["model.0.weight"], state["model.0.weight"])
    assert torch.equal(found["model.1.running_mean"], state["model.1.running_mean"])


def test_what_the_files_say_about_themselves(tmp_path):
    save_run(tmp_path, nn.Linear(1, 1), losses=(0.25, 0.75), metric="accuracy", mode="max")
    about = export_run(tmp_path).about
    assert json.loads((tmp_path / "export" / "export.json").read_text()) == about
    data = (tmp_path / "export" / "model.safetensors").read_bytes()
    assert about == {
        "run": str(tmp_path),
        "checkpoint": str(tmp_path / "save" / "CKPT+000002"),
        "metric": "accuracy",
        "value": 0.75,
        "epoch": 2,
        "averaged": False,
        "amp_recipes": __version__,
        "torch": torch.__version__,
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    with safe_open(tmp_path / "export" / "model.safetensors", "pt") as file:
        words = file.metadata()
    assert (words["run"], words["metric"], words["value"], words["epoch"]) == (str(tmp_path), "accuracy", "0.75", "2")
    assert words["checkpoint"] == about["checkpoint"] and words["format"] == "pt"


def test_the_resolved_settings_come_along_or_their_absence_is_said(tmp_path, capsys):
    yaml = tmp_path / "x.yaml"
    yaml.write_text("width: 3\ntwice: !ref <width> * 2\n")
    run = tmp_path / "run"
    save_run(run, nn.Linear(1, 1), losses=(1.0,))
    assert cli.main(["export", str(run)]) == 0
    assert "no hyperparams.yaml" in capsys.readouterr().out and not (run / "export" / "hyperparams.yaml").exists()
    create_experiment_directory(run, yaml)
    assert cli.main(["export", str(run)]) == 0
    assert "hyperparams.yaml (" in capsys.readouterr().out
    assert (run / "export" / "hyperparams.yaml").read_text() == (run / "hyperparams.yaml").read_text()
    assert "6" in (run / "export" / "hyperparams.yaml").read_text()


def test_the_two_lines_that_it_prints_load_the_model(tmp_path, capsys):
    [state] = save_run(tmp_path, nn.Linear(2, 2), losses=(1.0,))
    assert cli.main(["export", str(tmp_path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    modules = {"model": nn.Linear(2, 2)}
    exec("\n".join(lines[-2:]), {"torch": torch, "modules": modules})
    assert_equal_states(nn.ModuleDict(modules).state_dict(), state)


def test_entries_that_are_no_tensors_are_left_out_and_named(tmp_path, capsys):
    save_run(tmp_path, WithExtra(1, 1), losses=(1.0,))
    assert cli.main(["export", str(tmp_path)]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any("left out" in line and "model._extra_state" in line for line in lines)
    assert set(load_file(tmp_path / "export" / "model.safetensors")) == {"model.weight", "model.bias"}
    exec("\n".join(lines[-2:]), {"torch": torch, "modules": {"model": WithExtra(1, 1)}})  # strict=False


def test_a_run_of_brain_is_exported_without_a_line_of_the_recipe(tmp_path):
    class Fits(Brain):
        def compute_forward(self, batch, stage):
            return self.modules.model(batch)

        def compute_objectives(self, predictions, batch, stage):
            return (predictions - batch).pow(2).mean()

    brain = Fits(
        {"model": nn.Linear(2, 2)}, torch.optim.SGD, {}, {"output_folder": str(tmp_path), "noprogressbar": True}
    )
    brain.opt_class = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    brain.fit([1, 2], [torch.ones(3, 2)], [torch.ones(3, 2)])
    exported = export_run(tmp_path)
    assert (exported.about["metric"], exported.about["epoch"]) == ("loss", 2)
    assert exported.about["value"] == brain.summary.last["valid"]["loss"]
    assert_equal_states(load_file(tmp_path / "export" / "model.safetensors"), brain.modules.state_dict())


# -------------------------------------------------------------- what cannot be exported


def test_no_checkpoint_no_modules_and_damage_are_told(tmp_path):
    with pytest.raises(CheckpointError, match="No checkpoint in"):
        export_run(tmp_path / "nothing")
    Checkpointer(tmp_path / "own" / "save", {"net": nn.Linear(1, 1)}).save_checkpoint()
    with pytest.raises(CheckpointError, match="no state of 'modules'"):
        export_run(tmp_path / "own")
    save_run(tmp_path / "bad", nn.Linear(1, 1), losses=(1.0,))
    file = tmp_path / "bad" / "save" / "CKPT+000001" / "modules.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"modules\.safetensors"):
        export_run(tmp_path / "bad")
    assert not (tmp_path / "bad" / "export").exists()


def test_when_all_checkpoints_are_damaged_it_says_so(tmp_path):
    save_run(tmp_path, nn.Linear(1, 1), losses=(2.0, 1.0))
    folders = list((tmp_path / "save").glob("CKPT+*"))
    for folder in folders:
        (folder / "meta.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"Every checkpoint in .* is damaged") as told:
        export_run(tmp_path)
    assert all(f"{folder}: meta.json" in str(told.value) for folder in folders)


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    save_run(tmp_path, nn.Linear(1, 1), losses=(1.0,))
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="--to"):
        export_run(tmp_path, tmp_path / "file" / "below")


def test_a_dtype_that_safetensors_lacks_is_told(tmp_path):
    model = nn.Module()
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    model.register_parameter("w", nn.Parameter(torch.zeros(1)))
    save_run(tmp_path, model, losses=(1.0,))
    with pytest.raises(CheckpointError, match="complex128"):
        export_run(tmp_path)
    assert list((tmp_path / "export").iterdir()) == []


def test_a_failure_leaves_the_earlier_export_whole(tmp_path, monkeypatch):
    save_run(tmp_path, nn.Linear(1, 1), losses=(1.0,))
    export_run(tmp_path)
    before = {file.name: file.read_bytes() for file in (tmp_path / "export").iterdir()}
    replaced = []

    def fail(source, target):
        replaced.append(target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        export_run(tmp_path)
    assert replaced and {file.name: file.read_bytes() for file in (tmp_path / "export").iterdir()} == before


def test_nothing_is_written_or_copied_through_a_link_of_the_run(tmp_path):
    run, secret, outside = tmp_path / "run", tmp_path / "secret", tmp_path / "outside"
    save_run(run, nn.Linear(1, 1), losses=(1.0,))
    outside.mkdir()
    secret.write_text("secret")
    (run / "export").symlink_to(outside)
    with pytest.raises(ConfigError, match="is a link"):
        export_run(run)
    (run / "export").unlink()
    (run / "hyperparams.yaml").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"hyperparams\.yaml"):
        export_run(run)
    (run / "hyperparams.yaml").unlink()
    os.mkfifo(run / "hyperparams.yaml")
    with pytest.raises(ConfigError, match="a named pipe"):
        export_run(run)
    assert not list(outside.iterdir()) and not (run / "export").exists()
    (run / "hyperparams.yaml").unlink()
    (run / "export").mkdir()
    (run / "export" / "export.json").symlink_to(secret)
    export_run(run)
    assert secret.read_text() == "secret" and not (run / "export" / "export.json").is_symlink()
    assert sorted(path.name for path in (run / "export").iterdir()) == ["export.json", "model.safetensors"]


def rewrite_meta(folder: Path, **meta) -> None:
    """Change what a checkpoint says of itself, its checksum too."""
    content = json.loads((folder / "meta.json").read_text())
    content["meta"].update(meta)
    (folder / "meta.json").write_text(json.dumps(content))
    lines = (folder / "MANIFEST.sha256").read_text().splitlines()
    digest = hashlib.sha256((folder / "meta.json").read_bytes()).hexdigest()
    lines = [f"{digest}  meta.json" if line.endswith("  meta.json") else line for line in lines]
    (folder / "MANIFEST.sha256").write_text("".join(f"{line}\n" for line in lines))


def test_meta_of_the_wrong_kind_is_told(tmp_path, subtests):
    for number, meta in enumerate(
        [
            {"best_by": [1, 2]},
            {"best_by": None},
            {"best_by": {"metric": ["loss"], "mode": "min"}},
            {"best_by": {"metric": "loss", "mode": "best"}},
            {"best_by": {"metric": "loss"}},
        ]
    ):
        with subtests.test(str(meta)):
            run = tmp_path / str(number)
            save_run(run, nn.Linear(1, 1), losses=(1.0,))
            rewrite_meta(run / "save" / "CKPT+000001", **meta)
            with pytest.raises(CheckpointError, match="best_by is"):
                export_run(run)
    for value, expected in [("x", None), (None, None), ([1], None), (2, 2), (0.5, 1)]:
        with subtests.test(f"fit {value}"):
            made = Checkpoint(tmp_path, 1, {"fit": value})
            if expected is None:
                with pytest.raises(CheckpointError, match="fit is"):
                    fit_of(made)
            else:
                assert fit_of(made) == expected


def test_a_metrics_name_cannot_command_the_terminal(tmp_path, capsys):
    save_run(tmp_path, nn.Linear(1, 1), losses=(1.0,), metric="\x1b[2Jloss\nwrote /etc/passwd")
    assert cli.main(["export", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told and r"\x1b[2Jloss\nwrote /etc/passwd" in told
