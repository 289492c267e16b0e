"""Layouts of matrix products on a mesh of three axes.

Note [Products over three axes]
A matrix product, or a convolution, of which the dim that is summed over is split by one axis and the factors' other dims by two more, may
give rows of another device (openxla/xla, dot_handler.cc; in plain JAX too): where an axis splits both factors' own dims, where the factors
disagree about the dim that is summed over, or where all three are split and the result in yet another way. So on a mesh of three axes the
factors are pinned to layouts that agree, in which no axis has two parts to play: first the factors' own dims are split, as the result has
them, then the summed one, as the partitioner would do. The result is pinned to what follows, unless it has that, with or without the summed
one's axis behind it. Of a convolution the features that are summed over are kept whole.
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
    """A sum of products of two factors.

    Attributes:
        shared, summed: dims of the left factor -> dims of the right one: those that stay, and those that are summed over.
        own_left, own_right: dims that only one factor has -> dims of the result.
    """

    left: Any
    right: Any
    out: Any
    shared: Mapping[int, int]
    summed: Mapping[int, int]
    own_left: Mapping[int, int]
    own_right: Mapping[int, int]


def product_layouts(operation: Any, of_left: Split, of_right: Split, of_out: Split, mesh: ModuleMesh) -> tuple[Any, Any, Any] | None:
    """Of a matrix product's factors and result; None where it needs none."""
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
    """Layouts of factors and result in which no axis has two parts to play; of the result None where any will do. See the Note."""
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
        # an axis that both have goes where the result has it
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
