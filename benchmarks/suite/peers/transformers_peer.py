"""transformers' `generate`: calls of a round as batches, padded on the left. It shares no prefixes.

Choices are scored by one forward pass over prompt and choice; where all of them are one token, over
the prompt alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from suite.peers.serve import Peer, Setup, serve
from suite.work import TEMPERATURE, Answer, Ids, Ready

if TYPE_CHECKING:
    import torch


class TransformersPeer(Peer):
    """kv_tokens bounds the tokens of one batch."""

    def __init__(self, setup: Setup) -> None:
        import torch
        import transformers

        torch.set_num_threads(setup.threads)
        torch.manual_seed(setup.seed)
        self._torch = torch
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=torch.float32
        )
        self._model.generation_config.eos_token_id = None
        self._most_tokens = setup.kv_tokens
        self.name = f"transformers {transformers.__version__}, fp32"
        self.computed = self.rows = 0

    def round(self, ready: Sequence[Ready]) -> list[Answer]:
        start = time.perf_counter()
        answers: dict[int, Answer] = {}
        with self._torch.inference_mode():
            for new in sorted({call.new for call in ready if call.new}):
                calls = [call for call in ready if call.new == new]
                for batch in self._batches([call.prompt for call in calls], new):
                    self._generate([calls[i] for i in batch], new, start, answers)
            self._score([call for call in ready if call.choices])
        return [answers.get(call.index, Answer()) for call in ready]

    def _batches(self, prompts: Sequence[Ids], new: int) -> Iterator[list[int]]:
        """Indices of prompts of about one length, as many as fit."""
        batch: list[int] = []
        for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            if batch and (len(prompts[i]) + new) * (len(batch) + 1) > self._most_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _generate(
        self, calls: list[Ready], new: int, start: float, answers: dict[int, Answer]
    ) -> None:
        ids, mask = self._padded([call.prompt for call in calls])
        first_token = _FirstToken()
        written = self._model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            pad_token_id=0,
            stopping_criteria=[first_token],
        )
        for call, row in zip(calls, written[:, ids.shape[1] :].tolist(), strict=True):
            answers[call.index] = Answer(row, first_token.at - start)
        self.rows += len(calls) * (new - 1)

    def _score(self, calls: list[Ready]) -> None:
        short = [call for call in calls if all(len(choice) == 1 for choice in call.choices)]
        long = [call for call in calls if call not in short]
        texts = [call.prompt for call in short]
        choices = [[choice[0] for choice in call.choices] for call in short]
        for batch in self._batches(texts, 0):
            logprobs = self._logprobs([texts[i] for i in batch], 1)
            for i, row in zip(batch, logprobs, strict=True):
                row[0, choices[i]].tolist()
        pairs = [(call.prompt, choice) for call in long for choice in call.choices]
        texts = [prompt + choice for prompt, choice in pairs]
        for batch in self._batches(texts, 0):
            longest = max(len(pairs[i][1]) for i in batch)
            logprobs = self._logprobs([texts[i] for i in batch], longest + 1)
            for i, row in zip(batch, logprobs, strict=True):
                choice = self._torch.tensor(pairs[i][1])
                row[-len(choice) - 1 : -1].gather(1, choice[:, None]).sum().item()

    def _logprobs(self, texts: list[Ids], last: int) -> torch.Tensor:
        """Of the last so many positions: [texts, last, vocabulary]."""
        ids, mask = self._padded(texts)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self._model(
            ids,
            attention_mask=mask,
            position_ids=positions,
            logits_to_keep=last,
            use_cache=False,
        ).logits
        logprobs: torch.Tensor = logits.log_softmax(-1)
        return logprobs

    def _padded(self, texts: list[Ids]) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids, padded on the left, and which of them are there."""
        length = max(map(len, texts))
        ids = self._torch.tensor([[0] * (length - len(text)) + text for text in texts])
        mask = self._torch.tensor([[0] * (length - len(text)) + [1] * len(text) for text in texts])
        self.computed += sum(map(len, texts))
        self.rows += len(texts) * length
        return ids, mask


class _FirstToken:
    """Never stops; notes when it was first asked, which is behind the first token."""

    at = 0.0

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        import torch

        self.at = self.at or time.perf_counter()
        return torch.zeros(len(ids), dtype=torch.bool)


if __name__ == "__main__":
    serve(TransformersPeer)
