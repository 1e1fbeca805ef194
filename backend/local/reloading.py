"""Other weights for an engine that goes on: what is swapped, and what is forgotten with them.

Called by `LocalBackend.reload_weights`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stemma.backend.local.model.default_model import resolve_model
from stemma.lang.errors import InvalidArgument, ModelLoadError

if TYPE_CHECKING:
    from stemma.backend.local.backend import LocalBackend


def reload_weights(backend: LocalBackend, model: str | Path | None) -> None:
    """See `LocalBackend.reload_weights`. May be called on any thread but the engine's."""
    engine = backend.engine
    engine.check_may_wait()
    source = resolve_model(model) if model is not None else backend.model_source
    loaded = backend.load(source)
    if loaded.config != backend.config:
        raise ModelLoadError(
            f"{loaded.name} has another shape than {backend.model_name}, whose place its weights "
            "should take: make a new LocalBackend"
        )

    if loaded.quantization != backend.quantization:
        now, new = (x or "not quantised" for x in (backend.quantization, loaded.quantization))
        raise ModelLoadError(
            f"{loaded.name} would run as {new}, and {backend.model_name}, whose place its weights "
            f"should take, runs as {now}: make a new LocalBackend for them"
        )

    def swap() -> None:
        if engine.scheduler.has_work:
            raise InvalidArgument(
                "weights are reloaded while requests are under way: wait for them, or cancel them"
            )
        engine.decoder = loaded.decoder
        backend.set_version(loaded, source)
        engine.scheduler.memory.pins.clear()
        engine.scheduler.memory.flush()

    engine.call(swap)
