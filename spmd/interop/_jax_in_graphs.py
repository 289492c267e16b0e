"""Keeps `call_jax` in a graph that Dynamo captures (`torch.compile`): one call, so the graph does not break.

    compiled = torch.compile(model, backend="spmd", fullgraph=True)      # model.forward calls a JAX function

Dynamo traces `_call_jax` below instead of `call_jax`. The JAX function becomes a number, a constant of the graph that is guarded like
any function. Result shapes come from `jax.eval_shape`. When the graph runs, the node is `call_jax`, with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from spmd.base._convert import exact_dtypes, to_numpy_dtype, to_torch_dtype
from spmd.base._errors import SpmdError, message
from spmd.base._torch import FakeTensor, pytree
from spmd.device._call_jax import call_jax


class _Function:
    """A JAX function in a graph.

    Attributes:
        structure: structure of its last result, as nested tuples of constants; tensors are numbered.
    """

    def __init__(self, fn: Callable[..., Any], name: str | None) -> None:
        self.fn, self.name = fn, name
        self.structure: Any = None


_functions: list[_Function] = []


def register() -> None:
    """Make Dynamo trace `_call_jax` in place of `call_jax`."""
    torch.compiler.substitute_in_graph(call_jax)(_call_jax)


def _call_jax(jax_func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, name: str | None = None) -> Any:
    number = _number(jax_func, name)
    tensors = call_in_graph(number, args, kwargs or {})
    return _built(_structure(number), tensors)


@torch.compiler.assume_constant_result
def _number(fn: Callable[..., Any], name: str | None) -> int:
    """The index of a new entry in the list of functions. Each call in a graph has its own, because its results may differ."""
    _functions.append(_Function(fn, name))
    return len(_functions) - 1


@torch.compiler.assume_constant_result
def _structure(number: int) -> Any:
    return _functions[number].structure


@torch.compiler.allow_in_graph
def call_in_graph(number: int, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
    """The tensors that a JAX function returns. For fake tensors it returns fake tensors."""
    function, args, kwargs = _functions[number], _plain(args), _plain(kwargs)
    flat, tree = pytree.tree_flatten((args, kwargs))
    if any(isinstance(leaf, FakeTensor) for leaf in flat):
        return _shapes(function, flat, tree)
    leaves = pytree.tree_leaves(call_jax(function.fn, args, kwargs, function.name))
    return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))


def _shapes(function: _Function, flat: list[Any], tree: Any) -> tuple[torch.Tensor, ...]:
    """Fake results of the function for these tensors; also records the structure of the result."""
    tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
    for tensor in tensors:
        if tensor.device.type != "jax":
            name = function.name or getattr(function.fn, "__name__", "the function")
            raise SpmdError(message(f"{name} was given a tensor on device '{tensor.device}'", fix="move it first: x.to('jax')"))

    def run(arrays: list[Any]) -> list[Any]:
        given, found = iter(arrays), []
        args, kwargs = pytree.tree_unflatten([next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat], tree)
        function.structure = _described(function.fn(*args, **kwargs), found)
        return found

    with exact_dtypes():
        results = jax.eval_shape(run, [jax.ShapeDtypeStruct(tuple(map(int, t.shape)), to_numpy_dtype(t.dtype)) for t in tensors])
    return _Shapes.apply([(tuple(r.shape), to_torch_dtype(r.dtype)) for r in results], *tensors)


class _Shapes(torch.autograd.Function):
    """Makes fake tensors that require a gradient if an input does."""

    @staticmethod
    def forward(ctx: Any, kinds: Sequence[Any], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(torch.empty(shape, dtype=dtype, device="jax") for shape, dtype in kinds)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("nothing is differentiated while Dynamo captures")


def _described(value: Any, found: list[Any]) -> Any:
    """A result as nested tuples, with its arrays numbered in the order in which torch flattens it."""
    if isinstance(value, jax.Array):
        found.append(value)
        return "tensor", len(found) - 1
    if type(value) is dict:
        return "dict", tuple((key, _described(item, found)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value).__name__, tuple(_described(item, found) for item in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return "value", value
    kind = type(value).__name__
    raise SpmdError(message(f"a JAX function in a Dynamo graph returns a {kind}", fix="return arrays in tuples, lists and dicts"))


def _built(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    kind, content = structure
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _built(item, tensors) for key, item in content}
    if kind == "list":
        return [_built(item, tensors) for item in content]
    return tuple([_built(item, tensors) for item in content]) if kind == "tuple" else content


def _plain(value: Any) -> Any:
    """fx's immutable containers converted to Python's own, which JAX supports."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value


__all__ = ["register"]
