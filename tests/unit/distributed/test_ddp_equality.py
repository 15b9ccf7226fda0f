"""Several processes under ddp equal one process that accumulates their micro-batches: bit for bit where there are two.

The one process is a loop over torch alone: it goes through the ranks' batches one rank after the other, adds up the
gradients of a rank and then those of the ranks, as two processes do, and keeps the BatchNorm statistics of rank 0.
"""

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
from pairwise import extended, pairwise
from processes import in_processes
from torch import nn

from amp_recipes import Brain

WIDTH = 4
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "fused_adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01, fused=True),
}
CLIP = 0.25  # below every gradient norm here


@dataclass(frozen=True)
class Case:
    """One way to train: lengths has the samples of each batch of each rank."""

    lengths: tuple[tuple[int, ...], ...] = ((3, 3, 3, 3), (3, 3, 3, 3))
    precision: str = "fp32"
    accumulate: int = 1
    optimizer: str = "sgd"
    clip: float = CLIP
    pins: list[str] = field(default_factory=list)
    weighted: bool = False  # a batch counts as its samples: in the window as well
    nan_at: tuple[int, int] | None = None  # rank and batch: NaN inputs, and so NaN gradients
    added_at: tuple[int, int] | None = None  # rank and batch: a NaN is added to the loss, and gradients are finite
    find_unused_parameters: bool = False
    compression: str = "off"

    def options(self) -> dict:
        return {
            "device": "cpu",
            "precision": self.precision,
            "eval_precision": self.precision,
            "init_scale": 2.0**8,
            "growth_interval": 2,
            "grad_accumulation_factor": self.accumulate,
            "max_grad_norm": self.clip,
            "fp32_modules": self.pins,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_compression": self.compression,
        }

    def batches(self, rank: int) -> list[tuple[torch.Tensor, ...]]:
        generator = torch.Generator().manual_seed(rank)
        made = []
        for index, length in enumerate(self.lengths[rank]):
            x = torch.randn(length, WIDTH, generator=generator)
            added = torch.tensor(torch.nan if self.added_at == (rank, index) else 0.0)
            made.append((x * torch.nan if self.nan_at == (rank, index) else x, x.square().sum(1, keepdim=True), added))
        return made

    def weight(self, batch: tuple[torch.Tensor, ...]) -> float:
        return float(len(batch[0])) if self.weighted else 1.0


def make_modules() -> nn.ModuleDict:
    torch.manual_seed(0)
    modules = nn.ModuleDict(
        {
            "frozen": nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            "encoder": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
            "middle": nn.Linear(WIDTH, WIDTH),
            "decoder": nn.Linear(WIDTH, WIDTH),
            "head": nn.Linear(WIDTH, 1),
        }
    )
    modules["decoder"].weight = modules["encoder"][0].weight  # shared between two entries
    return modules


class Regression(Brain):
    def compute_forward(self, batch, stage):
        modules = self.modules
        h = modules.encoder(modules.frozen(batch[0])).tanh()
        return modules.head(modules.decoder(modules.middle(h)).tanh())

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions.float(), batch[1]) + batch[2]

    def on_stage_end(self, stage, stage_loss, epoch=None):
        self.stage_losses[stage.name] = stage_loss


class Weighted(Regression):
    def batch_weight(self, batch):
        return float(len(batch[0]))


def train(rank: int, case: Case) -> dict:
    modules = make_modules()
    with torch.no_grad():
        modules["middle"].weight += rank  # rank 0's count
    brain = (Weighted if case.weighted else Regression)(modules, OPTIMIZERS[case.optimizer], run_opts=case.options())
    brain.stage_losses = {}
    brain.fit(range(2), case.batches(rank), case.batches(rank), progressbar=False)
    return {
        "parameters": [it.detach().numpy().copy() for it in brain.modules.parameters()],
        "buffers": [it.numpy().copy() for it in brain.modules.buffers()],
        "updates": (brain.optimizer_step, brain.skipped_steps),
        "losses": brain.stage_losses,
    }


def train_by_hand(case: Case) -> dict:
    modules = make_modules()
    parameters = [it for it in modules.parameters() if it.requires_grad]
    optimizer = OPTIMIZERS[case.optimizer](parameters)
    scaler = torch.amp.GradScaler("cpu", enabled=case.precision == "fp16", init_scale=2.0**8, growth_interval=2)
    ranks = [case.batches(rank) for rank in range(len(case.lengths))]
    taken = skipped = 0
    losses = {}
    for _ in range(2):
        seen = []
        for begin in range(0, max(map(len, ranks)), case.accumulate):
            windows = [batches[begin : begin + case.accumulate] for batches in ranks]
            total = sum(case.weight(batch) for window in windows for batch in window)
            before = [it.clone() for it in modules.buffers()]
            parts, loss_of_window = [], []
            for rank, window in enumerate(windows):
                kept = [it.clone() for it in modules.buffers()]
                for batch in window:
                    loss = loss_by_hand(modules, batch, case)
                    loss_of_window.append((loss.item(), len(batch[0])))
                    scaler.scale(loss * case.weight(batch) / total).backward()
                parts.append([torch.zeros_like(it) if it.grad is None else it.grad for it in parameters])
                if rank > 0:
                    put(modules, kept)
                modules.zero_grad()
            for parameter, *gradients in zip(parameters, *parts, strict=True):
                parameter.grad = reduce_by_hand(gradients, case)
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(parameters, case.clip) if case.clip else torch.zeros(())
            assert not case.clip or not norm <= case.clip, "the clipping has no effect here"
            if norm.isfinite() and all(math.isfinite(loss) for loss, _ in loss_of_window):
                scaler.step(optimizer)
                taken += 1
                seen += loss_of_window
            else:
                put(modules, before)
                skipped += 1
            scaler.update()
            optimizer.zero_grad()
        losses["TRAIN"] = mean(seen)
        modules.eval()
        with torch.no_grad():
            found = [(loss_by_hand(modules, it, case).item(), len(it[0])) for batches in ranks for it in batches]
        losses["VALID"] = mean([(loss, weight) for loss, weight in found if math.isfinite(loss)])
        modules.train()
    return {
        "parameters": [it.detach().numpy() for it in modules.parameters()],
        "buffers": [it.numpy() for it in modules.buffers()],
        "updates": (taken, skipped),
        "losses": losses,
    }


def loss_by_hand(modules: nn.ModuleDict, batch: tuple[torch.Tensor, ...], case: Case) -> torch.Tensor:
    dtype = DTYPES[case.precision]
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        h = modules["encoder"](modules["frozen"](batch[0])).tanh()
        with torch.autocast("cpu", enabled=not case.pins and dtype != torch.float32, dtype=dtype):
            h = modules["middle"](h.float() if case.pins else h)
        predictions = modules["head"](modules["decoder"](h).tanh())
        return nn.functional.mse_loss(predictions.float(), batch[1]) + batch[2]


def reduce_by_hand(gradients: list[torch.Tensor], case: Case) -> torch.Tensor:
    """The sum over ranks, in the dtype that is sent."""
    if case.compression == "off":
        return sum(gradients[1:], start=gradients[0])
    dtype = DTYPES[case.compression]
    return sum((it.to(dtype) for it in gradients[1:]), start=gradients[0].to(dtype)).float()


def put(modules: nn.Module, buffers: list[torch.Tensor]) -> None:
    for buffer, value in zip(modules.buffers(), buffers, strict=True):
        buffer.copy_(value)


def mean(losses: list[tuple[float, float]]) -> float:
    return sum(loss * weight for loss, weight in losses) / sum(weight for _, weight in losses)


def assert_equal(found: dict, expected: dict, relative: float = 0.0) -> None:
    assert found["updates"] == expected["updates"]
    for name in ("parameters", "buffers"):
        for one, other in zip(found[name], expected[name], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=relative, atol=relative)
    for stage, loss in expected["losses"].items():
        assert found["losses"][stage] == pytest.approx(loss, rel=1e-6)


def check(case: Case, relative: float = 0.0) -> None:
    expected = train_by_hand(case)
    for found in in_processes(train, len(case.lengths), case):
        assert_equal(found, expected, relative)


UNEVEN = ((4, 3, 3, 2, 2), (3, 3, 2))  # in windows of two: 2, 2, 1 and 2, 1, 0 batches


@pytest.mark.parametrize(
    ("precision", "accumulate", "optimizer"), pairwise(["fp32", "bf16", "fp16"], [1, 2], ["sgd", "adamw"])
)
def test_two_ranks_equal_one_process(precision, accumulate, optimizer):
    check(Case(precision=precision, accumulate=accumulate, optimizer=optimizer))


def test_a_fused_optimizer_equals_it_too():
    check(Case(optimizer="fused_adamw", accumulate=2))


@pytest.mark.parametrize("precision", ["bf16", extended("fp16")])
def test_pins_hold(precision):
    check(Case(precision=precision, accumulate=2, pins=["middle"]))


@pytest.mark.parametrize(
    ("precision", "accumulate"),
    [("fp32", 2), ("bf16", 1), ("fp16", 2), extended("fp32", 1), extended("bf16", 2), extended("fp16", 1)],
)
def test_a_nan_on_one_rank_is_skipped_on_both(precision, accumulate):
    check(Case(precision=precision, accumulate=accumulate, nan_at=(1, 2)))


@pytest.mark.parametrize(
    ("precision", "accumulate", "optimizer", "clip"),
    [
        ("fp32", 1, "fused_adamw", CLIP),
        ("bf16", 2, "sgd", 0.0),
        ("fp16", 2, "adamw", CLIP),
        *(extended("fp32", accumulate, optimizer, CLIP) for accumulate in (1, 2) for optimizer in ("sgd", "adamw")),
    ],
)
def test_a_nan_loss_with_finite_gradients_on_one_rank_is_skipped_on_both(precision, accumulate, optimizer, clip):
    """The third batch: the first of its window. In fp16 the scale stays, as that of `train_by_hand` does."""
    check(Case(precision=precision, accumulate=accumulate, optimizer=optimizer, clip=clip, added_at=(1, 2)))


@pytest.mark.parametrize(("precision", "accumulate", "weighted"), pairwise(["fp32", "bf16"], [1, 2], [False, True]))
def test_uneven_data_count_by_their_weight(precision, accumulate, weighted):
    check(Case(UNEVEN, precision=precision, accumulate=accumulate, weighted=weighted))


class Stream:
    """Batches of unknown number, perhaps none."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def evaluate(rank: int, case: Case) -> float:
    modules = make_modules()
    brain = Regression(modules, OPTIMIZERS["sgd"], run_opts=case.options())
    brain.stage_losses = {}
    held_out = case.batches(0) if rank == 0 else []
    brain.fit(range(2), case.batches(rank), Stream(held_out), progressbar=False)
    return brain.stage_losses["VALID"]


def test_a_rank_may_have_nothing_to_evaluate():
    case = Case()
    trained = train_by_hand(case)
    modules = make_modules().eval()
    put(modules, [torch.tensor(it) for it in trained["buffers"]])
    with torch.no_grad():
        for parameter, value in zip(modules.parameters(), trained["parameters"], strict=True):
            parameter.copy_(torch.tensor(value))
        expected = mean([(loss_by_hand(modules, it, case).item(), len(it[0])) for it in case.batches(0)])
    assert in_processes(evaluate, 2, case) == pytest.approx([expected] * 2, rel=1e-6)


def test_weights_that_differ_by_rank_count_over_all_ranks():
    check(Case(((3, 3, 4, 2), (7, 2, 5, 3)), accumulate=2, weighted=True))


@pytest.mark.parametrize(
    ("precision", "compression"),
    [("fp32", "bf16"), ("fp16", "fp16"), extended("fp16", "bf16"), extended("fp32", "fp16")],
)
def test_compressed_gradients_equal_those_summed_in_that_dtype(compression, precision):
    check(Case(precision=precision, compression=compression, accumulate=2))


def test_looking_for_unused_parameters_changes_nothing():
    check(Case(find_unused_parameters=True, accumulate=2))


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_four_ranks_equal_one_process_but_for_rounding(precision):
    case = Case(((3, 3, 3), (2, 3, 3), (3, 3), (4,)), accumulate=2, precision=precision, weighted=True)
    check(case, relative=1e-6 if precision == "fp32" else 2e-3)
    check(replace(case, lengths=((3, 3, 3, 3),) * 4, weighted=False), relative=1e-6 if precision == "fp32" else 2e-3)
