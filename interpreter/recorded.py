"""`record=` and `replay=`: what a run goes by when it is recorded or played back.

Used where a run begins (`running.py`) and where a batch does (`batch.py`): the items of a batch are
one record.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from stemma.backend.base import Backend
from stemma.backend.record_file import Recording
from stemma.backend.recording import RecordingBackend
from stemma.backend.replay import ReplayBackend
from stemma.interpreter.default import default_backend
from stemma.interpreter.options import RecordPath, RunOptions
from stemma.interpreter.tracing import tracing_backend
from stemma.lang.sampling import SamplingParams, checked_seed


def backend_and_seed(options: RunOptions, program: str, seed: int | None) -> tuple[Backend, int]:
    """Where a run goes, and what it draws with. Raises InvalidArgument for files that will not do.

    seed: None takes that of the record, or without one a random seed. Inside of a trace nothing is
    recorded.
    """
    if (tracing := tracing_backend()) is not None:
        return tracing, _given(seed)
    replay, record = options.replay, options.record
    if replay is not None:
        played = _played(replay)
        return played, _given(seed if seed is not None else played.seed)
    backend, seed = options.backend or default_backend(), _given(seed)
    if record is None:
        return backend, seed
    recording = record.hold() if isinstance(record, Recording) else Recording(record, seed=seed)
    return RecordingBackend(backend, recording, program=program), seed


def _played(replay: RecordPath | ReplayBackend) -> ReplayBackend:
    return replay if isinstance(replay, ReplayBackend) else ReplayBackend(replay)


def _given(seed: int | None) -> int:
    return secrets.randbits(63) if seed is None else seed


def options_of_batch(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options of all items: one record for them, and one seed, so that they can be replayed."""
    record: Any = options.get("record")
    replay: Any = options.get("replay")
    if (record is None and replay is None) or tracing_backend() is not None:
        return options
    RunOptions(record=record, replay=replay, backend=options.get("backend"))  # refuses what cannot
    seed, sampling = checked_seed(options.get("seed")), options.get("sampling")
    if seed is None and isinstance(sampling, SamplingParams) and sampling.seed is not None:
        # Every item draws with it, as it is.
        if record is not None:
            return {**options, "record": Recording(record, seed=sampling.seed)}
        return {**options, "replay": _played(replay)}
    if record is not None:
        seed = _given(seed)
        return {**options, "record": Recording(record, seed=seed), "seed": seed}
    backend = _played(replay)
    return {**options, "replay": backend, "seed": seed if seed is not None else backend.seed}
