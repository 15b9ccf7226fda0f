"""Draw new images with a trained generator: python recipes/adversarial/sample.py RUN

RUN is the output folder of a run of train.py, or what `amp-recipes export` wrote. The weights are the averaged ones of
the best epoch, which the test used too.
"""

import argparse
from pathlib import Path

import torch
from quality import save_grid

from amp_recipes import load_trained
from amp_recipes.errors import AmpRecipesError


def draw(run: Path, count: int, seed: int, precision: str = "fp32", batch_size: int = 64) -> torch.Tensor:
    """Return count images (N, C, H, W) in [0, 1] of the run's generator, from noise that seed decides."""
    brain = load_trained(run, precision)
    generator = brain.modules.generator
    noise_NZ = torch.randn(count, generator.noise_size, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode(), brain.evaluation_ctx:
        parts = [generator(noise_BZ.to(brain.device)).float().cpu() for noise_BZ in noise_NZ.split(batch_size)]
    return torch.cat(parts)


def main(argv: list[str] | None = None) -> None:
    """Write a grid, or one file for each image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="output folder of a run of train.py")
    parser.add_argument("--count", type=int, default=64, help="images to draw (default 64)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default 0)")
    parser.add_argument("--to", type=Path, help="file of the grid (default RUN/samples/grid.png)")
    parser.add_argument("--singly", type=Path, metavar="FOLDER", help="write 0000.png, 0001.png, ... there instead")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16 or auto (default: fp32)")
    options = parser.parse_args(argv)
    if options.count < 1:
        parser.error(f"--count is {options.count}; expected at least 1")
    try:
        images = draw(options.run, options.count, options.seed, options.precision)
    except AmpRecipesError as error:
        parser.error(str(error))
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
