"""Defines the objective: the characters of a transcript by CTC, or one keyword out of a list.

Both have the same methods, so that train.py is the same for both: `encode` and `check` for the data, `loss`, `weight`,
`decode` and `count` for a batch. `num_steps` is a list on the host: torch's CTC loss reads lengths there, and would
wait for a device to send them. Legend of shapes: B batch, T steps, K outputs, L labels of a target.
"""

from collections.abc import Sequence
from itertools import groupby, pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from amp_recipes import fwd_default_precision, needs_extra
from amp_recipes.errors import ConfigError, DataError

with needs_extra("speech"):
    import jiwer

Batch = dict[str, Any]


class CharacterCTC:
    """Connectionist temporal classification (Graves et al. 2006) on the characters of `alphabet`; output 0 is blank.

    lowercase: transcripts are lowered first. beam_size: hypotheses that decoding follows; 1: the best path (greedy).
    """

    def __init__(self, alphabet: str, lowercase: bool = True, beam_size: int = 1):
        repeated = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if not alphabet or repeated:
            raise ConfigError(f"alphabet {alphabet!r} is empty or repeats {repeated}; expected each character once")
        if beam_size < 1:
            raise ConfigError(f"beam_size is {beam_size}; expected the number of hypotheses, 1 or more")
        if beam_size > 1:
            import_decoder()  # an error now is better than one after an epoch
        self.alphabet = alphabet
        self.lowercase = lowercase
        self.beam_size = beam_size
        self.outputs = {character: output for output, character in enumerate(alphabet, start=1)}

    @property
    def num_outputs(self) -> int:
        """The characters and the blank."""
        return len(self.alphabet) + 1

    @property
    def names(self) -> list[str]:
        """What each output means, for people."""
        return ["blank", *("space" if character == " " else character for character in self.alphabet)]

    def encode(self, text: str, where: str) -> list[int]:
        """Return the labels of a transcript; raises DataError, which tells `where`, for what has none."""
        text = " ".join(text.split())
        text = text.lower() if self.lowercase else text
        unknown = sorted(set(text).difference(self.outputs))
        if unknown:
            raise DataError(
                f"{where}: its text {text!r} holds {', '.join(map(repr, unknown))}, which the alphabet "
                f"{self.alphabet!r} lacks. Clean the text, or give --objective.alphabet"
            )
        if not text:
            raise DataError(f"{where}: its text is empty. Write what is said, or leave the recording out")
        return [self.outputs[character] for character in text]

    def steps_needed(self, labels: Sequence[int]) -> int:
        """Return the fewest steps in which CTC can say the labels: one each, and a blank between equal ones."""
        return len(labels) + sum(a == b for a, b in pairwise(labels))

    def weight(self, num_steps: Sequence[int]) -> int:
        """Return the weight of a batch: its steps, without padding."""
        return sum(num_steps)

    # CPU autocast computes the log-softmax in bf16, which has 8 bits: too few for a sum over hundreds of steps.
    @fwd_default_precision
    def loss(self, scores_BTK: torch.Tensor, num_steps: Sequence[int], batch: Batch) -> torch.Tensor:
        """Return the negative log likelihood of the targets per step of the batch."""
        log_probs_TBK = scores_BTK.log_softmax(dim=2).transpose(0, 1)
        # CUDA's kernels copy the lengths to the device in forward and backward, and wait for it.
        total = F.ctc_loss(
            log_probs_TBK, batch["target"], num_steps, batch["label_counts"], reduction="sum", zero_infinity=False
        )
        return total / sum(num_steps)

    def decode(self, scores_BTK: torch.Tensor, num_steps: Sequence[int]) -> list[str]:
        """Return a transcript for each recording: the collapsed best path, or a beam search's best labels."""
        log_probs_BTK = scores_BTK.detach().float().log_softmax(dim=2).cpu()
        search = best_path if self.beam_size == 1 else self.search_beam
        return [
            self.text(search(log_probs_TK[:steps]))
            for log_probs_TK, steps in zip(log_probs_BTK, num_steps, strict=True)
        ]

    def search_beam(self, log_probs_TK: torch.Tensor) -> list[int]:
        """Return the labels that are the most probable over all their paths, among those that the beam follows."""
        decoders = import_decoder()
        steps, outputs = log_probs_TK.shape
        options = decoders.LexiconFreeDecoderOptions(
            beam_size=self.beam_size,
            beam_size_token=outputs,
            beam_threshold=float("inf"),
            lm_weight=0.0,
            sil_score=0.0,
            log_add=True,
            criterion_type=decoders.CriterionType.CTC,
        )
        decoder = decoders.LexiconFreeDecoder(options, decoders.ZeroLM(), -1, 0, [])
        # It takes the address of the numbers, so they must be contiguous float32, alive until it returns.
        log_probs_TK = log_probs_TK.contiguous()
        path = decoder.decode(log_probs_TK.data_ptr(), steps, outputs)[0].tokens
        # It marks both ends by -1.
        return collapse([max(output, 0) for output in path])

    def text(self, labels: Sequence[int]) -> str:
        """Return the labels as characters."""
        return "".join(self.alphabet[label - 1] for label in labels)

    def references(self, batch: Batch) -> list[str]:
        """Return the transcripts of a batch."""
        targets = batch["target"].tolist()
        return [self.text(row[:count]) for row, count in zip(targets, batch["label_counts"], strict=True)]

    def count(self, scores_BTK: torch.Tensor, num_steps: Sequence[int], batch: Batch) -> dict[str, tuple[int, int]]:
        """Return name -> (errors, of how many): edits of words (WER) and of characters (CER), as jiwer counts them."""
        references, hypotheses = self.references(batch), self.decode(scores_BTK, num_steps)
        words = jiwer.process_words(references, hypotheses)
        characters = jiwer.process_characters(references, hypotheses)
        return {name: edits(found) for name, found in (("WER", words), ("CER", characters))}


def import_decoder() -> ModuleType:
    """Import the beam search; raises ConfigError where it is not installed."""
    try:
        from flashlight.lib.text import decoder
    except ModuleNotFoundError as error:
        raise ConfigError(
            "a beam search needs the package flashlight-text, which has no wheel for Python 3.13 and later. "
            "Install it, or give --objective.beam_size 1 for the best path"
        ) from error
    return decoder


def edits(found: jiwer.WordOutput | jiwer.CharacterOutput) -> tuple[int, int]:
    """Return the edits and the length of the references that they are counted in."""
    return (
        found.substitutions + found.deletions + found.insertions,
        found.hits + found.substitutions + found.deletions,
    )


def best_path(log_probs_TK: torch.Tensor) -> list[int]:
    """Return the labels of the most probable path."""
    return collapse(log_probs_TK.argmax(dim=1).tolist())


def collapse(path: Sequence[int]) -> list[int]:
    """Return a path without repetitions, then without blanks (output 0)."""
    return [output for output, _ in groupby(path) if output]


class Keywords:
    """One of `labels` for a whole recording, by cross entropy.

    label_smoothing: share of a target that training spreads over all labels.
    """

    def __init__(self, labels: Sequence[str | int], label_smoothing: float = 0.0):
        self.labels = [str(label) for label in labels]
        if len(set(self.labels)) < 2 or len(set(self.labels)) < len(self.labels):
            raise ConfigError(f"labels {self.labels}: expected at least two, each once")
        self.label_smoothing = label_smoothing

    @property
    def num_outputs(self) -> int:
        """The labels."""
        return len(self.labels)

    @property
    def names(self) -> list[str]:
        """What each output means, for people."""
        return self.labels

    def encode(self, text: str, where: str) -> list[int]:
        """Return the label's number in a list; raises DataError, which tells `where`, for another one."""
        if text not in self.labels:
            raise DataError(
                f"{where}: its label {text!r} is none of {', '.join(self.labels)}. Give all with "
                "--objective.labels='[a, b, ...]', or leave the recording out"
            )
        return [self.labels.index(text)]

    def steps_needed(self, labels: Sequence[int]) -> int:
        """Return 1: any recording can be classified."""
        return 1

    def weight(self, num_steps: Sequence[int]) -> int:
        """Return the weight of a batch: its number of recordings."""
        return len(num_steps)

    @fwd_default_precision
    def loss(self, scores_BK: torch.Tensor, num_steps: Sequence[int], batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy; labels are smoothed."""
        return F.cross_entropy(scores_BK, batch["target"][:, 0], label_smoothing=self.label_smoothing)

    def decode(self, scores_BK: torch.Tensor, num_steps: Sequence[int]) -> list[str]:
        """Return the label of the highest score of each recording."""
        return [self.labels[best] for best in scores_BK.argmax(dim=1).tolist()]

    def count(
        self, scores_BK: torch.Tensor, num_steps: Sequence[int], batch: Batch
    ) -> dict[str, tuple[torch.Tensor, int]]:
        """Return {"accuracy": (right answers, on the device, of how many)}."""
        return {"accuracy": (scores_BK.argmax(dim=1) == batch["target"][:, 0], len(scores_BK))}
