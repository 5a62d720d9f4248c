"""A tiny GPT: small enough for a step of a few milliseconds, and built to be taken apart.

The body is one plain list of blocks. Every kind of model parallelism in this course is a way to cut it:

    blocks[0]    Embedding     tokens -> hidden states
    blocks[1]    Transformer   x + attention(norm(x)), then x + mlp(norm(x))
      ...                                                                        | cut between blocks:
    blocks[-2]   Transformer                                                     v layers, pipeline
    blocks[-1]   Head          norm, then hidden states -> logits

    Attention    query, key, value  | out     cut by columns | by rows: tensor parallelism,
    MLP          up                 | down    whole heads and whole hidden units to every rank

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners" (GPT-2: pre-norm, learned positions).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a TinyGPT.

    vocab: number of different tokens.  sequence: longest input, in tokens.
    layers: transformer blocks.  hidden: width of the hidden states.
    heads: attention heads, each hidden / heads wide.
    ffn_hidden: width inside the MLP. None: 4 x hidden.
    tied_embeddings: the head's matrix is the token embedding itself, one parameter with two uses.

    Raises ValueError for a shape that cannot be built.
    """

    vocab: int = 12
    sequence: int = 8
    layers: int = 2
    hidden: int = 64
    heads: int = 4
    ffn_hidden: int | None = None
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"heads={self.heads} does not divide hidden={self.hidden}; heads have one width")

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def ffn_width(self) -> int:
        return self.ffn_hidden or 4 * self.hidden


class Embedding(nn.Module):
    """Tokens [batch, sequence] -> hidden states [batch, sequence, hidden]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens and their positions, at most as many as the model's config has in a sequence."""
        return self.token(tokens) + self.position.weight[: tokens.shape[-1]]


class Attention(nn.Module):
    """Causal attention: each position looks at itself and at the positions before it.

    The number of heads is read off the width of the projections, so a module that holds only some of the
    heads (some columns of query, key and value, the same rows of out) works as it is.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.query = nn.Linear(config.hidden, config.hidden)
        self.key = nn.Linear(config.hidden, config.hidden)
        self.value = nn.Linear(config.hidden, config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, sequence, heads x width] -> [batch, heads, sequence, width]."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


class MLP(nn.Module):
    """Two linear layers with a GELU between them, applied to each position by itself."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn_width)
        self.down = nn.Linear(config.ffn_width, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """One layer, [batch, sequence, hidden] -> the same shape."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Hidden states [batch, sequence, hidden] -> logits [batch, sequence, vocab]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.output = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class TinyGPT(nn.Module):
    """A GPT as a list of blocks; `model.blocks[first:last]` is a stage that runs by itself.

    The same seed gives the same parameters, in every dtype up to its rounding, and leaves torch's global
    random state alone.
    """

    blocks: nn.Sequential

    def __init__(self, config: GPTConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        with torch.random.fork_rng(devices=[]):  # layers draw from the global state first; overwritten below
            embedding, head = Embedding(config), Head(config)
            layers = [Transformer(config) for _ in range(config.layers)]
        self.blocks = nn.Sequential(embedding, *layers, head)
        self.to(dtype)
        if config.tied_embeddings:
            head.output.weight = embedding.token.weight
        _initialize(self, seed)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, sequence] -> logits [batch, sequence, vocab]."""
        return self.blocks(tokens)


@torch.no_grad()
def _initialize(model: TinyGPT, seed: int) -> None:
    """Initialize norms as the identity, biases with zeros, matrices with a normal of variance 1 / inputs.

    Each layer's contribution to the residual stream starts smaller by sqrt(2 x layers), as in GPT-2, so that
    the stream's scale does not grow with depth. Drawn in float64 on the CPU: same start for every dtype and device.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            continue
        scale = parameter.shape[1] ** -0.5
        if name.endswith(("attention.out.weight", "mlp.down.weight")):
            scale /= (2 * model.config.layers) ** 0.5
        place = "meta" if parameter.is_meta else "cpu"
        drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device=place)
        parameter.copy_(scale * drawn)
