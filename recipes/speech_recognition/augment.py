"""Decides what is kept of an unknown speaker and microphone: features of the speech alone, and many voices of each one.

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


class SpeakerLogMel(LogMel):
    """Log-mel energies above the floor, of the speech alone; in training, of changed vocal tracts and microphones.

    Loudness is measured where the recording is loud, and silence is 0 like the padding: silence around the speech,
    of which one person's recordings have much and another's none, changes nothing. That is where the features differ
    from `LogMel`, whose means and variance count all frames.

    warp_range: bounds of the factor by which training moves a recording's formants, each time another one, as a
    shorter or longer vocal tract does (vocal tract length perturbation, Jaitly and Hinton 2013). channel_db: standard
    deviation of the random gains over frequency that training gives a recording, as microphones do. Both are drawn
    from torch's global generator; None and 0: as it is. tilt_db: gain per octave against the fall of speech towards
    high frequencies. silence_db: ends of a recording quieter than its loudest frame by more than this are cut off:
    `num_frames` is then the most that there can be, so this class is for keywords, not for CTC, whose labels need each
    a step.
    floor: added to the energies, relative to the recording's loudness. The other arguments are those of `LogMel`.
    """

    def __init__(
        self,
        sample_rate: int,
        num_mels: int = 24,
        window_ms: float = 25.0,
        hop_ms: float = 10.0,
        min_hz: float = 60.0,
        max_hz: float | None = None,
        floor: float = 3e-3,
        warp_range: Sequence[float] | None = (0.85, 1.18),
        channel_db: float = 8.0,
        tilt_db: float = 3.0,
        silence_db: float = 35.0,
    ):
        super().__init__(sample_rate, num_mels, window_ms, hop_ms, min_hz, max_hz, floor)
        if warp_range is not None and not (len(warp_range) == 2 and 0.5 <= warp_range[0] <= warp_range[1] <= 2):
            raise ConfigError(
                f"warp_range is {list(warp_range)}; expected [smallest, largest] factor from 0.5 to 2, as [0.85, 1.18]"
            )
        if channel_db < 0 or silence_db <= 0 or floor <= 0:
            raise ConfigError(
                f"channel_db is {channel_db}, silence_db {silence_db}, floor {floor}; expected channel_db of at least "
                "0, and the others more than 0"
            )
        self.warp_range, self.channel_db, self.silence_db = warp_range, channel_db, silence_db
        ends_mel = [2595 * math.log10(1 + hz / 700) for hz in (min_hz, max_hz or sample_rate / 2)]
        corners_P = 700 * (10 ** (torch.linspace(*ends_mel, num_mels + 2) / 2595) - 1)
        gains_M = 10 ** (tilt_db / 10 * torch.log2(corners_P[1:-1] / 1000))
        bins_N = torch.linspace(0, sample_rate / 2, self.filters_MN.shape[1])
        order_C = torch.arange(1, CHANNEL_COSINES + 1)
        cosines_CM = torch.cos(order_C.unsqueeze(1) * torch.linspace(0, math.pi, num_mels))
        # Not saved: they follow from the settings.
        for name, value in {
            "corners_P": corners_P,
            "gains_M": gains_M,
            "bins_N": bins_N,
            "cosines_CM": cosines_CM,
        }.items():
            self.register_buffer(name, value, persistent=False)

    # As in LogMel: energies span more than the low precisions hold.
    @fwd_default_precision
    def forward(self, waves_BS: torch.Tensor, num_samples_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features (B, T, M), at least 0, 0 in the padding, and the frames of each one's speech (B,).

        waves_BS: zero behind num_samples_B. Without training, a recording's features do not depend on the others.
        """
        energies_BTM = self.energies(waves_BS) * self.gains_M
        energies_BTM, num_frames_B = cut_silence(energies_BTM, self.num_frames(num_samples_B), self.silence_db)
        if self.training and self.channel_db:
            energies_BTM = energies_BTM * self.draw_channels(len(waves_BS)).unsqueeze(1)
        # Each frame counts by its energy: the mean does not change with the silence around.
        power_BT1 = energies_BTM.sum(dim=2, keepdim=True)
        weights_BT1 = power_BT1 / (power_BT1.sum(dim=1, keepdim=True) + SILENCE)
        loudness_B11 = (energies_BTM * weights_BT1).sum(dim=(1, 2), keepdim=True) / self.num_mels + SILENCE
        # Divided so that speech is of the size of 1.
        return torch.log1p(energies_BTM / (loudness_B11 * self.floor)) / 3, num_frames_B

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


def cut_silence(
    energies_BTM: torch.Tensor, num_frames_B: torch.Tensor, silence_db: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the energies from the first loud frame on, 0 behind the last one, and how many frames that are.

    Loud: less than silence_db below the loudest frame. One frame more is kept at either end, if there is one.
    """
    frames = energies_BTM.shape[1]
    valid_BT = valid_positions(num_frames_B, frames)
    power_BT = energies_BTM.sum(dim=2) * valid_BT
    loud_BT = power_BT >= power_BT.amax(dim=1, keepdim=True) * 10 ** (-silence_db / 10)
    loud_BT &= valid_BT
    at = torch.arange(frames, device=energies_BTM.device)
    first_B1 = (torch.where(loud_BT, at, frames).amin(dim=1, keepdim=True) - 1).clamp(min=0)
    last_B1 = torch.minimum(torch.where(loud_BT, at, -1).amax(dim=1) + 1, num_frames_B - 1).unsqueeze(1)
    kept_B = (last_B1 - first_B1 + 1).squeeze(1)
    index_BT = (first_B1 + at).clamp(max=frames - 1)
    moved_BTM = energies_BTM.gather(1, index_BT.unsqueeze(2).expand_as(energies_BTM))
    return moved_BTM * valid_positions(kept_B, frames).unsqueeze(2), kept_B
