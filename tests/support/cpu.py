"""Asks once what the CPU can do, so that no test assumes it."""

from __future__ import annotations

import functools

import pytest
import torch


@functools.cache
def runs_lstm(dtype: torch.dtype) -> bool:
    """Whether an LSTM trains under autocast to `dtype` here: oneDNN has none for bf16 without AVX-512, say."""
    lstm = torch.nn.LSTM(4, 4)
    try:
        with torch.autocast("cpu", dtype):
            output, _ = lstm(torch.zeros(3, 2, 4))
        output.float().sum().backward()
    except RuntimeError:
        return False
    return True


needs_lstm_in_bf16 = pytest.mark.skipif(not runs_lstm(torch.bfloat16), reason="this CPU runs no LSTM in bf16")
