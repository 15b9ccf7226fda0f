"""No function of a recipe that reads a command line is entered, wherever a YAML hands it over."""

import json

import pytest
from hostile_product import names, plant, texts, write_texts
from programs import run_python
from recipe_runs import RECIPES

TASKS = sorted(path.name for path in RECIPES.iterdir() if (path / "train.py").is_file())
WHEN = ("now", "later", "fork", "spawn", "forkserver")


def loaded(folder, values):
    """What became of each value, as the program in the copy of the recipe tells."""
    write_texts(values, folder / "texts.json")
    ran = run_python(
        folder / "recipe" / "hostile_program.py",
        folder / "texts.json",
        folder / "result.json",
        cwd=folder,
        env={"ENTERED": str(folder / "entered"), "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads((folder / "result.json").read_text())


def test_main_is_not_entered(tmp_path):
    functions = plant(RECIPES / "image_classification", tmp_path / "recipe")
    mains = [function for function in functions if function.reads]
    assert [main.name for main in mains] == ["predict.main", "train.main"]
    found = loaded(tmp_path, [*texts(mains, "now"), *texts(mains, "later")])
    assert not [each for each in found if each["entered"]]


@pytest.mark.extended
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("task", TASKS)
def test_no_function_that_reads_a_command_line_is_entered(task, when, tmp_path):
    functions = plant(RECIPES / task, tmp_path / "recipe")
    assert any(function.reads for function in functions)
    found = loaded(tmp_path, texts(functions, when))
    entered = [each for each in found if each["entered"]]
    assert not entered, f"{len(entered)} of {len(found)} entered one: {json.dumps(entered[:10], indent=1)}"


@pytest.mark.extended
@pytest.mark.parametrize("task", TASKS)
def test_a_recipes_other_functions_can_still_be_named(task, tmp_path):
    functions = plant(RECIPES / task, tmp_path / "recipe")
    found = loaded(tmp_path, names(functions))
    refused = {function.name for function, each in zip(functions, found, strict=True) if each["refused"]}
    assert refused == {function.name for function in functions if function.reads}
