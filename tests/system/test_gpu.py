"""What only a GPU can show: no wait inside a step, and the same guarantees where work is queued.

AMP_RECIPES_TEST_DEVICE names another device: with `cpu` most of these tests show at least that they can be run.
"""

import copy
import math
import os
from types import SimpleNamespace

import pytest
import torch
from classifiers import Classifier, StepsByHand
from inside import run_of
from processes import in_processes
from torch import nn

from amp_recipes import fwd_default_precision
from amp_recipes.distributed import ddp
from amp_recipes.numerics.census.census import take_census
from amp_recipes.numerics.drift.drift import drift
from amp_recipes.numerics.trial import plain_trial

DEVICE = torch.device(os.environ.get("AMP_RECIPES_TEST_DEVICE", "cuda"))
IS_CUDA = DEVICE.type == "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_CUDA and not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"),
]
cuda_only = pytest.mark.skipif(not IS_CUDA, reason=f"only on CUDA, not on {DEVICE}")
PRECISIONS = ["fp32", "bf16", "fp16"]
WARM_UP, STEPS = 3, 12


def forbid_waits(forbid: bool) -> None:
    """From now on an operation that makes the host wait is an error; events do not count."""
    if IS_CUDA:
        torch.cuda.set_sync_debug_mode("error" if forbid else "default")


class MayNotWait(Classifier):
    """From a step on, a synchronisation is an error."""

    def on_fit_batch_start(self, batch, should_step):
        if self.step == WARM_UP:
            forbid_waits(True)


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if DEVICE.type == "cpu" else tensor.pin_memory()


def make_batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (pinned(torch.randn(16, 32, generator=generator)), pinned(torch.randint(0, 8, (16,), generator=generator)))
        for _ in range(count)
    ]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 8))


def fused(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def unfused(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True, fused=False)


def make_brain(
    precision: str, output_folder=None, kind=Classifier, optimizer=fused, model=None, hparams=None, **options
) -> Classifier:
    folder = {} if output_folder is None else {"output_folder": str(output_folder)}
    return kind(
        {"model": make_model() if model is None else model},
        optimizer,
        hparams,
        run_opts={"device": str(DEVICE), "precision": precision, "init_scale": 1024.0, **folder, **options},
    )


def loop_by_hand(precision: str, batches, optimizer=fused, window: int = 1) -> nn.Module:
    """The weights and buffers that torch alone trains."""
    modules = nn.ModuleDict({"model": make_model()}).to(DEVICE).train()
    stepper = optimizer(modules.parameters())
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=1024.0, enabled=precision == "fp16")
    for number, (x, y) in enumerate(batches, start=1):
        with torch.autocast(DEVICE.type, dtype, enabled=precision != "fp32"):
            loss = nn.functional.cross_entropy(modules.model(x.to(DEVICE)).float(), y.to(DEVICE))
        scaler.scale(loss / window).backward()
        if number % window == 0:
            scaler.unscale_(stepper)
            nn.utils.clip_grad_norm_(modules.parameters(), 5.0)
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad(set_to_none=True)
    return modules


def assert_same_bits(ours: nn.Module, theirs: nn.Module) -> None:
    for name, expected in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], expected), name


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_host_never_waits_inside_a_step(precision, tmp_path):
    brain = make_brain(precision, tmp_path, MayNotWait, ema_decay=0.9)
    brain.on_stage_end = lambda *_: forbid_waits(False)
    try:
        brain.fit(range(1), make_batches(), progressbar=True)
    finally:
        forbid_waits(False)
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
@pytest.mark.parametrize("optimizer", [fused, unfused])
@pytest.mark.parametrize("window", [1, 2])
def test_equal_to_the_loop_written_by_hand(precision, optimizer, window):
    batches = make_batches()
    brain = make_brain(precision, optimizer=optimizer, grad_accumulation_factor=window)
    brain.fit(range(1), batches, progressbar=False)
    assert_same_bits(brain.modules, loop_by_hand(precision, batches, optimizer, window))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_by_hand_equal_the_loop_and_move_the_rate_each_time(precision):
    class ByHand(StepsByHand):
        def before_step(self):
            self.rates.append(self.optimizer.param_groups[0]["lr"])

    halved = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
    brain = make_brain(precision, kind=ByHand, hparams=halved)
    brain.rates = []
    brain.fit(range(1), make_batches(6), progressbar=False)
    assert brain.rates == [1e-2 / 2**step for step in range(6)]
    assert brain.optimizer_step == 6


@pytest.mark.parametrize("precision", PRECISIONS)
def test_two_optimizers_step_as_one_over_both_would(precision):
    class Two(Classifier):
        def init_optimizers(self):
            first, *others = self.modules.model
            rest = nn.ModuleList(others)
            self.optimizers_dict = {"first": fused(first.parameters()), "rest": fused(rest.parameters())}

    batches = make_batches()
    two, one = make_brain(precision, kind=Two, max_grad_norm=0.0), make_brain(precision, max_grad_norm=0.0)
    two.fit(range(1), batches, progressbar=False)
    one.fit(range(1), batches, progressbar=False)
    assert_same_bits(two.modules, one.modules)


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(32, generator=generator), torch.randint(0, 8, (), generator=generator)


def test_workers_whose_batches_are_pinned_give_what_no_worker_gives():
    ends = []
    for workers in (0, 2):
        brain = make_brain("bf16", seed=3)
        brain.fit(range(2), Pairs(), progressbar=False, train_loader_kwargs={"batch_size": 8, "num_workers": workers})
        ends.append(copy.deepcopy(brain.modules))
    assert_same_bits(*ends)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_evaluation_waits_for_nothing_before_its_end_and_averages_rightly(precision):
    class Evaluated(Classifier):
        batches = 0

        def compute_objectives(self, predictions, batch, stage):
            self.add_metric("accuracy", predictions.argmax(1) == batch[1], len(batch[1]))
            self.batches += 1
            if self.batches == WARM_UP:
                forbid_waits(True)
            return super().compute_objectives(predictions, batch, stage)

        def on_stage_end(self, stage, stage_loss, epoch=None):
            self.found = dict(self.stage_metrics)

    batches = make_batches()
    brain = make_brain(precision, kind=Evaluated, eval_precision=precision)

    def watched():
        yield from batches[:-1]
        forbid_waits(False)  # the end of the pass may wait
        yield batches[-1]

    try:
        loss = brain.evaluate(watched(), progressbar=False)
    finally:
        forbid_waits(False)
    model = make_model().to(DEVICE).eval()
    with torch.no_grad(), brain.evaluation_ctx:
        scores = [(model(x.to(DEVICE)), y.to(DEVICE)) for x, y in batches]
    expected = sum(float(nn.functional.cross_entropy(s.float(), y)) for s, y in scores) / len(batches)
    right = sum(int((s.argmax(1) == y).sum()) for s, y in scores)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert brain.found["accuracy"] == pytest.approx(right / 16 / STEPS)


def test_deterministic_runs_and_repeats_itself():
    ends = []
    try:
        for _ in range(2):
            brain = make_brain("bf16", deterministic=True)
            brain.fit(range(1), make_batches(), progressbar=False)
            ends.append(copy.deepcopy(brain.modules))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(*ends)


def test_a_nan_report_names_the_module_that_read_it_first(tmp_path, caplog):
    batches = make_batches()
    batches[5] = (pinned(batches[5][0].clone().fill_(math.nan)), batches[5][1])
    brain = make_brain("fp32", tmp_path)
    brain.fit(range(1), batches, progressbar=False)
    (said,) = [record.getMessage() for record in caplog.records if "the first op that reads it" in record.getMessage()]
    assert " in model.0" in said
    assert brain.skipped_steps == 1


class FirstOrder(nn.Module):
    """Overflows in fp16 alone: the product of its factors."""

    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
        with torch.no_grad():
            self.large.weight.copy_(1e6 * torch.eye(32))
            self.small.weight.copy_(1e-6 * torch.eye(32))

    def forward(self, x):
        return self.small(self.large(x))


def trial_of(model: nn.Module):
    return plain_trial(
        model.to(DEVICE), lambda net, batch: nn.functional.cross_entropy(net(batch[0]).float(), batch[1])
    )


def on_device(batches):
    return [tuple(tensor.to(DEVICE) for tensor in batch) for batch in batches]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_census_changes_no_bit_and_counts_matrix_products_in_the_low_dtype(dtype):
    census = take_census(trial_of(make_model()), on_device(make_batches(1)), dtype, 1024.0)
    assert census.neutral, census.neutrality_note
    low = {row.module for row in census.ops if row.counts_as_low}
    assert {"0", "3"} <= {name.rpartition(".")[2] for name in low}


def test_drift_is_finite_at_bf16_and_finds_what_overflows_at_fp16():
    model = nn.Sequential(nn.Linear(32, 32), FirstOrder(), nn.Linear(32, 8))
    windows = [[batch] for batch in on_device(make_batches(2))]
    rows = {dtype: drift(trial_of(model), windows, dtype) for dtype in (torch.bfloat16, torch.float16)}
    assert all(math.isfinite(row.sensitivity) for row in rows[torch.bfloat16])
    broken = [row.module for row in rows[torch.float16] if not math.isfinite(row.sensitivity)]
    assert broken and all("large" in name for name in broken)


def test_a_diagnosis_names_the_module_that_overflows(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), FirstOrder(), nn.Linear(32, 8))
    brain = make_brain("fp32", tmp_path, model=model)
    found = brain.diagnose(make_batches(6), precisions=("fp16",), steps=5, minutes=0.2)
    (answer,) = found.answers
    assert [row.module for row in answer.nonfinite] == ["model.1.large"], str(found)


@cuda_only
def test_memory_does_not_grow_with_the_steps(tmp_path):
    """Neither that of the device, nor pinned memory of the host."""
    brain = make_brain("bf16", tmp_path, ckpt_interval_steps=5, ema_decay=0.9)
    held = []
    for epoch in range(4):
        brain.fit([epoch], make_batches(30), progressbar=False)
        torch.cuda.synchronize()
        pinned_blocks = torch.cuda.host_memory_stats()
        held.append((torch.cuda.memory_allocated(), pinned_blocks.get("num_host_alloc"), len(run_of(brain).pending)))
    assert held[3] == held[2]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="a CPU's autocast takes it in fp32")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_low_logits_is_rounded_and_that_of_float32_ones_is_not(dtype):
    """Why recipes give `cross_entropy` fp32 logits: CUDA's autocast leaves its log_softmax in the logits' dtype."""
    torch.manual_seed(0)
    logits, targets = 4 * torch.randn(64, 1000, device=DEVICE), torch.randint(0, 1000, (64,), device=DEVICE)
    exact = nn.functional.cross_entropy(logits.to(dtype).double(), targets, reduction="none")
    with torch.autocast(DEVICE.type, dtype):
        wide = nn.functional.cross_entropy(logits.to(dtype).float(), targets, reduction="none")
        low = nn.functional.cross_entropy(logits.to(dtype), targets, reduction="none")
    assert wide.dtype == torch.float32
    assert (wide - exact).abs().max() < 1e-5
    assert (low - exact).abs().max() > 1e-3, "torch has learned to take it in fp32: the recipes need no cast any more"


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 16, batch_first=True), nn.Linear(16, 8)
        self.seen = set()

    def forward(self, x):
        hidden, _ = self.lstm(x.unflatten(1, (8, 4)))
        self.seen.add(hidden.dtype)
        return self.head(hidden[:, -1])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("pinned_type", [None, "type:LSTM"])
def test_an_lstm_runs_in_the_precision_of_the_run_or_in_fp32_where_it_is_pinned(precision, pinned_type):
    """CUDA's autocast has cast cuDNN's networks to fp16 at any dtype: bf16 would then train in fp16, unscaled."""
    if DEVICE.type not in ("cuda", "simulated", "cpu") or (DEVICE.type == "cpu" and pinned_type is None):
        pytest.skip(f"{DEVICE} may not have it in {precision}")
    model = Recurrent()
    brain = make_brain(precision, model=model, fp32_modules=[pinned_type] if pinned_type else [])
    brain.fit(range(1), make_batches(3), progressbar=False)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert model.seen == {torch.float32 if pinned_type else low}


def test_a_pin_holds_where_no_top_level_argument_is_a_tensor():
    seen = []

    class Head(nn.Module):
        @fwd_default_precision
        def forward(self, batch):
            seen.append((batch["x"].dtype, torch.is_autocast_enabled(DEVICE.type)))
            return batch["x"] * 2

    with torch.autocast(DEVICE.type, torch.float16):
        Head()({"x": torch.ones(2, device=DEVICE, dtype=torch.float16)})
    assert seen == [(torch.float32, False)]


@cuda_only
def test_pinned_matrix_products_and_convolutions_are_ieee():
    x = torch.randn(64, 64, 16, 16, device="cuda")
    convolution = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
    make_brain("bf16", fp32_modules=["model.0"], float32_precision="tf32")
    exact = nn.functional.conv2d(x.double(), convolution.weight.double(), padding=1)
    error = (convolution(x).double() - exact).norm() / exact.norm()
    assert error < 1e-5  # TF32 keeps 10 bits of mantissa: about 3e-4


@cuda_only
@pytest.mark.parametrize("precision", ["bf16", "fp16", "auto"])
def test_precisions_are_native_and_raise_no_warning(precision, caplog):
    if torch.cuda.get_device_capability() < (8, 0) and precision == "bf16":
        pytest.skip("bf16 is emulated on this GPU")
    brain = make_brain(precision)
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "native" in record.message]
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
    brain = make_brain("bf16", tmp_path, MayNotWait, on_spike="lower_lr", spike_window=4, ckpt_background=False)
    brain.on_fit_batch_end = lambda *_: forbid_waits(False) if brain.step == STEPS else None
    try:
        brain.fit(range(1), make_batches(), progressbar=False)
    finally:
        forbid_waits(False)
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


@cuda_only
def test_synchronised_batchnorm_in_two_processes_sees_the_batches_of_both():
    modules = make_normalised()
    modules["model"](torch.cat([normalised_inputs(rank) for rank in range(2)]).cuda()).square().mean().backward()
    for found in in_processes(normalise_together, 2):
        for name, parameter in modules.named_parameters():
            torch.testing.assert_close(torch.tensor(found["gradients"][name]), parameter.grad.cpu(), msg=name)
        for name, buffer in modules.named_buffers():
            torch.testing.assert_close(torch.tensor(found["buffers"][name], dtype=buffer.dtype), buffer.cpu(), msg=name)
