"""Traces of earlier processes, kept in the compilation cache. See Note [Stored traces] in `_pickled`."""

from spmd.program.stored._trace_store import StoredTrace, TraceStore

__all__ = ["StoredTrace", "TraceStore"]
