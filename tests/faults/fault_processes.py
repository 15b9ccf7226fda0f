"""Rows of the fault matrix in which one of several processes fails: 20 to 22, 24, 44, and 15 under torchrun."""

from __future__ import annotations

import json
import os
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from fault_runs import Amounts, Tally, checkpoints_in, digest, new_folder
from fault_torchrun import PATIENCE_SECONDS, Launch
from fault_worker import Fault, Plan

END_SECONDS = 10.0  # in which all processes end when one has failed
TIMEOUT_SECONDS = 4.0  # the process group's, in the rows where somebody waits in vain
KILLED_AFTER_SECONDS = 5.0  # there torchrun is less patient with those that it has asked to end
SAVES = {"ckpt_interval_steps": 3}
STRATEGIES = ("ddp", "fsdp")
_PHASES = ("read", "forward", "backward", "optimizer step", "between steps", "validation", "write")
_KILL_WITHIN_SECONDS = 0.01  # after a phase began: a step takes about as long


@dataclass(frozen=True)
class Whole:
    """The run of several processes that nothing befell."""

    trained: dict[tuple[int, int, int], Any]  # (rank, epoch, step) -> samples and loss
    validated: dict[tuple[int, int, int], Any]
    ends: dict[int, dict[str, Any]]
    visits: dict[int, dict[str, int]]  # rank -> phase -> how often it came there
    stages: list[dict[str, Any]]


def undisturbed(plan: Plan, parent: Path, world: int = 2) -> Whole:
    """Do the run to its end, or take what another part has found. Raises RuntimeError if it fails."""
    found = parent / f"{digest(asdict(plan))}.{world}.pickle"
    if not found.exists():
        whole = _undisturbed(plan, parent, world)
        unfinished = found.with_suffix(f".{os.getpid()}")
        unfinished.write_bytes(pickle.dumps(whole))
        unfinished.rename(found)
    return pickle.loads(found.read_bytes())


def _undisturbed(plan: Plan, parent: Path, world: int) -> Whole:
    with new_folder(parent) as place:
        this = replace(plan, folder=str(place / "run"))
        launch = Launch(this, place, world).end()
        launch.bury()
        ends = launch.of("end")
        if launch.agent.code != 0 or len(ends) != world:
            raise RuntimeError(f"the undisturbed run failed: {launch.how}")
        return Whole(
            by_place(launch, "train"),
            by_place(launch, "valid"),
            {rank: end for rank, end, _ in ends},
            {rank: visits for rank, _, visits in ends},
            stages_of(this),
        )


def by_place(launch: Launch, kind: str) -> dict[tuple[int, int, int], Any]:
    """(rank, epoch, step) -> the rest of the events of a kind."""
    return {(rank, epoch, step): rest for rank, epoch, step, *rest in launch.of(kind)}


def stages_of(plan: Plan) -> list[dict[str, Any]]:
    """The stage records in metrics.jsonl, without the times; a stage that was ended once more has another one."""
    lines = (Path(plan.folder) / "metrics.jsonl").read_text().splitlines()
    names = ("stage", "epoch", "loss", "metrics")
    found: list[dict[str, Any]] = []
    for record in map(json.loads, lines):
        stage = {name: record.get(name) for name in names}
        if record.get("kind") == "stage" and stage not in found:
            found.append(stage)
    return found


# ---------------------------------------------------------------------- judging


def differences(whole: Whole, plan: Plan, launches: Sequence[Launch]) -> list[str]:
    """What in the starts of a run, together, is not as in the undisturbed one; the last of them came to the end."""
    found = []
    for kind, expected in (("train", whole.trained), ("valid", whole.validated)):
        seen: set[tuple[int, int, int]] = set()
        for launch in launches:
            for rank, epoch, step, *rest in launch.of(kind):
                place = rank, epoch, step
                seen.add(place)
                if expected.get(place) != rest:
                    found.append(f"{kind} (rank, epoch, step) {place}: {rest} instead of {expected.get(place)}")
        missing = sorted(set(expected) - seen)
        if missing:
            found.append(f"{kind}: {len(missing)} batches were never done, first (rank, epoch, step) {missing[0]}")
    ends = {rank: end for rank, end, _ in launches[-1].of("end")}
    for rank, expected in whole.ends.items():
        wrong = [name for name, it in expected.items() if ends.get(rank, {}).get(name) != it]
        if wrong:
            found.append(f"rank {rank} at the end: {', '.join(wrong)} differ")
    stages = stages_of(plan)
    if stages != whole.stages:
        found.append(f"stage records {stages} instead of {whole.stages}")
    return found if len(found) < 4 else [*found[:3], f"and {len(found) - 3} more"]


def judge_failure(tally: Tally, launch: Launch, what: str, within: float) -> None:
    """One rank has failed: did all end in time, and none of them as if all were well?"""
    ended = [at for (life, _), at in launch.ended.items() if life == 0]
    seconds = max(ended) - launch.fault_time
    codes = launch.codes(0)
    in_time = seconds <= within
    nonzero = bool(codes) and all(codes.values())
    tally.add("all ended in time", int(in_time))
    tally.add("exit codes not 0", int(nonzero))
    tally.expect(in_time, what, f"the last process ended {seconds:.1f} s after the fault, of {within:g}")
    tally.expect(nonzero, what, launch.how)


def judge_folder(tally: Tally, plan: Plan, launch: Launch, what: str) -> None:
    """Are all checkpoints whole, and is what was finished there?"""
    good, torn = checkpoints_in(Path(plan.folder) / "save")
    # A commit is reported just before it is made, so the last one may not have come to be.
    finished = [name for _, name in launch.of("commit")][:-1]
    lost = bool(finished) and not any(name >= finished[-1] for name in good)
    tally.add("torn", len(torn))
    tally.add("finished saves lost", int(lost))
    tally.expect(not torn, f"{what}: torn", torn)
    tally.expect(not lost, f"{what}: finished save lost", f"{finished[-1:]} of {sorted(good)}")


def judge_end(tally: Tally, whole: Whole, plan: Plan, launches: Sequence[Launch], what: str) -> None:
    """The last start was to come to the end: did it, and is everything as in the undisturbed run?"""
    last = launches[-1]
    crashed = last.agent.code != 0 or len(last.of("end")) < len(whole.ends)
    tally.add("crashes on resume", int(crashed))
    if not tally.expect(not crashed, f"{what}: resume crashed", f"{last.how}"):
        return
    wrong = differences(whole, plan, launches)
    tally.add("bitwise equal", int(not wrong))
    tally.expect(not wrong, f"{what}: not as undisturbed", "; ".join(wrong))


def finish(tally: Tally, whole: Whole, plan: Plan, launches: list[Launch], place: Path, what: str) -> None:
    """Start the same command again, with nothing in its way, and judge where it comes to."""
    launches.append(Launch(replace(plan, faults=[]), place, len(whole.ends)).end())
    judge_end(tally, whole, plan, launches, what)


def _times(amounts: Amounts, kinds: int = 1) -> int:
    """How often each part of a row is done that has so many kinds of disturbance."""
    return kinds if amounts.quick else 20


def _plan(amounts: Amounts, **options: Any) -> Plan:
    """What is trained: two epochs."""
    return Plan("", "", samples=16 if amounts.quick else 48, options=options)


def _random_fault(chance: Random, whole: Whole, action: str, phases: Sequence[str] = _PHASES) -> Fault:
    """Somewhere in the run, on one rank."""
    rank = chance.choice(sorted(whole.visits))
    phase = chance.choice([it for it in phases if whole.visits[rank].get(it)])
    return Fault(phase, chance.randint(1, whole.visits[rank][phase]), action, [rank])


def _told(plan: Plan, fault: Fault) -> str:
    ranks = "all ranks" if fault.ranks is None else f"rank {fault.ranks[0]}"
    return f"{plan.options['strategy']}, {ranks}, {fault.action} at {fault.phase} {fault.nth}"


# ---------------------------------------------------------------------- row 20: a rank fails


def killed(amounts: Amounts, folder: Path, strategy: str, restarts: int) -> Tally:
    """Row 20: SIGKILL of one rank at a random moment; started again by hand, or by torchrun (restarts=1)."""
    tally, chance = Tally(), amounts.generator(("killed rank", strategy, restarts))
    plan = _plan(amounts, strategy=strategy, **SAVES)
    whole = undisturbed(plan, folder)
    for _ in range(_times(amounts)):
        fault = _random_fault(chance, whole, "kill", ("prepare", *_PHASES))
        fault.value = chance.uniform(0, _KILL_WITHIN_SECONDS)
        with new_folder(folder) as place:
            this = replace(plan, folder=str(place / "run"), faults=[fault])
            launches = [Launch(this, place, restarts=restarts).end()]
            tally.runs += 1
            what = f"{_told(this, fault)} and {1000 * fault.value:.1f} ms"
            tally.add("over before the kill", 0)
            if launches[0].agent.code == 0 and launches[0].lives == 1:
                tally.add("over before the kill")
                judge_end(tally, whole, this, launches, what)
            else:
                judge_failure(tally, launches[0], what, amounts.within(END_SECONDS))
                judge_folder(tally, this, launches[0], what)
                if restarts:
                    judge_end(tally, whole, this, launches, what)
                else:
                    finish(tally, whole, this, launches, place, what)
            for launch in launches:
                launch.bury()
    return tally


def other_deaths(amounts: Amounts, folder: Path, strategy: str) -> Tally:
    """Row 20: both ranks, torchrun itself, a rank in the resume's load; a rank that raises."""
    tally, chance = Tally(), amounts.generator(("other deaths", strategy))
    plan = _plan(amounts, strategy=strategy, **SAVES)
    whole = undisturbed(plan, folder)
    for number in range(_times(amounts, 4)):
        with new_folder(folder) as place:
            this = replace(plan, folder=str(place / "run"))
            action = ("kill_agent", "kill_all", "fail", "load")[number % 4]
            if action == "load":
                _killed_in_load(tally, amounts, chance, whole, this, place)
                continue
            fault = _random_fault(chance, whole, action, ("read", "forward", "between steps", "validation"))
            this.faults = [fault]
            launches = [Launch(this, place).end()]
            what = _told(this, fault)
            tally.runs += 1
            if action == "kill_agent":  # nobody is left who knows the exit codes
                last = max(launches[0].ended.values()) - launches[0].fault_time
                in_time = last <= amounts.within(END_SECONDS)
                tally.add("all ended in time", int(in_time))
                tally.expect(in_time, what, f"the last process ended after {last:.1f} s")
            else:
                judge_failure(tally, launches[0], what, amounts.within(END_SECONDS))
            if action == "fail":
                told = f"rank {fault.ranks[0]}" in launches[0].said and "a bad sample" in launches[0].said
                tally.add("error told with its rank", int(told))
                tally.expect(told, what, f"the error was not told with its rank\n{launches[0].how}")
            judge_folder(tally, this, launches[0], what)
            finish(tally, whole, this, launches, place, what)
            for launch in launches:
                launch.bury()
    return tally


def _killed_in_load(tally: Tally, amounts: Amounts, chance: Random, whole: Whole, plan: Plan, place: Path) -> None:
    stop = replace(
        plan, faults=[Fault("between steps", chance.randint(4, whole.visits[0]["between steps"] - 1), "kill_all", [0])]
    )
    launches = [Launch(stop, place).end()]
    fault = Fault("load", chance.randint(1, 12), "kill", [chance.randint(0, 1)])
    launches.append(Launch(replace(plan, faults=[fault]), place).end())
    tally.runs += 1
    what = _told(plan, fault)
    if launches[1].fault_time is not None:
        judge_failure(tally, launches[1], what, amounts.within(END_SECONDS))
        judge_folder(tally, plan, launches[0], what)
        finish(tally, whole, plan, launches, place, what)
    for launch in launches:
        launch.bury()


def as_typed(amounts: Amounts, folder: Path) -> Tally:
    """Row 20: once more, with workers that torchrun itself starts, as a user types it."""
    tally, chance = Tally(), amounts.generator("as typed")
    for number in range(amounts.few(6)):
        plan = _plan(amounts, strategy=STRATEGIES[(number + 1) % 2], **SAVES)
        whole = undisturbed(plan, folder)
        fault = _random_fault(chance, whole, "kill")
        with new_folder(folder) as place:
            this = replace(plan, folder=str(place / "run"), faults=[fault])
            launches = [Launch(this, place, restarts=1, plain=True).end()]
            tally.runs += 1
            what = f"python -m torch.distributed.run, {_told(this, fault)}"
            seconds = max(at for (life, _), at in launches[0].ended.items() if life == 0) - launches[0].fault_time
            in_time = seconds <= amounts.within(END_SECONDS)
            tally.add("all ended in time", int(in_time))
            tally.expect(in_time, what, f"the last process ended {seconds:.1f} s after the fault")
            judge_end(tally, whole, this, launches, what)
            launches[0].bury()
    return tally


# ---------------------------------------------------------------------- row 21: somebody waits in vain

# What a rank does (`Faults`), and which ranks do it.
IN_VAIN = {"freeze": [1], "sleep": [1], "extra": [1], "reduce_other_shape": None, "leave": [1]}


def in_vain(amounts: Amounts, folder: Path, action: str) -> Tally:
    """Row 21: a rank that does not come, or comes with something else; four runs at a time, which mostly wait."""
    tally, chance = Tally(), amounts.generator(("in vain", action))
    timeout = 10.0 if amounts.quick else TIMEOUT_SECONDS
    tally.note = (
        f"The timeout is {timeout:g} s. A frozen process is torchrun's to kill: here "
        f"{KILLED_AFTER_SECONDS:g} s after the others have failed, by itself {PATIENCE_SECONDS}."
    )
    in_turn = STRATEGIES if action in ("freeze", "extra") else STRATEGIES[::-1]
    plans = [_plan(amounts, strategy=it, **SAVES) for it in in_turn]
    turns = list(range(_times(amounts, len(STRATEGIES))))
    wholes = [undisturbed(plan, folder) for plan in plans[: len(turns)]]
    for four in (turns[at : at + 4] for at in range(0, len(turns), 4)):
        with new_folder(folder) as place:
            started = []
            for turn in four:
                plan, whole = plans[turn % 2], wholes[turn % 2]
                fault = Fault("forward", chance.randint(1, whole.visits[1]["forward"]), action, IN_VAIN[action])
                options = {**plan.options, "distributed_timeout_minutes": timeout / 60}
                this = replace(plan, folder=str(place / f"run{turn}"), faults=[fault])
                started.append(
                    (whole, this, Launch(replace(this, options=options), place, patience=KILLED_AFTER_SECONDS))
                )
            for whole, this, launch in started:
                _judge_in_vain(tally, whole, this, launch.end(), place, amounts, action)
    return tally


def _judge_in_vain(
    tally: Tally, whole: Whole, plan: Plan, launch: Launch, place: Path, amounts: Amounts, action: str
) -> None:
    tally.runs += 1
    what = _told(plan, plan.faults[0])
    if tally.expect(launch.fault_time is not None, what, f"it ended before the fault: {launch.how}"):
        within = amounts.within(TIMEOUT_SECONDS + KILLED_AFTER_SECONDS + END_SECONDS)
        seconds = max(launch.ended.values()) - launch.fault_time
        tally.add("all ended in time", int(seconds <= within))
        tally.expect(seconds <= within, what, f"the last ended {seconds:.1f} s after the fault, of {within:g}")
        # One that left early may well have ended with 0; those that waited for it must not.
        failed = launch.agent.code != 0 and bool(launch.codes(0).get(0))
        tally.add("those that waited failed", int(failed))
        tally.expect(failed, what, launch.how)
        if action in ("freeze", "sleep"):
            named = "distributed_timeout_minutes" in launch.said
            tally.add("option named", int(named))
            tally.expect(named, what, f"the option is not named: {launch.how}")
    launches = [launch]
    judge_folder(tally, plan, launch, what)
    finish(tally, whole, plan, launches, place, what)
    for it in launches:
        it.bury()


# ---------------------------------------------------------------------- row 22: killed in a sharded save


def killed_in_sharded_save(amounts: Amounts, folder: Path, background: bool) -> Tally:
    """Row 22: SIGKILL of a rank just before, or just after, something is done in the folder of checkpoints."""
    tally, chance = Tally(), amounts.generator(("sharded save", background))
    plan = _plan(amounts, strategy="fsdp", ckpt_interval_steps=2, ckpt_background=background)
    whole = undisturbed(plan, folder)
    for _ in range(_times(amounts)):
        fault = _random_fault(chance, whole, "kill", ["write"])
        fault.value = chance.choice([0.0, chance.uniform(0, 0.002)])
        with new_folder(folder) as place:
            this = replace(plan, folder=str(place / "run"), faults=[fault])
            launches = [Launch(this, place).end()]
            tally.runs += 1
            what = _told(this, fault)
            if launches[0].agent.code != 0:
                judge_failure(tally, launches[0], what, amounts.within(END_SECONDS))
            judge_folder(tally, this, launches[0], what)
            finish(tally, whole, this, launches, place, what)
            for launch in launches:
                launch.bury()
    return tally


def disk_full_on_a_rank(amounts: Amounts, folder: Path, strategy: str) -> Tally:
    """Row 22: no space left on one rank's disk: all ranks end alike, and the checkpoint before is intact."""
    tally, chance = Tally(), amounts.generator(("disk full on a rank", strategy))
    plans = [
        _plan(amounts, strategy=strategy, ckpt_interval_steps=2, ckpt_background=background)
        for background in (True, False)
    ]
    wholes = [undisturbed(plan, folder) for plan in plans[: _times(amounts)]]
    for number in range(_times(amounts)):
        plan, whole = plans[number % 2], wholes[number % 2]
        ranks = [rank for rank, visits in whole.visits.items() if visits.get("write")]
        rank = chance.choice(ranks)
        fault = Fault("write", chance.randint(1, whole.visits[rank]["write"]), "disk_full", [rank])
        with new_folder(folder) as place:
            this = replace(plan, folder=str(place / "run"), faults=[fault])
            launches = [Launch(this, place).end()]
            tally.runs += 1
            what = f"{_told(this, fault)}, background {this.options['ckpt_background']}"
            first = launches[0]
            codes = first.codes(0)
            # One that fails before the others are in their fit has torchrun end them by SIGTERM.
            alike = bool(codes) and (all(codes.values()) or not any(codes.values()))
            tally.add("all ended alike", int(alike))
            tally.expect(alike, what, first.how)
            if any(codes.values()):
                seconds = max(first.ended.values()) - first.fault_time
                tally.expect("CheckpointError" in first.said, what, first.how)
                tally.add("CheckpointError", int("CheckpointError" in first.said))
                tally.expect(seconds < amounts.within(30), what, f"ended {seconds:.1f} s after the fault")
            judge_folder(tally, this, first, what)
            finish(tally, whole, this, launches, place, what)
            for launch in launches:
                launch.bury()
    return tally


# ---------------------------------------------------------------------- row 24: Inf on one rank


def inf_on_one_rank(amounts: Amounts, folder: Path, strategy: str) -> Tally:
    """Row 24: the gradients of one rank are infinite in one step: all ranks skip it."""
    tally, chance = Tally(), amounts.generator(("inf", strategy))
    for number in range(_times(amounts, 3)):
        precision = ("fp32", "bf16", "fp16")[number % 3]
        options = {"strategy": strategy, "precision": precision, "init_scale": 1024.0}
        fault = Fault("forward", chance.randint(1, 4), "inf", [chance.randint(0, 1)])
        with new_folder(folder) as place:
            plan = replace(_plan(amounts, **options), folder=str(place / "run"), epochs=1, faults=[fault])
            launch = Launch(plan, place).end()
            tally.runs += 1
            what = f"{precision}: {_told(plan, fault)}"
            ends = {rank: end for rank, end, _ in launch.of("end")}
            if tally.expect(len(ends) == 2, what, f"{launch.how}"):
                skipped = [end["skipped"] for end in ends.values()]
                bad = sum(end["bad parameters"] for end in ends.values())
                equal = ends[0]["weights"] == ends[1]["weights"]
                tally.add("all skipped", int(skipped == [1, 1]))
                tally.add("ranks equal", int(equal))
                tally.add("bad parameters", bad)
                tally.expect(skipped == [1, 1], what, f"skipped {skipped}")
                tally.expect(equal, what, "the weights of the ranks differ")
                tally.expect(bad == 0, what, f"{bad} bad parameters")
            launch.bury()
    return tally


# ---------------------------------------------------------------------- row 44: other numbers of processes


def other_worlds(amounts: Amounts, folder: Path, strategy: str) -> Tally:
    """Row 44: an epoch begun by some processes, gone on with by others."""
    tally, chance = Tally(), amounts.generator(("worlds", strategy))
    for number in range(_times(amounts)):
        worlds = ((2, 1, 2), (2, 4, 1))[number % 2]
        samples = chance.choice([48, 52, 45, 47])
        steps = -(-samples // 4)
        stops = chance.randint(1, steps - 2), chance.randint(1, steps)
        how = ("terminate", "terminate", "kill_all")[number % 3]
        with new_folder(folder) as place:
            options = {"strategy": strategy, "ckpt_interval_steps": 1, "ckpt_background": False}
            plan = Plan(str(place / "run"), "", samples=samples, options=options)
            launches, seen = [], Counter[tuple[int, int]]()
            what = f"{strategy}, {samples} samples, {worlds} processes, {how} after {stops} steps"
            for world, stop in zip(worlds, (*stops, None), strict=True):
                # One step more than was saved, so that the kill comes when the save is over.
                faults = [Fault("forward", stop + 1, how, [0])] if stop else []
                launches.append(Launch(replace(plan, faults=faults), place, world).end())
            tally.runs += 1
            for launch in launches:
                for _, epoch, _, samples_of_batch, _ in launch.of("train"):
                    seen.update((epoch, sample) for sample in samples_of_batch)
            last = launches[-1]
            crashed = last.agent.code != 0 or len(last.of("end")) != worlds[-1]
            tally.add("crashes", int(crashed))
            tally.expect(not crashed, what, f"{last.how}")
            missing, repeated = 2 * samples - len(seen), sum(seen.values()) - len(seen)
            tally.add("missing", missing)
            tally.add("repeated", repeated)
            tally.expect(crashed or missing == repeated == 0, what, f"{missing} missing, {repeated} repeated")
            judge_folder(tally, plan, last, what)
            for launch in launches:
                launch.bury()
    return tally


# ---------------------------------------------------------------------- row 15: SIGTERM


def terminated(amounts: Amounts, folder: Path, strategy: str) -> Tally:
    """Row 15: SIGTERM to torchrun, to one worker, to all at once."""
    tally, chance = Tally(), amounts.generator(("terminated", strategy))
    plan = _plan(amounts, strategy=strategy, **SAVES)
    whole = undisturbed(plan, folder)
    for number in range(_times(amounts, 3)):
        fault = _random_fault(chance, whole, "terminate")
        fault.target = ("agent", "self", "all")[(number + (strategy == "fsdp")) % 3]
        with new_folder(folder) as place:
            this = replace(plan, folder=str(place / "run"), faults=[fault])
            launches = [Launch(this, place).end()]
            tally.runs += 1
            what = f"{_told(this, fault)}, SIGTERM to {fault.target}"
            codes = launches[0].codes(0)
            # One that torchrun has sent SIGTERM once more while it was on its way out is ended by it: 143 to a shell.
            right = set(codes.values()) <= {143, -15} and 143 in codes.values()
            tally.add("workers' exit code 143", int(right))
            tally.expect(right, what, launches[0].how)
            judge_folder(tally, this, launches[0], what)
            finish(tally, whole, this, launches, place, what)
            done = sum(len(launch.of("train")) for launch in launches)
            tally.add("batches done twice", done - len(whole.trained))
            tally.expect(done == len(whole.trained), what, f"{done - len(whole.trained)} batches were done twice")
            for launch in launches:
                launch.bury()
    return tally
