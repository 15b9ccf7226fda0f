"""The language modelling recipe: text, windows, network, shards, and the scripts as a user runs them."""

import gzip
import itertools
import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import extended
from recipe_runs import CONFIGS, recipe_modules, run_script, stage_records
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from amp_recipes import load_hparams, load_trained
from amp_recipes.errors import AmpRecipesError, DataError
from amp_recipes.loggers import run_log

CONFIG = CONFIGS / "language_modeling.yaml"
TRUST = ("data", "model", "optim")  # a test is no script beside them
TINY = [
    "--noprogressbar",
    "--window_tokens=32",
    "--batch_size=4",
    "--windows_per_update=4",
    "--model.layers=1",
    "--model.features=32",
    "--model.heads=2",
    "--lr_scheduler.warmup_updates=4",
    "--peak_flops=1e11",  # so that no run waits for its measurement
]


@pytest.fixture(scope="module")
def recipe():
    with recipe_modules("language_modeling") as modules:
        yield modules


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """Write a text that repeats itself so much that a tiny network learns it in a few updates."""
    path = tmp_path_factory.mktemp("text") / "song.txt"
    path.write_text("".join(f"{number % 10} green bottles hanging on the wall\n" for number in range(400)))
    return path


def run(recipe, output_folder: Path, *options: str) -> list[dict]:
    """Run the recipe's main with a tiny network; the run's stage records."""
    recipe.train.main([str(CONFIG), *TINY, f"--output_folder={output_folder}", *options])
    return stage_records(output_folder)


@pytest.fixture
def clock(recipe, monkeypatch) -> SimpleNamespace:
    """What a run takes for the time: a second for each batch of training, and nearly nothing for all else."""
    clock = SimpleNamespace(now=0.0, time=lambda: 1e9)

    def read() -> float:
        clock.now += 1e-6
        return clock.now

    def tick(brain, *_) -> None:
        clock.now += 1.0

    clock.perf_counter = read
    monkeypatch.setattr(run_log, "time", clock)
    monkeypatch.setattr(recipe.train.LanguageModel, "on_fit_batch_end", tick)
    return clock


def tiny_model(recipe, vocab_size: int = 50, window_tokens: int = 16, seed: int = 0, **settings):
    """A network of two layers whose scores are not all alike."""
    torch.manual_seed(seed)
    sizes = {"layers": 2, "features": 32, "heads": 2, **settings}
    model = recipe.model.Transformer(vocab_size, window_tokens, **sizes)
    for parameter in model.parameters():
        parameter.data.mul_(4.0 if parameter.ndim == 2 else 1.0)
    return model


# --- the script


def test_script_runs_from_the_shell_as_the_readme_says(tmp_path):
    run_script(
        "language_modeling", CONFIG, *TINY, "--debug", "--precision=auto", f"--output_folder={tmp_path}", cwd=tmp_path
    )
    assert {record["stage"] for record in stage_records(tmp_path / "debug")} == {"train", "valid", "test"}


@pytest.mark.parametrize("precision", ["fp32", *map(extended, ["bf16", "fp16"])])
def test_a_short_run_learns_what_repeats(recipe, tmp_path, text, precision):
    options = ["--number_of_epochs=2", "--steps_per_epoch=30", "--lr=0.02", f"--data_path={text}"]
    records = run(recipe, tmp_path, *options, f"--precision={precision}")
    # Without any context, the text's bytes have this entropy; it is far below 8 bits.
    shares = np.bincount(np.frombuffer(text.read_bytes(), np.uint8)) / text.stat().st_size
    entropy = -sum(share * math.log2(share) for share in shares if share)
    assert records[-1]["stage"] == "test"
    assert records[-1]["metrics"]["bits_per_byte"] < 0.5 * entropy


def test_reported_bits_per_byte_are_those_of_every_byte_once(recipe, tmp_path, text):
    records = run(recipe, tmp_path, "--number_of_epochs=1", "--steps_per_epoch=5", f"--data_path={text}")
    brain = load_trained(tmp_path, device="cpu", trust=("data", "model", "optim"))
    test = brain.hparams.corpus.test
    (stream,) = test.streams
    content = text.read_bytes()[stream.first : stream.last]
    assert text.read_bytes().endswith(content) and len(content) > 100
    tokens = [0, *content, 0]
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, 32):
            window = torch.tensor([tokens[start : start + 33]])
            scores = brain.modules.model(window[:, :-1])
            nats += float(F.cross_entropy(scores[0].double(), window[0, 1:], reduction="sum"))
    expected = nats / math.log(2) / len(content)
    assert records[-1]["metrics"]["bits_per_byte"] == pytest.approx(expected, rel=1e-5)


def test_training_reports_speed_and_the_flops_it_makes(recipe, tmp_path, text, clock):
    trained = run(recipe, tmp_path, "--number_of_epochs=1", "--steps_per_epoch=5", f"--data_path={text}")[0]
    metrics = trained["metrics"]
    assert metrics["tokens_per_second"] == pytest.approx(4 * 32, rel=1e-3)
    model = tiny_model(recipe, vocab_size=256, window_tokens=32, layers=1)
    flops = metrics["tokens_per_second"] * model.flops_per_token()
    assert metrics["model_flops_utilisation"] == pytest.approx(flops / 1e11, rel=1e-6)


def test_speed_counts_no_padding(recipe, tmp_path):
    """One window of three tokens in each batch: the rest of its 16 is padding."""
    (tmp_path / "text").write_bytes(b"\1\2")
    windows = recipe.windows.Windows([recipe.windows.Stream(tmp_path / "text", 0, 2, ended=True)], 16, 0, 2)
    brain, _ = trained_on(recipe, recipe.windows.ShuffledWindows(windows, 40, 1), batch_size=1, accumulation=1)
    assert int(brain.tokens_read) == 40 * 3


def test_speed_after_a_resume_is_that_of_the_training_alone(recipe, tmp_path, text, clock, monkeypatch):
    """Neither the time between two processes counts, nor is a token forgotten or counted twice."""

    def end(brain, *_):
        clock.now += 1.0
        if brain.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    options = ("--number_of_epochs=1", "--steps_per_epoch=5", f"--data_path={text}")
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(recipe.train.LanguageModel, "on_fit_batch_end", end)
        run(recipe, tmp_path, *options)
    clock.now += 1000.0
    trained = run(recipe, tmp_path, *options)[0]
    assert trained["stage"] == "train"
    assert trained["metrics"]["tokens_per_second"] == pytest.approx(4 * 32, rel=1e-3)


def test_wrong_text_ends_the_run_with_its_own_message(recipe, tmp_path):
    with pytest.raises(AmpRecipesError, match="nowhere' is not there"):
        run(recipe, tmp_path / "run", f"--data_path={tmp_path / 'nowhere'}")


def test_batches_that_make_no_whole_update_are_refused(recipe, tmp_path, text):
    for batch_size in (3, 16):
        options = [f"--batch_size={batch_size}", "--windows_per_update=8", f"--data_path={text}"]
        with pytest.raises(AmpRecipesError, match=rf"batch_size is {batch_size} and windows_per_update is 8.*=(9|16)"):
            run(recipe, tmp_path / "run", *options)


def test_an_update_has_as_many_windows_in_any_number_of_processes(recipe, monkeypatch):
    count_batches = recipe.data.count_batches
    found = {}
    for processes in (1, 2, 4):
        monkeypatch.setenv("WORLD_SIZE", str(processes))
        found[processes] = count_batches(windows_per_update=16, batch_size=4) * 4 * processes
    assert found == {1: 16, 2: 16, 4: 16}
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(AmpRecipesError, match=r"batch_size is 4 in each of 8 processes .* a multiple of 32"):
        count_batches(windows_per_update=16, batch_size=4)


def test_rate_ends_with_the_run_however_long_it_is(recipe, tmp_path, text):
    options = ["--number_of_epochs=3", "--steps_per_epoch=4", "--windows_per_update=8", f"--data_path={text}"]
    run(recipe, tmp_path, *options, "--lr=0.02", "--log_interval_steps=1")
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    rates = [record["lr"]["optimizer"] for record in records if record["kind"] == "step"]
    wave = [(1 + math.cos(math.pi * done / 8)) / 2 for done in range(8)]  # after four updates of warm-up
    assert rates == pytest.approx([0.005, 0.01, 0.015, 0.02, *(0.002 + 0.018 * height for height in wave)])


# --- accumulation


def windows_of_odd_lengths(recipe, folder: Path):
    """Nine windows of 16 tokens, the last of which is short, of documents of 3 to 50 bytes."""
    streams = []
    for number, size in enumerate((50, 3, 40, 7, 20, 12)):
        path = folder / f"{number}.txt"
        path.write_bytes(bytes(np.random.default_rng(number).integers(1, 50, size, dtype=np.uint8)))
        streams.append(recipe.windows.Stream(path, 0, size, ended=True))
    return recipe.windows.Windows(streams, 16, 0, 132)


def trained_on(recipe, windows, batch_size: int, accumulation: int):
    """The Brain and the weights after one epoch over the windows, in order, in float64."""
    model = tiny_model(recipe).double()
    hparams = {"corpus": SimpleNamespace(train=windows, summary=str), "model": model, "peak_flops": 1.0}
    brain = recipe.train.LanguageModel(
        {"model": model},
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        hparams,
        {"grad_accumulation_factor": accumulation, "max_grad_norm": 0.0, "device": "cpu"},
    )
    brain.fit([1], windows, None, False, {"batch_size": batch_size, "shuffle": False})
    return brain, {name: value.detach().clone() for name, value in model.named_parameters()}


def test_accumulated_padded_batches_equal_one_large_batch(recipe, tmp_path):
    windows = windows_of_odd_lengths(recipe, tmp_path)
    assert len(windows) == 9
    large, expected = trained_on(recipe, windows, batch_size=9, accumulation=1)
    small, found = trained_on(recipe, windows, batch_size=2, accumulation=5)
    assert (large.optimizer_step, small.optimizer_step) == (1, 1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert small.avg_train_loss == pytest.approx(large.avg_train_loss, rel=1e-9)
    # That batches counted the same would show.
    unweighted = type("Unweighted", (recipe.train.LanguageModel,), {"batch_weight": lambda self, batch: 1.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe.train, "LanguageModel", unweighted)
        _, wrong = trained_on(recipe, windows, batch_size=2, accumulation=5)
    assert max(float((wrong[name] - expected[name]).abs().max()) for name in wrong) > 1e-4


# --- windows


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6), window=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_every_token_is_a_target_once_behind_those_before_it(recipe, tmp_path_factory, sizes, window):
    folder = tmp_path_factory.mktemp("streams")
    documents = [bytes((7 * number + at) % 250 + 1 for at in range(size)) for number, size in enumerate(sizes)]
    streams = []
    for number, document in enumerate(documents):
        (folder / str(number)).write_bytes(b"xx" + document + b"yy")
        streams.append(recipe.windows.Stream(folder / str(number), 2, 2 + len(document), ended=True))
    windows = recipe.windows.Windows(streams, window, 0, sum(sizes))
    inputs, targets = [], []
    for index in range(len(windows)):
        sample = windows[index]
        assert sample["inputs"].shape == sample["targets"].shape == (window,)
        real = sample["targets"] != recipe.model.IGNORE
        assert real[0] and not (real[1:] & ~real[:-1]).any()
        assert real.all() or index == len(windows) - 1
        inputs += sample["inputs"][real].tolist()
        targets += sample["targets"][real].tolist()
    assert targets == [token for document in documents for token in (*document, 0)]
    assert inputs == [token for document in documents for token in (0, *document)]
    assert windows.tokens == len(targets)


def test_bounded_windows_are_spread_over_all(recipe, tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(1, 101)))
    stream = recipe.windows.Stream(path, 0, 100)
    windows = recipe.windows.Windows([stream], 10, 0, 100, at_most=4)
    assert [int(windows[index]["targets"][0]) for index in range(len(windows))] == [1, 21, 51, 71]
    with pytest.raises(IndexError):
        windows[4]


def test_huge_file_is_mapped_and_not_read(recipe, tmp_path):
    path = tmp_path / "huge.txt"
    with open(path, "wb") as file:
        file.write(b"begin" * 1000)
        file.truncate(2**36)  # 64 GiB, of which almost nothing is on the disk
        file.seek(2**36 - 3)
        file.write(b"end")
    corpus = recipe.data.load_corpus(path, 1024, epoch_windows=8, shuffle_seed=1)
    assert corpus.test.tokens + corpus.valid.tokens + corpus.train.windows.tokens == 2**36 + 3
    last = corpus.test[len(corpus.test) - 1]["targets"]
    assert bytes(last[last > 0].tolist()) == b"end"
    assert corpus.train[7]["inputs"].shape == (1024,)


def test_shuffle_is_a_permutation(recipe):
    for count in (1, 2, 3, 5, 16, 17, 64, 65, 1000):
        order = [recipe.windows.shuffled(place, count, "seed") for place in range(count)]
        assert sorted(order) == list(range(count))


def test_shuffles_are_even_and_differ_by_key(recipe):
    count, keys = 20, 2000
    seen = np.zeros((count, count))
    for key in range(keys):
        for place in range(count):
            seen[place, recipe.windows.shuffled(place, count, str(key))] += 1
    # Chi-squared of each place, over 19 degrees of freedom: 55 is exceeded once in 40,000 fair shuffles.
    assert (((seen - keys / count) ** 2) / (keys / count)).sum(axis=1).max() < 55
    # And neighbours do not stay neighbours.
    follows = [
        (recipe.windows.shuffled(at + 1, 10**6, "a") - recipe.windows.shuffled(at, 10**6, "a")) for at in range(999)
    ]
    assert len(set(follows)) > 950


def test_epochs_take_each_window_once_before_any_again(recipe, tmp_path):
    windows = windows_of_odd_lengths(recipe, tmp_path)
    shuffled = recipe.windows.ShuffledWindows(windows, epoch_windows=5, seed=3)
    known = {tuple(windows[index]["inputs"].tolist()): index for index in range(9)}
    order = []
    for epoch in range(1, 10):
        shuffled.set_epoch(epoch)
        order += [known[tuple(shuffled[index]["inputs"].tolist())] for index in range(5)]
    passes = [order[start : start + 9] for start in range(0, 45, 9)]
    assert all(sorted(it) == list(range(9)) for it in passes)
    assert len(set(map(tuple, passes))) == 5


def test_a_place_in_a_trillion_windows_costs_nothing(recipe):
    order = {recipe.windows.shuffled(place, 10**12, "seed") for place in range(10**12 - 500, 10**12)}
    assert len(order) == 500 and min(order) >= 0 and max(order) < 10**12


# --- text


def test_standard_library_is_split_by_file(recipe):
    corpus = recipe.data.load_corpus(None, 256, epoch_windows=8, shuffle_seed=1)
    parts = [corpus.train.windows, corpus.valid, corpus.test]
    names = [{stream.path for stream in part.streams} for part in parts]
    assert len(set.union(*names)) == sum(map(len, names)) >= 100
    assert 5.5e6 < sum(part.text_bytes for part in parts) < 7e6
    assert recipe.data.STDLIB_FILES.split() == sorted(recipe.data.STDLIB_FILES.split())
    assert corpus.test.text_bytes == sum(path.stat().st_size for path in names[2])


def test_text_file_is_cut_at_ends_of_lines(recipe, text):
    corpus = recipe.data.load_corpus(text, 32, 8, 1, split_ratios=(0.6, 0.2, 0.2))
    parts = [corpus.train.windows, corpus.valid, corpus.test]
    content = text.read_bytes()
    pieces = [content[stream.first : stream.last] for part in parts for stream in part.streams]
    assert b"".join(pieces) == content
    assert all(piece.endswith(b"\n") for piece in pieces)
    for piece, share in zip(pieces, (0.6, 0.2, 0.2), strict=True):
        assert len(piece) == pytest.approx(share * len(content), abs=100)


def test_line_over_both_cuts_is_cut_itself(recipe, tmp_path):
    """Else almost nothing would be left to validate on: the two cuts would lie at the same end of a line."""
    lines = "".join(f"line {number:04d}, and so on\n" for number in range(360))
    (tmp_path / "text").write_text(lines + "a long paragraph " * 80 + "\nend\n")
    corpus = recipe.data.load_corpus(tmp_path / "text", 32, 8, 1)
    size = (tmp_path / "text").stat().st_size
    for part in (corpus.valid, corpus.test):
        assert part.text_bytes == pytest.approx(0.04 * size, abs=1)
    assert corpus.train.windows.text_bytes + corpus.valid.text_bytes + corpus.test.text_bytes == size


def test_file_too_short_for_its_shares_is_named(recipe, tmp_path):
    (tmp_path / "text").write_text("word " * 21)
    with pytest.raises(DataError, match=r"105 bytes are too few for split_ratios \[0\.998, 0\.001, 0\.001\]"):
        recipe.data.load_corpus(tmp_path / "text", 32, 8, 1, (0.998, 0.001, 0.001))


def test_files_that_are_no_plain_text_are_refused(recipe, tmp_path):
    words = "".join(SONG).encode()
    files = {
        "packed.txt.gz": gzip.compress(words * 9),
        "records.jsonl": b'{"text": "la"}\n' * 99,
        "tokens.bin": np.arange(300, 4300, dtype=np.uint16).tobytes(),
        "renamed.txt": np.arange(4300, dtype=np.uint16).tobytes(),
        "wide.txt": words.decode().encode("utf-16"),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "array.npy", np.zeros(4000, dtype=np.uint16))
    for name in [*files, "array.npy"]:
        recipe.windows.open_tokens.cache_clear()
        with pytest.raises(DataError, match=rf"{name}: .*no .*text.*prepare\.py"):
            recipe.data.load_corpus(tmp_path / name, 16, 8, 1)


def test_folder_is_split_by_file_and_a_further_file_moves_few(recipe, tmp_path):
    for number in range(40):
        path = tmp_path / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"text of number {number}\n")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "notes.bin").write_bytes(b"\0\1")

    def files() -> list[set[str]]:
        corpus = recipe.data.load_corpus(tmp_path, 8, 8, 1, (0.5, 0.25, 0.25), file_pattern="*.txt")
        parts = (corpus.train.windows, corpus.valid, corpus.test)
        return [{stream.path.name for stream in part.streams} for part in parts]

    before = files()
    assert [len(part) for part in before] == [20, 10, 10]
    assert len(set.union(*before)) == 40
    (tmp_path / "40.txt").write_text("one more\n")
    after = files()
    assert sum(len(new - old) for old, new in zip(before, after, strict=True)) <= 3
    (tmp_path / "notes.bin").rename(tmp_path / "notes")
    with pytest.raises(DataError, match=r"notes: .*zero byte.*file_pattern"):
        recipe.data.load_corpus(tmp_path, 8, 8, 1)


def test_impossible_settings_are_named(recipe):
    for wrong, message in (
        ({"window_tokens": 0}, "window_tokens is 0"),
        ({"epoch_windows": 0}, "epoch_windows is 0"),
        ({"max_valid_windows": 0}, "max_valid_windows is 0"),
        ({"split_ratios": (0.5, 0.5)}, "split_ratios"),
        ({"split_ratios": (1.0, 0.0, 0.0)}, "split_ratios"),
        ({"split_ratios": (0.8, 0.15, 0.15)}, "split_ratios"),
    ):
        given = {"data_path": None, "window_tokens": 8, "epoch_windows": 8, "shuffle_seed": 1, **wrong}
        with pytest.raises(DataError, match=message):
            recipe.data.load_corpus(**given)


def test_too_little_text_is_named(recipe, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(DataError, match=r"short\.txt: 5 bytes"):
        recipe.data.load_corpus(tmp_path / "short.txt", 8, 8, 1)
    with pytest.raises(DataError, match="holds 1 text file"):
        recipe.data.load_corpus(tmp_path, 8, 8, 1)


# --- the network


def test_scores_hang_on_no_later_token(recipe):
    for longest_ngram in (1, 4):
        model = tiny_model(recipe, longest_ngram=longest_ngram)
        tokens = torch.randint(50, (1, 16))
        changed = tokens.clone()
        changed[0, 9] = (tokens[0, 9] + 1) % 50
        before, after = model(tokens)[0], model(changed)[0]
        torch.testing.assert_close(after[:9], before[:9], rtol=0, atol=1e-6)
        assert ((after[9:] - before[9:]).abs().amax(dim=1) > 1e-4).all()


def test_token_by_token_gives_the_scores_of_all_at_once(recipe, subtests):
    for longest_ngram, prompt in itertools.product((1, 2, 4), (1, 5)):
        with subtests.test(f"n-grams of {longest_ngram}, prompt of {prompt}"):
            model = tiny_model(recipe, longest_ngram=longest_ngram, ngram_rows=999).double()
            tokens = torch.randint(50, (2, 16))
            scores, state = model.continue_from(tokens[:, :prompt], None)
            found = [scores]
            for place in range(prompt, 16):
                scores, state = model.continue_from(tokens[:, place : place + 1], state)
                found.append(scores)
            torch.testing.assert_close(torch.cat(found, dim=1), model(tokens), rtol=1e-6, atol=1e-6)


def test_ngrams_are_looked_up_by_their_tokens_alone(recipe):
    """Each length's vector follows from its n-gram: the same for the same one, hardly ever the same for another."""
    ngrams = recipe.model.NgramEmbedding(features=4, longest=3, rows=100_000)
    tokens = torch.randint(1, 20, (3, 200))
    found = []
    for table in (0, 1):
        others = [ngrams.tables[at].weight.data for at in (0, 1) if at != table]
        saved = [it.clone() for it in others]
        for it in others:
            it.zero_()
        vectors = ngrams(tokens, tokens.new_zeros(3, 2)).detach()
        for it, values in zip(others, saved, strict=True):
            it.copy_(values)
        by_ngram: dict[tuple, set[tuple]] = {}
        for row, line in enumerate(tokens.tolist()):
            line = [0, 0, *line]
            for place in range(200):
                key = tuple(line[place + 1 - table : place + 3])
                by_ngram.setdefault(key, set()).add(tuple(vectors[row, place].tolist()))
        assert all(len(vectors_of_one) == 1 for vectors_of_one in by_ngram.values())
        different = set.union(*by_ngram.values())
        assert len(by_ngram) > 200 and len(different) >= 0.98 * len(by_ngram)
        found.append(len(by_ngram))
    assert found[0] < found[1]  # fewer pairs than triples


def test_rotary_products_hang_on_the_distance_alone(recipe):
    rotary = recipe.model.RotaryEmbedding(8, 64)
    q, k = torch.randn(2, 1, 1, 1, 8).unbind()
    products = {(i, j): float((rotary(q, i) * rotary(k, j)).sum()) for i in (3, 10, 40) for j in (3, 10, 40)}
    for distance in (0, 1, 7):
        values = [float((rotary(q, past + distance) * rotary(k, past)).sum()) for past in (0, 5, 50)]
        assert values == pytest.approx([values[0]] * 3, abs=1e-5)
    assert products[3, 40] != pytest.approx(products[40, 3], abs=1e-3)
    assert rotary(q.bfloat16(), 3).dtype == torch.bfloat16


def test_flops_formula_agrees_with_counted_matrix_products(recipe):
    model = tiny_model(recipe, vocab_size=256, window_tokens=64, features=64, longest_ngram=3)
    tokens = torch.randint(256, (2, 64))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert model.flops_per_token() == pytest.approx(counter.get_total_flops() / tokens.numel(), rel=0.01)


def test_large_configuration_has_124_million_parameters(recipe, text):
    overrides = {"data_path": str(text), "model": {"vocab_size": 50304}}
    with torch.device("meta"):
        hparams = load_hparams(str(CONFIGS / "language_modeling_124m.yaml"), overrides, trust=TRUST)
    assert sum(parameter.numel() for parameter in hparams["model"].parameters()) == pytest.approx(124e6, rel=0.005)
    assert hparams["grad_accumulation_factor"] * hparams["batch_size"] * hparams["window_tokens"] == 2**19


def test_default_model_is_small(recipe):
    model = load_hparams(str(CONFIG), trust=TRUST)["model"]
    assert 1e6 < model.flops_per_token() / 6 < 3e6  # the tables of n-grams cost memory, and no time
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e7
    assert model.head.weight is model.embedding.weight


def test_features_that_rotary_cannot_pair_are_refused(recipe):
    with pytest.raises(ValueError, match="multiple of 2"):
        recipe.model.Transformer(50, 16, layers=1, features=30, heads=4)


def test_loss_is_taken_in_fp32_without_a_pin(recipe):
    brain = recipe.train.LanguageModel({"model": torch.nn.Linear(1, 1)}, run_opts={"device": "cpu"})
    brain.tokens_read = 0
    scores, targets = torch.randn(2, 8, 256).bfloat16() * 20, torch.randint(256, (2, 8))
    targets[1, 5:] = recipe.model.IGNORE
    real = targets.flatten() != recipe.model.IGNORE
    expected = F.cross_entropy(scores.double().flatten(0, 1)[real], targets.flatten()[real])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = brain.compute_objectives(scores, {"inputs": targets, "targets": targets}, recipe.train.Stage.TRAIN)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


# --- the optimizer


def test_only_matrices_decay(recipe):
    model = tiny_model(recipe)
    optimizer = recipe.optim.adamw(model.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, value in model.named_parameters():
        factor = 1.0 if name.split(".")[-2].startswith("norm") else 1 - 0.1 * 0.5
        torch.testing.assert_close(value.detach(), before[name] * factor)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(before)


def test_rate_warms_up_and_falls_as_a_cosine(recipe):
    factor = [recipe.optim.rate_factor(20, 4, 0.1, step) for step in range(25)]
    assert factor[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert factor[12] == pytest.approx(0.55)
    assert factor[20:] == pytest.approx([0.1] * 5)
    assert sorted(factor[4:], reverse=True) == factor[4:]


# --- token shards

SONG = [f"verse {number}: la la {'la ' * (number % 7)}é {number}\n" for number in range(120)]


def prepare(recipe, folder: Path, *words: object):
    return recipe.prepare.main([str(folder), *map(str, words), "--split", "0.6", "0.2", "0.2"])


def write_jsonl(path: Path, documents: list[str]) -> Path:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"body": document, "id": at}) + "\n" for at, document in enumerate(documents))
    return path


def read_shards(folder: Path) -> list[list[int]]:
    """The documents of all splits, in tokens, without their separators."""
    index = json.loads((folder / "index.json").read_text())
    documents = []
    for part in index["splits"].values():
        for name, count in part["shards"]:
            tokens = np.load(folder / name)
            assert len(tokens) == count and tokens[-1] == index["separator"]
            ends = np.flatnonzero(tokens == index["separator"])
            documents += [piece.tolist() for piece in np.split(tokens, ends[:-1] + 1)]
    return [document[:-1] for document in documents]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("tokenizer", ["bytes", extended("bpe")])
def test_shards_hold_every_document_once(recipe, tmp_path, kind, tokenizer):
    path = tmp_path / f"song.{kind}"
    if kind == "parquet":
        table = pyarrow.table({"id": list(range(len(SONG))), "body": SONG})
        pyarrow.parquet.write_table(table, path, row_group_size=13)
    else:
        write_jsonl(path, SONG)
    folder = tmp_path / "shards"
    options = ["--field=body", f"--tokenizer={tokenizer}", "--vocab_size=300", "--shard_tokens=500"]
    index = prepare(recipe, folder, path, *options)
    corpus = recipe.data.load_corpus(folder, 16, 8, 1)
    documents = sorted(corpus.decode(document) for document in read_shards(folder))
    assert documents == sorted(SONG)
    assert index.vocab_size == (256 if tokenizer == "bytes" else 300)
    assert sum(part.bytes for part in index.splits.values()) == len("".join(SONG).encode())
    assert len(index.splits["train"].shards) > 1
    assert corpus.valid.text_bytes / corpus.valid.tokens == corpus.valid.bytes_per_token
    assert sorted(path.suffix for path in folder.iterdir() if path.suffix != ".npy") in (
        [[".json"], [".json", ".json"]][tokenizer == "bpe"],
    )


def test_text_becomes_documents_of_whole_lines(recipe, tmp_path):
    path = tmp_path / "song.txt"
    path.write_text("".join(SONG), newline="")
    prepare(recipe, tmp_path / "shards", path, "--tokenizer=bytes", "--piece_characters=100")
    documents = [bytes(document).decode() for document in read_shards(tmp_path / "shards")]
    assert sorted("".join(documents)) == sorted("".join(SONG))
    assert all(document.endswith("\n") and len(document) < 150 for document in documents)


def test_given_tokenizer_is_used_and_its_separator_asked_for(recipe, tmp_path):
    path = write_jsonl(tmp_path / "song.jsonl", SONG)
    tokenizer = recipe.prepare.train_bpe(SONG, 280, 10**6)
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "own.json"))
    own = ["--field=body", f"--tokenizer={tmp_path / 'own.json'}"]
    index = prepare(recipe, tmp_path / "shards", path, *own, "--separator=</s>")
    assert (index.vocab_size, index.separator) == (281, 280)
    corpus = recipe.data.load_corpus(tmp_path / "shards", 16, 8, 1)
    assert sorted(corpus.decode(it) for it in read_shards(tmp_path / "shards")) == sorted(SONG)
    with pytest.raises(DataError, match=r"no token '<eos>'.*</s>"):
        prepare(recipe, tmp_path / "others", path, *own, "--separator=<eos>")


def test_name_of_the_separator_in_a_text_stays_text(recipe, tmp_path):
    song = [line.replace("la la", "la <|endoftext|> la") for line in SONG]
    path = write_jsonl(tmp_path / "song.jsonl", song)
    prepare(recipe, tmp_path / "shards", path, "--field=body", "--vocab_size=300")
    corpus = recipe.data.load_corpus(tmp_path / "shards", 16, 8, 1)
    assert sorted(corpus.decode(it) for it in read_shards(tmp_path / "shards")) == sorted(song)
    assert corpus.encode("<|endoftext|>") != [corpus.separator]


def test_training_and_sampling_on_shards(recipe, tmp_path, capsys):
    path = write_jsonl(tmp_path / "song.jsonl", SONG * 5)
    prepare(recipe, tmp_path / "shards", path, "--field=body", "--vocab_size=300")
    options = ["--number_of_epochs=1", "--steps_per_epoch=40", "--lr=0.02", f"--data_path={tmp_path / 'shards'}"]
    tested = run(recipe, tmp_path / "run", *options)[-1]
    corpus = recipe.data.load_corpus(tmp_path / "shards", 32, 8, 1)
    by_loss = tested["loss"] / math.log(2) * corpus.test.tokens / corpus.test.text_bytes
    assert tested["metrics"]["bits_per_byte"] == pytest.approx(by_loss, rel=1e-6)
    capsys.readouterr()
    recipe.predict.main([str(tmp_path / "run"), "verse", "--temperature=0", "--tokens=20"])
    assert capsys.readouterr().out.startswith("verse ")


def test_unfinished_shards_are_refused_and_made_anew(recipe, tmp_path):
    path = write_jsonl(tmp_path / "song.jsonl", SONG)
    folder = tmp_path / "shards"

    def breaks(documents):
        yield from documents[:90]
        raise KeyboardInterrupt

    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        recipe.prepare.write_shards(folder, breaks(SONG * 20000), None, 0, (0.6, 0.2, 0.2), 100)
    with pytest.raises(DataError):
        recipe.data.load_corpus(folder, 16, 8, 1)
    prepare(recipe, folder, path, "--field=body", "--tokenizer=bytes")
    assert len(read_shards(folder)) == len(SONG)
    with pytest.raises(DataError, match="--overwrite"):
        prepare(recipe, folder, path, "--field=body", "--tokenizer=bytes")
    prepare(recipe, folder, path, "--field=body", "--tokenizer=bytes", "--overwrite")
    (folder / "letter.txt").write_text("mine")
    with pytest.raises(DataError, match=r"letter\.txt"):
        prepare(recipe, folder, path, "--field=body", "--tokenizer=bytes", "--overwrite")
    assert (folder / "letter.txt").read_text() == "mine"


def test_damaged_shards_are_named(recipe, tmp_path):
    path = write_jsonl(tmp_path / "song.jsonl", SONG)
    folder = tmp_path / "shards"
    prepare(recipe, folder, path, "--field=body", "--tokenizer=bytes")
    shard = folder / "valid-00000.npy"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    recipe.windows.open_tokens.cache_clear()
    with pytest.raises(DataError, match=r"valid-00000\.npy"):
        recipe.data.load_corpus(folder, 16, 8, 1)
    np.save(shard, np.zeros(3, dtype=np.uint16))
    with pytest.raises(DataError, match=r"valid-00000\.npy.*tokens"):
        recipe.data.load_corpus(folder, 16, 8, 1)
    (folder / "index.json").write_text("{}")
    with pytest.raises(DataError, match=r"index\.json"):
        recipe.data.load_corpus(folder, 16, 8, 1)


def test_unreadable_texts_are_named_with_their_line(recipe, tmp_path):
    def message(path: Path, *words: str) -> str:
        with pytest.raises(DataError) as caught:
            prepare(recipe, tmp_path / "shards", path, "--tokenizer=bytes", *words)
        return str(caught.value)

    broken = tmp_path / "a.jsonl"
    broken.write_text('{"text": "a"}\n{"text": \n')
    assert "a.jsonl:2: no JSON" in message(broken)
    assert "its keys are body, id" in message(write_jsonl(tmp_path / "b.jsonl", SONG))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("é".encode("latin-1"))
    assert "latin.txt: no text in UTF-8" in message(latin)
    (tmp_path / "c.parquet").write_bytes(b"no")
    assert "c.parquet: not readable" in message(tmp_path / "c.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"n": [1]}), tmp_path / "d.parquet")
    assert "it has n (int64)" in message(tmp_path / "d.parquet", "--field=n")
    assert "fell into" in message(write_jsonl(tmp_path / "e.jsonl", SONG[:1]), "--field=body")
    assert "is not there" in message(tmp_path / "nowhere")


# --- sampling


def test_samples_repeat_with_the_seed_and_go_on_beyond_the_window(recipe, tmp_path, text, capsys):
    run(recipe, tmp_path, "--number_of_epochs=1", "--steps_per_epoch=20", "--lr=0.02", f"--data_path={text}")
    capsys.readouterr()

    def sample(*words: str) -> str:
        recipe.predict.main([str(tmp_path), "3 green", "--tokens=60", *words])
        return capsys.readouterr().out

    first = sample("--seed=5")
    assert first.startswith("3 green") and len(first) > 50
    assert sample("--seed=5") == first
    assert sample("--seed=6", "--temperature=1.5") != first
    assert sample("--seed=5", "--precision=bf16", "--temperature=0").startswith("3 green")
    with pytest.raises(SystemExit):
        recipe.predict.main([str(tmp_path / "nowhere")])
    assert "is not a folder" in capsys.readouterr().err


def test_greedy_text_is_that_of_the_network_without_a_cache(recipe):
    model = tiny_model(recipe, longest_ngram=3).double()
    prompt = [3, 1, 4, 1, 5]
    tokens = list(prompt)
    for _ in range(11):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert list(recipe.model.generate(model, prompt, 11, temperature=0)) == tokens[len(prompt) :]
    assert len(list(recipe.model.generate(model, prompt * 10, 60, top_k=3, seed=1))) == 60


def test_top_k_draws_among_the_likeliest(recipe):
    scores = torch.tensor([[0.0, 5.0, 4.0, 1.0]])
    draws = torch.Generator().manual_seed(0)
    assert {int(recipe.model._draw(scores, 5.0, 2, draws)) for _ in range(100)} == {1, 2}
    counts = np.bincount([int(recipe.model._draw(scores, 2.0, 0, draws)) for _ in range(4000)], minlength=4)
    torch.testing.assert_close(torch.tensor(counts / 4000), (scores[0] / 2).softmax(0).double(), atol=0.04, rtol=0)


def test_peak_is_measured_at_the_precision_of_training(recipe, monkeypatch):
    dtypes = []
    product = torch.Tensor.__matmul__
    monkeypatch.setattr(recipe.throughput, "_MEASURED_SECONDS", 1e-5)
    monkeypatch.setattr(
        torch.Tensor, "__matmul__", lambda one, other: dtypes.append((found := product(one, other)).dtype) or found
    )
    model, state = torch.nn.Linear(1, 1), torch.get_rng_state()
    peak = recipe.throughput.measure_peak_flops(model, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert set(dtypes) == {torch.bfloat16}
    assert torch.equal(torch.get_rng_state(), state)
    assert peak > 1e8
