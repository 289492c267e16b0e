"""Functions of texts that raise no error for other texts: what they give may be computed when a call ends."""

from __future__ import annotations

import json
import operator
from typing import Any

_METHODS = frozenset(
    (
        *("upper", "lower", "title", "capitalize", "casefold", "swapcase", "strip", "lstrip", "rstrip", "zfill", "ljust", "rjust"),
        *("center", "replace", "split", "rsplit", "splitlines", "partition", "rpartition", "join", "format", "encode", "count", "find"),
    )
)


def is_of_texts(fn: Any, kinds: tuple[type, ...], given: tuple[Any, ...]) -> bool:
    """Whether `fn` is such a function.

    Args:
        fn: the function.
        kinds: the types of its arguments.
        given: its arguments.
    """
    if fn is json.dumps or (fn is operator.mod and kinds[0] is str):
        return True
    if fn is operator.getitem:
        return isinstance(given[1], slice)
    return getattr(fn, "__name__", "") in _METHODS and str in (getattr(fn, "__objclass__", None), type(getattr(fn, "__self__", None)))


__all__ = ["is_of_texts"]
