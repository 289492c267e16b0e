"""Adds layout constraints to programs so that XLA's partitioner does not produce wrong results, for any sharding of the tensors.

This module handles convolutions, scatters and Fourier transforms. `_products` handles matrix products.

Note [Convolutions that are split]
If a height or a width of one operand is split, the partitioner sums partial results over all devices, including devices that hold
copies of the same part. The result is too large by the number of copies (openxla/xla, convolution_handler.cc; also in plain JAX).
Transposed convolutions and gradients are convolutions themselves, so they are constrained as well. Shardy's propagation, which jaxlib
contains and the compiler would run next, gives the sharding of the operands. They are then constrained to one of three layouts that
give correct results, even if the compiler's own propagation would have chosen another one:

- images split over all devices, by batch and by space, with a replicated kernel: the devices exchange the borders of their parts;
- both operands split over all devices in the same way by the summed dims, batch and space: the gradient of the kernel;
- heights and widths not split, with any sharding of channels and batch.

For grouped convolutions, split channels give wrong results too, so only the batch may be split. The gradient of their kernel sums over
the batch and once more over copies. If the batch is split at all, it is therefore split over all devices, which needs no communication.

Note [Scatters that are split]
If the rows that a scatter adds are split into parts of unequal size (two rows over four devices), the partitioner also adds the padding
of the parts (openxla/xla, scatter_handler.cc; also in plain JAX). The gradients of embeddings and of pooling are scatters. A dim that
propagation would split unequally is not split. A dim that it splits equally is constrained to that split.

Note [Maxima in windows]
If a height or width is split, the gradient of a maximum in windows of at least twice their stride is wrong (openxla/xla, partitioner
of select-and-scatter; also in plain JAX). The dims with windows are then not split.

Note [Transforms that are split]
A Fourier transform along a split dim ends the process (fft_handler.cc), so its dims are not split. XLA:CPU may then give the transform
the result of a collective in another memory order, which it refuses (fft_thunk.cc). The memory order is therefore constrained too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo

from spmd.base._errors import SpmdError, called_at, message
from spmd.base._jax import is_tracing
from spmd.device._disagreements import may_disagree, settle
from spmd.device._inlined import Inlined
from spmd.device._module_mesh import ModuleMesh, Split, constrain, largest_mesh, operations_of
from spmd.device._products import product_layouts

_CONVOLUTION, _TRANSFORM, _SCATTER = "stablehlo.convolution", "stablehlo.fft", "stablehlo.scatter"
_PRODUCT = "stablehlo.dot_general"
_SELECTION = "stablehlo.select_and_scatter"
_RESULT = -1  # stands for the result among the positions of operands
_NEED_SHARDINGS = (_CONVOLUTION, _SCATTER, _PRODUCT)  # operations whose constraints depend on how propagation splits their operands
_PROBE = "spmd.probe"


def avoid_faults(lowered: jax.stages.Lowered, platform: str) -> bool:
    """Add layout constraints for the convolutions, products, transforms, scatters, gathers and windowed maxima of a lowered program.

    Args:
        platform: target platform of the program: 'cpu', 'gpu' or 'tpu'.

    Returns:
        Whether the program has any of these operations. Gathers and windows over several arrays count only if they get constraints.
    """
    module: Any = lowered.compiler_ir("stablehlo")
    operations, transforms = operations_of(module, *_NEED_SHARDINGS), operations_of(module, _TRANSFORM)
    selections, compared = operations_of(module, _SELECTION), may_disagree(module)
    if not (operations or transforms or selections or compared):
        return False
    with module.context, ir.Location.unknown():
        mesh = largest_mesh(module)
        if mesh is None:
            return True
        probed = [_positions_to_probe(operation, mesh) for operation in operations]
        propagated = _propagated(module, mesh, probed) if any(probed) else [[] for _ in operations]
        for operation, positions, splits in zip(operations, probed, propagated, strict=True):
            if operation.name == _SCATTER:
                for position, split in zip(positions, splits, strict=True):
                    _keep_parts_equal(operation, position, split, mesh)
            elif positions:
                layouts = _layouts if operation.name == _CONVOLUTION else product_layouts
                _constrain_all(operation, layouts(operation, splits[0], splits[1], splits[2], mesh))
        for operation in transforms:
            _keep_transform_whole(mesh, operation, platform == "cpu")
        for operation in selections:
            _keep_windows_whole(mesh, operation)
        has_changed = settle(module, compared, mesh)
    return has_changed or bool(operations or transforms or selections)


class PartitionedJit:
    """`jax.jit(fn)` for eager calls, which compiles programs over several devices with the constraints of `avoid_faults`.

    Attributes:
        is_affected: whether the function's programs have operations that need constraints; None before the first program over
            several devices.
    """

    __slots__ = ("_compiled", "_in_trace", "_static", "is_affected", "jitted")

    def __init__(self, fn: Callable[..., Any], static: tuple[int, ...] = (), inline: bool = False, **options: Any) -> None:
        """
        Args:
            static: positions of arguments that are not arrays and are constants while `fn` is traced.
            inline: record the operations of `fn` inline in an outer trace; excludes `options`.
            options: further options of `jax.jit`.
        """
        assert not (inline and options)
        inlined = Inlined(fn, static) if inline else None
        self.jitted = jax.jit(fn, static_argnums=static, **options) if inlined is None else inlined.jitted
        self._in_trace = self.jitted if inlined is None else inlined
        self.is_affected: bool | None = None
        self._static = static
        self._compiled: dict[Any, Any] = {}

    def __call__(self, *args: Any) -> Any:
        """Call the function with arrays, numbers and pytrees of them.

        Raises:
            SpmdError: the arrays are on different devices, or on the same devices in different orders.
        """
        try:
            return self._called(args)
        except ValueError as error:
            raise_other_devices(error)
            raise

    def _called(self, args: tuple[Any, ...]) -> Any:
        if is_tracing():
            return self._in_trace(*args)
        if self.is_affected is False:
            return self.jitted(*args)
        dynamic = [arg for i, arg in enumerate(args) if i not in self._static] if self._static else args
        leaves, tree = jax.tree.flatten(dynamic)
        if not any(isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 for leaf in leaves):
            return self.jitted(*args)
        key = (tree, *(args[i] for i in self._static), *map(_described, leaves))
        compiled = self._compiled.get(key)
        if compiled is None:
            lowered = self.jitted.lower(*args)
            self.is_affected = avoid_faults(lowered, _platform(leaves))
            if not self.is_affected:
                return self.jitted(*args)
            compiled = self._compiled[key] = lowered.compile()
        return compiled(*dynamic)


def raise_other_devices(error: ValueError) -> None:
    """Raise an SpmdError if `error` is jax's error for arrays on different devices, or on the same devices in different orders."""
    if "incompatible devices" not in str(error):
        return
    found = re.findall(r"(?:shape \w+\[([\d,]*)\] and )?with device ids (\[[^\]]*\])", str(error))
    details = [f"{f'a tensor of shape ({shape})' if shape else 'a layout inside the program'}: devices {ids}" for shape, ids in found]
    raise SpmdError(
        message(
            "the tensors of one operation or program are on different devices, or on the same devices in different orders",
            *details,
            *called_at(),
            fix="mark them over one mesh; spmd.mark_sharding(t, mesh, spec) moves a tensor",
        )
    ) from error


def _platform(leaves: Sequence[Any]) -> str:
    return next(iter(next(leaf for leaf in leaves if isinstance(leaf, jax.Array)).sharding.device_set)).platform


def _described(leaf: Any) -> Any:
    """The properties of a leaf that determine which program runs."""
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding, leaf.weak_type  # pyright: ignore[reportAttributeAccessIssue]
    return (leaf.shape, leaf.dtype) if isinstance(leaf, np.ndarray) else type(leaf)


def _layouts(operation: Any, of_left: Split, of_right: Split, of_out: Split, mesh: ModuleMesh) -> tuple[Any, Any, Any]:
    """Layouts of a convolution's left operand, right operand and result.

    Args:
        of_left, of_right, of_out: axes of the dims of the operands and the result, according to propagation.
    """
    numbers = stablehlo.ConvDimensionNumbers(operation.attributes["dimension_numbers"])
    left, right, out = *operation.operands, operation.results[0]
    groups, batch_groups = (ir.IntegerAttr(operation.attributes[f"{of}_group_count"]).value for of in ("feature", "batch"))
    summed = {numbers.input_feature_dimension: numbers.kernel_input_feature_dimension}
    if batch_groups > 1:
        split = of_left[numbers.input_feature_dimension]
        axes = [*split, *(axis for axis in mesh.axes if axis not in split)] if split else []
        on_left, on_right = ({dim: axes} for dim in next(iter(summed.items())))
        return mesh.split(left, on_left), mesh.split(right, on_right), mesh.split(out, {})
    if groups > 1:
        kept = [set(range(value.type.rank)) for value in (left, out)]
        kept[0].remove(numbers.input_batch_dimension)
        kept[1].remove(numbers.output_batch_dimension)
        return mesh.whole(left, kept[0]), mesh.split(right, {}), mesh.whole(out, kept[1])
    space = numbers.input_spatial_dimensions, numbers.kernel_spatial_dimensions, numbers.output_spatial_dimensions
    if any(of_left[dim] for dim in space[0]) and _is_plain(operation):
        summed |= dict(zip(space[0], space[1], strict=True))
        on_left, on_right = _chosen(of_left, summed), _chosen(of_right, summed.values())
        is_same = mesh.is_used_up(on_left.values()) and list(on_left.values()) == list(on_right.values())
        if is_same and mesh.divides(left, on_left, space[0]) and mesh.divides(right, on_right, space[1]):
            return mesh.split(left, on_left), mesh.split(right, on_right), mesh.split(out, {})
        images = {numbers.input_batch_dimension: numbers.output_batch_dimension, **dict(zip(space[0], space[2], strict=True))}
        on_left, on_out = _chosen(of_left, images), {there: of_left[here] for here, there in images.items()}
        are_images = mesh.is_used_up(on_left.values()) and not any(of_right[dim] for dim in space[1])
        if are_images and mesh.divides(left, on_left, space[0]) and mesh.divides(out, on_out, space[2]):
            return mesh.split(left, on_left), mesh.split(right, {}), mesh.split(out, on_out)
    features = numbers.input_feature_dimension, numbers.kernel_input_feature_dimension
    if mesh.has_three_axes((*of_left, *of_right, *of_out)) and (of_left[features[0]] or of_right[features[1]]):
        space = [*space[0], features[0]], [*space[1], features[1]], space[2]
    layouts = [mesh.whole(value, dims) for value, dims in zip((left, right, out), space, strict=True)]
    return layouts[0], layouts[1], layouts[2]


def _constrain_all(operation: Any, layouts: tuple[Any, Any, Any] | None) -> None:
    """Constrain both operands and the result to `layouts`; None leaves them unconstrained."""
    if layouts is None:
        return
    constrain(operation, 0, layouts[0])
    constrain(operation, 1, layouts[1])
    if layouts[2] is not None:
        _constrain_result(operation, layouts[2])


def _is_plain(operation: Any) -> bool:
    """Whether windows start at the left operand's first element or before it; otherwise the partitioner ends the process."""
    padding = operation.attributes.get("padding", None)
    return padding is None or all(int(low) >= 0 for low in np.array(ir.DenseIntElementsAttr(padding))[:, 0])


def _chosen(split: Split, dims: Iterable[int]) -> dict[int, Sequence[str]]:
    return {dim: split[dim] for dim in dims}


def _constrain_result(operation: Any, sharding: Any) -> None:
    result = operation.results[0]
    with ir.InsertionPoint.after(operation):
        constraint = sdy.ShardingConstraintOp(result, sharding)
    result.replace_all_uses_except(constraint.result, constraint.operation)


def _positions_to_probe(operation: Any, mesh: ModuleMesh) -> list[int]:
    """Positions of the operands (or `_RESULT`) whose sharding determines the constraints of an operation."""
    if operation.name == _CONVOLUTION:
        return [0, 1, _RESULT]
    if operation.name == _PRODUCT:
        return [0, 1, _RESULT] if mesh.num_axes > 2 else []
    first = len(operation.operands) // 2  # the operands are the inputs, the indices, and one update per input
    return [i for i in range(first, len(operation.operands)) if _dims_at_risk(operation, i, mesh)]


def _dims_at_risk(operation: Any, position: int, mesh: ModuleMesh) -> list[int]:
    """The dims of a scatter's indices or updates that enumerate its rows and may be split into parts of unequal size."""
    numbers = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
    others = [numbers.index_vector_dim] if position == len(operation.operands) // 2 else numbers.update_window_dims
    shape = ir.RankedTensorType(operation.operands[position].type).shape
    return [dim for dim, size in enumerate(shape) if dim not in others and size % mesh.num_devices]


def _keep_parts_equal(operation: Any, position: int, split: Split, mesh: ModuleMesh) -> None:
    value = operation.operands[position]
    at_risk = _dims_at_risk(operation, position, mesh)
    shape = ir.RankedTensorType(value.type).shape
    equal = {dim: split[dim] if shape[dim] % mesh.num_parts(split[dim]) == 0 else () for dim in at_risk}
    constrain(operation, position, mesh.partly(value, equal))


def _keep_transform_whole(mesh: ModuleMesh, operation: Any, is_on_cpu: bool) -> None:
    count = len(ir.DenseI64ArrayAttr(operation.attributes["fft_length"]))
    shapes = [ir.RankedTensorType(value.type).shape for value in (operation.operands[0], operation.results[0])]
    dims = range(len(shapes[0]) - count, len(shapes[0]))
    constrain(operation, 0, mesh.whole(operation.operands[0], dims))
    _constrain_result(operation, mesh.whole(operation.results[0], dims))
    if is_on_cpu:
        with ir.InsertionPoint(operation):
            operation.operands[0] = _row_major(operation.operands[0]).results[0]
        result = operation.results[0]
        with ir.InsertionPoint.after(operation):
            ordered = _row_major(result)
        result.replace_all_uses_except(ordered.results[0], ordered.operation)


def _keep_windows_whole(mesh: ModuleMesh, operation: Any) -> None:
    """Do not split the dims of a windowed maximum if its windows are at least twice as long as their stride."""
    sizes, strides = (list(ir.DenseI64ArrayAttr(operation.attributes[f"window_{name}"])) for name in ("dimensions", "strides"))
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not any(sizes[dim] >= 2 * strides[dim] for dim in dims):
        return
    for position in (0, 1):
        constrain(operation, position, mesh.whole(operation.operands[position], dims))
    _constrain_result(operation, mesh.whole(operation.results[0], dims))


def _row_major(value: Any) -> Any:
    """An operation that returns `value` in row-major memory order, the only one that transforms accept."""
    kind = ir.RankedTensorType(value.type)
    call = stablehlo.CustomCallOp([kind], [value], call_target_name="LayoutConstraint", backend_config=ir.StringAttr.get(""))
    for side, order in (("operand", range(kind.rank)), ("result", reversed(range(kind.rank)))):
        listed = ", ".join(map(str, order))
        call.attributes[f"{side}_layouts"] = ir.Attribute.parse(f"[dense<[{listed}]> : tensor<{kind.rank}xindex>]")
    return call


def _propagated(module: Any, mesh: ModuleMesh, positions: Sequence[Sequence[int]]) -> list[list[Split]]:
    """The sharding of operands according to Shardy's propagation; unsplit if propagation gives none or several.

    Args:
        positions: positions of the operands in question, for each operation.
    """
    copy = module.operation.clone()
    ranks: list[int] = []
    for operation, probed in zip(operations_of(copy, *_NEED_SHARDINGS), positions, strict=True):
        for position in probed:
            value = operation.results[0] if position == _RESULT else operation.operands[position]
            _insert_probe(operation, position, value, len(ranks))
            ranks.append(ir.RankedTensorType(value.type).rank)
    passmanager.PassManager.parse("builtin.module(inline,sdy-propagation-pipeline)").run(copy)
    by_probe: dict[int, set[Split]] = {}
    for operation in operations_of(copy, "stablehlo.custom_call"):
        if operation.attributes["call_target_name"].value == _PROBE:
            by_probe.setdefault(int(operation.attributes["backend_config"].value), set()).add(_split_of_result(operation, mesh))
    found = [by_probe.get(number, set()) for number in range(len(ranks))]
    splits = iter([next(iter(several)) if len(several) == 1 else ((),) * rank for several, rank in zip(found, ranks, strict=True)])
    return [[next(splits) for _ in probed] for probed in positions]


def _insert_probe(operation: Any, position: int, value: Any, number: int) -> None:
    """Insert a probe, an identity operation to which propagation assigns a layout, before an operand or after the result."""
    shape = ir.RankedTensorType(value.type).shape
    names = "ijklmnop"[: len(shape)]
    listed, sizes = ", ".join(names), ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))
    with ir.InsertionPoint.after(operation) if position == _RESULT else ir.InsertionPoint(operation):
        config = ir.StringAttr.get(str(number))
        call = stablehlo.CustomCallOp([value.type], [value], call_target_name=_PROBE, backend_config=config)
        call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(f"#sdy.op_sharding_rule<([{listed}])->([{listed}]) {{{sizes}}}, custom>")
    if position == _RESULT:
        value.replace_all_uses_except(call.results[0], call.operation)
    else:
        operation.operands[position] = call.results[0]


def _split_of_result(operation: Any, mesh: ModuleMesh) -> Split:
    """The axes of each dim of a result; none for a dim that is split by a part of an axis, or if the layout is over another mesh."""
    rank = ir.RankedTensorType(operation.results[0].type).rank
    if "sdy.sharding" not in operation.attributes:
        return ((),) * rank
    return mesh.split_by(sdy.TensorShardingAttr(sdy.TensorShardingPerValueAttr(operation.attributes["sdy.sharding"]).shardings[0]))


__all__ = ["PartitionedJit", "avoid_faults", "raise_other_devices"]
