"""The official JSON-Schema-Test-Suite: accepted or refused by name, never wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lang.json_schema_suite_for_tests import HEAD, Row, suite_folder, tried

PAGE = Path(__file__).parents[2] / "docs" / "json-schema.md"


@pytest.mark.slow
def test_no_verdict_of_draft_2020_12_is_wrong_and_the_table_in_the_docs_is_what_is_measured() -> (
    None
):
    folder = suite_folder() / "draft2020-12"
    wrong: list[str] = []
    rows = []
    for file in sorted(folder.rglob("*.json")):
        keyword = file.relative_to(folder).with_suffix("").as_posix()
        if keyword == "format":  # it says that formats allow every string; optional/format asserts
            continue
        rows.append(tried(file, keyword, wrong))
    total = Row("all", *(sum(getattr(r, f) for r in rows) for f in _COUNTS))
    table = "\n".join([HEAD, *map(str, rows), str(total)])
    print(table)
    assert wrong == []
    assert total.accepted > 200
    assert total.tests > 900
    assert table in PAGE.read_text(encoding="utf-8"), (
        f"docs/json-schema.md lacks the table\n{table}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["draft2020-12", "draft2019-09"])
def test_no_verdict_is_wrong_without_white_space(draft: str) -> None:
    folder = suite_folder() / draft
    wrong: list[str] = []
    accepted = 0
    for file in sorted(folder.rglob("*.json")):
        if file.name != "format.json":
            accepted += tried(file, file.stem, wrong, whitespace="compact").accepted
    assert wrong == []
    assert accepted > 200


_COUNTS = ("accepted", "refused", "tests", "wrong")
