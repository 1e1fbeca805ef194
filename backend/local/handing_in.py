"""Requests on their way to the engine: one with a constraint is ready when that is compiled.

Called by `LocalBackend.submit`. Compiling takes microseconds or, of what is large or hostile,
seconds. It is done on a thread of its own, where nobody waits but those who asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from stemma.backend.local.constrain import Beginning, Constrainer
from stemma.backend.local.engine import Engine, own_copy
from stemma.backend.local.request import Request
from stemma.backend.local.tokenizer import Tokenizer
from stemma.backend.local.writing import begin
from stemma.lang.errors import BackendClosed, EngineInvariantError

_Shaped = tuple[Request, Future[Beginning]]


def hand_in(
    requests: Sequence[Request], engine: Engine, constrainer: Constrainer, text: Tokenizer
) -> None:
    """Give requests to the engine, all together: at once, or when their constraints are compiled.

    What is wrong with a constraint, that request fails with. Raises BackendClosed where the engine
    is closed already; one that is closed later tells the requests itself.
    """
    shaped = [
        (request, _beginning(request, constrainer, text))
        for request in requests
        if request.params.constraint is not None
        and (request.samples or request.params.on_limit == "close")
    ]
    if not all(beginning.done() for _, beginning in shaped):
        engine.expect(requests)
    _Together(requests, shaped, engine).go_on()


class _Together:
    """Requests that are handed in together, some of which may wait for their constraints."""

    def __init__(self, requests: Sequence[Request], shaped: list[_Shaped], engine: Engine) -> None:
        self._requests = requests
        self._shaped = shaped
        self._engine = engine

    def go_on(self) -> None:
        """On the thread that compiled the last one, or on that which handed them in."""
        for _, beginning in self._shaped:
            if not beginning.done():
                beginning.add_done_callback(self._go_on_later)
                return
        shaped, self._shaped = self._shaped, []  # what a request waited for does not keep it
        for request, beginning in shaped:
            if (failed := beginning.exception()) is not None:
                self._engine.refuse(request, own_copy(failed))
                continue
            try:
                begin(request, beginning.result())
            except Exception as error:
                self._engine.refuse(request, error)
        self._engine.submit(self._requests)

    def _go_on_later(self, _: object) -> None:
        with suppress(BackendClosed, EngineInvariantError):  # then the engine has told them
            self.go_on()


def _beginning(request: Request, constrainer: Constrainer, text: Tokenizer) -> Future[Beginning]:
    params = request.params
    assert params.constraint is not None
    literal = b""
    if request.heal is not None:
        literal = _whole(text.bytes_of(int(request.tokens.view()[request.prompt_length - 1])))
    return constrainer.beginning(
        params.constraint, literal=literal, close=params.on_limit == "close"
    )


def _whole(data: bytes) -> bytes:
    """The bytes, if they are whole characters; else none."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return b""
    return data
