"""Functions of arrays that a trace records from a cached jaxpr instead of calling them again for arrays of the same type."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import jax

from spmd.base._jax import ToInline, recording_trace, tracing_context, with_traces
from spmd.base._open_sizes import are_sizes_open

_MAX_ENTRIES = 4096  # cached jaxprs per function; the cache is cleared when it is full


_all: weakref.WeakSet[Inlined] = weakref.WeakSet()


class Inlined:
    """`jax.jit(fn, inline=True)` whose calls inside a trace take a fifth of the time. Outside a trace it calls the jitted function.

    `fn` may depend only on its arguments, on the context that jax includes in its jaxpr cache keys, and on whether sizes are open.

    Attributes:
        jitted: `jax.jit(fn, inline=True)`.
    """

    __slots__ = ("__weakref__", "_fn", "_known", "_static", "jitted")

    def __init__(self, fn: Callable[..., Any], static: tuple[int, ...] = ()) -> None:
        """`static`: positions of arguments that are not arrays."""
        self._fn = fn
        self._static = static
        self.jitted = jax.jit(fn, static_argnums=static, inline=True)
        self._known: dict[Any, tuple[ToInline, Any]] = {}
        _all.add(self)

    def __call__(self, *args: Any) -> Any:
        """Call the function with arrays and pytrees of them."""
        trace = recording_trace()
        if trace is None:
            return self.jitted(*args)
        static = self._static
        leaves, tree = jax.tree.flatten([arg for i, arg in enumerate(args) if i not in static] if static else args)
        if not all(isinstance(leaf, jax.Array) for leaf in leaves):  # Python and numpy numbers, which jax converts first
            return self._fn(*args) if are_sizes_open() else self.jitted(*args)  # jax's cache key does not include open sizes
        key = (tree, tracing_context(), are_sizes_open(), *map(jax.typeof, leaves), *(args[i] for i in static))
        known = self._known.get(key)
        if known is None:
            if len(self._known) == _MAX_ENTRIES:
                self._known.clear()
            known = self._known[key] = self._recorded(args, leaves, tree)
        return known[1].unflatten(known[0](trace, leaves))

    def _recorded(self, args: tuple[Any, ...], leaves: list[Any], tree: Any) -> tuple[ToInline, Any]:
        """The function's jaxpr for these arguments, and the pytree structure of its results."""
        trees: list[Any] = []

        def run(*leaves: Any) -> list[Any]:
            arrays = iter(tree.unflatten(leaves))
            results, result_tree = jax.tree.flatten(self._fn(*(arg if i in self._static else next(arrays) for i, arg in enumerate(args))))
            trees.append(result_tree)
            return results

        return ToInline(jax.make_jaxpr(run)(*leaves)), trees[0]

    def forget(self) -> None:
        """Clear the cache."""
        self._known.clear()


@with_traces
def _forget_all() -> None:
    for inlined in list(_all):
        inlined.forget()


__all__ = ["Inlined"]
