"""The speech recognition recipe: its data, features, networks, objectives, and the scripts as a user runs them."""

import importlib.metadata
import itertools
import json
import math
import os
import re
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from recipe_runs import CONFIGS, recipe_modules, run_script, stage_records

from amp_recipes import load_trained
from amp_recipes.errors import ConfigError, DataError

CTC = CONFIGS / "speech_recognition.yaml"
KEYWORDS = CONFIGS / "keyword_classification.yaml"
SMALL = ("--width=16", "--model.front.channels=[4, 4]", "--model.encoder.layers=1", "--noprogressbar")
RATE = 8000


@pytest.fixture(scope="module")
def recipe():
    """The recipe's modules."""
    with recipe_modules("speech_recognition") as modules:
        yield modules


@pytest.fixture(scope="module")
def spoken(recipe, tmp_path_factory):
    """A folder with the synthetic speech of these tests, so that it is made once."""
    return tmp_path_factory.mktemp("synthetic")


@pytest.fixture(scope="module")
def keyword_options(spoken):
    """Three keywords, few recordings, a small network."""
    return [
        *("--model.channels=[8, 16]", "--noprogressbar", f"--synthetic.folder={spoken}"),
        *("--synthetic.counts=[60, 9, 12]", "--batches.max_total_length=5"),
        *("--objective.labels=[3, 6, 8]", "--lr=0.01"),
    ]


@pytest.fixture(scope="module")
def ctc_options(spoken):
    """Phrases of two words that share no character, a small network."""
    return [
        *(*SMALL, f"--synthetic.folder={spoken}", "--synthetic.counts=[20, 4, 4]", "--synthetic.words=[go, six]"),
        *(
            "--sample_rate=8000",
            "--batches.max_total_length=6",
            "--number_of_epochs=1",
            "--synthetic.words_per_phrase=[1, 5]",
        ),
    ]


def tone(seconds: float, hertz: float = 440.0, rate: int = RATE) -> np.ndarray:
    """A sine of amplitude 0.5, float32."""
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def save_tones(folder: Path, names: list[str], seconds: float = 0.5) -> Path:
    """Write one tone per name; folders in the names are made."""
    for index, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(folder / name, tone(seconds, 300 + 50 * index), RATE)
    return folder


def load(recipe, objective=None, **settings):
    """`load_speech` with this recipe's features and network."""
    return recipe.data.load_speech(
        objective or recipe.objectives.CharacterCTC("abcdefghij "),
        recipe.features.LogMel(RATE),
        recipe.model.SpeechModel(recipe.model.ConvolutionalFront(40, 8, (2, 2)), torch.nn.Identity(), 8, 12),
        RATE,
        {},
        **settings,
    )


# --- the scripts


def test_scripts_run_from_the_shell_as_the_readme_says(tmp_path, ctc_options):
    run = tmp_path / "run"
    # In bf16 also where a CPU has no LSTM for it: the YAML pins the LSTM.
    run_script("speech_recognition", CTC, "--precision", "bf16", *ctc_options, f"--output_folder={run}", cwd=tmp_path)
    assert [record["stage"] for record in stage_records(run)] == ["train", "valid", "test"]
    files = [tmp_path / "a.wav", tmp_path / "b.flac"]
    for file in files:
        soundfile.write(file, tone(0.5), RATE)
    picture = tmp_path / "picture.png"
    words = [run, *files, "--precision=bf16", "--beam_size=4"]
    finished = run_script("speech_recognition", *words, script="predict.py", cwd=tmp_path)
    assert [line.split("\t")[0] for line in finished.stdout.splitlines()] == list(map(str, files))
    run_script("speech_recognition", run, files[0], picture, script="draw.py", cwd=tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_keywords_train_a_few_steps(recipe, keyword_options, tmp_path):
    few = ["--number_of_epochs=1", "--synthetic.counts=[12, 3, 3]"]
    recipe.train.main([str(KEYWORDS), *keyword_options, *few, f"--output_folder={tmp_path}"])
    assert [record["stage"] for record in stage_records(tmp_path)] == ["train", "valid", "test"]
    assert all(math.isfinite(record["loss"]) for record in stage_records(tmp_path))


@pytest.mark.extended
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_short_run_tells_keywords_apart(recipe, keyword_options, tmp_path, precision):
    options = [*keyword_options, f"--precision={precision}", "--number_of_epochs=20", f"--output_folder={tmp_path}"]
    recipe.train.main([str(KEYWORDS), *options])
    tested = stage_records(tmp_path)[-1]
    assert tested["stage"] == "test"
    # Chance is 1/3; the twelve recordings are of voices that training did not hear.
    assert tested["metrics"]["accuracy"] > 0.6


@pytest.mark.parametrize("encoder", ["gru", "conformer"])
def test_other_encoders_train_at_each_precision(recipe, ctc_options, tmp_path, encoder):
    text = CTC.read_text()
    if encoder == "gru":
        text = text.replace("kind: lstm", "kind: gru").replace('["type:LSTM"]', "[]")
    else:
        # With torch 2.13 on a CPU with avx512_fp16, an fp16 depthwise convolution of 16 channels never returns.
        text = text.replace("    kind: lstm", "    heads: 2").replace("type:LSTM", "type:Conv1d")
        text = text.replace("model.RecurrentEncoder", "model.ConformerEncoder")
    settings = tmp_path / "settings.yaml"
    settings.write_text(text)
    for precision in ("fp32", "bf16", "fp16"):
        folder = tmp_path / precision
        recipe.train.main([str(settings), *ctc_options, f"--precision={precision}", f"--output_folder={folder}"])
        assert [record["stage"] for record in stage_records(folder)] == ["train", "valid", "test"]
        assert all(math.isfinite(record["loss"]) for record in stage_records(folder))


def test_reported_errors_are_those_of_the_best_weights_over_the_whole_set(recipe, ctc_options, tmp_path):
    options = [*ctc_options, "--number_of_epochs=2", f"--output_folder={tmp_path}"]
    recipe.train.main([str(CTC), *options])
    brain = load_trained(tmp_path, trust=("features", "model", "objectives", "data"))
    manifest = next(
        path for path in Path(ctc_options[4].split("=")[1]).glob("*/manifest.jsonl") if "go" in path.read_text()
    )
    entries = [json.loads(line) for line in manifest.read_text().splitlines()]
    references = [entry["text"] for entry in entries if entry["split"] == "test"]
    hypotheses = [
        recipe.predict.transcribe(brain, manifest.parent / it["path"]) for it in entries if it["split"] == "test"
    ]
    errors = sum(map(edit_distance, references, hypotheses))
    expected = errors / sum(map(len, references))
    assert stage_records(tmp_path)[-1]["metrics"]["CER"] == pytest.approx(expected)


def test_predict_explains_a_folder_that_is_no_run(recipe, tmp_path, capsys):
    with pytest.raises(SystemExit):
        recipe.predict.main([str(tmp_path), "a.wav"])
    assert "has no hyperparams.yaml" in capsys.readouterr().err


def edit_distance(reference: str, hypothesis: str) -> int:
    """Levenshtein's distance, by its recurrence."""
    row = list(range(len(hypothesis) + 1))
    for i, a in enumerate(reference, start=1):
        before, row[0] = row[0], i
        for j, b in enumerate(hypothesis, start=1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


# --- the synthetic speech


def test_synthetic_speech_repeats_and_is_kept(recipe, tmp_path):
    arguments = {"words": ["go", "stop"], "counts": [6, 2, 3], "words_per_phrase": [1, 5], "sample_rate": RATE}
    first = recipe.synthesis.synthesize(folder=tmp_path / "a", **arguments)
    second = recipe.synthesis.synthesize(folder=tmp_path / "b", **arguments)
    assert first.parent.name == second.parent.name
    files = sorted(path.name for path in first.parent.iterdir())
    assert len(files) == 12
    for name in files:
        assert (first.parent / name).read_bytes() == (second.parent / name).read_bytes()
    written = first.stat().st_mtime_ns
    assert recipe.synthesis.synthesize(folder=tmp_path / "a", **arguments) == first
    assert first.stat().st_mtime_ns == written
    other = recipe.synthesis.synthesize(folder=tmp_path / "a", **{**arguments, "data_seed": 1})
    assert other.parent != first.parent


def test_no_voice_and_no_phrase_is_in_two_splits(recipe):
    prompts = recipe.synthesis.write_prompts(["a", "b", "c", "d", "e"], [200, 40, 40], [1, 5], data_seed=0)
    for field in ("voice", "text"):
        values = [
            {getattr(it, field) for it in prompts if it.split == split and (field == "voice" or " " in it.text)}
            for split in ("train", "valid", "test")
        ]
        assert all(values)
        assert not (values[0] & values[1] or values[0] & values[2] or values[1] & values[2])
    variants = [{voice.split("+")[1] for voice in voices} for voices in recipe.synthesis.VOICES.values()]
    assert sum(map(len, variants)) == len(set().union(*variants))


def test_processes_that_make_the_same_speech_at_once_do_not_meet(recipe, tmp_path):
    arguments = {"words": ["up", "down"], "counts": [4, 1, 1], "words_per_phrase": [1, 1], "sample_rate": RATE}
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(recipe.synthesis.synthesize(folder=tmp_path, **arguments)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 3 and len(set(made)) == 1
    assert [path.name for path in tmp_path.iterdir()] == [made[0].parent.name]


def test_missing_espeak_is_told(recipe, tmp_path, monkeypatch):
    def version(name: str):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(recipe.synthesis, "version", version)
    with pytest.raises(DataError, match="pip install espeakng-loader"):
        recipe.synthesis.synthesize(["go"], [1, 1, 1], [1, 1], tmp_path)


def test_failing_synthesis_is_told_and_leaves_nothing(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(recipe.synthesis.VOICES, "valid", ("en-us+m6", "xx-nobody"))
    with pytest.raises(DataError, match="no voice 'xx-nobody'"):
        recipe.synthesis.synthesize(["go"], [1, 2, 1], [1, 1], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_processes_left_is_removed_and_what_runs_is_not(recipe, tmp_path):
    arguments = {"words": ["go"], "counts": [1, 1, 1], "words_per_phrase": [1, 1], "sample_rate": RATE}
    home = recipe.synthesis.synthesize(folder=tmp_path, **arguments).parent
    shutil.rmtree(home)
    old, running = tmp_path / f".{home.name}.old", tmp_path / f".{home.name}.new"
    for folder in (old, running):
        folder.mkdir()
        (folder / "train_00000.flac").write_bytes(b"half")
    os.utime(old, (0, 0))
    recipe.synthesis.synthesize(folder=tmp_path, **arguments)
    assert {path.name for path in tmp_path.iterdir()} == {home.name, running.name}
    (home / "manifest.jsonl").unlink()
    with pytest.raises(DataError, match="lacks its manifest"):
        recipe.synthesis.synthesize(folder=tmp_path, **arguments)


def test_impossible_synthesis_is_refused(recipe):
    for arguments in (
        *(([], [1, 1, 1], [1, 1]), (["a"], [1, 1], [1, 1])),
        *((["a"], [1, 0, 1], [1, 1]), (["a"], [1, 1, 1], [2, 1])),
    ):
        with pytest.raises(DataError, match="synthetic: "):
            recipe.synthesis.write_prompts(*arguments, data_seed=0)


def test_too_few_words_for_disjoint_phrases_are_refused(recipe):
    with pytest.raises(DataError, match="too few phrases"):
        recipe.synthesis.write_prompts(["a"], [5, 5, 5], [2, 2], data_seed=0)


# --- reading


def test_channels_are_mixed_down_and_rates_changed(recipe, tmp_path):
    left, right = tone(1.0, 440, 16000), tone(1.0, 880, 16000)
    for suffix in (".wav", ".flac", ".ogg"):
        soundfile.write(tmp_path / f"stereo{suffix}", np.stack((left, right), axis=1), 16000)
        wave = recipe.data.read_audio(tmp_path / f"stereo{suffix}", RATE)
        assert wave.shape == (RATE,) and wave.dtype == torch.float32
        amplitudes = torch.fft.rfft(wave[1000:5000].double()).abs() / 2000
        peaks = amplitudes.topk(2).indices.sort().values * RATE / 4000
        assert peaks.tolist() == [440, 880]
        torch.testing.assert_close(amplitudes.max(), torch.tensor(0.25, dtype=torch.float64), rtol=0.05, atol=0)


def test_speed_changes_duration_and_pitch(recipe, tmp_path, subtests):
    soundfile.write(tmp_path / "a.wav", tone(1.0, 400), RATE)
    for speed in (0.8, 1.25):
        with subtests.test(speed):
            wave = recipe.data.read_audio(tmp_path / "a.wav", RATE, speed)
            assert len(wave) == pytest.approx(RATE / speed, abs=2)
            spectrum = torch.fft.rfft(wave[1000:5000].double() * torch.hann_window(4000, dtype=torch.float64)).abs()
            assert spectrum.argmax().item() * RATE / 4000 == pytest.approx(400 * speed, abs=2)


def test_speed_follows_torchs_generator(recipe, tmp_path):
    soundfile.write(tmp_path / "a.wav", tone(0.5), RATE)
    recording = recipe.data.Recording(tmp_path / "a.wav", "a", "a", 0.5)
    recordings = recipe.data.Recordings([recording], [[1]], RATE, (0.5, 2.0))
    torch.manual_seed(3)
    lengths = [len(recordings[0]["wave"]) for _ in range(5)]
    torch.manual_seed(3)
    assert [len(recordings[0]["wave"]) for _ in range(5)] == lengths
    assert len(set(lengths)) == 5 and min(lengths) >= RATE / 4 and max(lengths) <= RATE


def test_file_that_is_no_audio_is_named(recipe, tmp_path):
    for content in (b"", b"RIFF nonsense", b"ID3 text"):
        (tmp_path / "bad.wav").write_bytes(content)
        with pytest.raises(DataError, match=r"bad\.wav: not readable as audio"):
            recipe.data.read_audio(tmp_path / "bad.wav", RATE)
        with pytest.raises(DataError, match=r"bad\.wav: not readable as audio"):
            recipe.data.measure_duration(tmp_path / "bad.wav")
    with pytest.raises(DataError, match=r"nowhere\.wav: not readable as audio"):
        recipe.data.read_audio(tmp_path / "nowhere.wav", RATE)


def test_file_without_sound_and_with_nan_is_named(recipe, tmp_path):
    soundfile.write(tmp_path / "empty.wav", tone(0), RATE)
    soundfile.write(tmp_path / "nan.wav", np.array([0.0, np.nan], dtype=np.float32), RATE, subtype="FLOAT")
    for read in (lambda path: recipe.data.read_audio(path, RATE), recipe.data.measure_duration):
        with pytest.raises(DataError, match=r"empty\.wav: holds no sound"):
            read(tmp_path / "empty.wav")
    with pytest.raises(DataError, match=r"nan\.wav: holds samples that are not finite"):
        recipe.data.read_audio(tmp_path / "nan.wav", RATE)


def test_batch_is_padded_behind(recipe):
    samples = [{"wave": torch.ones(n), "target": torch.arange(1, m + 1)} for n, m in ((3, 2), (5, 1))]
    batch = recipe.data.collate(samples)
    assert batch["wave"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert batch["target"].tolist() == [[1, 2], [1, 0]]
    assert batch["num_samples"].tolist() == batch["sample_counts"] == [3, 5]
    assert batch["label_counts"] == [2, 1]


# --- manifests, folders, splits


def test_csv_and_json_lines_list_the_same(recipe, tmp_path):
    save_tones(tmp_path / "sounds", ["a.wav", "b, c.flac"], seconds=0.75)
    (tmp_path / "list.csv").write_text(
        '\ufeffpath,duration,text,speaker,age\nsounds/a.wav,0.5,"a, b",ann,40\n"sounds/b, c.flac",,c,,\n',
        encoding="utf-8",
    )
    entries = [
        {"path": "sounds/a.wav", "duration": 0.5, "text": "a, b", "speaker": "ann"},
        {"path": str(tmp_path / "sounds" / "b, c.flac"), "text": "c"},
    ]
    (tmp_path / "list.jsonl").write_text("\n\n".join(map(json.dumps, entries)))
    for name in ("list.csv", "list.jsonl"):
        first, second = recipe.data.read_manifest(tmp_path / name)
        assert (first.text, first.duration, first.speaker, first.split) == ("a, b", 0.5, "ann", None)
        # A duration that is not given is read from the file.
        assert (second.text, second.duration, second.speaker) == ("c", 0.75, None)
        assert recipe.data.read_audio(second.path, RATE).shape == (6000,)


WRONG_MANIFESTS = [
    ('{"path": "a.wav"}', r"list\.jsonl:1: lacks text"),
    ('{"path": "a.wav", "text": 7, "duration": 1}', r"list\.jsonl:1: lacks text"),
    ('{"path": "a.wav", "text": "a", "duration": "long"}', r"list\.jsonl:1: duration is 'long'"),
    ('{"path": "a.wav", "text": "a", "duration": -1}', r"list\.jsonl:1: duration is -1"),
    ('{"path": "a.wav", "text": "a", "duration": 1, "split": "dev"}', r"split is 'dev'; expected one of train"),
    ('{"path": "a.wav", "text": "a"}', r"a\.wav: not readable as audio"),
    ('\n["a.wav"]', r"list\.jsonl:2: is not a JSON object"),
    ("path,text", r"not one JSON object a line"),
    ("", r"lists no recording"),
]


def test_manifest_mistakes_tell_the_line(recipe, tmp_path, subtests):
    for content, message in WRONG_MANIFESTS:
        with subtests.test(message):
            (tmp_path / "list.jsonl").write_text(content)
            with pytest.raises(DataError, match=message):
                recipe.data.read_manifest(tmp_path / "list.jsonl")


def test_wrong_places_are_explained(recipe, tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        recipe.data.read_manifest(tmp_path / "nothing.csv")
    with pytest.raises(DataError, match="expected a file that ends in"):
        recipe.data.read_manifest(tmp_path)
    with pytest.raises(DataError, match="is not a folder"):
        recipe.data.list_folder(tmp_path / "nothing", "{label}")
    with pytest.raises(DataError, match="no recording in"):
        recipe.data.list_folder(tmp_path, "{label}")
    with pytest.raises(DataError, match="expected one"):
        load(recipe, data_folder="a", manifest="b.csv")


def test_file_names_tell_label_and_speaker(recipe, tmp_path, subtests):
    for pattern, name, label, speaker in (
        ("{label}_{speaker}_{index}", "7_jackson_12.wav", "7", "jackson"),
        ("{label}/{speaker}_nohash_{index}", "yes/0a7c_nohash_0.wav", "yes", "0a7c"),
        ("{speaker}/{label}", "ann/far away.FLAC", "far away", "ann"),
        ("{label}.{take}", "a+b.1.ogg", "a+b", None),
    ):
        with subtests.test(pattern):
            folder = save_tones(tmp_path / label, [name, ".hidden/x.wav"])
            (found,) = recipe.data.list_folder(folder, pattern)
            assert (found.text, found.speaker, found.duration) == (label, speaker, 0.5)


def test_names_that_do_not_fit_are_named(recipe, tmp_path):
    save_tones(tmp_path, ["7_ann_1.wav", "readme.wav"])
    with pytest.raises(DataError, match=r"readme\.wav: 'readme' does not fit"):
        recipe.data.list_folder(tmp_path, "{label}_{speaker}_{index}")
    for pattern in ("{word}", "{label}_{label}", "label"):
        with pytest.raises(DataError, match=r"expected \{label\}"):
            recipe.data.list_folder(tmp_path, pattern)


def some_recordings(recipe, count: int = 40) -> list:
    return [
        recipe.data.Recording(Path(f"{index}.wav"), "a", str(index), 1.0, speaker=f"s{index % 4}")
        for index in range(count)
    ]


def test_split_leaves_speakers_out(recipe):
    recordings = some_recordings(recipe)
    train, valid, test = recipe.data.split_recordings(recordings, ["s1"], [], (0.8, 0.1, 0.1), 0)
    assert {it.speaker for it in test} == {"s1"} and len(test) == 10
    assert {it.speaker for it in train} <= {"s0", "s2", "s3"} and "s1" not in {it.speaker for it in valid}
    # The 30 others in the proportion 8 : 1.
    assert (len(train), len(valid)) == (27, 3)
    assert {it.where for it in train + valid + test} == {it.where for it in recordings}
    train, valid, test = recipe.data.split_recordings(recordings, ["s1"], ["s2"], (0.8, 0.1, 0.1), 0)
    assert ({it.speaker for it in train}, {it.speaker for it in valid}) == ({"s0", "s3"}, {"s2"})


def test_split_by_ratio_follows_its_own_seed(recipe):
    recordings = some_recordings(recipe)
    state = torch.get_rng_state()
    parts = recipe.data.split_recordings(recordings, [], [], (0.5, 0.25, 0.25), 7)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(part) for part in parts] == [20, 10, 10]
    assert {it.where for part in parts for it in part} == {it.where for it in recordings}
    assert recipe.data.split_recordings(recordings, [], [], (0.5, 0.25, 0.25), 7) == parts
    assert recipe.data.split_recordings(recordings, [], [], (0.5, 0.25, 0.25), 8) != parts


def test_impossible_splits_are_refused(recipe):
    for settings, message in (
        ((["nobody"], [], (0.8, 0.1, 0.1)), "test_speaker 'nobody' is nobody here; the speakers are s0, s1, s2, s3"),
        ((["s3", "s1"], ["s1"], (0.8, 0.1, 0.1)), "both 's1'"),
        (([], [], (0.8, 0.1)), "split_ratios"),
        (([], [], (0.9, 0.1, 0.1)), "split_ratios"),
    ):
        with pytest.raises(DataError, match=message):
            recipe.data.split_recordings(some_recordings(recipe), *settings, 0)


def test_a_speaker_may_be_a_number(recipe, tmp_path):
    """As those of LibriSpeech are, on a command line and in JSON."""
    save_tones(tmp_path, ["a.wav", "b.wav", "c.wav", "d.wav"])
    speakers = {"a": 84, "b": 84, "c": 7, "d": 9}
    entries = [{"path": f"{name}.wav", "text": "a", "speaker": number} for name, number in speakers.items()]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, entries)))
    speech = load(recipe, manifest=tmp_path / "list.jsonl", test_speaker=84, valid_speaker=7)
    assert [len(part) for part in (speech.train, speech.valid, speech.test)] == [1, 1, 2]


def test_several_speakers_are_the_test_which_tells_who_spoke(recipe, tmp_path):
    save_tones(tmp_path, ["a.wav", "b.wav", "c.wav", "d.wav"])
    speakers = {"a": "ann", "b": 7, "c": "bob", "d": "cid"}
    entries = [{"path": f"{name}.wav", "text": "a", "speaker": speaker} for name, speaker in speakers.items()]
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, entries)))
    manifest = tmp_path / "list.jsonl"
    speech = load(recipe, manifest=manifest, test_speaker=["ann", 7], valid_speaker=["bob"])
    assert [sample["speaker"] for sample in speech.test] == ["ann", "7"] and "speaker" not in speech.valid[0]
    assert recipe.data.collate(list(speech.test))["speaker"] == ["ann", "7"]
    speech = load(recipe, manifest=manifest, test_speaker="ann", valid_speaker="bob")
    assert [len(part) for part in (speech.train, speech.valid, speech.test)] == [2, 1, 1]
    assert "speaker" not in speech.test[0]


def test_the_test_reports_the_errors_of_each_speaker(recipe, tmp_path):
    folder = save_tones(
        tmp_path / "tones", [f"{word}_{name}_{n}.wav" for word in "ab" for name in "wxyz" for n in (0, 1)]
    )
    options = ["--objective.labels=[a, b]", "--model.channels=[4, 4]", "--number_of_epochs=1", "--noprogressbar"]
    options += ["--load_speech.extra_synthetic=false"]
    options += [f"--data_folder={folder}", "--test_speaker=[x, y]", "--valid_speaker=z", "--split_ratios=[1, 0, 0]"]
    recipe.train.main([str(KEYWORDS), *options, f"--output_folder={tmp_path / 'run'}"])
    metrics = stage_records(tmp_path / "run")[-1]["metrics"]
    assert set(metrics) == {"accuracy", "accuracy of x", "accuracy of y"}
    assert metrics["accuracy"] == pytest.approx((metrics["accuracy of x"] + metrics["accuracy of y"]) / 2)
    assert set(stage_records(tmp_path / "run")[1]["metrics"]) == {"accuracy"}


def test_a_wrong_duration_is_told_with_its_line(recipe, tmp_path):
    save_tones(tmp_path, ["a.wav"])
    recording = recipe.data.Recording(tmp_path / "a.wav", "a", "list.csv:2 (a.wav)", 5.0)
    with pytest.raises(DataError, match=r"list\.csv:2 .*lasts 0\.50 s, but its duration is given as 5\.00"):
        recipe.data.Recordings([recording], [[1]], RATE, (0.5, 2.0))[0]


def test_split_of_a_manifest_is_kept_or_refused(recipe, tmp_path):
    save_tones(tmp_path, ["a.wav", "b.wav", "c.wav"])
    lines = [
        json.dumps({"path": f"{name}.wav", "text": name, "split": split})
        for name, split in zip("abc", ("train", "valid", "test"), strict=True)
    ]
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    speech = load(recipe, manifest=tmp_path / "list.jsonl")
    assert [part.recordings[0].text for part in (speech.train, speech.valid, speech.test)] == ["a", "b", "c"]
    with pytest.raises(DataError, match="the manifest splits"):
        load(recipe, manifest=tmp_path / "list.jsonl", test_speaker="ann")
    (tmp_path / "list.jsonl").write_text("\n".join([*lines[:2], '{"path": "c.wav", "text": "c"}']))
    with pytest.raises(DataError, match=r"list\.jsonl:3.*has no split"):
        load(recipe, manifest=tmp_path / "list.jsonl")
    (tmp_path / "list.jsonl").write_text("\n".join(lines[:2]))
    with pytest.raises(DataError, match="the test set has no recording"):
        load(recipe, manifest=tmp_path / "list.jsonl")


def test_recordings_too_short_for_their_text_are_refused_or_left_out(recipe, tmp_path, caplog):
    save_tones(tmp_path, [f"a_ann_{index}.wav" for index in range(8)] + ["abcdefghij abcdefghij abcdefghij_ann_1.wav"])
    with pytest.raises(DataError, match=r"0\.50 s are 26 steps of the network, 'abcdefghij a.*' needs 32") as caught:
        load(recipe, data_folder=tmp_path, split_ratios=(0.9, 0.05, 0.05), data_seed=1)
    assert "ann_1.wav" in str(caught.value) and "--unfit=leave_out" in str(caught.value)
    speech = load(recipe, data_folder=tmp_path, split_ratios=(0.8, 0.1, 0.1), unfit="leave_out", data_seed=1)
    assert sum(map(len, (speech.train, speech.valid, speech.test))) == 8
    assert "left out: 1 of" in caplog.text


def test_speed_counts_for_what_is_too_short(recipe, tmp_path):
    save_tones(tmp_path, [f"{'abcdefghij ' * 2}ab_ann_{index}.wav" for index in range(8)])
    assert len(load(recipe, data_folder=tmp_path, speed_range=(0.9, 1.0)).train) == 6
    with pytest.raises(DataError, match=r"0\.50 s at 1\.25 times the speed are 21 steps"):
        load(recipe, data_folder=tmp_path, speed_range=(0.8, 1.25))


def test_impossible_settings_are_named(recipe):
    for name, value in (("speed_range", (1.1, 0.9)), ("speed_range", (0.0, 1.0)), ("unfit", "drop")):
        with pytest.raises(DataError, match=f"{name} is"):
            load(recipe, **{name: value})


# --- the features


def test_filters_are_triangles_at_equal_distances_in_mel(recipe):
    filters = recipe.features.mel_filterbank(20, 2048, 16000, 100, 8000).double()
    bins = torch.linspace(0, 8000, 1025, dtype=torch.float64)
    peaks_mel = 2595 * torch.log10(1 + bins[filters.argmax(dim=1)] / 700)
    # Between bins of 7.8 Hz a peak is off by up to 3.9 Hz, at 100 Hz about 6 mel.
    torch.testing.assert_close(
        peaks_mel.diff(), torch.full((19,), peaks_mel.diff().mean().item()).double(), atol=12, rtol=0
    )
    # Between the first peak and the last a falling filter and its rising neighbour add up to 1.
    inside = slice(int(filters[0].argmax()) + 1, int(filters[-1].argmax()))
    torch.testing.assert_close(filters.sum(dim=0)[inside], torch.ones(inside.stop - inside.start).double())


def test_impossible_bands_are_refused(recipe):
    for arguments, message in (
        ((80, 64, RATE, 0, 4000), "mel band 0 of 80 is narrower"),
        ((4, 512, RATE, 0, 5000), "expected 0 <= min_hz"),
    ):
        with pytest.raises(ConfigError, match=message):
            recipe.features.mel_filterbank(*arguments)


def reference_features(wave: np.ndarray, filters: np.ndarray, floor: float) -> np.ndarray:
    """Normalised log-mel features in float64, frame by frame."""
    padded = np.pad(wave.astype(np.float64), 128)
    window = np.pad(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200), 28)
    starts = range(0, len(wave) + 1, 80)
    power = np.stack([np.abs(np.fft.rfft(padded[start : start + 256] * window)) ** 2 for start in starts])
    energies = power @ filters.T.astype(np.float64)
    logs = np.log(energies / energies.mean() + floor)
    return (logs - logs.mean(axis=0)) / np.sqrt(logs.var(axis=0).mean() + 1e-2)


def test_features_are_those_computed_in_float64_whatever_else_is_in_the_batch(recipe):
    torch.manual_seed(0)
    features = recipe.features.LogMel(RATE)
    waves = [torch.randn(4000) * 0.1, torch.randn(2345) * 0.01]
    batch = recipe.data.collate([{"wave": wave, "target": torch.zeros(1)} for wave in waves])
    found, frames = features(batch["wave"], batch["num_samples"])
    assert frames.tolist() == [51, 30]
    assert found[1, 30:].abs().max() == 0
    for row, wave in enumerate(waves):
        expected = reference_features(wave.numpy(), features.filters_MN.numpy(), features.floor)
        torch.testing.assert_close(found[row, : frames[row]].double(), torch.from_numpy(expected), atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pin_keeps_features_and_losses_exact_under_autocast(recipe, dtype):
    torch.manual_seed(1)
    features = recipe.features.LogMel(RATE)
    waves, lengths = torch.randn(2, 4000) * torch.tensor([[1e-4], [0.5]]), torch.tensor([4000, 3000])
    waves = waves * recipe.features.valid_positions(lengths, 4000)
    expected, _ = features(waves, lengths)
    scores, steps = torch.randn(2, 20, 4), [20, 18]
    objective = recipe.objectives.CharacterCTC("abc")
    batch = {"target": torch.tensor([[1, 2], [3, 3]]), "label_counts": [2, 2]}
    loss = objective.loss(scores, steps, batch)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(features(waves, lengths)[0], expected)
        assert torch.equal(objective.loss(scores, steps, batch), loss)
        assert objective.loss(scores.to(dtype), steps, batch).dtype == torch.float32
        unpinned, _ = features(waves, lengths, force_allow_autocast=True)
    # The product with the filters is what autocast takes in the low precision; in fp16 quiet sounds vanish.
    assert not torch.equal(unpinned.float(), expected)
    assert dtype == torch.bfloat16 or (unpinned - expected)[0].abs().max() > 0.1


def test_masks_are_stripes_within_their_bounds(recipe):
    torch.manual_seed(0)
    augment = recipe.features.SpecAugment(1, 0.25, 10, 1, 3)
    frames = torch.tensor([80, 20]).repeat(200)
    features = torch.ones(400, 80, 12)
    seen = augment(features, frames) == 0
    in_time, in_bands = seen.all(dim=2), seen.all(dim=1)
    assert torch.equal(seen, in_time.unsqueeze(2) | in_bands.unsqueeze(1))
    for rows, frame_count, widest in ((slice(0, None, 2), 80, 10), (slice(1, None, 2), 20, 5)):
        widths = in_time[rows].sum(dim=1)
        assert (widths.min(), widths.max()) == (0, widest)
        assert not in_time[rows, frame_count:].any()
        assert in_time[rows, 0].any() and in_time[rows, frame_count - 1].any()
    # One stripe has one beginning at most.
    assert ((in_time[:, 1:] & ~in_time[:, :-1]).sum(dim=1) + in_time[:, 0].int()).max() == 1
    assert in_bands.sum(dim=1).max() == 3
    torch.manual_seed(0)
    assert torch.equal(augment(features, frames) == 0, seen)


def test_noise_has_the_ratio_that_was_drawn(recipe):
    torch.manual_seed(0)
    lengths = torch.full((64,), 4000)
    waves = torch.from_numpy(tone(0.5)).repeat(64, 1) * torch.linspace(0.01, 1, 64)[:, None]
    noise = recipe.features.AddNoise(1.0, 20.0, 20.0)(waves, lengths) - waves
    ratio_db = 10 * torch.log10(waves.square().mean(dim=1) / noise.square().mean(dim=1))
    torch.testing.assert_close(ratio_db, torch.full((64,), 20.0), atol=0.5, rtol=0)
    half = recipe.features.AddNoise(0.5, 0.0, 40.0)(waves, lengths) - waves
    assert 16 <= (half.abs().amax(dim=1) > 0).sum() <= 48
    short = recipe.features.AddNoise(1.0, 0.0, 0.0)(waves[:1, :2000] * 1.0, torch.tensor([1500]))
    assert torch.equal(short[:, 1500:], waves[:1, 1500:2000])


# --- the networks


def encoders(recipe) -> dict:
    return {
        "gru": recipe.model.RecurrentEncoder(16, 2, "gru"),
        "lstm": recipe.model.RecurrentEncoder(16, 2, "lstm"),
        "conformer": recipe.model.ConformerEncoder(16, 2, 2, 5, 0.0),
    }


@pytest.mark.parametrize("kind", ["gru", "lstm", "conformer"])
def test_scores_do_not_depend_on_the_others_of_the_batch(recipe, kind, subtests):
    for pool_frames in (False, True):
        with subtests.test("pooled" if pool_frames else "in each frame"):
            check_alone_and_together(recipe, kind, pool_frames)


def check_alone_and_together(recipe, kind, pool_frames):
    torch.manual_seed(0)
    front = recipe.model.ConvolutionalFront(10, 16, (4, 6), (2, 2))
    model = recipe.model.SpeechModel(front, encoders(recipe)[kind], 16, 5, pool_frames).eval()
    features, frames = torch.randn(3, 37, 10), torch.tensor([37, 22, 9])
    features = features * recipe.features.valid_positions(frames, 37).unsqueeze(2)
    scores, steps = model(features, frames)
    assert steps.tolist() == [model.num_steps(count) for count in frames.tolist()] == [10, 6, 3]
    assert scores.shape == ((3, 5) if pool_frames else (3, 10, 5))
    for row, (count, valid) in enumerate(zip(frames.tolist(), steps.tolist(), strict=True)):
        alone, _ = model(features[row : row + 1, :count], frames[row : row + 1])
        together = scores[row] if pool_frames else scores[row, :valid]
        torch.testing.assert_close(together, alone[0], atol=1e-5, rtol=1e-5)


def test_every_step_hears_the_whole_recording(recipe):
    for kind, encoder in encoders(recipe).items():
        x = torch.randn(1, 12, 16, requires_grad=True)
        (encoder.eval()(x, torch.tensor([10]))[0, 4] @ torch.arange(16.0)).backward()
        heard = x.grad[0].abs().amax(dim=1) > 0
        assert heard.tolist() == [True] * 10 + [False] * 2, kind


def test_turning_round_twice_changes_nothing(recipe):
    x, lengths = torch.randn(3, 6, 2), torch.tensor([6, 4, 1])
    turned = recipe.model.turn_round(x, lengths)
    assert torch.equal(turned[1], torch.cat((x[1, :4].flip(0), x[1, 4:])))
    assert torch.equal(recipe.model.turn_round(turned, lengths), x)


def test_impossible_networks_are_refused(recipe):
    for make, message in (
        (lambda: recipe.model.RecurrentEncoder(16, 2, "rnn"), "kind 'rnn' is unknown"),
        (lambda: recipe.model.RecurrentEncoder(15), "width 15 is odd"),
        (lambda: recipe.model.ConformerEncoder(18, heads=4), "not divisible"),
        (lambda: recipe.model.ConformerEncoder(16, kernel_size=4), "is even"),
        (lambda: recipe.model.ConvolutionalFront(8, 8, (4,), (2, 1)), "1 channels and 2 time_strides"),
    ):
        with pytest.raises(ConfigError, match=message):
            make()


# --- the objectives


def all_readings(log_probs: torch.Tensor) -> dict[tuple[int, ...], float]:
    """The log probability of every label sequence, summed over all paths: its definition."""
    readings: dict[tuple[int, ...], float] = {}
    steps, outputs = log_probs.shape
    for path in itertools.product(range(outputs), repeat=steps):
        labels = tuple(output for output, _ in itertools.groupby(path) if output)
        score = sum(log_probs[step, output].item() for step, output in enumerate(path))
        readings[labels] = float(np.logaddexp(readings.get(labels, -math.inf), score))
    return readings


def test_ctc_loss_is_that_of_all_paths_and_is_per_step(recipe):
    torch.manual_seed(0)
    objective = recipe.objectives.CharacterCTC("ab")
    scores, steps = torch.randn(2, 6, 3, dtype=torch.float64), [6, 4]
    targets = [(1, 1, 2), (2,)]
    batch = {"target": torch.tensor([[1, 1, 2], [2, 0, 0]]), "label_counts": [3, 1]}
    by_hand = [
        -all_readings(scores[row, : steps[row]].log_softmax(dim=1))[target] for row, target in enumerate(targets)
    ]
    assert objective.loss(scores, steps, batch).item() == pytest.approx(sum(by_hand) / 10)
    assert objective.weight(steps) == 10


def test_beam_search_finds_the_most_probable_reading_and_the_best_path_need_not(recipe):
    torch.manual_seed(0)
    objective = recipe.objectives.CharacterCTC("abc", beam_size=500)
    differs = 0
    for _ in range(25):
        log_probs = torch.randn(1, 5, 4).log_softmax(dim=2)
        readings = all_readings(log_probs[0].double())
        best = max(readings, key=readings.get)
        assert objective.decode(log_probs, [5]) == [objective.text(best)]
        differs += recipe.objectives.best_path(log_probs[0]) != list(best)
    assert differs > 0


def test_decoding_reads_valid_steps_only(recipe):
    for beam_size in (1, 8):
        objective = recipe.objectives.CharacterCTC("ab", beam_size=beam_size)
        path = torch.tensor([[1, 1, 0, 1, 2, 2], [0, 2, 0, 0, 1, 1]])
        scores = torch.nn.functional.one_hot(path, 3) * 20.0
        assert objective.decode(scores, [6, 4]) == ["aab", "b"]
        assert objective.decode(scores.to(torch.bfloat16), [2, 1]) == ["a", ""]


def test_errors_are_counted_over_words_and_characters(recipe):
    objective = recipe.objectives.CharacterCTC("abc ")
    scores = torch.nn.functional.one_hot(torch.tensor([[1, 2, 4, 3, 0], [0] * 5]), 5) * 9.0
    batch = {
        "target": torch.tensor([[1, 2, 4, 3, 3], [2, 0, 0, 0, 0]]),  # "ab cc", "b"; heard: "ab c", ""
        "label_counts": [5, 1],
    }
    assert objective.count(scores, [5, 5], batch) == {"WER": (2, 3), "CER": (2, 6)}


def test_texts_become_labels_and_back(recipe):
    objective = recipe.objectives.CharacterCTC(" 'abc")
    assert objective.text(objective.encode("  Abc  A'C\n", "here")) == "abc a'c"
    assert objective.num_outputs == 6
    with pytest.raises(DataError, match=r"here: its text 'abé' holds 'é'"):
        objective.encode("abé", "here")
    with pytest.raises(DataError, match="here: its text is empty"):
        objective.encode(" ", "here")
    for alphabet in ("", "aba"):
        with pytest.raises(ConfigError, match="expected each character once"):
            recipe.objectives.CharacterCTC(alphabet)
    with pytest.raises(ConfigError, match="beam_size is 0"):
        recipe.objectives.CharacterCTC("a", beam_size=0)


def test_a_beam_search_without_its_package_is_refused_at_once(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashlight.lib.text", None)
    with pytest.raises(ConfigError, match=r"needs the package flashlight-text.*--objective.beam_size 1"):
        recipe.objectives.CharacterCTC("a", beam_size=2)
    assert recipe.objectives.CharacterCTC("a").beam_size == 1


def test_steps_needed_are_those_from_which_ctc_is_finite(recipe, subtests):
    objective = recipe.objectives.CharacterCTC("ab")
    for labels in ([1], [1, 1], [1, 2, 2, 2], [2, 1, 2]):
        with subtests.test(str(labels)):
            batch = {"target": torch.tensor([labels]), "label_counts": [len(labels)]}
            needed = objective.steps_needed(labels)
            for steps, finite in ((needed, True), (needed - 1, False)):
                if steps:
                    loss = objective.loss(torch.randn(1, steps, 3), [steps], batch)
                    assert math.isfinite(loss.item()) == finite


def test_keywords_are_counted_and_checked(recipe):
    objective = recipe.objectives.Keywords([7, "stop"])
    assert (objective.labels, objective.num_outputs) == (["7", "stop"], 2)
    assert objective.encode("stop", "here") == [1]
    with pytest.raises(DataError, match="here: its label 'go' is none of 7, stop"):
        objective.encode("go", "here")
    scores, batch = torch.tensor([[2.0, 0.0], [3.0, 1.0]]), {"target": torch.tensor([[0], [1]])}
    right, total = objective.count(scores, [3, 3], batch)["accuracy"]
    assert (right.sum().item(), total) == (1, 2)
    assert objective.decode(scores, [3, 3]) == ["7", "7"]
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(2))) / 2
    assert objective.loss(scores, [3, 3], batch).item() == pytest.approx(expected)
    for labels in ([], ["a"], ["a", "a"]):
        with pytest.raises(ConfigError, match="at least two, each once"):
            recipe.objectives.Keywords(labels)


def test_shares_of_two_batches_add_up_to_the_loss_of_both(recipe):
    torch.manual_seed(0)
    objective = recipe.objectives.CharacterCTC("ab")
    scores, steps = torch.randn(3, 9, 3), [9, 4, 7]
    batch = {"target": torch.tensor([[1, 2], [2, 1], [1, 1]]), "label_counts": [2, 2, 2]}
    both = objective.loss(scores, steps, batch)
    parts = [(slice(0, 1)), (slice(1, 3))]
    weighted = sum(
        objective.loss(scores[at], steps[at], {name: value[at] for name, value in batch.items()})
        * objective.weight(steps[at])
        for at in parts
    )
    torch.testing.assert_close(weighted / objective.weight(steps), both)


def test_configurations_differ_only_where_the_task_does(recipe):
    keys = [set(re.findall(r"^(\w+):", path.read_text(), flags=re.MULTILINE)) for path in (CTC, KEYWORDS)]
    assert keys[0] - keys[1] == {"unfit"} and keys[1] <= keys[0]
