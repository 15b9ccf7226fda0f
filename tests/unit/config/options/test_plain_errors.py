"""An error that the framework raises on purpose ends a script with its message; others keep their traceback."""

import sys
from multiprocessing.pool import RemoteTraceback
from traceback import format_exception

import pytest

from amp_recipes.config.options.plain_errors import show_mistakes_plainly
from amp_recipes.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FolderInUseError,
    NonfiniteError,
    PrecisionError,
    RecipeError,
)


def raised(error, cause=None):
    """The error as it was raised, from a cause that the code of this file, which is a user's, raised too."""
    try:
        if cause is None:
            raise error
        try:
            raise cause
        except Exception as own:
            raise error from own
    except Exception as caught:
        return caught


@pytest.fixture
def shown(monkeypatch, capsys):
    """What is printed of an error that nobody catches; "traceback" for one with its traceback."""
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("traceback", file=sys.stderr))
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    show_mistakes_plainly()

    def show(error):
        sys.excepthook(type(error), error, error.__traceback__)
        return capsys.readouterr().err.strip()

    return show


def test_what_the_message_explains_is_shown_without_a_traceback(shown, subtests):
    for kind in (ConfigError, DataError, CheckpointError, PrecisionError, NonfiniteError, FolderInUseError):
        with subtests.test(kind.__name__):
            assert shown(raised(kind("what is wrong, and what to do"))) == "train.py: what is wrong, and what to do"


def test_what_lies_in_the_code_of_the_recipe_keeps_its_traceback(shown, subtests):
    for error in (
        raised(RecipeError("called twice")),
        raised(ValueError("own")),
        raised(DataError("x"), KeyError("own")),
    ):
        with subtests.test(repr(error)):
            assert shown(error) == "traceback"


def test_a_recipes_own_word_for_bad_data_is_enough(shown, subtests):
    """It is raised on purpose, in this process or in a loader's worker, of which there is only the text."""
    own = raised(DataError("cat.png: not readable"), OSError("cannot identify image file"))
    text = "".join(format_exception(own))
    for name, cause in (("here", own), ("in a worker", RemoteTraceback(text))):
        with subtests.test(name):
            assert shown(raised(DataError("sample 3: cat.png: not readable"), cause)).startswith("train.py: sample 3")
    text = "".join(format_exception(raised(KeyError("own"))))
    assert shown(raised(DataError("sample 3"), RemoteTraceback(text))) == "traceback"
