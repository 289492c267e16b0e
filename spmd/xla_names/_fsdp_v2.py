"""`SpmdFullyShardedDataParallel`: torch_xla's FSDPv2, a wrapper that marks a module's parameters and constrains its outputs.

    model = SpmdFullyShardedDataParallel(GPT(), mesh, auto_wrap_policy=policy)      # the mesh has an axis "fsdp"

The wrapped module keeps its parameters. Each is split along its largest dim that the axis divides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mesh import Mesh, SpecError, split_largest_dim
from spmd.base._errors import SpmdError, message
from spmd.base._wrong_arguments import require_module, require_options
from spmd.device._storage import buffer_of
from spmd.sharding._annotate import as_mesh, mark_sharding
from spmd.xla_names._barrier import apply_backward_optimization_barrier
from spmd.xla_names._global_mesh import mesh_or_global

AXIS = "fsdp"
ShardOutput = Callable[[Any, Mesh], None]


class SpmdFullyShardedDataParallel(nn.Module):
    """A module whose parameters are split over axis "fsdp" of a mesh, and whose outputs are split along the batch.

    Args:
        module: the module to wrap; moved to device 'jax'.
        mesh: a mesh with an axis "fsdp"; None: the global mesh.
        shard_output: called with (output, mesh) after `forward` to constrain the output. None: dim 0 of the output, or of the
            first tensor of a tuple, is split over "fsdp" (with `extra_data_axis`, over both).
        auto_wrap_policy: called as `policy(module=, recurse=, unwrapped_params=)`. Submodules for which it returns True are wrapped
            separately, with the same mesh, `shard_output` and `extra_data_axis`.
        auto_wrapper_callable: wraps these submodules instead of this class.
        extra_data_axis: another axis that splits the batch, such as data-parallel slices.

    Raises:
        SpecError: the mesh lacks an axis.
        SpmdError: `module` is no module, is already wrapped, has no forward, or returns a value that the default `shard_output` cannot
            handle.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Any = None,
        shard_output: ShardOutput | None = None,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
    ) -> None:
        _require_wrappable(module, auto_wrap_policy is not None)
        wrapping = ("auto_wrap_policy", auto_wrap_policy), ("auto_wrapper_callable", auto_wrapper_callable)
        require_options([("shard_output", shard_output), *wrapping], "spmd.SpmdFullyShardedDataParallel")
        mesh = as_mesh(mesh_or_global(mesh, "SpmdFullyShardedDataParallel"))
        for axis in (AXIS, *([extra_data_axis] if extra_data_axis else [])):
            if axis not in mesh.axis_names:
                raise SpecError(message(f"The provided {axis} axis is not in the mesh.", f"it is {mesh}", fix=f"name one axis '{axis}'"))
        super().__init__()
        if auto_wrap_policy is not None:
            wrapper = auto_wrapper_callable or SpmdFullyShardedDataParallel
            options: dict[str, Any] = {"mesh": mesh, "shard_output": shard_output, "extra_data_axis": extra_data_axis}
            if auto_wrapper_callable is not None:
                options.pop("extra_data_axis")
            recursive_wrap(module, auto_wrap_policy, wrapper, **options)
        self._orig_module = module.to("jax")
        self._mesh = mesh
        self._extra_data_axis = extra_data_axis
        self._shard_output: ShardOutput = shard_output or self._shard_first_tensor
        for parameter in module.parameters():
            if buffer_of(parameter).annotation is None:
                whole = (None,) * parameter.dim()
                mark_sharding(parameter, mesh, split_largest_dim(whole, parameter.shape, mesh, AXIS))
        apply_backward_optimization_barrier(module)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._orig_module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._orig_module(*args, **kwargs)
        self._shard_output(output, self._mesh)
        return output

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the wrapper lacks on the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self._orig_module[key]  # pyright: ignore[reportIndexIssue]

    def _shard_first_tensor(self, output: Any, mesh: Mesh) -> None:
        first = output if isinstance(output, torch.Tensor) else output[0] if isinstance(output, tuple) and output else None
        if not isinstance(first, torch.Tensor):
            raise SpmdError(
                message(
                    f"the wrapped {type(self._orig_module).__name__} returned a {type(output).__name__}, not a tensor or a tuple of them",
                    fix="pass shard_output: def shard_output(output, mesh): mark_sharding(output.logits, mesh, ('fsdp', None, None))",
                )
            )
        if first.dim():
            batch = (self._extra_data_axis, AXIS) if self._extra_data_axis else AXIS
            mark_sharding(first, mesh, (batch, *[None] * (first.dim() - 1)))


def recursive_wrap(module: nn.Module, auto_wrap_policy: Callable[..., bool], wrapper_cls: Callable[..., nn.Module], **options: Any) -> None:
    """Wrap the submodules of `module` for which the policy returns True, innermost first; a shared submodule once."""
    wrapped: dict[int, nn.Module] = {}

    def descend(parent: nn.Module) -> int:
        """Wrap submodules of `parent`; returns the number of its parameters' elements that are wrapped."""
        num_wrapped = 0
        for name, child in list(parent._modules.items()):  # named_children would skip the second use of a shared module
            if child is None:
                continue
            size = sum(p.numel() for p in child.parameters())
            if id(child) in wrapped:
                setattr(parent, name, wrapped[id(child)])
                num_wrapped += size
                continue
            inside = descend(child) if auto_wrap_policy(module=child, recurse=True, unwrapped_params=size) else 0
            if _has_forward(child) and auto_wrap_policy(module=child, recurse=False, unwrapped_params=size - inside):
                wrapped[id(child)] = wrapper_cls(child, **options)
                setattr(parent, name, wrapped[id(child)])
                num_wrapped += size
            else:
                num_wrapped += inside
        return num_wrapped

    descend(module)


def _has_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) is not nn.Module.forward and not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _require_wrappable(module: nn.Module, is_root: bool) -> None:
    require_module(module, "SpmdFullyShardedDataParallel", "spmd.SpmdFullyShardedDataParallel(model, mesh)")
    if isinstance(module, SpmdFullyShardedDataParallel) or (
        is_root and any(isinstance(m, SpmdFullyShardedDataParallel) for m in module.modules())
    ):
        raise SpmdError(
            message(
                "the module, or a module in it, is already wrapped",
                fix="wrap inner modules first and leave auto_wrap_policy out, or wrap once",
            )
        )
    if not _has_forward(module):
        raise SpmdError(message(f"{type(module).__name__} has no forward, so its outputs cannot be constrained", fix="wrap its elements"))
