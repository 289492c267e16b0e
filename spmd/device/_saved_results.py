"""Saved results of operators that a recomputation reuses instead of computing them again.

    saved = SavedResults(lambda name: name == "linear")
    with saved.first():
        y = f(x)
    with saved.again():
        y = f(x)        # reuses the results of linear; the computation that only they need is dead code

This module identifies operators by name only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

keeping: ContextVar[Callable[[str, Any], Any] | None] = ContextVar("saves or replaces results of operators", default=None)


class SavedResults:
    """Results of the operators that `policy` chooses by name, in the order in which they were computed."""

    def __init__(self, policy: Callable[[str], bool]) -> None:
        self._policy = policy
        self._results: list[Any] = []

    @contextmanager
    def first(self) -> Generator[None]:
        """While active, save results."""
        with _active(self._keep):
            yield

    def again(self) -> _Again:
        """A context in which results are replaced by the saved ones. It may be entered several times: once in each backward pass."""
        return _Again(self)

    def replacing(self) -> AbstractContextManager[None]:
        """While active, replace results by the saved ones."""
        rest = iter(self._results)
        return _active(lambda name, result: next(rest) if self._policy(name) else result)

    def _keep(self, name: str, result: Any) -> Any:
        if self._policy(name):
            self._results.append(result)
        return result


class _Again(AbstractContextManager[None]):
    """The context of `SavedResults.again`."""

    def __init__(self, saved: SavedResults) -> None:
        self._saved = saved
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._saved.replacing())
        self._entered[-1].__enter__()

    def __exit__(self, *raised: Any) -> None:
        self._entered.pop().__exit__(*raised)


@contextmanager
def _active(take: Callable[[str, Any], Any]) -> Generator[None]:
    token = keeping.set(take)
    try:
        yield
    finally:
        keeping.reset(token)


def reuse_or_save(name: str, result: Any) -> Any:
    """Save the result (an array or several) of operator `name`, or return the saved one; without `SavedResults`, return `result`."""
    take = keeping.get()
    return result if take is None else take(name, result)


__all__ = ["SavedResults", "reuse_or_save"]
