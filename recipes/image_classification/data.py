"""Loads the images: scikit-learn's handwritten digits, or a folder with one sub-folder per class.

A sample is {"image": float32 (C, H, W) in [0, 1], "label": int64 ()}; a batch has (B, C, H, W) and (B,).
Legend of shapes: B batch, C channels, H height, W width.
"""

import difflib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from amp_recipes import fwd_default_precision, needs_extra
from amp_recipes.errors import DataError

with needs_extra("image"):
    from PIL import Image, ImageOps
    from sklearn.datasets import load_digits

IMAGE_SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
SPLIT_NAMES = ("train", "valid", "test")
FOLDER_IMAGE_SIZE = 32
CLASSES_FILE = "assets/classes.json"  # in the folder of a run; an export takes it along
GREY_MODES = ("1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "F")


@dataclass(frozen=True)
class ImageSets:
    """The three datasets and what a model must know about them. Images are image_size pixels high and wide."""

    train: Dataset
    valid: Dataset
    test: Dataset
    classes: tuple[str, ...]
    channels: int
    image_size: int

    @property
    def num_classes(self) -> int:
        """Return the number of classes; label k means classes[k]."""
        return len(self.classes)


def check_classes(file: Path, classes: Sequence[str]) -> None:
    """Raise DataError if the run that wrote `file` was trained on other classes than these."""
    if not file.is_file():
        return
    trained = json.loads(file.read_text())
    if trained != list(classes):
        found = f"the images have the classes {list(classes)}, but the run was trained on {trained} ({file})"
        raise DataError(f"{found}. Restore the folders of the training's images, or train in another --output_folder.")


class ImageTensors(Dataset):
    """Samples of images that are in memory: images (N, C, H, W) float32, labels (N,) int64."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"image": self.images[index], "label": self.labels[index]}


class ImageFiles(Dataset):
    """Samples of image files, each read when it is asked for, so a dataset may be larger than memory.

    Raises DataError, which names the file, where one cannot be read.
    """

    def __init__(self, paths: Sequence[Path], labels: Sequence[int], image_size: int, channels: int):
        self.paths = [str(path) for path in paths]
        self.labels = torch.tensor(labels, dtype=torch.int64)
        self.image_size = image_size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        image = read_image(self.paths[index], self.image_size, self.channels)
        return {"image": image, "label": self.labels[index]}


class RandomAffine(nn.Module):
    """A random shift, turn and zoom of each image of a batch, drawn from torch's global generator.

    max_shift: share of the image's side. max_degrees: turn to either side. max_zoom: 0.1 is 0.9 to 1.1 times.
    What moves in from outside repeats the border.
    """

    def __init__(self, max_shift: float, max_degrees: float, max_zoom: float):
        super().__init__()
        self.max_shift = max_shift
        self.max_degrees = max_degrees
        self.max_zoom = max_zoom

    # A bf16 grid has 8 bits for a coordinate: on 256 pixels it would move some of them by half a pixel.
    @fwd_default_precision
    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Return the moved images, float32, of the same shape."""
        draws = torch.rand(4, len(images_BCHW), device=images_BCHW.device) * 2 - 1
        # The grid's coordinates run from -1 to 1, so a whole side is 2.
        shift_x, shift_y = draws[:2] * (2 * self.max_shift)
        angle = draws[2] * math.radians(self.max_degrees)
        zoom = 1 + draws[3] * self.max_zoom
        cos, sin = angle.cos() / zoom, angle.sin() / zoom
        rows = (torch.stack((cos, -sin, shift_x), dim=1), torch.stack((sin, cos, shift_y), dim=1))
        grid_BHW2 = F.affine_grid(torch.stack(rows, dim=1), images_BCHW.shape, align_corners=False)
        return F.grid_sample(images_BCHW, grid_BHW2, padding_mode="border", align_corners=False)


def load_images(
    data_folder: str | Path | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    split_ratios: Sequence[float] = (0.7, 0.15, 0.15),
    data_seed: int = 0,
) -> ImageSets:
    """Return train, valid and test sets of the digits (data_folder None) or of a folder of images.

    data_folder: holds one folder of images per class, or train, valid and test folders that do.
    image_size: height and width in pixels; None: 8 for the digits, 32 for a folder; images are stretched.
    channels: 1 (grey) or 3 (colour); None: 1 for the digits; for a folder 3 if a class's first has colour.
    split_ratios: shares of train, valid and test in each class, where data_folder does not split.
    data_seed: decides which sample goes where; the same seed gives the same split on every machine.
    Raises DataError for a folder that does not fit this description.
    """
    check_settings(image_size, channels, split_ratios)
    if data_folder is None or data_folder == "":
        return load_digit_sets(image_size, channels, split_ratios, data_seed)
    return load_folder_sets(Path(data_folder), image_size, channels, split_ratios, data_seed)


def check_settings(image_size: int | None, channels: int | None, split_ratios: Sequence[float]) -> None:
    """Raise DataError for a setting that no data could satisfy."""
    if image_size is not None and image_size < 1:
        raise DataError(f"image_size is {image_size}; expected the side in pixels, at least 1, or null")
    if channels not in (None, 1, 3):
        raise DataError(f"channels is {channels}; expected 1 (grey), 3 (colour) or null (detected)")
    positive = len(split_ratios) == len(SPLIT_NAMES) and all(ratio > 0 for ratio in split_ratios)
    if not positive or not math.isclose(sum(split_ratios), 1.0, abs_tol=1e-6):
        raise DataError(f"split_ratios is {list(split_ratios)}; expected shares of train, valid and test with sum 1")


def stratified_split(labels: Sequence[int], split_ratios: Sequence[float], data_seed: int) -> list[list[int]]:
    """Return the sorted indices of train, valid and test; all have every class (of at least 3)."""
    generator = torch.Generator().manual_seed(data_seed)
    labels = torch.as_tensor(labels)
    splits: list[list[int]] = [[], [], []]
    for label in labels.unique().tolist():
        indices = (labels == label).nonzero().flatten()
        assert len(indices) >= len(SPLIT_NAMES)
        indices = indices[torch.randperm(len(indices), generator=generator)]
        num_valid, num_test = (max(1, round(len(indices) * ratio)) for ratio in split_ratios[1:])
        # Small classes: train keeps at least one, although both others were rounded up.
        num_valid = min(num_valid, len(indices) - 2)
        num_test = min(num_test, len(indices) - num_valid - 1)
        parts = indices.split([len(indices) - num_valid - num_test, num_valid, num_test])
        for split, part in zip(splits, parts, strict=True):
            split.extend(part.tolist())
    return [sorted(split) for split in splits]


def load_digit_sets(
    image_size: int | None, channels: int | None, split_ratios: Sequence[float], data_seed: int
) -> ImageSets:
    """Return scikit-learn's 1797 handwritten digits, 8x8 and grey, split by data_seed."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.float32).unsqueeze(1) / 16.0
    labels = torch.from_numpy(digits.target).to(torch.int64)
    if image_size is not None:
        images = F.interpolate(images, size=(image_size, image_size), mode="bilinear", antialias=True)
    channels = channels or 1
    images = images.expand(-1, channels, -1, -1).contiguous()
    parts = stratified_split(labels, split_ratios, data_seed)
    train, valid, test = (ImageTensors(images[part], labels[part]) for part in parts)
    return ImageSets(train, valid, test, tuple(str(name) for name in digits.target_names), channels, images.shape[-1])


def load_folder_sets(
    folder: Path, image_size: int | None, channels: int | None, split_ratios: Sequence[float], data_seed: int
) -> ImageSets:
    """Return the images of a folder, split as the folder says or, in each class, by split_ratios."""
    if not folder.is_dir():
        siblings = [path.name for path in sub_folders(folder.parent)] if folder.parent.is_dir() else []
        nearest = difflib.get_close_matches(folder.name, siblings, n=1)
        hint = f" Did you mean '{folder.parent / nearest[0]}'?" if nearest else ""
        raise DataError(f"data_folder '{folder}' is not a folder; expected one sub-folder of images per class.{hint}")
    if is_split_by_folders(folder):
        by_split = [list_class_images(folder / name) for name in SPLIT_NAMES]
        check_same_classes(folder, by_split)
        classes = tuple(by_split[0])
        listings = [label_paths(images_by_class, classes) for images_by_class in by_split]
    else:
        images_by_class = list_class_images(folder)
        classes = tuple(images_by_class)
        for name, paths in images_by_class.items():
            if len(paths) < len(SPLIT_NAMES):
                raise DataError(
                    f"'{folder / name}' has {len(paths)} image(s); a split into train, valid and test needs "
                    "at least three per class. Add images, or make folders train, valid and test yourself"
                )
        paths, labels = label_paths(images_by_class, classes)
        parts = stratified_split(labels, split_ratios, data_seed)
        listings = [([paths[i] for i in part], [labels[i] for i in part]) for part in parts]
    if channels is None:
        train_paths, train_labels = listings[0]
        first_of_class = dict(zip(reversed(train_labels), reversed(train_paths), strict=True))
        channels = 3 if any(has_colour(path) for path in first_of_class.values()) else 1
    size = image_size or FOLDER_IMAGE_SIZE
    train, valid, test = (ImageFiles(paths, labels, size, channels) for paths, labels in listings)
    return ImageSets(train, valid, test, classes, channels, size)


def is_split_by_folders(folder: Path) -> bool:
    """Return whether folder holds train, valid and test folders of class folders.

    A folder `train` that holds images itself is a class of that name: vehicles, say. Raises DataError where
    train is a split and one of the others is missing, or where a further folder stands beside them.
    """
    if not sub_folders(folder / "train"):
        return False
    names = {path.name for path in sub_folders(folder)}
    missing = [name for name in SPLIT_NAMES if name not in names]
    surplus = sorted(names.difference(SPLIT_NAMES))
    if missing or surplus:
        problem = f"lacks {', '.join(missing)}" if missing else f"also holds {', '.join(surplus)}"
        raise DataError(
            f"'{folder}' holds a split folder 'train' but {problem}; expected exactly train, valid and test, "
            "or class folders alone, which are then split by split_ratios"
        )
    return True


def list_class_images(folder: Path) -> dict[str, list[Path]]:
    """Return the sorted image files of each class folder, at any depth, in sorted order of the class names.

    Raises DataError for fewer than two classes, or a class without an image.
    """
    images_by_class = {path.name: list_images(path) for path in sub_folders(folder)}
    if len(images_by_class) < 2:
        found = f"one class folder, '{next(iter(images_by_class))}'" if images_by_class else "no class folder"
        raise DataError(f"'{folder}' holds {found}; expected at least two sub-folders, one of images per class")
    empty = [str(folder / name) for name, paths in images_by_class.items() if not paths]
    if empty:
        raise DataError(f"no image in {', '.join(empty)}; expected files that end in {', '.join(IMAGE_SUFFIXES)}")
    return images_by_class


def sub_folders(folder: Path) -> list[Path]:
    """Return the folders in folder, sorted by name, without hidden ones (such as .ipynb_checkpoints)."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def list_images(folder: Path) -> list[Path]:
    """Return the image files below folder, sorted, without hidden ones (such as ._a.jpg)."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in IMAGE_SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def check_same_classes(folder: Path, by_split: Sequence[dict[str, list[Path]]]) -> None:
    """Raise DataError, which lists the differences, unless every split has the same classes."""
    every_class = sorted(set().union(*by_split))
    problems = [
        f"{split} lacks {', '.join(missing)}"
        for split, images_by_class in zip(SPLIT_NAMES, by_split, strict=True)
        if (missing := [name for name in every_class if name not in images_by_class])
    ]
    if problems:
        raise DataError(f"'{folder}': the splits have different classes: {'; '.join(problems)}")


def label_paths(images_by_class: dict[str, list[Path]], classes: Sequence[str]) -> tuple[list[Path], list[int]]:
    """Return every path and, in the same order, its label."""
    paths = [path for name in classes for path in images_by_class[name]]
    labels = [label for label, name in enumerate(classes) for _ in images_by_class[name]]
    return paths, labels


@contextmanager
def open_image(path: str | Path) -> Iterator[Image.Image]:
    """Open the file; raises DataError, which names the file, where pillow cannot open or read it."""
    try:
        with Image.open(path) as image:
            yield image
    # Broken files raise any of these; a PNG with a bad chunk raises SyntaxError.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: not readable as an image ({error}); replace or remove the file") from error


def read_image(path: str | Path, image_size: int, channels: int) -> torch.Tensor:
    """Return the image file as float32 (channels, image_size, image_size) in [0, 1], or raise DataError."""
    with open_image(path) as image:
        # Cameras do not turn the pixels; they store in a tag how they were held.
        upright = ImageOps.exif_transpose(image)
        converted = to_eight_bits(upright).convert("L" if channels == 1 else "RGB")
        resized = converted.resize((image_size, image_size), Image.Resampling.BILINEAR)
    pixels_HWC = np.array(resized, dtype=np.float32).reshape(image_size, image_size, channels)
    return torch.from_numpy(pixels_HWC).permute(2, 0, 1).contiguous() / 255.0


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Return the image, with 16-bit grey scaled to 8 bits; pillow's own conversion clips it to white."""
    if image.mode == "F":
        raise ValueError("its pixels are floating point numbers of unknown range")
    if not image.mode.startswith("I"):
        return image
    pixels_HW = np.rint(np.asarray(image).astype(np.float32) / 257.0)
    return Image.fromarray(pixels_HW.clip(0, 255).astype(np.uint8))


def has_colour(path: Path) -> bool:
    """Return whether the image has colour; only the header of the file is read."""
    with open_image(path) as image:
        return image.mode not in GREY_MODES
