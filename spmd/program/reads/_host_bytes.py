"""The values of a CPU tensor as bytes, to compare and to restore."""

from __future__ import annotations

from typing import Any

import torch

from spmd.base._torch import DisableTorchFunctionSubclass, are_functorch_transforms_active, without_functorch_transforms


def host_bytes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Shape, dtype, requires_grad and bytes of a CPU tensor; of a sparse tensor also those of its indices and values."""
    if are_functorch_transforms_active():  # they wrap all results, also of operations on tensors that they do not know
        with without_functorch_transforms():
            return host_bytes(tensor)
    with DisableTorchFunctionSubclass(), torch.no_grad():
        if tensor.layout != torch.strided:
            parts = [host_bytes(part) for part in _parts(tensor)]
            return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad, b"", str(tensor.layout), *parts
        plain = tensor.detach().as_subclass(torch.Tensor)
        values = plain.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
        return (
            tuple(plain.shape),
            str(plain.dtype),
            plain.requires_grad,
            values.view(torch.uint8).numpy().tobytes() if values.numel() else b"",
        )


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    return tensor.ccol_indices(), tensor.row_indices(), tensor.values()


def put_host_bytes(tensor: torch.Tensor, content: tuple[Any, ...]) -> None:
    """Restore the values that `host_bytes` gave, unless the tensor has a different shape now or is sparse."""
    shape, _, _, values, *_ = content
    if tensor.shape == shape and values:
        with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # in this order: inference_mode(False) turns gradients on
            tensor.copy_(torch.frombuffer(bytearray(values), dtype=tensor.dtype).reshape(shape))


__all__ = ["host_bytes", "put_host_bytes"]
