"""Makes the default pretrained model: a tiny Llama, kept for later runs.

    python recipes/finetuning/tiny_model.py FOLDER UPDATES

trains a tokenizer and a language model on the source of Python's standard library, without the modules that the default
data is made of, and writes FOLDER in the Hugging Face layout. The recipe does this by itself where no model is given.
Legend of shapes: B batch, T tokens, V vocabulary.
"""

import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from stdlib_texts import corpus
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import Dataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from amp_recipes import Brain, EpochCounter, Stage

VOCABULARY = 2048
TOKENS = 64  # of a training row, and of a text that the model can take
BATCH_SIZE = 16
LEARNING_RATE = 4e-3


class LanguageModel(Brain):
    """Cross entropy of each token given those before it."""

    def compute_forward(self, batch: Sequence[torch.Tensor], stage: Stage) -> torch.Tensor:
        """Return the scores (B, T - 1, V) of the next token, for each token but the last."""
        return self.modules.model(input_ids=batch[0][:, :-1], use_cache=False).logits

    def compute_objectives(
        self, predictions: torch.Tensor, batch: Sequence[torch.Tensor], stage: Stage
    ) -> torch.Tensor:
        """Return the mean cross entropy in nats per token."""
        return F.cross_entropy(predictions.float().flatten(0, 1), batch[0][:, 1:].flatten())


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Return a byte pair tokenizer that splits at spaces, punctuation and underscores, between [CLS] and [SEP].

    No mark at the inner pieces of a word: with one, and so with WordPiece, training breaks ties by chance.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=list(special.values()), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=TOKENS, **special)


def rows_of_tokens(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """Return the texts, one after another, as rows of TOKENS tokens."""
    pieces = tokenizer(list(texts), verbose=False)["input_ids"]
    tokens = torch.tensor([token for text in pieces for token in text])
    return TensorDataset(tokens[: len(tokens) // TOKENS * TOKENS].view(-1, TOKENS))


def pretrain(folder: Path, updates: int) -> None:
    """Write the tokenizer and the model, pretrained for so many updates, into folder."""
    # A token has about 2.5 characters, so few updates need only a part of the corpus.
    texts = corpus(max_characters=max(100_000, 8 * updates * BATCH_SIZE * TOKENS))
    tokenizer = train_tokenizer(texts)
    rows = rows_of_tokens(texts, tokenizer)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    schedule = partial(
        torch.optim.lr_scheduler.OneCycleLR, max_lr=LEARNING_RATE, total_steps=updates + 1, pct_start=0.1
    )
    brain = LanguageModel(
        {"model": model},
        partial(torch.optim.AdamW, lr=LEARNING_RATE, weight_decay=0.1, fused=True),
        {"lr_scheduler": schedule},
        {"seed": 0, "optimizer_step_limit": updates, "max_grad_norm": 1.0, "precision": "auto"},
    )
    brain.fit(EpochCounter(updates), rows, train_loader_kwargs={"batch_size": BATCH_SIZE, "shuffle": True})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    pretrain(Path(sys.argv[1]), int(sys.argv[2]))
