"""Asks once what the CPU can do, so that no test assumes it."""

from __future__ import annotations

import functools

import pytest
import torch


@functools.cache
def runs_lstm(dtype: torch.dtype, backward: bool = True) -> bool:
    """Whether an LSTM runs under autocast to `dtype` here: oneDNN has none for bf16 without AVX-512, say."""
    lstm = torch.nn.LSTM(4, 4)
    try:
        with torch.set_grad_enabled(backward), torch.autocast("cpu", dtype):
            output, _ = lstm(torch.zeros(3, 2, 4))
        if backward:
            output.float().sum().backward()
    except RuntimeError:
        return False
    return True


def recurrent_in_bf16() -> type[torch.nn.LSTM] | type[torch.nn.GRU]:
    """LSTM where it trains in bf16, otherwise GRU, which every CPU can do."""
    return torch.nn.LSTM if runs_lstm(torch.bfloat16) else torch.nn.GRU


needs_lstm_in_bf16 = pytest.mark.skipif(not runs_lstm(torch.bfloat16), reason="this CPU runs no LSTM in bf16")
