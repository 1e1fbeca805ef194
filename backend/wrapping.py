"""A backend around another one, which still does the work: what `recording.py` and `caching.py`
have in common.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import TypeVar

from stemma.backend.base import Backend, Branch, ChoiceScore, Generation, Namespace, Pending
from stemma.backend.chat import ChatFormat
from stemma.backend.sent import Sent
from stemma.lang.reasoning import Marks
from stemma.lang.sampling import SamplingParams

T = TypeVar("T")


class WrappingBackend(Backend):
    """What it is around is `inner`; all that it does not do itself, that one does."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def chat(self) -> ChatFormat:
        return self.inner.chat

    @chat.setter
    def chat(self, chat: ChatFormat) -> None:
        self.inner.chat = chat

    @property
    def model_name(self) -> str:  # type: ignore[override]
        return self.inner.model_name

    @property
    def reasoning_marks(self) -> Marks:  # type: ignore[override]
        return self.inner.reasoning_marks

    @property
    def control_tokens(self) -> Collection[str] | None:  # type: ignore[override]
        return self.inner.control_tokens

    @property
    def max_running(self) -> int | None:  # type: ignore[override]
        return self.inner.max_running

    def identity(self) -> str:
        return self.inner.identity()

    def count_tokens(self, text: str) -> int | None:
        return self.inner.count_tokens(text)

    def model_sampling(self) -> SamplingParams:
        return self.inner.model_sampling()

    def flush_cache(self, namespace: Namespace | None = None) -> int:
        return self.inner.flush_cache(namespace)

    def close(self) -> None:
        self.inner.close()


class WrappingBranch(Branch):
    """A branch of `inner`, and what it was told."""

    def __init__(self, inner: Branch, sent: Sent) -> None:
        self.inner = inner
        self.sent = sent

    def append(self, text: str, *, control: bool = False) -> None:
        self.inner.append(text, control=control)
        self.sent = self.sent.text(text, control=control)

    def generate(self, params: SamplingParams, *, heal: bool = True) -> Generation:
        return self.sample([params], heal=heal)[0]

    def commit(self, choice: ChoiceScore) -> None:
        self.inner.commit(choice)
        self.sent = self.sent.choice(choice)

    def fork(self, n: int) -> list[Branch]:
        return [self.around(branch) for branch in self.inner.fork(n)]

    @abstractmethod
    def around(self, inner: Branch) -> Branch:
        """A branch of the same kind that was told the same."""

    def token_ids(self) -> list[int]:
        return self.inner.token_ids()

    def close(self) -> None:
        self.inner.close()


def pass_on(
    inner: Pending[T], outer: Pending[T], noted: Callable[[T | BaseException], object]
) -> None:
    """Let `outer` come to what `inner` comes to, after `noted` was told of it.

    What `noted` raises fails `outer` instead. Cancelling `outer` cancels `inner`.
    """
    outer.on_cancel = inner.cancel
    if isinstance(inner, Generation) and isinstance(outer, Generation):
        inner.subscribe(outer.push)

    def arrived(future: Future[T]) -> None:
        outer.on_cancel = None  # no circle outlives the request
        try:
            error = future.exception()
            noted(error if error is not None else future.result())
        except BaseException as failed:
            error = failed
        if error is not None:
            outer.fail(error)
        else:
            outer.finish(future.result())

    inner.add_done_callback(arrived)
