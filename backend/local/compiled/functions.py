"""Which functions of a decoder are compiled, and how: exported once, for any number of rows.

All that lies between the attentions of two neighbouring layers is one function, the head another.
Weights are arguments, so one compiled function serves all layers. Called by the worker, and by
`adopt` for what it has built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from stemma.backend.local.model.decoder import Block, Compiled, Decoder

BETWEEN = "between.pt2"
HEAD = "head.pt2"

_BEFORE_ATTENTION = ("attention_norm.", "qkv.")  # the weights of a block on that side of it
_EXAMPLE_ROWS = 16  # only to trace with: the functions take any number


class _Between(nn.Module):
    def __init__(self, block: Block, following: Block) -> None:
        super().__init__()
        self.block, self.following = block, following

    def forward(self, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        x = self.block.finish(x, attended)
        return x, *self.following.project(x, cos, sin)

    def weights(self) -> dict[str, Tensor]:
        """Those that are used, in a fixed order."""
        return {
            f"{side}.{name}": weight
            for side, block in (("block", self.block), ("following", self.following))
            for name, weight in block.state_dict().items()
            if name.startswith(_BEFORE_ATTENTION) == (side == "following")
        }


class _Head(nn.Module):
    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.head = decoder.head

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        logits: Tensor = self.head(hidden)
        return (logits,)

    def weights(self) -> dict[str, Tensor]:
        return {f"head.{name}": weight for name, weight in self.head.state_dict().items()}


class _WithWeights(nn.Module):
    """The function of a module whose weights are the first argument."""

    def __init__(self, module: _Between | _Head) -> None:
        super().__init__()
        self._module = [module]  # in a list: its own weights are not part of this one
        self._names = list(module.weights())

    def forward(self, weights: list[Tensor], *inputs: Tensor) -> Any:
        return functional_call(
            self._module[0], dict(zip(self._names, weights, strict=True)), inputs
        )


def compile_functions(decoder: Decoder, folder: Path) -> None:
    """Write both functions of a decoder of at least two layers to `folder`. Takes a minute."""
    config, rows = decoder.config, _EXAMPLE_ROWS
    x = torch.randn(rows, config.hidden_size)
    attended = torch.randn(rows, config.num_heads * config.head_dim)
    cos, sin = torch.randn(2, rows, 1, config.head_dim)
    between = _Between(decoder.blocks[0], decoder.blocks[1])
    _compile(between, (x, attended, cos, sin), folder / BETWEEN)
    _compile(_Head(decoder), (x,), folder / HEAD)


def _compile(module: _Between | _Head, inputs: tuple[Tensor, ...], path: Path) -> None:
    import torch._inductor as inductor
    from torch._inductor import config as settings

    rows = torch.export.Dim("rows", min=1, max=1 << 20)
    weights = list(module.weights().values())
    exported = torch.export.export(
        _WithWeights(module),
        (weights, *inputs),
        dynamic_shapes=([None] * len(weights), tuple({0: rows} for _ in inputs)),
    )
    # As many threads as torch has when it runs, not as many as the worker has.
    with settings.patch({"cpp.dynamic_threads": True}):
        inductor.aoti_compile_and_package(exported, package_path=str(path))


def load_functions(decoder: Decoder, folder: Path) -> Compiled:
    """The compiled functions in `folder` with the weights of this decoder.

    Raises RuntimeError or OSError if they cannot be loaded, or are wrong on a small case.
    """
    between, head = _load(folder / BETWEEN), _load(folder / HEAD)
    modules = [_Between(a, b) for a, b in zip(decoder.blocks, decoder.blocks[1:], strict=False)]
    by_layer = [list(module.weights().values()) for module in modules]
    head_weights = list(_Head(decoder).weights().values())

    def run_between(
        layer: int, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor
    ) -> Sequence[Tensor]:
        return between([*by_layer[layer], x, attended, cos, sin])

    def run_head(hidden: Tensor) -> Tensor:
        return head([*head_weights, hidden])[0]

    compiled = Compiled(run_between, run_head)
    _check(decoder, compiled)
    return compiled


def _load(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    import torch._inductor as inductor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded: Any = inductor.aoti_load_package(str(path))
    run: Callable[[list[Tensor]], list[Tensor]] = loaded.loader.run
    return run


def _check(decoder: Decoder, compiled: Compiled) -> None:
    """Compare with what is not compiled, on few rows and on one."""
    config = decoder.config
    numbers = torch.Generator().manual_seed(0)
    for rows in (5, 1):
        width = config.num_heads * config.head_dim
        x = torch.randn(rows, config.hidden_size, generator=numbers)
        attended = torch.randn(rows, width, generator=numbers)
        angles = torch.randn(rows, 1, config.head_dim, generator=numbers)
        inputs = (x, attended, angles.cos(), angles.sin())
        for ours, theirs in (
            (compiled.between(0, *inputs), decoder.eager_between(0, *inputs)),
            ([compiled.head(x)], [decoder.eager_head(x)]),
        ):
            for a, b in zip(ours, theirs, strict=True):
                far = float((a - b).norm() / b.norm())
                if not far < 0.02:  # a flipped rounding of int8 moves a row by up to 1%
                    raise RuntimeError(f"a compiled function is off by {far:.1%}")
