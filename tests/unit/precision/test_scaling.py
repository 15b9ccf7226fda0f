"""The one owner of scale, backward, unscale, clip, step, update and skip, without a Brain around it."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from amp_recipes.errors import NonfiniteError, PrecisionError, RecipeError
from amp_recipes.precision.host_copy import HostCopy
from amp_recipes.precision.optimizers import check_optimizers
from amp_recipes.precision.patience import Patience
from amp_recipes.precision.scaling import LossScaler, Update, UpdateOwner

CPU = torch.device("cpu")


def owner(modules: nn.Module, fp16: bool = False, **scaler) -> UpdateOwner:
    return UpdateOwner(modules, LossScaler("cpu", enabled=fp16, **scaler), CPU)


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()


def test_scale_never_falls_below_its_floor():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    updates = owner(model, fp16=True, init_scale=16.0, min_scale=2.0)
    for _ in range(6):
        updates.backward((model(torch.full((1, 2), torch.inf))).sum())
        updates.step({"optimizer": optimizer}, 0)
        updates.update_scale()
        optimizer.zero_grad()
    assert updates.scaler.get_scale() == 2.0


def test_gradients_of_a_further_round_are_unscaled_by_the_scale_their_backward_used():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    updates = owner(model, fp16=True, init_scale=1024.0, growth_interval=1)
    for expected in (0.5, 0.0, -0.5):  # each round's gradient is 0.5, whatever the scale
        updates.backward(model(torch.tensor([[0.5]])).sum())
        updates.step({"critic": optimizer}, 0)
        optimizer.zero_grad()
        assert model.weight.item() == expected
    # Two earlier verdicts have moved the scale; the third does so at the iteration's end.
    assert updates.scaler.get_scale() == 4096.0
    updates.update_scale()
    assert updates.scaler.get_scale() == 8192.0


def test_optimizers_that_step_by_name_share_a_scale_also_after_a_pause():
    """A stale note of who has stepped would move the scale between the two."""
    modules = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("generator", "critic")})
    optimizers = {name: torch.optim.SGD(module.parameters(), lr=1.0) for name, module in modules.items()}
    updates = owner(modules, fp16=True, init_scale=1024.0, growth_interval=1)
    for paused in (False, True, False, False):
        updates.scaler.pause(paused)
        norms = []
        for name, module in modules.items():
            updates.backward(module(torch.ones(1, 1)).sum(), optimizers=[optimizers[name]])
        for name, optimizer in optimizers.items():
            norms.append(updates.step({name: optimizer}, 0).read().grad_norms[name])
            updates.update_scale(optimizers.values())
            optimizer.zero_grad()
        updates.drop_losses()
        assert norms == [1.0, 1.0]
    assert updates.scaler.get_scale() == 8192.0


def test_scale_moves_once_when_two_optimizers_have_stepped():
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    modules = nn.ModuleList([first, second])
    optimizers = {
        "first": torch.optim.SGD(first.parameters(), lr=0.1),
        "second": torch.optim.SGD(second.parameters(), lr=0.1),
    }
    updates = owner(modules, fp16=True, init_scale=8.0, growth_interval=1)
    updates.backward(second(first(torch.ones(1, 1))).sum())
    for name, optimizer in optimizers.items():
        updates.step({name: optimizer}, 0)
        updates.update_scale(optimizers.values())
        assert updates.scaler.get_scale() == (8.0 if name == "first" else 16.0)


def test_each_optimizer_is_clipped_by_its_own_norm_over_all_its_groups():
    first, second, third = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)
    modules = nn.ModuleList([first, second, third])
    optimizers = {
        "two groups": torch.optim.SGD([{"params": first.parameters()}, {"params": second.parameters()}], lr=1.0),
        "one": torch.optim.SGD(third.parameters(), lr=1.0),
    }
    x = torch.randn(4, 3) * 10
    before = [weights(module) for module in modules]
    updates = owner(modules)
    updates.backward(sum(module(x).square().mean() for module in modules))
    grads = [torch.cat([p.grad.flatten() for p in module.parameters()]) for module in modules]
    update = updates.step(optimizers, 1.0).read()
    together = torch.cat(grads[:2]).norm()
    assert update.grad_norms["two groups"] == pytest.approx(together.item(), rel=1e-6)
    assert update.grad_norm == pytest.approx(torch.cat(grads).norm().item(), rel=1e-6)
    for module, old, grad, norm in zip(modules, before, grads, (together, together, grads[2].norm()), strict=True):
        torch.testing.assert_close(weights(module), old - grad / norm, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bound", [0.0, -1.0])
def test_no_clipping_at_zero_or_below(bound):
    model = nn.Linear(3, 1, bias=False)
    x = torch.full((1, 3), 100.0)
    before = weights(model)
    updates = owner(model)
    updates.backward(model(x).sum())
    updates.step({"optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}, bound)
    assert torch.equal(weights(model), before - 100.0)


@pytest.mark.parametrize("fp16", [False, True])
def test_sparse_gradients_are_clipped_by_their_coalesced_values(fp16):
    sparse, dense = nn.Embedding(6, 2, sparse=True), nn.Embedding(6, 2)
    dense.load_state_dict(sparse.state_dict())
    index = torch.tensor([1, 1, 4])
    for table in (sparse, dense):
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        updates = owner(table, fp16=fp16)
        updates.backward((table(index) * 50).sum())
        update = updates.step({"optimizer": optimizer}, 1.0).read()
        assert update.grad_norm == pytest.approx(math.sqrt(2 * 100**2 + 2 * 50**2))
    torch.testing.assert_close(sparse.weight, dense.weight)


def test_a_parameter_without_gradient_and_an_optimizer_without_any():
    used, unused = nn.Linear(1, 1), nn.Linear(1, 1)
    modules = nn.ModuleList([used, unused])
    optimizers = {
        "some": torch.optim.SGD(modules.parameters(), lr=0.1),
        "none": torch.optim.SGD(unused.parameters(), lr=0.1),
    }
    updates = owner(modules, fp16=True)
    updates.backward(used(torch.ones(1, 1)).sum())
    update = updates.step(optimizers, 1.0).read()
    assert update.taken and list(update.grad_norms) == ["some"]
    assert updates.step({"none": optimizers["none"]}, 1.0) is None


def test_a_nonfinite_gradient_of_one_optimizer_stops_all_in_the_call():
    good, bad = nn.Linear(1, 1), nn.Linear(1, 1)
    modules = nn.ModuleList([good, bad])
    optimizers = {str(i): torch.optim.SGD(m.parameters(), lr=0.1) for i, m in enumerate(modules)}
    before = weights(modules)
    updates = owner(modules)
    updates.backward(good(torch.ones(1, 1)).sum())
    for parameter in bad.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    assert not updates.step(optimizers, 1.0).read().taken
    assert torch.equal(weights(modules), before)


def test_fused_sgd_with_momentum_survives_a_skipped_first_step():
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    twin = nn.Linear(64, 64)
    twin.load_state_dict(model.state_dict())
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, fused=True)
    updates, twin_updates = owner(model), owner(twin)
    x = torch.randn(8, 64)
    for bad in (True, False, True, False):
        loss = model(x).square().mean()
        updates.backward(loss * math.nan if bad else loss)
        assert updates.step({"optimizer": optimizer}, 5.0).read().taken is not bad
        optimizer.zero_grad()
        if not bad:
            twin_updates.backward(twin(x).square().mean())
            twin_updates.step({"optimizer": twin_optimizer}, 5.0)
            twin_optimizer.zero_grad()
    assert torch.equal(weights(model), weights(twin))


def test_unscaled_differentiable_gradients():
    x = torch.randn(5, 3, requires_grad=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    updates = owner(model, fp16=True, init_scale=2.0**10)
    expected = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
    found = updates.gradients(model(x), x)
    torch.testing.assert_close(found, expected)
    assert found.requires_grad
    several = updates.gradients(model(x).sum(), list(model.parameters()))
    assert [grad.shape for grad in several] == [parameter.shape for parameter in model.parameters()]


def test_gradients_of_a_vector_of_losses_survive_the_first_scale_in_fp16():
    """65536, at which a scale begins, is inf in fp16: no element's way back may begin with it."""
    x = torch.randn(16, 3, requires_grad=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    updates = owner(model, fp16=True, init_scale=2.0**16)
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    with torch.autocast("cpu", torch.float16):
        losses = model(x)
    torch.testing.assert_close(updates.gradients(losses, x), expected, rtol=2e-2, atol=1e-3)


def test_lbfgs_is_refused_with_its_reason():
    model = nn.Linear(1, 1)
    with pytest.raises(PrecisionError, match=r"LBFGS.*several times"):
        check_optimizers({"optimizer": torch.optim.LBFGS(model.parameters())}, model, scaled=False)


def test_fp16_parameters_are_named_before_the_first_step():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).half())
    optimizers = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    check_optimizers(optimizers, model, scaled=False)
    with pytest.raises(PrecisionError, match=r"1\.weight, 1\.bias"):
        check_optimizers(optimizers, model, scaled=True)


def skipped(scale: float | None) -> Update:
    return Update(False, [math.nan], {"optimizer": math.inf}, scale)


def test_patience_counts_only_what_is_not_ordinary_back_off(caplog):
    patience = Patience(2, "fp16", 1.0)
    for step in range(10):
        patience.observe(skipped(1024.0), lambda: "here", step)
    patience.observe(skipped(1.0), lambda: "epoch 1, batch 3", 11)
    assert "at its minimum" in caplog.text and "epoch 1, batch 3" in caplog.text
    patience.observe(Update(True, [1.0], {}, 1.0), lambda: "here", 11)
    patience.observe(skipped(1.0), lambda: "here", 12)
    patience.check()
    patience.observe(skipped(1.0), lambda: "epoch 2, batch 7", 13)
    with pytest.raises(NonfiniteError, match=r"epoch 2, batch 7: 2 updates in a row .* 13 skipped in all"):
        patience.check()
    patience.reset()
    patience.check()


def test_a_nonfinite_loss_with_finite_gradients_counts_at_any_scale():
    patience = Patience(2, "fp16", 1.0)
    for step in range(2):
        patience.observe(Update(False, [math.nan], {"optimizer": 1.0}, 8192.0), lambda: "here", step)
    with pytest.raises(NonfiniteError):
        patience.check()


def test_two_named_steps_after_two_backwards_share_both_losses():
    """A nonfinite loss whose gradients are finite must not let one of the two optimizers step."""
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    modules = nn.ModuleList([first, second])
    before = weights(modules)
    updates = owner(modules)
    updates.backward(first(torch.ones(1, 1)).sum())
    updates.backward(second(torch.ones(1, 1)).sum() + math.inf)
    for name, module in (("first", first), ("second", second)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        assert not updates.step({name: optimizer}, 0).read().taken
        optimizer.zero_grad()
    assert torch.equal(weights(modules), before)
    updates.backward(first(torch.ones(1, 1)).sum())
    assert updates.step({"first": torch.optim.SGD(first.parameters(), lr=0.1)}, 0).read().taken


@pytest.mark.parametrize("fp16", [False, True])
def test_backward_for_one_optimizer_leaves_the_others_without_gradients(fp16):
    """A generator's loss goes through the critic, and yet must leave nothing there."""
    torch.manual_seed(0)
    critic, generator = nn.Linear(3, 1), nn.Linear(2, 3)
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.SGD([*generator.parameters(), frozen], lr=0.1)
    updates = owner(nn.ModuleList([critic, generator]), fp16=fp16, init_scale=8.0)
    loss = critic(generator(torch.randn(5, 2)) * frozen).square().mean()
    expected = torch.autograd.grad(
        loss * (8.0 if fp16 else 1.0) * 0.25, list(generator.parameters()), retain_graph=True
    )
    updates.backward(loss, share=1.0, of=4.0, optimizers=[optimizer])
    assert all(torch.equal(p.grad, grad) for p, grad in zip(generator.parameters(), expected, strict=True))
    assert all(p.grad is None for p in (*critic.parameters(), frozen))
    assert updates.step({"generator": optimizer}, 0).read().taken


def test_backward_for_an_optimizer_that_is_frozen_does_nothing():
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3), requires_grad=False)], lr=0.1)
    updates = owner(model)
    updates.backward(model(torch.ones(1, 1)).sum(), optimizers=[optimizer])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert updates.step({"frozen": optimizer}, 0) is None


def test_two_optimizers_that_share_a_parameter_are_refused():
    model = nn.Linear(1, 1)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name in ("a", "b")}
    with pytest.raises(PrecisionError, match=r"weight belongs to two optimizers, 'a' and 'b'"):
        check_optimizers(optimizers, model, scaled=False)


def test_what_the_recipe_has_unscaled_itself_is_not_unscaled_again():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    updates = owner(model, fp16=True, init_scale=1024.0)
    for expected in (0.5, 0.0):
        updates.backward(model(torch.tensor([[0.5]])).sum())
        updates.scaler.unscale_(optimizer)
        updates.step({"optimizer": optimizer}, 0)
        updates.update_scale()
        optimizer.zero_grad()
        assert model.weight.item() == expected


def test_gradients_that_were_not_scaled_are_refused():
    model = nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RecipeError, match=r"self\.backward\(loss\)"):
        owner(model, fp16=True).step({"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}, 0)


@pytest.mark.parametrize(("loss", "said"), [(torch.ones(3), r"of shape \(3,\)"), (1.0, "a float"), ({}, "a dict")])
def test_a_loss_that_is_no_number_is_named(loss, said):
    with pytest.raises(RecipeError, match=said):
        owner(nn.Linear(1, 1)).backward(loss)


def test_a_float64_loss_beyond_float32_is_finite(monkeypatch):
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-300, fused=True)
    for immediate in (True, False):
        monkeypatch.setattr(HostCopy, "immediate", immediate)
        updates = owner(model)
        updates.backward(model(torch.tensor([[1e200]], dtype=torch.float64)).sum())
        update = updates.step({"optimizer": optimizer}, 0).read()
        optimizer.zero_grad()
        assert update.taken and update.losses == [1e200]


def test_a_new_optimizer_over_known_parameters_is_looked_at_afresh(monkeypatch):
    """Where kernels skip, torch's fused SGD would keep the uninitialised momentum of a skipped first step."""
    monkeypatch.setattr(HostCopy, "immediate", False)
    model = nn.Linear(4, 4)
    updates = owner(model)
    for bad_first in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        for bad in (bad_first, False):
            loss = model(torch.ones(1, 4)).sum()
            updates.backward(loss * math.nan if bad else loss)
            taken = updates.step({"optimizer": optimizer}, 5.0).read().taken
            assert taken is not bad and ("momentum_buffer" in optimizer.state[model.weight]) is not (bad and bad_first)
            optimizer.zero_grad()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda brain: pickle.loads(pickle.dumps(brain))])
def test_a_copy_judges_for_itself(duplicate):
    model = nn.Linear(1, 1)
    updates = owner(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    updates.backward(model(torch.ones(1, 1)).sum())
    updates.step({"optimizer": optimizer}, 0)
    twin_updates, twin, twin_optimizer = duplicate((updates, model, optimizer))
    twin_optimizer.zero_grad()
    twin_updates.backward(twin(torch.full((1, 1), math.nan)).sum())
    assert not twin_updates.step({"optimizer": twin_optimizer}, 0).read().taken
    assert weights(twin).isfinite().all()
