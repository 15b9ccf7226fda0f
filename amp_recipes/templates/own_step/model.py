"""Decides the two networks.

Legend of shapes: N points, D their dimensions, Z the noise's.
"""

import torch
from torch import nn


def hidden_layers(in_size: int, hidden_size: int) -> nn.Sequential:
    """Return two linear layers with an activation after each."""
    activation = nn.LeakyReLU(0.2)
    return nn.Sequential(nn.Linear(in_size, hidden_size), activation, nn.Linear(hidden_size, hidden_size), activation)


class Generator(nn.Module):
    """Makes points out of noise.

    noise_size: dimensions of the noise.
    """

    def __init__(self, num_dimensions: int, noise_size: int = 8, hidden_size: int = 64):
        super().__init__()
        self.noise_size = noise_size
        self.hidden = hidden_layers(noise_size, hidden_size)
        self.head = nn.Linear(hidden_size, num_dimensions)

    def forward(self, num_points: int) -> torch.Tensor:
        """Return that many points (N, D), other ones at each call."""
        noise_NZ = torch.randn(num_points, self.noise_size, device=self.head.weight.device)
        return self.head(self.hidden(noise_NZ))


class Critic(nn.Module):
    """Scores points: high for those that look real."""

    def __init__(self, num_dimensions: int, hidden_size: int = 64):
        super().__init__()
        self.hidden = hidden_layers(num_dimensions, hidden_size)
        self.head = nn.Linear(hidden_size, 1)

    def forward(self, points_ND: torch.Tensor) -> torch.Tensor:
        """Return the logits of being real (N, 1)."""
        return self.head(self.hidden(points_ND))
