"""The documents are true: their Python blocks run and print what they say, their links lead
somewhere.

`markdown_for_tests.py` says how a block tells what it runs on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stemma as st
from tests.markdown_for_tests import Block, anchors, links, python_blocks

ROOT = Path(__file__).resolve().parents[1]
WITH_CODE = sorted(
    path for path in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
)
WITH_LINKS = sorted({*WITH_CODE, *ROOT.glob("*.md")})


def names(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.fixture(autouse=True)
def _no_default_backend() -> Iterator[None]:
    yield
    st.set_default_backend(None)


def run_blocks(blocks: list[Block], model: st.Backend | None = None) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        scripted = st.MockBackend(lambda prompt, params: " said")
        st.set_default_backend(scripted if block.kind == "mock" else model)
        block.run(namespace)


@pytest.mark.parametrize("name", names(WITH_CODE))
def test_the_blocks_that_need_no_model_run_and_print_what_is_said(name: str) -> None:
    run_blocks([block for block in python_blocks(ROOT / name) if block.kind == "mock"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    names([p for p in WITH_CODE if any(b.kind == "slow" for b in python_blocks(p))]),
)
def test_the_blocks_that_need_a_model_run_and_print_what_is_said(
    name: str, default_model_folder: Path
) -> None:
    backend = st.LocalBackend(default_model_folder, quantization=None)  # as the pages say
    try:
        run_blocks(python_blocks(ROOT / name), backend)
    finally:
        backend.close()


@pytest.mark.parametrize("name", names(WITH_LINKS))
def test_relative_links_lead_to_files_and_headings_that_exist(name: str) -> None:
    broken = []
    for line, target in links(ROOT / name):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(f"{name}:{line}: {target}")
    assert broken == []


def document(folder: Path, text: str) -> Path:
    file = folder / "page.md"
    file.write_text(text, encoding="utf-8")
    return file


def failure(file: Path) -> str:
    with pytest.raises(AssertionError) as caught:
        run_blocks(python_blocks(file))
    return str(caught.value)


def test_a_failing_block_names_file_and_line(tmp_path: Path) -> None:
    file = document(tmp_path, "# A\n\n```python\nx = 1\nx.nothing\n```\n")
    assert failure(file).startswith(f"{file}:5: the block raises AttributeError")
    file = document(tmp_path, "text\n```python\ndef f():\n    1 / 0\n```\n\n```python\nf()\n```\n")
    assert failure(file).startswith(f"{file}:4: the block raises ZeroDivisionError")
    file = document(tmp_path, "text\n\n\n```python\na b\n```\n")
    assert failure(file).startswith(f"{file}:5: the block raises SyntaxError")


def test_a_block_that_prints_something_else_fails(tmp_path: Path) -> None:
    text = "```python\nprint(2)\n```\n\n```text\n{}\n```\n"
    run_blocks(python_blocks(document(tmp_path, text.format(2))))
    file = document(tmp_path, text.format(3))
    assert failure(file).startswith(f"{file}:2: the block prints\n2")


def test_a_text_block_after_other_words_is_no_output(tmp_path: Path) -> None:
    file = document(tmp_path, "```python\nprint(2)\n```\n\nAnd:\n\n```text\n3\n```\n")
    run_blocks(python_blocks(file))


def test_a_comment_says_what_a_block_runs_on(tmp_path: Path) -> None:
    mock, slow = "```python\n1\n```\n", "<!-- test: slow -->\n```python\n2\n```\n"
    blocks = python_blocks(document(tmp_path, slow + mock + "<!-- test: mock -->\n" + mock))
    assert [block.kind for block in blocks] == ["slow", "mock", "mock"]
    with pytest.raises(AssertionError, match=r"page\.md:1: .*'slwo'"):
        python_blocks(document(tmp_path, slow.replace("slow", "slwo")))


def test_a_block_that_is_never_closed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"page\.md:2: "):
        python_blocks(document(tmp_path, "a\n```python\nb\n"))


def test_links_in_code_are_no_links_and_headings_have_the_usual_anchors(tmp_path: Path) -> None:
    file = document(tmp_path, "# A `b`, C!\n[x](y.md#z) `[no](t)`\n```\n[no](t)\n```\n# A b c\n")
    assert list(links(file)) == [(2, "y.md#z")]
    assert anchors(file) == {"a-b-c", "a-b-c-1"}
