"""Decides the network.

Legend of shapes: B batch, D features, H hidden, K classes.
"""

import torch
from torch import nn


class Network(nn.Module):
    """Class scores of a sample: one hidden layer.

    hidden_size: width of the hidden layer.
    dropout: share of it that training sets to zero.
    """

    def __init__(self, num_features: int, num_classes: int, hidden_size: int = 64, dropout: float = 0.0):
        super().__init__()
        self.hidden = nn.Linear(num_features, hidden_size)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, num_classes)

    def forward(self, x_BD: torch.Tensor) -> torch.Tensor:
        """Return the scores before softmax (B, K)."""
        x_BH = self.activation(self.hidden(x_BD))
        return self.head(self.dropout(x_BH))
