"""Every exception that a user can meet, under its public name: `except stemma.errors.Timeout`."""

from stemma.lang.errors import (
    BackendClosed,
    Cancelled,
    ConstraintError,
    ContextOverflow,
    EngineInvariantError,
    InvalidArgument,
    ModelLoadError,
    OutOfCacheMemory,
    ReplayMismatch,
    Site,
    StemmaError,
    SyntaxProblem,
    Timeout,
    Truncated,
    UnknownVariable,
    UnsupportedByBackend,
)

__all__ = [
    "BackendClosed",
    "Cancelled",
    "ConstraintError",
    "ContextOverflow",
    "EngineInvariantError",
    "InvalidArgument",
    "ModelLoadError",
    "OutOfCacheMemory",
    "ReplayMismatch",
    "Site",
    "StemmaError",
    "SyntaxProblem",
    "Timeout",
    "Truncated",
    "UnknownVariable",
    "UnsupportedByBackend",
]
