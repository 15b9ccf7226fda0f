"""Two processes: gradients averaged, and a verdict that all ranks share."""

import functools
import json
import os
import time

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from amp_recipes import Brain, distributed
from amp_recipes.checkpoint import checkpointer
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


def worker(rank: int, store: str, options: dict, nan_at: int | None, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    brain = train(rank, options, nan_at)
    weights = torch.cat([p.detach().flatten() for p in brain.modules.parameters()])
    statistics = torch.cat([b.flatten().float() for b in brain.modules.buffers()])
    results.put(
        (rank, weights.numpy(), statistics.numpy(), brain.optimizer_step, brain.skipped_steps, brain.summary.last)
    )
    results.close()
    results.join_thread()
    torch.distributed.barrier()
    # Not through the interpreter's end: a gloo thread that then lets go of a tensor would abort the process.
    os._exit(0)


@pytest.fixture
def run_two(tmp_path):
    return functools.partial(two_processes, str(tmp_path / "store"))


def two_processes(store: str, options: dict, nan_at: int | None = None) -> list[tuple]:
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=worker, args=(rank, store, options, nan_at, results)) for rank in range(2)]
    for process in processes:
        process.start()
    found = sorted((results.get(timeout=120) for _ in processes), key=lambda result: result[0])
    found = [(rank, torch.tensor(w), torch.tensor(s), *counts) for rank, w, s, *counts in found]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    return found


@pytest.mark.parametrize("options", [{}, {"precision": "fp16", "init_scale": 64.0}], ids=["fp32", "fp16"])
def test_a_nan_on_one_rank_skips_the_update_on_both(run_two, options):
    first, second = run_two(options, nan_at=1)
    assert torch.equal(first[1], second[1]) and first[1].isfinite().all()
    assert first[2].isfinite().all() and second[2].isfinite().all()
    assert first[3:5] == second[3:5] == (STEPS - 1, 1)


def test_two_ranks_equal_one_process_that_accumulates_their_batches(run_two):
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
    torch.testing.assert_close(both[0][1], expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(both[0][1], both[1][1])
    every_input = torch.cat([x for rank in range(2) for x, _ in batches(rank)])
    for *_, reported in both:
        assert reported["train"]["mean_input"] == pytest.approx(every_input.double().mean().item(), abs=1e-12)
        assert reported["train"]["batches_of_rank_1"] == 1


@pytest.mark.parametrize("saves", [4, 0])
def test_a_spike_on_one_rank_sends_both_back_to_the_same_place(run_two, tmp_path, saves):
    folder = tmp_path / "run"
    options = {"on_spike": "lower_lr", "spike_window": 8, "spike_steps": 4, "ckpt_interval_steps": saves}
    first, second = run_two({**options, "output_folder": str(folder), "max_grad_norm": 1.0})
    assert torch.equal(first[1], second[1]) and first[3:5] == second[3:5] == (SPIKE_STEPS, 0)
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
    torch.testing.assert_close(first[1], expected, rtol=1e-4, atol=1e-5)
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["spikes"], summary["went_back"]) == (1, 1)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    marked = [record["step"] for record in steps if "recovery" in record]
    assert marked == [index + 1 for index in careful]


class Improving(Regression):
    """Each epoch is the best so far."""

    def on_stage_end(self, stage, stage_loss, epoch=None):
        return {"score": float(epoch or 0)}


def evaluating_worker(rank: int, store: str, folder: str, results) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    write = checkpointer.write_folder
    checkpointer.write_folder = lambda *args: (time.sleep(0.5), write(*args))  # in the main process alone
    torch.manual_seed(0)
    options = {"device": "cpu", "output_folder": folder, "early_stop_metric": "score", "early_stop_mode": "max"}
    brain = Improving({"model": nn.Linear(3, 1)}, lambda p: torch.optim.SGD(p, 0.1), run_opts=options)
    brain.fit(range(1, 3), batches(rank), batches(rank), progressbar=False)
    with torch.no_grad():
        for parameter in brain.modules.parameters():
            parameter.add_(rank)  # so that only what is loaded is equal
    brain.evaluate(batches(0), max_key="score", progressbar=False)
    results.put((rank, torch.cat([p.detach().flatten() for p in brain.modules.parameters()]).numpy()))
    results.close()
    results.join_thread()
    torch.distributed.barrier()
    os._exit(0)


def test_two_ranks_test_the_same_best_weights(tmp_path):
    """The main process still writes the best checkpoint when the others ask for it."""
    context = mp.get_context("spawn")
    results = context.Queue()
    arguments = (str(tmp_path / "store"), str(tmp_path / "run"), results)
    processes = [context.Process(target=evaluating_worker, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    first, second = sorted((results.get(timeout=120) for _ in range(2)), key=lambda it: it[0])
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert (first[1] == second[1]).all()


def test_no_sync_is_left_also_after_an_exception():
    modules = nn.ModuleDict({"model": nn.Linear(1, 1)})
    with pytest.raises(NonfiniteError), distributed.no_sync(modules):
        raise NonfiniteError("inside")
    with distributed.no_sync(modules, use=False):
        pass


def test_one_process_is_the_main_one():
    assert distributed.is_main_process() and not distributed.launched() and not distributed.initialized()
    flag = torch.ones(())
    assert distributed.agree(flag) is flag
