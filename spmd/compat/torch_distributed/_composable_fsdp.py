"""`torch.distributed.fsdp.fully_shard` on a mesh of type "jax": `spmd.fully_shard` with torch's arguments and defaults.

As in torch, parameters are split along dim 0 over the last dim of the mesh, and replicated over the first of two dims (HSDP). The batch of
a program is the global batch. The outermost module splits it over these axes if it has no layout. Gradients are those of the loss as
written: a mean over the batch is the mean over the batches of all ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, UnshardHandle
from torch.distributed.tensor import Shard

from mesh import device_count
from spmd.base._errors import SpmdError, message
from spmd.compat.torch_distributed._batches import split_batch
from spmd.compat.torch_distributed._dispatch import before
from spmd.compat.torch_distributed._group_of_one import GroupOfOne
from spmd.compat.torch_distributed._state_dicts import register_sharded_state_dict
from spmd.device._layout import annotation_of
from spmd.fsdp import fully_shard as shard_over
from spmd.fsdp import is_outermost, unit_of
from spmd.sharding._device_mesh import is_of_devices, mesh_axes
from spmd.xla_names._distribute import note_device_mesh

TARGET = "torch.distributed.fsdp.fully_shard.__wrapped__"
WRAPPER = "torch.distributed.fsdp.FullyShardedDataParallel.__init__"
_classes: dict[type, type] = {}


def fully_shard(module: Any, *, mesh: Any = None, **options: Any) -> Any:
    """torch's `fully_shard`; on the device it makes a unit of `spmd.fully_shard`.

    Raises:
        SpmdError: an argument asks for something that a single program lacks: offload to the host, a smaller world after the forward pass.
    """
    modules: Sequence[nn.Module] = [module] if isinstance(module, nn.Module) else list(module)
    if not is_of_devices(mesh) and not (mesh is None and _is_ours(modules)):
        return before[TARGET](module, mesh=mesh, **options)
    if mesh is None:
        mesh = init_device_mesh("jax", (device_count(),), mesh_dim_names=("fsdp",))
    _require_possible(options)
    found = mesh_axes(mesh)
    shard, batch = _dims(mesh, options.pop("dp_mesh_dims", None))
    place = options.get("shard_placement_fn")
    for each in modules:
        if any(parameter.device.type == "cpu" for parameter in each.parameters()):
            each.to("jax")
        is_marked = {id(parameter) for parameter in each.parameters() if annotation_of(parameter) is not None}
        shard_over(
            each,
            found.mesh,
            axis=tuple(name for dim in shard for name in found.axes[dim]),
            reshard_after_forward=options.get("reshard_after_forward"),
            mp_policy=options.get("mp_policy"),
            ignored_params=options.get("ignored_params"),
            shard_placement_fn=lambda parameter: _placement(parameter, place),
        )
        for parameter in each.parameters():
            if id(parameter) not in is_marked and annotation_of(parameter) is not None:
                note_device_mesh(parameter, mesh)
        axes = tuple(name for dim in batch for name in found.axes[dim])
        each.register_forward_pre_hook(_Batch(found.mesh, axes).enter, with_kwargs=True, prepend=True)
        each.__class__ = _class_of(type(each))
        register_sharded_state_dict(each)
    return module


class _Batch:
    """Shards the batch that is passed to the outermost unit, and moves it to the device as torch's unit does."""

    def __init__(self, mesh: Any, axes: tuple[str, ...]) -> None:
        self.mesh, self.axes = mesh, axes

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return split_batch((args, kwargs), self.mesh, self.axes, moves=True) if is_outermost(module) else (args, kwargs)


class OneProgramModule(FSDPModule):
    """A unit's methods between steps. The compiler gathers, prefetches and reduces, so the methods for that do nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Indexing a container creates an object of the original class, not a unit."""
        theirs: Any = cls.__mro__[cls.__mro__.index(FSDPModule) + 1]
        made = theirs.__new__(theirs, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __copy__(self) -> Any:
        """A unit with the attributes of this one. copy's own way would call `__new__` above, without arguments."""
        made = nn.Module.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The same with copies of them."""
        made = memo[id(self)] = nn.Module.__new__(type(self))
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there are no streams, no buckets, and no gradients that remain to be summed."""

    def _get_fsdp_state(self) -> Any:
        """The state whose hooks `register_fsdp_forward_method` runs around a method: those of forward."""
        return _Around()

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        return super(FSDPModule, self)._apply(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def unshard(self, async_op: bool = False) -> Any:
        """Do nothing. The returned handle's `wait` does nothing either."""
        return UnshardHandle() if async_op else None

    reshard = reset_iter_state = set_is_last_backward = set_requires_gradient_sync = set_requires_all_reduce = _nothing
    set_reshard_after_forward = set_reshard_after_backward = set_modules_to_forward_prefetch = set_modules_to_backward_prefetch = _nothing
    set_post_optim_event = set_force_sum_reduction_for_comms = set_unshard_in_backward = _nothing

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Accept only 1: the gradient is that of the loss as written, over the whole batch."""
        if factor != 1:
            raise SpmdError(
                message(
                    f"set_gradient_divide_factor({factor}): gradients here are those of the loss as written",
                    "one program's loss is over the whole batch; there is no sum over ranks to divide",
                    fix=f"loss = loss / {factor}",
                )
            )

    def _refused(self, *args: Any, **kwargs: Any) -> None:
        raise SpmdError(message("the compiler chooses the collectives of a program, and none can be replaced", fix="leave the call out"))

    set_custom_all_gather = set_custom_reduce_scatter = set_all_reduce_hook = _refused


def refused_wrapper(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    """`FullyShardedDataParallel(module)`, FSDP1. With a single rank it would shard nothing, so it is refused on the device.

    Raises:
        SpmdError: the module is on the device.
    """
    if isinstance(module, nn.Module) and any(parameter.device.type == "jax" for parameter in module.parameters()):
        what = (
            "FullyShardedDataParallel shards a flat parameter over ranks, but device 'jax' has a single rank, so nothing would be sharded"
        )
        raise SpmdError(message(what, fix="torch.distributed.fsdp.fully_shard(module, mesh=init_device_mesh('jax', (8,)))"))
    before[WRAPPER](self, module, *args, **kwargs)


class _Around:
    """The unit's hooks, under torch's names."""

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return unit_of(module).enter(module, args, kwargs)

    def _post_forward(self, module: nn.Module, args: Any, result: Any) -> Any:
        return unit_of(module).leave(module, args, result)


def _is_ours(modules: Sequence[nn.Module]) -> bool:
    """If no mesh is given: whether modules are on the device, or the process group is our group of one."""
    kinds = {parameter.device.type for module in modules for parameter in module.parameters()}
    dist = torch.distributed
    return "jax" in kinds or (dist.is_initialized() and isinstance(dist.group.WORLD, GroupOfOne))


def _dims(mesh: Any, dims: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the mesh dims over which parameters are split, and of those over which the batch is split."""
    if dims is None:
        every = tuple(range(mesh.ndim))
        return every[-1:], every
    names = list(mesh.mesh_dim_names)

    def positions(given: Any) -> tuple[int, ...]:
        return tuple(names.index(name) for name in ((given,) if isinstance(given, str) else given or ()))

    return positions(dims.shard), (*positions(dims.replicate), *positions(dims.shard))


def _placement(parameter: nn.Parameter, choose: Any) -> Any:
    placement = None if choose is None else choose(parameter)
    if placement is None:
        return Shard(0) if parameter.dim() else None
    if not isinstance(placement, Shard):
        fix = "return Shard(dim), and call fully_shard on the module with its own mesh"
        raise SpmdError(message(f"shard_placement_fn returned {placement!r}: a unit has one mesh", fix=fix))
    return placement


def _require_possible(options: dict[str, Any]) -> None:
    reshard = options.get("reshard_after_forward")
    if reshard is not None and not isinstance(reshard, bool):
        what = f"reshard_after_forward={reshard!r} asks for parameters that are partly resharded after forward"
        raise SpmdError(message(what, fix="reshard_after_forward=True, or False to keep them whole"))
    if isinstance(options.get("offload_policy"), CPUOffloadPolicy):
        raise SpmdError(
            message("CPUOffloadPolicy is not supported: the parameters of a program are on its devices", fix="leave offload_policy out")
        )


def _class_of(theirs: type) -> type:
    """The class `FSDP<name>`, named as in torch."""
    if issubclass(theirs, OneProgramModule):
        return theirs
    if theirs not in _classes:
        _classes[theirs] = type(f"FSDP{theirs.__name__}", (OneProgramModule, theirs), {"__module__": theirs.__module__})
    return _classes[theirs]


__all__ = ["TARGET", "WRAPPER", "OneProgramModule", "fully_shard", "refused_wrapper"]
