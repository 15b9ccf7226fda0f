"""Makes the default data: phrases spoken by espeak-ng, made once and kept in a folder.

espeak.py speaks them, in its own process.
"""

import hashlib
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from amp_recipes.distributed import main_process_first
from amp_recipes.errors import DataError

MANIFEST = "manifest.jsonl"
SPLIT_NAMES = ("train", "valid", "test")
# Raise it when this file makes other recordings: they get another folder.
CORPUS_VERSION = 1
LEFT_OVER_SECONDS = 3600
# The language decides the phonemes, the variant behind the plus sign the voice; no variant is in two of the lists.
VOICES = {
    "train": (
        *("en-us+m1", "en-us+f1", "en+m2", "en+f2", "en-us+m3", "en-gb-x-rp+f3", "en-us+m5", "en-us+steph"),
        *("en-us+Alex", "en+Alicia", "en-us+Andy", "en-gb-scotland+benjamin", "en-us+belinda", "en-us+robert"),
        *("en-us+john", "en-us+Andrea", "en+gustave", "en-us+max", "en-us+norbert", "en-us+shelby", "en+marcelo"),
        *("en-us+paul", "en-us+grandma", "en-gb-scotland+michel", "en-us+Denis", "en-us+Gene", "en+aunty"),
        *("en-us+klatt3", "en-us+ed", "en-gb-x-rp+Mario", "en-us+rob", "en+anika", "en-us+Lee", "en-us+travis"),
    ),
    "valid": ("en-us+m6", "en-us+f5", "en+david"),
    "test": ("en-us+m7", "en-us+f4", "en+quincy", "en-gb-x-rp+linda"),
}
SPEAKER_SCRIPT = Path(__file__).with_name("espeak.py")


@dataclass(frozen=True)
class Prompt:
    """One recording to make: words per minute and pitch (0 to 99) are espeak-ng's."""

    file: str
    text: str
    voice: str
    split: str
    words_per_minute: int
    pitch: int


def synthesize(
    words: Sequence[str],
    counts: Sequence[int],
    words_per_phrase: Sequence[int],
    folder: str | Path,
    sample_rate: int = 16000,
    data_seed: int = 0,
) -> Path:
    """Return the manifest of phrases of `words`, spoken by voices of which none is in two splits.

    counts: phrases in train, valid and test; no phrase of several words is in two of them.
    words_per_phrase: the fewest and the most. folder: keeps a sub-folder for each list of arguments; what is there
    is used again. sample_rate: in Hz. Two runs may ask for the same at once: each makes it, and one is kept.
    Raises DataError for arguments that nothing can be said from, and where espeak-ng fails.
    """
    prompts = write_prompts(words, counts, words_per_phrase, data_seed)
    made_from = [CORPUS_VERSION, espeak_version(), sample_rate, *map(asdict, prompts)]
    name = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()[:12]
    home = Path(folder).resolve() / name
    with main_process_first(each_machine=True):  # one process of a run makes it; two runs make it twice
        if not (home / MANIFEST).is_file():
            print(f"synthesising {len(prompts)} phrases into {home}", file=sys.stderr)
            make_corpus(prompts, home, sample_rate)
    return home / MANIFEST


def make_corpus(prompts: Sequence[Prompt], home: Path, sample_rate: int) -> None:
    """Have the prompts spoken into the folder `home`, which appears whole or not at all."""
    home.parent.mkdir(parents=True, exist_ok=True)
    remove_left_over(home)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{home.name}.", dir=home.parent))
    try:
        speak_in_child(prompts, unfinished, sample_rate)
        publish(unfinished, home)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def espeak_version() -> str:
    """Return the version of the package with espeak-ng; raises DataError where it is not installed."""
    try:
        return version("espeakng-loader")
    except PackageNotFoundError as error:
        raise DataError(
            "synthetic speech needs a package that is not installed: `pip install espeakng-loader`, or give recordings "
            "with --data_folder or --manifest"
        ) from error


def remove_left_over(home: Path) -> None:
    """Remove unfinished folders of killed processes: those for `home` that nobody has written to for an hour."""
    for folder in home.parent.glob(f".{home.name}.*"):
        # Another process may remove it at the same time.
        with suppress(FileNotFoundError):
            if time.time() - folder.stat().st_mtime > LEFT_OVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def publish(unfinished: Path, home: Path) -> None:
    """Give a finished folder its name, unless another process was faster."""
    try:
        unfinished.rename(home)
    except OSError as error:
        if not (home / MANIFEST).is_file():
            raise DataError(f"'{home}' is there but lacks its {MANIFEST}; remove the folder: {error}") from error


def write_prompts(
    words: Sequence[str], counts: Sequence[int], words_per_phrase: Sequence[int], data_seed: int
) -> list[Prompt]:
    """Return the prompts: the same list for the same arguments on every machine."""
    words = [str(word) for word in words]
    shortest, longest = words_per_phrase
    if not words or len(counts) != 3 or min(counts) < 1 or not 1 <= shortest <= longest:
        raise DataError(
            f"synthetic: {len(words)} words, counts {list(counts)}, words_per_phrase {list(words_per_phrase)}; "
            "expected at least one word, three counts of at least 1, and [fewest, most] with 1 <= fewest <= most"
        )
    draw = random.Random(data_seed)
    prompts, said = [], {}
    for split, count in zip(SPLIT_NAMES, counts, strict=True):
        for index in range(count):
            text = draw_phrase(draw, words, shortest, longest, index, split, said)
            voice = VOICES[split][index % len(VOICES[split])]
            prompts.append(
                Prompt(f"{split}_{index:05d}.flac", text, voice, split, draw.randint(130, 200), draw.randint(30, 70))
            )
    return prompts


def draw_phrase(
    draw: random.Random, words: Sequence[str], shortest: int, longest: int, index: int, split: str, said: dict[str, str]
) -> str:
    """Return a phrase that no other split has; a single word may be in all of them."""
    if longest == 1:
        return words[index % len(words)]
    for _ in range(1000):
        text = " ".join(draw.choice(words) for _ in range(draw.randint(shortest, longest)))
        if " " not in text or said.setdefault(text, split) == split:
            return text
    raise DataError(
        f"synthetic speech: {len(words)} words make too few phrases of {shortest} to {longest} words for disjoint "
        "splits. Give more words, longer phrases, or smaller counts"
    )


def speak_in_child(prompts: Sequence[Prompt], folder: Path, sample_rate: int) -> None:
    """Have a process of its own write the recordings and the manifest into folder."""
    job = json.dumps(
        {
            "folder": str(folder),
            "manifest": MANIFEST,
            "sample_rate": sample_rate,
            "prompts": [asdict(it) for it in prompts],
        }
    )
    finished = subprocess.run([sys.executable, str(SPEAKER_SCRIPT)], input=job, capture_output=True, text=True)
    if finished.returncode:
        reason = finished.stderr.strip().splitlines()[-1:] or [f"exit status {finished.returncode}"]
        raise DataError(
            f"espeak-ng could not make the synthetic speech: {reason[0]}. Give recordings with --data_folder or "
            "--manifest instead, or `pip install --force-reinstall espeakng-loader`"
        )
