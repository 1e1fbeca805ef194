"""The Llama-family decoder as data flow: token ids and positions in, hidden states and logits out.

Owns the weights and nothing else: which rows see which keys is decided by the `attend` it is given.
Made and filled by the loader, called by the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stemma.backend.local.model.config import DecoderConfig


class Attend(Protocol):
    """Attention of one step: keeps k and v of its rows, mixes the values that each row may see."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, heads, head_dim], k, v [rows, kv_heads, head_dim] -> [rows, heads * head_dim].

        q and k are rotated, not scaled. All three are views: dense within a row, rows lie apart.
        """
        ...


class Stages(NamedTuple):
    """What lies around the attentions of a decoder, as functions; x is the residual stream.

    first: (x, cos, sin) -> q, k, v of the first attention. between: (layer, x, attended, cos, sin)
    -> x, q, k, v, from the attention of a layer to that of the next. last: (x, attended) -> hidden
    states. head: hidden states -> logits. whole: (x, cos, sin, attend) -> hidden states, all layers
    at once, or None with an attention that it cannot call. What they return lives until a stage is
    called again; x may be changed in place.
    """

    first: Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]
    between: Callable[[int, Tensor, Tensor, Tensor, Tensor], Sequence[Tensor]]
    last: Callable[[Tensor, Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    whole: Callable[[Tensor, Tensor, Tensor, Attend], Tensor | None] | None = None


class Linear(nn.Linear):
    """A linear map that is born empty, since its weights are about to be loaded."""

    def reset_parameters(self) -> None:
        pass


class Block(nn.Module):
    """One layer, cut where attention goes in."""

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.qkv_shape = (-1, self.heads + 2 * self.kv_heads, config.head_dim)
        width = self.heads * config.head_dim
        kv_width = self.kv_heads * config.head_dim
        bias, mlp_bias = config.attention_bias, config.mlp_bias
        self.attention_norm = nn.RMSNorm(hidden, eps, device=device, dtype=dtype)
        self.qkv = Linear(hidden, width + 2 * kv_width, bias, device, dtype)
        self.out = Linear(width, hidden, bias, device, dtype)
        self.mlp_norm = nn.RMSNorm(hidden, eps, device=device, dtype=dtype)
        self.gate_up = Linear(hidden, 2 * inner, mlp_bias, device, dtype)
        self.down = Linear(inner, hidden, mlp_bias, device, dtype)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states [rows, hidden] to rotated q and k, and v."""
        qkv = self.qkv(self.attention_norm(x)).view(self.qkv_shape)
        qk, v = qkv.tensor_split([self.heads + self.kv_heads], dim=1)
        q, k = rotate(qk, cos, sin).tensor_split([self.heads], dim=1)
        return q, k, v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add to the hidden states what attention gave [rows, heads * head_dim], then the MLP."""
        x = x + self.out(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return x + y


class Decoder(nn.Module):
    """Embedding, layers, final norm, head. Its weights are uninitialised until a loader fills them.

    device and dtype are fixed here. Rotary angles are float32 in every dtype, as in training.
    compiled: faster stages that do the same as `eager`, to be used instead.
    """

    blocks: Sequence[Block]
    frequencies: Tensor
    compiled: Stages | None = None

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        shape = (config.vocab_size, config.hidden_size)
        self.embedding = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        blocks = [Block(config, device, dtype) for _ in range(config.num_layers)]
        self.blocks = cast("Sequence[Block]", nn.ModuleList(blocks))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps, device=device, dtype=dtype)
        self.head = Linear(config.hidden_size, config.vocab_size, False, device, dtype)
        if config.tied_embeddings:
            self.head.weight = self.embedding
        self.register_buffer("frequencies", rope_frequencies(config).to(device), persistent=False)
        self.requires_grad_(False)

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Token ids [rows] and their positions [rows], int64 -> hidden states [rows, hidden]."""
        x = F.embedding(token_ids, self.embedding)
        cos, sin = rope_rotation(positions, self.frequencies, x.dtype)
        stages = self.compiled or self.eager
        if stages.whole and (hidden := stages.whole(x, cos, sin, attend)) is not None:
            return hidden
        q, k, v = stages.first(x, cos, sin)
        last = len(self.blocks) - 1
        for layer in range(last):
            x, q, k, v = stages.between(layer, x, attend(layer, q, k, v), cos, sin)
        return stages.last(x, attend(last, q, k, v))

    @property
    def eager(self) -> Stages:
        """The stages by torch."""
        return Stages(self.blocks[0].project, self._between, self._last, self.head)

    def _between(
        self, layer: int, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
    ) -> Sequence[Tensor]:
        x = self.blocks[layer].finish(x, attended)
        return x, *self.blocks[layer + 1].project(x, cos, sin)

    def _last(self, x: Tensor, attended: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.blocks[-1].finish(x, attended))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden] -> [n, vocab], float32, or float64 for a float64 decoder."""
        logits = (self.compiled or self.eager).head(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()


def rope_frequencies(config: DecoderConfig) -> Tensor:
    """Radians per position of each pair of dimensions: [head_dim / 2], float32.

    theta^(-2i/head_dim) (Su et al., RoFormer), stretched as `Rope` says.
    """
    rope = config.rope
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    # llama3: 0 where the wavelength is long and is stretched, 1 where it is short and is kept.
    turns = rope.original_max_positions / (2 * math.pi / plain)
    spread = rope.high_freq_factor - rope.low_freq_factor
    kept = ((turns - rope.low_freq_factor) / spread).clamp(0, 1)
    return (1 - kept) * plain / rope.factor + kept * plain


def rope_rotation(
    positions: Tensor, frequencies: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines for `rotate`: [rows, 1, head_dim] each, from float32 angles."""
    angles = positions[:, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return cos[:, None].to(dtype), sin[:, None].to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim/2]) of [rows, heads, head_dim] by its row's angle."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
