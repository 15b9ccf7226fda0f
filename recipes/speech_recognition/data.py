"""Loads recordings: synthetic speech, a manifest, or a folder whose file names tell the labels.

A sample is {"wave": float32 (S,) in [-1, 1], "target": int64 (L,)}; a batch has (B, S) and (B, L), padded with zeros,
and num_samples (B,). sample_counts and label_counts are lists, which stay on the host when a batch moves to a device.
In a test of several speakers both have "speaker" too, a name per sample.
Legend of shapes: B batch, S samples, L labels of a target.
"""

import csv
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from synthesis import SPLIT_NAMES, synthesize
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from amp_recipes import needs_extra
from amp_recipes.errors import DataError

with needs_extra("speech"):
    import soundfile
    import soxr

logger = logging.getLogger(__name__)
AUDIO_SUFFIXES = (".flac", ".ogg", ".opus", ".wav")
MANIFEST_SUFFIXES = (".csv", ".json", ".jsonl")
MANIFEST_KEYS = ("path", "duration", "text", "speaker", "split")


@dataclass(frozen=True)
class Recording:
    """One file and what is said in it; where: the line or file that an error names. duration: in seconds."""

    path: Path
    text: str
    where: str
    duration: float
    speaker: str | None = None
    split: str | None = None


@dataclass(frozen=True)
class SpeechSets:
    """The three datasets."""

    train: "Recordings"
    valid: "Recordings"
    test: "Recordings"


class Recordings(Dataset):
    """Samples of recordings, each read when it is asked for, so a dataset may be larger than memory.

    speed_range: bounds of the factor by which a recording is played faster, with its pitch, drawn from torch's global
    generator each time (Ko et al. 2015, "Audio augmentation for speech recognition"); None: as it is.
    tell_speaker: whether a sample tells its speaker.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        targets: Sequence[Sequence[int]],
        sample_rate: int,
        speed_range: Sequence[float] | None = None,
        tell_speaker: bool = False,
    ):
        self.recordings = list(recordings)
        self.targets = [torch.tensor(target, dtype=torch.int64) for target in targets]
        self.sample_rate = sample_rate
        self.speed_range = speed_range
        self.tell_speaker = tell_speaker

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> dict[str, Any]:
        speed = 1.0
        if self.speed_range is not None:
            slowest, fastest = self.speed_range
            speed = slowest + (fastest - slowest) * torch.rand(()).item()
        recording = self.recordings[index]
        wave = read_audio(recording.path, self.sample_rate, speed)
        seconds = len(wave) * speed / self.sample_rate
        # The durations in the list decide the batches, and which recordings are too short for their text.
        if abs(seconds - recording.duration) > 0.05 * recording.duration + 0.05:
            raise DataError(
                f"{recording.where}: lasts {seconds:.2f} s, but its duration is given as {recording.duration:.2f}; "
                "correct it, or leave it out of the list: the file is then asked"
            )
        sample = {"wave": wave, "target": self.targets[index]}
        return {**sample, "speaker": recording.speaker} if self.tell_speaker else sample

    @property
    def durations(self) -> list[float]:
        """Seconds of each recording, before any change of speed."""
        return [recording.duration for recording in self.recordings]


def collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the samples as one batch, padded with zeros behind, and their lengths."""
    batch: dict[str, Any] = {}
    for name, counts in (("wave", "sample_counts"), ("target", "label_counts")):
        values = [sample[name] for sample in samples]
        batch[name] = pad_sequence(values, batch_first=True)
        batch[counts] = [len(value) for value in values]
    batch["num_samples"] = torch.tensor(batch["sample_counts"])
    if "speaker" in samples[0]:
        batch["speaker"] = [sample["speaker"] for sample in samples]
    return batch


def read_audio(path: str | Path, sample_rate: int, speed: float = 1.0) -> torch.Tensor:
    """Return a file as float32 (S,) in [-1, 1]: channels mixed down, resampled, played `speed` times as fast.

    Raises DataError, which names the file, where it cannot be read, is empty or holds a value that is not finite.
    """
    try:
        frames_SC, file_rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise DataError(f"{path}: not readable as audio ({error}); replace or remove the file") from error
    if not np.isfinite(frames_SC).all():
        raise DataError(f"{path}: holds samples that are not finite; replace or remove the file")
    wave_S = frames_SC.mean(axis=1)
    # soxr takes any ratio: playing 1.1 times as fast means to say that the rate of the file is 1.1 times as high.
    wave_S = soxr.resample(wave_S, file_rate * speed, sample_rate)
    if len(wave_S) == 0:
        raise DataError(f"{path}: holds no sound; replace or remove the file")
    return torch.from_numpy(wave_S)


def load_speech(
    objective: Any,
    features: Any,
    model: Any,
    sample_rate: int,
    synthetic: Mapping[str, Any],
    data_folder: str | Path | None = None,
    filename_pattern: str = "{label}_{speaker}_{index}",
    manifest: str | Path | None = None,
    test_speaker: str | int | Sequence[str | int] | None = None,
    valid_speaker: str | int | Sequence[str | int] | None = None,
    split_ratios: Sequence[float] = (0.8, 0.1, 0.1),
    data_seed: int = 0,
    speed_range: Sequence[float] | None = None,
    unfit: str = "refuse",
    extra_synthetic: bool = False,
) -> SpeechSets:
    """Return train, valid and test sets of a manifest, a folder or, without either, of synthetic speech.

    objective: what encodes a text, and tells how many steps it needs; features, model: tell how many there are.
    sample_rate: in Hz; files of other rates are resampled. synthetic: arguments of `synthesis.synthesize`.
    data_folder, filename_pattern: see `list_folder`; manifest: see `read_manifest`.
    test_speaker, valid_speaker, split_ratios, data_seed: see `split_recordings`.
    speed_range: of training, see `Recordings`. extra_synthetic: train on the synthetic speech for training too: voices
    that a few speakers lack; valid and test stay as they are, and without a manifest or folder this changes nothing.
    unfit: what becomes of recordings that have fewer steps than their text needs: "refuse", or "leave_out" (warned
    about; never out of the test, where each counts as an error). Raises DataError for what does not fit all this.
    """
    check_settings(speed_range, unfit, data_folder, manifest)
    if data_folder:
        recordings = list_folder(Path(data_folder), filename_pattern)
    else:
        recordings = read_manifest(Path(manifest or synthesize(**synthetic)))
    test, valid = names_of(test_speaker), names_of(valid_speaker)
    parts = split_recordings(recordings, test, valid, split_ratios, data_seed)
    if extra_synthetic and (data_folder or manifest):
        parts[0] = parts[0] + [it for it in read_manifest(synthesize(**synthetic)) if it.split == "train"]

    def steps_in(seconds: float) -> int:
        return model.num_steps(features.num_frames(int(seconds * sample_rate)))

    sets = []
    for name, part in zip(SPLIT_NAMES, parts, strict=True):
        speeds = speed_range if name == "train" else None
        if name != "test":
            part = keep_fit(part, objective, steps_in, max(speeds or [1.0]), unfit)
        if not part:
            raise DataError(f"the {name} set has no recording; see split_ratios, test_speaker and valid_speaker")
        targets = [objective.encode(recording.text, recording.where) for recording in part]
        sets.append(Recordings(part, targets, sample_rate, speeds, tell_speaker=name == "test" and len(test) > 1))
    return SpeechSets(*sets)


def names_of(speakers: str | int | Sequence[str | int] | None) -> list[str]:
    """Return one speaker, several or none as a list of names; on a command line, 84 is a number."""
    if speakers is None or isinstance(speakers, (str, int)):
        speakers = [] if speakers is None else [speakers]
    return [str(speaker) for speaker in speakers]


def check_settings(speed_range: Sequence[float] | None, unfit: str, data_folder: Any, manifest: Any) -> None:
    """Raise DataError for a setting that no data could satisfy."""
    if speed_range is not None and not (len(speed_range) == 2 and 0.1 <= speed_range[0] <= speed_range[1] <= 10):
        raise DataError(
            f"speed_range is {list(speed_range)}; expected [slowest, fastest] from 0.1 to 10, such as [0.9, 1.1]"
        )
    if unfit not in ("refuse", "leave_out"):
        raise DataError(f"unfit is {unfit!r}; expected 'refuse' or 'leave_out'")
    if data_folder and manifest:
        raise DataError(f"both data_folder {str(data_folder)!r} and manifest {str(manifest)!r} are given; expected one")


def keep_fit(
    recordings: Sequence[Recording], objective: Any, steps_in: Callable[[float], int], fastest: float, unfit: str
) -> list[Recording]:
    """Return the recordings that have enough steps for their text when they are played `fastest` times as fast.

    steps_in: the network's steps in so many seconds. For others warn, or raise DataError, as `unfit` says.
    """
    kept, reasons = [], []
    for it in recordings:
        steps = steps_in(it.duration / fastest)
        needed = objective.steps_needed(objective.encode(it.text, it.where))
        if needed <= steps:
            kept.append(it)
        else:
            seconds = f"{it.duration:.2f} s" if fastest == 1 else f"{it.duration:.2f} s at {fastest:g} times the speed"
            reasons.append(f"{it.where}: {seconds} are {steps} steps of the network, {it.text!r} needs {needed}")
    if reasons:
        listed = "\n  ".join([*reasons[:5], *(["..."] if len(reasons) > 5 else [])])
        found = f"{len(reasons)} of {len(recordings)} recordings are too short for their text:\n  {listed}"
        if unfit == "refuse":
            raise DataError(
                f"{found}\nCorrect the texts, leave the recordings out (--unfit=leave_out), or have more steps per "
                "second (--model.front.time_strides='[1, 1]', --features.hop_ms=5)"
            )
        logger.warning("left out: %s", found)
    return kept


def list_folder(folder: Path, filename_pattern: str) -> list[Recording]:
    """Return the audio files at any depth below folder, sorted; their names tell label and speaker.

    filename_pattern: what a path below the folder looks like, without its ending: {label}, {speaker} (which may be
    absent) and any other name in braces stand for one or more characters, "{label}/{speaker}_nohash_{index}" for one.
    Raises DataError for a folder that is none, and names files that do not fit.
    """
    if not folder.is_dir():
        raise DataError(f"data_folder '{folder}' is not a folder; expected one of audio files, or use --manifest")
    pattern = compile_pattern(filename_pattern)
    files = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in AUDIO_SUFFIXES
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not files:
        raise DataError(f"no recording in '{folder}'; expected files that end in {', '.join(AUDIO_SUFFIXES)}")
    recordings = []
    for path in files:
        name = path.relative_to(folder).with_suffix("").as_posix()
        found = pattern.fullmatch(name)
        if found is None:
            raise DataError(
                f"{path}: {name!r} does not fit filename_pattern {filename_pattern!r}; give another pattern"
            )
        fields = found.groupdict()
        recordings.append(
            Recording(path, fields["label"], str(path), measure_duration(path), speaker=fields.get("speaker"))
        )
    return recordings


def compile_pattern(filename_pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern with names in braces; raises DataError where {label} is not in it."""
    parts = re.split(r"\{(\w+)\}", filename_pattern)
    names = parts[1::2]
    if names.count("label") != 1 or len(set(names)) < len(names):
        raise DataError(f"filename_pattern {filename_pattern!r}: expected {{label}}, and each name in braces once")
    parts[::2] = map(re.escape, parts[::2])
    parts[1::2] = [f"(?P<{name}>[^/]+?)" for name in names]
    return re.compile("".join(parts))


def read_manifest(manifest: Path) -> list[Recording]:
    """Return the recordings that a CSV file with a header, or a file of one JSON object a line, lists.

    Columns or keys: path (relative to the manifest's folder) and text; may be absent: duration (seconds; else the
    file's header is read), speaker, and split (train, valid or test). Others are ignored.
    Raises DataError, which tells the line, for what is missing or has not this form.
    """
    recordings = []
    for number, entry in read_entries(manifest):
        where = f"{manifest}:{number}"
        absent = [key for key in ("path", "text") if not isinstance(entry.get(key), str)]
        if absent:
            raise DataError(
                f"{where}: lacks {' and '.join(absent)} (text); expected the keys {', '.join(MANIFEST_KEYS)}"
            )
        split = entry.get("split") or None
        if split not in (None, *SPLIT_NAMES):
            raise DataError(f"{where}: split is {split!r}; expected one of {', '.join(SPLIT_NAMES)}")
        path = manifest.parent / entry["path"]
        duration = entry.get("duration")
        seconds = measure_duration(path) if duration in (None, "") else read_duration(duration, where)
        speaker = None if entry.get("speaker") in (None, "") else str(entry["speaker"])
        recordings.append(Recording(path, entry["text"], f"{where} ({path})", seconds, speaker, split))
    if not recordings:
        raise DataError(f"{manifest}: lists no recording")
    return recordings


def read_entries(manifest: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return (line number, keys and values) of each entry of a manifest."""
    if manifest.suffix.lower() not in MANIFEST_SUFFIXES:
        raise DataError(f"manifest '{manifest}': expected a file that ends in {', '.join(MANIFEST_SUFFIXES)}")
    try:
        with open(manifest, encoding="utf-8-sig", newline="") as lines:
            if manifest.suffix.lower() == ".csv":
                reader = csv.DictReader(lines)
                return [(reader.line_num, entry) for entry in reader]
            numbered = [(number, json.loads(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    except json.JSONDecodeError as error:
        raise DataError(f"{manifest}: is not one JSON object a line: {error}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"manifest '{manifest}' cannot be read: {error}") from error
    for number, entry in numbered:
        if not isinstance(entry, dict):
            raise DataError(f"{manifest}:{number}: is not a JSON object; expected {{'path': ..., 'text': ...}}")
    return numbered


def read_duration(duration: Any, where: str) -> float:
    """Return an entry's duration in seconds, or raise DataError."""
    try:
        seconds = float(duration)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise DataError(f"{where}: duration is {duration!r}; expected seconds, more than 0")
    return seconds


def measure_duration(path: Path) -> float:
    """Return the seconds that a file's header tells; raises DataError, which names it, for none or an empty one."""
    try:
        seconds = soundfile.info(path).duration
    except (OSError, soundfile.SoundFileError) as error:
        raise DataError(f"{path}: not readable as audio ({error}); replace or remove the file") from error
    if seconds <= 0:
        raise DataError(f"{path}: holds no sound; replace or remove the file")
    return seconds


def split_recordings(
    recordings: Sequence[Recording],
    test_speakers: Sequence[str],
    valid_speakers: Sequence[str],
    split_ratios: Sequence[float],
    data_seed: int,
) -> list[list[Recording]]:
    """Return train, valid and test: as the manifest says, or by speaker, or at random.

    test_speakers, valid_speakers: all of their recordings are test or valid; the others are split at random by
    split_ratios (shares of train, valid, test) among the sets that are left, by data_seed always in the same way.
    Raises DataError for a speaker whom nobody is, a manifest that splits only some, or both.
    """
    in_manifest = [recording.split is not None for recording in recordings]
    if any(in_manifest):
        if not all(in_manifest):
            without = recordings[in_manifest.index(False)].where
            raise DataError(
                f"{without}: has no split, but others have; expected a split for all recordings or for none"
            )
        if test_speakers or valid_speakers:
            raise DataError("test_speaker or valid_speaker is given, but the manifest splits; take its split out")
        return [[it for it in recordings if it.split == name] for name in SPLIT_NAMES]
    if len(split_ratios) != 3 or min(split_ratios) < 0 or not math.isclose(sum(split_ratios), 1.0, abs_tol=1e-6):
        raise DataError(f"split_ratios is {list(split_ratios)}; expected shares of train, valid and test with sum 1")
    speakers = sorted({it.speaker for it in recordings if it.speaker is not None})
    known = ", ".join(speakers) or "not known"
    for name, given in (("test_speaker", test_speakers), ("valid_speaker", valid_speakers)):
        for speaker in given:
            if speaker not in speakers:
                raise DataError(f"{name} {speaker!r} is nobody here; the speakers are {known}")
    if both := sorted(set(test_speakers) & set(valid_speakers)):
        raise DataError(f"test_speaker and valid_speaker are both {both[0]!r}; expected different ones of {known}")
    parts: list[list[Recording]] = [
        [],
        [it for it in recordings if it.speaker in valid_speakers],
        [it for it in recordings if it.speaker in test_speakers],
    ]
    others = [it for it in recordings if it.speaker not in (*test_speakers, *valid_speakers)]
    shares = [ratio if not part else 0.0 for ratio, part in zip(split_ratios, parts, strict=True)]
    for part, drawn in zip(parts, draw_shares(others, shares, data_seed), strict=True):
        part.extend(drawn)
    return parts


def draw_shares(recordings: Sequence[Recording], shares: Sequence[float], data_seed: int) -> list[list[Recording]]:
    """Return the recordings divided by the shares, each part in its old order."""
    generator = torch.Generator().manual_seed(data_seed)
    order = torch.randperm(len(recordings), generator=generator)
    ends = (torch.tensor(shares, dtype=torch.float64).cumsum(0) / sum(shares) * len(recordings)).round().int().tolist()
    starts = [0, *ends[:-1]]
    return [
        [recordings[index] for index in sorted(order[start:end].tolist())]
        for start, end in zip(starts, ends, strict=True)
    ]
