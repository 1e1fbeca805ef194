"""vLLM with prefix caching: the calls of a round handed in together, as token ids.

Choices of one token each are one token drawn among them; longer ones are scored as prompts, whose
prefix vLLM computes anew where log-probabilities of a prompt are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from suite.peers.serve import Peer, Setup, serve
from suite.work import TEMPERATURE, Answer, Call, Ready


class VllmPeer(Peer):
    """Its KV cache has the size of VLLM_CPU_KVCACHE_SPACE, in GiB."""

    def __init__(self, setup: Setup) -> None:
        import vllm

        self._vllm = vllm
        self._engine = vllm.LLM(
            setup.model,
            dtype="float32",
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            disable_log_stats=False,
            max_model_len=4096,
            seed=setup.seed,
        )
        self.name = f"vLLM {vllm.__version__}, fp32"

    def reset(self, calls: Sequence[Call]) -> None:
        super().reset(calls)
        self._engine.reset_prefix_cache()

    def round(self, ready: Sequence[Ready]) -> list[Answer]:
        prompts, params, owners = [], [], []
        for n, call in enumerate(ready):
            for prompt, param in self._requests(call):
                prompts.append({"prompt_token_ids": prompt})
                params.append(param)
                owners.append(n)
        answers = [Answer() for _ in ready]
        results = self._engine.generate(prompts, params, use_tqdm=False)
        for n, result in zip(owners, results, strict=True):
            computed = len(result.prompt_token_ids) - (result.num_cached_tokens or 0)
            self.computed += computed
            self.rows += computed + len(result.outputs[0].token_ids) - 1
            if ready[n].new:
                answers[n] = Answer(list(result.outputs[0].token_ids), _first_token_s(result))
        return answers

    def _requests(self, call: Ready) -> list[tuple[list[int], Any]]:
        """Prompts and how to sample after them."""
        params = self._vllm.SamplingParams
        if call.new:
            sampled = params(
                max_tokens=call.new, temperature=TEMPERATURE, ignore_eos=True, detokenize=False
            )
            return [(call.prompt, sampled)]
        if all(len(choice) == 1 for choice in call.choices):
            allowed = [choice[0] for choice in call.choices]
            one = params(max_tokens=1, temperature=0, allowed_token_ids=allowed, detokenize=False)
            return [(call.prompt, one)]
        scored = params(max_tokens=1, prompt_logprobs=0, detokenize=False)
        return [(call.prompt + choice, scored) for choice in call.choices]


def _first_token_s(result: Any) -> float | None:
    """Seconds from a request's arrival to its first token, where vLLM tells."""
    return getattr(result.metrics, "first_token_latency", None) or None


if __name__ == "__main__":
    serve(VllmPeer)
