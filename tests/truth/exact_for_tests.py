"""transformers models as the truth: as they are in float32, and made to be really float64."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding


def load_reference(folder: Path) -> LlamaForCausalLM:
    """The model in float32, with nothing in its generation_config that would stop or bend it."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


def load_exact(folder: Path) -> LlamaForCausalLM:
    """The model in float64 from end to end: transformers rounds norms and angles to float32."""
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="sdpa"
    )
    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = MethodType(_norm, module)
        elif isinstance(module, LlamaRotaryEmbedding):
            module.forward = MethodType(_rotation, module)
    return model.eval()


def _norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _rotation(self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Angles in float64. The frequencies are constants of the model, as it was trained: float32."""
    angles = position_ids[..., None].double() * self.inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM, ids: list[int], *, keep: int = 0) -> Tensor:
    """Logits of all positions, or of the last `keep`, of one line alone: [positions, vocab]."""
    logits: Tensor = model(torch.tensor([ids]), logits_to_keep=keep, use_cache=False).logits[0]
    return logits


def agreement(ours: list[int], theirs: list[int]) -> int:
    """How many ids two lists have in common before the first that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
