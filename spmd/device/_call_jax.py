"""`call_jax`: calls a JAX function on torch tensors. torch's autograd differentiates the call through `jax.vjp`.

    y = spmd.call_jax(jnp.sin, (x,))                  # x and y are tensors on device 'jax'
    y.sum().backward()

The arguments may be any pytrees of tensors. Other leaves are passed unchanged and are constants of the compiled function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import torch

from spmd.base._convert import exact_dtypes, to_numpy_dtype
from spmd.base._errors import SpmdError, message, shown
from spmd.base._exact import exactly
from spmd.base._torch import are_functorch_transforms_active, pytree
from spmd.base._wrong_arguments import require_arguments, require_function, wrong_argument
from spmd.device._partitioner import PartitionedJit
from spmd.device._storage import load, wrap
from spmd.device._transformed_call import TransformedCall
from spmd.device._whole import Call, differentiable

_NO_TENSOR = object()


def call_jax(jax_func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, name: str | None = None) -> Any:
    """Call a JAX function with torch tensors: `jax_func(*args, **kwargs)`.

    Args:
        jax_func: a function of jax arrays that `jax.jit` can trace; it must have no side effects.
        args: a tuple of positional arguments, pytrees; tensors on device 'jax' in them are passed as arrays.
        kwargs: keyword arguments, converted in the same way.
        name: name of the call in profiles and programs; by default the function's name.

    Returns:
        The result of `jax_func`, with arrays as tensors on device 'jax'.

    Raises:
        SpmdError: a tensor is not on device 'jax', `jax_func` is no function, or `args` is not a tuple.
    """
    require_function(jax_func, "call_jax", "spmd.call_jax(fn, (x,))")
    require_arguments(args, name or getattr(jax_func, "__name__", "the function"), "spmd.call_jax(fn, (x,))")
    if kwargs is not None and not isinstance(kwargs, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        raise wrong_argument(f"kwargs of call_jax must be a dict, got {shown(kwargs)}", 'spmd.call_jax(fn, (x,), {"axis": 0})')
    flat, tree = pytree.tree_flatten((args, kwargs or {}))
    tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if tensor.device.type != "jax":
            raise SpmdError(
                message(
                    f"{name or getattr(jax_func, '__name__', 'the function')} was given a tensor on device '{tensor.device}'",
                    fix="move it first: x.to('jax')",
                )
            )
    static = tuple(_NO_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in flat)
    try:
        call = _remembered(jax_func, static, tuple((type(leaf), exactly(leaf)) for leaf in static), _Tree(tree), name)
    except TypeError:  # an unhashable argument
        call = _JaxCall(jax_func, static, tree, name)
    return call(tensors)


class _JaxCall:
    """A JAX function bound to its static arguments."""

    def __init__(self, fn: Callable[..., Any], static: tuple[Any, ...], tree: Any, name: str | None) -> None:
        self._results: dict[Any, tuple[Any, list[Any]]] = {}

        def run(dynamic: Any, key: Any) -> tuple[Any, tuple[Any, ...]]:
            arrays = iter(dynamic)
            args, kwargs = pytree.tree_unflatten([next(arrays) if leaf is _NO_TENSOR else leaf for leaf in static], tree)
            leaves, out_tree = pytree.tree_flatten(fn(*args, **kwargs))
            shapes = tuple((array.shape, array.dtype) for array in dynamic)
            self._results[shapes] = out_tree, [None if isinstance(leaf, jax.Array) else (leaf,) for leaf in leaves]
            results = tuple(leaf for leaf in leaves if isinstance(leaf, jax.Array))
            return results[0] if len(results) == 1 else results, ()

        self._call = Call(run, name or getattr(fn, "__name__", "call_jax"))
        self._plain = PartitionedJit(lambda dynamic: run(dynamic, None)[0])

        def transformable(*dynamic: Any) -> tuple[Any, ...]:
            results = run(dynamic, None)[0]
            return results if isinstance(results, tuple) else (results,)

        self._transformable = transformable

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        if are_functorch_transforms_active():
            made: Any = TransformedCall.apply(self._transformable, *tensors)
        elif torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            made = differentiable(self._call, tensors)
        else:
            with exact_dtypes():
                made = jax.tree.map(wrap, self._plain([load(t) for t in tensors]))
        results = iter(made if isinstance(made, tuple) else (made,))
        tree, leaves = self._results[tuple((tuple(t.shape), to_numpy_dtype(t.dtype)) for t in tensors)]
        return pytree.tree_unflatten([next(results) if leaf is None else leaf[0] for leaf in leaves], tree)


@dataclass(frozen=True)
class _Tree:
    """A hashable pytree structure; torch's own is compared by value and has no hash."""

    spec: Any

    def __hash__(self) -> int:
        return hash(str(self.spec))


@functools.lru_cache(maxsize=256)  # of compiled calls; a new function object in every call is compiled in every call
def _remembered(fn: Any, static: tuple[Any, ...], exact: tuple[Any, ...], tree: _Tree, name: str | None) -> _JaxCall:
    return _JaxCall(fn, static, tree.spec, name)
