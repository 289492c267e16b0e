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

    def again(self) -> AbstractContextManager[None]:
        """While active, replace results by the saved ones. May be entered again, as each backward pass recomputes."""
        return _Again(self._policy, self._results)

    def _keep(self, name: str, result: Any) -> Any:
        if self._policy(name):
            self._results.append(result)
        return result


class _Again(AbstractContextManager[None]):
    """The context of `SavedResults.again`."""

    def __init__(self, policy: Callable[[str], bool], results: list[Any]) -> None:
        self._policy, self._results = policy, results
        self._entered = list[AbstractContextManager[None]]()

    def __enter__(self) -> None:
        rest = iter(self._results)
        active = _active(lambda name, result: next(rest) if self._policy(name) else result)
        active.__enter__()
        self._entered.append(active)

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


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
