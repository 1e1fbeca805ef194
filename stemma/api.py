"""The public names, all of them here; `import stemma as st` offers them as its own.

Backends load when they are first named, so that importing costs little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from stemma import errors
from stemma.backend.base import (
    Backend,
    Branch,
    ChoiceScore,
    Completion,
    Generation,
    Namespace,
    TokenLogprob,
    Usage,
)
from stemma.interpreter.default import flush_cache, set_default_backend
from stemma.interpreter.events import (
    Ended,
    Event,
    Failed,
    Forked,
    Joined,
    Selected,
    TextAdded,
    VariableFinished,
    VariableStarted,
)
from stemma.interpreter.fork import Forks
from stemma.interpreter.meta import ChoiceMeta, Meta, ScoreMeta, SelectMeta
from stemma.interpreter.picture import Picture, Segment
from stemma.interpreter.program import Program, function
from stemma.interpreter.state import ProgramState
from stemma.interpreter.stream import Stream
from stemma.interpreter.trace import Outline, Trace
from stemma.lang.choices import (
    ChoicesMethod,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from stemma.lang.errors import StemmaError
from stemma.lang.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    control,
    gen,
    gen_int,
    gen_string,
    image,
    score,
    select,
    separate_reasoning,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
    video,
)
from stemma.lang.sampling import SamplingParams

if TYPE_CHECKING:
    from stemma.backend.local.backend import LocalBackend as LocalBackend
    from stemma.backend.mock import MockBackend as MockBackend

__all__ = [
    "Backend",
    "Branch",
    "ChoiceMeta",
    "ChoiceScore",
    "ChoicesMethod",
    "Completion",
    "Ended",
    "Event",
    "Failed",
    "Forked",
    "Forks",
    "Generation",
    "Joined",
    "LocalBackend",
    "Meta",
    "MockBackend",
    "Namespace",
    "OpenAI",
    "Outline",
    "Picture",
    "Program",
    "ProgramState",
    "Runtime",
    "RuntimeEndpoint",
    "SamplingParams",
    "ScoreMeta",
    "Segment",
    "SelectMeta",
    "Selected",
    "StemmaError",
    "Stream",
    "TextAdded",
    "TokenLogprob",
    "Trace",
    "Usage",
    "VariableFinished",
    "VariableStarted",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "control",
    "errors",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "greedy_token_selection",
    "image",
    "score",
    "select",
    "separate_reasoning",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
    "video",
]


def __getattr__(name: str) -> Any:
    """What takes time to import."""
    if name == "LocalBackend":
        from stemma.backend.local.backend import LocalBackend

        return LocalBackend
    if name == "MockBackend":
        from stemma.backend.mock import MockBackend

        return MockBackend
    if name == "__version__":
        from importlib.metadata import version

        return version("stemma-lm")
    raise AttributeError(f"module 'stemma' has no attribute {name!r}")


def RuntimeEndpoint(*args: Any, **settings: Any) -> NoReturn:
    """Not there yet: a backend that talks to an SGLang server."""
    raise errors.UnsupportedByBackend(
        "st.RuntimeEndpoint is not built yet; st.LocalBackend runs models on this machine"
    )


def OpenAI(*args: Any, **settings: Any) -> NoReturn:
    """Not there yet: a backend that talks to an OpenAI-compatible server."""
    raise errors.UnsupportedByBackend(
        "st.OpenAI is not built yet; st.LocalBackend runs models on this machine"
    )


def Runtime(*args: Any, **settings: Any) -> NoReturn:
    """Not there: the engine runs inside the program's process, without a server."""
    raise errors.UnsupportedByBackend(
        "st.Runtime launches a server, which Stemma does not have; st.LocalBackend is the engine"
    )
