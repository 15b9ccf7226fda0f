"""Entries have the model's own names in a checkpoint, however the model was wrapped when it was saved or loaded."""

import pytest
import torch
from torch import nn

from amp_recipes.checkpoint import Checkpointer, clean_names
from amp_recipes.errors import CheckpointError


def body(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


class NamedLikeAWrapper(nn.Module):
    """A user's own submodules may have any name."""

    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)


@pytest.fixture
def ddp(group_of_one):
    """Wraps in DistributedDataParallel, in a process group of one without a port."""
    return nn.parallel.DistributedDataParallel


WRAPPED = {
    "compiled": lambda seed, ddp: torch.compile(body(seed)),
    "data parallel": lambda seed, ddp: nn.DataParallel(body(seed)),
    "ddp": lambda seed, ddp: ddp(body(seed)),
    "ddp of compiled": lambda seed, ddp: ddp(torch.compile(body(seed))),
    "compiled ddp": lambda seed, ddp: torch.compile(ddp(body(seed))),
    "inside": lambda seed, ddp: nn.Sequential(*[torch.compile(child) for child in body(seed)]),
}


def test_wrapped_and_plain_models_load_each_others_checkpoints(tmp_path, ddp, subtests):
    for how, wrap in WRAPPED.items():
        with subtests.test(how):
            plain = body()
            wrapped = wrap(1, ddp)
            assert set(wrapped.state_dict()) != set(plain.state_dict())  # or this test tests nothing
            assert list(clean_names(wrapped).values()) == list(plain.state_dict())

            Checkpointer(tmp_path / how / "wrapped", {"m": wrapped}).save_checkpoint()
            Checkpointer(tmp_path / how / "wrapped", {"m": plain}).recover_if_possible()
            for ours, theirs in zip(plain.state_dict().values(), wrapped.state_dict().values(), strict=True):
                assert torch.equal(ours, theirs)

            other = body(2)
            Checkpointer(tmp_path / how / "plain", {"m": other}).save_checkpoint()
            Checkpointer(tmp_path / how / "plain", {"m": wrapped}).recover_if_possible()
            for ours, theirs in zip(other.state_dict().values(), wrapped.state_dict().values(), strict=True):
                assert torch.equal(ours, theirs)


def test_a_users_submodule_called_like_a_wrapper_keeps_its_name(tmp_path):
    model = NamedLikeAWrapper()
    keys = list(model.state_dict())
    assert clean_names(model) == {key: key for key in keys}
    assert list(clean_names(nn.DataParallel(model)).values()) == keys
    assert list(clean_names(torch.compile(model)).values()) == keys
    Checkpointer(tmp_path, {"m": torch.compile(model)}).save_checkpoint()
    other = NamedLikeAWrapper()
    Checkpointer(tmp_path, {"m": other}).recover_if_possible()
    assert torch.equal(other.module.weight, model.module.weight)


def test_an_averaged_model_is_no_wrapper(tmp_path):
    averaged = torch.optim.swa_utils.AveragedModel(body())
    assert clean_names(averaged) == {key: key for key in averaged.state_dict()}
    averaged = torch.optim.swa_utils.AveragedModel(torch.compile(body()))
    assert "module.0.weight" in clean_names(averaged).values()
    assert "n_averaged" in clean_names(averaged).values()


def test_the_versions_of_wrapped_modules_reach_the_plain_ones(tmp_path):
    """BatchNorm reads by version whether the count of batches may be missing."""
    path = Checkpointer(tmp_path, {"m": nn.DataParallel(body())})
    state = path.read(path.save_checkpoint())["m"]
    assert dict(state._metadata) == dict(body().state_dict()._metadata)


def test_what_does_not_fit_a_wrapped_model_is_named_without_the_wrapper(tmp_path):
    Checkpointer(tmp_path, {"m": nn.Sequential(nn.Linear(3, 5))}).save_checkpoint()
    with pytest.raises(CheckpointError) as error:
        Checkpointer(tmp_path, {"m": torch.compile(body())}).recover_if_possible()
    assert "m.0.weight: shape (4, 3) here, (5, 3) in the checkpoint" in str(error.value)
    assert "_orig_mod" not in str(error.value)
