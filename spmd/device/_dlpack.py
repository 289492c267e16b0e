"""DLPack export of device tensors, as copies on the host. A capsule never contains an address without memory.

    np.from_dlpack(x)                   # the current values, read-only
    torch.from_dlpack(x)                # a CPU tensor

As with `x.cpu()`, later writes to either side do not reach the other. A consumer that forbids a copy gets an error.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.dlpack

from spmd.base._errors import called_at, message
from spmd.base._torch import torch_at_least
from spmd.device._copy import to_host
from spmd.device._trace_lock import retried
from spmd.patches._table import current, replace

_CPU = (1, 0)  # kDLCPU, number 0
_READ_ONLY_SINCE = (1, 0)  # the first DLPack version with a read-only flag


def register() -> None:
    """Patch DLPack's methods and torch's DLPack functions to support tensors of device 'jax'."""
    replace("torch.Tensor.__dlpack__", dlpack)
    replace("torch.Tensor.__dlpack_device__", dlpack_device)
    for target in ("torch.to_dlpack", "torch.utils.dlpack.to_dlpack", "torch._C._to_dlpack"):
        replace(target, to_dlpack)
    replace("torch._C._to_dlpack_versioned", to_dlpack_versioned)


def dlpack(
    self: torch.Tensor, *, stream: Any = -1, max_version: Any = None, dl_device: Any = None, copy: bool | None = None, **more: Any
) -> Any:
    """`tensor.__dlpack__()`: a capsule of a host copy, read-only if the consumer's version supports that.

    Args:
        more: `read_only`, which torch 2.14 added.

    Raises:
        BufferError: the tensor requires grad, or the consumer asks for a stream, another device or no copy.
    """
    if self.device.type != "jax":
        return _torchs_dlpack(self, stream=stream, max_version=max_version, dl_device=dl_device, copy=copy, **more)
    if stream not in (None, -1):
        raise BufferError(message("device 'jax' has no streams for DLPack", f"stream {stream} was asked for", fix="pass stream=None"))
    return _capsule(self, max_version, dl_device, copy, more)


def dlpack_device(self: torch.Tensor) -> Any:
    """`tensor.__dlpack_device__()`: the CPU, because the export is a copy on the host."""
    return _torchs_dlpack_device(self) if self.device.type != "jax" else (torch.utils.dlpack.DLDeviceType.kDLCPU, 0)


def to_dlpack(tensor: torch.Tensor, *, dl_device: Any = None, copy: bool | None = None, **more: Any) -> Any:
    """`torch.utils.dlpack.to_dlpack`."""
    if tensor.device.type != "jax":
        return _torchs_to_dlpack(tensor, dl_device=dl_device, copy=copy, **more)
    return _capsule(tensor, None, dl_device, copy, more)


def to_dlpack_versioned(tensor: torch.Tensor, *, dl_device: Any = None, copy: bool | None = None, **more: Any) -> Any:
    """`torch._C._to_dlpack_versioned`."""
    if tensor.device.type != "jax":
        return _torchs_to_dlpack_versioned(tensor, dl_device=dl_device, copy=copy, **more)
    return _capsule(tensor, _READ_ONLY_SINCE, dl_device, copy, more)


def _capsule(tensor: torch.Tensor, max_version: Any, dl_device: Any, copy: bool | None, more: dict[str, Any]) -> Any:
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    if copy is False or (dl_device is not None and tuple(dl_device) != _CPU):
        raise BufferError(
            message(
                "the memory of a tensor on device 'jax' cannot be exported",
                *called_at(),
                "DLPack gets a copy on the host; " + ("copy=False was asked for" if copy is False else f"device {dl_device} was asked for"),
                fix="leave out copy= and device=, or pass tensor.cpu()",
            )
        )
    host = retried(to_host)(tensor)
    if more and not (torch_at_least("2.14") and more == {"read_only": False}):
        return _torchs_dlpack(host, max_version=max_version, **more)
    if max_version is None or tuple(max_version) < _READ_ONLY_SINCE:
        return _torchs_to_dlpack(host)
    if host.dtype == torch.bfloat16 or (host.dtype.itemsize == 1 and host.dtype.is_floating_point):  # numpy does not have these dtypes
        return _torchs_to_dlpack_versioned(host)
    array = host.numpy()
    array.flags.writeable = False
    return array.__dlpack__(max_version=max_version)  # pyright: ignore[reportCallIssue]


_torchs_dlpack = torch.Tensor.__dlpack__
_torchs_dlpack_device = torch.Tensor.__dlpack_device__
_torchs_to_dlpack = current("torch._C._to_dlpack")
_torchs_to_dlpack_versioned = current("torch._C._to_dlpack_versioned")
