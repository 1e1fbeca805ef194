"""An int8 decoder's layers by the C++ kernels: one call from each attention to the next.

Owns the packed weights and the memory of what is in between. Called by LocalBackend.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from stemma.backend.local.model.decoder import Decoder, Stages
from stemma.backend.local.model.quantize import Int8Linear
from stemma.backend.local.native.attention import Attend
from stemma.lang.errors import EngineInvariantError

_Address = ctypes.c_void_p
_NULL = _Address(None)
_LANES = 16  # of the kernels: what widths must be multiples of
_TILE = 16  # rows: rows and products have room up to a multiple of it


def compiled_layers(library: ctypes.CDLL, decoder: Decoder) -> Stages | None:
    """The stages of an int8 decoder, which take its weights over: its own linears are empty from
    then on. None for another decoder, for a shape that the kernels have no room for, and where they
    are wrong on a small case.
    """
    config = decoder.config
    widths = (config.hidden_size, config.intermediate_size, config.head_dim, config.vocab_size)
    if not isinstance(decoder.head, Int8Linear) or any(width % _LANES for width in widths):
        return None
    layers = NativeLayers(library, decoder)
    stages = Stages(layers.first, layers.between, layers.last, layers.head, layers.whole)
    if not _works(decoder, stages):
        return None
    for linear in _linears(decoder):
        linear.weight = linear.weight.new_empty(0, linear.weight.shape[1])
    return stages


def _linears(decoder: Decoder) -> Iterator[Any]:
    for block in decoder.blocks:
        yield from (block.qkv, block.out, block.gate_up, block.down)
    yield decoder.head


class _Linear(ctypes.Structure):
    """`Linear` of products.h."""

    _fields_ = (
        *((name, _Address) for name in ("weight", "begin", "scale", "bias")),
        *((name, ctypes.c_int32) for name in ("inputs", "outputs")),
    )


class _Between(ctypes.Structure):
    """`Between` of layers.cpp."""

    _fields_ = (
        *((name, _Linear) for name in ("out", "gate_up", "down", "qkv")),
        *((name, ctypes.c_int32) for name in ("block", "turned", "dim")),
        ("eps", ctypes.c_float),
    )


class _Room(ctypes.Structure):
    """`Room` of layers.cpp."""

    _fields_ = tuple((name, _Address) for name in ("product", "rows", "step", "buffer"))


class NativeLayers:
    """The functions of `Stages` for one decoder."""

    def __init__(self, library: ctypes.CDLL, decoder: Decoder) -> None:
        config = decoder.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._library = library
        self._hidden, self._dim = config.hidden_size, dim
        self._cuts = (heads, heads + kv_heads)  # where k and v begin
        width = (heads + 2 * kv_heads) * dim
        widest = max(config.hidden_size, 2 * config.intermediate_size, width)
        self._product, self._rows = _Memory(torch.int32, widest), _Memory(torch.uint8, widest)
        self._step, self._buffer = _Memory(torch.float32, 1), _Memory(torch.float32, widest)
        self._qkv = _Memory(torch.float32, width)
        self._attended = _Memory(torch.float32, heads * dim)
        self._logits = _Memory(torch.float32, config.vocab_size)
        self._kept: list[Any] = []  # what the structures hold addresses of
        linears = {linear: self._pack(linear) for linear in _linears(decoder)}
        self._head = linears[decoder.head]
        found = []
        blocks: list[Any] = [None, *decoder.blocks, None]
        for before, after in pairwise(blocks):
            between = _Between(turned=self._cuts[1] * dim, dim=dim, eps=config.norm_eps)
            if before is not None:
                between.out, between.gate_up = linears[before.out], linears[before.gate_up]
                between.down = linears[before.down]
                between.block = len(before.down.rotation)
            if after is not None:
                between.qkv = linears[after.qkv]
            found.append(between)
        self._between = (_Between * len(found))(*found)

    def _pack(self, linear: Any) -> _Linear:
        outputs, inputs = linear.weight.shape
        packed = torch.empty_like(linear.weight)
        begin = torch.empty(outputs, dtype=torch.int32)
        self._library.stemma_pack(_at(linear.weight), inputs, outputs, _at(packed), _at(begin))
        self._kept += (packed, begin, linear)
        addresses = map(_at, (packed, begin, linear.scale, linear.bias))
        return _Linear(*addresses, inputs, outputs)

    def first(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """See `Stages`."""
        return self._go(0, x, None, (cos, sin))

    def between(
        self, layer: int, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, ...]:
        """See `Stages`. x is changed in place."""
        return x, *self._go(layer + 1, x, attended, (cos, sin))

    def last(self, x: Tensor, attended: Tensor) -> Tensor:
        """See `Stages`. x is changed in place."""
        self._go(len(self._between) - 1, x, attended, None)
        return self._buffer.of(len(x), self._hidden)

    def whole(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Any) -> Tensor | None:
        """See `Stages`. x is changed in place. Where attention is a kernel, too, there is no way
        back to Python between the layers; elsewhere None.
        """
        if not isinstance(attend, Attend):
            return None
        rows, attention, kv_heads = len(x), attend.attention, self._cuts[1] - self._cuts[0]
        wrong = self._library.stemma_decode(
            self._between,
            ctypes.byref(self._room(rows)),
            *map(_at, (x, cos, sin)),
            _at(self._qkv.of(rows, 1)),
            _at(self._attended.of(rows, 1)),
            self._hidden,
            len(self._between) - 1,
            ctypes.c_int64(rows),
            _Address(attend.plan),
            attention.k_pools,
            attention.v_pools,
            ctypes.c_int64(attention.slot_stride),
            ctypes.c_int64(attention.head_stride),
            attention.halves,
            self._cuts[0],
            kv_heads,
            ctypes.c_float(attention.scale),
            torch.get_num_threads(),
        )
        if wrong:
            raise EngineInvariantError("the attention kernel has no room for this shape")
        return self._buffer.of(rows, self._hidden)

    def head(self, hidden: Tensor) -> Tensor:
        """See `Stages`."""
        rows = len(hidden)
        logits = self._logits.of(rows, self._head.outputs)
        self._library.stemma_linear(
            ctypes.byref(self._head),
            ctypes.byref(self._room(rows)),
            _at(hidden),
            _at(logits),
            ctypes.c_int64(rows),
            torch.get_num_threads(),
        )
        return logits

    def _go(
        self, stop: int, x: Tensor, attended: Tensor | None, rotation: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, ...]:
        """To the attention number `stop`: its q, k and v [rows, heads, dim], views. Without a
        rotation there is none any more, and x normalised is left in the buffer.
        """
        rows = len(x)
        cos, sin = rotation or (None, None)
        qkv = None if rotation is None else self._qkv.of(rows, self._between[stop].qkv.outputs)
        self._library.stemma_between(
            ctypes.byref(self._between[stop]),
            ctypes.byref(self._room(rows)),
            *map(_at, (x, attended, cos, sin, qkv)),
            self._hidden,
            ctypes.c_int64(rows),
            torch.get_num_threads(),
        )
        if qkv is None:
            return ()
        return qkv.view(rows, -1, self._dim).tensor_split(self._cuts, dim=1)

    def _room(self, rows: int) -> _Room:
        memories = (self._product, self._rows, self._step, self._buffer)
        return _Room(*(_at(memory.of(rows, 1)) for memory in memories))


class _Memory:
    """Room for rows, kept from call to call: fresh pages cost more than what is written to them."""

    def __init__(self, dtype: torch.dtype, widest: int) -> None:
        self._widest = widest
        self._room = torch.empty(0, dtype=dtype)

    def of(self, rows: int, width: int) -> Tensor:
        """[rows, width], uninitialised or as it was left; behind it there is room up to a multiple
        of 16 rows.
        """
        needed = -(-rows // _TILE) * _TILE * self._widest
        if needed > self._room.numel():
            self._room = self._room.new_empty(needed)
        return self._room[: rows * width].view(rows, width)


def _at(x: Tensor | None) -> ctypes.c_void_p:
    return _NULL if x is None else _Address(x.data_ptr())


def _works(decoder: Decoder, stages: Stages) -> bool:
    """Whether they are right for this decoder, tried on some rows and on one."""
    config = decoder.config
    numbers = torch.Generator().manual_seed(0)
    for rows in (21, 1):
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
