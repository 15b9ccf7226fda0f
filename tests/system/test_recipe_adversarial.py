"""The adversarial recipe: its steps beside a loop written by hand, what it measures, its data, and its scripts."""

import copy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from pairwise import extended
from PIL import Image
from recipe_runs import CONFIGS, recipe_modules, run_script, stage_records
from safetensors.torch import load_file

from amp_recipes.checkpoint import best_checkpoint, model_weights
from amp_recipes.errors import ConfigError, DataError

CONFIG = CONFIGS / "adversarial.yaml"
NOISE_SIZE = 6
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(scope="module")
def recipe():
    with recipe_modules("adversarial") as modules:
        yield modules


def run(recipe, output_folder: Path, *options: str) -> list[dict]:
    """Run the recipe's main with small networks; return its stage records."""
    small = ["--width=4", "--noprogressbar", "--seed=3", f"--output_folder={output_folder}"]
    recipe.train.main([str(CONFIG), *small, *options])
    return stage_records(output_folder)


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """The folder of a run of two epochs on the digits."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(recipe, folder, "--number_of_epochs=2", "--pictured=10", "--ema_decay=0.9")
    return folder


def save_images(folder: Path, count: int, size=(20, 16), grey: bool = False) -> None:
    """Write count images with a bright square at a random place, half of them in a folder below."""
    draws = np.random.default_rng(count)
    for index in range(count):
        pixels = np.full((size[1], size[0], 3), 30, dtype=np.uint8)
        top, left = draws.integers(2, 8, size=2)
        pixels[top : top + 6, left : left + 6] = 200 if grey else (220, 120, 20)
        path = folder / ("deep/er" if index % 2 else "") / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[..., 0] if grey else pixels).save(path)


# --- a training step


def networks(recipe) -> dict[str, torch.nn.Module]:
    torch.manual_seed(7)
    generator = recipe.model.Generator(8, 1, NOISE_SIZE, width=4)
    return {"generator": generator, "critic": recipe.model.Critic(8, 1, width=4)}


def some_batches(count: int) -> list[dict[str, torch.Tensor]]:
    """The last has fewer images, as that of an epoch may."""
    generator = torch.Generator().manual_seed(11)
    lengths = [6] * (count - 1) + [4]
    return [{"image": torch.rand(length, 1, 8, 8, generator=generator)} for length in lengths]


def trained_brain(recipe, modules, batches, **options):
    """The recipe's Brain after one epoch over the batches, with critic_steps 2."""
    hparams = {"generator": modules["generator"], "critic_steps": 2, "penalty_weight": 10.0}
    opt_class = partial(torch.optim.Adam, lr=0.01, betas=(0.0, 0.9))
    options = {"max_grad_norm": 0.0, "noprogressbar": True, "locate_nonfinite": False, **options}
    brain = recipe.train.AdversarialBrain(modules, opt_class, hparams, options)
    torch.manual_seed(5)
    brain.fit([1], batches)
    return brain


def train_by_hand(modules, batches, precision: str, window: int, init_scale: float) -> float:
    """Algorithm 1 of the paper in plain torch, with the scaler used as torch's documentation says; return the scale."""
    generator, critic = modules["generator"], modules["critic"]
    adam = partial(torch.optim.Adam, lr=0.01, betas=(0.0, 0.9))
    critic_adam, generator_adam = adam(critic.parameters()), adam(generator.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=precision == "fp16")
    autocast = partial(torch.autocast, "cpu", dtype=DTYPES[precision], enabled=precision != "fp32")
    torch.manual_seed(5)
    for turn, start in enumerate(range(0, len(batches), window), start=1):
        part = [batch["image"] for batch in batches[start : start + window]]
        for real in part:
            with autocast():
                with torch.no_grad():
                    fake = generator(torch.randn(len(real), NOISE_SIZE))
                mixed = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1)).requires_grad_()
                real_score, fake_score, mixed_score = critic(real), critic(fake), critic(mixed)
            # In fp16 of the mean: from a sum, the way back would begin at each score with the scale itself.
            total = mixed_score.mean() if scaler.is_enabled() else mixed_score.sum()
            (slope,) = torch.autograd.grad(scaler.scale(total), mixed, create_graph=True)
            if scaler.is_enabled():
                slope = slope * (len(real) / scaler.get_scale())
            penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
            loss = fake_score.mean() - real_score.mean() + 10.0 * penalty
            scaler.scale(loss / len(part) if len(part) > 1 else loss).backward()
        scaler.step(critic_adam)
        if turn % 2 == 0:
            for real in part:
                with autocast():
                    loss = -critic(generator(torch.randn(len(real), NOISE_SIZE))).mean()
                scaler.scale(loss / len(part) if len(part) > 1 else loss).backward()
            scaler.step(generator_adam)
        scaler.update()
        critic_adam.zero_grad()
        generator_adam.zero_grad()
    return scaler.get_scale()


STEPS = [("fp32", 1.0, 1), ("bf16", 1.0, 2), ("fp16", 512.0, 1), ("fp16", 65536.0, 2)]


@pytest.mark.parametrize(
    ("precision", "init_scale", "window"), [*STEPS, *(extended(*it, 3 - window) for *it, window in STEPS)]
)
def test_steps_equal_a_loop_by_hand_bit_for_bit(recipe, precision, init_scale, window):
    ours, theirs = networks(recipe), networks(recipe)
    before = copy.deepcopy(ours)
    batches = some_batches(9)
    options = {"init_scale": init_scale, "min_scale": 1.0, "grad_accumulation_factor": window}
    brain = trained_brain(recipe, ours, batches, precision=precision, **options)
    scale = train_by_hand(theirs, batches, precision, window, init_scale)
    for name in ours:
        for (key, mine), other, first in zip(
            ours[name].named_parameters(), theirs[name].parameters(), before[name].parameters(), strict=True
        ):
            assert torch.equal(mine, other), (name, key)
            assert not torch.equal(mine, first), (name, key)
    if precision == "fp16":
        assert brain.scaler.get_scale() == scale
        assert (brain.skipped_steps > 0) == (init_scale == 65536.0)


def test_nan_in_the_images_spares_both_networks(recipe):
    modules, batches = networks(recipe), some_batches(4)
    batches[2]["image"][1, 0, 3, 3] = float("nan")
    brain = trained_brain(recipe, modules, batches)
    # Four steps of the critic, of which the third was skipped, and two of the generator.
    assert (brain.optimizer_step, brain.skipped_steps) == (5, 1)
    assert all(parameter.isfinite().all() for module in modules.values() for parameter in module.parameters())


def test_penalty_is_finite_in_fp16_at_a_scale_that_no_score_could_carry(recipe, monkeypatch):
    """From the sum of scores, the way back would begin with 65536 at each of them: infinite in fp16."""
    losses, critic_loss = [], recipe.train.AdversarialBrain.critic_loss

    def recorded(self, real):
        losses.append((self.scaler.get_scale(), critic_loss(self, real)))
        return losses[-1][1]

    monkeypatch.setattr(recipe.train.AdversarialBrain, "critic_loss", recorded)
    for precision in ("fp32", "fp16"):
        trained_brain(recipe, networks(recipe), some_batches(1), precision=precision, init_scale=65536.0)
    (_, expected), (scale, loss) = losses
    assert scale == 65536.0 and torch.tensor(scale).half().isinf()
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0.01)


def test_critic_scores_each_image_by_itself(recipe):
    critic = networks(recipe)["critic"]
    images = torch.rand(5, 1, 8, 8)
    alone = torch.cat([critic(image.unsqueeze(0)) for image in images])
    torch.testing.assert_close(critic(images), alone)


def test_networks_take_any_size_that_halves_to_four(recipe):
    for size, channels in ((8, 3), (32, 1)):
        generator = recipe.model.Generator(size, channels, NOISE_SIZE, width=4, max_width=6)
        images = generator(generator.noise(2))
        assert images.shape == (2, channels, size, size)
        assert images.min() >= 0 and images.max() <= 1
        assert recipe.model.Critic(size, channels, width=4, max_width=6)(images).shape == (2,)


def test_other_sizes_are_refused_with_the_nearest_that_fits(recipe):
    for size, nearest in ((4, 8), (12, 16), (30, 32), (100, 128)):
        with pytest.raises(ConfigError, match=f"image_size is {size}.*--image_size={nearest}"):
            recipe.model.Critic(size, 1)


# --- the script


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_samples_come_nearer_to_the_digits(recipe, tmp_path, precision):
    records = run(recipe, tmp_path / "run", f"--precision={precision}", "--number_of_epochs=6", "--lr=0.004")
    distances = [record["metrics"]["distance"] for record in records if record["stage"] == "valid"]
    assert distances[-1] < 0.75 * distances[0]
    assert records[-1]["stage"] == "test" and records[-1]["metrics"]["distance"] < 0.75 * distances[0]
    slopes = [record["metrics"]["slope"] for record in records if record["stage"] == "train"]
    assert abs(slopes[-1] - 1) < 0.3


def test_script_runs_from_the_shell_as_the_readme_says(tmp_path):
    run_script(
        "adversarial", CONFIG, "--debug", "--precision=auto", f"--output_folder={tmp_path / 'run'}", cwd=tmp_path
    )
    assert {record["stage"] for record in stage_records(tmp_path / "run" / "debug")} == {"train", "valid", "test"}
    assert (tmp_path / "run" / "debug" / "samples" / "test.png").is_file()


def test_tested_images_are_those_of_the_best_averaged_weights(recipe, finished):
    records = stage_records(finished)
    best = min((record for record in records if record["stage"] == "valid"), key=lambda it: it["metrics"]["distance"])
    images = recipe.data.load_images(noise_size=32)
    checkpoint = best_checkpoint(finished)
    by_hand = {}
    for kind, weights in (("averaged", model_weights(checkpoint)), ("plain", None)):
        generator = recipe.model.Generator(8, 1, 32, width=4)
        if weights is None:
            weights = load_file(checkpoint.path / "modules.safetensors")
        names = {name.removeprefix("generator."): value for name, value in weights.items() if "generator." in name}
        generator.load_state_dict(names)
        with torch.no_grad():
            for part in ("valid", "test"):
                samples = getattr(images, part)
                real = torch.stack([samples[index]["image"] for index in range(len(samples))])
                by_hand[kind, part] = recipe.quality.sliced_wasserstein(generator(samples.noise_NZ), real)
    assert by_hand["averaged", "valid"] == pytest.approx(best["metrics"]["distance"], rel=1e-4)
    assert by_hand["averaged", "test"] == pytest.approx(records[-1]["metrics"]["distance"], rel=1e-4)
    assert by_hand["plain", "valid"] != pytest.approx(best["metrics"]["distance"], rel=1e-4)


def test_every_epoch_leaves_a_picture_of_samples_beside_real_images(recipe, finished):
    names = sorted(path.name for path in (finished / "samples").glob("*.png"))
    assert names == [f"epoch_{epoch:04d}.png" for epoch in (1, 2)] + ["test.png"]
    images = recipe.data.load_images(noise_size=32)
    with Image.open(finished / "samples" / "test.png") as picture:
        pixels = np.asarray(picture)
    # Ten images of 8 x 8, four times enlarged and framed: a row of eight and one of two; then 8 white columns.
    assert pixels.shape == (2 * 34, 2 * 8 * 34 + 8)
    first_real = pixels[1:33, 8 * 34 + 9 : 8 * 34 + 41][::4, ::4]
    assert np.array_equal(first_real, (images.test[0]["image"][0] * 255).round().numpy())


def test_own_folder_of_colour_images(recipe, tmp_path):
    save_images(tmp_path / "images", 40)
    options = [f"--data_folder={tmp_path / 'images'}", "--image_size=16", "--number_of_epochs=2"]
    records = run(recipe, tmp_path / "run", *options, "--loader_kwargs.batch_size=4")
    assert records[-1]["stage"] == "test"
    with Image.open(tmp_path / "run" / "samples" / "test.png") as picture:
        assert picture.mode == "RGB"


def test_finished_run_draws_new_images(recipe, finished, tmp_path, capsys):
    recipe.sample.main([str(finished), "--count=3", "--seed=1", f"--to={tmp_path / 'new' / 'grid.png'}"])
    recipe.sample.main([str(finished), "--count=3", "--seed=1", f"--singly={tmp_path / 'single'}"])
    assert capsys.readouterr().out.splitlines() == [
        str(tmp_path / "new" / "grid.png"),
        f"3 images in {tmp_path / 'single'}",
    ]
    grid = np.asarray(Image.open(tmp_path / "new" / "grid.png"))
    singles = sorted((tmp_path / "single").iterdir())
    assert [path.name for path in singles] == ["0000.png", "0001.png", "0002.png"]
    single = np.asarray(Image.open(singles[1]))
    assert single.shape == (8, 8)
    assert np.array_equal(grid[1:33, 35:67][::4, ::4], single)
    drawn = recipe.sample.draw(finished, 70, seed=1)
    assert torch.equal(drawn[:3], recipe.sample.draw(finished, 3, seed=1)) or torch.allclose(
        drawn[:3], recipe.sample.draw(finished, 3, seed=1), atol=1e-5
    )
    assert not torch.allclose(drawn[:3], recipe.sample.draw(finished, 3, seed=2), atol=1e-3)


def test_sampling_from_no_run_is_explained(recipe, tmp_path, capsys):
    for folder, said in ((tmp_path / "nowhere", "is not a folder"), (tmp_path, "has no hyperparams.yaml")):
        with pytest.raises(SystemExit) as stopped:
            recipe.sample.main([str(folder)])
        assert stopped.value.code == 2 and said in capsys.readouterr().err


# --- quality


def test_distance_is_that_of_the_best_matching_of_projections(recipe):
    from scipy.optimize import linear_sum_assignment

    first, second = torch.rand(12, 3, 4, 4), torch.rand(12, 3, 4, 4) ** 2
    directions = torch.randn(48, 20, generator=torch.Generator().manual_seed(9)).double()
    squares = []
    for direction in directions.T:
        unit = direction / direction.norm()
        gaps = (first.flatten(1).double() @ unit)[:, None] - (second.flatten(1).double() @ unit)[None]
        costs = gaps.square().numpy()
        rows, columns = linear_sum_assignment(costs)
        squares.append(costs[rows, columns].mean())
    by_matching = np.sqrt(np.mean(squares))
    assert recipe.quality.sliced_wasserstein(first, second, 20, seed=9) == pytest.approx(by_matching, rel=1e-4)


def test_distance_of_a_set_to_itself_is_zero_and_of_a_shift_the_shift(recipe):
    images = torch.rand(30, 1, 8, 8)
    assert recipe.quality.sliced_wasserstein(images, images.flip(0)) == 0
    assert recipe.quality.sliced_wasserstein(images, images + 0.1, 4096) == pytest.approx(0.1, rel=0.1)


def test_nearest_tells_copies_from_new_images(recipe):
    train, held_out = torch.rand(50, 1, 8, 8), torch.rand(20, 1, 8, 8)
    assert recipe.quality.nearest_ratio(train[:20], held_out, train) < 1e-3
    assert recipe.quality.nearest_ratio(torch.rand(20, 1, 8, 8), held_out, train) == pytest.approx(1, abs=0.15)
    assert recipe.quality.nearest_ratio(held_out + 3, held_out, train) > 2


# --- data


def test_what_is_measured_together_is_bounded_and_the_rest_trains(recipe):
    images = recipe.data.load_images(max_held_out=100)
    assert [len(part) for part in (images.train, images.valid, images.test)] == [1597, 100, 100]


def test_digits_are_split_without_overlap_by_their_own_seed(recipe):
    images = recipe.data.load_images()
    torch.manual_seed(99)
    again = recipe.data.load_images()
    parts = [images.train.images, images.valid.samples.images, images.test.samples.images]
    assert [len(part) for part in parts] == [1257, 270, 270]
    reference = recipe.data.digit_images(8, 1).flatten(1)
    assert torch.cat(parts).sum() == pytest.approx(reference.sum().item())
    assert torch.cdist(parts[0].flatten(1), parts[1].flatten(1)).min() > 0
    assert torch.equal(images.test[5]["image"], again.test[5]["image"])
    assert torch.equal(images.test[5]["noise"], again.test[5]["noise"])
    assert not torch.equal(images.test[5]["noise"], images.valid[5]["noise"])
    assert "noise" not in images.train[0]


def test_digits_can_be_enlarged_and_given_colour_channels(recipe):
    images = recipe.data.load_images(image_size=16, channels=3)
    assert (images.image_size, images.channels) == (16, 3)
    assert images.valid[0]["image"].shape == (3, 16, 16)


def test_folder_is_read_at_any_depth_and_cut_to_squares(recipe, tmp_path):
    save_images(tmp_path, 20, grey=True)
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a.png").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("no image")
    wide = np.zeros((10, 30), dtype=np.uint8)
    wide[:, 10:20] = 255
    Image.fromarray(wide).save(tmp_path / "wide.png")
    images = recipe.data.load_images(tmp_path, split_ratios=(0.6, 0.2, 0.2))
    assert (images.image_size, images.channels) == (32, 1)
    assert [len(part) for part in (images.train, images.valid, images.test)] == [13, 4, 4]
    assert torch.equal(recipe.data.read_image(tmp_path / "wide.png", 10, 1), torch.ones(1, 10, 10))
    reference = recipe.data.reference(images, 5)
    assert reference.shape == (5, 1, 32, 32)
    assert torch.equal(reference[0], images.train[0]["image"]) and torch.equal(reference[-1], images.train[12]["image"])


def test_sixteen_bit_grey_keeps_its_range(recipe, tmp_path):
    levels = np.array([[0, 16384], [32768, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    pixels = recipe.data.read_image(tmp_path / "deep.png", 2, 1)
    torch.testing.assert_close(pixels[0].double(), torch.from_numpy(levels / 65535), atol=0.5 / 255, rtol=0)


def test_broken_file_is_named(recipe, tmp_path):
    save_images(tmp_path, 20)
    images = recipe.data.load_images(tmp_path)
    broken = Path(images.train.paths[7])
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(DataError, match=broken.name):
        images.train[7]


def test_wrong_folders_and_settings_are_explained(recipe, tmp_path):
    with pytest.raises(DataError, match="is not a folder"):
        recipe.data.load_images(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no image below"):
        recipe.data.load_images(tmp_path)
    save_images(tmp_path, 6)
    with pytest.raises(DataError, match=r"6 image.s. split by .* are 4, 1 and 1"):
        recipe.data.load_images(tmp_path)
    for settings, message in (
        ({"channels": 2}, "channels is 2"),
        ({"image_size": -8}, "image_size is -8"),
        ({"split_ratios": (0.5, 0.6)}, "split_ratios"),
        ({"split_ratios": (1.0, 0.5, -0.5)}, "split_ratios"),
    ):
        with pytest.raises(DataError, match=message):
            recipe.data.load_images(**settings)
