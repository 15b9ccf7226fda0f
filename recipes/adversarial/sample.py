"""Draw new images with a finished run: python recipes/adversarial/sample.py results/adversarial/fp32/seed_1234

The weights are the averaged ones of the run's best epoch, as its test used them.
"""

import argparse
from pathlib import Path

import torch
from quality import save_grid
from torch import nn

from amp_recipes import load_hparams
from amp_recipes.checkpoint import best_checkpoint, load_weights, model_weights
from amp_recipes.errors import DataError


def draw(run: Path, count: int, seed: int, batch_size: int = 64) -> torch.Tensor:
    """Return count images (N, C, H, W) in [0, 1] of the run's generator, from noise that seed decides.

    Raises CheckpointError where the run has no checkpoint, ConfigError where it has no settings.
    """
    hparams = load_hparams(run / "hyperparams.yaml")
    checkpoint = best_checkpoint(run)
    load_weights(nn.ModuleDict(hparams["modules"]), model_weights(checkpoint), str(checkpoint.path))
    generator = hparams["modules"]["generator"].eval()
    noise_NZ = torch.randn(count, generator.noise_size, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return torch.cat([generator(noise_BZ) for noise_BZ in noise_NZ.split(batch_size)])


def main(argv: list[str] | None = None) -> None:
    """Write a grid, or one file for each image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of a run of train.py")
    parser.add_argument("--count", type=int, default=64, help="images to draw (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--to", type=Path, help="file of the grid (default RUN/samples/grid.png)")
    parser.add_argument("--singly", type=Path, metavar="FOLDER", help="write 0000.png, 0001.png, ... there instead")
    options = parser.parse_args(argv)
    if options.count < 1:
        parser.error(f"--count is {options.count}; expected at least 1")
    if not options.run.is_dir():
        raise DataError(f"'{options.run}' is not a folder; expected the output folder of a run of train.py")
    images = draw(options.run, options.count, options.seed)
    if options.singly is None:
        path = options.to or options.run / "samples" / "grid.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_grid(path, [images])
        print(path)
        return
    options.singly.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(images):
        save_grid(options.singly / f"{index:04d}.png", [image.unsqueeze(0)], columns=1, min_side=1, frame=0)
    print(f"{len(images)} images in {options.singly}")


if __name__ == "__main__":
    main()
