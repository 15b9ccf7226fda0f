"""Torch's own optimizers become fused where nobody chose otherwise, and go on from what other kernels left."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from amp_recipes.precision.fused import KernelChoices, prefer_fused

CPU = torch.device("cpu")
MAKERS = {
    "adam": lambda parameters: Adam(parameters, lr=0.1, amsgrad=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.1),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def model_and(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    return model, make(model.parameters())


def step(model, optimizer, seed):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def is_fused(optimizer):
    return all(group["fused"] is True for group in optimizer.param_groups)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_fused_optimizer_computes_the_same_but_for_rounding(make):
    model, optimizer = model_and(make)
    twin, other = model_and(make)
    prefer_fused({"optimizer": optimizer}, model, CPU)
    assert is_fused(optimizer) and not is_fused(other)
    for seed in range(5):
        step(model, optimizer, seed)
        step(twin, other, seed)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_it_goes_on_from_the_state_that_other_kernels_left(make):
    model, optimizer = model_and(make)
    for seed in range(3):
        step(model, optimizer, seed)
    fresh = copy.deepcopy(model)
    loaded = make(fresh.parameters())
    prefer_fused({"optimizer": loaded}, fresh, CPU)
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors
    assert not is_fused(loaded), "a checkpoint brings the choice of the run that saved it"
    prefer_fused({"optimizer": loaded}, fresh, CPU)
    assert is_fused(loaded)
    for seed in range(3, 6):
        step(model, optimizer, seed)
        step(fresh, loaded, seed)
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_fused_optimizer_skips_where_it_is_told_on_the_device(make):
    model, optimizer = model_and(make)
    prefer_fused({"optimizer": optimizer}, model, CPU)
    step(model, optimizer, 0)
    before = copy.deepcopy(model.state_dict())
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    step(model, optimizer, 1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_parameter_whose_first_gradient_comes_late_gets_the_momentum_of_other_kernels():
    trained = []
    for fused in (True, False):
        model, optimizer = model_and(MAKERS["sgd"])
        if fused:
            prefer_fused({"optimizer": optimizer}, model, CPU)
        for seed in range(4):
            model[1].requires_grad_(seed >= 2)
            step(model, optimizer, seed)
        trained.append(model)
    for ours, theirs in zip(trained[0].parameters(), trained[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_first_step_that_is_skipped_leaves_no_momentum():
    model, optimizer = model_and(MAKERS["sgd"])
    prefer_fused({"optimizer": optimizer}, model, CPU)
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones(())
    step(model, optimizer, 0)
    assert all(not state["momentum_buffer"].any() for state in optimizer.state.values()) and optimizer.state


class Own(AdamW):
    """May do anything in its step."""


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: AdamW(parameters, lr=0.1, foreach=True),
        lambda parameters: AdamW(parameters, lr=0.1, foreach=False),
        lambda parameters: AdamW(parameters, lr=0.1, fused=False),
        lambda parameters: SGD(parameters, lr=0.1, differentiable=True),
        lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1),
        lambda parameters: RMSprop(parameters, lr=0.1),
        lambda parameters: Own(parameters, lr=0.1),
    ],
    ids=["foreach", "not foreach", "not fused", "differentiable", "dampening", "none of torch's fused", "a subclass"],
)
def test_what_was_chosen_stays_and_the_log_says_who_waits(make, caplog):
    model, optimizer = model_and(make)
    before = [dict(group) for group in optimizer.param_groups]
    with caplog.at_level(logging.INFO):
        prefer_fused({"generator": optimizer}, model, CPU)
    assert [{**group, "params": None} for group in optimizer.param_groups] == [{**it, "params": None} for it in before]
    assert "optimizer 'generator'" in caplog.text and type(optimizer).__name__ in caplog.text


def test_what_is_fused_already_is_left_alone_in_silence(caplog):
    model, optimizer = model_and(lambda parameters: AdamW(parameters, lr=0.1, fused=True))
    with caplog.at_level(logging.INFO):
        prefer_fused({"optimizer": optimizer}, model, CPU)
    assert is_fused(optimizer) and caplog.text == ""


def test_a_group_that_is_added_later_is_fused_too():
    model, optimizer = model_and(MAKERS["adamw"])
    prefer_fused({"optimizer": optimizer}, model, CPU)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert is_fused(optimizer)


def test_sparse_gradients_have_no_fused_kernels():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True))
    optimizer = SGD(model.parameters(), lr=0.1)
    prefer_fused({"optimizer": optimizer}, model, CPU)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert not is_fused(optimizer)


def test_sparse_gradients_of_a_function_end_the_choice_of_fused_kernels():
    table = nn.Parameter(torch.ones(5, 3))
    optimizer = SGD([table], lr=0.1, momentum=0.9)
    prefer_fused({"optimizer": optimizer}, nn.Module(), CPU)
    assert is_fused(optimizer)
    nn.functional.embedding(torch.tensor([1, 2]), table, sparse=True).sum().backward()
    optimizer.step()
    assert not is_fused(optimizer) and torch.equal(table[:, 0], torch.tensor([1, 0.9, 0.9, 1, 1]))


def test_parameters_on_several_kinds_of_devices_are_left_unfused():
    optimizer = AdamW([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))], lr=0.1)
    prefer_fused({"optimizer": optimizer}, nn.Module(), CPU)
    assert not is_fused(optimizer)


def test_a_device_without_the_kernel_is_left_unfused():
    device = torch.device("vulkan")
    optimizer = AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
    prefer_fused({"optimizer": optimizer}, nn.Module(), device)
    assert not is_fused(optimizer)


@pytest.mark.parametrize(("here", "saved"), [(False, True), (True, False), (None, True), (None, False)])
def test_a_checkpoint_does_not_decide_how_steps_are_computed(here, saved):
    model, optimizer = model_and(lambda parameters: AdamW(parameters, lr=0.1, fused=here))
    other = model_and(lambda parameters: AdamW(parameters, lr=0.1, fused=saved))
    step(*other, 0)
    choices = KernelChoices({"optimizer": optimizer})
    optimizer.load_state_dict(other[1].state_dict())
    choices.put_back()
    assert [group["fused"] for group in optimizer.param_groups] == [here]
    assert getattr(optimizer, "_step_supports_amp_scaling", False) is bool(here)
    step(model, optimizer, 1)
    assert all(state["step"] == 2 for state in optimizer.state.values())
