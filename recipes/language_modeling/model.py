"""Defines the network: a decoder-only transformer (RMSNorm, rotary embeddings, SwiGLU, tied embeddings).

Its input may tell of each token also those just before it, by hashed n-grams, of which bytes have much use.
Legend of shapes: B batch, T tokens, P tokens before (in the cache), H heads, Q features of a head, D features (H * Q),
F hidden features, V vocabulary, N parameters, L layers, G tokens before that an n-gram reaches back to.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import nn

IGNORE = -100  # the target of padding
Cache = tuple[torch.Tensor, torch.Tensor]  # keys and values of one layer, each (B, H, P, Q)
State = tuple[torch.Tensor, list[Cache]]  # the last tokens (B, G), for n-grams, and the caches of all layers
_HASH_FACTOR = 6364136223846793005  # Knuth's for a generator modulo 2^64, whose upper bits are the good ones


class NgramEmbedding(nn.Module):
    """A vector for each token with the one, two ... before it (Pagnoni et al. 2024, "Byte Latent Transformer").

    longest: tokens of the longest n-gram; 2 or more. Each length has a table of `rows` vectors, and a hash of the
    n-gram chooses among them: a few may share one.
    """

    def __init__(self, features: int, longest: int, rows: int):
        super().__init__()
        self.reach = longest - 1
        self.tables = nn.ModuleList(nn.Embedding(rows, features) for _ in range(self.reach))

    def forward(self, tokens_BT: torch.Tensor, before_BG: torch.Tensor) -> torch.Tensor:
        """Return the sum over all lengths (B, T, D). before: the tokens just before these, 0 where there are none."""
        line = torch.cat((before_BG, tokens_BT), dim=1)
        hash_BT, vectors = tokens_BT * _HASH_FACTOR, []
        for back, table in enumerate(self.tables, 1):
            first = self.reach - back
            hash_BT = (hash_BT + line[:, first : first + tokens_BT.shape[1]] + 1) * _HASH_FACTOR
            vectors.append(table((hash_BT >> 33) % table.num_embeddings))
        return sum(vectors)


class RotaryEmbedding(nn.Module):
    """Turns pairs of features by an angle that grows with the place (Su et al. 2021, "RoFormer").

    The angles are fp32 whatever the precision: at place 1000, bf16 has steps of 4 radians. The result has x's dtype.
    """

    def __init__(self, head_features: int, max_tokens: int, base: float = 10_000.0):
        super().__init__()
        rates = base ** (-torch.arange(0, head_features, 2, dtype=torch.float64) / head_features)
        angles_TQ = torch.arange(max_tokens, dtype=torch.float64).outer(rates).repeat(1, 2)
        # Not saved: they are computed from the settings.
        self.register_buffer("cos_TQ", angles_TQ.cos().float(), persistent=False)
        self.register_buffer("sin_TQ", angles_TQ.sin().float(), persistent=False)

    def forward(self, x_BHTQ: torch.Tensor, past: int) -> torch.Tensor:
        """Return x rotated, with its first token at position `past`; same shape and dtype."""
        until = past + x_BHTQ.shape[2]
        one, other = x_BHTQ.chunk(2, dim=-1)
        crossed_BHTQ = torch.cat((-other, one), dim=-1)
        turned_BHTQ = x_BHTQ * self.cos_TQ[past:until] + crossed_BHTQ * self.sin_TQ[past:until]
        return turned_BHTQ.to(x_BHTQ.dtype)


class Attention(nn.Module):
    """Causal self-attention of several heads."""

    def __init__(self, features: int, heads: int, rotary: RotaryEmbedding):
        super().__init__()
        self.heads = heads
        self.rotary = rotary
        self.qkv = nn.Linear(features, 3 * features, bias=False)
        self.out = nn.Linear(features, features, bias=False)

    def forward(self, x_BTD: torch.Tensor, cache: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        """Return the attention of each token to itself and those before it (B, T, D), and the cache.

        cache: of the tokens before; then x may hold one token only, which sees them all.
        """
        past = 0 if cache is None else cache[0].shape[2]
        assert past == 0 or x_BTD.shape[1] == 1
        q, k, v = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = self.rotary(q, past), self.rotary(k, past)
        if cache is not None:
            k, v = torch.cat((cache[0], k), dim=2), torch.cat((cache[1], v), dim=2)
        gathered_BHTQ = F.scaled_dot_product_attention(q, k, v, is_causal=past == 0)
        # Without a graph: text is generated without gradients, and fsdp hangs hooks on the views that a block returns.
        return self.out(gathered_BHTQ.transpose(1, 2).flatten(2)), (k.detach(), v.detach())


class SwiGLU(nn.Module):
    """The feed-forward layer in which one half gates the other (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, features: int, hidden: int):
        super().__init__()
        self.gate_and_value = nn.Linear(features, 2 * hidden, bias=False)
        self.out = nn.Linear(hidden, features, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Return (B, T, D)."""
        gate_BTF, value_BTF = self.gate_and_value(x_BTD).chunk(2, dim=-1)
        return self.out(F.silu(gate_BTF) * value_BTF)


class Block(nn.Module):
    """Attention, then the feed-forward layer; each reads the normalised stream and adds to it."""

    def __init__(self, features: int, heads: int, hidden: int, rotary: RotaryEmbedding, dropout: float):
        super().__init__()
        self.norm_attention = nn.RMSNorm(features, eps=1e-6)
        self.attention = Attention(features, heads, rotary)
        self.norm_feed_forward = nn.RMSNorm(features, eps=1e-6)
        self.feed_forward = SwiGLU(features, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: torch.Tensor, cache: Cache | None = None) -> tuple[torch.Tensor, Cache]:
        """Return the stream (B, T, D) after this block, and the block's cache."""
        gathered_BTD, cache = self.attention(self.norm_attention(x_BTD), cache)
        x_BTD = x_BTD + self.dropout(gathered_BTD)
        return x_BTD + self.dropout(self.feed_forward(self.norm_feed_forward(x_BTD))), cache


class Transformer(nn.Module):
    """Scores of the next token after each token.

    vocab_size: number of tokens. window_tokens: the most tokens that it sees at once. features: of the stream, a
    multiple of 2 * heads. hidden: of the feed-forward layer; None: 8/3 of features, as many parameters as an ungated
    layer of 4 times features has, rounded up to a multiple of 64. dropout: share of what each layer adds to the stream.
    longest_ngram: up to so many tokens are looked up together, in ngram_rows vectors per length; 1: each by itself.
    """

    def __init__(
        self,
        vocab_size: int,
        window_tokens: int,
        layers: int,
        features: int,
        heads: int,
        hidden: int | None = None,
        dropout: float = 0.0,
        longest_ngram: int = 1,
        ngram_rows: int = 8192,
    ):
        super().__init__()
        if features % (2 * heads):
            raise ValueError(f"features is {features}; expected a multiple of 2 * heads, {2 * heads}, for rotary pairs")
        self.window_tokens = window_tokens
        hidden = hidden or -(-8 * features // (3 * 64)) * 64
        self.embedding = nn.Embedding(vocab_size, features)
        self.ngrams = NgramEmbedding(features, longest_ngram, ngram_rows) if longest_ngram > 1 else None
        rotary = RotaryEmbedding(features // heads, window_tokens)
        self.blocks = nn.ModuleList(Block(features, heads, hidden, rotary, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(features, eps=1e-6)
        self.head = nn.Linear(features, vocab_size, bias=False)
        self.head.weight = self.embedding.weight  # tied (Press and Wolf 2017)
        self.apply(_initialise)
        for block in self.blocks:  # so that the stream's variance does not grow with the depth (Radford et al. 2019)
            for out in (block.attention.out, block.feed_forward.out):
                nn.init.normal_(out.weight, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return the scores before softmax (B, T, V) of the token after each of tokens (B, T), int64."""
        return self.continue_from(tokens_BT, None)[0]

    def continue_from(self, tokens_BT: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Return the scores (B, T, V) and the state for the call with the next token.

        state: what the call before returned; then tokens is (B, 1). None: tokens are the beginning.
        """
        reach = 0 if self.ngrams is None else self.ngrams.reach
        before_BG = tokens_BT.new_zeros(len(tokens_BT), reach) if state is None else state[0]
        x_BTD = self.embedding(tokens_BT)
        if self.ngrams is not None:
            x_BTD = x_BTD + self.ngrams(tokens_BT, before_BG)
        caches = []
        for layer, block in enumerate(self.blocks):
            x_BTD, cache = block(x_BTD, None if state is None else state[1][layer])
            caches.append(cache)
        line = torch.cat((before_BG, tokens_BT), dim=1)
        return self.head(self.norm(x_BTD)), (line[:, line.shape[1] - reach :], caches)

    def flops_per_token(self) -> int:
        """Return the floating point operations that training on one token takes: 6 N + 12 L H Q T.

        Chowdhery et al. 2022, "PaLM", appendix B: 2 N forward and 4 N backward for the matrices, and attention over
        all T places, although a causal one needs half. Recomputation does not count. The tied matrix is used once, as
        the head: looking up an embedding is no multiplication, so that the n-grams' tables are not of the N.
        """
        tables = () if self.ngrams is None else self.ngrams.parameters()
        parameters = sum(it.numel() for it in self.parameters()) - sum(it.numel() for it in tables)
        return 6 * parameters + 12 * len(self.blocks) * self.embedding.embedding_dim * self.window_tokens


@torch.no_grad()
def generate(
    model: Transformer, prompt: Sequence[int], count: int, temperature: float = 1.0, top_k: int = 0, seed: int = 0
) -> Iterator[int]:
    """Yield `count` tokens that follow the prompt, each drawn from the scores after all before it.

    prompt: at least one token; of a longer one than the model's window its end counts. temperature: divides the scores;
    0 takes the likeliest token. top_k: draws among so many likeliest ones; 0: among all. seed: of the draws.
    Where the window is full, the newer half of it is read anew, and writing goes on behind that.
    """
    tokens_BT = torch.tensor([list(prompt)], device=model.embedding.weight.device)[:, -model.window_tokens :]
    draws = torch.Generator(tokens_BT.device).manual_seed(seed)
    scores_BTV, state = model.continue_from(tokens_BT, None)
    for _ in range(count):
        token_BT = _draw(scores_BTV[:, -1].float(), temperature, top_k, draws)
        yield int(token_BT)
        if tokens_BT.shape[1] == model.window_tokens:
            tokens_BT = torch.cat((tokens_BT, token_BT), dim=1)[:, -max(1, model.window_tokens // 2) :]
            scores_BTV, state = model.continue_from(tokens_BT, None)
        else:
            tokens_BT = torch.cat((tokens_BT, token_BT), dim=1)
            scores_BTV, state = model.continue_from(token_BT, state)


def _draw(scores_BV: torch.Tensor, temperature: float, top_k: int, draws: torch.Generator) -> torch.Tensor:
    """A token (B, 1) for each row of scores."""
    if temperature == 0:
        return scores_BV.argmax(dim=1, keepdim=True)
    best, tokens = scores_BV.topk(top_k if 0 < top_k < scores_BV.shape[1] else scores_BV.shape[1])
    return tokens.gather(1, torch.multinomial((best / temperature).softmax(dim=1), 1, generator=draws))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
