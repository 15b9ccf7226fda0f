"""What the speech recipe does about unknown speakers: warped bands, random channels, cut silence, synthetic voices."""

import numpy as np
import pytest
import soundfile
import torch
from recipe_runs import recipe_modules

from amp_recipes.errors import ConfigError

RATE = 8000


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
    features = recipe.augment.SpeakerLogMel(RATE).eval()
    silence = torch.zeros(1600)
    said = speech()
    variants = [torch.cat((silence, wave, silence)) for wave in (said, said * 0.01)] + [
        torch.cat((silence, silence, said)),
        torch.cat((silence, said)),
    ]
    found, frames = features(*in_batch(recipe, *variants))
    assert frames[0] == frames[1]
    assert abs(frames[0] - len(said) // features.hop) <= 4
    for row in range(1, 4):
        shared = int(min(frames[0], frames[row]))
        torch.testing.assert_close(found[row, :shared], found[0, :shared], atol=1e-4, rtol=0)
        assert found[row, frames[row] :].abs().max() == 0
    assert features(torch.zeros(1, 800), torch.tensor([800]))[0].abs().max() == 0


def test_features_equal_a_computation_in_float64_of_one_recording(recipe):
    features = recipe.augment.SpeakerLogMel(RATE, tilt_db=3.0, floor=0.01).eval()
    said = speech()
    found, frames = features(*in_batch(recipe, said, speech(0.7)))
    assert frames[0] == 1 + len(said) // 80
    padded = np.pad(said.numpy().astype(np.float64), 128)
    window = np.zeros(256)
    window[28:228] = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(200) / 200)
    power = np.stack([np.abs(np.fft.rfft(padded[80 * t : 80 * t + 256] * window)) ** 2 for t in range(frames[0])])
    mels = np.linspace(*(2595 * np.log10(1 + np.array([60, 4000]) / 700)), 26)[1:-1]
    peaks_hz = 700 * (10 ** (mels / 2595) - 1)
    filters = recipe.features.mel_filterbank(24, 256, RATE, 60, 4000).numpy()
    energies = power @ filters.T * 10 ** (0.3 * np.log2(peaks_hz / 1000))
    loudness = np.average(energies.mean(axis=1), weights=energies.sum(axis=1))
    expected = np.log(1 + energies / loudness / 0.01) / 3
    torch.testing.assert_close(found[0, : frames[0]].double(), torch.from_numpy(expected), atol=1e-4, rtol=0)


def test_bands_move_by_the_factor_and_end_where_they_did(recipe):
    corners = recipe.augment.SpeakerLogMel(RATE).corners_P
    factors = torch.tensor([[0.8], [1.0], [1.25]])
    warped = recipe.augment.warp(corners, factors, RATE / 2)
    torch.testing.assert_close(warped[1], corners)
    low = corners < 0.8 * RATE / 2 * 0.8
    torch.testing.assert_close(warped[:, low], corners[low] * factors)
    assert (warped.diff(dim=1) > 0).all()
    torch.testing.assert_close(warped[:, -1], torch.full((3,), RATE / 2))


def test_filters_at_the_unwarped_corners_are_the_mel_filters(recipe):
    features = recipe.augment.SpeakerLogMel(RATE)
    filters = recipe.augment.triangles(features.corners_P.unsqueeze(0), features.bins_N)[0]
    torch.testing.assert_close(filters, features.filters_MN, atol=1e-5, rtol=0)


def test_training_draws_each_time_and_evaluation_never(recipe):
    features = recipe.augment.SpeakerLogMel(RATE)
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
    plain = recipe.augment.SpeakerLogMel(RATE, warp_range=None, channel_db=0.0)
    assert torch.equal(plain(*batch)[0], still)


def test_channels_have_the_deviation_that_was_asked_for(recipe):
    torch.manual_seed(0)
    gains = 10 * recipe.augment.SpeakerLogMel(RATE, channel_db=6.0).draw_channels(4000).log10()
    assert gains.square().mean().sqrt() == pytest.approx(6.0, rel=0.1)
    assert gains.diff(dim=1).square().mean().sqrt() < 2.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pin_keeps_the_features_exact_under_autocast(recipe, dtype):
    features = recipe.augment.SpeakerLogMel(RATE).eval()
    batch = in_batch(recipe, speech() * 1e-3)
    expected, _ = features(*batch)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(features(*batch)[0], expected)
        assert not torch.equal(features(*batch, force_allow_autocast=True)[0].float(), expected)


@pytest.mark.parametrize(
    "setting",
    [{"warp_range": [1.2, 0.8]}, {"warp_range": [0.1, 1]}, {"channel_db": -1}, {"silence_db": 0}, {"floor": 0}],
)
def test_settings_without_sense_are_refused(recipe, setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        recipe.augment.SpeakerLogMel(RATE, **setting)


def test_extra_synthetic_speech_is_for_training_only(recipe, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    for index in range(10):
        soundfile.write(folder / f"3_ann_{index}.wav", speech().numpy(), RATE)
    words = {"words": ["3", "6"], "counts": [8, 2, 2], "words_per_phrase": [1, 1], "folder": tmp_path / "synthetic"}
    model = recipe.model.SpeechModel(recipe.model.ConvolutionalFront(24, 8), torch.nn.Identity(), 8, 2, True)
    keywords, features = recipe.objectives.Keywords([3, 6]), recipe.augment.SpeakerLogMel(RATE)
    sizes = {}
    for extra in (False, True):
        sets = recipe.data.load_speech(
            keywords, features, model, RATE, {**words, "sample_rate": RATE}, folder, extra_synthetic=extra
        )
        sizes[extra] = [len(part) for part in (sets.train, sets.valid, sets.test)]
    assert sizes == {False: [8, 1, 1], True: [16, 1, 1]}
