"""The engine: one thread, one loop: schedule -> forward -> sample -> accept.

Owns the model, the scheduler and, through it, the cache. Other threads hand in work through an
inbox that is read between steps; results leave through the callbacks of each request. The engine
never waits for a reader.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from stemma.backend.base import TokenLogprob
from stemma.backend.local.attention.executor import Attention
from stemma.backend.local.batch import Batch, build_batch
from stemma.backend.local.cache.radix_key import common_prefix
from stemma.backend.local.drawing import BadRows, draw_tokens, score_known_tokens
from stemma.backend.local.metrics import Counters, Stats, Stopwatch
from stemma.backend.local.model.decoder import Decoder
from stemma.backend.local.native.masks import Lower
from stemma.backend.local.request import Request, State
from stemma.backend.local.sampler import Sampled
from stemma.backend.local.scheduler import Scheduler, Step, StepFailed
from stemma.backend.local.writing import may_redo, stop_sampling, write
from stemma.lang.errors import BackendClosed, Cancelled, EngineInvariantError, StemmaError

T = TypeVar("T")

# torch's worker threads do not survive os.fork(): a model in the child would hang at its first
# product. So a process that was forked from one with an engine makes none.
_engine_was_made = False
_process_was_forked = False


def _after_fork() -> None:
    global _process_was_forked
    _process_was_forked = _engine_was_made


os.register_at_fork(after_in_child=_after_fork)


def refuse_forked_process() -> None:
    """Raise BackendClosed in a process that was forked from one that had run a model."""
    if _process_was_forked:
        raise BackendClosed(
            "this process was forked from one that had run a model, and torch's threads do not "
            'survive that: start processes by multiprocessing.get_context("spawn")'
        )


def own_copy(error: BaseException) -> BaseException:
    """The error for one of several requests: each program adds notes of its own to it."""
    try:
        own = copy.copy(error)
    except Exception:  # an exception that cannot be made again
        own = StemmaError(repr(error))
    own.__cause__ = error
    return own


class Engine:
    """Runs requests to their end. `submit`, `cancel`, `call` and `close` may be used from any
    thread.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        scheduler: Scheduler,
        *,
        device: torch.device,
        end_ids: frozenset[int],
        lower: Lower | None = None,
        check_every_step: bool = False,
    ) -> None:
        global _engine_was_made
        _engine_was_made = True
        self.decoder = decoder
        self.attention = attention
        self.scheduler = scheduler
        self.device = device
        self.end_ids = end_ids
        self.lower = lower
        self.counters = Counters()
        self.stepping, self.scheduling, self.forwarding = Stopwatch(), Stopwatch(), Stopwatch()
        self.check_every_step = check_every_step
        self._expected: set[Request] = set()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closing = False
        self._broken: BaseException | None = None
        self._pid = os.getpid()
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    # -- from any thread

    def expect(self, requests: Sequence[Request]) -> None:
        """Know of requests that are not ready yet, so that they can be cancelled, and are told
        when the engine stops. `submit` or `refuse` follows.
        """
        self._post(lambda: self._expected.update(requests))

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; those handed in together can meet in one step. Those that have ended
        before, for they were expected, stay so.
        """

        def arrive() -> None:
            for request in requests:
                self._expected.discard(request)
                if request.state is State.FINISHED:
                    continue
                self._count_output(request, output=0, forced=0)
                self.scheduler.submit(request)

        self._post(arrive)

    def refuse(self, request: Request, error: BaseException) -> None:
        """Have a request fail that was not submitted."""

        def leave() -> None:
            if request.state is not State.FINISHED:
                self._fail(request, error)

        self._post(leave)

    def cancel(self, requests: Sequence[Request]) -> None:
        """Take requests out between two steps; each fails with `Cancelled`, its partial text
        attached.

        Harmless for requests that have ended, and on a closed engine.
        """

        def leave() -> None:
            for request in requests:
                if request.state is not State.FINISHED:
                    at_work = request.state is not State.NEW and request.output is not None
                    partial = request.text_out.finish().text if at_work else ""
                    self._fail(request, Cancelled("the request was cancelled", partial=partial))

        with suppress(BackendClosed, EngineInvariantError):
            self._post(leave)

    def call(self, fn: Callable[[], T]) -> T:
        """Run `fn` on the engine's thread between two steps and return what it returns."""
        if threading.current_thread() is self._thread:
            return fn()
        future: Future[T] = Future()

        def run() -> None:
            if self._closing:
                future.set_exception(self._why_closed())
                return
            try:
                future.set_result(fn())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    def check_may_wait(self) -> None:
        """Raise where waiting for a result never ends: on the thread that would produce it."""
        if threading.current_thread() is self._thread:
            raise StemmaError("a result was waited for on the engine's own thread, in a callback")

    def tell(self, work: Callable[[], None]) -> None:
        """Have `work` done between two steps; nobody waits for it, and a closed engine forgets it.

        Takes no lock, so that a finaliser may use it wherever the garbage collector runs it.
        """
        self._inbox.put(lambda: None if self._closing else work())

    def close(self) -> None:
        """Stop the thread; requests under way fail with BackendClosed."""
        self._closing = True
        thread = self._thread
        if thread is not None and os.getpid() == self._pid:
            self._inbox.put(lambda: None)
            if thread is not threading.current_thread():
                thread.join()

    def _post(self, work: Callable[[], None]) -> None:
        if os.getpid() != self._pid:
            raise BackendClosed(
                "this backend belongs to the process that made it, not to its os.fork(): start "
                'processes by multiprocessing.get_context("spawn") and make a backend in each'
            )
        with self._start_lock:
            if self._closing:
                raise self._why_closed()
            self._inbox.put(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stemma-engine", daemon=True)
                self._thread.start()

    def _why_closed(self) -> BackendClosed | EngineInvariantError:
        """A new error each time: errors collect notes of the program that meets them."""
        if self._broken is None:
            return BackendClosed("the backend was closed")
        stopped = EngineInvariantError(f"the engine stopped: {self._broken!r}")
        stopped.__cause__ = self._broken
        return stopped

    # -- the loop

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._read_inbox()
                    self.step()
        except BaseException as error:
            self._broken = error
        with self._start_lock:
            self._closing = True
        self._turn_away()

    def _turn_away(self) -> None:
        """Nothing runs any more: tell everybody who waits, whatever state the books are in."""
        with suppress(Empty):
            while True:
                job = self._inbox.get_nowait()
                with suppress(Exception):
                    job()
        for request in [*self.scheduler.running, *self.scheduler.waiting, *self._expected]:
            request.state = State.FINISHED
            with suppress(Exception):
                request.on_error(self._why_closed())

    def _read_inbox(self, *, wait: bool = True) -> None:
        try:
            if wait and not self.scheduler.has_work:
                self._inbox.get()()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass

    def step(self) -> None:
        """One forward pass and what follows from it."""
        with self.stepping:
            worked = self._step()
        if worked and self.check_every_step:
            self.check()

    def _step(self) -> bool:
        """Whether there was anything to do."""
        try:
            with self.scheduling:
                step = self.scheduler.schedule()
        except StepFailed as failed:
            self._undo(failed.step, {failed.request: failed.__cause__ or failed})
            return True
        if step is None:
            return False
        before = self.forwarding.seconds
        try:
            with self.forwarding:
                batch = build_batch(step.entries)
                hidden = self._forward(batch)
                scored = score_known_tokens(self.decoder, step, batch, hidden)
                drawn = draw_tokens(self.decoder, step, batch, hidden, self.end_ids, self.lower)
        except BadRows as bad:
            self._undo(step, bad.errors)
            return True
        except Exception as error:
            self._undo(step, {request: own_copy(error) for request in step.requests})
            return True
        with self.scheduling:
            self.scheduler.commit(step)
        self.counters.steps += 1
        self.counters.computed_tokens += len(batch.token_ids)
        self._tell_cost(step, len(batch.token_ids), self.forwarding.seconds - before)
        for request, logprobs in zip(step.requests, scored, strict=True):
            self._accept_scored(request, logprobs)
        for request, samples in drawn:
            self._accept_samples(request, samples)
        return True

    def _tell_cost(self, step: Step, rows: int, seconds: float) -> None:
        """Of a step without prompts, how long its rows took: what drafts are worth depends on
        it.
        """
        speculation = self.scheduler.speculation
        if speculation and rows == len(step.requests) + sum(r.drafted for r in step.requests):
            speculation.observe(rows, seconds)

    def _undo(self, step: Step, errors: Mapping[Request, BaseException]) -> None:
        """Nothing of the step stays; the requests at fault fail, the others are queued again."""
        with self.scheduling:
            self.scheduler.rollback(step, failed=errors.keys())
        for request, error in errors.items():
            self._count(request)
            request.on_error(error)

    def _forward(self, batch: Batch) -> Tensor:
        token_ids = torch.from_numpy(batch.token_ids.astype(np.int64)).to(self.device)
        positions = torch.from_numpy(batch.positions.astype(np.int64)).to(self.device)
        hidden: Tensor = self.decoder(token_ids, positions, self.attention.prepare(batch))
        return hidden

    # -- after the forward pass

    def _accept_scored(self, request: Request, logprobs: list[TokenLogprob]) -> None:
        if request.next_logprob is not None and logprobs:
            of_prompt = max(0, request.prompt_length - request.next_logprob)
            request.prompt_logprobs += logprobs[:of_prompt]
            request.logprobs += logprobs[of_prompt:]
            request.next_logprob += len(logprobs)
        if not request.samples and request.computed >= request.known_end:
            self._finish(request)

    def _accept_samples(self, request: Request, samples: list[Sampled]) -> None:
        if request.first_token_at is None:
            request.first_token_at = time.perf_counter()
        if request.heal is not None:
            self._accept_healed(request, *samples)
        elif request.drafted:
            self._accept_draft(request, samples)
        else:
            self._write(request, samples[0])

    def _accept_healed(self, request: Request, redone: Sampled, following: Sampled) -> None:
        """Take the token that was drawn in place of the prompt's last, or if that one stays the one
        that was drawn behind it.
        """
        last = request.prompt_length - 1
        literal = int(request.tokens.view()[last])
        request.heal = None
        if redone.token_id == literal or not may_redo(request, literal, redone.token_id):
            if request.guide is not None:
                request.guide.take(literal)
            self._write(request, following)
            return
        with self.scheduling:
            self.scheduler.memory.truncate(request, last)
        request.tokens.truncate(last)
        request.healed = True
        request.text_out.stand_for(literal)
        self._write(request, redone)

    def _accept_draft(self, request: Request, samples: list[Sampled]) -> None:
        """Append what was drawn as far as the rows behind it were right: those of the draft's
        tokens that were drawn indeed.
        """
        draft = request.drop_draft()
        right = needed = 0
        while True:
            written = len(request.tokens)
            self._write(request, samples[right])
            new = request.tokens.view()[written:]  # one, and what a constraint forces behind it
            as_guessed = common_prefix(new, draft[right:])
            right += as_guessed
            if request.state is State.FINISHED:
                break
            if not request.is_scored:  # rows that score what was forced are computed again
                break
            request.computed += as_guessed
            needed += as_guessed
            if as_guessed < len(new):
                break
        self.counters.computed_tokens -= len(draft) - needed
        self.counters.drafted_tokens += len(draft)
        self.counters.accepted_tokens += right
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.learn(request, right=right, drafted=len(draft))

    def _write(self, request: Request, sampled: Sampled) -> None:
        output, forced = len(request.output_ids), request.forced
        try:
            end = write(request, sampled)
        except StemmaError as error:  # a stop expression or a constraint that is too complex
            self._fail(request, error)
            return
        self._count_output(request, output=output, forced=forced)
        if request.next_logprob is not None and not request.is_scored:
            with self.scheduling:  # a row that scores what was forced may be computed already
                self.scheduler.memory.truncate(request, request.next_logprob - 1)
        if end is None:
            self._stream(request)
        elif request.is_scored:
            request.finish_reason = end
            self._finish(request)
        else:
            stop_sampling(request, end)

    def _stream(self, request: Request) -> None:
        if request.on_text is None:
            return
        piece = request.text_out.take_increment()
        if piece:
            try:
                request.on_text(piece)
            except Exception as error:
                self._fail(request, error)

    def _count_output(self, request: Request, *, output: int, forced: int) -> None:
        """Count what a request has written since it had written so much."""
        self.counters.output_tokens += len(request.output_ids) - output
        self.counters.forced_tokens += request.forced - forced

    # -- ends

    def _finish(self, request: Request) -> None:
        if request.output is not None:
            request.end = request.output.finish()
            self._stream(request)
            if request.state is State.FINISHED:  # its listener failed
                return
        with self.scheduling:
            self.scheduler.finish(request)
        self._count(request)
        request.on_finish(request)

    def _fail(self, request: Request, error: BaseException) -> None:
        self._expected.discard(request)
        self.scheduler.finish(request)
        self._count(request)
        request.on_error(error)

    def _count(self, request: Request) -> None:
        self.counters.finished += 1
        self.counters.add(request)

    def stats(self) -> Stats:
        """Counters and sizes as they are now; on the engine's thread."""
        memory, counters = self.scheduler.memory, replace(self.counters)
        memory.pins.expire()
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            counters.add(request)
        return Stats(
            **asdict(counters),
            step_seconds=self.stepping.seconds,
            scheduling_seconds=self.scheduling.seconds,
            forward_seconds=self.forwarding.seconds,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._expected),
            retractions=self.scheduler.retractions,
            evicted_tokens=memory.cache.evicted_tokens,
            pool_tokens=memory.capacity,
            free_tokens=memory.allocator.free_tokens,
            evictable_tokens=memory.cache.evictable_tokens,
            protected_tokens=memory.cache.protected_tokens,
            private_tokens=memory.private_tokens,
            pinned_tokens=memory.pins.tokens,
        )

    def check(self) -> None:
        """Raise EngineInvariantError unless all books add up; at idle nothing may be private, and
        nothing locked but what is pinned.
        """
        memory = self.scheduler.memory
        memory.pins.expire()
        memory.check()
        if not self.scheduler.running:
            held = memory.cache.protected_tokens + memory.private_tokens
            if held != memory.pins.tokens:
                raise EngineInvariantError(
                    f"{held} tokens are locked or private though nothing runs and "
                    f"{memory.pins.tokens} are pinned"
                )
