"""Small networks to diagnose: a healthy one, and some that low precision spoils."""

import torch
from device import DEVICE
from torch import nn
from torch.nn import functional as F

from amp_recipes.data import to_device
from amp_recipes.numerics.trial import plain_trial


def classified(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def windows(count=8, samples=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = [
        [(torch.randn(samples, 8, generator=generator), torch.randint(0, 4, (samples,), generator=generator))]
        for _ in range(count)
    ]
    return to_device(made, DEVICE)


def trial_of(model, objective=classified):
    model.to(DEVICE)
    return plain_trial(model, objective, torch.optim.AdamW(model.parameters(), lr=1e-2))


def healthy():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 4))


class Residue(nn.Module):
    """In bf16 nothing is left of what it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return (self.linear(x) + 1024.0) - 1024.0


class Branches(nn.Module):
    """The gradient of a small branch is gone, though its share of the whole is small."""

    def __init__(self):
        super().__init__()
        self.main, self.side = nn.Linear(8, 4), Residue()

    def forward(self, x):
        return self.main(x) + 0.15 * torch.relu(self.side(x))


class NoLowBackward(torch.autograd.Function):
    """The backward of a kernel without bf16."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if gradient.dtype is torch.bfloat16:
            raise RuntimeError("no backward in bf16")
        return gradient
