"""What pytest finds by itself where Stemma is installed: two fixtures and an option.

Costs nothing where they are not used: the package loads with the first test that asks for one.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from stemma.testing import MockBackend, Sent

_UPDATE = "STEMMA_UPDATE_PROMPTS"
_FAILED = pytest.StashKey[bool]()
_SNAPSHOTS = pytest.StashKey[dict[Path, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("stemma").addoption(
        "--update-prompts",
        action="store_true",
        help="write the snapshots of assert_prompt and prompt_snapshot anew",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--update-prompts"):
        before = os.environ.get(_UPDATE)
        os.environ[_UPDATE] = "1"
        config.add_cleanup(lambda: _restore(before))


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(_UPDATE, None)
    else:
        os.environ[_UPDATE] = before


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


@pytest.fixture
def scripted(request: pytest.FixtureRequest) -> Iterator[Callable[..., MockBackend]]:
    """`scripted(replies, choices=..., ...)` makes a `MockBackend` and the default backend of it.

    At the end of the test there is no default backend again, and what of a script nothing has asked
    for fails a test that went well.
    """
    import stemma as st

    made: list[MockBackend] = []

    def script(replies: Any = (), **settings: Any) -> MockBackend:
        backend = st.MockBackend(replies, **settings)
        made.append(backend)
        st.set_default_backend(backend)
        return backend

    yield script
    if made:
        st.set_default_backend(None)
    for backend in made:
        backend.close()
    if request.node.stash.get(_FAILED, False):
        return
    for backend in made:
        left = [
            f"{count} of its {name}"
            for name, count in (
                ("replies", backend.replies_left),
                ("choices", backend.choices_left),
            )
            if count
        ]
        if left:
            pytest.fail(f"the script was not played to its end: {' and '.join(left)} are left")


@pytest.fixture
def prompt_snapshot(request: pytest.FixtureRequest) -> Callable[..., None]:
    """`prompt_snapshot(sent)` is `assert_prompt` with a file named after the test.

    It is snapshots/FILE/TEST.txt beside the file of the test, of a test in a class
    snapshots/FILE/CLASS/TEST.txt; a second one in the same test needs a `name`.
    """
    from stemma.testing import assert_prompt

    folder = request.path.parent / "snapshots" / request.path.stem
    for node in request.node.listchain():
        if isinstance(node, pytest.Class):
            folder /= node.name
    function, bracket, parameters = request.node.name.partition("[")
    test = function + (f"-{_clean(parameters.removesuffix(']'))}" if bracket else "")
    used: dict[Path, str] = request.config.stash.setdefault(_SNAPSHOTS, {})
    mine: set[Path] = set()

    def snapshot(sent: Sent, name: str = "") -> None:
        __tracebackhide__ = True
        path = folder / (f"{test}-{_clean(name)}.txt" if name else f"{test}.txt")
        if path in mine or used.setdefault(path, request.node.nodeid) != request.node.nodeid:
            by = "" if path in mine else f" by {used[path]}"
            raise ValueError(f"prompt_snapshot: {path.name} was compared already{by}: give name=")
        mine.add(path)
        assert_prompt(sent, path)

    return snapshot


def _clean(name: str) -> str:
    """The name as part of a file's; with a hash where that is not the whole name."""
    clean = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    if clean == name:
        return clean
    return f"{clean}-{hashlib.blake2b(name.encode(errors='replace'), digest_size=3).hexdigest()}"
