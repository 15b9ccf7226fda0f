"""The release of torch that is installed, for tests of what only newer ones have."""

import pytest
import torch

from amp_recipes.distributed.torch_private import missing_for_fsdp

RELEASE = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))

_LACKS_FSDP = f"strategy fsdp needs torch 2.13, and this is {torch.__version__}"

needs_fsdp = pytest.mark.skipif(bool(missing_for_fsdp()), reason=_LACKS_FSDP)


def skip_where_unknown(strategy: str) -> None:
    """For a test that has the strategy as a parameter: skip it if this torch has not what it takes."""
    if strategy == "fsdp" and missing_for_fsdp():
        pytest.skip(_LACKS_FSDP)


def since(release: tuple[int, int], why: str) -> pytest.MarkDecorator:
    """For a test of what torch has from `release` on; why: what an older one lacks, such as "no fused rms_norm"."""
    name = ".".join(map(str, release))
    return pytest.mark.skipif(release > RELEASE, reason=f"before torch {name}: {why}")
