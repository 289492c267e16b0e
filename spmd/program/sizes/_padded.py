"""Where the real elements of a padded array are.

Note [Padding]
A dim of a padded array is a list of *factors*, outermost first: one for a dim of size `n`, two for the dim `B * T` that a reshape made
of [B, T]. Each is an extent known at all points (Note [Points]), so it has a size in the padded array and one today. A position along a
dim has one digit for each factor, and is real where each digit is below today's extent. What the other positions hold means nothing, and
may be NaN: an operation that looks at them selects what they count as.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.program.sizes._formulas import Inexact, Points, Sizes, Values

Dim = tuple[Values, ...]
Dims = tuple[Dim, ...]


def dims_of(shapes: Sequence[Sequence[int]]) -> Dims:
    """The dims of an array whose shape at each point is one of these: one factor for each."""
    return tuple((tuple(column),) for column in zip(*shapes, strict=True)) if shapes[0] else ()


class Padded(NamedTuple):
    """An array and where its real elements are."""

    array: Any
    dims: Dims


class Room:
    """The sizes of one padded program, and positions in its arrays.

    Attributes:
        points: of the traces.
        bucket: the padded size of each name: the largest that a call of the bucket has.
        least: the smallest.
        today: the real size of each name, traced.
        needs: extents and differences that the sizes of a call must give, each with the least that it may be.
    """

    def __init__(self, points: Points, least: Sequence[int], bucket: Sequence[int], today: Sizes) -> None:
        self.points, self.today = points, today
        self.least = tuple(n + (at - n) % points.period for n, at in zip(least, points.at[0], strict=True))
        self.bucket = tuple(n - (n - at) % points.period for n, at in zip(bucket, points.at[0], strict=True))
        self.needs: dict[tuple[Values, int], None] = {}
        self._sizes: dict[Values, int] = {}

    def size(self, values: Values) -> int:
        """A quantity in the padded program: the largest that it has for sizes of the bucket, be it one that shrinks while they grow."""
        if values not in self._sizes:
            formula = self.points.integer(values)
            corners = itertools.product(*({least, most} for least, most in zip(self.least, self.bucket, strict=True)))
            self._sizes[values] = max(0, *(int(formula(corner)) for corner in corners))
        return self._sizes[values]

    def holds(self, sizes: Sequence[int]) -> bool:
        """Whether all quantities of the program have room for those of these sizes."""
        return all(self.points.integer(values)(sizes) <= size for values, size in self._sizes.items())

    def real(self, values: Values) -> Any:
        """The same in the call at hand: an int, or an int64 of the trace."""
        return self.points.integer(values)(self.today)

    def need(self, values: Values, least: int) -> None:
        """The program holds only for sizes for which this is at least so much."""
        if len(set(values)) > 1:
            self.needs[values, least] = None
        elif values[0] < least:
            raise Inexact("a size that the program cannot have")

    def is_padded(self, dim: Dim) -> bool:
        return any(len(set(factor)) > 1 for factor in dim)

    def product(self, dim: Dim) -> Values:
        """The extent of a dim at each point."""
        return tuple(math.prod(column) for column in zip(*dim, strict=True))

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """The shape of the padded array."""
        return tuple(math.prod(self.size(factor) for factor in dim) for dim in dims)

    def plain(self, shapes: Sequence[Sequence[int]]) -> Dims:
        """The dims of a new array of these shapes (one for each point): several names in one are its factors, in the names' order."""
        return tuple(self._dim(tuple(column)) for column in zip(*shapes, strict=True)) if shapes[0] else ()

    def _dim(self, values: Values) -> Dim:
        names = self.points.parts(values)
        if len(set(values)) > 1:
            self.need(values, 2)
        if len(names) < 2:
            return (values,)
        factors = [tuple(point[i] for point in self.points.at) for i in names]
        return tuple(factors) if self.product(tuple(factors)) == values else (values,)

    def window(self, array: Any, dim: int, start: Values, extent: Values) -> Any:
        """From a place on, as much as `extent` has in the padded program; behind the array's end may be anything."""
        size, most = self.size(extent), self.size(start)
        lack = most + size - array.shape[dim]
        if lack > 0:
            array = lax.pad(array, jnp.zeros((), array.dtype), [(0, lack if d == dim else 0, 0) for d in range(array.ndim)])
        if len(set(start)) == 1:
            return lax.slice_in_dim(array, start[0], start[0] + size, axis=dim)
        return lax.dynamic_slice_in_dim(array, jnp.asarray(self.real(start), np.int64), size, dim)

    def digits(self, dim: Dim) -> list[Any]:
        """For each factor, the digits of the positions along a dim: int64[size]."""
        positions, digits = jnp.arange(math.prod(self.size(f) for f in dim), dtype=np.int64), list[Any]()
        for factor in reversed(dim):
            size = self.size(factor)
            digits.append(positions % size if len(dim) > 1 else positions)
            positions = positions // size
        return digits[::-1]

    def is_real(self, dim: Dim) -> Any:
        """bool[size]: which positions along a dim are real."""
        marks = [d < self.real(f) for d, f in zip(self.digits(dim), dim, strict=True) if len(set(f)) > 1]
        return math.prod(marks[1:], start=marks[0]) if len(marks) > 1 else marks[0]

    def index(self, dim: Dim) -> Any:
        """int64[size]: the index that each position along a dim has without padding."""
        found: Any = 0
        for digit, factor in zip(self.digits(dim), dim, strict=True):
            found = found * self.real(factor) + digit
        return found

    def position(self, index: Any, dim: Dim) -> Any:
        """Where in the padded array the element of an unpadded index lies."""
        if len(dim) == 1:
            return index
        found, stride = jnp.zeros_like(index), 1
        for place, factor in enumerate(reversed(dim)):
            real = jnp.asarray(self.real(factor)).astype(index.dtype)
            found = found + (index % real if place < len(dim) - 1 else index) * stride
            index, stride = index // real, stride * self.size(factor)
        return found

    def mask(self, value: Padded, dims: Sequence[int]) -> Any:
        """bool, in the array's shape: which elements are real along the given dims; None if all are."""
        marks = [(d, self.is_real(value.dims[d])) for d in dims if self.is_padded(value.dims[d])]
        found: Any = None
        for dim, mark in marks:
            wide = lax.broadcast_in_dim(mark, value.array.shape, (dim,))
            found = wide if found is None else found & wide
        return found

    def masked(self, value: Padded, dims: Sequence[int], neutral: Any) -> Any:
        """The array with `neutral` where it is not real along the given dims."""
        mask = self.mask(value, dims)
        return value.array if mask is None else jnp.where(mask, value.array, jnp.asarray(neutral, value.array.dtype))

    def relaid(self, value: Padded, dim: int, new: Dim) -> Padded:
        """The array with a dim of other factors of the same extent."""
        old = value.dims[dim]
        if old == new:
            return value
        if self.product(old) != self.product(new):
            raise Inexact("dims that differ")
        dims = (*value.dims[:dim], new, *value.dims[dim + 1 :])
        if not self.is_padded(old):
            return Padded(value.array, dims)
        taken = jnp.take(value.array, self.position(self.index(new), old), axis=dim, mode="clip")
        return Padded(taken, dims)

    def like(self, value: Padded, dims: Dims) -> Padded:
        """The array with these dims, each of the same extent as its own."""
        for dim, new in enumerate(dims):
            value = self.relaid(value, dim, new)
        return value

    def reshaped(self, value: Padded, shapes: Sequence[Sequence[int]]) -> Padded:
        """A reshape to these shapes, one for each point."""
        columns = [tuple(c) for c in zip(*shapes, strict=True)] if shapes[0] else []
        if any(not math.prod(shape) for shape in shapes):
            dims = self.plain(shapes)
            return Padded(jnp.zeros(self.shape(dims), value.array.dtype), dims)
        dims = self._grouped([f for dim in value.dims for f in dim if set(f) != {1}], columns)
        if dims is not None:
            return Padded(lax.reshape(value.array, self.shape(dims)), dims)
        dims = self.plain(shapes)
        shape, index = self.shape(dims), jnp.zeros((), np.int64)
        for number, dim in enumerate(dims):
            own = lax.broadcast_in_dim(self.index(dim), shape, (number,))
            index = index * self.real(self.product(dim)) + own
        flat = tuple(f for dim in value.dims for f in dim) or ((1,) * len(self.points.at),)
        return Padded(jnp.take(value.array.reshape(-1), self.position(index, flat), mode="clip"), dims)

    def _grouped(self, factors: list[Values], columns: Sequence[Values]) -> Dims | None:
        """Dims of the given extents made of the factors as they follow each other, or None."""
        dims: list[Dim] = []
        factors = list(factors)
        for column in columns:
            rest, own = list(column), list[Values]()
            while any(r != 1 for r in rest):
                if not factors:
                    return None
                first = factors.pop(0)
                if all(r % f == 0 for r, f in zip(rest, first, strict=True)):
                    rest = [r // f for r, f in zip(rest, first, strict=True)]
                    own.append(first)
                elif len(set(rest)) == 1 and len(set(first)) == 1 and first[0] % rest[0] == 0:
                    factors.insert(0, tuple(f // rest[0] for f in first))
                    own.append(tuple(rest))
                    rest = [1] * len(rest)
                else:
                    return None
            dims.append(_merged(own) or (column,))
        return None if factors else tuple(dims)


def _merged(factors: list[Values]) -> Dim:
    """Neighbours that are the same at all points, as one."""
    found: list[Values] = []
    for factor in factors:
        if found and len(set(factor)) == len(set(found[-1])) == 1:
            found[-1] = tuple(a * b for a, b in zip(found[-1], factor, strict=True))
        else:
            found.append(factor)
    return tuple(found)


__all__ = ["Dim", "Dims", "Padded", "Room", "dims_of"]
