"""Defines the network: convolutions that shorten the features, an encoder and scores; or convolutions alone for a word.

Legend of shapes: B batch, T frames, M mel bands, C channels, D features, H heads, K outputs.
Everything behind a recording's last frame is kept 0, so that its scores do not depend on the others of the batch.
"""

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from features import valid_positions
from torch import nn

from amp_recipes.errors import ConfigError


class SpeechModel(nn.Module):
    """Scores of the outputs in each frame (for CTC), or (pool_frames) of the recording, from its mean and its peaks.

    front: shortens (B, T, M) to (B, T', D); encoder: keeps (B, T', D). Both take and give lengths or masks as
    `ConvolutionalFront` and `RecurrentEncoder` do. dropout: share of the encoded features that training sets to zero.
    """

    def __init__(
        self,
        front: nn.Module,
        encoder: nn.Module,
        width: int,
        num_outputs: int,
        pool_frames: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.front = front
        self.encoder = encoder
        self.pool_frames = pool_frames
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(2 * width if pool_frames else width, num_outputs)

    def num_steps(self, num_frames):
        """Return the steps that the scores have for so many frames (a number or a tensor)."""
        return self.front.num_steps(num_frames)

    def forward(self, features_BTM: torch.Tensor, num_frames_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores (B, T', K), or (B, K) if pool_frames, and the valid steps (B,)."""
        x_BTD, num_steps_B = self.front(features_BTM, num_frames_B)
        x_BTD = self.encoder(x_BTD, num_steps_B)
        if self.pool_frames:
            valid_BT1 = valid_positions(num_steps_B, x_BTD.shape[1]).unsqueeze(2)
            mean_BD = (x_BTD.float() * valid_BT1).sum(dim=1) / num_steps_B.unsqueeze(1)
            # The peaks, too, because the mean hides a burst of a few frames.
            peak_BD = x_BTD.float().masked_fill(~valid_BT1, -math.inf).amax(dim=1)
            return self.head(self.dropout(torch.cat((mean_BD, peak_BD), dim=1))), num_steps_B
        return self.head(self.dropout(x_BTD)), num_steps_B


class WordClassifier(nn.Module):
    """Scores of a word's picture of fixed size, by three 3x3 convolutions; the first two halve it.

    frames, num_mels: size of the picture, as `augment.WordPicture` makes it, at least 4 and 12. channels: of the
    first two convolutions; width: of the last. BatchNorm may stand behind each, as pictures have no padding. Then the
    mel bands are averaged in about three regions, so that a formant may be a bit higher; the frames are not.
    dropout: share of the last features that training sets to zero.
    """

    def __init__(
        self,
        frames: int,
        num_mels: int,
        num_outputs: int,
        width: int = 64,
        channels: Sequence[int] = (24, 48),
        dropout: float = 0.5,
    ):
        super().__init__()
        if frames < 4 or num_mels < 12 or len(channels) != 2:
            raise ConfigError(
                f"model: frames is {frames}, num_mels {num_mels}, channels {list(channels)}; expected at least 4 "
                "frames, at least 12 mel bands, and the channels of two convolutions"
            )
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((1, *channels, width)):
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
            layers += [nn.MaxPool2d(2)]
        layers.pop()  # the last does not halve
        bands = num_mels // 4
        self.convolutions = nn.Sequential(*layers, nn.AvgPool2d((1, bands // 3)))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width * (frames // 4) * (bands // (bands // 3)), num_outputs)

    def num_steps(self, num_frames):
        """Return num_frames: there is one decision for all frames."""
        return num_frames

    def forward(self, features_BTM: torch.Tensor, num_frames_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores (B, K), and num_frames_B unchanged."""
        x_BCTM = self.convolutions(features_BTM.unsqueeze(1))
        return self.head(self.dropout(x_BCTM.flatten(1))), num_frames_B


class ConvolutionalFront(nn.Module):
    """3x3 convolutions over time and mel bands, each normalised over its channels, then a linear map to `width`.

    channels: of each convolution; time_strides: frames of its input per frame of its output. The bands are halved by
    each. LayerNorm, not BatchNorm, whose statistics would count padding.
    """

    def __init__(self, num_mels: int, width: int, channels: Sequence[int] = (32, 32), time_strides=(2, 1)):
        super().__init__()
        if len(channels) != len(time_strides):
            raise ConfigError(f"front: {len(channels)} channels and {len(time_strides)} time_strides; expected as many")
        self.time_strides = tuple(time_strides)
        before = (1, *channels)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before[layer], channels[layer], 3, stride=(stride, 2), padding=1)
            for layer, stride in enumerate(self.time_strides)
        )
        self.channel_norms = nn.ModuleList(nn.LayerNorm(count) for count in channels)
        for _ in channels:
            num_mels = (num_mels + 1) // 2
        self.project = nn.Linear(before[-1] * num_mels, width)
        self.norm = nn.LayerNorm(width)

    def num_steps(self, num_frames):
        """Return the steps for so many frames (a number or a tensor): each stride rounds up."""
        for stride in self.time_strides:
            num_frames = (num_frames + stride - 1) // stride
        return num_frames

    def forward(self, features_BTM: torch.Tensor, num_frames_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (B, T', D) and the valid steps (B,)."""
        x_BCTM = features_BTM.unsqueeze(1)
        for convolution, norm, stride in zip(self.convolutions, self.channel_norms, self.time_strides, strict=True):
            x_BCTM = F.relu(norm(convolution(x_BCTM).movedim(1, 3)).movedim(3, 1))
            num_frames_B = (num_frames_B + stride - 1) // stride
            x_BCTM = x_BCTM * valid_positions(num_frames_B, x_BCTM.shape[2])[:, None, :, None]
        x_BTD = self.norm(self.project(x_BCTM.transpose(1, 2).flatten(2)))
        return x_BTD * valid_positions(num_frames_B, x_BTD.shape[1]).unsqueeze(2), num_frames_B


class RecurrentEncoder(nn.Module):
    """Bidirectional recurrent layers (kind "gru" or "lstm"), each with a shortcut and LayerNorm.

    Under CPU autocast a GRU stays in fp32; an LSTM follows it, and raises in fp16 on a CPU without fp16 arithmetic:
    `--fp32_modules='[type:LSTM]'` then keeps it in fp32. On a GPU both follow.
    """

    def __init__(self, width: int, layers: int = 2, kind: str = "gru", dropout: float = 0.0):
        super().__init__()
        kinds = {"gru": nn.GRU, "lstm": nn.LSTM}
        if kind not in kinds:
            raise ConfigError(f"encoder: kind {kind!r} is unknown; expected one of {', '.join(kinds)}")
        if width % 2:
            raise ConfigError(f"encoder: width {width} is odd; each direction has half of it")
        self.forwards = nn.ModuleList(kinds[kind](width, width // 2, batch_first=True) for _ in range(layers))
        self.backwards = nn.ModuleList(kinds[kind](width, width // 2, batch_first=True) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor, num_steps_B: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D)."""
        valid_BT1 = valid_positions(num_steps_B, x_BTD.shape[1]).unsqueeze(2)
        for layer, norm in enumerate(self.norms):
            ahead_BTD, _ = self.forwards[layer](x_BTD)
            back_BTD, _ = self.backwards[layer](turn_round(x_BTD, num_steps_B))
            both_BTD = torch.cat((ahead_BTD, turn_round(back_BTD, num_steps_B)), dim=2)
            x_BTD = norm(x_BTD + self.dropout(both_BTD)) * valid_BT1
        return x_BTD


def turn_round(x_BTD: torch.Tensor, num_steps_B: torch.Tensor) -> torch.Tensor:
    """Return x with the valid steps of each recording in reverse order and the padding where it was.

    So the backward layer begins at the recording's end, and lengths need not be on the host as for a packed sequence.
    """
    steps_T = torch.arange(x_BTD.shape[1], device=x_BTD.device)
    mirrored_BT = num_steps_B.unsqueeze(1) - 1 - steps_T
    index_BT = torch.where(mirrored_BT >= 0, mirrored_BT, steps_T)
    return x_BTD.gather(1, index_BT.unsqueeze(2).expand_as(x_BTD))


class ConformerEncoder(nn.Module):
    """Conformer blocks (Gulati et al. 2020): attention sees the whole recording, a convolution its surroundings.

    Positions are rotary (Su et al. 2021). LayerNorm stands where the paper has BatchNorm, whose statistics would
    count padding. width: divisible by 2 * heads. kernel_size: steps that the convolution sees, odd.
    """

    def __init__(self, width: int, layers: int = 4, heads: int = 4, kernel_size: int = 15, dropout: float = 0.1):
        super().__init__()
        if width % (2 * heads):
            raise ConfigError(f"encoder: width {width} is not divisible by 2 * heads = {2 * heads}")
        if kernel_size % 2 == 0:
            raise ConfigError(f"encoder: kernel_size {kernel_size} is even; expected an odd number of steps")
        self.blocks = nn.ModuleList(ConformerBlock(width, heads, kernel_size, dropout) for _ in range(layers))

    def forward(self, x_BTD: torch.Tensor, num_steps_B: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D)."""
        valid_BT = valid_positions(num_steps_B, x_BTD.shape[1])
        for block in self.blocks:
            x_BTD = block(x_BTD, valid_BT)
        return x_BTD * valid_BT.unsqueeze(2)


class ConformerBlock(nn.Module):
    """Half a feed-forward step, attention, convolution, the other half, each with a shortcut."""

    def __init__(self, width: int, heads: int, kernel_size: int, dropout: float):
        super().__init__()
        self.feed_in = feed_forward(width, dropout)
        self.attention = RotaryAttention(width, heads, dropout)
        self.convolution = GatedConvolution(width, kernel_size, dropout)
        self.feed_out = feed_forward(width, dropout)
        self.norm = nn.LayerNorm(width)

    def forward(self, x_BTD: torch.Tensor, valid_BT: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D); valid_BT: False in the padding."""
        x_BTD = x_BTD + 0.5 * self.feed_in(x_BTD)
        x_BTD = x_BTD + self.attention(x_BTD, valid_BT)
        x_BTD = x_BTD + self.convolution(x_BTD, valid_BT)
        return self.norm(x_BTD + 0.5 * self.feed_out(x_BTD))


def feed_forward(width: int, dropout: float) -> nn.Sequential:
    """Return LayerNorm, a layer four times as wide, and back."""
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.SiLU(),
        nn.Dropout(dropout),
        nn.Linear(4 * width, width),
        nn.Dropout(dropout),
    )


class RotaryAttention(nn.Module):
    """LayerNorm, then self-attention whose scores depend on the distance of steps."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        pairs = width // heads // 2
        self.register_buffer("frequencies", 1e4 ** (-torch.arange(pairs) / pairs), persistent=False)

    def forward(self, x_BTD: torch.Tensor, valid_BT: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D)."""
        batch, steps, width = x_BTD.shape
        projected = self.queries_keys_values(self.norm(x_BTD)).view(batch, steps, 3, self.heads, -1)
        queries_BHTD, keys_BHTD, values_BHTD = projected.permute(2, 0, 3, 1, 4)
        angles_TD = torch.arange(steps, device=x_BTD.device).unsqueeze(1) * self.frequencies
        mixed_BHTD = F.scaled_dot_product_attention(
            rotate(queries_BHTD, angles_TD),
            rotate(keys_BHTD, angles_TD),
            values_BHTD,
            attn_mask=valid_BT[:, None, None, :],
        )
        return self.dropout(self.out(mixed_BHTD.transpose(1, 2).reshape(batch, steps, width)))


def rotate(x_BHTD: torch.Tensor, angles_TD: torch.Tensor) -> torch.Tensor:
    """Return x, each pair (i, i + D / 2) of its features turned by the step's angle for it, in the dtype of x."""
    left, right = x_BHTD.float().chunk(2, dim=-1)
    cos, sin = angles_TD.cos(), angles_TD.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_BHTD.dtype)


class GatedConvolution(nn.Module):
    """LayerNorm, a gated pointwise map, a depthwise convolution over time, and a pointwise map back."""

    def __init__(self, width: int, kernel_size: int, dropout: float):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gated = nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv1d(width, width, kernel_size, padding=kernel_size // 2, groups=width)
        self.norm_after = nn.LayerNorm(width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor, valid_BT: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D)."""
        gated_BTD = F.glu(self.gated(self.norm(x_BTD))) * valid_BT.unsqueeze(2)
        around_BTD = self.depthwise(gated_BTD.transpose(1, 2)).transpose(1, 2)
        return self.dropout(self.out(F.silu(self.norm_after(around_BTD))))
