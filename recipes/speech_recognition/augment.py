"""Makes features of a word that depend little on speaker and microphone, and augments the voices.

Legend of shapes: B batch, S samples, T frames, N frequencies of the Fourier transform, M mel bands, P corners of bands.
"""

import math
from collections.abc import Sequence

import torch
from features import SILENCE, LogMel, valid_positions

from amp_recipes import fwd_default_precision
from amp_recipes.errors import ConfigError

# Random gains of a channel are a sum of so many cosines over the mel bands: the fewer, the smoother.
CHANNEL_COSINES = 4


class WordPicture(LogMel):
    """Log-mel energies of a word without the silence around, stretched to a fixed number of frames.

    So it makes no difference how fast and how loud it is said, nor how much silence stands around, of which one
    person's recordings have much and another's none, and the microphone makes less. That is where the features
    differ from `LogMel`; this class is for keywords, not for CTC, whose labels need each a step. Training changes each
    recording's vocal tract, microphone, ends and rhythm, drawn from torch's global generator.

    frames: of the result. tilt_db: gain per octave against the fall of speech towards high frequencies. silence_db:
    ends quieter than the loudest frame by more than this are cut off. floor_db: energies below the loudest one by more
    than this make no difference. band_means: share of each band's mean that is taken away, as a microphone adds it;
    the whole would also take away what tells one vowel from another in a short word. The mean of all bands is 0.
    warp_range: bounds of the factor by which training moves the formants, as a shorter or longer vocal tract does
    (vocal tract length perturbation, Jaitly and Hinton 2013). channel_db: standard deviation of the random gains over
    frequency, as microphones have. silence_jitter_db: silence_db is more or less by up to this. end_jitter: each end
    moves by up to this share of the word. rhythm_jitter: some parts are said by up to about this share faster or
    slower than others. None and 0: as it is. The other arguments are those of `LogMel`.
    """

    def __init__(
        self,
        sample_rate: int,
        frames: int = 32,
        num_mels: int = 24,
        window_ms: float = 25.0,
        hop_ms: float = 10.0,
        min_hz: float = 80.0,
        max_hz: float | None = None,
        tilt_db: float = 3.0,
        silence_db: float = 30.0,
        floor_db: float = 30.0,
        band_means: float = 0.5,
        warp_range: Sequence[float] | None = (0.82, 1.22),
        channel_db: float = 6.0,
        silence_jitter_db: float = 5.0,
        end_jitter: float = 0.06,
        rhythm_jitter: float = 0.3,
    ):
        super().__init__(sample_rate, num_mels, window_ms, hop_ms, min_hz, max_hz, 10 ** (-floor_db / 10), band_means)
        if warp_range is not None and not (len(warp_range) == 2 and 0.5 <= warp_range[0] <= warp_range[1] <= 2):
            raise ConfigError(
                f"warp_range is {list(warp_range)}; expected [smallest, largest] factor from 0.5 to 2, as [0.85, 1.18]"
            )
        if not 0 <= band_means <= 1:
            raise ConfigError(f"band_means is {band_means}; expected a share from 0 to 1")
        if frames < 1 or channel_db < 0 or floor_db <= 0 or not 0 <= silence_jitter_db < silence_db:
            raise ConfigError(
                f"frames is {frames}, channel_db {channel_db}, floor_db {floor_db}, silence_db {silence_db}, "
                f"silence_jitter_db {silence_jitter_db}; expected frames of at least 1, floor_db and silence_db more "
                "than 0, channel_db at least 0, and silence_jitter_db from 0 to less than silence_db"
            )
        # From 0.5 on, time would stop or run backwards somewhere in the word.
        if not (0 <= end_jitter <= 0.25 and 0 <= rhythm_jitter < 0.5):
            raise ConfigError(
                f"end_jitter is {end_jitter}, rhythm_jitter {rhythm_jitter}; expected end_jitter from 0 to 0.25 and "
                "rhythm_jitter from 0 to less than 0.5"
            )
        self.frames = frames
        self.silence_db, self.silence_jitter_db = silence_db, silence_jitter_db
        self.warp_range, self.channel_db = warp_range, channel_db
        self.end_jitter, self.rhythm_jitter = end_jitter, rhythm_jitter
        ends_mel = [2595 * math.log10(1 + hz / 700) for hz in (min_hz, max_hz or sample_rate / 2)]
        corners_P = 700 * (10 ** (torch.linspace(*ends_mel, num_mels + 2) / 2595) - 1)
        gains_M = 10 ** (tilt_db / 10 * torch.log2(corners_P[1:-1] / 1000))
        bins_N = torch.linspace(0, sample_rate / 2, self.filters_MN.shape[1])
        order_C = torch.arange(1, CHANNEL_COSINES + 1)
        cosines_CM = torch.cos(order_C.unsqueeze(1) * torch.linspace(0, math.pi, num_mels))
        # Not saved: they are computed from the settings.
        for name, value in {
            "corners_P": corners_P,
            "gains_M": gains_M,
            "bins_N": bins_N,
            "cosines_CM": cosines_CM,
            "places_T": torch.linspace(0, 1, frames),
        }.items():
            self.register_buffer(name, value, persistent=False)

    def num_frames(self, num_samples):
        """Return the frames of a picture, whatever the samples are (a number or a tensor)."""
        return 0 * num_samples + self.frames

    # As in LogMel: energies span more than the low precisions hold.
    @fwd_default_precision
    def forward(self, waves_BS: torch.Tensor, num_samples_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features (B, T, M), in units of 10 dB, and each one's frames (B,), all the same.

        waves_BS: zero behind num_samples_B. Without training, a recording's features do not depend on the others.
        """
        energies_BTM = self.energies(waves_BS) * self.gains_M
        heard_B = super().num_frames(num_samples_B)
        energies_BTM = energies_BTM * valid_positions(heard_B, energies_BTM.shape[1]).unsqueeze(2)
        first_B1, last_B1 = find_word(energies_BTM, heard_B, self.draw_silence_db(len(waves_BS)))
        if self.training and self.channel_db:
            energies_BTM = energies_BTM * self.draw_channels(len(waves_BS)).unsqueeze(1)
        loudest_B11 = energies_BTM.amax(dim=(1, 2), keepdim=True) + SILENCE
        logs_BTM = torch.log10(energies_BTM / loudest_B11 + self.floor)
        at_BT = first_B1 + self.draw_places(len(waves_BS)) * (last_B1 - first_B1)
        at_BT = torch.minimum(at_BT.clamp(min=0), heard_B.unsqueeze(1) - 1.0)
        pictures_BTM = interpolate(logs_BTM, at_BT)
        means_B1M = pictures_BTM.mean(dim=1, keepdim=True)
        means_B1M = torch.lerp(means_B1M.mean(dim=2, keepdim=True), means_B1M, self.band_means)
        return pictures_BTM - means_B1M, self.num_frames(num_samples_B)

    def energies(self, waves_BS: torch.Tensor) -> torch.Tensor:
        """Return the energy in each mel band (B, T, M) of waves in [-1, 1]; in training, of warped bands."""
        if not (self.training and self.warp_range):
            return super().energies(waves_BS)
        smallest, largest = (math.log(factor) for factor in self.warp_range)
        factors_B1 = (smallest + (largest - smallest) * torch.rand(len(waves_BS), 1, device=waves_BS.device)).exp()
        corners_BP = warp(self.corners_P, factors_B1, float(self.sample_rate / 2))
        return (triangles(corners_BP, self.bins_N) @ self.power(waves_BS)).transpose(1, 2)

    def draw_channels(self, count: int) -> torch.Tensor:
        """Return smooth random gains of energy over the bands (count, M)."""
        draws_BC = torch.randn(count, CHANNEL_COSINES, device=self.cosines_CM.device)
        # A cosine's variance is 1/2: the sum has the standard deviation channel_db.
        gains_db_BM = draws_BC @ self.cosines_CM * (self.channel_db / math.sqrt(CHANNEL_COSINES / 2))
        return 10 ** (gains_db_BM / 10)

    def draw_silence_db(self, count: int) -> torch.Tensor | float:
        """Return how far below the loudest frame silence begins, in decibels; in training (count, 1) random ones."""
        if not (self.training and self.silence_jitter_db):
            return self.silence_db
        draws_B1 = torch.rand(count, 1, device=self.places_T.device)
        return self.silence_db + self.silence_jitter_db * (2 * draws_B1 - 1)

    def draw_places(self, count: int) -> torch.Tensor:
        """Return where in the word each frame stands, 0 to 1 from end to end (count, T); in training a bit off.

        The sine waves move the places by less than they stand apart: time never runs backwards.
        """
        if not (self.training and (self.end_jitter or self.rhythm_jitter)):
            return self.places_T.expand(count, -1)
        draws_4B1 = 2 * torch.rand(4, count, 1, device=self.places_T.device) - 1
        bend_B1, sway_B1 = draws_4B1[:2] * self.rhythm_jitter
        start_B1, stop_B1 = draws_4B1[2:] * self.end_jitter
        angle_T = math.pi * self.places_T
        places_BT = self.places_T + bend_B1 * angle_T.sin() / math.pi + sway_B1 * (2 * angle_T).sin() / (2 * math.pi)
        return start_B1 + places_BT * (1 + stop_B1 - start_B1)


def warp(hz: torch.Tensor, factors_B1: torch.Tensor, nyquist: float) -> torch.Tensor:
    """Return frequencies (B, P) times factors (B, 1), but nyquist where it was (Jaitly and Hinton 2013, equation 1).

    Up to an edge, at most 0.8 of nyquist before and after, the map is the factor; beyond, a line to nyquist.
    """
    edge_B1 = 0.8 * nyquist * factors_B1.clamp(max=1) / factors_B1
    beyond = nyquist - (nyquist - edge_B1 * factors_B1) / (nyquist - edge_B1) * (nyquist - hz)
    return torch.where(hz <= edge_B1, hz * factors_B1, beyond)


def triangles(corners_BP: torch.Tensor, bins_N: torch.Tensor) -> torch.Tensor:
    """Return filters (B, P - 2, N) that rise from each corner to 1 at the next and fall to 0 at the one after."""
    left, peak, right = corners_BP[:, :-2, None], corners_BP[:, 1:-1, None], corners_BP[:, 2:, None]
    return torch.minimum((bins_N - left) / (peak - left), (right - bins_N) / (right - peak)).clamp(min=0)


def find_word(
    energies_BTM: torch.Tensor, num_frames_B: torch.Tensor, silence_db: torch.Tensor | float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first and the last frame (B, 1) that is less than silence_db below the loudest.

    energies_BTM: 0 behind num_frames_B.
    Loudness is the mean of a frame and its neighbours, so that a click does not count as one.
    """
    around_BT = torch.nn.functional.avg_pool1d(energies_BTM.sum(dim=2).unsqueeze(1), 3, stride=1, padding=1).squeeze(1)
    loud_BT = around_BT >= around_BT.amax(dim=1, keepdim=True) * 10 ** (-silence_db / 10)
    loud_BT &= valid_positions(num_frames_B, loud_BT.shape[1])
    at_T = torch.arange(loud_BT.shape[1], device=loud_BT.device)
    first_B1 = torch.where(loud_BT, at_T, len(at_T)).amin(dim=1, keepdim=True)
    return first_B1, torch.where(loud_BT, at_T, -1).amax(dim=1, keepdim=True)


def interpolate(x_BTM: torch.Tensor, at_BT: torch.Tensor) -> torch.Tensor:
    """Return x at places between its frames, which are counted from 0, on the line from one to the next."""
    before_BT = at_BT.long()
    after_BT = (before_BT + 1).clamp(max=x_BTM.shape[1] - 1)
    share_BT1 = (at_BT - before_BT).unsqueeze(2)
    left_BTM, right_BTM = (
        x_BTM.gather(1, it_BT.unsqueeze(2).expand(-1, -1, x_BTM.shape[2])) for it_BT in (before_BT, after_BT)
    )
    return torch.lerp(left_BTM, right_BTM, share_BT1)
