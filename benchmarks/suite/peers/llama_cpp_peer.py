"""llama.cpp through the low-level calls of llama-cpp-python, on a GGUF file.

It has no cache that finds shared prefixes by itself: what texts share is decoded once here, in one
sequence, and copied to the others (in the unified KV buffer a copy costs nothing). Sequences that a
later round goes on from are kept. All texts of a round are one batch.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from suite.peers.serve import Peer, Setup, serve
from suite.work import TEMPERATURE, Answer, Call, Ids, Ready, common_length

BATCH = 2048
WORTH_SHARING = 32
"""Tokens. With less in common, sequences in buffers of their own are faster than one buffer."""


@dataclass(slots=True, eq=False)
class Line:
    """A sequence of a round. ids: what is to be decoded. have: how many of them the sequence holds
    already. draw: whether a token is drawn behind them. scores: by position the tokens whose
    probability behind it is wanted.
    """

    call: Ready
    sequence: int
    ids: Ids
    have: int = 0
    draw: bool = False
    scores: dict[int, Ids] = field(default_factory=dict)
    written: Ids = field(default_factory=list)
    first_token_at: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One token of a batch, and the lines that want something of what comes behind it."""

    token: int
    position: int
    sequence: int
    lines: list[Line]


class LlamaCppPeer(Peer):
    """kv_tokens: cells of its KV buffer."""

    def __init__(self, setup: Setup) -> None:
        if setup.gguf is None:
            raise ValueError("it needs the model as a GGUF file, --gguf FILE")
        import llama_cpp
        import numpy as np

        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # it tells of every graph
        self._np, self._api, self._setup = np, llama_cpp, setup
        self._random = np.random.default_rng(setup.seed)
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            setup.gguf.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"{setup.gguf} cannot be loaded")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self._model)
        )
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._context: Any = None
        self._kept: list[Line] = []
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"

    def reset(self, calls: Sequence[Call]) -> None:
        super().reset(calls)
        if self._context:
            self._api.llama_free(self._context)
        self._unified = shares(calls)
        by_round = Counter(call.round for call in calls)  # where nothing is shared, lines are calls
        lines = sum(max(1, len(call.choices)) for call in calls)
        if not self._unified:  # kept ones and new ones; few, for they divide the buffer
            lines = min(lines, 2 * max(by_round.values()))
        most = self._api.llama_max_parallel_sequences()
        if lines > most:
            raise ValueError(f"{lines} sequences are wanted, and it has {most} at most")
        params = self._api.llama_context_default_params()
        params.n_ctx = self._setup.kv_tokens
        params.n_batch = BATCH
        params.n_seq_max = lines
        params.kv_unified = self._unified
        params.n_threads = params.n_threads_batch = self._setup.threads
        self._context = self._api.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError("no context can be made")
        self._memory = self._api.llama_get_memory(self._context)
        self._kept = []
        self._free = list(range(lines))
        self._rounds_done = 0

    def round(self, ready: Sequence[Ready]) -> list[Answer]:
        start = time.perf_counter()
        lines = [line for call in ready for line in self._lines(call)]
        for line in lines:
            self._take_over(line)
        self._decode_prompts(lines)
        self._decode_outputs([line for line in lines if line.draw])
        self._keep(lines)
        answers = {}
        for line in lines:
            first = line.first_token_at
            answers[line.call.index] = Answer(line.written, first and first - start)
        return [answers[call.index] for call in ready]

    # -- sequences

    def _lines(self, call: Ready) -> list[Line]:
        """One, or one for each way in which choices of several tokens begin."""
        if call.new:
            return [Line(call, self._free.pop(), call.prompt, draw=True)]
        found: dict[tuple[int, ...], Line] = {}
        for choice in call.choices:
            beginning = tuple(choice[:-1])
            if beginning not in found:
                ids = call.prompt + choice[:-1]
                found[beginning] = Line(call, self._free.pop(), ids)
            for position, token in enumerate(choice, len(call.prompt) - 1):
                found[beginning].scores.setdefault(position, []).append(token)
        return list(found.values())

    def _take_over(self, line: Line) -> None:
        """Begin with what a kept sequence has of the line; at least one token is left to decode."""
        lengths = [common_length(kept.ids, line.ids) for kept in self._kept]
        longest = max(lengths, default=0)
        if not longest:
            return
        kept = self._kept[lengths.index(longest)]
        line.have = min(longest, len(line.ids) - 1)
        if self._unified:
            self._api.llama_memory_seq_cp(self._memory, kept.sequence, line.sequence, 0, line.have)
        elif kept.call.until >= 0 and longest >= WORTH_SHARING:  # nobody else goes on from it
            self._free.append(line.sequence)
            line.sequence = kept.sequence
            self._kept.remove(kept)
            self._api.llama_memory_seq_rm(self._memory, line.sequence, line.have, -1)
        else:
            line.have = 0

    def _keep(self, lines: list[Line]) -> None:
        """Keep what a later round goes on from, give up the rest."""
        self._rounds_done += 1
        there = self._kept + lines
        self._kept = [line for line in there if line.call.until >= self._rounds_done]
        for line in there:
            if line not in self._kept:
                self._api.llama_memory_seq_rm(self._memory, line.sequence, -1, -1)
                self._free.append(line.sequence)

    # -- decoding

    def _decode_prompts(self, lines: list[Line]) -> None:
        for parts in shared_parts(lines, grouped=self._unified):
            rows = []
            for group, begin, end in parts:
                for position in range(begin, end):
                    wanting = [
                        line
                        for line in group
                        if position in line.scores or (line.draw and position == len(line.ids) - 1)
                    ]
                    leader = group[0]
                    rows.append(Row(leader.ids[position], position, leader.sequence, wanting))
            self.computed += len(rows)
            self._decode(rows)
            for group, begin, end in parts:
                for line in group[1:]:
                    if max(begin, line.have) < end:
                        self._api.llama_memory_seq_cp(
                            self._memory,
                            group[0].sequence,
                            line.sequence,
                            max(begin, line.have),
                            end,
                        )

    def _decode_outputs(self, lines: list[Line]) -> None:
        while lines := [line for line in lines if len(line.written) < line.call.new]:
            rows = []
            for line in lines:
                rows.append(Row(line.written[-1], len(line.ids), line.sequence, [line]))
                line.ids = [*line.ids, line.written[-1]]
            self._decode(rows)

    def _decode(self, rows: list[Row]) -> None:
        self.rows += len(rows)
        for first in range(0, len(rows), BATCH):
            part = rows[first : first + BATCH]
            batch = self._batch
            batch.n_tokens = len(part)
            for i, row in enumerate(part):
                batch.token[i], batch.pos[i] = row.token, row.position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, row.sequence
                batch.logits[i] = bool(row.lines)
            if status := self._api.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode gave {status}")
            for i, row in enumerate(part):
                if row.lines:
                    self._use_logits(i, row)

    def _use_logits(self, i: int, row: Row) -> None:
        np = self._np
        pointer = self._api.llama_get_logits_ith(self._context, i)
        logits = np.ctypeslib.as_array(pointer, (self._vocabulary,))
        weights = np.exp((logits - logits.max()) / TEMPERATURE)
        scored = [line.scores[row.position] for line in row.lines if row.position in line.scores]
        for tokens in scored:
            np.log(weights[tokens] / weights.sum())
        drawing = [line for line in row.lines if line.draw]
        if not drawing:
            return
        sums = weights.cumsum()
        draws = np.searchsorted(sums, self._random.random(len(drawing)) * sums[-1])
        for line, token in zip(drawing, draws.tolist(), strict=True):
            line.written.append(min(token, self._vocabulary - 1))
            line.first_token_at = line.first_token_at or time.perf_counter()


Part = tuple[list[Line], int, int]
"""Lines, and from where to where their common text is decoded, in the sequence of the first."""


def shared_parts(lines: Sequence[Line], *, grouped: bool) -> Iterator[list[Part]]:
    """The texts as a tree, level by level: parts of one level need nothing of one another."""
    groups = [(list(lines), 0)] if grouped else [([line], 0) for line in lines]
    while groups:
        parts: list[Part] = []
        deeper: list[tuple[list[Line], int]] = []
        for group, depth in groups:
            group.sort(key=lambda line: line.have)
            texts = [line.ids for line in group]
            end = common_length(min(texts), max(texts))
            begin = max(depth, group[0].have)
            if begin < end:
                parts.append((group, begin, end))
            branches: dict[int, list[Line]] = defaultdict(list)
            for line in group:
                if len(line.ids) > end:
                    branches[line.ids[end]].append(line)
            deeper += [(branch, end) for branch in branches.values()]
        if parts:
            yield parts
        groups = deeper


def shares(calls: Sequence[Call]) -> bool:
    """Whether any two sequences have more in common than it takes to pay."""
    parents = [call.after for call in calls if call.keep >= WORTH_SHARING]
    if len(set(parents)) < len(parents) or any(
        len(choice) > 1 for call in calls for choice in call.choices
    ):
        return True
    begun = sorted(call.suffix for call in calls if call.after is None)
    return any(common_length(a, b) >= WORTH_SHARING for a, b in pairwise(begun))


if __name__ == "__main__":
    serve(LlamaCppPeer)
