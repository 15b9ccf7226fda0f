"""load_trained: what it says of folders without usable weights."""

import pytest
import torch
from logged import logged
from safetensors.torch import load_file, save_file

from amp_recipes import Brain, load_trained
from amp_recipes.checkpoint import CheckpointPolicy
from amp_recipes.commands.export import export_run
from amp_recipes.errors import CheckpointError
from amp_recipes.trained import run_folder

SETTINGS = "modules:\n  model: !new:torch.nn.Linear {in_features: 2, out_features: 1}\n"


@pytest.fixture
def run(tmp_path):
    """A run with two checkpoints."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "hyperparams.yaml").write_text(SETTINGS)
    keeper = CheckpointPolicy(None, folder / "save", writes=True)
    keeper.register("modules", torch.nn.ModuleDict({"model": torch.nn.Linear(2, 1)}))
    for epoch in (1, 2):
        keeper.save_epoch({"epoch": epoch, "loss": -epoch}, "loss", "min")
    keeper.wait()
    return folder


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_trained(folder, device="cpu")
    return str(refused.value)


def weights(brain: Brain) -> torch.Tensor:
    return brain.modules.model.weight.detach()


def test_a_run_its_checkpoint_and_its_export_give_the_same_weights(run):
    export_run(run)
    newest = run / "save" / "CKPT+000002"
    expected = load_file(newest / "modules.safetensors")["model.weight"]
    for source in (run, newest, run / "export"):
        assert torch.equal(weights(load_trained(source, device="cpu")), expected)
    assert run_folder(newest) == run.absolute() and run_folder(run / "export") == run / "export"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        (2**62).to_bytes(8, "little") + b"{}",
        b"\x08" + b"\0" * 7 + b'{"a":1}\n',
        b"\4" + b"\0" * 7 + b"\x1b[2J",
    ],
    ids=["empty", "no header", "huge header", "wrong header", "terminal codes"],
)
def test_damaged_weights_of_an_export_are_named(run, content):
    export_run(run)
    file = run / "export" / "model.safetensors"
    file.write_bytes(content)
    said = refusal(run / "export")
    assert said.startswith(f"{file} is damaged or not readable (") and said.endswith(". Export the run again.")
    assert said.isprintable()


def test_a_cut_file_of_weights_is_damaged(run):
    export_run(run)
    file = run / "export" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    said = refusal(run / "export")
    assert said.startswith(f"{file} is damaged or not readable (") and said.endswith(". Export the run again.")


def test_weights_of_another_shape_are_refused(run):
    export_run(run)
    save_file({"model.weight": torch.zeros(3, 2), "model.bias": torch.zeros(3)}, run / "export" / "model.safetensors")
    assert "is from a different model; nothing was loaded" in refusal(run / "export")


def test_only_a_run_without_a_checkpoint_is_told_to_train_first(run):
    newest = run / "save" / "CKPT+000002"
    (newest / "modules.safetensors").write_bytes(b"no")
    said = refusal(newest)
    assert str(newest) in said and "Train first" not in said
    for folder in (run / "save").iterdir():
        (folder / "meta.json").write_text("{")
    with logged("is damaged"):
        said = refusal(run)
    assert said.startswith(f"Every checkpoint in '{run}' is damaged:") and "Train first" not in said
    (run / "save").rename(run / "elsewhere")
    assert "Train first; a run with --debug leaves no checkpoint." in refusal(run)
