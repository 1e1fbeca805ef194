"""The radix tree made visible: recorded moment by moment, as text, as SVG and as a page.

recorder = Recorder(backend)
...
print(recorder.note("A title", "What has happened."))
save_page(recorder.moments, "moments.html")
save_svg(backend.tree(), "tree.svg")
"""

from stemma.treeview.marks import Mark, MarkedNode, MarkedTree, compare, unmarked
from stemma.treeview.page import save_page
from stemma.treeview.recorder import Counts, Moment, Recorder
from stemma.treeview.svg import save_svg

__all__ = [
    "Counts",
    "Mark",
    "MarkedNode",
    "MarkedTree",
    "Moment",
    "Recorder",
    "compare",
    "save_page",
    "save_svg",
    "unmarked",
]
