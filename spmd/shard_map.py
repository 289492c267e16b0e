"""`shard_map`: runs a torch function once per device, on the shards of its arguments.

The compiler adds no communication. Only the collectives in the function communicate.

    def matmul(x, w):                                    # x [B, D / model], w [D / model, H]
        return collectives.all_reduce(x @ w, "sum", "model")

    y = spmd.shard_map(matmul, m, in_specs=((None, "model"), ("model", None)), out_specs=(None, None))(x, w)

Gradients of the arguments come from jax, which differentiates the whole region. Works eagerly and inside a compiled function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from mesh import Mesh, PartitionSpec, ShardingSpec, SpecError
from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, TraceAgain, TraceError, called_at, message, shown
from spmd.base._jax import eval_jaxpr, is_tracing
from spmd.base._jax_notes import without_jax_note
from spmd.base._jax_varying import axes_of_outputs
from spmd.device._partitioner import PartitionedJit
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, load, recording, wrap
from spmd.device._with_graph import with_graph_of
from spmd.program.trace._part import Part
from spmd.program.xla._jaxpr import constants_within
from spmd.sharding._annotate import as_mesh
from spmd.sharding._tensor import become_sharded


def shard_map(fn: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, *, check_vma: bool = True) -> Callable[..., Any]:
    """Turn `fn`, a function of shards, into a function of global tensors that runs on every device with that device's shards.

    Args:
        fn: a function of tensors, which takes and returns shards. Parameters must be arguments too.
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`. All its axes are manual inside `fn`.
        in_specs: one spec per argument.
        out_specs: the spec of the result, or a tuple or list of specs if `fn` returns several values. Along mesh axes that a spec
            does not name, the result must be equal on all devices.
        check_vma: check that. A result counts as equal along an axis if no argument split over it reaches the result except through
            `all_reduce` or `all_gather` over it. False: the caller vouches for it, e.g. for a sum that `permute` passes around a ring.

    Returns:
        A differentiable function of device tensors, whose results are sharded by `out_specs`.

    Raises:
        SpecError: a spec does not fit the mesh, or is none; when called: the axes of a dim do not divide it, a result has fewer dims
            than its spec, or it varies along an axis that its spec does not name.
        SpmdError: `fn` is no function, or `in_specs` are no tuple or list; when called: the number of arguments or results differs from
            the specs, or `fn` uses a tensor that is not an argument.
    """
    if not callable(fn):
        raise SpmdError(message(f"shard_map takes a function, got {shown(fn)}", fix="spmd.shard_map(fn, mesh, in_specs, out_specs)"))
    mesh = as_mesh(mesh)
    if not isinstance(in_specs, tuple | list):
        what = f"in_specs must be a tuple or list of specs, one per argument, got {shown(in_specs)}"
        raise SpmdError(message(what, fix='in_specs=(("data", None),) for one tensor of two dims'))
    inputs = tuple(ShardingSpec(mesh, spec) for spec in in_specs)
    listed: tuple[Any, ...] = tuple(out_specs) if isinstance(out_specs, tuple | list) else ()
    is_many = bool(listed) and all(isinstance(s, tuple | list | PartitionSpec | jax.sharding.PartitionSpec) for s in listed)
    many = is_many and not _is_one_spec(listed, mesh)
    outputs = tuple(ShardingSpec(mesh, spec) for spec in listed) if many else (ShardingSpec(mesh, out_specs),)
    region = _Region(fn, mesh, inputs, outputs, check_vma)

    @functools.wraps(fn)
    def mapped(*args: torch.Tensor) -> Any:
        results = region(args)
        if not many:
            return results[0]
        return results if isinstance(out_specs, list) else tuple(results)

    return mapped


def _is_one_spec(out_specs: Any, mesh: Mesh) -> bool:
    """Whether a tuple of tuples is a single spec with several axes per dim, e.g. (("data", "model"),)."""
    flat = [axis for entry in out_specs for axis in (entry if isinstance(entry, tuple) else ())]
    return all(isinstance(e, tuple) and len(e) > 1 and all(axis in mesh.axis_names for axis in e) for e in out_specs) and bool(flat)


class _Region:
    """One function mapped by `shard_map`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        inputs: tuple[ShardingSpec, ...],
        outputs: tuple[ShardingSpec, ...],
        check_vma: bool,
    ) -> None:
        self.fn, self.mesh, self.inputs, self.outputs, self.check_vma = fn, mesh, inputs, outputs, check_vma
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self.compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, args: tuple[Any, ...]) -> list[torch.Tensor]:
        self._check(args)
        results: Any = _Mapped.apply(_Run(self._on_global, self.compiled), *args)
        for tensor, sharding in zip(results, self.outputs, strict=True):
            if not is_tracing():
                buffer_of(tensor).annotation = sharding
        return [become_sharded(tensor) for tensor in results]

    def _check(self, args: tuple[Any, ...]) -> None:
        if len(args) != len(self.inputs):
            what = f"{self.name} has {len(self.inputs)} in_specs, but was called with {len(args)} arguments"
            raise SpmdError(message(what, *called_at(), fix="give one spec per argument"))
        for position, (arg, sharding) in enumerate(zip(args, self.inputs, strict=True)):
            if not isinstance(arg, torch.Tensor) or arg.device.type != "jax":
                kind = f"a tensor on {arg.device}" if isinstance(arg, torch.Tensor) else type(arg).__name__
                what = f"argument {position} of {self.name} is {kind}"
                raise SpmdError(message(what, fix="pass tensors on device 'jax'; bind other values with functools.partial"))
            sharding.validate(tuple(arg.shape), f"argument {position} of {self.name}")
            self._require_even(tuple(arg.shape), sharding, f"argument {position} of {self.name}")

    def _require_even(self, shape: tuple[int, ...], sharding: ShardingSpec, name: str) -> None:
        """Check that all shards have the same size. Padding inside a region would have no defined meaning."""
        padded = sharding.padded_shape(shape)
        dim = next((i for i, (n, m) in enumerate(zip(shape, padded, strict=True)) if n != m), None)
        if dim is not None:
            raise SpecError(
                message(
                    f"{name} of shape {shape} cannot be split into equal shards by {tuple(sharding.partition_spec)}",
                    f"dim {dim} has {shape[dim]} elements, but its axes split it into {math.prod(self._sizes(sharding, dim))} shards",
                    fix=f"pad dim {dim} to {padded[dim]} before the region, or do not split it: None in in_specs",
                )
            )

    def _sizes(self, sharding: ShardingSpec, dim: int) -> list[int]:
        entry = sharding.partition_spec[dim]
        return [self.mesh.to_jax().shape[axis] for axis in (entry if isinstance(entry, tuple) else (entry,))]

    def _on_global(self, *values: Any) -> tuple[Any, ...]:
        """Run the region on tracers for global arrays."""
        return jax.shard_map(
            self._on_shards,
            mesh=self.mesh.to_jax(),
            in_specs=tuple(s.partition_spec.to_jax() for s in self.inputs),
            out_specs=tuple(s.partition_spec.to_jax() for s in self.outputs),
            check_vma=False,
        )(*values)

    def _on_shards(self, *shards: Any) -> tuple[Any, ...]:
        """Run `fn` on tracers for one device's shards. jax calls it once per trace."""
        closed = jax.make_jaxpr(self._traced)(*shards)
        if self.check_vma:
            given = [_named_axes(sharding) for sharding in self.inputs]
            for number, varying in enumerate(axes_of_outputs(closed, given)):
                self._require_equal(number, varying)
        return tuple(eval_jaxpr(closed.jaxpr, closed.consts, *shards))

    def _traced(self, *shards: Any) -> tuple[Any, ...]:
        inside = _Inside(self.name, tuple(map(str, self.mesh.axis_names)))
        token, num_flags = recording.set(inside), len(inside.finite)
        try:
            with exact_dtypes(), torch.no_grad():
                result = self.fn(*(wrap(shard) for shard in shards))
                flat = list(result) if isinstance(result, tuple | list) else [result]
                self._check_results(flat)
                return tuple(load(tensor) for tensor in flat)
        finally:
            recording.reset(token)
            del inside.finite[num_flags:]  # values of the region, such as these flags, must not leak to the outer trace

    def _check_results(self, flat: list[Any]) -> None:
        if len(flat) != len(self.outputs) or not all(is_device_tensor(t) for t in flat):
            what = f"{self.name} returns {len(flat)} value{'s' * (len(flat) != 1)}, but out_specs has {len(self.outputs)} spec(s)"
            raise SpmdError(message(what, f"values: {', '.join(type(t).__name__ for t in flat)}", fix="return one device tensor per spec"))
        for number, (tensor, sharding) in enumerate(zip(flat, self.outputs, strict=True)):
            spec = tuple(sharding.partition_spec)
            if tensor.dim() < len(spec):
                what = f"result {number} of {self.name} has {tensor.dim()} dims, but its out_spec {spec} has {len(spec)} entries"
                shape = f"the result has shape {tuple(tensor.shape)} on each device"
                fix = f"out_specs={(None,) * tensor.dim()}, or return a tensor with {len(spec)} dims"
                raise SpecError(message(what, shape, *called_at(), fix=fix))

    def _require_equal(self, number: int, varying: frozenset[str]) -> None:
        """Check that a result is equal on all devices along the axes that its spec does not name."""
        spec, sizes = self.outputs[number], self.mesh.to_jax().shape
        left_out = varying - _named_axes(spec)
        axes = tuple(axis for axis in self.mesh.axis_names if axis in left_out and sizes[axis] > 1)
        if not axes:
            return
        of = f"axis {axes[0]!r}" if len(axes) == 1 else f"axes {', '.join(map(repr, axes))}"
        equal = f'spmd.collectives.all_reduce(result, "sum", {(axes[0] if len(axes) == 1 else axes)!r})'
        raise SpecError(
            message(
                f"result {number} of {self.name} may differ between devices along {of}, which its out_spec does not name",
                f"out_spec {tuple(spec.partition_spec)}: along other axes the result must be equal on all devices",
                *called_at(),
                fix=f"{equal}, or name the axis in out_specs; check_vma=False if the values are equal",
            )
        )


def _named_axes(sharding: ShardingSpec) -> frozenset[str]:
    """The mesh axes in a spec."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in tuple(sharding.partition_spec.to_jax()))
    return frozenset(axis for entry in entries for axis in entry if axis is not None)


@dataclass(frozen=True)
class _Run:
    """A region, or a gradient of one. Eagerly, every call traces it and compiles each distinct program once."""

    fn: Callable[..., tuple[Any, ...]]
    compiled: dict[Any, Callable[..., Any]]

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        if is_tracing():
            return self.fn(*values)
        with without_jax_note():
            closed = jax.make_jaxpr(self.fn)(*values)
        key = str(closed.jaxpr), *map(id, constants_within(closed.jaxpr))  # `compiled` keeps these alive
        compiled = self.compiled.get(key)
        if compiled is None:
            jaxpr = closed.jaxpr
            compiled = self.compiled[key] = PartitionedJit(lambda consts, *inputs: eval_jaxpr(jaxpr, consts, *inputs))
        return tuple(compiled(closed.consts, *values))

    def vjp(self, wanted: Sequence[int], values: Sequence[Any]) -> Any:
        """`jax.vjp` as a function of the values at `wanted`."""

        def of_wanted(*chosen: Any) -> tuple[Any, ...]:
            filled = list(values)
            for position, value in zip(wanted, chosen, strict=True):
                filled[position] = value
            return self(filled)

        return jax.vjp(of_wanted, *(values[i] for i in wanted))

    def gradient(self, wanted: Sequence[int], count: int) -> _Run:
        """The gradients of the inputs at `wanted`, as a function of all `count` inputs and then the gradients of the results."""
        return _Run(lambda *values: tuple(self.vjp(wanted, values[:count])[1](tuple(values[count:]))), self.compiled)


class _Mapped(torch.autograd.Function):
    """A region, or its gradient, as a node on autograd's tape."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: torch.Tensor) -> Any:
        wanted = [i for i, t in enumerate(tensors) if ctx.needs_input_grad[i + 1] and t.is_floating_point()]
        with exact_dtypes():
            values = [load(t) for t in tensors]
            if not wanted:
                return tuple(wrap(value) for value in run(values))
            results, vjp = run.vjp(wanted, values)
        leaves, ctx.tree = jax.tree.flatten(vjp)
        ctx.run, ctx.wanted, ctx.count = run, wanted, len(tensors)
        # Copies, so that a write to an argument before the backward pass is no error. Second derivatives need them.
        own = (with_graph_of(t, wrap(v)) if i in wanted else wrap(v) for i, (t, v) in enumerate(zip(tensors, values, strict=True)))
        ctx.save_for_backward(*own, *(wrap(jnp.asarray(leaf)) for leaf in leaves))
        return tuple(wrap(value) for value in results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensors, leaves = ctx.saved_tensors[: ctx.count], ctx.saved_tensors[ctx.count :]
        if torch.is_grad_enabled():  # a backward pass with create_graph=True
            found: Any = _Mapped.apply(ctx.run.gradient(ctx.wanted, ctx.count), *tensors, *grads)
        else:
            with exact_dtypes():
                vjp = jax.tree.unflatten(ctx.tree, [load(leaf) for leaf in leaves])
                found = tuple(wrap(value) for value in vjp(tuple(load(grad) for grad in grads)))
        result: list[Any] = [None] * (ctx.count + 1)
        for position, value in zip(ctx.wanted, found, strict=True):
            result[position + 1] = value
        return tuple(result)


class _Inside(Part):
    """The recorder of a region. It refuses operations that have no meaning per device and passes the others to the outer trace."""

    def __init__(self, name: str, axes: tuple[str, ...]) -> None:
        super().__init__(None, 0)
        self.name, self._axes = name, axes
        self.own: set[int] = set()
        self.kept: list[Buffer] = []  # kept alive, so that their ids in `own` stay unique
        self._scalars: dict[Any, Any] = {}

    @property
    def axes(self) -> tuple[str, ...]:
        return self._axes

    @property
    def scalars(self) -> dict[Any, Any]:
        return self._scalars

    @property
    def platform(self) -> None:
        """None: rules that depend on the platform would create equations that are to be split over devices."""

    @property
    def reduce_dtype(self) -> None:
        """None: a region reduces explicitly, through collectives."""

    def reduce_in(self, dtype: Any) -> None:
        """Do nothing: a region reduces explicitly, through collectives."""

    def born(self, buffer: Buffer) -> None:
        self.own.add(id(buffer))
        self.kept.append(buffer)

    def read(self, buffer: Buffer) -> None:
        if id(buffer) not in self.own:
            raise self._not_passed(buffer, "reads")

    def will_write(self, buffer: Buffer) -> None:
        if id(buffer) not in self.own:
            raise self._not_passed(buffer, "writes")

    def _not_passed(self, buffer: Buffer, verb: str) -> TraceError:
        return TraceError(
            message(
                f"{self.name} {verb} a tensor of shape {buffer.shape} that is not an argument",
                *called_at(),
                "inside shard_map a tensor is one device's shard, and only arguments have a spec",
                fix="pass the tensor (a parameter too) as an argument, with a spec",
            )
        )

    def is_copy_of(self, base: Buffer, copy: Buffer, why: type[TraceAgain]) -> None:
        raise why()

    def random_state(self) -> tuple[Any, int]:
        raise TraceError(
            message(
                f"{self.name} draws random numbers inside shard_map",
                *called_at(),
                "every device would draw the same numbers",
                fix="draw outside and pass the numbers as an argument, split by its spec",
            )
        )


__all__ = ["shard_map"]
