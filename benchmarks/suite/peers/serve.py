"""A peer's process: one JSON object a line on standard input, one back on standard output.

    {"setup": {...}}    loads the model       {"ready": "name and version"}
    {"calls": [...]}    does a work           {"outcome": {...}}

What goes wrong comes back as {"error": "..."}; after a failed setup the process ends. Whatever the
peer itself prints goes to standard error. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from suite.work import Answer, Call, Outcome, Ready, Replay, from_json

WARM_UP = [
    Call(0, None, 0, list(range(10, 200)), new=4),
    Call(1, 0, 194, [10, 11], choices=[[12], [13]]),
    Call(1, 0, 194, [10, 11], choices=[[12, 13], [14, 15]]),
]
"""Done once after the setup: some engines compile at their first requests."""


@dataclass(frozen=True, slots=True)
class Setup:
    """model: a folder as the hub has them. gguf: the same model as a GGUF file, if there is one.
    kv_tokens: for how many tokens at once the peer needs memory. seed: of its draws.
    """

    model: str
    gguf: str | None
    threads: int
    kv_tokens: int
    seed: int


class Peer(ABC):
    """An engine that does calls round by round, each as an expert on it would have it done.

    computed: prompt tokens run through the model since `reset`. rows: all that was.
    """

    name: str
    computed: int = 0
    rows: int = 0

    def reset(self, calls: Sequence[Call]) -> None:
        """Forget everything that was computed, and get ready for a work; its time does not
        count.
        """
        self.computed = self.rows = 0

    @abstractmethod
    def round(self, ready: Sequence[Ready]) -> list[Answer]:
        """Do calls that need nothing of one another; the answers in their order."""


def perform(peer: Peer, calls: Sequence[Call]) -> Outcome:
    """Do a whole work, with nothing cached."""
    peer.reset(calls)
    replay = Replay(calls)
    prompts = outputs = 0
    first_token_s: list[float] = []
    start = time.perf_counter()
    for number, ready in enumerate(replay.rounds()):
        for call, answer in zip(ready, peer.round(ready), strict=True):
            if len(answer.ids) != call.new:
                raise RuntimeError(f"wrote {len(answer.ids)} tokens where {call.new} were asked")
            replay.wrote(call.index, answer.ids)
            prompts += call.prompt_tokens
            outputs += call.new
            if number and answer.first_token_s is not None:
                first_token_s.append(answer.first_token_s)
    return Outcome(
        seconds=time.perf_counter() - start,
        prompt_tokens=prompts,
        output_tokens=outputs,
        prompt_computed=peer.computed,
        rows=peer.rows,
        first_token_s=first_token_s,
    )


def serve(make: Callable[[Setup], Peer]) -> None:
    """The process's main function. `make` imports and loads what the peer needs."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def reply(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        peer = make(Setup(**json.loads(sys.stdin.readline())["setup"]))
        perform(peer, WARM_UP)
    except Exception as error:
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})
        return
    reply({"ready": peer.name})
    for line in sys.stdin:
        try:
            outcome = perform(peer, from_json(json.loads(line)["calls"]))
            reply({"outcome": asdict(outcome)})
        except Exception as error:
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})
