"""A graph's executables for as many rows as a call has, or more: rows are added on the way in and cut off on the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from spmd.base._convert import exact_dtypes, host_array
from spmd.base._jax import ArrayImpl
from spmd.device._storage import buffer_of, load, wrap, wrap_host
from spmd.dynamo._graph_calls import Calls
from spmd.dynamo._graph_executables import Program
from spmd.dynamo._graph_inputs import Given
from spmd.dynamo._graph_trace import Traced
from spmd.dynamo._size_buckets import NotByRows, padded_rows


class RowsProgram(Program):
    """See Note [Buckets].

    Raises:
        NotByRows: the graph is not proved to be exact with rows that are padding; or its tensors lie over a mesh.
    """

    def __init__(self, calls: Calls, args: tuple[Any, ...], name: str, bucket: int, *, takes_numbers: bool) -> None:
        self._bucket, self._rows, self._size_position = bucket, calls.rows or {}, calls.size_position
        super().__init__(calls, args, name, takes_numbers=takes_numbers)
        assert self.traced.rows is not None
        self._value_rows = self.traced.rows[: len(self.traced.windows)]
        self._gradient_rows = self.traced.rows[len(self.traced.windows) :]
        self._is_on_cpu = jax.default_backend() == "cpu"

    def size_of(self, args: tuple[Any, ...]) -> int | None:
        return args[self._size_position]

    def _given_as(self, tensor: torch.Tensor, position: int, with_gradient: bool) -> Given:
        given = super()._given_as(tensor, position, with_gradient)
        dim = self._rows.get(self._positions[position]) if position < len(self._positions) else None
        if self.mesh is not None or (dim is not None and given.stride is not None):
            raise NotByRows("a layout")
        return given if dim is None else _resized(given, dim, self._bucket)

    def _traced(self, calls: Calls, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> Traced:
        hosts = self._host_tensors(args)
        if any(i in self._rows for i in self._hosts):
            raise NotByRows("a CPU tensor with rows")
        sizes = self._bucket, 2 * self._bucket
        givens = [self.given, [given if given.row_dim is None else _resized(given, given.row_dim, sizes[1]) for given in self.given]]
        traces, shapes, copies = [], [], [t.detach().clone() for t in hosts]
        for size, given in zip(sizes, givens, strict=True):
            sized = list(args)
            sized[self._size_position] = size
            traces.append(self._trace(calls, tuple(sized), copies, given))
            shapes.append([jax.ShapeDtypeStruct(g.root, buffer_of(t).dtype) for g, t in zip(given, tensors, strict=True)])
        count = np.asarray(self.size_of(args), np.int64)
        traced = traces[0].traced_by_rows(traces[1], shapes, [*map(host_array, hosts), count], sizes)
        if any(t._version for t in copies):
            raise NotByRows("a write to a CPU tensor")
        return traced

    def _host_arrays(self, args: tuple[Any, ...]) -> Sequence[Any]:
        return [*super()._host_arrays(args), np.asarray(self.size_of(args), np.int64)]

    def _fitted(self, tensor: torch.Tensor, how: Given) -> Any:
        if how.row_dim is None:
            return super()._fitted(tensor, how)
        buffer = buffer_of(tensor)
        if self._is_on_cpu and buffer.value is None and buffer.host is not None and buffer.host.shape == tensor.shape:
            return jnp.asarray(padded_rows(buffer.host, how.row_dim, self._bucket))
        return self._padded(load(tensor), how.row_dim)

    def _padded(self, value: Any, dim: int) -> Any:
        """With more rows; on CPU devices by the host, which needs no program for each size."""
        if value.shape[dim] == self._bucket:
            return value
        if self._is_on_cpu and type(value) is ArrayImpl:
            return jnp.asarray(padded_rows(np.asarray(value), dim, self._bucket))
        first = lax.slice_in_dim(value, 0, 1, axis=dim)
        return jnp.concatenate([value, jnp.repeat(first, self._bucket - value.shape[dim], axis=dim)], axis=dim)

    def _cut(self, tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
        if dim is None or size == self._bucket:
            return tensor
        value = load(tensor)
        with exact_dtypes():
            return (
                wrap_host(np.asarray(value).take(range(size), axis=dim))
                if self._is_on_cpu
                else wrap(lax.slice_in_dim(value, 0, size, axis=dim))
            )

    def forward(self, tensors: list[torch.Tensor], args: tuple[Any, ...]) -> tuple[list[torch.Tensor], list[Any]]:
        made, kept = super().forward(tensors, args)
        return [self._cut(t, dim, args[self._size_position]) for t, dim in zip(made, self._value_rows, strict=True)], kept

    def backward(self, kept: Sequence[Any], cotangents: Sequence[Any], size: int | None) -> list[torch.Tensor | None]:
        assert size is not None
        dims = [self._value_rows[i] for i in self.traced.flowing]
        with exact_dtypes():
            padded = [v if dim is None or v is None else self._padded(v, dim) for v, dim in zip(cotangents, dims, strict=True)]
        grads = super().backward(kept, padded, size)
        return [None if grad is None else self._cut(grad, dim, size) for grad, dim in zip(grads, self._gradient_rows, strict=True)]


def _resized(given: Given, dim: int, size: int) -> Given:
    shape = (*given.size[:dim], size, *given.size[dim + 1 :])
    return given._replace(root=shape, size=shape, row_dim=dim)


__all__ = ["RowsProgram"]
