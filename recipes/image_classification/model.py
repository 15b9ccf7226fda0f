"""Defines the network: a small residual convolutional classifier with BatchNorm.

Legend of shapes: B batch, C channels, H height, W width, D features, K classes.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut; with stride 2 the image halves.

    The order is BatchNorm, ReLU, convolution (He et al. 2016, "Identity Mappings in Deep Residual Networks"),
    so the sum is never rectified and the gradient reaches the first layer through additions alone.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 1):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.shortcut = None
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the block's output, (B, out_channels, H / stride, W / stride), rounded up."""
        active_BCHW = F.relu(self.norm1(x_BCHW))
        skip_BCHW = x_BCHW if self.shortcut is None else self.shortcut(active_BCHW)
        hidden_BCHW = self.conv1(active_BCHW)
        return skip_BCHW + self.conv2(F.relu(self.norm2(hidden_BCHW)))


class SmallResNet(nn.Module):
    """Class scores of an image of any size.

    widths: channels of each stage; the first keeps the image's size, every further one halves it.
    blocks_per_stage: residual blocks in each stage.
    dropout: share of the pooled features that training sets to zero.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        widths: Sequence[int] = (16, 32, 64),
        blocks_per_stage: int = 1,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        blocks = []
        width_before = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks_per_stage):
                halves = stage > 0 and block == 0
                blocks.append(ResidualBlock(width_before, width, stride=2 if halves else 1))
                width_before = width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(width_before)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width_before, num_classes)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the scores before softmax, (B, K), of images (B, in_channels, H, W) in [0, 1]."""
        features_BCHW = self.blocks(self.stem(images_BCHW))
        features_BCHW = F.relu(self.norm(features_BCHW))
        pooled_BD = features_BCHW.mean(dim=(2, 3))
        return self.head(self.dropout(pooled_BD))
