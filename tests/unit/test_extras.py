"""A missing package is an error that says what to install."""

import sys

import pytest
from programs import run_python
from repository import REPOSITORY

from amp_recipes import needs_extra
from amp_recipes.config import check
from amp_recipes.errors import ConfigError


def test_a_missing_package_is_told_with_what_to_install():
    said = r"'no_such_package' is not installed.*'amp-recipes\[image\]'"
    with pytest.raises(ConfigError, match=said), needs_extra("image"):
        import no_such_package  # noqa: F401


def test_a_script_ends_with_the_message_alone(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from amp_recipes import needs_extra\nwith needs_extra('image'):\n    import no_such_package\n")
    ended = run_python(script)
    assert ended.returncode == 1
    assert ended.stderr.startswith("train.py: 'no_such_package' is not installed.") and "Traceback" not in ended.stderr


def test_other_errors_stay_as_they_are():
    with pytest.raises(ZeroDivisionError), needs_extra("image"):
        1 / 0  # noqa: B018


def test_a_recipe_s_yaml_tells_it_too(monkeypatch):
    for package in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "data", raising=False)
    config = REPOSITORY / "configs" / "image_classification.yaml"
    with pytest.raises(ConfigError, match=r"'PIL(\.Image)?' is not installed.*pip install 'amp-recipes\[image\]'"):
        check(config, recipe_folder=REPOSITORY / "recipes" / "image_classification")
