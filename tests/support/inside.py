"""What tests see of the inside of a Brain."""

from typing import Any

from amp_recipes import Brain


def run_of(brain: Brain) -> Any:
    """The `Run` that a Brain holds: its only private attribute."""
    return brain._Brain__run
