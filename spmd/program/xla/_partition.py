"""Lowers programs with attention kernels, each inside a `shard_map` whose specs Shardy's propagation determines.

Note [Kernels are told their shardings]
The partitioner cannot split a Pallas kernel. jax's `custom_partitioning` would need the compiler to call back into Python, which
libtpu's interface does not support. So such a program is lowered twice. In the first lowering a placeholder custom call with a sharding
rule replaces each kernel. Shardy's propagation, which jaxlib contains and which the compiler would run next, then gives the sharding of
its batch and head dims. In the second lowering the kernel is in a `shard_map` with these specs. The specs affect only speed: with
other specs the partitioner would reshard, and the values would be the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy, stablehlo
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from spmd.base._jax import lowered_by
from spmd.lowering import _splash
from spmd.lowering.fused_attention import attention_grad_p, attention_p, plain_attention, plain_attention_grad

Axes = tuple[str, ...]
_STANDS_FOR_KERNEL = "spmd.attention"


@dataclass(frozen=True)
class _Kernel:
    """A primitive's kernel, the same computation in plain jax operations, and the roles of its arrays (see `_sharding_rule`)."""

    run: Callable[..., Any]
    plain: Callable[..., Any]
    roles: str


_KERNELS = {
    attention_p: _Kernel(_splash.forward, plain_attention, "qkk->qn"),
    attention_grad_p: _Kernel(_splash.backward, plain_attention_grad, "qkkqnq->qkk"),
}


def lowered(jitted: Any, args: Sequence[Any], mesh: jax.sharding.Mesh | None, platform: str) -> jax.stages.Lowered:
    """`jitted.lower(*args)`; on TPUs, attention is lowered to kernels.

    Args:
        mesh: the mesh that the program runs on, or None for one device.
        platform: "cpu", "gpu" or "tpu".
    """
    if platform != "tpu":
        return jitted.lower(*args)
    traced = jitted.trace(*args)
    if mesh is None or mesh.size == 1:
        return lowered_by(traced, {primitive: _by_kernel(kernel.run) for primitive, kernel in _KERNELS.items()})
    placeholders = _PlaceholderRules()
    first = lowered_by(traced, {primitive: placeholders.rule(kernel) for primitive, kernel in _KERNELS.items()})
    if not placeholders.count:
        return first
    kernels = _KernelRules(mesh, _propagated(first, placeholders.count))
    return lowered_by(traced, {primitive: kernels.rule(kernel) for primitive, kernel in _KERNELS.items()})


def _by_kernel(run: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering rule of a function that calls a kernel. Kernels are traced with 32-bit types, also in a program with 64-bit types."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        with jax.enable_x64(False):
            return mlir.lower_fun(run, multiple_results=True)(ctx, *operands, **params)

    return lower


def _by_plain(kernel: _Kernel, ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
    return mlir.lower_fun(kernel.plain, multiple_results=True)(ctx, *operands, **params)


def _is_manual(ctx: Any) -> bool:
    """Whether the operation is in a `shard_map` of the program itself, where the partitioner splits nothing."""
    return bool(getattr(ctx.module_context.axis_context, "manual_axes", ()))


class _PlaceholderRules:
    """Lowering rules that replace each kernel by a placeholder custom call. The placeholders are numbered in order of lowering."""

    def __init__(self) -> None:
        self.count = 0

    def rule(self, kernel: _Kernel) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
            if _is_manual(ctx):
                return _by_plain(kernel, ctx, *operands, **params)
            results = [ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(aval.dtype)) for aval in ctx.avals_out]
            number = ir.StringAttr.get(str(self.count))
            call = stablehlo.CustomCallOp(results, operands, call_target_name=_STANDS_FOR_KERNEL, backend_config=number)
            call.attributes["sdy.sharding_rule"] = ir.Attribute.parse(_sharding_rule(kernel.roles, *ctx.avals_in[:2]))
            self.count += 1
            return call.results

        return lower


class _KernelRules:
    """Lowering rules that put each kernel into a `shard_map`.

    Args:
        splits: (axes of the batch, axes of the heads) of each kernel, in the order of `_PlaceholderRules`.
    """

    def __init__(self, mesh: jax.sharding.Mesh, splits: list[tuple[Axes, Axes]]) -> None:
        self.grid, self.splits = mesh, iter(splits)

    def rule(self, kernel: _Kernel) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
            if _is_manual(ctx):
                return _by_plain(kernel, ctx, *operands, **params)
            run, specs = self._split(kernel, *next(self.splits), *ctx.avals_in[:2])
            in_specs, out_specs = ([specs[role] for role in side] for side in kernel.roles.split("->"))
            split = jax.shard_map(partial(run, **params), mesh=self.grid, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False)
            return _by_kernel(split)(ctx, *operands)

        return lower

    def _split(
        self, kernel: _Kernel, batch: Axes, heads: Axes, query: Any, key: Any
    ) -> tuple[Callable[..., Any], dict[str, PartitionSpec]]:
        """The function that each device runs, and the spec of each role. A dim that its axes do not divide evenly is not split."""
        batch, heads = self._dividing_prefix(batch, query.shape[0]), self._dividing_prefix(heads, query.shape[1])
        num_splits, num_kv_heads = math.prod(self.grid.shape[axis] for axis in heads), key.shape[1]
        run, key_heads = kernel.run, heads
        if num_splits > num_kv_heads and num_splits % num_kv_heads == 0:
            run, key_heads = partial(_with_own_head, kernel, heads, num_splits // num_kv_heads), ()
        elif num_kv_heads % num_splits:
            heads = key_heads = ()
        of_query = PartitionSpec(batch, heads)
        return run, {"q": of_query, "n": of_query, "k": PartitionSpec(batch, key_heads)}

    def _dividing_prefix(self, axes: Axes, size: int) -> Axes:
        """The longest prefix of `axes` whose sizes together divide `size`."""
        kept: list[str] = []
        for axis in axes:
            size, rest = divmod(size, self.grid.shape[axis])
            if rest:
                break
            kept.append(axis)
        return tuple(kept)


def _with_own_head(kernel: _Kernel, axes: Axes, num_sharing: int, *arrays: jax.Array, **params: Any) -> list[jax.Array]:
    """Run the kernel on a device whose query heads all belong to one key head. `num_sharing` devices share this head.

    Keys and values are replicated over `axes`: every device slices its head, and gradients of the heads are summed over `axes`.
    """
    operand_roles, result_roles = kernel.roles.split("->")
    own = jax.lax.axis_index(axes) // num_sharing
    results = kernel.run(
        *(jax.lax.dynamic_slice_in_dim(x, own, 1, 1) if role == "k" else x for x, role in zip(arrays, operand_roles, strict=True)),
        **params,
    )
    zeros = jnp.zeros_like(arrays[1])  # arrays[1] are the keys; gradients of keys and values have their shape
    return [
        jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, x, own, 1), axes) if role == "k" else x
        for x, role in zip(results, result_roles, strict=True)
    ]


def _sharding_rule(roles: str, query: Any, key: Any) -> str:
    """Shardy's sharding rule of a kernel: the factors of which its dims are products.

    Batch (i), key heads (j) and query heads per key head (n) may be split. The other factors need replication.

    Args:
        roles: one letter per operand and, after an arrow, per result: "q" is [B, H, T, D], "k" is [B, K, S, D], "n" is [B, H, T].
        query, key: types of the first two operands.
    """
    (num_batches, num_heads, num_queries, width), (_, num_kv_heads, num_keys, _) = query.shape, key.shape
    sizes = {"i": num_batches, "j": num_kv_heads, "k": num_queries, "l": num_keys, "m": width}
    if num_heads > num_kv_heads:
        sizes["n"] = num_heads // num_kv_heads
    heads = "j" if "n" not in sizes else "jn" if num_kv_heads > 1 else "n"  # Shardy allows no factor of size 1 in a product
    dims = {"q": f"[i, {heads}, k, m]", "k": "[i, j, l, m]", "n": f"[i, {heads}, k]"}
    operands, results = (", ".join(dims[role] for role in side) for side in roles.split("->"))
    listed = ", ".join(f"{name}={size}" for name, size in sizes.items())
    whole = ", ".join(name for name in sizes if name in "klm")
    return f"#sdy.op_sharding_rule<({operands})->({results}) {{{listed}}} need_replication={{{whole}}}, custom>"


def _propagated(lowered: jax.stages.Lowered, count: int) -> list[tuple[Axes, Axes]]:
    """(axes of the batch, axes of the heads) of each placeholder, by its number; both empty if propagation gives it no sharding."""
    module: Any = lowered.compiler_ir("stablehlo")
    found: dict[int, tuple[Axes, Axes]] = {}

    def look(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call" and operation.attributes["call_target_name"].value == _STANDS_FOR_KERNEL:
            number = int(operation.attributes["backend_config"].value)
            found.setdefault(number, _split_of(operation))
        return ir.WalkResult.ADVANCE

    with module.context:
        copy = module.operation.clone()
        passmanager.PassManager.parse("builtin.module(inline,sdy-propagation-pipeline)").run(copy)
        copy.walk(look)
    return [found.get(number, ((), ())) for number in range(count)]


def _split_of(operation: Any) -> tuple[Axes, Axes]:
    if "sdy.sharding" not in operation.attributes:
        return (), ()
    first = sdy.TensorShardingPerValueAttr(operation.attributes["sdy.sharding"]).shardings[0]
    batch, heads = sdy.TensorShardingAttr(first).dimension_shardings[:2]
    return _whole_axes(batch), _whole_axes(heads)


def _whole_axes(dim: Any) -> Axes:
    """The names of a dim's axes, up to the first that splits it only by a sub-axis."""
    kept: list[str] = []
    for reference in sdy.DimensionShardingAttr(dim).axes:
        axis = sdy.AxisRefAttr(reference)
        if axis.sub_axis_info is not None:
            break
        kept.append(axis.name)
    return tuple(kept)
