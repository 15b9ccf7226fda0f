"""With several processes: a NaN that one of them brought is located there, while the others wait."""

import json
import logging
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from classifiers import Classifier
from processes import in_processes
from torch import nn
from torch_release import needs_fsdp

from amp_recipes import RunOptions, distributed, numerics
from amp_recipes.config import Purpose
from amp_recipes.errors import NonfiniteError
from amp_recipes.precision.host_copy import HostCopy

WIDTH = 8
STRATEGIES = ["ddp", pytest.param("fsdp", marks=[needs_fsdp, pytest.mark.extended])]


class Branch(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.layer, self.factor = nn.Linear(WIDTH, WIDTH), factor

    def forward(self, x):
        return self.layer(x * self.factor) / self.factor


def network(factor=1.0):
    torch.manual_seed(0)
    branches = nn.Sequential(Branch(1.0), Branch(factor))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), branches, nn.Linear(WIDTH, 4))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def data(rank, batches=4, nan=None):
    """nan: (rank, batch, sample) whose input is to hold one."""
    generator = torch.Generator().manual_seed(rank)
    found = [
        (torch.randn(6, WIDTH, generator=generator), torch.randint(0, 4, (6,), generator=generator))
        for _ in range(batches)
    ]
    if nan is not None and nan[0] == rank:
        found[nan[1]][0][nan[2], 3] = math.nan
    return found


class Told(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []
        logging.getLogger("amp_recipes").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def brain_of(folder, strategy, model=None, kind=Classifier, **options):
    options = {"device": "cpu", "noprogressbar": True, "output_folder": folder, "strategy": strategy, **options}
    return kind({"model": model or network()}, sgd, run_opts=options)


def weights_of(brain):
    values = (value.full_tensor() if hasattr(value, "full_tensor") else value for value in brain.modules.parameters())
    return [value.tolist() for value in values]


def reports(folder):
    return {path.stem: json.loads(path.read_text()) for path in sorted(Path(folder).glob("nonfinite-*.json"))}


# ---------------------------------------------------------------------- training


def lonely(rank):
    """What this process sees of the others, before, while and after it is alone."""

    def view():
        total = torch.ones(())
        dist.all_reduce(total)
        return dist.get_world_size(), dist.get_rank(), distributed.rank(), distributed.gather(rank), total.item()

    before = view()
    for _ in range(2):
        with pytest.raises(KeyError), distributed.alone():
            inside = view()
            raise KeyError
    return before, inside, view()


def test_a_process_that_is_alone_is_the_only_one():
    for rank, (before, inside, after) in enumerate(in_processes(lonely, 2)):
        assert before == after == (2, rank, rank, [0, 1], 2.0)
        assert inside == (1, 0, rank, [rank], 1.0)


def trained(rank, folder, strategy, locate, queued, options):
    if queued:
        HostCopy.immediate = False
    told = Told()
    options, model = dict(options), network()
    if options.pop("wrapped", False):
        model = nn.parallel.DistributedDataParallel(model)
    brain = brain_of(folder, strategy, model, locate_nonfinite=locate, **options)
    brain.fit(range(2), data(rank, nan=(1, 2, 4)))
    return {
        "weights": weights_of(brain),
        "skipped": brain.skipped_steps,
        "told": told.texts,
        "last": brain.summary.last,
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("queued", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_the_rank_the_module_and_the_sample_are_named(tmp_path, strategy, queued):
    first, second = in_processes(trained, 2, str(tmp_path), strategy, True, queued, {"precision": "bf16"})
    ((name, report),) = reports(tmp_path).items()
    assert (name, report["rank"], report["where"]) == ("nonfinite-3", 1, "train epoch 0, batch 3, rank 1")
    assert (report["cause"], report["module"], report["samples"]) == ("data", "model.0", [4]), report["message"]
    told = [text for text in first["told"] if "rank 1" in text]
    assert told[0].startswith(f"train epoch 0, batch 3, rank 1: {report['message']} See {tmp_path / name}")
    assert "the same as in" in told[1]  # in the second epoch
    assert not any("NaN" in text for text in second["told"])  # the main process says it
    assert first["skipped"] == second["skipped"] == 2


@pytest.mark.extended
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("ddp", {}),
        ("ddp", {"grad_accumulation_factor": 2}),
        ("ddp", {"find_unused_parameters": True}),
        ("ddp", {"wrapped": True}),
        pytest.param("fsdp", {}, marks=needs_fsdp),
        pytest.param("fsdp", {"grad_accumulation_factor": 2}, marks=needs_fsdp),
        pytest.param("fsdp", {"precision": "bf16", "shard_modules": ["model.2.*"], "ema_decay": 0.5}, marks=needs_fsdp),
        pytest.param("fsdp", {"shard_replicas": 2}, marks=needs_fsdp),
    ],
)
def test_a_located_step_changes_nothing_about_the_run(tmp_path, strategy, options):
    on, off = (
        in_processes(trained, 2, str(tmp_path / str(locate)), strategy, locate, False, options)
        for locate in (True, False)
    )
    assert len(reports(tmp_path / "True")) == 1 and not reports(tmp_path / "False")
    for located, bare in zip(on, off, strict=True):
        assert located["weights"] == bare["weights"] and located["skipped"] == bare["skipped"] > 0
        assert located["last"]["train"]["loss"] == bare["last"]["train"]["loss"]


def trained_in_fp16(rank, folder, strategy, scale, nan):
    told = Told()
    brain = brain_of(folder, strategy, precision="fp16", init_scale=scale, nonfinite_patience=9)
    brain.fit(range(2), data(rank, batches=14, nan=nan))
    told.texts = [text for text in told.texts if "NaN" in text or "the same as" in text]
    return told.texts, brain.scaler.get_scale(), brain.skipped_steps, brain.summary.backed_off_steps


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fault_of_one_rank_is_not_taken_for_back_off(tmp_path, strategy):
    (told, *first), (_, *second) = in_processes(trained_in_fp16, 2, str(tmp_path), strategy, 1024.0, (1, 2, 4))
    assert first == second == [1024.0, 2, 0]  # the scale stays
    assert "comes from sample 4" in told[0] and "rank 1" in told[0] and len(told) == 2


def test_back_off_of_several_is_no_fault(tmp_path):
    found = in_processes(trained_in_fp16, 2, str(tmp_path), "ddp", 2.0**30, None)
    for told, scale, skipped, backed_off in found:
        assert scale == 2.0**30 / 2**skipped and skipped == backed_off > 3 and not told
    assert not reports(tmp_path)


def replayed(rank, folder, strategy):
    options = {"device": "cpu", "noprogressbar": True, "strategy": strategy}
    options = RunOptions.from_mapping(options, purpose=Purpose("replay", Path(folder) / "nonfinite-3"))
    brain = Classifier({"model": network()}, sgd, run_opts=options)
    brain.fit(range(2), data(rank))
    return math.isnan(brain.evaluate(data(rank)))


@pytest.mark.extended
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_replayed_from_its_folder_by_several_and_by_one(tmp_path, strategy, capfd):
    in_processes(trained, 2, str(tmp_path), strategy, True, False, {})
    saved = numerics.read_replay(tmp_path / "nonfinite-3")
    assert {name: value.shape for name, value in saved.parameters.items()} == {
        f"model.{name}": value.shape for name, value in network().named_parameters()
    }
    for count in (2, 1):
        assert in_processes(replayed, count, str(tmp_path), strategy) == [True] * count
        assert capfd.readouterr().out.count("The same as in step 3") == 1


def ended(rank, folder, strategy):
    batches = data(rank)
    for index, batch in enumerate(batches):
        batch[0][index if rank == 1 else 0, 0] = math.nan if rank == 1 else 0.0
    brain = brain_of(folder, strategy)
    with pytest.raises(NonfiniteError) as error:
        brain.fit(range(1), batches)
    return str(error.value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_error_that_ends_the_run_names_it_on_all_ranks(tmp_path, strategy):
    first, second = in_processes(ended, 2, str(tmp_path), strategy)
    assert "Rank 1: batch[0] contains NaN" in first and "It comes from sample 2 " in first
    assert first.partition("Last:")[0] == second.partition("Last:")[0]
    assert first.partition("Rank 1")[2] == second.partition("Rank 1")[2]


def both_kinds(rank, folder, strategy):
    """Rank 0's activations are beyond fp16, and rank 1 has a NaN: the lower rank is told."""
    brain = brain_of(folder, strategy, network(1e6), precision="fp16", init_scale=1.0)
    brain.fit(range(1), data(rank, 1, nan=(1, 0, 2)))
    return None


@pytest.mark.extended
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_of_two_ranks_the_lower_is_told(tmp_path, strategy):
    in_processes(both_kinds, 2, str(tmp_path), strategy)
    ((_, report),) = reports(tmp_path).items()
    assert (report["rank"], report["cause"]) == (0, "precision")
    assert report["module"].startswith("model.2.1"), report["message"]


def refused(rank, strategy, options):
    told = Told()
    brain = brain_of(None, strategy, **options)
    brain.fit(range(2), data(rank, nan=(1, 2, 4)))
    return told.texts, brain.skipped_steps


@pytest.mark.extended
def test_where_a_step_cannot_be_repeated_it_is_said_once():
    (told, *first), (_, *second) = in_processes(refused, 2, "ddp", {"static_graph": True})
    assert first == second == [2]
    assert sum("static_graph expects the same backward" in text for text in told) == 1


# ---------------------------------------------------------------------- what must not hang


class Talks(Classifier):
    """Its loss exchanges something with the other ranks, without the framework."""

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        numbers = loss.detach().clone()
        dist.all_reduce(numbers)
        return loss + 0 * numbers


def talks_or_raises(rank, how):
    told = Told()
    if how == "raises" and rank == 1:
        numerics.locate = broken
    brain = brain_of(None, "ddp", kind=Talks if how == "talks" else Classifier)
    brain.fit(range(1), data(rank, nan=(1, 2, 4)))
    return told.texts, brain.skipped_steps, brain.optimizer_step


def broken(*_, **__):
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("how", ["raises", pytest.param("talks", marks=pytest.mark.extended)])
def test_a_rank_that_cannot_repeat_its_step_holds_nobody_up(how):
    (told, *counts), (_, *others) = in_processes(talks_or_raises, 2, how)
    assert counts == others == [1, 3]
    said = {
        "raises": "rank 1: could not repeat the step: RuntimeError('out of memory')",
        "talks": "rank 1: batch[0] contains NaN before the step begins; the first op that reads it is",
    }
    assert any(said[how] in text for text in told), told


class Lonely(Classifier):
    """One rank alone asks how many updates there were, as a recipe that prints does."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if dist.get_rank() == 0:
            self.asked = self.skipped_steps


def asks_alone(rank, folder):
    HostCopy.immediate = False
    brain = brain_of(folder, "ddp", kind=Lonely)
    brain.fit(range(1), data(rank, nan=(1, 2, 4)))
    return brain.skipped_steps


@pytest.mark.extended
def test_a_rank_that_knows_of_the_skip_first_waits_for_the_others(tmp_path):
    assert in_processes(asks_alone, 2, str(tmp_path)) == [1, 1]
    assert [report["samples"] for report in reports(tmp_path).values()] == [[4]]


# ---------------------------------------------------------------------- validation and test


def evaluated(rank, folder, strategy):
    told = Told()
    brain = brain_of(folder, strategy, ema_decay=0.5)
    brain.fit(range(1), data(rank, 2), data(rank + 5, 4 - rank, nan=(6, 1, 3)))
    test = brain.evaluate(data(rank + 7, 2, nan=(7, 1, 0)))
    return told.texts, math.isfinite(test), weights_of(brain)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_nan_in_validation_and_in_a_test(tmp_path, strategy):
    (told, *first), (_, *second) = in_processes(evaluated, 2, str(tmp_path), strategy)
    assert first == second and first[0]
    found = reports(tmp_path)
    assert [(name, report["rank"], report["samples"]) for name, report in found.items()] == [
        ("nonfinite-2-test-2-rank-0", 0, [0]),
        ("nonfinite-2-valid-2-rank-1", 1, [3]),
    ]
    for report in found.values():
        assert (report["cause"], report["module"]) == ("data", "model.0")
        assert any(text.startswith(f"{report['where']}: {report['message']}") for text in told)
