"""A marked tree in the terminal."""

from __future__ import annotations

from stemma.backend.local.cache.printing import plain
from stemma.treeview.marks import unmarked
from stemma.treeview.text import as_rich
from tests.treeview.texts_for_tests import Texts, four_marks


def test_tree_prints_name_mark_tokens_and_text_of_every_edge() -> None:
    assert plain(as_rich(four_marks())).splitlines() == [
        "radix tree  19 tokens in 4 edges",
        "└── default namespace",
        "    ├── a  hit     7 tokens  1 lock  “system ”",
        "    │   ├── b  evicted 5 tokens  “hello”",
        "    │   └── c  hit     3 tokens  “bye”",
        "    │       └── d  new     4 tokens  “ bye”",
        "    └── e          5 tokens  “other”",
    ]


def test_control_tokens_are_marks() -> None:
    printed = plain(as_rich(unmarked(Texts("<|im_start|>user\nHi<|im_end|>").now())))
    assert "“◆user⏎Hi◆”" in printed
