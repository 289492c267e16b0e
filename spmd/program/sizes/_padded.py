"""Tracks the positions of the real elements in a padded array.

Note [Padding]
A dim of a padded array is a list of *factors*, outermost first: one factor for a dim of size `n`, two for the dim `B * T` that a reshape
made of [B, T]. Each factor is an extent that is known at all points (Note [Points]), so it has a padded size and a real size in the current
call. A position along a dim has one digit per factor, and is real if every digit is below the real size. The values at all other positions
are meaningless and may be NaN: an operation that reads them first replaces them by a neutral value.
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
    """Dims, of one factor each, of an array with these shapes at the points."""
    return tuple((tuple(column),) for column in zip(*shapes, strict=True)) if shapes[0] else ()


class Padded(NamedTuple):
    """A padded array, and the factors of its dims."""

    array: Any
    dims: Dims


class Room:
    """Padded and real sizes of one program, and positions in its arrays.

    Attributes:
        points: points of the traces.
        bucket: padded size of each name, which is the largest size of a call that the program runs.
        least: smallest size of each name.
        today: real size of each name in the current call, traced.
        needs: extents and differences that a call's sizes must reach, each with its lower bound.
    """

    def __init__(self, points: Points, least: Sequence[int], bucket: Sequence[int], today: Sizes) -> None:
        self.points, self.today = points, today
        self.least = tuple(n + (at - n) % points.period for n, at in zip(least, points.at[0], strict=True))
        self.bucket = tuple(n - (n - at) % points.period for n, at in zip(bucket, points.at[0], strict=True))
        self.needs: dict[tuple[Values, int], None] = {}
        self._sizes: dict[Values, int] = {}

    def size(self, values: Values) -> int:
        """A quantity in the padded program: its largest value for sizes within the bucket, even if it shrinks as they grow."""
        if values not in self._sizes:
            formula = self.points.integer(values)
            corners = itertools.product(*({least, most} for least, most in zip(self.least, self.bucket, strict=True)))
            self._sizes[values] = max(0, *(int(formula(corner)) for corner in corners))
        return self._sizes[values]

    def holds(self, sizes: Sequence[int]) -> bool:
        """Whether no quantity is larger for these sizes than in the padded program."""
        return all(self.points.integer(values)(sizes) <= size for values, size in self._sizes.items())

    def real(self, values: Values) -> Any:
        """A quantity in the current call: an int, or a traced int64."""
        return self.points.integer(values)(self.today)

    def need(self, values: Values, least: int) -> None:
        """Require that a quantity is at least `least` in every call of the program."""
        if len(set(values)) > 1:
            self.needs[values, least] = None
        elif values[0] < least:
            raise Inexact(f"the program needs an extent of at least {least}, but it is {values[0]}")

    def is_padded(self, dim: Dim) -> bool:
        """Whether the extent of a dim depends on a size."""
        return any(len(set(factor)) > 1 for factor in dim)

    def product(self, dim: Dim) -> Values:
        """Extent of a dim at each point."""
        return tuple(math.prod(column) for column in zip(*dim, strict=True))

    def shape(self, dims: Dims) -> tuple[int, ...]:
        """Shape of the padded array."""
        return tuple(math.prod(self.size(factor) for factor in dim) for dim in dims)

    def plain(self, shapes: Sequence[Sequence[int]]) -> Dims:
        """Dims of a new array with these shapes, one per point. A dim of several names has them as factors, in their order."""
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
        """Slice of `array` along `dim` from `start`, of the padded size of `extent`. Elements beyond the array's end are arbitrary."""
        size, most = self.size(extent), self.size(start)
        lack = most + size - array.shape[dim]
        if lack > 0:
            array = lax.pad(array, jnp.zeros((), array.dtype), [(0, lack if d == dim else 0, 0) for d in range(array.ndim)])
        if len(set(start)) == 1:
            return lax.slice_in_dim(array, start[0], start[0] + size, axis=dim)
        return lax.dynamic_slice_in_dim(array, jnp.asarray(self.real(start), np.int64), size, dim)

    def digits(self, dim: Dim) -> list[Any]:
        """Digits of the positions along a dim, for each factor: int64[size]."""
        positions, digits = jnp.arange(math.prod(self.size(f) for f in dim), dtype=np.int64), list[Any]()
        for factor in reversed(dim):
            size = self.size(factor)
            digits.append(positions % size if len(dim) > 1 else positions)
            positions = positions // size
        return digits[::-1]

    def is_real(self, dim: Dim) -> Any:
        """Whether each position along a dim is real: bool[size]."""
        marks = [d < self.real(f) for d, f in zip(self.digits(dim), dim, strict=True) if len(set(f)) > 1]
        return math.prod(marks[1:], start=marks[0]) if len(marks) > 1 else marks[0]

    def index(self, dim: Dim) -> Any:
        """Index in the unpadded array of each position along a dim: int64[size]."""
        found: Any = 0
        for digit, factor in zip(self.digits(dim), dim, strict=True):
            found = found * self.real(factor) + digit
        return found

    def position(self, index: Any, dim: Dim) -> Any:
        """Positions in the padded array of indices along a dim of the unpadded array."""
        if len(dim) == 1:
            return index
        found, stride = jnp.zeros_like(index), 1
        for place, factor in enumerate(reversed(dim)):
            real = jnp.asarray(self.real(factor)).astype(index.dtype)
            found = found + (index % real if place < len(dim) - 1 else index) * stride
            index, stride = index // real, stride * self.size(factor)
        return found

    def mask(self, value: Padded, dims: Sequence[int]) -> Any:
        """Whether each element is real along the given dims: bool of the array's shape; None if all are real."""
        marks = [(d, self.is_real(value.dims[d])) for d in dims if self.is_padded(value.dims[d])]
        found: Any = None
        for dim, mark in marks:
            wide = lax.broadcast_in_dim(mark, value.array.shape, (dim,))
            found = wide if found is None else found & wide
        return found

    def masked(self, value: Padded, dims: Sequence[int], neutral: Any) -> Any:
        """The array with `neutral` at the positions that are not real along the given dims."""
        mask = self.mask(value, dims)
        return value.array if mask is None else jnp.where(mask, value.array, jnp.asarray(neutral, value.array.dtype))

    def relaid(self, value: Padded, dim: int, new: Dim) -> Padded:
        """The array with one dim changed to other factors of the same extent.

        Raises:
            Inexact: the extents differ.
        """
        old = value.dims[dim]
        if old == new:
            return value
        if self.product(old) != self.product(new):
            raise Inexact("the operation combines dims of different extents")
        dims = (*value.dims[:dim], new, *value.dims[dim + 1 :])
        if not self.is_padded(old):
            return Padded(value.array, dims)
        taken = jnp.take(value.array, self.position(self.index(new), old), axis=dim, mode="clip")
        return Padded(taken, dims)

    def like(self, value: Padded, dims: Dims) -> Padded:
        """The array changed to these dims, which have the same extents as its own."""
        for dim, new in enumerate(dims):
            value = self.relaid(value, dim, new)
        return value

    def reshaped(self, value: Padded, shapes: Sequence[Sequence[int]]) -> Padded:
        """The array reshaped to these shapes, one per point."""
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
        """Dims with the given extents, formed from the factors in their order; None if that is not possible."""
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
    """The factors with adjacent constant factors merged."""
    found: list[Values] = []
    for factor in factors:
        if found and len(set(factor)) == len(set(found[-1])) == 1:
            found[-1] = tuple(a * b for a, b in zip(found[-1], factor, strict=True))
        else:
            found.append(factor)
    return tuple(found)


__all__ = ["Dim", "Dims", "Padded", "Room", "dims_of"]
