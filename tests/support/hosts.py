"""Parametrizes tests by how the host learns a verdict (the fixture `host`), together with their own parameters."""

from collections.abc import Sequence
from typing import Any

import pytest
from pairwise import each_once, pairwise

HOSTS = ["at_once", "queued"]


def with_hosts(indirect: Sequence[str] = (), **factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Every two values of two factors, of which the host is one, meet in the default tier; the rest is extended."""
    rows = pairwise(*factors.values(), HOSTS)
    return pytest.mark.parametrize([*factors, "host"], rows, indirect=[*indirect, "host"])


def hosts_in_turn(indirect: Sequence[str] = (), **factors: Sequence[Any]) -> pytest.MarkDecorator:
    """Every value of the first factor comes once in the default tier, the hosts in turn; the rest is extended."""
    rows = each_once(*factors.values(), HOSTS)
    return pytest.mark.parametrize([*factors, "host"], rows, indirect=[*indirect, "host"])
