"""The image classification recipe: its data, its network, and the whole script as a user runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from pairwise import extended
from PIL import Image
from recipe_runs import CONFIGS, RECIPES, recipe_modules, stage_records
from repository import REPOSITORY
from safetensors.torch import load_file

from amp_recipes.commands.export import export_run
from amp_recipes.errors import AmpRecipesError, DataError

SCRIPT = RECIPES / "image_classification" / "train.py"
CONFIG = CONFIGS / "image_classification.yaml"


@pytest.fixture(scope="module")
def recipe():
    with recipe_modules("image_classification") as modules:
        yield modules


def run(recipe, output_folder: Path, *options: str) -> None:
    """Run the recipe's main with a tiny network."""
    small = ["--model.widths=[4, 8]", "--noprogressbar", f"--output_folder={output_folder}"]
    recipe.train.main([str(CONFIG), *small, *options])


def save_images(folder: Path, count: int, colour: tuple[int, ...] | int, size=(12, 12)) -> None:
    """Write count one-coloured images with a little noise, so that no two files are equal."""
    folder.mkdir(parents=True)
    pixels = np.random.default_rng(sum(folder.name.encode()))
    shape = (*size, 3) if isinstance(colour, tuple) else size
    for index in range(count):
        noisy = np.full(shape, colour) + pixels.integers(-5, 6, shape)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{index}.png")


def make_class_folders(folder: Path, count: int = 20) -> Path:
    """Write a folder of two classes, red and blue."""
    save_images(folder / "red", count, (200, 30, 30))
    save_images(folder / "blue", count, (30, 30, 200), size=(9, 17))
    return folder


# --- the script


@pytest.mark.extended  # in a fresh interpreter, as a user starts it
def test_script_runs_from_the_shell_as_the_readme_says(tmp_path):
    command = [sys.executable, str(SCRIPT), str(CONFIG), "--debug", "--precision=auto"]
    finished = subprocess.run(
        [*command, f"--output_folder={tmp_path / 'run'}"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert {record["stage"] for record in stage_records(tmp_path / "run" / "debug")} == {"train", "valid", "test"}


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_short_run_reaches_far_more_than_chance(recipe, tmp_path, precision):
    run(recipe, tmp_path, f"--precision={precision}", "--number_of_epochs=6", "--lr=0.02")
    tested = stage_records(tmp_path)[-1]
    assert tested["stage"] == "test"
    assert tested["metrics"]["accuracy"] > 0.5


def test_reported_accuracy_is_that_of_the_best_weights(recipe, tmp_path):
    run(recipe, tmp_path, "--number_of_epochs=2", "--lr=0.03", "--loader_kwargs.batch_size=64")
    records = stage_records(tmp_path)
    best_valid = max(record["metrics"]["accuracy"] for record in records if record["stage"] == "valid")
    checkpoints = sorted((tmp_path / "save").glob("CKPT+*"))
    metas = [json.loads((path / "meta.json").read_text())["meta"] for path in checkpoints]
    best = max(range(len(metas)), key=lambda index: (metas[index]["accuracy"], index))
    model = recipe.model.SmallResNet(1, 10, [4, 8])
    states = load_file(checkpoints[best] / "modules.safetensors")
    model.load_state_dict({name.removeprefix("model."): value for name, value in states.items()})
    model.eval()
    images = recipe.data.load_images()
    with torch.no_grad():
        by_hand = {
            part: (model(part.images).argmax(dim=1) == part.labels).double().mean().item()
            for part in (images.valid, images.test)
        }
    assert by_hand[images.valid] == pytest.approx(best_valid)
    assert by_hand[images.test] == pytest.approx(records[-1]["metrics"]["accuracy"])


def test_run_that_is_started_again_goes_on_after_its_last_epoch(recipe, tmp_path):
    options = ["--lr_scheduler.T_max=3", "--loader_kwargs.batch_size=64"]
    run(recipe, tmp_path, *options, "--number_of_epochs=2")
    run(recipe, tmp_path, *options, "--number_of_epochs=3", "--accept_changes")
    trained = [record for record in stage_records(tmp_path) if record["stage"] == "train"]
    assert [record["epoch"] for record in trained] == [1, 2, 3]
    assert trained[2]["loss"] < trained[1]["loss"] < trained[0]["loss"]


@pytest.mark.parametrize("precision", ["fp32", extended("bf16")])
def test_own_folder_is_learned(recipe, tmp_path, precision):
    folder = make_class_folders(tmp_path / "images")
    options = [f"--data_folder={folder}", "--image_size=12", "--loader_kwargs.batch_size=8"]
    run(recipe, tmp_path / "run", *options, f"--precision={precision}", "--number_of_epochs=15")
    assert stage_records(tmp_path / "run")[-1]["metrics"]["accuracy"] == 1.0


def test_a_run_is_not_resumed_after_a_class_was_renamed(recipe, tmp_path):
    """Its labels are others now, as many as before: nothing else would notice."""
    folder = make_class_folders(tmp_path / "images")
    options = [f"--data_folder={folder}", "--image_size=12", "--loader_kwargs.batch_size=8"]
    run(recipe, tmp_path / "run", *options, "--number_of_epochs=1")
    (folder / "red").rename(folder / "azure")
    before = (tmp_path / "run" / "assets" / "classes.json").read_bytes()
    with pytest.raises(DataError, match=r"\['azure', 'blue'\], but the run was trained on \['blue', 'red'\]"):
        run(recipe, tmp_path / "run", *options, "--number_of_epochs=2", "--accept_changes")
    assert (tmp_path / "run" / "assets" / "classes.json").read_bytes() == before
    run(recipe, tmp_path / "run", *options, "--number_of_epochs=1", "--resume=never")
    assert json.loads((tmp_path / "run" / "assets" / "classes.json").read_text()) == ["azure", "blue"]


def test_predict_names_the_class_of_an_image(recipe, tmp_path, capsys):
    folder = make_class_folders(tmp_path / "images")
    options = [f"--data_folder={folder}", "--image_size=12", "--loader_kwargs.batch_size=8"]
    run(recipe, tmp_path / "run", *options, "--number_of_epochs=8")
    export_run(tmp_path / "run", tmp_path / "exported")
    newest = max((tmp_path / "run" / "save").glob("CKPT+*"))
    moved = folder.rename(tmp_path / "moved")
    files = [str(moved / name / "0.png") for name in ("red", "blue")]
    for source, precision in ((tmp_path / "run", "fp32"), (tmp_path / "exported", "bf16"), (newest, "fp32")):
        capsys.readouterr()
        recipe.predict.main([str(source), *files, f"--precision={precision}", f"--data_folder={moved}"])
        answers = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
        assert [answer[:2] for answer in answers] == [[files[0], "red"], [files[1], "blue"]]
        assert all(0.5 < float(answer[2]) <= 1 for answer in answers)

    (tmp_path / "no.png").write_text("no image")
    with pytest.raises(SystemExit):
        recipe.predict.main([str(tmp_path / "run"), str(tmp_path / "no.png"), f"--data_folder={moved}"])
    refusal = capsys.readouterr().err
    assert "no.png" in refusal and "give their folder" not in refusal
    (moved / "red").rename(moved / "zebra")  # the labels of the classes change
    for source in (tmp_path / "run", tmp_path / "exported"):
        with pytest.raises(SystemExit):
            recipe.predict.main([str(source), *files, f"--data_folder={moved}"])
        assert "['blue', 'zebra'], but the run was trained on ['blue', 'red']" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        recipe.predict.main([str(tmp_path / "run"), *files])
    assert "give their folder: --data_folder FOLDER" in capsys.readouterr().err


def test_predict_says_in_one_line_what_is_wrong(recipe, tmp_path, capsys):
    settings = (REPOSITORY / "configs" / "image_classification.yaml").read_text()
    for name in ("one/first", "one/second", "two/first/debug", "two/first"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "hyperparams.yaml").write_text(settings)
    for name, said in (
        ("nowhere", "'{}' is not a folder"),
        ("one", "'{}' holds 2 runs"),
        ("two", "No checkpoint in '{}/first'"),
        ("empty", "'{}' has no hyperparams.yaml"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(SystemExit) as stopped:
            recipe.predict.main([str(tmp_path / name), "image.png"])
        assert stopped.value.code == 2
        assert f"error: {said.format(tmp_path / name)}" in capsys.readouterr().err


def test_wrong_folder_ends_the_run_with_its_own_message(recipe, tmp_path):
    with pytest.raises(AmpRecipesError, match="is not a folder"):
        run(recipe, tmp_path / "run", f"--data_folder={tmp_path / 'nowhere'}")


# --- the digits and the split


def test_digits_are_split_without_overlap_and_in_equal_shares(recipe):
    images = recipe.data.load_images()
    parts = (images.train, images.valid, images.test)
    assert sum(map(len, parts)) == 1797
    every_image = torch.cat([part.images for part in parts]).flatten(1)
    from sklearn.datasets import load_digits  # a second, which no other file's collection need wait for

    reference = torch.from_numpy(load_digits().data).float() / 16
    # The same multiset of images: sorted by a fixed random projection, which tells different images apart.
    direction = torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(
        (every_image.double() @ direction).sort().values, (reference.double() @ direction).sort().values
    )
    for part, share in zip(parts, (0.7, 0.15, 0.15), strict=True):
        in_class = torch.bincount(torch.from_numpy(load_digits().target))
        assert (torch.bincount(part.labels) - in_class * share).abs().max() <= 1


def test_split_follows_its_own_seed_alone(recipe):
    first = recipe.data.load_images(data_seed=3)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    again = recipe.data.load_images(data_seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.test.images, again.test.images)
    assert not torch.equal(first.test.images, recipe.data.load_images(data_seed=4).test.images)


def test_every_class_is_in_every_part_down_to_three_images(recipe):
    labels = [0] * 3 + [1] * 4 + [2] * 50
    parts = recipe.data.stratified_split(labels, (0.7, 0.15, 0.15), data_seed=0)
    assert sorted(index for part in parts for index in part) == list(range(len(labels)))
    for part in parts:
        assert {labels[index] for index in part} == {0, 1, 2}


def test_digits_can_be_resized_and_given_colour_channels(recipe):
    images = recipe.data.load_images(image_size=12, channels=3)
    assert images.channels == 3
    image = images.train[0]["image"]
    assert image.shape == (3, 12, 12)
    assert torch.equal(image[0], image[2])


def test_impossible_settings_are_named(recipe):
    for settings, message in (
        ({"image_size": 0}, "image_size is 0"),
        ({"channels": 2}, "channels is 2"),
        ({"split_ratios": (0.7, 0.3)}, "split_ratios"),
        ({"split_ratios": (0.8, 0.15, 0.15)}, "split_ratios"),
        ({"split_ratios": (1.0, 0.0, 0.0)}, "split_ratios"),
    ):
        with pytest.raises(DataError, match=message):
            recipe.data.load_images(**settings)


# --- folders


def test_class_folders_are_split_by_ratio(recipe, tmp_path):
    images = recipe.data.load_images(make_class_folders(tmp_path, count=20), split_ratios=(0.6, 0.2, 0.2))
    assert (images.classes, images.channels, images.num_classes) == (("blue", "red"), 3, 2)
    for part, per_class in ((images.train, 12), (images.valid, 4), (images.test, 4)):
        assert torch.bincount(part.labels).tolist() == [per_class, per_class]
    every_path = [path for part in (images.train, images.valid, images.test) for path in part.paths]
    assert sorted(every_path) == sorted(str(path) for path in tmp_path.rglob("*.png"))


def test_sample_has_the_file_s_pixels_and_its_folder_s_label(recipe, tmp_path):
    images = recipe.data.load_images(make_class_folders(tmp_path), image_size=6)
    for index in range(len(images.test)):
        sample = images.test[index]
        expected = {"red": (200, 30, 30), "blue": (30, 30, 200)}[Path(images.test.paths[index]).parent.name]
        assert images.classes[int(sample["label"])] == Path(images.test.paths[index]).parent.name
        assert sample["image"].shape == (3, 6, 6)
        assert sample["image"].dtype == torch.float32
        difference = sample["image"] * 255 - torch.tensor(expected).view(3, 1, 1)
        assert difference.abs().max() <= 6


def test_split_folders_are_kept_as_they_are(recipe, tmp_path):
    for split, count in (("train", 5), ("valid", 2), ("test", 3)):
        save_images(tmp_path / split / "dark", count, 20)
        save_images(tmp_path / split / "light", count, 230)
    images = recipe.data.load_images(tmp_path)
    assert (images.classes, images.channels) == (("dark", "light"), 1)
    for name, part, count in (("train", images.train, 10), ("valid", images.valid, 4), ("test", images.test, 6)):
        assert len(part) == count
        assert {Path(path).relative_to(tmp_path).parts[0] for path in part.paths} == {name}
    assert images.train[0]["image"].shape == (1, 32, 32)


def test_classes_may_be_called_train_and_test(recipe, tmp_path):
    save_images(tmp_path / "train", 4, 20)
    save_images(tmp_path / "car", 4, 200)
    assert recipe.data.load_images(tmp_path).classes == ("car", "train")


def test_one_colour_class_makes_every_image_three_channels(recipe, tmp_path):
    save_images(tmp_path / "grey", 3, 20)
    save_images(tmp_path / "red", 3, (200, 0, 0))
    images = recipe.data.load_images(tmp_path)
    assert images.channels == 3
    assert {tuple(images.train[index]["image"].shape) for index in range(2)} == {(3, 32, 32)}
    assert recipe.data.load_images(tmp_path, channels=1).train[0]["image"].shape == (1, 32, 32)


def test_hidden_files_and_folders_are_no_images_and_no_classes(recipe, tmp_path):
    make_class_folders(tmp_path, count=3)
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / "red" / "._0.png").write_bytes(b"not an image")
    (tmp_path / "red" / "notes.txt").write_text("not an image")
    (tmp_path / "red" / "more").mkdir()
    Image.new("RGB", (4, 4)).save(tmp_path / "red" / "more" / "DEEP.PNG")
    images = recipe.data.load_images(tmp_path)
    assert images.classes == ("blue", "red")
    assert sum(len(part) for part in (images.train, images.valid, images.test)) == 7


def test_sixteen_bit_grey_keeps_its_range(recipe, tmp_path):
    levels = np.array([[0, 16384], [32768, 65535]], dtype=np.uint16)
    Image.fromarray(levels).save(tmp_path / "deep.png")
    pixels = recipe.data.read_image(tmp_path / "deep.png", 2, 1)
    torch.testing.assert_close(pixels[0].double(), torch.from_numpy(levels / 65535), atol=0.5 / 255, rtol=0)


def test_photo_is_turned_as_the_camera_was_held(recipe, tmp_path):
    pixels = np.zeros((8, 8), dtype=np.uint8)
    pixels[:4] = 255
    turned_90_clockwise = Image.Exif()
    turned_90_clockwise[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "photo.png", exif=turned_90_clockwise)
    seen = recipe.data.read_image(tmp_path / "photo.png", 8, 1)[0]
    assert torch.equal(seen, torch.from_numpy(np.rot90(pixels, k=-1).copy()) / 255)


def test_broken_file_is_named_when_it_is_read(recipe, tmp_path):
    folder = make_class_folders(tmp_path, count=6)
    images = recipe.data.load_images(folder)
    broken = Path(images.train.paths[3])
    content = broken.read_bytes()
    for keep_bytes in (0, 40, -100):
        broken.write_bytes(content[:keep_bytes])
        assert images.train[2]["image"].shape == (3, 32, 32)
        with pytest.raises(DataError, match=f"{broken.parent.name}.{broken.name}"):
            images.train[3]


def test_broken_file_is_named_from_a_worker_process(recipe, tmp_path):
    images = recipe.data.load_images(make_class_folders(tmp_path, count=6))
    broken = Path(images.train.paths[0])
    broken.write_bytes(b"")
    batches = iter(torch.utils.data.DataLoader(images.train, batch_size=4, num_workers=1))
    with pytest.raises(DataError, match=broken.name):
        next(batches)
    assert len(list(batches)) == 1


def test_folder_mistakes_are_explained(recipe, tmp_path):
    def message(folder: Path) -> str:
        with pytest.raises(DataError) as caught:
            recipe.data.load_images(folder)
        return str(caught.value)

    (tmp_path / "flowers").mkdir()
    assert "Did you mean" in message(tmp_path / "flower") and "flowers" in message(tmp_path / "flower")
    assert "no class folder" in message(tmp_path / "flowers")

    save_images(tmp_path / "flowers" / "rose", 4, 10)
    assert "one class folder, 'rose'" in message(tmp_path / "flowers")

    (tmp_path / "flowers" / "tulip").mkdir()
    assert "no image in" in message(tmp_path / "flowers") and "tulip" in message(tmp_path / "flowers")

    save_images(tmp_path / "flowers" / "tulip" / "field", 2, 10)
    assert "tulip' has 2 image(s)" in message(tmp_path / "flowers")


def test_split_folder_mistakes_are_explained(recipe, tmp_path):
    def message() -> str:
        with pytest.raises(DataError) as caught:
            recipe.data.load_images(tmp_path)
        return str(caught.value)

    for name in ("train", "test"):
        save_images(tmp_path / name / "a", 2, 10)
        save_images(tmp_path / name / "b", 2, 200)
    assert "lacks valid" in message()
    save_images(tmp_path / "valid" / "a", 2, 10)
    save_images(tmp_path / "valid" / "c", 2, 10)
    assert "train lacks c; valid lacks b; test lacks c" in message()
    save_images(tmp_path / "unsorted", 1, 10)
    assert "also holds unsorted" in message()


# --- the augmentation


def test_augmentation_of_no_range_changes_nothing(recipe):
    images = torch.rand(3, 2, 8, 8)
    torch.testing.assert_close(recipe.data.RandomAffine(0.0, 0.0, 0.0)(images), images, atol=1e-5, rtol=0)


def test_full_shift_of_an_eighth_moves_eight_pixels_by_one(recipe, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, device: torch.ones(shape))
    images = torch.arange(64.0).view(1, 1, 8, 8)
    moved = recipe.data.RandomAffine(0.125, 0.0, 0.0)(images)
    border = torch.arange(1, 9).clamp(max=7)
    torch.testing.assert_close(moved, images[:, :, border][:, :, :, border], atol=1e-4, rtol=0)


def test_full_turn_of_ninety_degrees_is_rot90(recipe, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, device: torch.ones(shape))
    images = torch.arange(64.0).view(1, 1, 8, 8)
    turned = recipe.data.RandomAffine(0.0, 90.0, 0.0)(images)
    torch.testing.assert_close(turned, torch.rot90(images, 1, dims=(2, 3)), atol=1e-4, rtol=0)


def test_full_zoom_shows_the_middle(recipe, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, device: torch.ones(shape))
    ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    zoomed = recipe.data.RandomAffine(0.0, 0.0, 1.0)(ramp)
    # Twice as large: the columns now stand half a pixel apart around the middle, 3.5.
    expected = 3.5 + (torch.arange(8.0) - 3.5) / 2
    torch.testing.assert_close(zoomed, expected.expand(1, 1, 8, 8), atol=1e-4, rtol=0)


def test_augmentation_is_fp32_under_bf16(recipe):
    images = torch.rand(4, 1, 8, 8)
    augment = recipe.data.RandomAffine(0.125, 12.0, 0.1)
    torch.manual_seed(5)
    expected = augment(images)
    torch.manual_seed(5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        moved = augment(images)
    assert moved.dtype == torch.float32
    assert torch.equal(moved, expected)
    assert not torch.equal(moved[0] - images[0], moved[1] - images[1])


# --- the network


def test_network_scores_images_of_any_size(recipe):
    for size, channels in ((8, 1), (7, 3), (33, 3)):
        model = recipe.model.SmallResNet(channels, num_classes=5, widths=(4, 6, 8), blocks_per_stage=2)
        assert model(torch.rand(2, channels, size, size)).shape == (2, 5)


def test_every_further_stage_halves_the_image(recipe):
    model = recipe.model.SmallResNet(1, num_classes=2, widths=(4, 6, 8))
    sizes = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape[1:])))
    model(torch.rand(1, 1, 8, 8))
    assert sizes == [(4, 8, 8), (6, 4, 4), (8, 2, 2)]


def test_shortcut_alone_carries_the_input_where_the_branch_is_zero(recipe):
    block = recipe.model.ResidualBlock(4, 4)
    torch.nn.init.zeros_(block.conv2.weight)
    images = torch.randn(2, 4, 5, 5)
    assert torch.equal(block(images), images)
