"""Freezes in which order a run calls hooks, steps, schedules, logs and saves: tests/support/golden_trace.txt.

The model has one weight, and weights, data and learning rates are short binary fractions. So every number is exact, and
the trace is the same on every CPU. Of the same run in bf16 and fp16 the file holds the lines that differ from fp32.
A line ends with what the counters read, where they read anything else than in the line before that has them.
To write the file anew, after a change of behaviour that is meant:

    REWRITE_GOLDEN_TRACE=1 python -m pytest -n 0 tests/system/test_golden_trace.py; git diff tests/support
"""

import difflib
import math
import os
import re
from functools import partial

import pytest
import torch
from repository import REPOSITORY
from traced_recipe import TRACE, Died, Ear, Halving, Model, Recoverable, Traced, TracedInAll, make_optimizer

from amp_recipes import EpochCounter

GOLDEN = REPOSITORY / "tests/support/golden_trace.txt"


def process(folder, kind=Traced, weight=4.0, factors=(), dies_at=None, reads=True, fused=False, **options):
    """A Brain, made as in a new process."""
    by_epoch = options.get("lr_scheduler_interval") == "epoch"
    schedule = partial(Halving, step_size=1, total_updates=0) if by_epoch else partial(Halving, step_size=4)
    options = {
        "device": "cpu",
        "noprogressbar": True,
        "output_folder": str(folder),
        "ckpt_background": False,
        "max_grad_norm": 0.0,
        "locate_nonfinite": False,
        "init_scale": 1024.0,
        **options,
    }
    brain = kind({"model": Model(weight)}, partial(make_optimizer, fused=fused), {"lr_scheduler": schedule}, options)
    brain.factors, brain.dies_at, brain.reads, brain.loggers = dict(factors), dies_at, reads, [Ear()]
    brain.checkpointer.add_recoverable("recoverable", Recoverable())
    TRACE.begin(brain.checkpointer)
    return brain


def samples(*values):
    return list(torch.tensor(values, dtype=torch.float32).view(-1, 1))


def batches(*values):
    """Of two samples each; the last may have one."""
    return [torch.stack(samples(*values)[at : at + 2]) for at in range(0, len(values), 2)]


def course(folder, precision):
    """Windows, a skipped update, an average of weights; dies in a window, resumes, stops early, tests the best."""
    options = {
        "grad_accumulation_factor": 2,
        "ema_decay": 0.5,
        "ckpt_interval_steps": 2,
        "precision": precision,
        "early_stop_metric": "score",
        "early_stop_mode": "max",
        "early_stop_patience": 1,
        "growth_interval": 3,
        "factors": {(1, 3): math.nan},
    }
    train, valid = samples(1, 3, 2, 2, -1, -3, 4, 2, 0, 2, -2, -4, 3), batches(1, 3, 2, 2)
    lines = []
    for dies_at in ((2, 6), None):
        brain = process(folder, dies_at=dies_at, **options)
        try:
            brain.fit(EpochCounter(5), train, valid, train_loader_kwargs={"batch_size": 2})
        except Died:
            lines += [*TRACE.lines, "the process died, and another starts"]
    brain.evaluate(batches(2, 2), "score")
    return lines + TRACE.lines


def course_beside_fp32(folder, precision):
    """The lines in which the course in this precision differs from that in fp32."""
    fp32, other = course(folder / "fp32", "fp32"), course(folder / precision, precision)
    difference = list(difflib.unified_diff(fp32, other, n=0, lineterm=""))[2:]
    return ["..." if line.startswith("@@") else line for line in difference]


def spike(folder):
    """A loss 16 times too large: back to the checkpoint before it, and on with lower learning rates."""
    brain = process(
        folder,
        weight=64.0,
        factors={(1, 5): 16.0},
        on_spike="lower_lr",
        spike_window=4,
        spike_steps=2,
        spike_lr_factor=0.25,
        ckpt_interval_steps=2,
    )
    brain.fit(EpochCounter(1), [torch.ones(1, 1)] * 8)
    return TRACE.lines


def queued(folder):
    """Nobody reads the counters between stages: what follows from an update comes just before the next one."""
    brain = process(
        folder,
        reads=False,
        fused=True,
        factors={(1, 3): math.inf},
        ema_decay=0.5,
        ckpt_interval_steps=3,
        grad_accumulation_factor=2,
    )
    brain.fit(EpochCounter(1), batches(1, 3, 2, 2, -1, -3, 4, 2, 0, 1, 2, 1, 1, 1, 3, 1), batches(2, 2))
    return TRACE.lines


def tried(folder):
    """Steps that are only tried call hooks too: the first batch in fp16, and again the one that was not finite.

    The first update overflows, which the loss scale is there for: it is tried once more, at scale 1, and is well there.
    """
    brain = process(folder, precision="fp16", locate_nonfinite=True, factors={(1, 1): 2.0**12, (1, 2): math.nan})
    brain.fit(EpochCounter(1), batches(1, 3, 2, 2, 1, 1))
    return TRACE.lines


def all_hooks(folder):
    """A recipe that has every hook; a schedule by the epoch."""
    brain = process(folder, TracedInAll, grad_accumulation_factor=2, lr_scheduler_interval="epoch")
    brain.fit(range(1, 3), batches(1, 3, 2), batches(2, 2))
    brain.evaluate(batches(2, 2), min_key="loss")
    return TRACE.lines


RUNS = {
    "course in fp32": partial(course, precision="fp32"),
    "course in bf16, beside fp32": partial(course_beside_fp32, precision="bf16"),
    "course in fp16, beside fp32": partial(course_beside_fp32, precision="fp16"),
    "spike": spike,
    "queued": queued,
    "tried": tried,
    "all hooks": all_hooks,
}


def read_golden():
    _, *parts = re.split(r"^== (.*) ==\n", GOLDEN.read_text() if GOLDEN.exists() else "", flags=re.MULTILINE)
    return {name: text.splitlines() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def write_golden(traces):
    lines = [line for name in RUNS for line in (f"== {name} ==", *traces.get(name, []))]
    GOLDEN.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("name", "host"), [(name, "queued" if name == "queued" else "at_once") for name in RUNS], indirect=["host"]
)
@pytest.mark.usefixtures("host")
def test_a_run_takes_the_golden_course(name, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    lines = RUNS[name](tmp_path)
    if os.environ.get("REWRITE_GOLDEN_TRACE"):
        write_golden({**read_golden(), name: lines})
    expected = read_golden().get(name, [])
    difference = difflib.unified_diff(expected, lines, f"{GOLDEN.name}: {name}", "this run", lineterm="")
    if expected != lines:
        pytest.fail("\n".join(difference), pytrace=False)
