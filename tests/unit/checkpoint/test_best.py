"""Which checkpoint stands for a run, and which weights in it."""

import pytest
import torch
from torch import nn

from amp_recipes import Checkpointer
from amp_recipes.checkpoint import best_checkpoint, load_weights, model_weights
from amp_recipes.checkpoint.policy import BEST_BY
from amp_recipes.errors import CheckpointError
from amp_recipes.loop.ema import WeightAverage


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embedding.weight


def save(folder, metrics=(), key="accuracy", mode="max"):
    checkpointer = Checkpointer(folder / "save", {"modules": nn.Linear(1, 1)})
    return [
        checkpointer.save_checkpoint({"epoch": n, key: value, BEST_BY: {"metric": key, "mode": mode}})
        for n, value in enumerate(metrics, start=1)
    ]


@pytest.mark.parametrize(("mode", "epoch"), [("max", 2), ("min", 3)])
def test_the_best_by_the_metric_that_the_run_followed(tmp_path, mode, epoch):
    save(tmp_path, [0.5, 0.9, 0.1, float("nan"), 0.6], mode=mode)
    assert best_checkpoint(tmp_path).meta["epoch"] == epoch
    assert best_checkpoint(str(tmp_path / "save")).meta["epoch"] == epoch


def test_without_a_metric_the_newest(tmp_path):
    checkpointer = Checkpointer(tmp_path / "save", {"modules": nn.Linear(1, 1)})
    newest = [checkpointer.save_checkpoint({"epoch": n}) for n in (1, 2)][-1]
    assert best_checkpoint(tmp_path).path == newest.path


def test_a_checkpoints_own_folder_means_that_one(tmp_path):
    first, *_ = save(tmp_path, [0.5, 0.9])
    assert best_checkpoint(first.path).meta["epoch"] == 1
    with pytest.raises(CheckpointError, match=r"CKPT\+000009"):
        best_checkpoint(tmp_path / "save" / "CKPT+000009")


def test_a_folder_without_checkpoints_is_refused_and_not_made(tmp_path):
    with pytest.raises(CheckpointError, match="No checkpoint"):
        best_checkpoint(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_an_average_stands_for_its_weight_under_every_name_of_it(tmp_path):
    modules = nn.ModuleDict({"model": Tied()})
    ema = WeightAverage(modules, 0.5)
    with torch.no_grad():
        modules.model.head.weight += 1
    saved = Checkpointer(tmp_path, {"modules": modules, "ema": ema}).save_checkpoint()
    weights = model_weights(saved)
    expected = ema.state_dict()["model.embedding.weight"]
    assert not torch.equal(expected, modules.model.head.weight)
    assert torch.equal(weights["model.embedding.weight"], expected)
    assert torch.equal(weights["model.head.weight"], expected)
    load_weights(modules, weights, "it")
    assert torch.equal(modules.model.head.weight, expected)
