"""`XlaFullyShardedDataParallel`: torch_xla's FSDP of replicas, as far as a single program can express it.

Each replica had its own batch, and gradients were averaged. Here there is one global batch, so gradients need no averaging. Parameters are
split over all devices, and each unit gathers its own while it runs (`spmd.fully_shard`). There is no flat parameter and no shard
per process: `state_dict()` contains global tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from mesh import split_largest_dim
from spmd.base._errors import SpmdError, message
from spmd.compat.torch_xla._meshes import get_1d_mesh
from spmd.fsdp import fully_shard
from spmd.sharding._annotate import mark_sharding
from spmd.xla_names._fsdp_v2 import recursive_wrap

_AXIS = "fsdp"
# options that configure the replicas' communication and change no values
_TUNING = {
    "execute_sharding_on_init", "optimization_barrier_in_forward", "optimization_barrier_in_backward", "sync_on_finalization",
    "disable_reshard_on_root", "shard_param_on_dim_0", "pin_layout_in_collective_ops", "reduce_scatter_bucket_size_mb",
    "coalesce_all_gather_ops", "flatten_parameters", "_shard_size_multiple", "_use_xla_patched_linear", "_debug_msg", "_debug_print",
}  # fmt: skip


class WrapError(SpmdError, RuntimeError):
    """A module cannot be wrapped."""


class XlaFullyShardedDataParallel(nn.Module):
    """A module whose parameters, gradients and optimizer state are split over all devices.

    Args:
        module: moved to the device if it is not there.
        reshard_after_forward: gather parameters again for the backward pass.
        compute_dtype: dtype in which parameters are gathered and used.
        buffer_dtype: dtype to which floating-point buffers are cast, once.
        fp32_reduce_scatter: sum gradients in float32.
        auto_wrap_policy: submodules for which it returns True become separate units.
        auto_wrapper_callable: wraps these submodules instead of this class.
        param_init_fn: called with a module whose parameters are on "meta", to initialize them on the device.
        options: torch_xla's other arguments, which configure the replicas' communication.

    Raises:
        WrapError: the module is already wrapped or has no forward, or an option selects a subset of replicas (a RuntimeError).
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        **options: Any,
    ) -> None:
        _require_wrappable(module, options)
        super().__init__()
        shared = {"reshard_after_forward": reshard_after_forward, "compute_dtype": compute_dtype, "buffer_dtype": buffer_dtype}
        if auto_wrap_policy is not None:
            wrapper = auto_wrapper_callable or XlaFullyShardedDataParallel
            recursive_wrap(module, auto_wrap_policy, wrapper, **shared, fp32_reduce_scatter=fp32_reduce_scatter)
        if param_init_fn is not None and any(p.is_meta for p in module.parameters()):
            param_init_fn(module)
        self.module = module.to("jax")
        if buffer_dtype is not None:
            for buffer in module.buffers():
                buffer.data = buffer.data.to(buffer_dtype) if buffer.is_floating_point() else buffer.data
        narrow = compute_dtype if compute_dtype not in (None, torch.float32) else None
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32 if fp32_reduce_scatter and narrow else None)
        self._mesh = get_1d_mesh(_AXIS)
        fully_shard(module, self._mesh, axis=_AXIS, reshard_after_forward=reshard_after_forward, mp_policy=policy if narrow else None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output. Inputs are split along their first dim, the batch."""
        return self.module(*_split(args, self._mesh), **_split(kwargs, self._mesh))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, groups: Any = None) -> torch.Tensor:
        """`torch.nn.utils.clip_grad_norm_` on the parameters, whose gradients are global."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def __getattr__(self, name: str) -> Any:
        """Look up attributes that the wrapper lacks on the module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # pyright: ignore[reportIndexIssue]


def _split(values: Any, mesh: Any) -> Any:
    """Inputs without a layout, split along the batch; marked inputs keep their layout."""
    from spmd.base._torch import pytree
    from spmd.device._storage import buffer_of, recording

    def place(t: torch.Tensor) -> torch.Tensor:
        if t.device.type != "jax" or not t.dim() or recording.get() is not None or buffer_of(t).annotation is not None or not t.is_leaf:
            return t
        spec = split_largest_dim((None,) * t.dim(), (t.shape[0], *[1] * (t.dim() - 1)), mesh, _AXIS)
        whole = tuple(t.shape) == tuple(buffer_of(t).shape) and t.is_contiguous() and not t.storage_offset()
        return mark_sharding(t, mesh, spec) if whole else t

    return pytree.tree_map_only(torch.Tensor, place, values)


def consolidate_sharded_model_checkpoints(*args: Any, **kwargs: Any) -> Any:
    """Refused: checkpoint files of one replica's shard are torch_xla's own format.

    Raises:
        WrapError: always.
    """
    what = "sharded checkpoint files contain a replica's flat shards, which only torch_xla can read"
    raise WrapError(message(what, fix="consolidate them with torch_xla once; here model.state_dict() has global tensors"))


def _require_wrappable(module: nn.Module, options: dict[str, Any]) -> None:
    partial: Sequence[str] = [n for n in ("sharding_groups", "sharding_rank", "sharding_world_size") if options.pop(n, None) is not None]
    if partial:
        fix = "spmd.fully_shard(module, mesh, axis=...) splits over one axis of a mesh"
        raise WrapError(message(f"{', '.join(partial)} select a subset of replicas, but there are none", fix=fix))
    unknown = sorted(options.keys() - _TUNING)
    if unknown:
        raise WrapError(message(f"XlaFullyShardedDataParallel has no option {', '.join(unknown)}", fix="leave it out"))
    if isinstance(module, XlaFullyShardedDataParallel):
        raise WrapError(message("the module is already wrapped", fix="wrap inner modules first, the whole model last"))
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        raise WrapError(message(f"{type(module).__name__} has no forward", fix="wrap its elements"))
