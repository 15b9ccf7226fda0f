"""Rows of the fault matrix about the disk and what lies on it: 5 to 8, 10 to 12, 26, 40, 42, 43, 45, 46."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import math
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fault_kills import small_file_system
from fault_runs import (
    LARGE,
    SMALL,
    Amounts,
    Child,
    Run,
    Tally,
    Trigger,
    checkpoints_in,
    differences,
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
from torch import nn

from amp_recipes.checkpoint import Checkpointer
from amp_recipes.checkpoint import checkpointer as checkpointer_room
from amp_recipes.errors import AmpRecipesError, CheckpointError

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534  # a user without rights, on Linux

# ---------------------------------------------------------------------- row 5: the N-th call fails

_CALLS = [
    (os, "open"),
    (os, "write"),
    (os, "fsync"),
    (os, "close"),
    (os, "rename"),
    (os, "replace"),
    (os, "mkdir"),
    (os, "unlink"),
    (os, "remove"),
    (os, "rmdir"),
    (os, "listdir"),
    (os, "scandir"),
    (os, "statvfs"),
    (builtins, "open"),
    (io, "open"),
]


class FailingCalls:
    """Within it the `nth` call that opens, writes, syncs, closes, renames, makes, deletes or lists fails.

    onwards: so do all that come after it.
    """

    def __init__(self, nth: int, number: int, onwards: bool) -> None:
        self.nth, self.number, self.onwards = nth, number, onwards
        self.calls = 0
        self.failed: list[str] = []

    def __enter__(self) -> FailingCalls:
        self._real = [(module, name, getattr(module, name)) for module, name in _CALLS]
        for module, name, real in self._real:
            setattr(module, name, self._failing(name, real))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, real in self._real:
            setattr(module, name, real)

    def _failing(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.nth or (self.onwards and self.calls > self.nth):
                self.failed.append(name)
                if name == "close":  # gives the descriptor back all the same
                    real(*args, **kwargs)
                raise OSError(self.number, os.strerror(self.number))
            return real(*args, **kwargs)

        return call


class _Holder:
    """A recoverable with a number and a tensor."""

    def __init__(self, value: int) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "tensor": torch.full((100,), float(self.value))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert (state["tensor"] == state["value"]).all()
        self.value = state["value"]


_WAYS: dict[str, Callable[[Checkpointer], object]] = {
    "in the foreground": lambda checkpointer: checkpointer.save_checkpoint({"loss": 1.0}),
    "in the background": lambda checkpointer: (checkpointer.start_saving({"loss": 1.0}), checkpointer.wait()),
    "with pruning": lambda checkpointer: checkpointer.save_and_keep_only({"loss": 1.0}, min_keys=["loss"]),
}


def every_call_fails(amounts: Amounts, folder: Path) -> Tally:
    """Row 5: the N-th call fails, once or for good, for every N that a save makes."""
    tally = Tally()
    cases = list(product(_WAYS, (errno.EIO, errno.ENOSPC), (False, True)))
    if amounts.quick:
        cases = [("in the background", errno.EIO, False), ("with pruning", errno.ENOSPC, True)]
    for way, number, onwards in cases:
        with new_folder(folder) as place:
            found = in_child(partial(_fail_each, way, number, onwards, place))
        tally.runs += found["runs"]
        tally.counts.update(found["counts"])
        tally.counts.update({"the older one lost": 0, "torn": 0})
        label = f"{errno.errorcode[number]}, {'from then on' if onwards else 'once'}, {way}"
        tally.failures += [f"{label}: {text}" for text in found["failures"]]
    return tally


def _fail_each(way: str, number: int, onwards: bool, place: Path) -> dict[str, Any]:
    counts: dict[str, int] = {"error told": 0, "saved all the same": 0}
    failures: list[str] = []

    def fail(nth: int, calls: FailingCalls, text: object) -> None:
        failures.append(f"call {nth} ({', '.join(calls.failed[:1])}): {text}")

    nth = 0
    while True:
        nth += 1
        folder = place / str(nth)
        held = {"one": _Holder(1), "two": _Holder(1)}
        checkpointer = Checkpointer(folder, held)
        checkpointer.save_checkpoint({"loss": 2.0})
        for holder in held.values():
            holder.value = 2
        error: BaseException | None = None
        with FailingCalls(nth, number, onwards) as calls:
            try:
                _WAYS[way](checkpointer)
            except BaseException as raised:
                error = raised
        if not calls.failed:
            break
        counts["error told" if error is not None else "saved all the same"] += 1
        if error is not None and not isinstance(error, CheckpointError):
            fail(nth, calls, f"{type(error).__name__} instead of a CheckpointError: {error}")
        good, torn = checkpoints_in(folder)
        if torn:
            counts["torn"] = counts.get("torn", 0) + 1
            fail(nth, calls, f"torn {torn}")
        if "CKPT+000001" not in good and (error is not None or "CKPT+000002" not in good):
            counts["the older one lost"] = counts.get("the older one lost", 0) + 1
            fail(nth, calls, "the older one is lost")
        try:
            again = {"one": _Holder(0), "two": _Holder(0)}
            found = Checkpointer(folder, again).recover_if_possible()
            values = {holder.value for holder in again.values()}
            if found is None or values != {found.number} or (error is None and found.number != 2):
                fail(nth, calls, f"loaded {found}, with {values}")
            after = checkpointer.save_checkpoint({"loss": 0.0})
            if after.path.name not in checkpoints_in(folder)[0]:
                fail(nth, calls, "the save after it is not whole")
        except Exception as raised:
            fail(nth, calls, f"afterwards {type(raised).__name__}: {raised}")
        shutil.rmtree(folder)
    return {"runs": nth - 1, "counts": counts, "failures": failures}


# ---------------------------------------------------------------------- row 6: the order on the way to the disk

_CALL = re.compile(r"^\d+\s+(?P<name>\w+)\((?P<rest>.*)\)\s+= (?P<result>-?\d+)")
_RESUMED = re.compile(r"^(?P<pid>\d+)\s+<\.\.\. (?P<name>\w+) resumed>(?P<rest>.*)$")
_BEGUN = re.compile(r"^(?P<pid>\d+)\s+(?P<rest>.*) <unfinished \.\.\.>$")
_DESCRIPTOR = re.compile(r"^\d+<(?P<path>[^>]*)>")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')


def save_under_trace(folder: str) -> None:
    """What the traced process does: three saves in the foreground and three in the background, with pruning."""
    checkpointer = Checkpointer(folder, {"one": _Holder(1), "two": _Holder(1)})
    for _ in range(3):
        checkpointer.save_and_keep_only({"loss": 1.0}, num_to_keep=1)
    for _ in range(3):
        checkpointer.start_saving({"loss": 1.0}, then=checkpointer.prune)
    checkpointer.wait()


def order_of_calls(amounts: Amounts, folder: Path) -> Tally:
    """Row 6: what reaches the disk before what, as strace sees it."""
    tally = Tally()
    if shutil.which("strace") is None:
        tally.not_run = "no strace"
        return tally
    with new_folder(folder) as place:
        save, trace = place / "save", place / "trace"
        code = f"import fault_disk; fault_disk.save_under_trace({str(save)!r})"
        kinds = "trace=openat,fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,rmdir,mkdir,mkdirat,write"
        command = ["strace", "-f", "-y", "-s", "4096", "-e", kinds, "-o", str(trace), sys.executable, "-c", code]
        path = os.pathsep.join([str(Path(__file__).parent), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
        if done.returncode != 0:
            tally.not_run = f"strace failed: {done.stderr.strip().splitlines()[-1:]}"
            return tally
        _check_order(tally, save, _calls(trace.read_text(errors="replace")))
    return tally


def _calls(trace: str) -> Iterator[tuple[str, str, str]]:
    """(name, path, second path) of every call that succeeded, in the order in which they ended."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        if match := _BEGUN.match(line):
            begun[match["pid"]] = match["rest"]
            continue
        if match := _RESUMED.match(line):
            line = f"{match['pid']} {begun.pop(match['pid'], '')}{match['rest']}"
        match = _CALL.match(line)
        if match is None or int(match["result"]) < 0:
            continue
        rest = match["rest"]
        if match["name"] in ("fsync", "fdatasync", "write"):
            found = _DESCRIPTOR.match(rest)
            yield match["name"], found["path"] if found else "", ""
        else:
            base = _DESCRIPTOR.match(rest)
            paths = [*_QUOTED.findall(rest), ""]
            if base and not paths[0].startswith("/"):
                paths[0] = f"{base['path']}/{paths[0]}"
            kind = "create" if match["name"] == "openat" and "O_CREAT" in rest else match["name"]
            yield kind, paths[0], paths[1]


def _check_order(tally: Tally, save: Path, calls: Iterator[tuple[str, str, str]]) -> None:
    """Replay the calls: what would a power loss before each rename, and before each deletion, leave?"""
    on_disk: dict[str, bool] = {}  # file or folder -> whether all that was written to it was synced
    committed: list[str] = []  # finished checkpoints whose name has reached the disk
    pending: str | None = None  # one whose name has not
    files = 0
    for name, path, other in calls:
        if not path.startswith(str(save)):
            continue
        parent = str(Path(path).parent)
        if name in ("create", "write"):
            on_disk[path] = False
            if name == "create":
                on_disk[parent] = False
        elif name in ("fsync", "fdatasync"):
            on_disk[path] = True
            if path == str(save) and pending is not None:
                committed.append(pending)
                pending = None
        elif name.startswith("rename") and Path(other).name.startswith("CKPT+"):
            inside = {it: done for it, done in on_disk.items() if it == path or it.startswith(f"{path}/")}
            tally.runs += 1
            tally.add("renames", 1)
            files += len(inside)
            # Three files and the manifest, and the folder itself.
            tally.expect(len(inside) == 5, "unexpected files", sorted(inside))
            early = sorted(it for it, done in inside.items() if not done)
            tally.add("renames before fsync", int(bool(early)))
            tally.expect(not early, "renamed before it was synced", early)
            tally.expect(pending is None, "the parent was not synced after a rename", pending)
            pending = Path(other).name
            for it in inside:
                del on_disk[it]
        elif name.startswith("rename") and Path(path).name.startswith("CKPT+"):
            tally.add("deletions", 1)
            tally.add("deletions before commit", int(pending is not None or not committed))
            tally.expect(
                pending is None and Path(path).name in committed[:-1],
                "deleted before a newer one was committed",
                f"{path}, committed {committed}, pending {pending}",
            )
    tally.expect(tally.counts["renames"] == 6, "expected 6 saves in the trace", tally.counts["renames"])
    tally.expect(tally.counts["deletions"] == 5, "expected 5 deletions in the trace", tally.counts["deletions"])
    tally.expect(pending is None, "the last rename did not reach the disk", pending)
    tally.add("files and folders synced before their rename", files)


# ---------------------------------------------------------------------- row 7: no room

_FULL = re.compile(
    # In the background step 6 is told in the log; the next save, of step 10, tries again, and ends the run.
    r"Checkpoint CKPT\+\d+ \(step (?:6|10)\) was not written: the disk is full "
    r"\(needs [\d.]+ (?:bytes|[kMG]B), free [\d.]+ (?:bytes|[kMG]B)\)\. "
    r"CKPT\+\d+ \(step 4\).* is intact\."
)


def disk_full(amounts: Amounts, folder: Path) -> Tally:
    """Row 7: the disk fills up between two saves; found out before the save, or in the middle of it."""
    tally = Tally()
    run = Run(None, width=LARGE, options={"ckpt_interval_steps": 4})
    whole = reference(run, folder)
    with new_folder(folder) as mount, small_file_system(mount, 24_000) as mounted:
        tally.note = "A tmpfs of 24 MB." if mounted else "No permission to mount: write and disk_usage say it is full."
        for background in (True, False):
            for foreseen in (True, False):
                with new_folder(mount) as place:
                    this = replace(run, folder=place / "run").with_options(ckpt_background=background)
                    life = Child(lambda t=this, f=foreseen, m=mounted: _fill_and_train(t, f, m)).end()
                    tally.runs += 1
                    text = life.error[1] if life.error else ""
                    told = life.code == 1 and _FULL.search(text) is not None
                    tally.add("told as it should be", int(told))
                    how = f"{'foreseen' if foreseen else 'met'}, {'background' if background else 'foreground'}"
                    tally.expect(told, how, life.how)
                    tally.expect(f"{life.of('told')}".count("OSError") == 0, how, life.how)
                    with suppress(FileNotFoundError):
                        (place / "ballast").unlink()
                    lives = [life]
                    judge_kill(tally, whole, this, lives)
                    begins = lives[-1].of("train")[:1]
                    right = bool(begins) and begins[0][:2] == [1, 5]
                    tally.add("resumed at step M", int(right))
                    tally.expect(right, how, f"resumed at {begins}, not after step 4")
                    for it in lives:
                        it.bury()
    return tally


def _fill_and_train(run: Run, foreseen: bool, mounted: bool) -> None:
    ballast = run.folder.parent / "ballast"
    full, lies = [False], [False]
    real_usage, real_write = shutil.disk_usage, os.write

    def fill() -> None:
        brains[0].checkpointer.wait()
        full[0] = True
        if mounted:
            with open(ballast, "wb", buffering=0) as file:
                file.write(b"x" * (real_usage(ballast.parent).free - 1_000_000))

    def usage(path: Any) -> Any:
        found = real_usage(path)
        if not mounted and full[0]:
            found = found._replace(free=1_000_000)
        lie, lies[0] = lies[0], False  # only what is asked before the save
        return found._replace(free=10**12) if lie else found

    def write(descriptor: int, content: Any) -> int:
        if full[0] and not mounted and len(content) > 500_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_write(descriptor, content)

    os.write, shutil.disk_usage = write, usage
    triggers = [Trigger("forward", 6, fill)]
    if not foreseen:
        triggers.append(Trigger("save", 2, lambda: lies.__setitem__(0, True)))
    run = replace(run, triggers=triggers)
    report_saves(run)
    brains = [make(run)]
    fit(brains[0])


# ---------------------------------------------------------------------- row 8: no right to write


def read_only_folder(amounts: Amounts, folder: Path) -> Tally:
    """Row 8: an output folder that this user may not write to."""
    tally = Tally()
    if os.geteuid() != 0:
        tally.note = "As this user, in folders without the right to write."
    with new_folder(folder) as place:
        for path in (place, *place.parents):  # mkdtemp's folders are closed to others
            with suppress(OSError):
                if path.stat().st_mode & 0o055 != 0o055 and path.stat().st_uid == os.getuid():
                    path.chmod(path.stat().st_mode | 0o055)
        in_child(lambda: fit(make(Run(place / "finished"))))
        (place / "empty").mkdir()
        for name in ("missing/run", "empty", "finished"):
            target = place / name
            locked = [place, *[it for it in (target, target / "save") if it.exists()]]
            modes = [(it, it.stat().st_mode) for it in locked]
            for it in locked:
                it.chmod(0o555)
            life = Child(lambda target=target: _train_as_nobody(target)).end()
            for it, mode in modes:
                it.chmod(mode)
            tally.runs += 1
            text = life.error[1] if life.error else ""
            told = life.code == 1 and "not writable" in text
            tally.add('"not writable"', int(told))
            tally.expect(told, f"folder '{name}'", life.how)
            tally.expect(not life.of("train"), f"folder '{name}': it trained before it said so")
            tally.expect(life.seconds < amounts.within(5), f"folder '{name}': {life.seconds:.1f} s")
            life.bury()
    return tally


def _train_as_nobody(target: Path) -> None:
    if os.geteuid() == 0:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    train(Run(target))


# ---------------------------------------------------------------------- rows 10 to 12: damage


def _truncated(content: bytes, chance: Any) -> bytes:
    return content[: chance.randrange(len(content) - 1)]


def _flipped(content: bytes, chance: Any) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _zeroed(content: bytes, chance: Any) -> bytes:
    pages = [at for at in range(0, len(content), 4096) if any(content[at : at + 4096])]
    at = chance.choice(pages)
    size = len(content[at : at + 4096])
    return content[:at] + bytes(size) + content[at + size :]


def truncations(amounts: Amounts, folder: Path) -> Tally:
    """Row 10: a file of the newest checkpoint is cut off."""
    return _damage(amounts, folder, _truncated, "truncated")


def flipped_bits(amounts: Amounts, folder: Path) -> Tally:
    """Row 11: a bit in a file of the newest checkpoint is another."""
    return _damage(amounts, folder, _flipped, "with a flipped bit")


def zeroed_pages(amounts: Amounts, folder: Path) -> Tally:
    """Row 11: a page in a file of the newest checkpoint is zeros."""
    return _damage(amounts, folder, _zeroed, "with a zeroed page")


@contextmanager
def _ended_run(folder: Path, width: int = SMALL) -> Iterator[tuple[Path, Any, Child]]:
    """A run that was killed in its second epoch, with two checkpoints; its undisturbed twin; and its process."""
    run = Run(None, width=width, options={"ckpt_interval_steps": 2})
    whole = reference(run, folder)
    with new_folder(folder) as place:
        this = replace(run, folder=place / "run")
        life = _killed_with_two(this)
        yield this.folder, whole, life
        life.bury()


def _killed_with_two(run: Run) -> Child:
    """The run (ckpt_interval_steps=2), killed when two checkpoints lie there, or the third is on its way."""
    life = Child(lambda: train(run))
    # The save after the second epoch's step 4 waits for the one after its step 2, and the first epoch's last one stays.
    life.until(lambda event: event[:3] == ["train", 2, 5])
    return life.kill()


def _damage(amounts: Amounts, folder: Path, damage: Callable[[bytes, Any], bytes], what: str) -> Tally:
    tally, chance = Tally(), amounts.generator(what)
    with _ended_run(folder) as (original, whole, first):
        for number in range(amounts.corrupted):
            with new_folder(folder) as place:
                run = Run(shutil.copytree(original, place / "run"), options={"ckpt_interval_steps": 2})
                newest, older = _two_newest(run.folder / "save")
                files = sorted(newest.iterdir())
                file = files[number % len(files)]
                file.write_bytes(damage(file.read_bytes(), chance))
                life = Child(lambda run=run: train(run)).end()
                tally.runs += 1
                tally.add(what)
                text = life.output
                warned = newest.name in text and file.name in text and "damaged" in text
                tally.add("file named", int(warned))
                tally.expect(warned, f"{file.name} {what}", f"no warning that names it: {text[-800:]}")
                fell_back = f"resuming from {older}" in text
                tally.add("fell back", int(fell_back))
                tally.expect(fell_back, f"{file.name} {what}: did not go on from {older.name}", text[-800:])
                judge_end(tally, whole, [first, life])
                life.bury()
    return tally


def _two_newest(save: Path) -> list[Path]:
    return sorted(save.glob("CKPT+*"), reverse=True)[:2]


def all_bad(amounts: Amounts, folder: Path) -> Tally:
    """Row 12: no checkpoint is usable."""
    tally, chance = Tally(), amounts.generator("all bad")
    with _ended_run(folder) as (original, _, _):
        for number in range(amounts.few(10)):
            with new_folder(folder) as place:
                run = Run(shutil.copytree(original, place / "run"))
                damage = (_truncated, _flipped, _zeroed)[number % 3]
                folders = sorted((run.folder / "save").glob("CKPT+*"))
                for checkpoint in folders:
                    file = chance.choice(sorted(checkpoint.iterdir()))
                    file.write_bytes(damage(file.read_bytes(), chance))
                life = Child(lambda run=run: train(run)).end()
                tally.runs += 1
                refused = life.code == 1 and life.error is not None and life.error[0] == "CheckpointError"
                tally.add("refused", int(refused))
                tally.expect(refused, "not refused", life.how)
                named = refused and all(it.name in life.error[1] for it in folders)
                tally.expect(named, "not each is named", life.how)
                tally.expect(not life.of("train"), "it trained")
                life.bury()
    return tally


# ---------------------------------------------------------------------- row 26: parameters that are NaN


def nan_parameters(amounts: Amounts, folder: Path) -> Tally:
    """Row 26: a parameter is NaN when a checkpoint is due, at the end of an epoch and inside one."""
    tally = Tally()
    whole = reference(Run(None), folder)
    for inside in (False, True):
        for background in (False, True):
            with new_folder(folder) as place:
                # A step that is taken again, to find where its NaN was born, would report its batches once more.
                options = {"ckpt_background": background, "ckpt_interval_steps": 4 if inside else 0}
                run = Run(place, options={**options, "locate_nonfinite": False})
                life = Child(lambda run=run, inside=inside: _break_weights(run, inside)).end()
                tally.runs += 1
                text = life.error[1] if life.error else ""
                refused = life.code == 1 and "model.0.weight" in text and "is intact" in text
                tally.add("refused", int(refused))
                tally.expect(refused, "a checkpoint with a NaN weight was not refused", life.how)
                # In the background batches may see the NaN before the error comes.
                life.events = [it for it in life.events if it[0] not in ("train", "valid") or it[4] != "nan"]
                lives = [life]
                judge_kill(tally, whole, run, lives)
                for it in lives:
                    it.bury()
    return tally


def _break_weights(run: Run, inside: bool) -> None:
    def poison() -> None:
        with torch.no_grad():
            brain.modules.model[0].weight[0, 0] = torch.nan

    def at_the_end(_: Any, epoch: int) -> None:
        if epoch == 2 and not inside:
            poison()

    # After the last update before the save, so that no batch sees it.
    triggers = [Trigger("between steps", 10, poison)] if inside else []
    run = replace(run, triggers=triggers, on_epoch_end=at_the_end)
    report_saves(run)
    brain = make(run)
    fit(brain)


# ---------------------------------------------------------------------- row 40: made to harm


class _Canary:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def _sealed(checkpoint: Path) -> None:
    """Write a manifest that fits what lies there now: whoever forges a file can forge that too."""
    files = [path for path in sorted(checkpoint.iterdir()) if path.name != "MANIFEST.sha256" and path.is_file()]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (checkpoint / "MANIFEST.sha256").write_text("".join(lines))


def _safetensors(header: Any, tail: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + tail


def _document(node: Any, **tensors: Any) -> bytes:
    text = node if isinstance(node, str) else json.dumps(node)
    return _safetensors({"__metadata__": {"format": "pt", "amp_recipes": text}, **tensors}, bytes(64))


def _meta(checkpoint: Path, **changed: Any) -> None:
    path = checkpoint / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def _attacks(canary: Path) -> dict[str, Callable[[Path], object]]:
    """Name -> what it does to a checkpoint folder (whose manifest is made to fit afterwards)."""
    pickled = pickle.dumps({"weight": _Canary(canary)})
    buffer = io.BytesIO()
    torch.save({"weight": _Canary(canary)}, buffer)
    saved = buffer.getvalue()
    four = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    files: dict[str, bytes] = {
        "a pickle": pickled,
        "a torch.save file": saved,
        "an empty file": b"",
        "a header of 2^63 bytes": _safetensors({}, size=1 << 63),
        "a header longer than the file": _safetensors({}, size=90_000_000),
        "a header that is no JSON": _safetensors(b"\x80\x04" + pickled),
        "a header that is a list": _safetensors([1, 2]),
        "no metadata": _safetensors({"x": four}, bytes(16)),
        "a tensor of 2^60 elements": _document({"$tensor": "x"}, x={**four, "shape": [1 << 60]}),
        "tensors that overlap": _document({}, x=four, y=four),
        "negative offsets": _document({}, x={**four, "data_offsets": [-16, 0]}),
        "a pickle as text": _document(json.dumps(pickled.decode("latin1"))),
        "metadata of another type": _document("[1, 2, {}]"),
        "metadata that is no JSON": _document("{{{"),
        "an unknown tag": _document({"$eval": "__import__('os').mkdir('x')"}),
        "a tag that names a function": _document({"weight": {"$dtype": "load"}}),
        "a tag that names a private name": _document({"weight": {"$dtype": "__builtins__"}}),
        "a scalar of an object type": _document({"weight": {"$scalar": "x", "dtype": "object"}}),
        "a device that is none": _document({"weight": {"$device": "cuda; rm -rf /"}}),
        "a tensor that is not there": _document({"weight": {"$tensor": "nowhere"}}),
        "a view beyond the memory": _document({"w": {"$tensor": "x", "stride": [1 << 40]}}, x=four),
        "a shape of 2^60": _document({"w": {"$tensor": "x", "dtype": "complex32", "shape": [1 << 60]}}, x=four),
        "100,000 levels": _document("[" * 100_000 + "]" * 100_000),
        "a number of ten million digits": _document("9" * 10_000_000),
        "a hexadecimal of ten million digits": _document({"w": {"$int": "0x" + "f" * 10_000_000}}),
        "NaN where a list is expected": _document({"w": {"$Size": math.nan}}),
        "text of 50 MB": _document({"w": "x" * 50_000_000}),
    }

    def put(content: bytes) -> Callable[[Path], object]:
        return lambda checkpoint: (checkpoint / "modules.safetensors").write_bytes(content)

    def beside(name: str, content: bytes) -> Callable[[Path], object]:
        return lambda checkpoint: (checkpoint / name).write_bytes(content)

    attacks = {f"modules: {name}": put(content) for name, content in files.items()}
    attacks |= {
        f"brain: {name}": (lambda checkpoint, c=files[name]: (checkpoint / "brain.safetensors").write_bytes(c))
        for name in ("a pickle", "an unknown tag", "metadata of another type", "100,000 levels")
    }
    attacks |= {
        f"{name} beside it": beside(name, content)
        for name, content in {
            "modules.pt": saved,
            "modules.ckpt": saved,
            "brain.pkl": pickled,
            "data.pkl": pickled,
            "brain.pt": saved,
            ".metadata": pickled,
            "conftest.py": b"raise SystemExit",
            "meta.pkl": pickled,
        }.items()
    }
    attacks |= {
        "meta: a pickle": lambda checkpoint: (checkpoint / "meta.json").write_bytes(pickled),
        "meta: 100,000 levels": lambda checkpoint: (checkpoint / "meta.json").write_text("[" * 100_000),
        "meta: a list": lambda checkpoint: (checkpoint / "meta.json").write_text("[]"),
        "meta: names that lead elsewhere": lambda checkpoint: _meta(
            checkpoint, recoverables=["../../x", "/etc/passwd"]
        ),
        "meta: names that are numbers": lambda checkpoint: _meta(checkpoint, recoverables=[1, {}, None]),
        "meta: a number of a million digits": lambda checkpoint: (checkpoint / "meta.json").write_text(
            '{"format_version": ' + "9" * 1_000_000 + "}"
        ),
    }
    return attacks


def malicious(amounts: Amounts, folder: Path) -> Tally:
    """Row 40: the newest checkpoint was made to harm, with a manifest that fits; alone, or beside a good one."""
    tally = Tally()
    with _ended_run(folder) as (original, whole, first), new_folder(folder) as canaries:
        for number, (name, attack) in enumerate(_attacks(canaries / "executed").items()):
            if amounts.quick and number % 10:
                continue
            for alone in (False, True):
                with new_folder(folder) as place:
                    run = Run(shutil.copytree(original, place / "run"), options={"ckpt_interval_steps": 2})
                    newest, older = _two_newest(run.folder / "save")
                    if alone:
                        shutil.rmtree(older)
                    attack(newest)
                    _sealed(newest)
                    life = Child(lambda run=run: _train_in_little_memory(run)).end()
                    tally.runs += 1
                    executed = (canaries / "executed").exists()
                    tally.add("executed", int(executed))
                    tally.expect(not executed, f"executed: {name}")
                    if life.code == 0:
                        tally.add("fell back, or unharmed")
                        wrong = differences(whole, [first, life])
                        tally.expect(not wrong, f"{name}: went on to something else", wrong)
                    else:
                        clear = life.error is not None and life.error[0] == "CheckpointError"
                        tally.add("clear error", int(clear))
                        tally.expect(clear, f"{name}{' alone' if alone else ''}", f"{life.how}\n{life.output[-700:]}")
                        tally.expect(not life.of("train"), f"{name}: it trained before it said so")
                    tally.expect(life.seconds < amounts.within(30), f"{name}: took {life.seconds:.0f} s")
                    life.bury()
    tally.add("executed", 0)
    return tally


def _train_in_little_memory(run: Run) -> None:
    # Address space: torch's libraries take several GB of it before anything is allocated.
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30),) * 2)
    train(run)


# ---------------------------------------------------------------------- rows 42, 43: of another kind


def other_model(amounts: Amounts, folder: Path) -> Tally:
    """Row 42: the checkpoint of another model."""
    tally = Tally()
    changes: dict[str, tuple[Callable[[nn.Sequential], object], str]] = {
        "wider": (lambda model: model.__setitem__(4, nn.Linear(16, 17)), r"model\.4\.weight: shape \(17, 16\)"),
        "one layer more": (lambda model: model.append(nn.Linear(1, 1)), r"model\.7\.weight: not in the checkpoint"),
        "one layer fewer": (lambda model: model.__delitem__(-1), r"model\.6\.weight: only in the checkpoint"),
        "no bias": (lambda model: model.__setitem__(0, nn.Linear(8, 16, bias=False)), r"model\.0\.bias: only in"),
        "another norm": (lambda model: model.__setitem__(1, nn.LayerNorm(16)), r"model\.1\.running_mean: only in"),
    }
    with _ended_run(folder) as (original, _, _):
        for name, (change, expected) in changes.items():
            child = Child(lambda change=change: _load_into_another(Run(original), change)).end()
            tally.runs += 1
            unchanged, error, text = child.of("value")[0][0] if child.code == 0 else (False, child.how, child.output)
            listed = error == "CheckpointError" and re.search(expected, text) is not None
            tally.add("keys and shapes listed", int(listed))
            tally.expect(listed, name, f"{error}: {text}")
            tally.add("live weights unchanged", int(unchanged))
            tally.expect(unchanged, f"{name}: the live weights changed")
            child.bury()
    return tally


def _load_into_another(run: Run, change: Callable[[nn.Sequential], object]) -> tuple[bool, str, str]:
    original = make(replace(run, folder=None))
    change(original.modules.model)
    brain = type(original)(
        dict(original.modules),
        original.opt_class,
        vars(original.hparams),
        {**{name: original.run_opts[name] for name in original.run_opts.explicit}, "output_folder": str(run.folder)},
    )
    brain.run = run
    before = {name: value.clone() for name, value in brain.modules.state_dict().items()}
    error = None
    try:
        fit(brain)
    except Exception as raised:
        error = raised
    after = brain.modules.state_dict()
    same = all(torch.equal(before[name], value) for name, value in after.items())
    return same, type(error).__name__, str(error)


def other_formats(amounts: Amounts, folder: Path) -> Tally:
    """Row 43: a checkpoint of another format version: refused by its version, or migrated."""
    tally = Tally()
    with _ended_run(folder) as (original, whole, first):
        for version in (0, 1, 3, 99, -1):
            with new_folder(folder) as place:
                run = Run(shutil.copytree(original, place / "run"))
                _set_version(run.folder / "save", version)
                life = Child(lambda run=run: train(run)).end()
                tally.runs += 1
                text = life.error[1] if life.error else ""
                refused = life.code == 1 and life.error[0] == "CheckpointError" and f"version {version}" in text
                tally.add("refused by version", int(refused))
                tally.expect(refused and not life.of("train"), f"version {version}", life.how)
                life.bury()
        with new_folder(folder) as place:
            run = Run(shutil.copytree(original, place / "run"), options={"ckpt_interval_steps": 2})
            life = Child(lambda: _train_after_migration(run)).end()
            tally.runs += 1
            lives = [first, life]
            migrated = life.of("migrated") != []
            tally.add("migrated", int(migrated))
            tally.expect(migrated, "no migration was asked", life.how)
            judge_end(tally, whole, lives)
            life.bury()
    return tally


def _set_version(save: Path, version: int) -> None:
    for checkpoint in save.glob("CKPT+*"):
        _meta(checkpoint, format_version=version)
        _sealed(checkpoint)


def _train_after_migration(run: Run) -> None:
    """As if the format had moved on by one since the checkpoint was written."""
    old = checkpointer_room.FORMAT_VERSION

    def migrate(states: dict[str, Any]) -> dict[str, Any]:
        report("migrated")
        return states

    checkpointer_room.MIGRATIONS[old] = migrate
    checkpointer_room.FORMAT_VERSION = old + 1
    train(run)


# ---------------------------------------------------------------------- rows 45, 46: clocks and names

_DAY = 86_400


def clock(amounts: Amounts, folder: Path) -> Tally:
    """Row 45: the clock, or the times of the files, are a day off, either way."""
    tally = Tally()
    run = Run(None, options={"ckpt_interval_steps": 2})
    whole = reference(run, folder)
    for shift in (-_DAY, _DAY):
        for of_files in (False, True):
            with new_folder(folder) as place:
                this = replace(run, folder=place)
                life = _killed_with_two(this)
                newest, older = _two_newest(place / "save")
                if of_files:
                    for path, by in ((newest, shift), (older, -shift)):
                        for it in (path, *path.iterdir()):
                            os.utime(it, (time.time() + by,) * 2)
                after = Child(lambda t=this, s=0 if of_files else shift: _train_at(t, s)).end()
                tally.runs += 1
                used = f"resuming from {newest}" in after.output
                tally.add("newest used", int(used))
                tally.expect(used, "another than the newest was used", after.output[-500:])
                judge_end(tally, whole, [life, after])
                good, torn = checkpoints_in(place / "save")
                tally.expect(bool(good) and not torn and max(good) > newest.name, "the newest save was deleted", good)
                life.bury()
                after.bury()
    return tally


def _train_at(run: Run, shift: float) -> None:
    real, real_ns = time.time, time.time_ns
    time.time, time.time_ns = lambda: real() + shift, lambda: real_ns() + int(shift * 1e9)
    train(run)


def names_and_paths(amounts: Amounts, folder: Path) -> Tally:
    """Row 46: folders whose names hold anything, up to the longest: a killed run goes on, or the error is clear."""
    tally = Tally()
    whole = reference(Run(None), folder)
    names = [
        "with spaces in it ",
        "Größe",
        "数据 実験 실험",
        "🙂",
        "'quoted' \"twice\"",
        "-leading $HOME %s {0} *",
        "e\u0301 combining \u202e right to left",
        "line\nfeed\ttab",
        "x" * 255,
        "/".join(["y" * 200] * 15),  # about 3,000 bytes: the system takes up to 4,096
        "z" * 256,
        "/".join(["w" * 200] * 30),  # longer than the system takes
    ]
    for name in names:
        with new_folder(folder) as place:
            this = Run(place / name)
            life = Child(lambda this=this: train(this))
            began = life.until(lambda event: event[0] == "train", 8)
            life.kill()
            tally.runs += 1
            if began:
                tally.add("works")
                lives = [life]
                judge_kill(tally, whole, this, lives)
                lives[-1].bury()
            else:
                clear = life.error is not None and life.error[0] in {it.__name__ for it in _errors(AmpRecipesError)}
                tally.add("clear error", int(clear))
                tally.expect(clear, f"folder {name[:20]!r} of {len(os.fsencode(name))} bytes", life.how)
                tally.expect(len(os.fsencode(name)) > 255, f"folder {name[:20]!r} should work", life.how)
            life.bury()
    return tally


def _errors(kind: type) -> Iterator[type]:
    yield kind
    for it in kind.__subclasses__():
        yield from _errors(it)
