"""CPU tensors among the arguments of a trace. Each is an input of the program, and the trace gets a copy to the host of that input.

So everything that a function may do with a copy to the host (`spmd.device._host_copies`) it may do with such an argument: move it to the
device, compute with it, read numbers that the host knows. It cannot write to it, since the caller's tensor would not change.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from spmd.base._convert import exact_dtypes
from spmd.base._errors import TraceError, message
from spmd.base._torch import hooks_of_leaf
from spmd.device._host_copies import HostCopy, computed_on_host, stands_for_argument
from spmd.device._storage import strided_alias, wrap_host
from spmd.program.find._static import attributes_of
from spmd.program.trace._memory_order import memory_order, stored_values


def host_argument(given: torch.Tensor, storage: torch.Tensor | None = None) -> HostCopy:
    """What a trace gets for a CPU tensor: a copy of a device tensor of its shape, strides and dtype.

    Args:
        given: the CPU tensor.
        storage: a device tensor that is all of a storage, with `stored_values(given)`; by default a new one.

    Raises:
        TraceError: the tensor is sparse, nested or of a subclass, or it has a gradient or hooks, which the trace would not have.
    """
    _require_plain(given)
    is_dense = given.is_contiguous()
    with exact_dtypes(), torch.no_grad():
        stride = given.stride() if is_dense else memory_order(tuple(given.shape), given.stride()).stride
        storage = wrap_host(stored_values(given)) if storage is None else storage
        held = strided_alias(storage, tuple(given.shape), stride, 0)
        held = torch.ops.aten._conj(held) if given.is_conj() else held
        held = torch.ops.aten._neg_view(held) if given.is_neg() else held
    copy = stands_for_argument(HostCopy(held, type(given)))
    vars(copy).update(attributes_of(given) or ())
    copy.requires_grad_(given.requires_grad)
    return copy


def _require_plain(given: torch.Tensor) -> None:
    if given.layout != torch.strided or given.is_nested:
        kind = "nested" if given.is_nested else str(given.layout).removeprefix("torch.")
        what = f"an argument of the compiled function is a tensor of layout {kind}, and device 'jax' has only dense tensors"
        fix = "torch.nested.to_padded_tensor(x, 0.0)" if given.is_nested else "pass x.to_dense(), or let the function close over x"
        raise TraceError(message(what, fix=fix))
    if type(given) not in (torch.Tensor, nn.Parameter):
        what = f"an argument of the compiled function is a CPU tensor of class {type(given).__name__}"
        raise TraceError(message(what, "a trace has a plain tensor in its place", fix="pass x.as_subclass(torch.Tensor), or x.to('jax')"))
    if given.requires_grad and (given.grad is not None or any(hooks_of_leaf(given))):
        what = f"an argument of the compiled function is a CPU tensor with {'a gradient' if given.grad is not None else 'hooks'}"
        raise TraceError(message(what, "a trace has a tensor without them in its place", fix="pass x.to('jax'), or x.detach()"))


def require_unchanged(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise TraceError if a trace gave one of its arguments a gradient, or changed whether it requires one.

    Args:
        pairs: what the trace got for each CPU tensor, and the tensor.
    """
    for copy, given in pairs:
        if copy.grad is not None:
            raise computed_on_host("the backward pass gives it a gradient")
        if copy.requires_grad != given.requires_grad:
            raise computed_on_host("requires_grad_()")


__all__ = ["host_argument", "require_unchanged"]
