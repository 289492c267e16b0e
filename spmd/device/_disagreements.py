"""Operations whose tensors have layouts that disagree, which XLA's partitioner cannot compile, or gets wrong.

Note [Indices in unequal parts]
If the indices of a gather are split into parts of unequal size (5 columns of ids over 4 devices), and its result is not split in the
same way, the partitioner fails ("Expected instruction to have shape equal to f32[2,5,2]"), or returns other elements (openxla/xla,
gather_scatter_handler.cc; also in plain JAX). The table of an embedding whose width is split by the axis of such a column leads to
this, and so does the gradient of `index_put`. Then these dims of the indices are not split: indices are small. A dim whose split the
result keeps is constrained to it, since propagation in the compiler may choose another one.

Note [Results of windows]
A maximum over windows with its positions is one operation with two results. The partitioner splits each operand by the layout of the
result with its number. If these differ, it fails ("All reduced tensors must have the same dimension"), or ends the process. Then all of
them get one layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from spmd.device._module_mesh import ModuleMesh, Split, constrain, operations_of

_GATHER, _WINDOWS = "stablehlo.gather", "stablehlo.reduce_window"
_NUMBER = "spmd.number"  # an attribute that numbers operations, so that they are found again after propagation
_SHARDING = "sdy.sharding"


def may_disagree(module: Any) -> list[Any]:
    """The operations of a module for which `settle` needs propagated layouts, for some mesh."""
    return [operation for operation in operations_of(module, _GATHER, _WINDOWS) if operation.name == _GATHER or len(operation.results) > 1]


def settle(module: Any, operations: Sequence[Any], mesh: ModuleMesh) -> bool:
    """Constrain those of these operations whose tensors have layouts that disagree. Call it when all other constraints are in place.

    Returns:
        Whether there were any.
    """
    compared = [operation for operation in operations if operation.name == _WINDOWS or _unequal_dims(operation, mesh)]
    if not compared:
        return False
    has_changed = False
    propagated = _propagated(module, compared)  # in use as long as its operations are
    by_number = _by_number(propagated)
    for number, operation in enumerate(compared):
        copies = by_number.get(number, ())
        if operation.name == _GATHER:
            axes = _axes_of_indices(operation, copies, mesh)
            if axes:
                constrain(operation, 1, mesh.partly(operation.operands[1], axes))
                has_changed = True
        elif any(len({str(layout) for layout in _dim_axes(copy)}) > 1 for copy in copies):
            _split_alike(operation, copies, mesh)
            has_changed = True
    return has_changed


def _unequal_dims(gather: Any, mesh: ModuleMesh) -> dict[int, int]:
    """The dims of a gather's indices that may be split into parts of unequal size -> the dims of the result that they enumerate."""
    numbers = stablehlo.GatherDimensionNumbers(gather.attributes["dimension_numbers"])
    shape, rank = _shape(gather.operands[1]), len(_shape(gather.results[0]))
    enumerating = [dim for dim in range(len(shape)) if dim != numbers.index_vector_dim]
    enumerated = [dim for dim in range(rank) if dim not in numbers.offset_dims]
    return {dim: out for dim, out in zip(enumerating, enumerated, strict=True) if shape[dim] % mesh.num_devices}


def _axes_of_indices(gather: Any, copies: Sequence[Any], mesh: ModuleMesh) -> dict[int, Sequence[str]]:
    """The axes that the dims of `_unequal_dims` should have in the indices; empty if no part is unequal.

    Args:
        copies: the operation in the propagated module, once for each call.
    """
    shape, dims = _shape(gather.operands[1]), _unequal_dims(gather, mesh)
    found = [(_split(copy.operands[1], mesh), _split(copy.results[0], mesh)) for copy in copies]
    splits = [(dim, split) for of_indices, of_result in found for dim, out in dims.items() for split in (of_indices[dim], of_result[out])]
    if not any(shape[dim] % mesh.num_parts(split) for dim, split in splits):
        return {}
    axes: dict[int, Sequence[str]] = {}
    for dim, out in dims.items():
        several = {(of_indices[dim], of_result[out]) for of_indices, of_result in found}
        of_indices, of_result = next(iter(several))
        is_kept = len(several) == 1 and (of_indices == of_result or shape[dim] % mesh.num_parts(of_indices) == 0)
        axes[dim] = of_indices if is_kept else ()
    return axes


def _split_alike(windows: Any, copies: Iterable[Any], mesh: ModuleMesh) -> None:
    """Give all operands and results of an operation over windows one layout.

    It is the first layout of a result in which dims without windows are split, and these are split equally; else nothing is split.
    """
    sizes = list(ir.DenseI64ArrayAttr(windows.attributes["window_dimensions"]))
    shape, before = (_shape(value) for value in (windows.results[0], windows.operands[0]))
    without_windows = [dim for dim, size in enumerate(sizes) if size == 1 and shape[dim] == before[dim]]
    chosen: dict[int, Sequence[str]] = {}
    for split in (_split(result, mesh) for copy in copies for result in copy.results):
        chosen = {dim: split[dim] for dim in without_windows if split[dim] and shape[dim] % mesh.num_parts(split[dim]) == 0}
        if chosen:
            break
    results, layout = list(windows.results), mesh.split(windows.results[0], chosen)
    for position in range(len(results)):  # propagation takes the layout of one result only from its constraint
        constrain(windows, position, layout)
    with ir.InsertionPoint.after(windows):
        constraints = [sdy.ShardingConstraintOp(result, layout) for result in results]
        # the barrier uses all of them; a constraint that nothing uses would be dropped
        barrier = stablehlo.OptimizationBarrierOp([constraint.result for constraint in constraints])
    for result, constraint, alike in zip(results, constraints, barrier.results, strict=True):
        result.replace_all_uses_except(alike, constraint.operation)


def _propagated(module: Any, operations: Sequence[Any]) -> Any:
    """A copy of the module, with functions inlined and the layouts of Shardy's propagation; `operations` are numbered in it.

    Nothing is inserted, and the operations are those that XLA will have, so propagation gives the layouts that the compiler will give.
    """
    kind = ir.IntegerType.get_signless(64)
    for number, operation in enumerate(operations):
        operation.attributes[_NUMBER] = ir.IntegerAttr.get(kind, number)
    copy = module.operation.clone()
    for operation in operations:
        del operation.attributes[_NUMBER]
    for broadcast in operations_of(copy, "stablehlo.broadcast_in_dim"):  # XLA reads those that only add dims of size 1 as reshapes
        result = broadcast.results[0]
        dims = list(ir.DenseI64ArrayAttr(broadcast.attributes["broadcast_dimensions"]))
        if math.prod(_shape(broadcast.operands[0])) == math.prod(_shape(result)) and dims == sorted(dims):
            with ir.InsertionPoint(broadcast), ir.Location.unknown():
                result.replace_all_uses_with(stablehlo.ReshapeOp(result.type, broadcast.operands[0]).result)
            broadcast.operation.erase()
    passmanager.PassManager.parse("builtin.module(inline,sdy-propagation-pipeline)").run(copy)
    return copy


def _by_number(propagated: Any) -> dict[int, list[Any]]:
    """The numbered operations: one for each call of the function that has it."""
    found: dict[int, list[Any]] = {}
    for operation in operations_of(propagated, _GATHER, _WINDOWS):
        if _NUMBER in operation.attributes:
            found.setdefault(ir.IntegerAttr(operation.attributes[_NUMBER]).value, []).append(operation)
    return found


def _shape(value: Any) -> list[int]:
    return ir.RankedTensorType(value.type).shape


def _layout(value: Any) -> Any:
    """The layout of a value in a propagated module; None if it has none."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        function, number = owner.owner, ir.BlockArgument(value).arg_number
        attributes: Any = ir.ArrayAttr(function.attributes["arg_attrs"])[number] if "arg_attrs" in function.attributes else {}
        return sdy.TensorShardingAttr(attributes[_SHARDING]) if _SHARDING in attributes else None
    if _SHARDING in owner.attributes:
        return sdy.TensorShardingAttr(
            sdy.TensorShardingPerValueAttr(owner.attributes[_SHARDING]).shardings[ir.OpResult(value).result_number]
        )
    return sdy.TensorShardingAttr(owner.attributes["sharding"]) if owner.name == "sdy.sharding_constraint" else None


def _split(value: Any, mesh: ModuleMesh) -> Split:
    layout = _layout(value)
    return ((),) * len(_shape(value)) if layout is None else mesh.split_by(layout)


def _dim_axes(operation: Any) -> Iterable[list[list[str]]]:
    """For each result of an operation, the axes of each dim as text, including parts of axes."""
    for result in operation.results:
        layout = _layout(result)
        dims = [None] * len(_shape(result)) if layout is None else layout.dimension_shardings
        yield [[] if dim is None else [str(axis) for axis in sdy.DimensionShardingAttr(dim).axes] for dim in dims]


__all__ = ["may_disagree", "settle"]
