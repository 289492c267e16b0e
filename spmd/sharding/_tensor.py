"""`XLAShardedTensor`: an ordinary PyTorch tensor on device 'jax' that shows its layout.

The class only adds properties: every operation goes through PyTorch's own dispatch. The annotation lives on the tensor's storage,
so all aliases of a marked tensor share it. The rules of annotation are in `_annotate`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from jax.sharding import NamedSharding
from torch.overrides import get_default_nowrap_functions

from mesh import Mesh, PartitionSpec, ShardingSpec, ShardingType
from spmd.base._jax import is_tracer
from spmd.base._torch import DisableTorchFunctionSubclass
from spmd.device._arrays import is_readable
from spmd.device._host_copies import is_host_copy
from spmd.device._layout import annotation_of, hand_over
from spmd.device._serialize import host_copy
from spmd.device._storage import buffer_of, is_whole, load, recording
from spmd.sharding._local_shards import load_shards
from spmd.sharding._shard import XLAShard

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad


class XLAShardedTensor(torch.Tensor):
    """A tensor on device 'jax' with a sharding over a mesh, created by `mark_sharding` and by operations on such tensors.

    `XLAShardedTensor(t)` wraps a tensor without marking it; `spmd.mark_sharding` is the usual way. Methods that DTensor has too
    (`redistribute`, `full_tensor`, `placements`) take and return DTensor's types; see `spmd.xla_names._distribute`.
    """

    redistribute: Any  # (device_mesh, placements, *, async_op=False): a new tensor with another layout
    full_tensor: Any  # (): a plain, replicated tensor
    to_local: Any  # (): the tensor itself
    placements: Any
    device_mesh: Any

    _lay_out: Any  # (tensor, mesh or mesh shape, spec or placements); set by `spmd.xla_names._distribute`

    def __new__(
        cls, elem: torch.Tensor, mesh_shape: Any = None, partition_spec: Any = None, *, requires_grad: bool | None = None
    ) -> XLAShardedTensor:
        """A sharded tensor with the values of `elem`: on its storage if it is on device 'jax', else moved there. A leaf stays a leaf.

        Args:
            elem: the tensor to wrap.
            mesh_shape: a mesh, or the shape of a mesh over all devices; the result is then marked.
            partition_spec: a spec, or DTensor placements; only with `mesh_shape`.
            requires_grad: if given, the result is a new leaf with this `requires_grad`.
        """
        if requires_grad is not None:
            elem = elem.detach().requires_grad_(requires_grad)
        moved = elem if elem.device.type == "jax" else elem.detach().to("jax")
        plain = moved.as_subclass(torch.Tensor)
        made = become_sharded(plain.detach().requires_grad_(elem.requires_grad) if elem.is_leaf else plain)
        return made if mesh_shape is None else cls._lay_out(made, mesh_shape, partition_spec)

    @property
    def sharding_spec(self) -> ShardingSpec | None:
        """Mesh and PartitionSpec: from the annotation, else from the value's own layout, else None (a single device)."""
        return sharding_of(self)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the layout, or None."""
        spec = self.sharding_spec
        return None if spec is None else spec.mesh

    @property
    def partition_spec(self) -> PartitionSpec | None:
        """One entry per dim: the mesh axis or axes that split it, or None. None for a tensor without a layout."""
        spec = self.sharding_spec
        return None if spec is None else spec.partition_spec

    @property
    def sharding_type(self) -> ShardingType:
        """Replicated, tiled over all devices, tiled over some axes, ..."""
        spec = self.sharding_spec
        if spec is None:
            return ShardingType.UNKNOWN
        return ShardingType.REPLICATED if spec.is_replicated else spec.sharding_type

    @property
    def global_tensor(self) -> torch.Tensor:
        """The same tensor as a plain `torch.Tensor`: same storage, same node in autograd's graph."""
        return self.as_subclass(torch.Tensor)

    @property
    def local_shards(self) -> list[XLAShard]:
        """The shards on this process's devices, in device order."""
        buffer = buffer_of(self)
        value = buffer.raw() if is_whole(self, buffer) else load(self)
        return [XLAShard.of_array(s.data, self._inside(s.index), s.replica_id, s.device) for s in value.addressable_shards]

    def _inside(self, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """The slices of a stored shard without its padding."""
        ends = [None if s.stop is None else min(s.stop, n) for s, n in zip(index, self.shape, strict=True)]
        return tuple(s if end is None else slice(min(s.start or 0, end), end) for s, end in zip(index, ends, strict=True))

    def load_local_shards_(self, shards: Sequence[XLAShard]) -> None:
        """Replace the tensor's values by `shards`: one per device of this process, each of the layout's shape, all copies equal.

        Raises:
            ShardError: a device has no shard or two, a shard has the wrong shape or dtype, copies of one shard differ, or the
                tensor is replicated.
        """
        load_shards(self, shards)

    def numpy(self, *, force: bool = False) -> Any:
        """The values as a numpy array, gathered on the host. `force` as in torch."""
        return self.cpu().as_subclass(torch.Tensor).numpy(force=force)

    @property
    def grad(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The gradient. Outside compiled functions it gets the tensor's layout."""
        grad = _GRAD.__get__(self)
        return grad if grad is None else _laid_out_like(grad, buffer_of(self).annotation)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        _GRAD.__delete__(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Memory of the same shape that is assigned to `data` gets the tensor's layout if it has none.

        Memory that is part of other memory has no layout of its own, so the tensor gets a copy. A property `data` would do the same, but
        Dynamo could not read it.
        """
        if name == "data":
            _set_data(self, value)
        else:
            super().__setattr__(name, value)

    def __copy__(self) -> XLAShardedTensor:
        return become_sharded(copy.copy(self.global_tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> XLAShardedTensor:
        if id(self) not in memo:
            plain = copy.deepcopy(self.global_tensor if not self.is_leaf else self.global_tensor.detach(), memo)
            hand_over(self, plain)
            plain.requires_grad_(self.requires_grad)
            plain.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = become_sharded(plain)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a CPU tensor that carries its layout as plain data (see `spmd.device._serialize`)."""
        return host_copy(self).__reduce_ex__(protocol)

    def __format__(self, format_spec: str) -> str:
        """Format a 0-dim tensor as its Python number. torch does so only for its own class, which a marked tensor does not have."""
        if self.dim() == 0 and not self.is_meta and not isinstance(self, torch.nn.Parameter):
            return self.detach().item().__format__(format_spec)
        return object.__format__(self, format_spec)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give results this class by setting `__class__`. torch would return aliases, and an alias cannot be detached in place."""
        if torch.compiler.is_dynamo_compiling():
            return super().__torch_function__(func, types, args, kwargs or {})
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with DisableTorchFunctionSubclass():
            out = func(*args, **({} if kwargs is None else kwargs))
            return out if func in get_default_nowrap_functions() else _of_class(out, cls, (*args, *(kwargs or {}).values()))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        buffer = buffer_of(self) if self.device.type == "jax" else None
        if recording.get() is not None and buffer is not None and is_tracer(buffer.value):  # refused by name, as that of any tensor
            return repr(self.as_subclass(torch.Tensor))
        spec = self.sharding_spec if buffer is None or buffer.dropped is None else None
        if spec is None and buffer is None:  # torch keeps the class in .cpu()
            return repr(self.as_subclass(torch.Tensor))
        placed = "" if spec is None else f", spec={tuple(spec.partition_spec)}, mesh={spec.mesh}"
        shape = f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        grad = ", requires_grad=True" if self.requires_grad and self.is_leaf else ""
        unreadable = self.is_meta if buffer is None else buffer.dropped is not None or not is_readable(buffer.value)
        if unreadable or self.numel() > 1000:
            return f"{type(self).__name__}({shape}{placed}{grad})"
        values = repr(self.detach().as_subclass(torch.Tensor).cpu()).removeprefix("tensor(").removesuffix(")")
        return f"{type(self).__name__}({values}{placed}{grad})"


def _of_class(out: Any, cls: type[XLAShardedTensor], given: Sequence[Any]) -> Any:
    """A function's result with its new tensors changed to class `cls` in place; tensors that are among `given` become aliases."""
    if isinstance(out, torch.Tensor):
        if isinstance(out, cls) or is_host_copy(out):
            return out
        is_given = any(a is out or (isinstance(a, (tuple, list)) and any(item is out for item in a)) for a in given)
        if is_given or type(out) is not torch.Tensor:
            return out.as_subclass(cls)
        out.__class__ = cls
        return out
    if isinstance(out, (tuple, list)):
        return type(out)(_of_class(item, cls, given) for item in out)
    return out


class XLAShardedParameter(XLAShardedTensor, torch.nn.Parameter):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A marked `nn.Parameter`. Modules and optimizers still see a Parameter."""

    __torch_function__ = torch.nn.Parameter.__torch_function__  # pyright: ignore[reportAssignmentType]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True) -> XLAShardedTensor:  # pyright: ignore[reportInconsistentConstructor]
        plain = data.as_subclass(torch.Tensor) if isinstance(data, XLAShardedTensor) else data
        return become_sharded(torch.nn.Parameter(plain, requires_grad))

    def __copy__(self) -> XLAShardedTensor:
        return become_sharded(torch.nn.Parameter(self.global_tensor.detach(), self.requires_grad))

    def __deepcopy__(self, memo: dict[int, Any]) -> XLAShardedTensor:
        if id(self) not in memo:
            twin = torch.nn.Parameter(copy.deepcopy(self.global_tensor.detach(), memo), self.requires_grad)
            hand_over(self, twin)
            memo[id(self)] = become_sharded(twin)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        host = host_copy(self)
        plain = torch.nn.Parameter(host.detach(), self.requires_grad)
        vars(plain).update(vars(host))
        return plain.__reduce_ex__(protocol)


def sharding_of(tensor: torch.Tensor) -> ShardingSpec | None:
    """The layout of a tensor: its annotation, else the layout of its value, else None. Off the device: the recorded layout."""
    if tensor.device.type != "jax":
        return annotation_of(tensor)
    buffer = buffer_of(tensor)
    if buffer.annotation is not None and is_whole(tensor, buffer):
        return buffer.annotation
    value = load(tensor)
    if is_tracer(value) or not isinstance(value.sharding, NamedSharding):
        return None
    return ShardingSpec.from_jax(value.sharding, tensor.dim())


def _laid_out_like(grad: torch.Tensor, annotation: ShardingSpec | None) -> torch.Tensor:
    buffer = buffer_of(grad) if grad.device.type == "jax" else None
    if annotation is None or buffer is None or buffer.annotation is not None or buffer.dropped is not None:
        return grad
    if recording.get() is not None or is_tracer(buffer.value) or not is_whole(grad, buffer) or grad.dim() != len(annotation.partition_spec):
        return grad
    buffer.annotate(annotation)
    return become_sharded(grad)


def _set_data(tensor: torch.Tensor, value: Any) -> None:
    """`tensor.data = value`. In a traced function the tensor gets its old memory, with its layout, back when the trace ends."""
    keeps = (
        isinstance(value, torch.Tensor)
        and tensor.device.type == value.device.type == "jax"
        and tensor.shape == value.shape
        and recording.get() is None
        and buffer_of(tensor) is not buffer_of(value)
        and buffer_of(tensor).annotation is not None
    )
    if not keeps:
        _DATA.__set__(tensor, value)
        return
    with torch.no_grad():
        old = tensor.detach()
        held = buffer_of(value)
        is_part = value.shape != held.shape or not value.is_contiguous() or value.storage_offset()
        _DATA.__set__(tensor, value.clone(memory_format=torch.contiguous_format) if is_part else value)
    hand_over(old, tensor)


def become_sharded(tensor: torch.Tensor) -> XLAShardedTensor:
    """Change the class of `tensor` in place to the sharded class, which shows its layout; a Parameter stays a Parameter.

    A tensor of a user's own class keeps that: its methods and what other code asks it for.
    """
    if type(tensor) is torch.Tensor:
        tensor.__class__ = XLAShardedTensor
    elif type(tensor) is torch.nn.Parameter:
        tensor.__class__ = XLAShardedParameter
    return tensor  # pyright: ignore[reportReturnType]


def become_plain(tensor: torch.Tensor) -> torch.Tensor:
    """Undo `become_sharded`: the same object is a `torch.Tensor` or `torch.nn.Parameter` again."""
    if isinstance(tensor, XLAShardedTensor):
        tensor.__class__ = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor  # pyright: ignore[reportAttributeAccessIssue]
    return tensor
