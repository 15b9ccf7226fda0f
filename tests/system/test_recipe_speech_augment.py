"""What the speech recipe does about unknown speakers: pictures of words, warped bands, random channels, more voices."""

import numpy as np
import pytest
import soundfile
import torch
from recipe_runs import recipe_modules

from amp_recipes.errors import ConfigError

RATE = 8000
STILL = {"warp_range": None, "channel_db": 0.0, "silence_jitter_db": 0.0, "end_jitter": 0.0, "rhythm_jitter": 0.0}


@pytest.fixture(scope="module")
def recipe():
    """The recipe's modules."""
    with recipe_modules("speech_recognition") as modules:
        yield modules


def speech(seconds: float = 0.4) -> torch.Tensor:
    """Noise (S,) whose loudness rises and falls: at least as loud everywhere as to count as speech."""
    at = torch.linspace(0, np.pi, round(seconds * RATE))
    return 0.1 * (0.3 + at.sin()) * torch.randn(len(at), generator=torch.Generator().manual_seed(0))


def in_batch(recipe, *waves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    batch = recipe.data.collate([{"wave": wave, "target": torch.zeros(1)} for wave in waves])
    return batch["wave"], batch["num_samples"]


def test_silence_around_speech_and_loudness_change_nothing(recipe):
    features = recipe.augment.WordPicture(RATE).eval()
    silence = torch.zeros(1600)
    said = speech()
    found, frames = features(
        *in_batch(
            recipe,
            torch.cat((silence, said, silence)),
            torch.cat((silence, said * 0.01, silence)),
            torch.cat((silence, silence, said, silence[:800])),
        )
    )
    assert frames.tolist() == [32, 32, 32]
    assert found[0].std() > 0.1
    for row in (1, 2):
        torch.testing.assert_close(found[row], found[0], atol=1e-3, rtol=0)
    assert features(torch.zeros(1, 800), torch.tensor([800]))[0].abs().max() == 0


def test_pictures_do_not_depend_on_the_others_of_the_batch(recipe):
    features = recipe.augment.WordPicture(RATE).eval()
    waves = [speech(seconds) for seconds in (0.4, 0.9, 0.01)]
    together, _ = features(*in_batch(recipe, *waves))
    for row, wave in enumerate(waves):
        torch.testing.assert_close(together[row], features(*in_batch(recipe, wave))[0][0], atol=1e-5, rtol=0)


def test_pictures_equal_a_computation_in_float64_of_one_recording(recipe, subtests):
    for band_means in (0.0, 0.5, 1.0):
        with subtests.test(band_means):
            check_pictures(recipe, band_means)


def check_pictures(recipe, band_means):
    features = recipe.augment.WordPicture(RATE, frames=20, band_means=band_means, max_hz=4000.0).eval()
    said = speech()
    found, _ = features(*in_batch(recipe, torch.cat((torch.zeros(2000), said, torch.zeros(3000))), speech(0.7)))
    wave = np.pad(said.numpy().astype(np.float64), (2000, 3000))
    padded = np.pad(wave, 128)
    window = np.zeros(256)
    window[28:228] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200)
    power = np.stack(
        [np.abs(np.fft.rfft(padded[80 * t : 80 * t + 256] * window)) ** 2 for t in range(1 + len(wave) // 80)]
    )
    mels = np.linspace(*(2595 * np.log10(1 + np.array([80, 4000]) / 700)), 26)[1:-1]
    peaks_hz = 700 * (10 ** (mels / 2595) - 1)
    filters = recipe.features.mel_filterbank(24, 256, RATE, 80, 4000).numpy()
    energies = power @ filters.T * 10 ** (0.3 * np.log2(peaks_hz / 1000))
    loudness = 10 * np.log10(np.convolve(energies.sum(axis=1), np.ones(3) / 3, "same") + 1e-30)
    word = np.nonzero(loudness >= loudness.max() - 30)[0]
    logs = np.log10(energies / energies.max() + 1e-3)
    places = np.linspace(word[0], word[-1], 20)
    expected = np.stack([np.interp(places, np.arange(len(logs)), band) for band in logs.T], axis=1)
    expected = expected - band_means * expected.mean(axis=0) - (1 - band_means) * expected.mean()
    torch.testing.assert_close(found[0].double(), torch.from_numpy(expected), atol=1e-4, rtol=0)


def test_bands_move_by_the_factor_and_end_where_they_did(recipe):
    corners = recipe.augment.WordPicture(RATE).corners_P
    factors = torch.tensor([[0.8], [1.0], [1.25]])
    warped = recipe.augment.warp(corners, factors, RATE / 2)
    torch.testing.assert_close(warped[1], corners)
    low = corners < 0.8 * RATE / 2 * 0.8
    torch.testing.assert_close(warped[:, low], corners[low] * factors)
    assert (warped.diff(dim=1) > 0).all()
    torch.testing.assert_close(warped[:, -1], torch.full((3,), RATE / 2))


def test_filters_at_the_unwarped_corners_are_the_mel_filters(recipe):
    features = recipe.augment.WordPicture(RATE)
    filters = recipe.augment.triangles(features.corners_P.unsqueeze(0), features.bins_N)[0]
    torch.testing.assert_close(filters, features.filters_MN, atol=1e-5, rtol=0)


def test_training_draws_each_time_and_evaluation_never(recipe):
    features = recipe.augment.WordPicture(RATE)
    batch = in_batch(recipe, speech(), speech())
    torch.manual_seed(0)
    first, _ = features(*batch)
    second, _ = features(*batch)
    assert (first[0] - first[1]).abs().max() > 0.05
    assert (first - second).abs().max() > 0.05
    torch.manual_seed(0)
    assert torch.equal(features(*batch)[0], first)
    before = torch.get_rng_state()
    still, _ = features.eval()(*batch)
    assert torch.equal(torch.get_rng_state(), before)
    # Row by row equal to what training sees with nothing to draw.
    assert torch.equal(recipe.augment.WordPicture(RATE, **STILL)(*batch)[0], still)


def test_each_change_of_training_changes_something(recipe, subtests):
    still = recipe.augment.WordPicture(RATE, **STILL)
    batch = in_batch(recipe, speech())
    for name, value in (("warp_range", (1.1, 1.25)), ("channel_db", 6.0), ("end_jitter", 0.1), ("rhythm_jitter", 0.4)):
        with subtests.test(name):
            changed = recipe.augment.WordPicture(RATE, **{**STILL, name: value})
            torch.manual_seed(0)
            assert (changed(*batch)[0] - still(*batch)[0]).abs().max() > 0.02


def test_time_never_runs_backwards(recipe):
    features = recipe.augment.WordPicture(RATE, end_jitter=0.25, rhythm_jitter=0.49)
    torch.manual_seed(0)
    places = features.draw_places(2000)
    assert (places.diff(dim=1) > 0).all()
    assert places[:, 0].abs().max() <= 0.25
    assert (places[:, -1] - 1).abs().max() <= 0.25 + 1e-6
    assert places[:, 16].std() > 0.05


def test_the_cut_of_silence_varies_by_what_was_asked_for(recipe):
    features = recipe.augment.WordPicture(RATE, silence_db=30.0, silence_jitter_db=5.0)
    torch.manual_seed(0)
    drawn = features.draw_silence_db(1000)
    assert 25 <= drawn.min() < 26 and 34 < drawn.max() <= 35
    # A word of 5 frames, its neighbours 32 dB below.
    energies = torch.full((1, 20, 1), 10**-3.2)
    energies[0, 8:13] = 1.0
    bounds = {
        threshold: [int(it) for it in recipe.augment.find_word(energies, torch.tensor([20]), threshold)]
        for threshold in (30.0, 35.0)
    }
    assert bounds[30.0] == [7, 13]
    assert bounds[35.0] == [0, 19]


def test_channels_have_the_deviation_that_was_asked_for(recipe):
    torch.manual_seed(0)
    gains = 10 * recipe.augment.WordPicture(RATE, channel_db=6.0).draw_channels(4000).log10()
    assert gains.square().mean().sqrt() == pytest.approx(6.0, rel=0.1)
    assert gains.diff(dim=1).square().mean().sqrt() < 2.5


def test_pin_keeps_the_features_exact_under_autocast(recipe, subtests):
    features = recipe.augment.WordPicture(RATE).eval()
    batch = in_batch(recipe, speech() * 1e-3)
    expected, _ = features(*batch)
    for dtype in (torch.bfloat16, torch.float16):
        with subtests.test(str(dtype)), torch.autocast("cpu", dtype=dtype):
            assert torch.equal(features(*batch)[0], expected)
            assert not torch.equal(features(*batch, force_allow_autocast=True)[0].float(), expected)


def test_settings_without_sense_are_refused(recipe, subtests):
    for name, value in (
        *(("warp_range", [1.2, 0.8]), ("warp_range", [0.1, 1]), ("channel_db", -1), ("silence_db", 0)),
        *(("floor_db", 0), ("frames", 0), ("band_means", 1.5), ("silence_jitter_db", 40)),
        *(("end_jitter", 0.5), ("rhythm_jitter", 0.5)),
    ):
        with subtests.test(f"{name} {value}"), pytest.raises(ConfigError, match=name):
            recipe.augment.WordPicture(RATE, **{name: value})


def test_words_are_classified_each_by_itself(recipe, subtests):
    for frames, num_mels in ((4, 12), (32, 24), (33, 41)):
        with subtests.test(f"{frames} frames, {num_mels} bands"):
            torch.manual_seed(0)
            model = recipe.model.WordClassifier(frames, num_mels, 5, width=8, channels=(4, 6))
            pictures, lengths = torch.randn(3, frames, num_mels), torch.full((3,), frames)
            model(pictures, lengths)[0].sum().backward()
            assert all(it.grad is not None for it in model.parameters())
            scores, steps = model.eval()(pictures, lengths)
            assert scores.shape == (3, 5)
            assert steps.tolist() == [frames] * 3
            torch.testing.assert_close(model(pictures[1:2], lengths[1:2])[0][0], scores[1])


def test_pictures_that_are_too_small_are_refused(recipe):
    for name, value in (("frames", 3), ("num_mels", 11), ("channels", [4])):
        with pytest.raises(ConfigError, match=name):
            recipe.model.WordClassifier(**{"frames": 32, "num_mels": 24, "num_outputs": 5, name: value})


def test_extra_synthetic_speech_is_for_training_only(recipe, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    for index in range(10):
        soundfile.write(folder / f"3_ann_{index}.wav", speech().numpy(), RATE)
    words = {"words": ["3", "6"], "counts": [8, 2, 2], "words_per_phrase": [1, 1], "folder": tmp_path / "synthetic"}
    model = recipe.model.WordClassifier(32, 24, 2)
    keywords, features = recipe.objectives.Keywords([3, 6]), recipe.augment.WordPicture(RATE)
    sizes = {}
    for extra in (False, True):
        sets = recipe.data.load_speech(
            keywords, features, model, RATE, {**words, "sample_rate": RATE}, folder, extra_synthetic=extra
        )
        sizes[extra] = [len(part) for part in (sets.train, sets.valid, sets.test)]
    assert sizes == {False: [8, 1, 1], True: [16, 1, 1]}
