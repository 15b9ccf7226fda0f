"""Speaks synthetic phrases, in its own process: reads a job (JSON) from stdin, writes recordings and their manifest.

espeak-ng keeps global state, is not safe in threads, and a crash in it must not take a training along. What it says
depends a little on what it said before, so that a corpus is made by one process, in one order. This file imports
nothing of torch: it starts in a fraction of a second.
"""

import ctypes
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import espeakng_loader
import numpy as np
import soundfile
import soxr

# espeak-ng's numbers for the output mode, the parameters and the position type (speak_lib.h).
AUDIO_OUTPUT_SYNCHRONOUS = 2
RATE, PITCH = 1, 3
POSITION_CHARACTER = 1
CHARACTERS_UTF8 = 1
SHORTEST_SECONDS = 0.1
SEED = 1


class Espeak:
    """espeak-ng's library, loaded: one per process."""

    def __init__(self):
        self.library = ctypes.CDLL(espeakng_loader.get_library_path())
        data_path = espeakng_loader.get_data_path().encode()
        self.sample_rate = self.library.espeak_Initialize(AUDIO_OUTPUT_SYNCHRONOUS, 0, data_path, 0)
        if self.sample_rate <= 0:
            raise RuntimeError(f"espeak_Initialize failed on the voices in {data_path.decode()}")
        # Its voices vary at random; without a seed, they depend on the time of day.
        self.library.espeak_ng_SetRandSeed(ctypes.c_long(SEED))
        self.blocks: list[np.ndarray] = []
        callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
        # Keep a reference: the library calls it as long as it is loaded.
        self.on_samples = callback(self.keep_samples)
        self.library.espeak_SetSynthCallback(self.on_samples)

    def keep_samples(self, samples, count: int, events) -> int:
        """Copy a block that was synthesised; 0 asks for the next one."""
        if samples and count > 0:
            self.blocks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, prompt: dict) -> np.ndarray:
        """Return the recording, int16 (samples,) at `self.sample_rate`."""
        self.blocks.clear()
        if self.library.espeak_SetVoiceByName(prompt["voice"].encode()):
            raise RuntimeError(f"espeak-ng has no voice {prompt['voice']!r}")
        self.library.espeak_SetParameter(RATE, prompt["words_per_minute"], 0)
        self.library.espeak_SetParameter(PITCH, prompt["pitch"], 0)
        text = prompt["text"].encode()
        status = (
            self.library.espeak_Synth(text, len(text) + 1, 0, POSITION_CHARACTER, 0, CHARACTERS_UTF8, None, None)
            or self.library.espeak_Synchronize()
        )
        if status or sum(map(len, self.blocks)) < SHORTEST_SECONDS * self.sample_rate:
            raise RuntimeError(f"espeak-ng said nothing to {prompt['text']!r} in voice {prompt['voice']!r} ({status=})")
        return np.concatenate(self.blocks)


def speak(prompts: Sequence[dict], manifest: Path, sample_rate: int) -> None:
    """Write one FLAC file per prompt and, last, the manifest."""
    espeak = Espeak()
    lines = []
    for prompt in prompts:
        samples = espeak.say(prompt).astype(np.float32) / 2**15
        samples = soxr.resample(samples, espeak.sample_rate, sample_rate)
        soundfile.write(manifest.parent / prompt["file"], samples.clip(-1, 1), sample_rate, subtype="PCM_16")
        entry = {"path": prompt["file"], "duration": round(len(samples) / sample_rate, 4), "text": prompt["text"]}
        lines.append(json.dumps({**entry, "speaker": prompt["voice"], "split": prompt["split"]}))
    manifest.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    job = json.load(sys.stdin)
    speak(job["prompts"], Path(job["folder"], job["manifest"]), job["sample_rate"])
