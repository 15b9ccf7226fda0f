"""A copy of each recipe trains, and its own script predicts with what the training left."""

import re

import numpy as np
import pytest
import soundfile
from PIL import Image
from programs import run_python

from amp_recipes.commands.new import TEMPLATES, new_recipe

SMALLEST = {
    "adversarial": ["--width=4", "--number_of_epochs=1"],
    "finetuning": ["--pretraining_updates=2", "--max_tokens=16", "--number_of_epochs=1", "--cache_folder=cache"],
    "image_classification": ["--model.widths=[4, 8]", "--number_of_epochs=1"],
    "keyword_classification": [
        *("--width=16", "--model.channels=[4, 4]", "--synthetic.counts=[30, 10, 10]", "--number_of_epochs=1"),
        *("--batches.max_total_length=3", "--synthetic.folder=synthetic"),
    ],
    "language_modeling": [
        *("--number_of_epochs=1", "--steps_per_epoch=5", "--max_valid_windows=8", "--window_tokens=32"),
        *("--batch_size=4", "--windows_per_update=8", "--model.layers=1", "--model.features=32", "--model.heads=2"),
        *("--peak_flops=1e11", "--data_path=README.md"),
    ],
    "speech_recognition": [
        *("--width=16", "--model.front.channels=[4, 4]", "--synthetic.counts=[24, 4, 4]", "--number_of_epochs=1"),
        *("--batches.max_total_length=4", "--synthetic.folder=synthetic"),
    ],
}
INPUTS = {
    "adversarial": ["--count=2", "--to=grid.png"],
    "finetuning": ["def add(a, b): return a + b"],
    "image_classification": ["image.png"],
    "keyword_classification": ["tone.wav"],
    "language_modeling": ["def ", "--tokens=5"],
    "speech_recognition": ["tone.wav"],
}
BEGINS = INPUTS | {"adversarial": ["grid.png"], "finetuning": [""]}  # what the answer begins with


@pytest.mark.extended
@pytest.mark.parametrize("recipe", SMALLEST)
def test_a_copy_trains_and_predicts(tmp_path, recipe):
    folder = tmp_path / "mine"
    new_recipe("mine", folder, "basic", recipe)
    Image.new("L", (8, 8)).save(folder / "image.png")
    soundfile.write(folder / "tone.wav", np.sin(np.arange(8000) / 5), 8000)

    def said(*words: str) -> str:
        done = run_python(*words, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said("train.py", "mine.yaml", *SMALLEST[recipe], "--noprogressbar", "--output_folder=results/mine")
    script = "sample.py" if recipe == "adversarial" else "predict.py"
    for precision in ("fp32", "bf16"):
        answer = said(script, "results/mine", *INPUTS[recipe], f"--precision={precision}")
        assert answer.startswith(BEGINS[recipe][0]) and answer.strip()


@pytest.mark.extended
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_recipe_from_a_template_predicts_as_its_readme_says(tmp_path, template):
    folder = tmp_path / "mine"
    new_recipe("mine", folder, template)
    (block,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    (folder / "predict.py").write_text(block)
    for words in (["train.py", "mine.yaml", "--number_of_epochs=1"], ["predict.py"]):
        done = run_python(*words, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("tensor([")
