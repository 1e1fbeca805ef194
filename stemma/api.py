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
    Stopped,
    TextAdded,
    VariableFinished,
    VariableStarted,
)
from stemma.interpreter.fork import Forks, Gathered
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
from stemma.lang.constraints import Constraint, ConstraintWarning
from stemma.lang.errors import StemmaError
from stemma.lang.gen import gen, gen_int, gen_string
from stemma.lang.pieces import Piece, capture, one_of, optional, repeat, seq
from stemma.lang.primitives import (
    assistant,
    assistant_begin,
    assistant_end,
    control,
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
from stemma.lang.tools import Tool, ToolCall

if TYPE_CHECKING:
    from stemma.backend.caching import CachedBackend as CachedBackend
    from stemma.backend.local.backend import LocalBackend as LocalBackend
    from stemma.backend.mock import MockBackend as MockBackend
    from stemma.backend.response_cache import ResponseCache as ResponseCache

__all__ = [
    "Anthropic",
    "Backend",
    "Branch",
    "CachedBackend",
    "ChoiceMeta",
    "ChoiceScore",
    "ChoicesMethod",
    "Completion",
    "Constraint",
    "ConstraintWarning",
    "Crusoe",
    "Ended",
    "Engine",
    "Event",
    "Failed",
    "Forked",
    "Forks",
    "Gathered",
    "Generation",
    "Joined",
    "LiteLLM",
    "LocalBackend",
    "Meta",
    "MockBackend",
    "Namespace",
    "OpenAI",
    "Outline",
    "Picture",
    "Piece",
    "Program",
    "ProgramState",
    "ResponseCache",
    "Runtime",
    "RuntimeEndpoint",
    "SamplingParams",
    "ScoreMeta",
    "Segment",
    "SelectMeta",
    "Selected",
    "ServerArgs",
    "StemmaError",
    "Stopped",
    "Stream",
    "TextAdded",
    "TokenLogprob",
    "Tool",
    "ToolCall",
    "Trace",
    "Usage",
    "VariableFinished",
    "VariableStarted",
    "VertexAI",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "capture",
    "control",
    "errors",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "image",
    "one_of",
    "optional",
    "repeat",
    "score",
    "select",
    "separate_reasoning",
    "seq",
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
    if name == "CachedBackend":
        from stemma.backend.caching import CachedBackend

        return CachedBackend
    if name == "ResponseCache":
        from stemma.backend.response_cache import ResponseCache

        return ResponseCache
    if name == "__version__":
        from importlib.metadata import version

        return version("stemma-lm")
    raise AttributeError(f"module 'stemma' has no attribute {name!r}")


class _NotHere:
    """A name of SGLang's that a program may import, and that says what to do instead when used."""

    def __init__(self, name: str, instead: str) -> None:
        vars(self).update(_name=name, _instead=instead)

    def _refuse(self, *args: Any, **settings: Any) -> NoReturn:
        raise errors.UnsupportedByBackend(f"st.{self._name} {self._instead}")

    __call__ = __setattr__ = _refuse

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # Python and its tools look for what may not be there
            raise AttributeError(attribute)
        self._refuse()


_ON_THIS_MACHINE = "is not built yet; st.LocalBackend runs models on this machine"
_REMOTE = "is no backend of Stemma, which asks no remote model; st.LocalBackend runs models here"

RuntimeEndpoint = _NotHere("RuntimeEndpoint", _ON_THIS_MACHINE)
OpenAI = _NotHere("OpenAI", _ON_THIS_MACHINE)
Anthropic = _NotHere("Anthropic", _REMOTE)
Crusoe = _NotHere("Crusoe", _REMOTE)
LiteLLM = _NotHere("LiteLLM", _REMOTE)
VertexAI = _NotHere("VertexAI", _REMOTE)
Runtime = _NotHere("Runtime", "launches a server; Stemma has none, st.LocalBackend is the engine")
Engine = _NotHere("Engine", "is st.LocalBackend here; its generate() completes prompts")
ServerArgs = _NotHere("ServerArgs", "belongs to a server; here they are arguments of LocalBackend")
get_server_info = _NotHere(
    "get_server_info", "asks a server; backend.stats() is what an engine has counted and holds"
)
global_config = _NotHere(
    "global_config",
    "is not there: settings are arguments of LocalBackend and of run, and the default backend is "
    "set by st.set_default_backend",
)
