"""Computes normalised log-mel features of recordings, and masks parts of them in training.

Legend of shapes: B batch, S samples, T frames, N frequencies of the Fourier transform, M mel bands.
Frame t of a recording stands around its sample t * hop; a recording of S samples has 1 + S // hop of them.
"""

import torch
from torch import nn

from amp_recipes import fwd_default_precision
from amp_recipes.errors import ConfigError

# Mean energy of a recording below which it is silence: four orders below the rounding of 16 bits.
SILENCE = 1e-12


def valid_positions(lengths_B: torch.Tensor, size: int) -> torch.Tensor:
    """Return bool (B, size): True before each length, False in the padding."""
    return torch.arange(size, device=lengths_B.device) < lengths_B.unsqueeze(1)


def mel_filterbank(num_mels: int, fft_size: int, sample_rate: int, min_hz: float, max_hz: float) -> torch.Tensor:
    """Return triangular filters (M, N), N = fft_size // 2 + 1, whose peaks stand at equal distances in mel.

    mel = 2595 log10(1 + hz / 700) (O'Shaughnessy 1987, "Speech Communication", p. 150; the scale of HTK). A filter
    rises from its left neighbour's peak to 1 at its own and falls to 0 at its right neighbour's (Davis and Mermelstein
    1980), linearly in hertz. Raises ConfigError for bands that no filter fits into.
    """
    nyquist = sample_rate / 2
    if not 0 <= min_hz < max_hz <= nyquist:
        raise ConfigError(f"mel bands from {min_hz:g} to {max_hz:g} Hz; expected 0 <= min_hz < max_hz <= {nyquist:g}")
    ends_mel = 2595 * torch.log10(1 + torch.tensor([min_hz, max_hz], dtype=torch.float64) / 700)
    mels = torch.linspace(ends_mel[0], ends_mel[1], num_mels + 2, dtype=torch.float64)
    hz = 700 * (10 ** (mels / 2595) - 1)
    bins_N = torch.linspace(0, nyquist, fft_size // 2 + 1, dtype=torch.float64)
    rising_MN = (bins_N - hz[:-2, None]) / (hz[1:-1] - hz[:-2])[:, None]
    falling_MN = (hz[2:, None] - bins_N) / (hz[2:] - hz[1:-1])[:, None]
    filters_MN = torch.minimum(rising_MN, falling_MN).clamp(min=0)
    empty = (filters_MN.sum(dim=1) == 0).nonzero().flatten().tolist()
    if empty:
        raise ConfigError(
            f"mel band {empty[0]} of {num_mels} is narrower than a bin of the Fourier transform "
            f"({sample_rate / fft_size:.1f} Hz); use fewer mel bands or a longer window"
        )
    return filters_MN.to(torch.float32)


class LogMel(nn.Module):
    """Log-mel energies of recordings, normalised in each recording: see `normalize`.

    sample_rate: in Hz. window_ms, hop_ms: length of the Hann window and distance of frames. max_hz: None: half the
    sample rate. floor: added before the logarithm to the energies, which are divided by the recording's mean energy:
    what lies far below it, such as the noise of a room, makes no difference. So loudness makes none either.
    band_means: take the mean of each band away, as a microphone adds it; False: only that of all bands, for words so
    short that a band's mean is what tells one vowel from another.
    """

    def __init__(
        self,
        sample_rate: int,
        num_mels: int = 40,
        window_ms: float = 25.0,
        hop_ms: float = 10.0,
        min_hz: float = 60.0,
        max_hz: float | None = None,
        floor: float = 1e-3,
        band_means: bool = True,
    ):
        super().__init__()
        self.sample_rate = sample_rate
        self.window_size = round(sample_rate * window_ms / 1000)
        self.hop = round(sample_rate * hop_ms / 1000)
        self.num_mels = num_mels
        self.floor = floor
        self.band_means = band_means
        fft_size = 1 << (self.window_size - 1).bit_length()
        # Not saved: they are computed from the settings.
        filters = mel_filterbank(num_mels, fft_size, sample_rate, min_hz, max_hz or sample_rate / 2)
        self.register_buffer("filters_MN", filters, persistent=False)
        self.register_buffer("window", torch.hann_window(self.window_size), persistent=False)

    def num_frames(self, num_samples):
        """Return the frames of a recording of so many samples (a number or a tensor)."""
        return 1 + num_samples // self.hop

    # Energies span ten orders of magnitude: bf16 keeps 8 bits of each, fp16 ends at 65504 and at 6e-8, above silence.
    @fwd_default_precision
    def forward(self, waves_BS: torch.Tensor, num_samples_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features (B, T, M), 0 in the padding, and each recording's frames (B,).

        waves_BS: zero behind num_samples_B. A recording's features do not depend on the others of the batch.
        """
        energies_BTM = self.energies(waves_BS)
        num_frames_B = self.num_frames(num_samples_B)
        valid_BT1 = valid_positions(num_frames_B, energies_BTM.shape[1]).unsqueeze(2)
        total_B11 = (energies_BTM * valid_BT1).sum(dim=(1, 2), keepdim=True)
        mean_B11 = total_B11 / (num_frames_B.view(-1, 1, 1) * energies_BTM.shape[2])
        logs_BTM = torch.log(energies_BTM / (mean_B11 + SILENCE) + self.floor)
        return normalize(logs_BTM, valid_BT1, num_frames_B, self.band_means), num_frames_B

    def energies(self, waves_BS: torch.Tensor) -> torch.Tensor:
        """Return the energy in each mel band (B, T, M) of waves in [-1, 1]."""
        return (self.filters_MN @ self.power(waves_BS)).transpose(1, 2)

    def power(self, waves_BS: torch.Tensor) -> torch.Tensor:
        """Return the energy at each frequency (B, N, T)."""
        fft_size = 2 * (self.filters_MN.shape[1] - 1)
        # Zeros beyond the ends, as in the padding: reflected ends would depend on the length of the batch.
        spectra_BNT = torch.stft(
            waves_BS, fft_size, self.hop, self.window_size, self.window, pad_mode="constant", return_complex=True
        )
        return spectra_BNT.abs().square()


def normalize(
    x_BTM: torch.Tensor, valid_BT1: torch.Tensor, num_frames_B: torch.Tensor, band_means: bool = True
) -> torch.Tensor:
    """Return x with mean 0, in each band or in all, and variance 1 in all of a recording's valid frames; 0 elsewhere.

    The bands share one variance: to blow each up to the same size would make noise of the quiet ones.
    """
    counts_B11 = num_frames_B.view(-1, 1, 1)
    mean_B1M = (x_BTM * valid_BT1).sum(dim=1, keepdim=True) / counts_B11
    if not band_means:
        mean_B1M = mean_B1M.mean(dim=2, keepdim=True)
    centred_BTM = (x_BTM - mean_B1M) * valid_BT1
    variance_B11 = centred_BTM.square().mean(dim=2, keepdim=True).sum(dim=1, keepdim=True) / counts_B11
    # Silence varies by less than 0.1 in the logarithm, so it is not scaled up to the size of speech.
    return centred_BTM / (variance_B11 + 1e-2).sqrt()


class SpecAugment(nn.Module):
    """Hides stripes of features, drawn for each recording from torch's global generator (Park et al. 2019).

    time_masks, band_masks: how many. max_time_share: each hides at most this share of the recording's frames, and
    max_time_frames at most. max_bands: mel bands that each hides at most. A hidden value is 0, the recording's mean.
    """

    def __init__(
        self,
        time_masks: int = 2,
        max_time_share: float = 0.1,
        max_time_frames: int = 20,
        band_masks: int = 2,
        max_bands: int = 8,
    ):
        super().__init__()
        self.time_masks, self.max_time_share, self.max_time_frames = time_masks, max_time_share, max_time_frames
        self.band_masks, self.max_bands = band_masks, max_bands

    def forward(self, features_BTM: torch.Tensor, num_frames_B: torch.Tensor) -> torch.Tensor:
        """Return the features (B, T, M) with stripes of zeros."""
        _, frames, bands = features_BTM.shape
        widest_B = (num_frames_B * self.max_time_share).clamp(max=self.max_time_frames)
        hidden_BT = stripes(self.time_masks, widest_B, num_frames_B, frames)
        all_bands_B = torch.full_like(num_frames_B, bands)
        hidden_BM = stripes(self.band_masks, all_bands_B.clamp(max=self.max_bands), all_bands_B, bands)
        return features_BTM.masked_fill(hidden_BT.unsqueeze(2) | hidden_BM.unsqueeze(1), 0.0)


def stripes(count: int, widest_B: torch.Tensor, length_B: torch.Tensor, size: int) -> torch.Tensor:
    """Return bool (B, size) with `count` stripes of 0 to widest_B wide (whole numbers) inside length_B."""
    draws_2KB = torch.rand(2, count, len(length_B), device=length_B.device)
    width_KB = (draws_2KB[0] * (widest_B + 1)).floor()
    start_KB = (draws_2KB[1] * (length_B - width_KB + 1)).floor()
    at = torch.arange(size, device=length_B.device)
    inside = (at >= start_KB.unsqueeze(2)) & (at < (start_KB + width_KB).unsqueeze(2))
    return inside.any(dim=0)


class AddNoise(nn.Module):
    """Adds white noise to recordings at a signal-to-noise ratio drawn for each from torch's global generator.

    probability: share of the recordings. min_db, max_db: bounds of the ratio of mean energies, in decibels.
    """

    def __init__(self, probability: float = 0.5, min_db: float = 10.0, max_db: float = 40.0):
        super().__init__()
        self.probability, self.min_db, self.max_db = probability, min_db, max_db

    def forward(self, waves_BS: torch.Tensor, num_samples_B: torch.Tensor) -> torch.Tensor:
        """Return the waves (B, S), zero behind num_samples_B as before."""
        draws_2B1 = torch.rand(2, len(waves_BS), 1, device=waves_BS.device)
        energy_B1 = waves_BS.square().sum(dim=1, keepdim=True) / num_samples_B.unsqueeze(1)
        ratio_db_B1 = self.min_db + (self.max_db - self.min_db) * draws_2B1[0]
        scale_B1 = (energy_B1 * 10 ** (-ratio_db_B1 / 10)).sqrt() * (draws_2B1[1] < self.probability)
        noise_BS = torch.randn_like(waves_BS) * valid_positions(num_samples_B, waves_BS.shape[1])
        return waves_BS + scale_B1 * noise_BS
