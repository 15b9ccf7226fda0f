"""What is dangerous in low precision on a device with CUDA's autocast lists, and not on a CPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from amp_recipes.numerics.hazards.hazards import find_hazards
from amp_recipes.numerics.trial import plain_trial

TOKENS = torch.arange(12).reshape(3, 4)
LOSSES = {  # with what it is told
    "labels": (lambda logits: F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten().to(logits.device)), True),
    "probabilities": (
        lambda logits: F.cross_entropy(logits[:, 0], torch.full((3, 12), 1 / 12, device=logits.device)),
        True,
    ),
    "module": (lambda logits: nn.CrossEntropyLoss()(logits[:, 0], TOKENS[:, 0].to(logits.device)), True),
    "fp32": (lambda logits: F.cross_entropy(logits.float().flatten(0, 1), TOKENS.flatten().to(logits.device)), False),
    "log_softmax": (lambda logits: F.nll_loss(logits[:, 0].log_softmax(-1), TOKENS[:, 0].to(logits.device)), False),
}


@pytest.mark.parametrize("device", ["simulated", "cpu"])
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy_of_bf16_logits_is_named_where_its_log_softmax_runs_in_bf16(name, device):
    loss, dangerous = LOSSES[name]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12)).to(device)
    hazards = find_hazards(plain_trial(model, lambda model, tokens: loss(model(tokens))), [TOKENS.to(device)])
    found = [(it.file, it.line) for it in hazards if "cross_entropy of bf16 logits" in it.message]
    expected = [(__file__, loss.__code__.co_firstlineno)] if dangerous and device == "simulated" else []
    assert found == expected
    if name == "labels":
        # What is said is so: the losses are rounded to bf16 there.
        with torch.autocast(device, torch.bfloat16), torch.no_grad():
            logits = model(TOKENS.to(device)).flatten(0, 1)
            each = F.cross_entropy(logits, TOKENS.flatten().to(device), reduction="none")
        assert torch.equal(each, each.bfloat16().float()) == bool(expected)
