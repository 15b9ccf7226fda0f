"""A NaN sample is named by its index in the dataset and by its file, in whatever order a run reads."""

import json
import math

import pytest
import torch
from device import DEVICE
from pairwise import pairwise
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from amp_recipes import Brain
from amp_recipes.data import LengthBuckets
from amp_recipes.errors import NonfiniteError

BAD = (13, 29)
COUNT = 40


class Clips(Dataset):
    """Some of its samples hold NaN."""

    def __init__(self):
        self.features = torch.randn(COUNT, 6, generator=torch.Generator().manual_seed(0))
        self.features[list(BAD), 2] = math.nan
        self.files = [f"clips/{index:04}.wav" for index in range(COUNT)]

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return {"features": self.features[index], "kind": index % 3, "index": index}


class Classifier(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.model(batch["features"])

    def compute_objectives(self, predictions, batch, stage):
        return F.cross_entropy(predictions.float(), batch["kind"])


def brain_of(folder, **options):
    torch.manual_seed(0)
    run_opts = {"device": DEVICE, "noprogressbar": True, "output_folder": str(folder), "seed": 3, **options}
    return Classifier({"model": nn.Linear(6, 3)}, lambda p: torch.optim.SGD(p, lr=0.1), None, run_opts)


def reports(folder):
    return [json.loads(file.read_text()) for file in sorted(folder.glob("nonfinite-*.json"))]


def assert_named(found):
    """Each bad sample, once or more, with its file."""
    assert {index for report in found for index in report["dataset_indices"]} == set(BAD)
    for report in found:
        assert report["sample_files"] == [f"clips/{index:04}.wav" for index in report["dataset_indices"]]
        assert len(report["samples"]) == len(report["dataset_indices"])
        for index, file in zip(report["dataset_indices"], report["sample_files"], strict=True):
            assert f"{index} ({file})" in report["message"]


ORDERS = {
    "shuffle": {"batch_size": 4, "shuffle": True},
    "drop_last": {"batch_size": 3, "shuffle": False, "drop_last": True},
    "buckets": {"batch_sampler": LengthBuckets([index % 7 for index in range(COUNT)], 4, pool_size=16)},
}


@pytest.mark.parametrize(("order", "workers", "window"), pairwise(list(ORDERS), (0, 2), (1, 3)))
def test_a_sample_is_named_by_its_index_and_file(tmp_path, order, workers, window):
    brain = brain_of(tmp_path, grad_accumulation_factor=window)
    brain.fit(range(1, 2), Clips(), train_loader_kwargs={"num_workers": workers, **ORDERS[order]})
    assert_named(reports(tmp_path))


def test_the_sentence_names_index_and_file(tmp_path, caplog):
    brain_of(tmp_path).fit(range(1), Clips(), train_loader_kwargs={"batch_size": 8})
    said = "It comes from sample 5 (counted from 0) of the batch: dataset index 13 (clips/0013.wav). Cause: the data."
    assert said in caplog.text


def test_a_dataloader_of_the_users_names_them_too(tmp_path):
    brain_of(tmp_path).fit(range(1), DataLoader(Clips(), 8, shuffle=True))
    assert_named(reports(tmp_path))


IN_SEQUENCE = {
    "by size": {"batch_size": 8},
    "by a batch sampler": {"batch_sampler": BatchSampler(SequentialSampler(range(COUNT)), 8, drop_last=True)},
}
UNCERTAIN = {
    "shuffled": {"batch_size": 8, "shuffle": True},
    "out of order": {"batch_size": 8, "num_workers": 1, "in_order": False},
}


@pytest.mark.parametrize("order", IN_SEQUENCE)
def test_a_dataloader_to_evaluate_names_them_where_it_reads_in_sequence(tmp_path, order):
    brain_of(tmp_path).evaluate(DataLoader(Clips(), **IN_SEQUENCE[order]))
    assert_named(reports(tmp_path))


@pytest.mark.parametrize("order", UNCERTAIN)
def test_a_dataloader_to_evaluate_names_none_that_is_not_certain(tmp_path, order):
    loader = DataLoader(Clips(), **UNCERTAIN[order])
    brain = brain_of(tmp_path, nonfinite_patience=9)
    brain.fit(range(1, 2), loader, loader)
    found = [report for report in reports(tmp_path) if report["stage"] == "valid"]
    assert found and not any(report["dataset_indices"] for report in found)


def test_a_run_that_is_resumed_inside_an_epoch_names_them(tmp_path):
    class Dies(Classifier):
        def fit_batch(self, batch):
            if self.step == 3:
                raise KeyboardInterrupt
            return super().fit_batch(batch)

    order = {"batch_size": 4, "shuffle": True}
    options = {"ckpt_interval_steps": 1, "grad_accumulation_factor": 1}
    first = brain_of(tmp_path, **options)
    first.__class__ = Dies
    with pytest.raises(KeyboardInterrupt):
        first.fit(range(1, 2), Clips(), train_loader_kwargs=order)
    for file in tmp_path.glob("nonfinite-*.json"):
        file.unlink()
    again = brain_of(tmp_path, **options)
    seen = []
    again.on_fit_batch_start = lambda batch, should_step: seen.append(batch["index"].tolist())
    again.fit(range(1, 2), Clips(), train_loader_kwargs=order)
    expected = {index for batch in seen for index in batch} & set(BAD)
    found = reports(tmp_path)
    assert expected and {index for report in found for index in report["dataset_indices"]} == expected


def test_the_error_of_a_run_that_ends_names_them(tmp_path):
    class AllBad(Clips):
        def __init__(self):
            super().__init__()
            self.features[:] = math.nan
            self.features[::2] = 0.0

    brain = brain_of(tmp_path)
    with pytest.raises(NonfiniteError, match=r"dataset indices 17 \(clips/0017.wav\), 19 \(clips/0019.wav\)"):
        brain.fit(range(1), AllBad(), train_loader_kwargs={"batch_size": 8})
