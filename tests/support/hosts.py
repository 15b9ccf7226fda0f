"""Parametrizes tests by how the host learns a verdict (the fixture `host`), together with their own parameters."""

from collections.abc import Sequence
from typing import Any

import pytest
from pairwise import pairwise

HOSTS = ["at_once", "queued"]


def with_hosts(indirect: Sequence[str] = (), **factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Every two values of two factors, of which the host is one, meet in the default tier; the rest is extended."""
    rows = pairwise(*factors.values(), HOSTS)
    return pytest.mark.parametrize([*factors, "host"], rows, indirect=[*indirect, "host"])


def alternating_hosts(name: str, values: Sequence[Any], indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Every value meets one host in the default tier, in turn; the other is extended."""
    rows = [
        pytest.param(value, host, marks=() if HOSTS[index % 2] == host else pytest.mark.extended)
        for index, value in enumerate(values)
        for host in HOSTS
    ]
    return pytest.mark.parametrize([name, "host"], rows, indirect=[*indirect, "host"])
