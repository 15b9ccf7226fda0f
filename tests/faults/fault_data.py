"""Rows of the fault matrix about data, numbers, processes and settings: 17 to 19, 23, 25, 27 to 30, 44, 47."""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fault_runs import (
    BATCH,
    SAMPLES,
    STEPS,
    Amounts,
    Child,
    Noisy,
    Run,
    Tally,
    by_place,
    checkpoints_in,
    fit,
    in_child,
    judge_end,
    judge_kill,
    make,
    new_folder,
    reference,
    report,
    report_saves,
    train,
)

from amp_recipes import EpochCounter, Stage
from amp_recipes.checkpoint import Checkpointer
from amp_recipes.config import create_experiment_directory, parse_arguments

HANG_SECONDS = 10  # a loader's timeout, where a worker is to hang

# ---------------------------------------------------------------------- rows 17 to 19: the loader


def killed_worker(amounts: Amounts, folder: Path) -> Tally:
    """Row 17: a loader worker is killed while it reads a sample."""
    return _bad_reader(
        amounts, folder, 6, lambda _: os.kill(os.getpid(), signal.SIGKILL), r"worker \d+ \(pid \d+\)", 10
    )


def hanging_worker(amounts: Amounts, folder: Path) -> Tally:
    """Row 18: a loader worker hangs; and a limit is on without being asked for."""
    tally = _bad_reader(
        amounts, folder, 3, lambda _: time.sleep(1e4), r"worker \d+ \(pid \d+\).*timeout", HANG_SECONDS + 10
    )
    default = in_child(lambda: make(Run(None)).make_dataloader(Noisy(8), Stage.TRAIN, num_workers=1).timeout)
    tally.note = f"With timeout={HANG_SECONDS}; the default is {default:g} s."
    tally.expect(default > 0, "there is no limit by default", default)
    return tally


def _bad_reader(
    amounts: Amounts, folder: Path, number: int, harm: Callable[[int], object], expected: str, seconds: float
) -> Tally:
    tally, chance = Tally(), amounts.generator(expected)
    run = Run(None, workers=2, options={"ckpt_interval_steps": 1}, loader={"timeout": HANG_SECONDS})
    whole = reference(run, folder)
    for _ in range(amounts.few(number)):
        with new_folder(folder) as place:
            index, this = chance.randrange(SAMPLES), replace(run, folder=place / "run")
            once = place / "harmed"

            def read(found: int, index: int = index, once: Path = once) -> None:
                if found == index and not once.exists():
                    once.touch()
                    harm(found)

            life = Child(lambda this=this, read=read: train(replace(this, on_read=read))).end()
            tally.runs += 1
            text = life.error[1] if life.error else ""
            told = life.code == 1 and life.error[0] == "DataError" and re.search(expected, text, re.S) is not None
            tally.add("worker named", int(told))
            tally.expect(told, "the error does not name the worker", life.how)
            tally.add("sample named", int(f"sample {index} " in f"{text} "))
            since = life.seconds if not once.exists() else time.time() - once.stat().st_mtime
            tally.expect(since < amounts.within(seconds), f"the error took {since:.1f} s")
            lives = [life]
            judge_kill(tally, whole, this, lives)
            for it in lives:
                it.bury()
    return tally


def bad_sample(amounts: Amounts, folder: Path) -> Tally:
    """Row 19: a sample that cannot be read."""
    tally, chance = Tally(), amounts.generator("bad sample")
    wholes = {workers: reference(Run(None, workers=workers), folder) for workers in (0, 2)}
    for number in range(amounts.few(10)):
        with new_folder(folder) as place:
            index, workers = chance.randrange(SAMPLES), 2 * (number % 2)
            this = Run(place, workers=workers, options={"ckpt_interval_steps": 1})

            def read(found: int, index: int = index) -> None:
                if found == index:
                    raise ValueError("the header is cut off")

            life = Child(lambda this=this, read=read: train(replace(this, on_read=read))).end()
            tally.runs += 1
            text = life.error[1] if life.error else ""
            told = all(
                it in text for it in (f"sample {index} ", f"recordings/{index:04d}.wav", "the header is cut off")
            )
            tally.add("index and file named", int(told))
            tally.expect(told and life.error[0] == "DataError", "the error does not name the sample", life.how)
            lives = [life]
            judge_kill(tally, wholes[workers], this, lives)  # goes on with the sample mended
            for it in lives:
                it.bury()
    return tally


# ---------------------------------------------------------------------- rows 23, 25, 27: numbers


def nan_loss(amounts: Amounts, folder: Path) -> Tally:
    """Row 23: a NaN loss, a single one and all from a batch on, at each precision."""
    tally = Tally()
    for precision in ("fp32", "bf16", "fp16"):
        for lasting in (False, True):
            for step in (1, 4):
                with new_folder(folder) as place:
                    # fp16's patience counts at the floor of the scale only.
                    options = {"precision": precision, "ckpt_interval_steps": 1, "init_scale": 2.0, "min_scale": 2.0}
                    run = Run(place, options=options, poisoned=_poison(step, lasting))
                    life = Child(lambda run=run: _train_and_look(run)).end()
                    tally.runs += 1
                    case = f"{precision}, {'all from' if lasting else 'at'} step {step}"
                    nonfinite, skipped, error = life.of("value")[0][0] if life.code == 0 else (-1, 0, life.how)
                    tally.add("bad parameters", nonfinite)
                    tally.expect(nonfinite == 0, f"{case}: {nonfinite} nonfinite parameters", life.how)
                    right = error == ("NonfiniteError" if lasting else "")
                    tally.add("stopped after patience" if lasting else "skipped and went on", int(right))
                    tally.expect(right, case, f"ended with {error or 'no error'}")
                    tally.expect(skipped == (3 if lasting else 1), f"{case}: {skipped} skips were counted")
                    good, torn = checkpoints_in(place / "save")
                    tally.expect(not torn and (bool(good) or lasting), f"{case}: no good checkpoint", torn)
                    life.bury()
    return tally


def _poison(step: int, lasting: bool) -> Callable[[int, int], bool]:
    def poisoned(epoch: int, now: int) -> bool:
        return epoch == 2 and (now >= step if lasting else now == step)

    return poisoned


def _train_and_look(run: Run) -> tuple[int, int, str]:
    brain, error = make(run), ""
    try:
        fit(brain)
    except Exception as raised:
        error = type(raised).__name__
    state = [*brain.modules.parameters(), *brain.modules.buffers(), *brain._Brain__run.ema.state_dict().values()]
    return sum(int((~value.isfinite()).sum()) for value in state), brain.skipped_steps, error


def scales(amounts: Amounts, folder: Path) -> Tally:
    """Row 25: fp16, with overflows before and after a kill: each batch has the scale of the undisturbed run."""
    tally = Tally()
    options = {"precision": "fp16", "init_scale": 2.0**17, "growth_interval": 2, "ckpt_interval_steps": 1}
    run = Run(None, options=options)
    whole = reference(run, folder)
    seen = [record[-1] for record in whole.trained.values()]
    moves = sum(one != other for one, other in pairwise(seen))
    tally.note = f"The scale moves {moves} times in {len(seen)} steps, from {max(seen):g} to {min(seen):g}."
    tally.expect(moves >= 3, "the scale has to move for this to show anything", seen)
    for nth in range(1, len(whole.order), 5 if amounts.quick else 1):
        with new_folder(folder) as place:
            this = replace(run, folder=place)
            life = Child(lambda this=this: train(this))
            life.until(lambda event: event[0] == "train", nth)
            lives = [life.kill()]
            judge_kill(tally, whole, this, lives)
            after = {**by_place(lives[0].of("train")), **by_place(lives[1].of("train"))}
            same = [record[-1] for record in after.values()] == seen
            tally.runs += 1
            tally.add("scale sequence equal", int(same))
            tally.expect(same, f"killed at batch {nth}: other scales")
            for it in lives:
                it.bury()
    return tally


def nan_metric(amounts: Amounts, folder: Path) -> Tally:
    """Row 27: a metric that is NaN in some epochs, or in all: never the best, never 0."""
    tally, chance = Tally(), amounts.generator("nan metric")
    for number in range(amounts.few(20)):
        values = [chance.choice([math.nan, -1.0, 1.0, 3.0, chance.uniform(-2, 2)]) for _ in range(4)]
        values[chance.randrange(4)] = math.nan
        mode = ("min", "max")[number % 2]
        finite = [value for value in values if not math.isnan(value)]
        best = (min if mode == "min" else max)(finite) if finite else None
        with new_folder(folder) as place:
            run = Run(
                place,
                epochs=4,
                metric=lambda epoch, values=values: values[epoch - 1],
                options={"early_stop_metric": "score", "early_stop_mode": mode, "early_stop_patience": None},
            )
            told, found = in_child(lambda run=run, mode=mode: _best_score(run, mode))
        tally.runs += 1
        right = told == best and found == best
        tally.add("best as it should be", int(right))
        tally.expect(right, f"{mode} of {values}", f"the summary has {told}, the checkpoints {found}")
    return tally


def _best_score(run: Run, mode: str) -> tuple[float | None, float | None]:
    brain = make(run)
    fit(brain)
    found = Checkpointer(run.folder / "save").find_checkpoint(**{f"{mode}_key": "score"})
    return brain.summary.best.get("score"), None if found is None else found.meta["score"]


# ---------------------------------------------------------------------- rows 28 to 30: how much data there is


def empty_data_set(amounts: Amounts, folder: Path) -> Tally:
    """Row 28: a data set without samples, and a list without batches."""
    tally = Tally()
    for empty in (lambda: Noisy(0), lambda: []):
        _expect_refusal(
            tally, lambda brain, empty=empty: brain.fit(EpochCounter(1), empty()), r"^Training set is empty"
        )
        _expect_refusal(
            tally, lambda brain, empty=empty: brain.fit(EpochCounter(1), Noisy(4), empty()), r"^Validation set is empty"
        )
    return tally


def zero_length_epoch(amounts: Amounts, folder: Path) -> Tally:
    """Row 29: drop_last leaves no batch."""
    tally = Tally()
    for shuffle in (False, True):
        kwargs = {"batch_size": 4, "drop_last": True, "shuffle": shuffle}
        _expect_refusal(
            tally,
            lambda brain, kwargs=kwargs: brain.fit(EpochCounter(1), Noisy(3), train_loader_kwargs=kwargs),
            "0 batches: drop_last with 3 samples < batch size 4",
        )
    return tally


def _expect_refusal(tally: Tally, act: Callable[[Any], object], expected: str) -> None:
    life = Child(lambda: act(make(Run(None)))).end()
    tally.runs += 1
    text = life.error[1] if life.error else ""
    told = life.code == 1 and life.error[0] == "DataError" and re.search(expected, text) is not None
    tally.add("refused before step 1", int(told and not life.of("train")))
    tally.expect(told and not life.of("train"), expected, life.how)
    life.bury()


def short_windows(amounts: Amounts, folder: Path) -> Tally:
    """Row 30: fewer batches than the accumulation window, or a last window that is shorter."""
    tally = Tally()
    for samples, window in ((12, 16), (24, 4), (20, 5), (24, 5), (4, 3)):
        run = Run(None, samples=samples, epochs=1, options={"grad_accumulation_factor": window, "ema_decay": None})
        steps, same = in_child(lambda run=run: _compare_with_hand_loop(run))
        expected = math.ceil(samples / BATCH / window)
        tally.runs += 1
        tally.add("steps right", int(steps == expected))
        tally.expect(steps == expected, f"{samples // BATCH} batches, window {window}", f"{steps} steps")
        tally.add("weights of the hand-written loop", int(same))
        tally.expect(same, f"{samples // BATCH} batches, window {window}: not the weights of a loop by hand")
    return tally


def _compare_with_hand_loop(run: Run) -> tuple[int, bool]:
    """Updates taken, and whether a loop that divides each window by its own length gets the same weights."""
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.arange(BATCH), torch.randn(BATCH, 8, generator=generator), torch.randn(BATCH, generator=generator))
        for _ in range(run.samples // BATCH)
    ]
    brain, twin = make(run), make(run)
    for it in (brain, twin):
        it.modules.model[2].p = 0.0
    brain.fit(EpochCounter(1), batches)
    model, size = twin.modules.model.train(), run.options["grad_accumulation_factor"]
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for start in range(0, len(batches), size):
        window = batches[start : start + size]
        for _, x, y in window:
            (torch.nn.functional.mse_loss(model(x).squeeze(1), y) / len(window)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), brain.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    pairs = zip(brain.modules.model.parameters(), model.parameters(), strict=True)
    return brain.optimizer_step, all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


# ---------------------------------------------------------------------- row 44: another number of processes


def world_sizes(amounts: Amounts, folder: Path) -> Tally:
    """Row 44: an epoch begun by two processes, gone on with by one, ended by two."""
    tally = Tally()
    for samples, stops in ((48, (2, 3)), (45, (2, 2)), (56, (1, 2)), (46, (3, 1)), (44, (1, 5)))[: amounts.few(5) + 1]:
        with new_folder(folder) as place:
            run = Run(place / "run", epochs=1, samples=samples, options={"ckpt_background": False, "ema_decay": None})
            seen: Counter[int] = Counter()
            ended = ""
            for number, (world, stop) in enumerate(zip((2, 1, 2), (*stops, None), strict=True)):
                works = [partial(_rank, run, rank, world, number, stop) for rank in range(world)]
                lives = [Child(work) for work in works]
                if stop is not None:
                    lives[0].until(lambda event: event[0] == "saved")  # the first one writes
                    for life in lives:  # all are in the step after it, or on their way
                        life.until(lambda event: event[0] == "waits")
                for life in lives:
                    if stop is not None:
                        life.kill()
                    elif life.end().code != 0:
                        ended = f"{life.how}\n{life.output[-1500:]}"
                    for record in life.of("train"):
                        seen.update(record[2])
                    life.bury()
            tally.runs += 1
            tally.expect(not ended, "the last processes failed", ended)
            missing, repeated = samples - len(seen), sum(seen.values()) - len(seen)
            tally.add("missing", missing)
            tally.add("repeated", repeated)
            tally.expect(missing == repeated == 0, f"{samples} samples, stops {stops}", f"{missing}, {repeated}")
            good, torn = checkpoints_in(run.folder / "save")
            tally.expect(bool(good) and not torn, "torn", torn)
    return tally


def _rank(run: Run, rank: int, world: int, number: int, stop: int | None) -> None:
    """Train as one of `world` processes; with `stop`, save after so many batches and wait to be killed."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    if world > 1:
        store = run.folder.parent / f"store{number}"
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    report_saves(run)
    brain = make(run.with_options(ckpt_interval_steps=stop) if stop else run)
    brain.modules.model[1] = torch.nn.LayerNorm(run.width)  # a batch of one sample has no statistics
    if stop:
        step_done, batches = brain.phase, [0]

        def phase(name: str) -> None:
            step_done(name)
            if name == "forward":
                batches[0] += 1
                if batches[0] > stop:
                    report("waits")
                    time.sleep(1e4)  # killed here

        brain.phase = phase
    brain.fit(EpochCounter(1), Noisy(run.samples), train_loader_kwargs={"batch_size": BATCH // world, "shuffle": True})


# ---------------------------------------------------------------------- row 47: other settings

_YAML = """\
seed: 5
lr: 0.003
model:
  width: 16
  activation: relu
loader_kwargs: {batch_size: 4}
grad_accumulation_factor: 1
unused: 1
"""


def changed_settings(amounts: Amounts, folder: Path) -> Tally:
    """Row 47: a run is started again with other settings."""
    tally = Tally()
    changes: list[tuple[str, str, list[str], list[str]]] = [  # what; YAML; command line; what the error shows
        ("a value", _YAML.replace("0.003", "0.002"), [], ["lr", "0.003", "0.002"]),
        ("on the command line", _YAML, ["--model.width=32"], ["model.width", "16", "32"]),
        ("a new key", _YAML + "dropout: 0.1\n", [], ["dropout", "0.1"]),
        ("a key that is gone", _YAML.replace("unused: 1\n", ""), [], ["unused"]),
        ("a run option", _YAML, ["--grad_accumulation_factor=2"], ["grad_accumulation_factor", "1", "2"]),
    ]
    whole = reference(Run(None), folder)
    with new_folder(folder) as place:
        original = place / "original"
        first = Child(lambda: _train_from_yaml(original, place / "first.yaml", _YAML, []))
        first.until(lambda event: event[0] == "saved")
        first.until(lambda event: event[0] == "train", STEPS + 1)
        first.kill()
        for number, (what, text, arguments, shown) in enumerate(changes):
            this = Path(shutil.copytree(original, place / str(number)))
            before = (this / "hyperparams.yaml").read_bytes()
            yaml = place / f"{number}.yaml"
            life = Child(lambda t=this, y=yaml, x=text, a=arguments: _train_from_yaml(t, y, x, a)).end()
            tally.runs += 1
            told = life.code == 1 and life.error is not None and life.error[0] == "ConfigError"
            told = told and all(it in life.error[1] for it in [*shown, "--accept_changes"])
            tally.add("refused, difference shown", int(told))
            tally.expect(told and not life.of("train"), what, life.how)
            tally.expect((this / "hyperparams.yaml").read_bytes() == before, f"{what}: the old settings are gone")
            accepted = Child(
                lambda t=this, y=yaml, x=text, a=arguments: _train_from_yaml(t, y, x, [*a, "--accept_changes=true"])
            ).end()
            tally.add("went on with the flag", int(accepted.code == 0))
            tally.expect(accepted.code == 0, f"{what}: not accepted", f"{accepted.how}\n{accepted.output[-800:]}")
            life.bury()
            accepted.bury()
        same = Child(lambda: _train_from_yaml(original, place / "same.yaml", _YAML, [])).end()
        judge_end(tally, whole, [first, same])
        same.bury()
        first.bury()
    return tally


def _train_from_yaml(folder: Path, yaml: Path, text: str, arguments: list[str]) -> None:
    """What a recipe's main does; of the settings only the run options reach the training."""
    yaml.write_text(text)
    file, run_opts, overrides = parse_arguments([str(yaml), *arguments])
    create_experiment_directory(folder, file, overrides)
    logging.getLogger().setLevel(logging.INFO)
    options = {name: run_opts[name] for name in run_opts.explicit}
    train(Run(folder, options={**options, "output_folder": str(folder)}))
