"""Decides what is to be generated: points near a ring, until you put in your own.

A sample is float32 (D,); a batch has (B, D).
Legend of shapes: N samples, B batch, D dimensions (2).
"""

import math
from typing import NamedTuple

import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    """Samples that are in memory, (N, D)."""

    def __init__(self, points_ND: torch.Tensor):
        self.points_ND = points_ND

    def __len__(self) -> int:
        return len(self.points_ND)

    def __getitem__(self, index: int) -> torch.Tensor:
        # Your own data: read file number `index` here. Then the data need not fit into memory.
        return self.points_ND[index]


class Datasets(NamedTuple):
    """The data to train on, to choose the best epoch with, and to test on."""

    train: Dataset
    valid: Dataset
    test: Dataset


def make_datasets(num_samples: int = 8192, noise: float = 0.05, data_seed: int = 0) -> Datasets:
    """Return three quarters of the points to train on, and an eighth each for validation and test.

    noise: standard deviation of a point's distance from the ring, whose radius is 1.
    data_seed: the same seed makes the same points on every machine.
    """
    generator = torch.Generator().manual_seed(data_seed)
    angles_N = 2 * math.pi * torch.rand(num_samples, generator=generator)
    radii_N = 1 + noise * torch.randn(num_samples, generator=generator)
    points_N2 = torch.stack((radii_N * angles_N.cos(), radii_N * angles_N.sin()), dim=1)
    num_valid = num_samples // 8
    return Datasets(*map(Samples, points_N2.split([num_samples - 2 * num_valid, num_valid, num_valid])))
