"""Traces of earlier processes, kept in the compilation cache. See Note [Stored traces] in `_pickled`."""

from spmd.program.stored._trace_store import NotHere, StoredTrace, TraceStore

__all__ = ["NotHere", "StoredTrace", "TraceStore"]
