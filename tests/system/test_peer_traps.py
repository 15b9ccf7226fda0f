"""Traps that trainers of this kind fall into, one test each: every one fails on the behaviour it names."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from device import DEVICE
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from amp_recipes import Brain, fwd_default_precision, load_hparams, parse_arguments
from amp_recipes.data import to_device
from amp_recipes.errors import ConfigError

EVERY_PRECISION = ["fp32", "bf16", "fp16"]


class Recipe(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])


def make_batches(count: int = 4, scale: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(17)
    return [
        (torch.randn(4, 8, generator=generator), scale * torch.randn(4, 8, generator=generator)) for _ in range(count)
    ]


def options(precision: str = "fp32", **others) -> dict:
    return {"device": DEVICE, "precision": precision, "noprogressbar": True, "init_scale": 2.0**8, **others}


def linear(seed: int = 2) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(8, 8, device=DEVICE)


def test_negative_or_zero_max_grad_norm_disables_clipping(subtests):
    """Trap 1: clipping with a bound of -1 flips the sign of every gradient, and the loss rises."""
    batches = make_batches(scale=100.0)
    model = linear()
    optimizer = SGD(model.parameters(), lr=0.1)
    for inputs, targets in to_device(batches, DEVICE):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        assert torch.cat([p.grad.flatten() for p in model.parameters()]).norm() > 5.0  # a bound would show
        optimizer.step()
    for bound in (-1, 0, -0.5):
        with subtests.test(bound):
            brain = Recipe({"model": linear()}, lambda p: SGD(p, lr=0.1), run_opts=options(max_grad_norm=bound))
            brain.fit(range(1), batches)
            assert torch.equal(brain.modules.model.weight, model.weight)
            assert torch.equal(brain.modules.model.bias, model.bias)


@pytest.mark.parametrize("precision", EVERY_PRECISION)
def test_clipping_covers_every_parameter_group(precision):
    """Trap 2: clipping `param_groups[0]` alone leaves the second group's gradient as large as it was."""
    before = linear()
    brain = Recipe(
        {"model": linear()},
        lambda parameters: SGD([{"params": [p]} for p in parameters], lr=1.0),
        run_opts=options(precision, max_grad_norm=0.5),
    )
    brain.fit(range(1), make_batches(1, scale=100.0))
    assert len(brain.optimizer.param_groups) == 2
    moved = [
        (after - start).flatten()
        for after, start in zip(brain.modules.model.parameters(), before.parameters(), strict=True)
    ]
    # At a rate of 1 the update is the gradient: its norm over both groups is the bound.
    assert torch.cat(moved).norm().item() == pytest.approx(0.5, rel=1e-4)
    assert all(update.norm() > 0.01 for update in moved)


@pytest.mark.parametrize("precision", EVERY_PRECISION)
def test_one_nan_loss_leaves_the_weights_finite_and_the_run_alive(precision):
    """Trap 3: patience that only counts lets the first NaN into every weight."""
    batches = make_batches(3)
    bad = (torch.full((4, 8), float("nan")), batches[0][1])
    brain = Recipe({"model": linear()}, lambda p: AdamW(p, lr=0.1), run_opts=options(precision))
    brain.fit(range(1), [batches[0], bad, *batches[1:]])
    assert all(torch.isfinite(p).all() for p in brain.modules.parameters())
    assert (brain.optimizer_step, brain.skipped_steps) == (3, 1)


class Pinned(nn.Module):
    """A linear layer whose input may come in any structure."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    @fwd_default_precision
    def forward(self, x):
        return self.linear(x)


def test_three_pinned_layers_compile_to_one_full_graph():
    """Trap 4: a pin over `torch.amp.custom_fwd` breaks the graph, once per layer."""
    model = nn.Sequential(Pinned(), Pinned(), Pinned())
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    inputs = torch.randn(4, 8)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        outputs = compiled(inputs)
        expected = model(inputs)
    assert counter.frame_count == 1
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, expected)


@contextlib.contextmanager
def autocast_of_another_device(dtype: torch.dtype) -> Iterator[None]:
    """Autocast of CUDA, without CUDA: tensors of a fake device, and the real dispatch of autocast."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    with FakeTensorMode(), torch.no_grad():
        torch.set_autocast_enabled("cuda", True)
        torch.set_autocast_dtype("cuda", dtype)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cuda", before[0])
            torch.set_autocast_dtype("cuda", before[1])


def test_pin_holds_without_a_tensor_among_the_arguments(subtests):
    """Trap 5: a device guessed from top-level tensors only is "cpu" here, and the pin is silently ignored."""
    wraps = {"dict": lambda x: {"x": x}, "list": lambda x: [x], "nested": lambda x: {"inner": [{"x": x}]}}

    def product(batch):
        while not isinstance(batch, torch.Tensor):
            batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
        return batch, batch @ batch.t()

    for name, wrap in wraps.items():
        with subtests.test(name), autocast_of_another_device(torch.float16):
            x = torch.empty(4, 8, device="cuda")
            half = torch.empty(4, 8, device="cuda", dtype=torch.float16)
            assert product(wrap(x))[1].dtype == torch.float16  # what happens without a pin
            seen, result = fwd_default_precision(product)(wrap(half))
            assert (seen.dtype, result.dtype) == (torch.float32, torch.float32)
            assert result.device.type == "cuda"


@pytest.fixture
def yaml_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("path: here\ndebug_name: x\nmodel:\n  hidden: 8\n  layers: 2\n")
    return str(path)


def test_debug_false_on_the_command_line_is_false(yaml_file):
    """Trap 8: any word after a flag turned it on."""
    for given in (["--debug", "False"], ["--debug=False"], ["--debug=false"]):
        _, run_opts, _ = parse_arguments([yaml_file, *given])
        assert run_opts.debug is False
    _, run_opts, _ = parse_arguments([yaml_file, "--debug", "True"])
    assert run_opts.debug is True


def test_value_on_the_command_line_keeps_its_equals_sign(yaml_file):
    """Trap 8: `--path 's3://x/y?z=1'` lost what stands after the `=`."""
    url = "s3://x/y?z=1&w=2"
    for given in ([f"--path={url}"], ["--path", url]):
        hparams_file, _, overrides = parse_arguments([yaml_file, *given])
        assert load_hparams(hparams_file, overrides)["path"] == url


def test_abbreviated_option_on_the_command_line_is_an_error(yaml_file):
    """Trap 8: `--prec fp16` was taken for an abbreviation, and then dropped."""
    with pytest.raises(ConfigError, match="precision"):
        hparams_file, _, overrides = parse_arguments([yaml_file, "--prec", "fp16"])
        load_hparams(hparams_file, overrides)


def test_nested_typo_on_the_command_line_is_an_error(yaml_file):
    """Trap 8: `--model.hiden=16` added a key that nothing reads."""
    with pytest.raises(ConfigError, match="hidden"):
        hparams_file, _, overrides = parse_arguments([yaml_file, "--model.hiden=16"])
        load_hparams(hparams_file, overrides)
    hparams_file, _, overrides = parse_arguments([yaml_file, "--model.hidden=16"])
    assert load_hparams(hparams_file, overrides)["model"] == {"hidden": 16, "layers": 2}


class TwoOptimizers(Recipe):
    def compute_forward(self, batch, stage):
        return self.modules.b(self.modules.a(batch[0]))

    def init_optimizers(self):
        self.optimizers_dict = {
            "a": SGD(self.modules.a.parameters(), lr=0.1),
            "b": SGD(self.modules.b.parameters(), lr=0.1),
        }


def test_second_optimizer_is_clipped_after_unscaling_too():
    """Trap 10: clipping B's scaled gradients made its update 1/1024 of the right one."""
    scale = 2.0**10
    batches = make_batches(1)
    brain = TwoOptimizers(
        {"a": linear(1), "b": linear(2)}, run_opts=options("fp16", init_scale=scale, max_grad_norm=0.5)
    )
    brain.fit(range(1), batches)
    a, b = linear(1), linear(2)
    inputs, targets = to_device(batches[0], DEVICE)
    nn.functional.mse_loss(b(a(inputs)), targets).backward()
    for name, module in (("a", a), ("b", b)):
        norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        assert norm > 0.1
        update = brain.modules[name].weight - module.weight
        torch.testing.assert_close(update, -0.1 * module.weight.grad, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("precision", EVERY_PRECISION)
def test_skipped_overflow_leaves_batchnorm_statistics_as_they_were(precision):
    """Trap 11: the update is skipped, but the running mean is inf and the running variance NaN."""

    class Overflows(Recipe):
        def compute_forward(self, batch, stage):
            x = batch[0]
            return self.modules.model(x * x.abs() if precision != "fp16" else self.modules.gain(x))

    gain = nn.Linear(8, 8)
    with torch.no_grad():
        gain.weight.fill_(1e3)
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))
    brain = Overflows(
        {"model": model, "gain": gain}, lambda p: SGD(p, lr=1e-6), run_opts=options(precision, max_grad_norm=0)
    )
    good = make_batches(1)[0]
    huge = (torch.full((4, 8), 1e30 if precision != "fp16" else 1e4), good[1])
    seen: list[dict] = []
    brain.on_fit_batch_start = lambda batch, should_step: seen.append(
        {name: buffer.clone() for name, buffer in model.named_buffers()}
    )
    brain.fit(range(1), [good, huge])
    assert brain.skipped_steps == 1
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, seen[1][name]), name
        assert torch.isfinite(buffer).all()
    assert not torch.equal(seen[0]["0.running_mean"], seen[1]["0.running_mean"])


@pytest.mark.parametrize("precision", EVERY_PRECISION)
def test_partial_last_window_steps_and_is_divided_by_its_own_length(precision):
    """Trap 12: the last window is dropped by some, and divided by the full length by others."""
    batches = make_batches(6)
    brain = Recipe(
        {"model": linear()},
        lambda p: SGD(p, lr=0.1),
        run_opts=options(precision, grad_accumulation_factor=4, max_grad_norm=0),
    )
    weights = []
    brain.on_fit_batch_start = lambda batch, should_step: weights.append(brain.modules.model.weight.clone())
    brain.fit(range(1), batches)
    assert brain.optimizer_step == 2
    assert torch.equal(weights[0], weights[3]) and not torch.equal(weights[3], weights[4])
    assert not torch.equal(weights[5], brain.modules.model.weight)  # the last window of two has stepped

    # Two batches in a window of up to four: as under a factor of two, not half of that.
    pair = {}
    for factor in (2, 4):
        pair[factor] = Recipe(
            {"model": linear()},
            lambda p: SGD(p, lr=0.1),
            run_opts=options(precision, grad_accumulation_factor=factor, max_grad_norm=0),
        )
        pair[factor].fit(range(1), batches[4:])
    assert torch.equal(pair[2].modules.model.weight, pair[4].modules.model.weight)
    assert not torch.equal(pair[4].modules.model.weight, linear().weight)


def test_scale_is_updated_once_per_iteration_whatever_the_number_of_optimizers(monkeypatch):
    """Trap 13: an update of the scale per optimizer lets it grow, and fall, twice as fast."""
    calls = []
    update = torch.amp.GradScaler.update

    def counted(scaler, *args, **kwargs):
        calls.append(scaler)
        return update(scaler, *args, **kwargs)

    monkeypatch.setattr(torch.amp.GradScaler, "update", counted)
    scales = []

    class Watched(TwoOptimizers):
        def on_fit_batch_start(self, batch, should_step):
            scales.append(self.scaler.get_scale())

    brain = Watched({"a": linear(1), "b": linear(2)}, run_opts=options("fp16", init_scale=16.0, growth_interval=3))
    brain.fit(range(1), make_batches(7))
    scales.append(brain.scaler.get_scale())
    assert scales == [16.0, 16.0, 16.0, 32.0, 32.0, 32.0, 64.0, 64.0]
    assert len(calls) in (0, 7)  # 0: the owner of the scale does without torch's method


class CountReads(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_do_not_read_the_loss_back_from_the_device(precision, host):
    """Trap 14: `loss.detach().cpu()` and a test of isfinite, in every step."""
    reads = CountReads()
    counts = []

    class Watched(Recipe):
        def on_fit_batch_start(self, batch, should_step):
            counts.append(reads.count)

    brain = Watched(
        {"model": linear()},
        lambda p: AdamW(p, lr=0.01, fused=True),
        run_opts=options(precision, log_interval_steps=1000),
    )
    with reads:
        brain.fit(range(1), make_batches(12))
    assert len(counts) == 12
    assert counts[-1] - counts[2] == 0


@pytest.fixture
def two_processes():
    """A process group of two ranks, of which the other is pretended: collectives return at once."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    torch.distributed.destroy_process_group()


def test_no_sync_is_restored_after_an_exception(two_processes):
    """Trap 15: without try/finally, one exception inside turns the averaging of gradients off for good."""
    model = DistributedDataParallel(linear())
    brain = Recipe({"model": model}, lambda p: SGD(p, lr=0.1), run_opts=options())
    wrapped = [module for module in brain.modules.modules() if isinstance(module, DistributedDataParallel)]
    assert len(wrapped) == 1
    with pytest.raises(KeyError, match="inside"), brain.no_sync():
        assert not wrapped[0].require_backward_grad_sync
        raise KeyError("inside")
    assert wrapped[0].require_backward_grad_sync
    with brain.no_sync(use=False):
        assert wrapped[0].require_backward_grad_sync
