"""Run options that cannot be meant are refused by name; one that is merely large is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

import stemma as st
from stemma.interpreter import default
from stemma.lang.errors import InvalidArgument


@st.function
def hello(s: st.ProgramState) -> None:
    s += "Hello" + st.gen("x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "mock"),
        ("sampling", {"temperature": 1}),
        ("timeout", "3"),
        ("timeout", 0),
        ("timeout", True),
    ],
)
def test_option_of_the_wrong_kind_is_named(name: str, value: Any) -> None:
    options: dict[str, Any] = {"backend": st.MockBackend(["x"]), name: value}
    with pytest.raises(InvalidArgument, match=f"^{name}="):
        hello.run(**options)


def test_infinite_timeout_is_no_timeout() -> None:
    assert hello.run(backend=st.MockBackend([" world"]), timeout=math.inf)["x"] == " world"
    assert hello.run(backend=st.MockBackend([" again"]))["x"] == " again"


def test_timers_called_off_do_not_pile_up() -> None:
    for _ in range(300):
        hello.run(backend=st.MockBackend(["x"]), timeout=3600)
    from stemma.interpreter.dispatcher import dispatcher

    assert len(dispatcher()._timers) < 150


def test_only_a_backend_becomes_the_default_one() -> None:
    with pytest.raises(InvalidArgument, match="default backend"):
        st.set_default_backend("local")  # type: ignore[arg-type]


def test_flushing_makes_no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default, "_backend", None)
    assert st.flush_cache() == 0
    assert default._backend is None
