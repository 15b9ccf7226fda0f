"""Measures samples: their distance to real images as a set, and whether they copy the training images.

Images are (N, C, H, W), on any device. Legend of shapes: N images, P pixels (C * H * W), K directions.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from amp_recipes import needs_extra

with needs_extra("image"):
    from PIL import Image


def sliced_wasserstein(first: torch.Tensor, second: torch.Tensor, directions: int = 256, seed: int = 0) -> float:
    """Return the sliced Wasserstein distance of two sets of equally many images, 0 for equal sets.

    The root of the mean, over random unit directions, of the squared 2-Wasserstein distance between the projections,
    which for equally many points is that of the sorted ones (Bonneel et al. 2015, "Sliced and Radon Wasserstein
    Barycenters of Measures", equation 7). In units of a pixel at any image size: adding 0.1 to every pixel of all
    images moves a set by 0.1, on average over directions.
    seed: of the directions, which are the same for every call with it, on every device.
    """
    assert first.shape == second.shape
    first_NP, second_NP = flat(first), flat(second)
    generator = torch.Generator().manual_seed(seed)
    directions_PK = torch.randn(first_NP.shape[1], directions, generator=generator)
    directions_PK /= directions_PK.norm(dim=0)
    gaps_NK = (first_NP @ directions_PK).sort(dim=0).values - (second_NP @ directions_PK).sort(dim=0).values
    return gaps_NK.square().mean().sqrt().item()


def nearest_ratio(generated: torch.Tensor, held_out: torch.Tensor, train: torch.Tensor) -> float:
    """Return the distance of samples to training images, divided by that of held-out real images.

    The median L2 distance to the nearest training image, of the samples, divided by that of the held-out images.
    About 1: samples are new images; towards 0: copies; above 1: they look like no training image.
    """
    train_NP = flat(train)
    to_samples, to_held_out = (
        torch.cdist(flat(images), train_NP).min(dim=1).values.median() for images in (generated, held_out)
    )
    return (to_samples / to_held_out.clamp(min=1e-12)).item()


def flat(images: torch.Tensor) -> torch.Tensor:
    """Return the images as float32 rows (N, P) on the host, where results do not depend on the device."""
    return images.detach().cpu().float().flatten(1)


def save_grid(
    path: str | Path, panels: Sequence[torch.Tensor], columns: int = 8, min_side: int = 32, frame: int = 1
) -> None:
    """Write a PNG of images (N, C, H, W) in [0, 1]: each panel a block of rows, panels beside each other.

    min_side: pixels that an image's side has at least, by whole repetition of each; frame: white ones around it.
    """
    blocks = [tile(images, columns, max(1, -(-min_side // images.shape[-1])), frame) for images in panels]
    height = max(len(block) for block in blocks)
    padded = []
    for block in blocks:
        empty = ((0, height - len(block)), (8 if padded else 0, 0), (0, 0))
        padded.append(np.pad(block, empty, constant_values=255))
    picture_HWC = np.concatenate(padded, axis=1)
    Image.fromarray(picture_HWC.squeeze(2) if picture_HWC.shape[2] == 1 else picture_HWC).save(path, format="PNG")


def tile(images: torch.Tensor, columns: int, zoom: int, frame: int) -> np.ndarray:
    """Return uint8 (H, W, C): the images row by row, each pixel zoom times as wide and high."""
    levels = (images.detach().cpu().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
    around = ((frame, frame), (frame, frame), (0, 0))
    framed = [np.pad(it.repeat(zoom, 0).repeat(zoom, 1), around, constant_values=255) for it in levels]
    framed += [np.full_like(framed[0], 255)] * (-len(framed) % columns)
    rows = [np.concatenate(framed[start : start + columns], axis=1) for start in range(0, len(framed), columns)]
    return np.concatenate(rows)
