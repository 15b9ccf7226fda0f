"""The first op where low precision and fp32 part lies in the planted culprit; healthy networks do not part."""

import json

import pytest
import torch
from planted_faults import (
    ZOO,
    Attention,
    Bulge,
    Chain,
    Hum,
    Transformer,
    Watcher,
    blocks,
    cases,
    classified,
    head,
    normal,
    tokens,
    zoo,
)
from torch import nn

from amp_recipes.data import to_device
from amp_recipes.numerics.drift.parting import find_parting
from amp_recipes.numerics.trial import Trial, plain_trial

BF16, FP16 = torch.bfloat16, torch.float16
DEFAULT = frozenset(("cast_overflow", "silent_zero_of_squares", "tiny_eps", "overflow_in_the_loss", "accumulation"))


@pytest.mark.parametrize("planted", cases(zoo(cause="precision"), DEFAULT))
def test_it_lies_in_the_culprit(planted):
    found = find_parting(planted.trial(), planted.windows(1)[0], planted.dtype, planted.scale)
    assert found is not None and found.module in (planted.culprit, *planted.also_cured_by)
    assert found.effect > planted.tolerance and (found.error > planted.tolerance or found.magnified_by in str(found))
    assert "planted_faults.py:" in str(found) and json.loads(json.dumps(found.as_dict()))["op"] == found.op


HEALTHY = {
    "decoys": (lambda: Chain(embed=nn.Linear(12, 16), hum=Hum(16), watcher=Watcher(), bulge=Bulge(16)), 16),
    "blocks": (lambda: Chain(embed=nn.Linear(12, 16), blocks=blocks(16, 3)), 16),
}


@pytest.mark.parametrize(("dtype", "scale"), [(BF16, 1.0), (FP16, 1024.0)])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_network_does_not_part(name, dtype, scale):
    make, width = HEALTHY[name]
    torch.manual_seed(0)
    trial = plain_trial(Chain(body=make(), head=head(width)), classified)
    assert find_parting(trial, to_device([normal(8, 12)(0)], trial.device), dtype, scale) is None


def test_a_causal_mask_is_no_parting():
    torch.manual_seed(0)
    trial = plain_trial(Transformer(Attention(16), Attention(16)), classified)
    assert find_parting(trial, [tokens()(0)], FP16, 1024.0) is None


def test_with_the_culprit_pinned_nothing_parts():
    planted = ZOO["silent_zero_of_squares"]
    trial, window = planted.trial(), planted.windows(1)[0]
    assert find_parting(trial, window, planted.dtype, planted.scale) is not None
    assert find_parting(trial, window, planted.dtype, planted.scale, [planted.culprit]) is None


def test_without_time_no_suspect_is_tested_and_a_step_that_raises_does_not_part(monkeypatch):
    planted = ZOO["silent_zero_of_squares"]
    trial, window = planted.trial(), planted.windows(1)[0]
    assert find_parting(trial, window, planted.dtype, planted.scale, may_test=lambda: False) is None

    def refused(self, window, dtype=torch.float32, *others, **options):
        raise RuntimeError("no such op")

    monkeypatch.setattr(Trial, "run", refused)
    assert find_parting(trial, window, planted.dtype, planted.scale) is None
