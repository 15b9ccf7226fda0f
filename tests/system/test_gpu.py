"""What only a GPU can show: no wait inside a step, and the same guarantees where work is queued."""

from types import SimpleNamespace

import pytest
import torch
from inside import run_of
from processes import in_processes
from torch import nn

from amp_recipes import Brain, fwd_default_precision
from amp_recipes.distributed import ddp

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]
PRECISIONS = ["fp32", "bf16", "fp16"]
WARM_UP, STEPS = 3, 12


class Classifier(Brain):
    watch_from = None  # step from which a synchronisation is an error

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.cross_entropy(predictions.float(), batch[1])

    def on_fit_batch_start(self, batch, should_step):
        if self.watch_from is not None and self.step == self.watch_from:
            torch.cuda.set_sync_debug_mode("error")


def make_batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(16, 32, generator=generator).pin_memory(),
            torch.randint(0, 8, (16,), generator=generator).pin_memory(),
        )
        for _ in range(count)
    ]


def make_brain(precision: str, output_folder=None, **options) -> Classifier:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))
    folder = {} if output_folder is None else {"output_folder": str(output_folder)}
    return Classifier(
        {"model": model},
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        run_opts={"device": "cuda", "precision": precision, "init_scale": 1024.0, **folder, **options},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_host_never_waits_inside_a_step(precision, tmp_path):
    brain = make_brain(precision, tmp_path, ema_decay=0.9)
    brain.watch_from = WARM_UP

    def stop(*_):
        torch.cuda.set_sync_debug_mode("default")

    brain.on_stage_end = stop
    try:
        brain.fit(range(1), make_batches(), progressbar=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert brain.optimizer_step == STEPS


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_bad_batch_equals_the_run_without_it(precision, subtests):
    good = make_batches()
    x, y = good[0]
    without = make_brain(precision)
    without.fit(range(1), good, progressbar=False)
    theirs = without.modules.state_dict()
    for index in (0, 4, STEPS):
        with subtests.test(index):
            with_bad = make_brain(precision)
            with_bad.fit(range(1), [*good[:index], (x * torch.nan, y), *good[index:]], progressbar=False)
            assert with_bad.skipped_steps == 1 and with_bad.optimizer_step == STEPS
            ours = with_bad.modules.state_dict()
            for name in theirs:
                torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equal_to_the_loop_written_by_hand(precision):
    batches = make_batches()
    brain = make_brain(precision)
    brain.fit(range(1), batches, progressbar=False)
    twin = make_brain(precision)
    model = twin.modules.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, enabled=precision == "fp16")
    for x, y in batches:
        with torch.autocast("cuda", dtype, enabled=precision != "fp32"):
            loss = nn.functional.cross_entropy(model.model(x.cuda()).float(), y.cuda())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    for name, expected in model.state_dict().items():
        assert torch.equal(brain.modules.state_dict()[name], expected), name


def test_a_pin_holds_where_no_top_level_argument_is_a_tensor():
    seen = []

    class Head(nn.Module):
        @fwd_default_precision
        def forward(self, batch):
            seen.append((batch["x"].dtype, torch.is_autocast_enabled("cuda")))
            return batch["x"] * 2

    with torch.autocast("cuda", torch.float16):
        Head()({"x": torch.ones(2, device="cuda", dtype=torch.float16)})
    assert seen == [(torch.float32, False)]


def test_pinned_matrix_products_and_convolutions_are_ieee():
    x = torch.randn(64, 64, 16, 16, device="cuda")
    convolution = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
    make_brain("bf16", fp32_modules=["model.0"], float32_precision="tf32")
    exact = nn.functional.conv2d(x.double(), convolution.weight.double(), padding=1)
    error = (convolution(x).double() - exact).norm() / exact.norm()
    assert error < 1e-5  # TF32 keeps 10 bits of mantissa: about 3e-4


@pytest.mark.parametrize("precision", ["bf16", "fp16", "auto"])
def test_precisions_are_native_and_raise_no_warning(precision, caplog):
    if torch.cuda.get_device_capability() < (8, 0) and precision == "bf16":
        pytest.skip("bf16 is emulated on this GPU")
    brain = make_brain(precision)
    assert "native" not in caplog.text
    assert brain.precision in ("bf16", "fp16")


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.extended)])
def test_a_run_that_dies_goes_on_bit_for_bit(tmp_path, precision, background):
    """Dropout draws from the device's generator, and the state is copied while the device goes on."""

    class Died(Exception):
        pass

    class Dies(Classifier):
        def compute_forward(self, batch, stage):
            if self.step == self.dies_at:
                raise Died
            return self.modules.model(batch[0])

    def fit(folder, dies_at):
        options = {"ckpt_interval_steps": 1, "ckpt_background": background, "deterministic": False}
        brain = make_brain(precision, folder, noprogressbar=True, **options)
        brain.modules["model"].insert(1, nn.Dropout(0.3))
        brain.__class__, brain.dies_at = Dies, dies_at
        brain.fit(range(2), make_batches())
        return brain

    whole = fit(tmp_path / "whole", None)
    with pytest.raises(Died):
        fit(tmp_path / "run", 7)
    resumed = fit(tmp_path / "run", None)
    for name, value in whole.modules.state_dict().items():
        assert torch.equal(value, resumed.modules.state_dict()[name]), name
    assert whole.optimizer_step == resumed.optimizer_step


@pytest.mark.parametrize(
    ("precision", "on_spike"), [("bf16", "wider_precision"), ("fp16", "wider_precision"), ("fp32", "lower_lr")]
)
def test_a_spike_goes_back_to_the_same_place_also_where_work_is_queued(tmp_path, precision, on_spike):
    ends = []
    for name in ("one", "two"):
        brain = make_brain(
            precision,
            tmp_path / name,
            on_spike=on_spike,
            spike_window=6,
            spike_steps=4,
            ckpt_interval_steps=4,
            max_grad_norm=1.0,
        )
        data = [(x * (50.0 if index == 10 else 1.0), y) for index, (x, y) in enumerate(make_batches(18))]
        brain.modules["model"][1] = nn.Identity()  # statistics would hide the scale of one batch
        brain.fit(range(1), data, progressbar=False)
        assert brain.summary.went_back == 1 and brain.optimizer_step == 18
        assert not run_of(brain).plan.widened
        ends.append([parameter.tolist() for parameter in brain.modules.parameters()])
    assert ends[0] == ends[1]


def test_watching_for_spikes_does_not_make_the_host_wait(tmp_path):
    brain = make_brain("bf16", tmp_path, on_spike="lower_lr", spike_window=4, ckpt_background=False)
    brain.watch_from = WARM_UP
    brain.on_fit_batch_end = lambda *_: torch.cuda.set_sync_debug_mode("default") if brain.step == STEPS else None
    brain.fit(range(1), make_batches(), progressbar=False)
    assert brain.summary.spikes == 0


def normalised_inputs(rank: int) -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(rank)) * (rank + 1) + rank


def make_normalised() -> nn.ModuleDict:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return nn.ModuleDict({"model": model}).cuda()


def normalise_together(rank: int) -> dict:
    """Two processes on one GPU: gloo gathers the statistics."""
    modules = make_normalised()
    options = SimpleNamespace(
        find_unused_parameters=False,
        static_graph=False,
        gradient_compression="off",
        sync_batchnorm=True,
        grad_accumulation_factor=1,
    )
    ddp.wrap(modules, torch.device("cuda"), options)
    modules["model"](normalised_inputs(rank).cuda()).square().mean().backward()
    gradients = {name: it.grad.tolist() for name, it in modules.named_parameters()}
    return {"gradients": gradients, "buffers": {name: it.tolist() for name, it in modules.named_buffers()}}


def test_synchronised_batchnorm_in_two_processes_sees_the_batches_of_both():
    modules = make_normalised()
    modules["model"](torch.cat([normalised_inputs(rank) for rank in range(2)]).cuda()).square().mean().backward()
    for found in in_processes(normalise_together, 2):
        for name, parameter in modules.named_parameters():
            torch.testing.assert_close(torch.tensor(found["gradients"][name]), parameter.grad.cpu(), msg=name)
        for name, buffer in modules.named_buffers():
            torch.testing.assert_close(torch.tensor(found["buffers"][name], dtype=buffer.dtype), buffer.cpu(), msg=name)
