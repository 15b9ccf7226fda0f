"""Defines the networks: a generator that doubles an image from 4x4 up to its size, and a critic that halves it again.

Legend of shapes: B batch, C channels, H height, W width, Z noise, D features.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from amp_recipes.errors import ConfigError

SMALLEST_SIZE = 4  # side in pixels where the generator begins and the critic ends


def stage_widths(image_size: int, width: int, max_width: int) -> list[int]:
    """Return the channels at each resolution, from the whole image down to 4x4: each halving doubles them.

    Raises ConfigError unless image_size is 4 times a power of two, from 8 on.
    """
    halvings = math.log2(image_size / SMALLEST_SIZE) if image_size > 0 else 0.0
    if halvings < 1 or not halvings.is_integer():
        nearest = SMALLEST_SIZE * 2 ** max(1, round(halvings))
        raise ConfigError(
            f"image_size is {image_size}; the networks halve an image down to {SMALLEST_SIZE}x{SMALLEST_SIZE}, so it "
            f"must be 8, 16, 32, 64, 128, ... Try --image_size={nearest}"
        )
    return [min(width * 2**stage, max_width) for stage in range(int(halvings) + 1)]


class Generator(nn.Module):
    """Images in [0, 1] from noise (B, Z).

    width: channels at the image's own size; each smaller resolution has twice as many, up to max_width.
    Its norm sees one image at a time. BatchNorm's statistics would be those of the weights in training, not of the
    averaged ones that draw the samples.
    """

    def __init__(self, image_size: int, channels: int, noise_size: int = 64, width: int = 32, max_width: int = 256):
        super().__init__()
        widths = stage_widths(image_size, width, max_width)[::-1]
        self.noise_size = noise_size
        self.first = nn.Linear(noise_size, widths[0] * SMALLEST_SIZE**2)
        self.norms = nn.ModuleList(nn.GroupNorm(1, before) for before in widths)
        pairs = pairwise(widths)
        self.convs = nn.ModuleList(nn.Conv2d(before, after, 3, padding=1) for before, after in pairs)
        self.last = nn.Conv2d(widths[-1], channels, 3, padding=1)

    def forward(self, noise_BZ: torch.Tensor) -> torch.Tensor:
        """Return float32 images (B, C, H, W)."""
        x_BCHW = self.first(noise_BZ).unflatten(1, (-1, SMALLEST_SIZE, SMALLEST_SIZE))
        for norm, conv in zip(self.norms, self.convs, strict=False):
            x_BCHW = F.interpolate(F.relu(norm(x_BCHW)), scale_factor=2.0, mode="nearest")
            x_BCHW = conv(x_BCHW)
        x_BCHW = self.last(F.relu(self.norms[-1](x_BCHW)))
        # The critic compares these pixels with real ones, which are fp32: a bf16 sigmoid has 8 bits for 256 levels.
        return torch.sigmoid(x_BCHW.float())

    def noise(self, count: int) -> torch.Tensor:
        """Return standard normal noise (count, Z), drawn from torch's global generator where the weights are."""
        return torch.randn(count, self.noise_size, device=self.first.weight.device)


class Critic(nn.Module):
    """A score for each image: higher for what looks real.

    It has no norm layer: the penalty asks for a slope at each image, and BatchNorm would make every image's score
    depend on the others (Gulrajani et al. 2017, section 4). Leaky ReLU and convolutions can be differentiated twice
    at every precision.
    """

    def __init__(self, image_size: int, channels: int, width: int = 32, max_width: int = 256):
        super().__init__()
        widths = stage_widths(image_size, width, max_width)
        self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
        pairs = pairwise(widths)
        self.convs = nn.ModuleList(nn.Conv2d(before, after, 4, stride=2, padding=1) for before, after in pairs)
        # No bias: only differences of scores matter.
        self.last = nn.Linear(widths[-1] * SMALLEST_SIZE**2, 1, bias=False)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return scores (B,), float32."""
        x_BCHW = F.leaky_relu(self.first(images_BCHW * 2 - 1), 0.2)
        for conv in self.convs:
            x_BCHW = F.leaky_relu(conv(x_BCHW), 0.2)
        return self.last(x_BCHW.flatten(1)).squeeze(1).float()
