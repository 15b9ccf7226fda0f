"""Which keys a recipe's code reads, and the misspelt one that nothing reads."""

import pytest

from amp_recipes.config import check, load_hparams
from amp_recipes.config.trust import usage
from amp_recipes.config.trust.usage import names_in
from amp_recipes.errors import ConfigError

SCRIPT = """\
from amp_recipes import Brain, load_hparams

class Mine(Brain):
    def compute_forward(self, batch, stage):
        return self.modules.encoder(batch) * self.hparams.label_smoothing

hparams = load_hparams("x.yaml")
brain = Mine(hparams["modules"], hparams.get("opt_class"), hparams)
for name in ("first_key", "second_key"):
    print(hparams[name])
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)

    def check_text(text: str) -> str:
        file = tmp_path / "x.yaml"
        file.write_text(text)
        try:
            check(file, recipe_folder=tmp_path)
        except ConfigError as error:
            return str(error).replace(str(file), "x.yaml")
        return ""

    return check_text


def test_the_names_that_a_recipe_reads_from_its_hparams(recipe, tmp_path):
    names = names_in(str(tmp_path))
    assert names.read == {"label_smoothing", "modules"} and names.modules == {"encoder"}
    assert {"first_key", "second_key", "label_smoothing"} <= names.mentioned


def test_a_key_that_nothing_reads_is_a_mistake_if_one_that_is_read_is_near(recipe, subtests):
    for key, nearest in [
        ("label_smoothin", "label_smoothing"),
        ("moduels", "modules"),
        ("max_grad_nrom", "max_grad_norm"),
        ("lr_schedular", "lr_scheduler"),
        ("Seed", "seed"),
    ]:
        with subtests.test(key):
            text = recipe(f"lr: 1\n{key}: 3\n")
            assert text.startswith(f"x.yaml:2:1: {key} is not used")
            assert text.endswith(f"Did you mean {nearest}?")


def test_keys_of_modules_and_of_loaders_are_compared_too(recipe, subtests):
    for text, nearest in [
        ("modules:\n  encodr: 1\n", "modules.encoder"),
        ("loader_kwargs:\n  batchsize: 1\n", "loader_kwargs.batch_size"),
        ("data:\n  valid_loader: {num_worker: 1}\n", "data.valid_loader.num_workers"),
    ]:
        with subtests.test(nearest):
            assert recipe(text).endswith(f"Did you mean {nearest}?")


def test_a_key_of_the_users_own_is_no_mistake(recipe, subtests):
    for text in (
        "loader_kwargs: {batch_size: 3, shuffle: true, own_thing: 1}\nmodules: {output: 1}\n",
        "first_key: 1\nsecond_key: 2\n",  # named in the code as text
        "label_smoothin: 1\nlabel_smoothing: !ref <label_smoothin>\n",  # the YAML itself reads it
        "label_smoothin: 1\nlabel_smoothing: 2\n",  # what is near is there
        "hidden_size_of_mine: 1\n",  # a key of the user's own
        "seed: 1\nprecision: bf16\nlr_scheduler: null\n",
        "__modulez: 1\n",
        "opt_clas: 1\n",  # the code can do without `opt_class`
        "seeds: [1, 2]\ndevices: 2\nlog_interval: 3\nckpt_interval: 3\n",
    ):
        with subtests.test(text):
            assert recipe(text) == ""


def test_a_folder_without_code_says_nothing_about_keys(tmp_path):
    (tmp_path / "x.yaml").write_text("max_grad_nrom: 3\n")
    check(tmp_path / "x.yaml", recipe_folder=tmp_path)


def test_with_code_that_cannot_be_read_nothing_is_said_of_keys(recipe, tmp_path, subtests):
    assert "label_smoothing" in recipe("label_smoothin: 1\n")
    for content in (b"def (:", b"\x00", b"x = '\xff'", b"(" * 5000, b"#" * 600_000, b"hparams[f'lr_{1}']"):
        with subtests.test(repr(content[:20])):
            (tmp_path / "other.py").write_bytes(content)
            assert recipe("label_smoothin: 1\n") == ""


def test_code_in_packages_below_is_read_too(recipe, tmp_path):
    (tmp_path / "lib" / "deeper").mkdir(parents=True)
    (tmp_path / "lib" / "deeper" / "net.py").write_text("def net(hparams):\n    return hparams['label_smoothin']\n")
    assert recipe("label_smoothin: 1\n") == ""


def test_a_run_does_not_read_the_recipes_code(recipe, tmp_path, monkeypatch):
    text = "label_smoothin: 1\n"
    assert "Did you mean label_smoothing?" in recipe(text)
    opened = []
    monkeypatch.setattr(usage, "names_in", opened.append)
    script = {"__file__": str(tmp_path / "train.py"), "load": load_hparams, "file": tmp_path / "x.yaml"}
    exec("hparams = load(file)", script)
    assert script["hparams"] == {"label_smoothin": 1} and opened == []


def test_a_run_refuses_a_misspelt_run_option_before_anything_is_built(tmp_path, subtests):
    """The check of the whole YAML takes too long for each run; this one reads the code only if a key is so near."""
    script = tmp_path / "train.py"
    for key, text, meant in [
        ("precison", "lr: 1\nprecison: fp16\n", "precision"),
        ("max_grad_nrom", "max_grad_nrom: 1.0\n", "max_grad_norm"),
        ("a key that the code mentions", "precison: fp16\n", ""),
        ("a key that the YAML refers to", "precison: fp16\nname: !ref run-<precison>\n", ""),
        ("another slip", "moduels: 1\n", ""),
    ]:
        with subtests.test(key):
            (tmp_path / "x.yaml").write_text(text)
            reads = 'print(hparams.get("precison"))' if "code" in key else ""
            script.write_text(
                f'from amp_recipes import load_hparams\nhparams = load_hparams("{tmp_path}/x.yaml")\n{reads}\n'
            )
            error = ""
            try:
                exec(compile(script.read_text(), str(script), "exec"), {"__file__": str(script)})
            except ConfigError as refused:
                error = str(refused)
            assert bool(error) is bool(meant), error
            if meant:
                assert "x.yaml:" in error and f"{key} is not used" in error
                assert error.endswith(f"Did you mean {meant}?")
