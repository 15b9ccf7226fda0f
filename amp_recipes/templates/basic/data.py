"""Decides what the samples are: random ones, labelled by a linear rule, until you put in your own.

A sample is {"features": float32 (D,), "label": int64 ()}; a batch has (B, D) and (B,).
Legend of shapes: N samples, B batch, D features, K classes.
"""

from typing import NamedTuple

import torch
from torch.utils.data import Dataset


class Samples(Dataset):
    """Samples that are in memory: features (N, D), labels (N,)."""

    def __init__(self, features_ND: torch.Tensor, labels_N: torch.Tensor):
        self.features_ND = features_ND
        self.labels_N = labels_N

    def __len__(self) -> int:
        return len(self.labels_N)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        # Your own data: read file number `index` here. Then the data need not fit into memory.
        return {"features": self.features_ND[index], "label": self.labels_N[index]}


class Datasets(NamedTuple):
    """The data to train on, to choose the best epoch with, and to test on."""

    train: Dataset
    valid: Dataset
    test: Dataset


def make_datasets(
    num_features: int, num_classes: int, num_samples: int = 4096, noise: float = 0.5, data_seed: int = 0
) -> Datasets:
    """Return three quarters of the samples to train on, and an eighth each for validation and test.

    noise: standard deviation of the noise on the scores (their own: 1), whose highest gives the label.
    data_seed: the same seed makes the same samples on every machine.
    """
    generator = torch.Generator().manual_seed(data_seed)
    features_ND = torch.randn(num_samples, num_features, generator=generator)
    rule_DK = torch.randn(num_features, num_classes, generator=generator) / num_features**0.5
    noise_NK = noise * torch.randn(num_samples, num_classes, generator=generator)
    labels_N = (features_ND @ rule_DK + noise_NK).argmax(dim=1)
    num_valid = num_samples // 8
    sizes = [num_samples - 2 * num_valid, num_valid, num_valid]
    return Datasets(*map(Samples, features_ND.split(sizes), labels_N.split(sizes)))
