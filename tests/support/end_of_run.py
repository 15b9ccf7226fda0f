"""All that two runs must agree on at their end, to be equal bit for bit."""

import random

import numpy as np
import torch
from inside import run_of


def everything(brain):
    """What decides about the next step, and what was counted, as plain values."""
    return {
        "weights": {name: value.tolist() for name, value in brain.modules.state_dict().items()},
        "optimizer": [
            {name: value.tolist() for name, value in state.items()}
            for optimizer in brain.optimizers_dict.values()
            for state in optimizer.state_dict()["state"].values()
        ],
        "rates": [group["lr"] for optimizer in brain.optimizers_dict.values() for group in optimizer.param_groups],
        "scaler": brain.scaler.state_dict(),
        "average": [a.tolist() for a in run_of(brain).ema.state_dict().values()],
        "steps": (brain.optimizer_step, brain.skipped_steps),
        "torch": torch.rand(2).tolist(),
        "device": torch.rand(2, device=brain.device).tolist(),
        "python": random.random(),
        "numpy": np.random.rand(2).tolist(),
        "metrics": brain.summary.last,
        "best": brain.summary.best,
        "samples": (brain.summary.samples, brain.summary.epochs),
        "spikes": (brain.summary.spikes or 0, brain.summary.went_back or 0),
    }
