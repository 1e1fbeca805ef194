"""int8 linears for a decoder, in a rotated space where no value stands out.

A linear then multiplies int8 by int8 and scales the result: the activations per row, the weights
per output channel. Rows of a Llama hold a few values many times larger than the rest, which would
leave all others a handful of steps; so everything is turned by orthogonal maps first, which spread
each value over many. None of them changes what the decoder computes:

1. the residual stream is turned as a whole; norm gains move into the linear behind them,
2. the values of a head are turned between v and out,
3. the activations of the MLP are turned in small blocks before down, at run time.

Source: QuaRot (Ashkboos et al. 2024), with fixed instead of random Hadamard matrices in 2 and 3.
Called by the loader, once, on a decoder in float32.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from stemma.backend.local.model.decoder import Decoder
from stemma.lang.errors import InvalidArgument

Quantization = Literal["int8"]
QuantizationMode = Literal["auto", "int8"] | None

_LEAST = 1e-30  # stands for the largest value of a row of zeros
_STEPS = 127  # the range is symmetric: -128 is not used
_LARGEST_BLOCK = 64  # of a Hadamard matrix


class Int8Linear(nn.Module):
    """A linear map in int8, in blocks of a turned space if there is a `rotation`.

    weight: int8 [out, in]. scale: float32 [out], what a step of a weight is worth. rotation:
    float32 [block, block], orthogonal, or None.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    rotation: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, rotation: Tensor | None = None) -> None:
        """weight: [out, in], floating, not turned yet."""
        super().__init__()
        if rotation is not None:
            weight = _in_blocks(weight, rotation.to(weight))
        scale = weight.abs().amax(dim=1).clamp_min(_LEAST) / _STEPS
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale.float())
        self.register_buffer("bias", bias)
        self.register_buffer("rotation", None if rotation is None else rotation.float())

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out], float32."""
        if self.rotation is not None:
            x = _in_blocks(x, self.rotation)
        step = x.abs().amax(dim=1, keepdim=True).clamp_min(_LEAST) / _STEPS
        rows = (x / step).round().to(torch.int8)
        y = torch._int_mm(rows, self.weight.t()).float() * step * self.scale
        return y if self.bias is None else y + self.bias


def check_quantization(mode: object, device: torch.device, dtype: torch.dtype) -> None:
    """Raises InvalidArgument for a mode that there is not, or not on this device in this dtype."""
    if mode not in ("auto", "int8", None):
        raise InvalidArgument(f"quantization={mode!r}: must be 'auto', 'int8' or None")
    if mode == "int8" and not _possible(device, dtype):
        raise InvalidArgument(
            f"quantization={mode!r}: is for device='cpu' and dtype='float32', and this is "
            f"{device.type} and {str(dtype).removeprefix('torch.')}"
        )


def chosen_quantization(mode: QuantizationMode, decoder: Decoder) -> Quantization | None:
    """What a mode means for this decoder: "auto" takes int8 for weights that were quantised before,
    where it is possible.
    """
    if mode == "auto":
        embedding = decoder.embedding
        again = decoder.config.quantized_as and _possible(embedding.device, embedding.dtype)
        return "int8" if again else None
    return mode


def _possible(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32


@torch.no_grad()
def quantize(decoder: Decoder) -> None:
    """Replace the linears of a decoder by int8 ones, in place."""
    turn(decoder)
    decoder.head = _int8(decoder.head)
    inner = hadamard(_power_of_two(decoder.config.intermediate_size, _LARGEST_BLOCK))
    for block in decoder.blocks:
        block.qkv, block.out = _int8(block.qkv), _int8(block.out)
        block.gate_up, block.down = _int8(block.gate_up), _int8(block.down, inner)


def _int8(linear: nn.Linear, rotation: Tensor | None = None) -> Any:
    return Int8Linear(linear.weight, linear.bias, rotation)


@torch.no_grad()
def turn(decoder: Decoder) -> None:
    """Turn the space of the residual stream and that of the values of each head, in place.

    The decoder computes what it did before, to the rounding.
    """
    config = decoder.config
    stream, head = (
        Rotation(size, decoder.embedding) for size in (config.hidden_size, config.head_dim)
    )
    if config.tied_embeddings:
        decoder.head.weight = nn.Parameter(decoder.embedding.clone(), requires_grad=False)
    decoder.embedding.copy_(stream(decoder.embedding))
    _turn_input(decoder.head, decoder.norm, stream)
    for block in decoder.blocks:
        _turn_input(block.qkv, block.attention_norm, stream)
        _turn_input(block.gate_up, block.mlp_norm, stream)
        _turn_output(block.out, stream)
        _turn_output(block.down, stream)
        values = slice((block.heads + block.kv_heads) * config.head_dim, None)
        for part in block.qkv.parameters():
            part[values] = head(part[values].t()).t()
        block.out.weight.copy_(head(block.out.weight))


def _turn_input(linear: nn.Linear, norm: nn.RMSNorm, stream: Rotation) -> None:
    """The linear reads a turned stream, and what the norm before it multiplied by moves into it."""
    linear.weight.copy_(stream(linear.weight * norm.weight))
    norm.weight.fill_(1)


def _turn_output(linear: nn.Linear, stream: Rotation) -> None:
    """The linear writes to a turned stream."""
    for part in linear.parameters():
        part.copy_(stream(part.t()).t())


def _in_blocks(x: Tensor, rotation: Tensor) -> Tensor:
    """Each block of the last dimension times the rotation."""
    return (x.reshape(-1, len(rotation)) @ rotation).view(x.shape)


class Rotation:
    """A fixed orthogonal matrix [size, size] that spreads every unit vector.

    The Kronecker product of a random one and a Hadamard matrix, with random signs, never multiplied
    out: a vector is a matrix [rest, power of two] to which both are applied, one from each side.
    """

    def __init__(self, size: int, like: Tensor) -> None:
        """like: a tensor of the dtype and device to compute in."""
        numbers = torch.Generator().manual_seed(size)
        power = _power_of_two(size, _LARGEST_BLOCK)
        rest = torch.randn(size // power, size // power, generator=numbers, dtype=torch.float64)
        signs = torch.randint(0, 2, (size,), generator=numbers, dtype=torch.float64) * 2 - 1
        self._signs = signs.to(like)
        self._left: Tensor = torch.linalg.qr(rest).Q.t().contiguous().to(like)
        self._right = hadamard(power).to(like)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., k * size]: each vector of `size` times the matrix."""
        parts = (x.reshape(-1, len(self._signs)) * self._signs).view(
            -1, len(self._left), len(self._right)
        )
        return (self._left @ (parts @ self._right)).reshape(x.shape)


def hadamard(size: int) -> Tensor:
    """The orthogonal matrix of equal absolute values, float64; `size` is a power of two."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat(
            (torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1))
        )
    return matrix / math.sqrt(size)


def _power_of_two(size: int, most: int) -> int:
    """The largest power of two that divides `size` and is at most `most`."""
    power = 1
    while size % (2 * power) == 0 and 2 * power <= most:
        power *= 2
    return power
