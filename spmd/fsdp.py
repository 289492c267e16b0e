"""`fully_shard`: shards parameters, gradients and optimizer state over the devices that split the batch (FSDP, ZeRO).

    for block in model.blocks:
        spmd.fully_shard(block, m)
    spmd.fully_shard(model, m)                # the rest: embeddings, the last norm, the head

Each call makes one unit. Its parameters are sharded over an axis of the mesh. They are all-gathered while the module runs, and
again while its backward pass runs. Gradients are reduce-scattered. All of this is expressed as sharding constraints in the compiled
program: there is no flat parameter, no stream and no communication hook. Losses are those of the unsharded model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mesh import Mesh, PartitionSpec, ShardingSpec, entry_axes, split_largest_dim, without_axes
from spmd.base._convert import exact_dtypes, to_numpy_dtype
from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.base._torch import current_graph_task_id, pytree, top_saved_tensors_default_hooks
from spmd.base._wrong_arguments import require_module
from spmd.device._deferred import ByIdentity, Deferrable
from spmd.device._fence import fenced, is_fencing
from spmd.device._layout import annotation_of, set_state_sharding, state_sharding_of
from spmd.device._storage import Buffer, buffer_of, load, strided_alias, wrap
from spmd.device._with_graph import with_graph_of
from spmd.patches._table import current
from spmd.sharding._annotate import as_mesh, checked_spec, mark_sharding
from spmd.sharding._axes import fsdp_axis
from spmd.sharding._constraint import placed
from spmd.sharding._precision import cast_floating, require_policy, sum_gradients_wide
from spmd.sharding._swapped_parameters import SwappedParameters
from spmd.sharding._tensor import become_sharded

Stage = Literal[1, 2, 3]
Placer: TypeAlias = Callable[[nn.Parameter], Any]


class MixedPrecision(Protocol):
    """The fields of a policy that `fully_shard` reads. torch's `MixedPrecisionPolicy` has them."""

    @property
    def param_dtype(self) -> torch.dtype | None: ...
    @property
    def reduce_dtype(self) -> torch.dtype | None: ...
    @property
    def output_dtype(self) -> torch.dtype | None: ...
    @property
    def cast_forward_inputs(self) -> bool: ...


def fully_shard(
    module: nn.Module,
    mesh: Any,
    *,
    axis: str | Sequence[str] | None = None,
    stage: Stage = 3,
    reshard_after_forward: bool | None = True,
    mp_policy: MixedPrecision | None = None,
    ignored_params: Collection[torch.Tensor] | None = None,
    shard_placement_fn: Placer | None = None,
) -> nn.Module:
    """Make `module` one unit of fully sharded data parallelism. Call it on inner modules first; a parameter belongs to one unit.

    Args:
        module: a module on device 'jax', on the host or on 'meta'.
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`.
        axis: the axis or axes to shard over; default: the axis named 'fsdp', 'shard', 'data' or 'dp'. Over the other axes of
            the mesh parameters are replicated (hybrid sharding), unless an annotation already splits them (tensor parallelism).
            The batch should be split over `axis` and the axes that replicate parameters.
        stage: 3 shards parameters, gradients and optimizer state; 2 gradients and optimizer state; 1 optimizer state only.
        reshard_after_forward: gather again for the backward pass, so that only one module's full parameters exist at a time. False
            keeps them and saves the second all-gather. None means False for the outermost unit only. Applies to stage 3.
        mp_policy: `param_dtype` for the all-gather and computation, `reduce_dtype` for gradient sums, `output_dtype` and
            `cast_forward_inputs`. The parameters keep their own dtype.
        ignored_params: parameters that are neither sharded nor gathered.
        shard_placement_fn: returns DTensor's `Shard(dim)` for a parameter, or None for the default: its largest dim that the
            axis divides. A parameter without such a dim is not sharded.

    Returns:
        `module`.

    Raises:
        SpmdError: `module` is not a module, the mesh has no such axis, the stage is unknown, the module is already a unit or inside
            one, or a placement is impossible.
    """
    require_module(module, "fully_shard", "spmd.fully_shard(model.layers[0], mesh), or for one tensor spmd.mark_sharding(x, mesh, spec)")
    mesh = as_mesh(mesh)
    axes = _axes(mesh, axis)
    require_no_unit([module])
    if mp_policy is not None:
        require_policy(mp_policy)
    _require_options(stage, reshard_after_forward, ignored_params, shard_placement_fn)
    if _INSIDE in vars(module):
        outer = vars(module)[_INSIDE]
        what = f"{type(module).__name__} is inside a {outer} that is already a unit of fully_shard and owns its parameters"
        raise SpmdError(message(what, fix="call fully_shard on inner modules first and on the whole model last"))
    ignored = _ids_of(ignored_params or ())
    own = {id(p): p for p in _own_parameters(module) if id(p) not in ignored}
    specs = [_spec_of(parameter, mesh, axes, shard_placement_fn) for parameter in own.values()]
    for parameter, found in zip(own.values(), specs, strict=True):
        _shard(parameter, mesh, stage, *found)
    unit = _Unit(mesh, axes, stage, reshard_after_forward, mp_policy, ignored)
    vars(module)[_UNIT] = unit
    for inner in module.modules():
        if inner is not module:
            vars(inner).setdefault(_INSIDE, type(module).__name__)
    module.register_forward_pre_hook(unit.enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(unit.leave, always_call=True)
    return module


def require_no_unit(modules: Iterable[nn.Module]) -> None:
    """Refuse modules that are already units.

    Raises:
        SpmdError: one of them is a unit.
    """
    for module in modules:
        if _UNIT in vars(module):
            raise SpmdError(
                message(f"{type(module).__name__} is already a unit of fully_shard", fix="call it once per module, inner ones first")
            )


def dissolve(model: nn.Module) -> None:
    """Turn the units in a model back into plain modules. Their parameters keep their shardings."""
    for module in model.modules():
        vars(module).pop(_INSIDE, None)
        unit = vars(module).pop(_UNIT, None)
        before, after = module._forward_pre_hooks, module._forward_hooks
        for hooks, flags in ((before, module._forward_pre_hooks_with_kwargs), (after, module._forward_hooks_always_called)):
            for key in [key for key, hook in hooks.items() if unit is not None and getattr(hook, "__self__", None) is unit]:
                del hooks[key]
                flags.pop(key, None)


_UNIT = "_spmd_fsdp_unit"
_INSIDE = "_spmd_fsdp_inside"


def unit_of(module: nn.Module) -> _Unit:
    """The unit that `fully_shard` made of `module`."""
    return vars(module)[_UNIT]


def is_outermost(module: nn.Module) -> bool:
    """Whether a unit is not inside another one."""
    return _INSIDE not in vars(module)


def _axes(mesh: Mesh, axis: Any) -> tuple[str, ...]:
    axes: tuple[Any, ...] = (
        (fsdp_axis(mesh),) if axis is None else tuple(axis) if isinstance(axis, Iterable) and not isinstance(axis, str) else (axis,)
    )
    known = f"axes of the mesh: {', '.join(map(repr, mesh.axis_names))}"
    if not axes or not all(isinstance(name, str) for name in axes):
        what = f"axis of fully_shard must be the name of a mesh axis or a tuple of names, got {axis!r}"
        raise SpmdError(message(what, known, fix=f"axis={mesh.axis_names[0]!r}"))
    for name in axes:
        if name not in mesh.axis_names:
            raise SpmdError(message(f"{mesh} has no axis {name!r}", known, fix=f"axis={mesh.axis_names[0]!r}"))
    return axes


def _require_options(stage: object, reshard: object, ignored: object, choose: object) -> None:
    """Refuse options of wrong types, before a parameter is marked."""
    if type(stage) is bool or stage not in (1, 2, 3):
        known = "3 shards parameters, gradients and optimizer state; 2 gradients and state; 1 state only"
        raise SpmdError(message(f"fully_shard has no stage {stage!r}", known, fix="stage=3, the default"))
    if reshard is not None and not isinstance(reshard, bool):
        what = f"reshard_after_forward of fully_shard must be True, False or None, got {shown(reshard)}"
        raise SpmdError(message(what, fix="reshard_after_forward=False keeps the gathered parameters for the backward pass"))
    if ignored is not None and (isinstance(ignored, torch.Tensor) or not isinstance(ignored, Iterable)):
        what = f"ignored_params of fully_shard must be a set of parameters, got {shown(ignored)}"
        raise SpmdError(message(what, fix="ignored_params={module.scale}"))
    if choose is not None and not callable(choose):
        what = f"shard_placement_fn of fully_shard must be a function of a parameter, got {shown(choose)}"
        raise SpmdError(message(what, fix="shard_placement_fn=lambda parameter: Shard(0)"))


def _ids_of(ignored: Iterable[Any]) -> frozenset[int]:
    listed = list(ignored)
    wrong = next((p for p in listed if not isinstance(p, torch.Tensor)), None)
    if wrong is not None:
        what = f"ignored_params of fully_shard has {shown(wrong)} where a parameter is expected"
        raise SpmdError(message(what, fix='ignored_params={module.get_parameter("scale")}'))
    return frozenset(map(id, listed))


def _slots(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """(module, name) of the parameters below `module` that are not in an inner unit."""
    for name, parameter in module.__dict__["_parameters"].items():
        if parameter is not None:
            yield module, name
    for child in module.children():
        if _UNIT not in vars(child):
            yield from _slots(child)


def _own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    inner = {id(p) for child in module.modules() if _UNIT in vars(child) for p in _slot_parameters(child)}
    return (p for p in _slot_parameters(module) if id(p) not in inner)  # a tied weight belongs to the first unit


def _slot_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    return (owner.__dict__["_parameters"][name] for owner, name in _slots(module))


def _spec_of(
    parameter: nn.Parameter, mesh: Mesh, axes: tuple[str, ...], choose: Callable[[nn.Parameter], Any] | None
) -> tuple[PartitionSpec, PartitionSpec]:
    """The spec of a parameter before, and that by which it is sharded."""
    shape = tuple(parameter.shape)
    marked = annotation_of(parameter)
    before = PartitionSpec(*(None,) * len(shape)) if marked is None else marked.partition_spec
    placement = None if choose is None else choose(parameter)
    if placement is None:
        spec = split_largest_dim(before, shape, mesh, axes)
    else:
        if not isinstance(dim := getattr(placement, "dim", None), int) or not -len(shape) <= dim < len(shape):
            what = f"shard_placement_fn gave {shown(placement)} for a parameter of shape {shape}"
            raise SpmdError(message(what, *called_at(), fix="return torch.distributed.tensor.Shard(0), or None for the default"))
        entries: list[Any] = list(before)
        entries[placement.dim] = (*entry_axes(entries[placement.dim]), *axes)
        spec = PartitionSpec(*entries)
        checked_spec(parameter, mesh, spec, devices=("jax", "cpu", "meta"))
    return before, spec


def _shard(parameter: nn.Parameter, mesh: Mesh, stage: Stage, before: PartitionSpec, spec: PartitionSpec) -> None:
    """Mark one parameter. In stages 1 and 2 the spec applies only to its gradient (stage 2) and optimizer state."""
    mark_sharding(parameter, mesh, spec if stage == 3 else before)
    if stage < 3:
        set_state_sharding(parameter, ShardingSpec(mesh, spec))


@dataclass(frozen=True)
class _Unit:
    """The options of one `fully_shard` call. Its methods are the module's hooks. `calls` is the stack of running forward passes."""

    mesh: Mesh
    axes: tuple[str, ...]
    stage: Stage
    reshard: bool | None
    policy: MixedPrecision | None
    ignored: frozenset[int]
    calls: list[_Call] = field(default_factory=list["_Call"], compare=False)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook: replace the parameters by gathered ones."""
        call = _Call(self)
        self.calls.append(call)
        call.gather(module)
        if self.policy is not None and self.policy.param_dtype is not None and self.policy.cast_forward_inputs:
            return cast_floating((args, kwargs), self.policy.param_dtype)
        return args, kwargs

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Forward hook, which also runs after an error: restore the sharded parameters."""
        call = self.calls.pop()
        call.restore()
        if result is not None and self.policy is not None and self.policy.output_dtype is not None:
            result = cast_floating(result, self.policy.output_dtype)
        return call.fenced(result)

    def reduce_wide(self) -> None:
        """Make a traced program sum gradients in the policy's `reduce_dtype` if it is wider."""
        if self.policy is not None:
            sum_gradients_wide(self.policy.param_dtype, self.policy.reduce_dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Unit:
        return _Unit(self.mesh, self.axes, self.stage, self.reshard, self.policy, self.ignored)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "calls": list[Any]()}


class _Call:
    """One forward pass of a unit's module: the parameters that were replaced, and how the backward pass gathers them again."""

    def __init__(self, unit: _Unit) -> None:
        self.unit = unit
        self._swapped = SwappedParameters()
        self._sources: list[torch.Tensor] = []
        self._wholes: dict[Buffer, int] = {}
        self._again: dict[int, torch.Tensor] = {}
        self._fence: Sequence[torch.Tensor] = ()
        self._hooks: saved_tensors_hooks | None = None
        self._drops = False
        self._outer: _Call | None = None

    def gather(self, module: nn.Module) -> None:
        """Replace the unit's parameters by gathered ones, on autograd's tape."""
        unit = self.unit
        unit.reduce_wide()
        # During a backward pass this forward is a recomputation (torch.utils.checkpoint). XLA must not merge it with the first one.
        is_recomputed = current_graph_task_id() != -1
        wholes: dict[int, torch.Tensor] = {}
        for owner, name in list(_slots(module)):
            registry = owner.__dict__["_parameters"]
            parameter = registry[name]
            if id(parameter) in unit.ignored or parameter.device.type != "jax" or annotation_of(parameter) is None:
                continue
            whole = wholes.get(id(parameter))
            if whole is None:
                whole = wholes[id(parameter)] = become_sharded(_Gather.apply(parameter, unit, is_recomputed))  # pyright: ignore[reportArgumentType]
                self._wholes[buffer_of(whole)] = len(self._sources)
                self._sources.append(parameter)
            self._swapped.put(registry, name, whole)
        reshard = not is_outermost(module) if unit.reshard is None else unit.reshard
        drops = unit.stage == 3 and reshard and not is_recomputed and torch.is_grad_enabled()
        # Under other saved-tensors hooks (checkpointing) nothing is stored from forward to backward anyway, and these would not nest.
        outer = top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
        self._outer = getattr(outer[0], "__self__", None) if outer is not None else None
        if drops and (outer is None or isinstance(self._outer, _Call)):
            self._drops, self._hooks = True, saved_tensors_hooks(self._pack, self._unpack)
            self._hooks.__enter__()

    def restore(self) -> None:
        """Restore the module's own, sharded parameters."""
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None  # breaks a reference cycle, which would keep gathered parameters alive after the graph
        self._swapped.restore()
        self._wholes.clear()

    def fenced(self, result: Any) -> Any:
        """The module's result, with hooks so that the parameters are gathered again when its gradient arrives, not before.

        The shards pass an optimization barrier together with the gradient. So XLA neither merges these gathers with those of the
        forward pass, which would keep every gathered parameter alive, nor moves them ahead of the backward pass of later modules.
        """
        if self._drops and is_fencing():
            for tensor in pytree.tree_leaves(result):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._on_gradient)
        return result

    def _on_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        if self._fence:
            return gradient
        self._forget_after_backward()
        first, *self._fence = fenced([gradient, *self._sources])
        return with_graph_of(gradient, first) if torch.is_grad_enabled() else first

    def _forget_after_backward(self) -> None:
        """Drop gathered parameters when the backward pass ends. With `retain_graph=True` they would otherwise stay alive."""
        if not self._again and not self._fence and current_graph_task_id() != -1:
            current("torch.autograd.Variable._execution_engine").queue_callback(self._forget)

    def _forget(self) -> None:
        self._again.clear()
        self._fence = ()

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type != "jax":
            return tensor
        index = self._wholes.get(buffer_of(tensor))
        if index is None:
            return tensor if self._outer is None else self._outer._pack(tensor)
        return _View(self, index, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _View):
            return packed
        return strided_alias(packed.call._gathered_again(packed.index), packed.size, packed.stride, packed.offset)

    def _gathered_again(self, index: int) -> torch.Tensor:
        """A parameter gathered for the backward pass, once for all views that autograd saved."""
        whole = self._again.get(index)
        if whole is None:
            source = self._sources[index]
            self._forget_after_backward()
            whole = self._again[index] = _gathered(self._fence[index] if self._fence else source, source, self.unit)
        return whole


@dataclass(frozen=True)
class _View:
    """A view of a gathered parameter that autograd saved: the parameter's index and the view's geometry."""

    call: _Call
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Gather(torch.autograd.Function):
    """Gathers a parameter along the unit's axes and casts it for the computation. Its gradient is reduce-scattered."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, unit: _Unit, is_recomputed: bool) -> torch.Tensor:
        ctx.unit, ctx.dtype, ctx.sharding = unit, parameter.dtype, _gradient_sharding(parameter, unit)
        ctx.whole = _whole_sharding(parameter, unit)
        ctx.set_materialize_grads(False)
        source = fenced([parameter])[0] if is_recomputed else parameter
        return _gathered(source, parameter, unit)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        policy: MixedPrecision | None = ctx.unit.policy
        gradient = grads[0]
        if gradient is None:  # an unused parameter
            return None, None, None
        if policy is not None and policy.reduce_dtype is not None:
            gradient = gradient.to(policy.reduce_dtype)
        return _relaid(gradient, ctx.sharding, ctx.whole).to(ctx.dtype), None, None


class _Relaid(torch.autograd.Function):
    """A gradient in layout `sharding`; its own gradient gets layout `back`. What `_Gather` is for values, for second derivatives."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, sharding: ShardingSpec | None, back: ShardingSpec | None) -> torch.Tensor:
        ctx.sharding, ctx.back = sharding, back
        return _placed_copy(gradient, _by_identity(sharding), None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _relaid(grads[0], ctx.back, ctx.sharding), None, None


def _relaid(gradient: torch.Tensor, sharding: ShardingSpec | None, back: ShardingSpec | None) -> torch.Tensor:
    if torch.is_grad_enabled():  # a backward pass with create_graph=True
        return _Relaid.apply(gradient, sharding, back)  # pyright: ignore[reportReturnType]
    return _placed_copy(gradient, _by_identity(sharding), None)


def _gathered(source: torch.Tensor, parameter: torch.Tensor, unit: _Unit) -> torch.Tensor:
    """`source`, the values of `parameter`, cast to the dtype of computation and gathered along the unit's axes."""
    policy = unit.policy
    casts = policy is not None and policy.param_dtype is not None and parameter.is_floating_point()
    return _placed_copy(
        source, _by_identity(_whole_sharding(parameter, unit)), policy.param_dtype if casts and policy is not None else None
    )


def _placed(tensor: torch.Tensor, sharding: ByIdentity, dtype: torch.dtype | None) -> torch.Tensor:
    value = load(tensor)
    if dtype is not None:
        with exact_dtypes():
            value = value.astype(to_numpy_dtype(dtype))
    return wrap(placed(value, sharding.value))


_placed_copy = Deferrable("fully_shard", _placed)


@functools.cache
def _by_identity(sharding: ShardingSpec | None) -> ByIdentity:
    """The same object for equal shardings, because deferred operations are compared by identity."""
    return ByIdentity(sharding)


def _whole_sharding(parameter: torch.Tensor, unit: _Unit) -> ShardingSpec | None:
    """The sharding of the gathered parameter; None: that of the parameter."""
    annotation = annotation_of(parameter)
    return None if annotation is None or unit.stage < 3 else _without(annotation, unit.axes)


def _gradient_sharding(parameter: torch.Tensor, unit: _Unit) -> ShardingSpec | None:
    """The sharding of the gradient after it is summed over devices."""
    return annotation_of(parameter) if unit.stage != 2 else state_sharding_of(parameter)


@functools.cache
def _without(sharding: ShardingSpec, axes: tuple[str, ...]) -> ShardingSpec:
    return ShardingSpec(sharding.mesh, without_axes(sharding.partition_spec, axes))


__all__ = ["MixedPrecision", "dissolve", "fully_shard", "is_outermost", "require_no_unit", "unit_of"]
