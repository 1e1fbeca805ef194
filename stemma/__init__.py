"""Stemma: a language for structured LLM programs, and a local engine that computes every shared
prefix once.

    import stemma as st

    @st.function
    def capital(s, country):
        s += f"The capital of {country} is" + st.gen("name", max_tokens=8, stop=".")

    capital.run(country="France")["name"]

The public names are those of `stemma/api.py`. They load when the first of them is used, so that the
command line, which lives in this package, starts at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stemma.api import *  # noqa: F403 - what it has in `__all__`

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        """A public name, or the list of them for `from stemma import *`."""
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(f"module 'stemma' has no attribute {name!r}")
        return getattr(import_module("stemma.api"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("stemma.api").__all__})
