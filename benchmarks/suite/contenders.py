"""Who does the work: Stemma in several settings, in this process, and peers, each in its own.

Used by `measure.py`. A contender that cannot be had raises `Unavailable` with the reason when it is
started, and is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import stemma as st
from stemma.backend.local.native.attention import NativeAttention
from stemma.lang.errors import StemmaError
from suite.peers.serve import Setup
from suite.work import TEMPERATURE, Call, Outcome, to_json
from suite.workloads import Workload

BENCHMARKS = Path(__file__).parents[1]


class Unavailable(Exception):
    """The contender cannot be had here, and why."""


class Contender(ABC):
    """Made cheaply; `start` loads the model."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self.key = key

    @abstractmethod
    def start(self, setup: Setup) -> None:
        """Raises Unavailable."""

    @abstractmethod
    def run(self, workload: Workload, calls: Sequence[Call]) -> Outcome:
        """Do a workload once, with nothing cached. calls: the same as requests."""

    @abstractmethod
    def close(self) -> None:
        """May be called whether it was started or not."""


class Stemma(Contender):
    """Runs the program itself. tree_attention: a shared prefix is read once for all rows below it;
    False: by each of them. options: of LocalBackend.
    """

    def __init__(self, name: str, key: str, *, tree_attention: bool = True, **options: Any) -> None:
        super().__init__(name, key)
        self.options = options
        self._tree_attention = tree_attention
        self._backend: st.LocalBackend | None = None

    @property
    def backend(self) -> st.LocalBackend:
        assert self._backend is not None, "start it first"
        return self._backend

    def start(self, setup: Setup) -> None:
        self._seed = setup.seed
        try:
            self._backend = st.LocalBackend(
                setup.model, dtype="float32", kv_tokens=setup.kv_tokens, **self.options
            )
            if not self._tree_attention:
                attention = self._backend.engine.attention
                if not isinstance(attention, NativeAttention):
                    raise Unavailable("without the compiled kernels it cannot be turned off")
                attention.share = False
            self._backend.warmup()
        except StemmaError as error:
            raise Unavailable(str(error)) from error

    def run(self, workload: Workload, calls: Sequence[Call]) -> Outcome:
        self.backend.flush_cache()
        before = self.backend.stats()
        seconds, states = run_program(workload, self.backend, self._seed)
        after = self.backend.stats()

        def spent(what: str) -> float:
            return float(getattr(after, what) - getattr(before, what))

        def more(count: str) -> int:
            return int(spent(count))

        steps_s = spent("step_seconds")
        forward_s, scheduling_s = spent("forward_seconds"), spent("scheduling_seconds")

        return Outcome(
            seconds=seconds,
            prompt_tokens=more("prompt_tokens"),
            output_tokens=more("output_tokens"),
            prompt_computed=more("prompt_tokens") - more("cached_tokens"),
            rows=more("computed_tokens"),
            steps=more("steps"),
            first_token_s=[s for state in states for s in state.value or ()],
            parts={
                "model and draws": forward_s,
                "tree and scheduling": scheduling_s,
                "texts, stops, results": steps_s - forward_s - scheduling_s,
                "between steps": seconds - steps_s,
            },
        )

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
            self._backend = None


class Peer(Contender):
    """A process that `peers/serve.py` describes.

    python: an interpreter that has the peer installed; None leaves it out. remedy: how to get one.
    log: where goes what it prints.
    """

    def __init__(
        self,
        name: str,
        key: str,
        python: str | None,
        *,
        remedy: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, key)
        self._python = python
        self._remedy = remedy
        self._log = log
        self._environment = environment or {}
        self._process: subprocess.Popen[str] | None = None

    def start(self, setup: Setup) -> None:
        if self._python is None:
            raise Unavailable(f"no interpreter that has it: {self._remedy}")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    [self._python, "-m", f"suite.peers.{self.key.replace('-', '_')}_peer"],
                    cwd=BENCHMARKS,
                    env={**os.environ, "OMP_NUM_THREADS": str(setup.threads), **self._environment},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    encoding="utf-8",
                )
        except OSError as error:
            raise Unavailable(f"{self._python} does not start: {error}") from error
        try:
            self.name = self._ask({"setup": asdict(setup)})["ready"]
        except RuntimeError as error:
            self.close()
            raise Unavailable(f"{error} (see {self._log}); {self._remedy}") from error

    def run(self, workload: Workload, calls: Sequence[Call]) -> Outcome:
        return Outcome(**self._ask({"calls": to_json(calls)})["outcome"])

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None, "start it first"
        with suppress(BrokenPipeError):  # it has ended: there is no reply then
            print(json.dumps(message), file=process.stdin, flush=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with status {process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with process:  # closes its pipes, which ends it, and waits
            timer = threading.Timer(30, process.kill)
            timer.start()
            with suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.close()
            process.wait()
            timer.cancel()


def run_program(
    workload: Workload, backend: st.Backend, seed: int
) -> tuple[float, list[st.ProgramState]]:
    """Seconds, and what came of each item."""
    sampling = st.SamplingParams(temperature=TEMPERATURE, ignore_eos=True)
    start = time.perf_counter()
    states = workload.program.run_batch(
        workload.items, backend=backend, sampling=sampling, seed=seed
    )
    return time.perf_counter() - start, states
