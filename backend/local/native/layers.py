"""An int8 decoder's layers by the C++ kernels: `_int_mm` for the products, one pass for the rest.

Owns the memory of what is in between. Called by LocalBackend.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from stemma.backend.local.model.decoder import Decoder, Stages
from stemma.backend.local.model.quantize import Int8Linear

_Address = ctypes.c_void_p
_NULL = _Address(None)
_LANES = 16  # of the kernels: what widths must be multiples of


def compiled_layers(library: ctypes.CDLL, decoder: Decoder) -> Stages | None:
    """The stages of an int8 decoder; None for another one, for a shape that
    the kernels have no room for, and where they are wrong on a small case.
    """
    config = decoder.config
    widths = (config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size)
    if not isinstance(decoder.head, Int8Linear) or any(width % _LANES for width in widths):
        return None
    layers = NativeLayers(library, decoder)
    stages = Stages(layers.first, layers.between, layers.last, layers.head)
    return stages if _works(decoder, stages) else None


class _Linear(ctypes.Structure):
    """`Linear` of layers.cpp."""

    _fields_ = (
        *((name, _Address) for name in ("weight", "shift", "scale", "bias")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs")),
    )

    @classmethod
    def of(cls, linear: Any, shift: Tensor) -> _Linear:
        outputs, inputs = linear.weight.shape
        addresses = map(_at, (linear.weight, shift, linear.scale, linear.bias))
        return cls(*addresses, inputs, outputs)


class _Between(ctypes.Structure):
    """`Between` of layers.cpp."""

    _fields_ = (
        *((name, _Linear) for name in ("out", "gate_up", "down", "qkv")),
        *((name, ctypes.c_int32) for name in ("block", "turned", "dim")),
        ("eps", ctypes.c_float),
    )


class _Room(ctypes.Structure):
    """`Room` of layers.cpp."""

    _fields_ = tuple((name, _Address) for name in ("product", "rows", "raised", "step", "buffer"))


class NativeLayers:
    """The functions of `Stages` for one decoder."""

    def __init__(self, library: ctypes.CDLL, decoder: Decoder) -> None:
        config = decoder.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._library = library
        self._blocks = decoder.blocks
        self._head: Any = decoder.head
        self._eps, self._dim = config.norm_eps, dim
        self._cuts = (heads, heads + kv_heads)  # where k and v begin
        width = (heads + 2 * kv_heads) * dim
        widest = max(config.hidden_size, 2 * config.intermediate_size, width)
        self._product = _Memory(torch.int32, widest)
        self._logits = _Memory(torch.int32, config.vocab_size)
        self._int8, self._floats = _Memory(torch.int8, widest), _Memory(torch.float32, widest)
        self._step = _Memory(torch.float32, 1)

        self._few = int(library.stemma_few())
        self._few_qkv, self._few_logits = (
            torch.empty(self._few, size) for size in (width, config.vocab_size)
        )
        self._room_memory = [
            torch.empty(self._few * widest, dtype=dtype)
            for dtype in (torch.int32, torch.int8, torch.uint8, torch.float32, torch.float32)
        ]
        self._room = _Room(*map(_at, self._room_memory))
        self._shifts: list[Tensor] = []  # the structures hold their addresses
        self._head_few = self._linear_of(decoder.head)
        self._between_few = [
            self._between_of(block, following.qkv)
            for block, following in zip(self._blocks, self._blocks[1:], strict=False)
        ]

    def _linear_of(self, linear: Any) -> _Linear:
        self._shifts.append(linear.weight.sum(1, dtype=torch.int32) * 128)
        return _Linear.of(linear, self._shifts[-1])

    def _between_of(self, block: Any, qkv: Any) -> _Between:
        linears = map(self._linear_of, (block.out, block.gate_up, block.down, qkv))
        turned = self._cuts[1] * self._dim
        return _Between(*linears, len(block.down.rotation), turned, self._dim, self._eps)

    def first(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """See `Stages`."""
        self._add_norm(x, None)
        return self._project(len(x), self._blocks[0].qkv, cos, sin)

    def between(
        self, layer: int, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        """See `Stages`. x is changed in place."""
        rows = len(x)
        if rows <= self._few:
            qkv = self._few_qkv[:rows]
            self._library.stemma_between_few(
                ctypes.byref(self._between_few[layer]),
                ctypes.byref(self._room),
                _at(x),
                _at(attended),
                _at(cos),
                _at(sin),
                _at(qkv),
                rows,
                torch.get_num_threads(),
            )
            return x, *self._heads_of(qkv)
        self._finish(x, attended, self._blocks[layer])
        return x, *self._project(len(x), self._blocks[layer + 1].qkv, cos, sin)

    def last(self, x: Tensor, attended: Tensor) -> Tensor:
        """See `Stages`. x is changed in place."""
        return self._finish(x, attended, self._blocks[-1])

    def head(self, hidden: Tensor) -> Tensor:
        """See `Stages`."""
        rows = len(hidden)
        if rows <= self._few:
            self._library.stemma_linear_few(
                ctypes.byref(self._head_few),
                ctypes.byref(self._room),
                _at(hidden),
                _at(self._few_logits),
                rows,
                torch.get_num_threads(),
            )
            return self._few_logits[:rows]
        self._quantise(hidden)
        product = self._multiply(rows, self._head, self._logits)
        logits = product.view(torch.float32)
        self._library.stemma_dequantise(
            *self._scaled(product, self._head),
            ctypes.c_int64(rows),
            product.shape[1],
            _at(logits),
            torch.get_num_threads(),
        )
        return logits

    def _finish(self, x: Tensor, attended: Tensor, block: Any) -> Tensor:
        """`Block.finish`, in place; returns x normalised, which also becomes the quantised rows."""
        rows = len(x)
        self._quantise(attended)
        self._add_norm(x, block.out)
        product = self._multiply(rows, block.gate_up)
        inner = product.shape[1] // 2
        self._library.stemma_gate_quantise(
            *self._scaled(product, block.gate_up),
            ctypes.c_int64(rows),
            inner,
            len(block.down.rotation),
            _at(self._floats.of(rows, inner)),
            _at(self._int8.of(rows, inner)),
            torch.get_num_threads(),
        )
        return self._add_norm(x, block.down)

    def _project(self, rows: int, linear: Any, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """The quantised rows to rotated q and k, and v."""
        product = self._multiply(rows, linear)
        qkv = self._floats.of(rows, product.shape[1])
        self._library.stemma_rotate(
            *self._scaled(product, linear),
            ctypes.c_int64(rows),
            product.shape[1],
            self._cuts[1] * self._dim,
            self._dim,
            _at(cos),
            _at(sin),
            _at(qkv),
            torch.get_num_threads(),
        )
        return self._heads_of(qkv)

    def _heads_of(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """[rows, all heads * dim] -> q, k, v: [rows, heads, dim], views."""
        return qkv.view(len(qkv), -1, self._dim).tensor_split(self._cuts, dim=1)

    def _quantise(self, x: Tensor) -> None:
        rows, width = x.shape
        self._library.stemma_quantise(
            _at(x),
            ctypes.c_int64(x.stride(0)),
            ctypes.c_int64(rows),
            width,
            _at(self._int8.of(rows, width)),
            _at(self._step.of(rows, 1)),
            torch.get_num_threads(),
        )

    def _multiply(self, rows: int, linear: Any, memory: _Memory | None = None) -> Tensor:
        """The quantised rows times the weights of a linear: int32 [rows, out]."""
        weight: Tensor = linear.weight
        product = (memory or self._product).of(rows, weight.shape[0])
        return torch._int_mm(self._int8.of(rows, weight.shape[1]), weight.t(), out=product)

    def _scaled(self, product: Tensor, linear: Any) -> tuple[ctypes.c_void_p, ...]:
        """The addresses of a product and of all that makes floats of it."""
        step = self._step.of(len(product), 1)
        return _at(product), _at(step), _at(linear.scale), _at(linear.bias)

    def _add_norm(self, x: Tensor, linear: Any) -> Tensor:
        """x += linear(the quantised rows), if there is one. x normalised becomes the quantised
        rows, and is returned.
        """
        rows, width = x.shape
        normed, step = self._floats.of(rows, width), self._step.of(rows, 1)
        if linear is None:
            scaled: tuple[ctypes.c_void_p, ...] = (_NULL, _at(step), _NULL, _NULL)
        else:
            scaled = self._scaled(self._multiply(rows, linear), linear)
        self._library.stemma_add_norm_quantise(
            _at(x),
            *scaled,
            ctypes.c_int64(rows),
            width,
            ctypes.c_float(self._eps),
            _at(normed),
            _at(self._int8.of(rows, width)),
            torch.get_num_threads(),
        )
        return normed


class _Memory:
    """Room for rows, kept from call to call: fresh pages cost more than what is written to them."""

    def __init__(self, dtype: torch.dtype, widest: int) -> None:
        self._widest = widest
        self._room = torch.empty(0, dtype=dtype)

    def of(self, rows: int, width: int) -> Tensor:
        """[rows, width], uninitialised or as it was left."""
        if rows * self._widest > self._room.numel():
            self._room = self._room.new_empty(rows * self._widest)
        return self._room[: rows * width].view(rows, width)


def _at(x: Tensor | None) -> ctypes.c_void_p:
    return _NULL if x is None else _Address(x.data_ptr())


def _works(decoder: Decoder, stages: Stages) -> bool:
    """Whether they are right for this decoder, tried on few rows and on one."""
    config = decoder.config
    numbers = torch.Generator().manual_seed(0)
    for rows in (5, 1):
        x = torch.randn(rows, config.hidden_size, generator=numbers)
        attended = torch.randn(rows, config.num_heads * config.head_dim, generator=numbers)
        angles = torch.randn(rows, 1, config.head_dim // 2, generator=numbers)
        cos, sin = angles.cos(), angles.sin()
        rotation = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        layers = range(min(1, len(decoder.blocks) - 1))  # one stands for all
        for ours, theirs in zip(
            _every_result(stages, layers, x, attended, rotation),
            _every_result(decoder.eager, layers, x, attended, rotation),
            strict=True,
        ):
            # A rounding that falls to the other side moves a row by up to a percent.
            if not (ours - theirs).norm() < 0.02 * theirs.norm():
                return False
    return True


def _every_result(
    stages: Stages, layers: range, x: Tensor, attended: Tensor, rotation: tuple[Tensor, Tensor]
) -> list[Tensor]:
    found = [part.clone() for part in stages.first(x.clone(), *rotation)]
    for layer in layers:
        found += [part.clone() for part in stages.between(layer, x.clone(), attended, *rotation)]
    return [*found, stages.last(x.clone(), attended).clone(), stages.head(x)]
