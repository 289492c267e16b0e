"""The error of a program that XLA cannot compile for a mesh: which operation it is, and the lines that may have it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mesh import Mesh
from spmd.base._errors import SpmdError, called_at, message, place_of
from spmd.program.xla._jaxpr import functions_of

_STATES = ("INTERNAL", "INVALID_ARGUMENT", "UNIMPLEMENTED")  # of the partitioner's errors: no lack of memory, no lost device
_BY_PARTITIONER = re.compile("spmd-partitioning|Suspected Python Code Location")
_PATH = re.compile(r'op_name="([^"]*)"')
_MOST_PLACES = 3


def in_words(error: RuntimeError, name: str, mesh: Mesh | None, jaxpr: Any) -> SpmdError | None:
    """The error for a program that XLA's partitioner cannot compile; None if `error` is another one.

    Args:
        name: the name of the compiled function.
        jaxpr: the program as traced, or None.
    """
    text = str(error)
    if mesh is None or mesh.size == 1 or not text.startswith(_STATES) or not _BY_PARTITIONER.search(text):
        return None
    path = _PATH.search(text)
    details: list[str] = []
    if path is not None:
        scope, operation = _parts(path[1])
        places = [] if jaxpr is None else dict.fromkeys(_places(jaxpr, scope, operation))
        where = ", or ".join(list(places)[:_MOST_PLACES])
        details.append(f"operation {operation}" + (f" in {scope}" if scope else "") + (f", {where}" if where else ""))
    details.extend(called_at())
    first = next(line for line in text.splitlines() if line.strip())
    return SpmdError(
        message(
            f"XLA's partitioner cannot compile {name} for {mesh}",
            *details,
            f"XLA: {first.strip()}",
            fix="reshard a tensor of the operation before it, in the function: x = spmd.mark_sharding(x, mesh, (None,) * x.ndim)",
        )
    )


def _parts(path: str) -> tuple[str, str]:
    """(modules, operation) of XLA's path of an operation: "jit(step)/emb/jit(_take)/gather" is ("emb", "gather")."""
    parts = [part for part in re.sub(r"\w+\((?:[^()]|\([^()]*\))*\)", "", path).split("/") if part]
    return ".".join(parts[:-1]), parts[-1] if parts else ""


def _places(jaxpr: Any, scope: str, operation: str) -> Iterator[str]:
    """The lines of the equations that have the operation in these modules."""
    for equation in jaxpr.eqns:
        if _parts(f"{equation.source_info.name_stack}/{operation}")[0] == scope and operation in _operations(equation):
            yield place_of(equation.source_info.traceback)


def _operations(equation: Any) -> Iterator[str]:
    yield equation.primitive.name
    for jaxpr in functions_of(equation):
        for inner in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield from _operations(inner)


__all__ = ["in_words"]
