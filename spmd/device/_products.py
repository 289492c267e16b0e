"""Layouts of matrix products on a mesh of three axes.

Note [Products over three axes]
A matrix product or convolution whose contracting dim is split by one axis and whose factors' other dims are split by two more axes may
return rows of another device (openxla/xla, dot_handler.cc; also in plain JAX). This happens if one axis splits a free dim of both
factors, if the factors disagree about the contracting dim, or if all three dims are split and the result is split in yet another way.
On a mesh of three axes the factors are therefore constrained to compatible layouts in which each axis has one role. The free dims of
the factors are assigned first, split as in the result, and then the contracting dim, as the partitioner would do. The result is
constrained to the layout that follows, unless it has that layout already, with or without the contracting dim's axis appended. For a
convolution, the features that are summed over are not split.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo

from spmd.device._module_mesh import ModuleMesh, Split


@dataclass(frozen=True)
class _Product:
    """A `dot_general`: a sum of products of two factors.

    Attributes:
        left, right, out: the factors and the result.
        shared: batch dims: dim of the left factor -> dim of the right one.
        summed: contracting dims: dim of the left factor -> dim of the right one.
        own_left, own_right: free dims: dim of one factor -> dim of the result.
    """

    left: Any
    right: Any
    out: Any
    shared: Mapping[int, int]
    summed: Mapping[int, int]
    own_left: Mapping[int, int]
    own_right: Mapping[int, int]


def product_layouts(operation: Any, of_left: Split, of_right: Split, of_out: Split, mesh: ModuleMesh) -> tuple[Any, Any, Any] | None:
    """Layouts of a matrix product's factors and result; None if it needs no constraints.

    Args:
        of_left, of_right, of_out: axes of the dims of the factors and the result, according to propagation.
    """
    numbers = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    left, right, out = *operation.operands, operation.results[0]
    shared = dict(zip(numbers.lhs_batching_dimensions, numbers.rhs_batching_dimensions, strict=True))
    summed = dict(zip(numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions, strict=True))
    on_left = [dim for dim in range(len(of_left)) if dim not in shared and dim not in summed]
    on_right = [dim for dim in range(len(of_right)) if dim not in shared.values() and dim not in summed.values()]
    places = iter(range(len(shared), len(shared) + len(on_left) + len(on_right)))
    own = [{dim: next(places) for dim in dims} for dims in (on_left, on_right)]
    return _agreed(_Product(left, right, out, shared, summed, *own), of_left, of_right, of_out, mesh)


def _agreed(product: _Product, of_left: Split, of_right: Split, of_out: Split, mesh: ModuleMesh) -> tuple[Any, Any, Any] | None:
    """Layouts of the factors and the result in which each axis has one role; None for a result that needs no constraint. See the Note."""
    is_sum_split = any(of_left[dim] or of_right[other] for dim, other in product.summed.items())
    if not is_sum_split or not mesh.has_three_axes((*of_left, *of_right, *of_out)):
        return None
    taken: set[str] = set()

    def take(split: Sequence[str], but: Collection[str] = ()) -> Sequence[str]:
        kept = [axis for axis in split if axis not in taken and axis not in but]
        taken.update(kept)
        return kept

    is_left_larger = _size(product.left) >= _size(product.right)
    on_left, on_right, on_out = dict[int, Sequence[str]](), dict[int, Sequence[str]](), dict[int, Sequence[str]]()
    for place, (dim, other) in enumerate(product.shared.items()):
        on_left[dim] = on_right[other] = on_out[place] = take(of_left[dim] if is_left_larger else of_right[other])
    sides = [(of_left, product.own_left, on_left), (of_right, product.own_right, on_right)]
    for (split, own, layout), (their_split, others, _) in (sides, sides[::-1]) if is_left_larger else (sides[::-1], sides):
        # an axis that splits both factors is assigned to the one for which the result has it
        theirs = {axis for dim, place in others.items() for axis in their_split[dim] if axis in of_out[place]}
        for dim, place in own.items():
            layout[dim] = on_out[place] = take(split[dim], theirs)
    for dim, other in product.summed.items():
        larger, smaller = (of_left[dim], of_right[other]) if is_left_larger else (of_right[other], of_left[dim])
        on_left[dim] = on_right[other] = take(larger) or take(smaller)
    summed = {axis for dim in product.summed for axis in on_left[dim]}
    follows = all(list(of_out[place][: len(axes)]) == list(axes) for place, axes in on_out.items())
    more = {axis for place, axes in on_out.items() for axis in of_out[place][len(axes) :]}
    are_all_split = summed and all(any(layout[dim] for dim in own) for _, own, layout in sides)
    is_right = follows and more <= summed and not are_all_split
    return mesh.split(product.left, on_left), mesh.split(product.right, on_right), None if is_right else mesh.split(product.out, on_out)


def _size(value: Any) -> int:
    return math.prod(ir.RankedTensorType(value.type).shape)


__all__ = ["product_layouts"]
