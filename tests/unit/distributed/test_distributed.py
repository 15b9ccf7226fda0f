"""Two processes: gradients averaged, and a verdict that all ranks share."""

import json
import time
from typing import Any

import pytest
import torch
from inside import run_of
from processes import in_processes
from torch import nn

from amp_recipes import Brain, distributed
from amp_recipes.checkpoint import checkpointer
from amp_recipes.distributed import processes
from amp_recipes.errors import NonfiniteError

STEPS = 4
SPIKE_AT, SPIKE_STEPS = 14, 20  # on rank 1 only


class Regression(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        self.add_metric("mean_input", batch[0].nan_to_num(), batch[0].numel())
        if distributed.rank() == 1:
            self.add_metric("batches_of_rank_1", 1)
        return nn.functional.mse_loss(predictions.float(), batch[1])


def batches(rank: int, nan_at: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    made = []
    for index in range(STEPS):
        x = torch.randn(4, 3, generator=generator)
        made.append((x * torch.nan if index == nan_at and rank == 1 else x, x.sum(1, keepdim=True)))
    return made


def batches_with_spike(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    made = []
    for index in range(SPIKE_STEPS):
        x = torch.randn(4, 3, generator=generator)
        made.append((x, x.sum(1, keepdim=True) * (1e3 if index == SPIKE_AT and rank == 1 else 1.0)))
    return made


def train(rank: int, options: dict, nan_at: int | None) -> Brain:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    brain = Regression(
        {"model": model}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), run_opts={"device": "cpu", **options}
    )
    data = batches_with_spike(rank) if "on_spike" in options else batches(rank, nan_at)
    brain.fit(range(1), data, progressbar=False)
    return brain


def worker(rank: int, options: dict, nan_at: int | None) -> tuple:
    brain = train(rank, options, nan_at)
    weights = torch.cat([p.detach().flatten() for p in brain.modules.parameters()])
    statistics = torch.cat([b.flatten().float() for b in brain.modules.buffers()])
    return weights.numpy(), statistics.numpy(), brain.optimizer_step, brain.skipped_steps, brain.summary.last


def run_two(options: dict, nan_at: int | None = None) -> list[tuple]:
    found = in_processes(worker, 2, options, nan_at)
    return [(torch.tensor(weights), torch.tensor(statistics), *rest) for weights, statistics, *rest in found]


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.extended), {"precision": "fp16", "init_scale": 64.0}],
    ids=["fp32", "fp16"],
)
def test_a_nan_on_one_rank_skips_the_update_on_both(options):
    first, second = run_two(options, nan_at=1)
    assert torch.equal(first[0], second[0]) and first[0].isfinite().all()
    assert first[1].isfinite().all() and second[1].isfinite().all()
    assert first[2:4] == second[2:4] == (STEPS - 1, 1)


def test_two_ranks_equal_one_process_that_accumulates_their_batches():
    both = run_two({"max_grad_norm": 0.0})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for pair in zip(batches(0), batches(1), strict=True):
        for x, y in pair:
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(both[0][0], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(both[0][0], both[1][0])
    every_input = torch.cat([x for rank in range(2) for x, _ in batches(rank)])
    for *_, reported in both:
        assert reported["train"]["mean_input"] == pytest.approx(every_input.double().mean().item(), abs=1e-12)
        assert reported["train"]["batches_of_rank_1"] == 1


@pytest.mark.parametrize("saves", [4, 0])
def test_a_spike_on_one_rank_sends_both_back_to_the_same_place(tmp_path, saves):
    folder = tmp_path / "run"
    options = {"on_spike": "lower_lr", "spike_window": 8, "spike_steps": 4, "ckpt_interval_steps": saves}
    first, second = run_two({**options, "output_folder": str(folder), "max_grad_norm": 1.0})
    assert torch.equal(first[0], second[0]) and first[2:4] == second[2:4] == (SPIKE_STEPS, 0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    pairs = list(zip(batches_with_spike(0), batches_with_spike(1), strict=True))
    back_to = SPIKE_AT // saves * saves if saves else 0
    careful = range(back_to, max(back_to + 4, SPIKE_AT + 2))
    for index, pair in enumerate(pairs):
        for x, y in pair:
            (nn.functional.mse_loss(model(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 0.1 * 0.1 if index in careful else 0.1
        optimizer.step()
        optimizer.zero_grad()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(first[0], expected, rtol=1e-4, atol=1e-5)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["spikes"], summary["went_back"]) == (1, 1)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    marked = [record["step"] for record in steps if "recovery" in record]
    assert marked == [index + 1 for index in careful]


class Improving(Regression):
    """Each epoch is the best so far."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        return {"score": float(epoch or 0)}


def evaluate_best(rank: int, folder: str) -> Any:
    write = checkpointer.write_folder
    checkpointer.write_folder = lambda *args: (time.sleep(0.2), write(*args))  # a slow disk, of the main process
    torch.manual_seed(0)
    options = {"device": "cpu", "output_folder": folder, "early_stop_metric": "score", "early_stop_mode": "max"}
    brain = Improving({"model": nn.Linear(3, 1)}, lambda p: torch.optim.SGD(p, 0.1), run_opts=options)
    brain.fit(range(1, 3), batches(rank), batches(rank), progressbar=False)
    with torch.no_grad():
        for parameter in brain.modules.parameters():
            parameter.add_(rank)  # so that only what is loaded is equal
    brain.evaluate(batches(0), max_key="score", progressbar=False)
    return torch.cat([p.detach().flatten() for p in brain.modules.parameters()]).numpy()


def test_two_ranks_test_the_same_best_weights(tmp_path):
    """The main process still writes the best checkpoint when the others ask for it."""
    first, second = in_processes(evaluate_best, 2, str(tmp_path / "run"))
    assert (first == second).all()


def test_no_sync_is_left_also_after_an_exception():
    modules = nn.ModuleDict({"model": nn.Linear(1, 1)})
    with pytest.raises(NonfiniteError), distributed.no_sync(modules):
        raise NonfiniteError("inside")
    with distributed.no_sync(modules, use=False):
        pass


def alone_and_as_many(rank: int) -> list[tuple]:
    found = []
    for _ in range(2):
        brain = train(rank, {}, None)
        found.append((distributed.initialized(), run_of(brain).processes.many, brain.modules.state_dict()))
        processes.treat_one_as_many()
    return found


def test_a_group_of_one_goes_the_way_of_many_where_it_is_told_to():
    (found,) = in_processes(alone_and_as_many, 1)
    (one, one_many, expected), (many, many_many, weights) = found
    assert (one, one_many, many, many_many) == (False, False, True, True)
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_one_process_is_the_main_one():
    assert distributed.is_main_process() and not distributed.launched() and not distributed.initialized()
    flag = torch.ones(())
    assert distributed.agree(flag) is flag
