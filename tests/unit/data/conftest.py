"""Fixtures of the tests of loaders."""

import gc
import multiprocessing

import pytest


@pytest.fixture(autouse=True)
def left_loaders_go():
    """What a test leaves in cycles, its workers with it, must not slow the next one down."""
    yield
    if multiprocessing.active_children():
        gc.collect()
