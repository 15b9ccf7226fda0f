"""Loads the real images: scikit-learn's handwritten digits, or all images below a folder.

A sample of train is {"image": float32 (C, H, W) in [0, 1]}; those of valid and test have a "noise" (Z,) of their own
besides, so that every epoch and every run is judged by samples from the same noise.
Legend of shapes: N images, C channels, H height, W width, Z noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from amp_recipes import needs_extra
from amp_recipes.errors import DataError

with needs_extra("image"):
    from PIL import Image, ImageOps
    from sklearn.datasets import load_digits

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F")
SMALLEST_PART = 2  # images of a set; the distance between smaller sets means nothing


@dataclass(frozen=True)
class ImageSets:
    """The three datasets, and what a model must know about them."""

    train: Dataset
    valid: Dataset
    test: Dataset
    image_size: int
    channels: int


class ImageTensors(Dataset):
    """Samples of images (N, C, H, W) that are in memory."""

    def __init__(self, images: torch.Tensor):
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index]}


class ImageFiles(Dataset):
    """Samples of image files, each read when it is asked for, so a dataset may be larger than memory.

    Raises DataError, which names the file, where one cannot be read.
    """

    def __init__(self, paths: Sequence[Path], image_size: int, channels: int):
        self.paths = [str(path) for path in paths]
        self.image_size = image_size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": read_image(self.paths[index], self.image_size, self.channels)}


class WithNoise(Dataset):
    """The samples of a dataset, each with standard normal "noise" (Z,) that depends on noise_seed and index alone."""

    def __init__(self, samples: Dataset, noise_size: int, noise_seed: int):
        self.samples = samples
        generator = torch.Generator().manual_seed(noise_seed)
        self.noise_NZ = torch.randn(len(samples), noise_size, generator=generator)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {**self.samples[index], "noise": self.noise_NZ[index]}


def load_images(
    data_folder: str | Path | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    split_ratios: Sequence[float] = (0.7, 0.15, 0.15),
    data_seed: int = 0,
    noise_size: int = 64,
    max_held_out: int = 2000,
) -> ImageSets:
    """Return train, valid and test sets of the digits (data_folder None) or of the images below a folder.

    image_size: height and width in pixels; None: 8 for the digits, 32 for a folder. A file is cut to its middle
    square first. channels: 1 (grey) or 3 (colour); None: 1 for the digits, for a folder 3 if one of the first 100
    train images has colour. split_ratios: shares of train, valid and test. data_seed: decides which image goes where,
    and the noise of valid and test. noise_size: numbers per noise. max_held_out: images that valid, and test, have at
    most, since all of them are measured together; what is over trains.
    Raises DataError for a folder or a setting that does not fit this description.
    """
    check_settings(image_size, channels, split_ratios)
    if data_folder is None or data_folder == "":
        image_size, channels = image_size or 8, channels or 1
        images = digit_images(image_size, channels)
        parts = [
            ImageTensors(images[part]) for part in random_split(len(images), split_ratios, data_seed, max_held_out)
        ]
    else:
        paths = list_images(Path(data_folder))
        indices = random_split(len(paths), split_ratios, data_seed, max_held_out)
        path_parts = [[paths[i] for i in part] for part in indices]
        image_size = image_size or 32
        channels = channels or (3 if any(has_colour(path) for path in path_parts[0][:100]) else 1)
        parts = [ImageFiles(part, image_size, channels) for part in path_parts]
    train, valid, test = parts
    valid, test = WithNoise(valid, noise_size, data_seed + 1), WithNoise(test, noise_size, data_seed + 2)
    return ImageSets(train, valid, test, image_size, channels)


def reference(images: ImageSets, count: int) -> torch.Tensor:
    """Return at most count train images (N, C, H, W), evenly spaced over the set."""
    indices = np.linspace(0, len(images.train) - 1, min(count, len(images.train))).round().astype(int)
    return torch.stack([images.train[index]["image"] for index in indices.tolist()])


def check_settings(image_size: int | None, channels: int | None, split_ratios: Sequence[float]) -> None:
    """Raise DataError for a setting that no data could satisfy."""
    if image_size is not None and image_size < 1:
        raise DataError(f"image_size is {image_size}; expected the side in pixels, or null")
    if channels not in (None, 1, 3):
        raise DataError(f"channels is {channels}; expected 1 (grey), 3 (colour) or null (detected)")
    if len(split_ratios) != 3 or min(split_ratios) <= 0 or abs(sum(split_ratios) - 1) > 1e-6:
        raise DataError(f"split_ratios is {list(split_ratios)}; expected shares of train, valid and test with sum 1")


def random_split(count: int, split_ratios: Sequence[float], data_seed: int, max_held_out: int) -> list[list[int]]:
    """Return the sorted indices of train, valid and test. Raises DataError where one would have fewer than 2."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(data_seed))
    num_valid, num_test = (min(round(count * ratio), max_held_out) for ratio in split_ratios[1:])
    sizes = [count - num_valid - num_test, num_valid, num_test]
    if min(sizes) < SMALLEST_PART:
        raise DataError(
            f"{count} image(s) split by {list(split_ratios)} are {sizes[0]}, {sizes[1]} and {sizes[2]} for train, "
            f"valid and test; expected at least {SMALLEST_PART} each. Add images, or change --split_ratios"
        )
    return [sorted(part.tolist()) for part in order.split(sizes)]


def digit_images(image_size: int, channels: int) -> torch.Tensor:
    """Return scikit-learn's 1797 handwritten digits (N, C, H, W), which are 8x8 and grey."""
    images_NCHW = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16.0
    if image_size != images_NCHW.shape[-1]:
        images_NCHW = F.interpolate(images_NCHW, size=(image_size, image_size), mode="bilinear", antialias=True)
    return images_NCHW.expand(-1, channels, -1, -1).contiguous()


def list_images(folder: Path) -> list[Path]:
    """Return the image files below folder, sorted, without hidden ones. Raises DataError where there are none."""
    if not folder.is_dir():
        raise DataError(f"data_folder '{folder}' is not a folder; expected one with images, at any depth")
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise DataError(f"no image below '{folder}'; expected files that end in {', '.join(IMAGE_SUFFIXES)}")
    return found


def open_image(path: str | Path) -> Image.Image:
    """Return the decoded file; raises DataError, which names it, where pillow cannot read it."""
    try:
        with Image.open(path) as image:
            image.load()
            return image
    # Broken files raise any of these; a PNG with a bad chunk raises SyntaxError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not readable as an image ({error}); replace or remove the file") from error


def read_image(path: str | Path, image_size: int, channels: int) -> torch.Tensor:
    """Return the middle square of an image file as float32 (channels, image_size, image_size) in [0, 1]."""
    # Cameras do not turn the pixels; they store in a tag how they were held.
    upright = ImageOps.exif_transpose(open_image(path))
    if upright.mode == "F":
        raise DataError(f"{path}: its pixels are floating point numbers of unknown range; save it with 8 or 16 bits")
    if upright.mode.startswith("I"):  # 16 bits, which pillow's own conversion clips to white
        levels_HW = np.rint(np.asarray(upright).astype(np.float32) / 257.0)
        upright = Image.fromarray(levels_HW.clip(0, 255).astype(np.uint8))
    converted = upright.convert("L" if channels == 1 else "RGB")
    square = ImageOps.fit(converted, (image_size, image_size), Image.Resampling.BILINEAR)
    pixels_HWC = np.array(square, dtype=np.float32).reshape(image_size, image_size, channels)
    return torch.from_numpy(pixels_HWC).permute(2, 0, 1).contiguous() / 255.0


def has_colour(path: Path) -> bool:
    """Return whether the image file is stored with colour."""
    return open_image(path).mode not in GREY_MODES
