"""dtypes and buffers between torch and numpy/jax: the only file that maps one library's element types to the other's.

A dtype is the truth that torch states: int64 is int64 and float64 is float64 here, so everything of ours that runs or
traces does so inside `exact_dtypes()`, jax's thread-local 64-bit context; the process-wide flag stays as the user set it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

from spmd.base._errors import SpmdError, message

_TO_NUMPY: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.int64: np.dtype(np.int64),
    torch.int32: np.dtype(np.int32),
    torch.int16: np.dtype(np.int16),
    torch.int8: np.dtype(np.int8),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.bool: np.dtype(np.bool_),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e5m2: np.dtype(ml_dtypes.float8_e5m2),
    torch.float8_e4m3fnuz: np.dtype(ml_dtypes.float8_e4m3fnuz),
    torch.float8_e5m2fnuz: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
_TO_TORCH: dict[np.dtype[Any], torch.dtype] = {v: k for k, v in _TO_NUMPY.items()}
_LARGEST_E4M3 = 448.0
# of what is too large some versions of torch make the largest number, others NaN, as jax does
_E4M3_SATURATES = bool((torch.tensor(1e4).to(torch.float8_e4m3fn).float() == _LARGEST_E4M3).item())
# numpy has no such element type in torch's own conversion: travel as bits of the same width
_AS_BITS = {2: torch.int16, 1: torch.uint8}


def exact_dtypes() -> AbstractContextManager[None]:
    """The context in which jax keeps 64-bit types, for this thread only."""
    return jax.enable_x64(True)


def to_numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype that holds `dtype`'s values bit for bit; SpmdError if jax has none (quantized, bits types)."""
    try:
        return _TO_NUMPY[dtype]
    except KeyError:
        raise SpmdError(
            message(f"device 'jax' has no element type for {dtype}", fix="convert the tensor to a dtype that jax supports")
        ) from None


def to_torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a numpy or jax dtype; SpmdError if torch has none (int4, float0)."""
    try:
        return _TO_TORCH[dtype if isinstance(dtype, np.dtype) else np.dtype(dtype)]
    except KeyError:
        raise SpmdError(message(f"torch has no dtype for jax's {dtype}", fix="convert the array to a dtype that torch has")) from None


def cast(array: Any, dtype: Any) -> Any:
    """A jax array in another dtype, as torch's CPU converts it.

    Bools become floats by way of integers: XLA takes a product with a converted bool for a choice, and `inf * False` for 0.
    """
    if array.dtype == np.bool_ and jnp.issubdtype(dtype, jnp.inexact):
        array = array.astype(np.int8)
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        return _truncated(array, np.dtype(dtype))
    if _E4M3_SATURATES and dtype == ml_dtypes.float8_e4m3fn and not jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.clip(array, -_LARGEST_E4M3, _LARGEST_E4M3)  # NaN stays NaN
    return array.astype(dtype)


def _truncated(array: Any, dtype: np.dtype[Any]) -> Any:
    """Floats as integers. C++ leaves open what becomes of numbers that do not fit, and XLA takes the nearest that does; torch's CPU has
    the lowest int32 (int64) for what that cannot hold, NaN too, and a narrower dtype has the low bits of it: 300.0 is 44 as uint8.
    """
    if array.dtype.itemsize < 4:
        array = array.astype(np.float32)
    whole = np.dtype(np.int64 if dtype.itemsize == 8 or dtype == np.uint32 else np.int32)
    limit = 2.0 ** (8 * whole.itemsize - 1)
    fits = (array >= -limit) & (array < limit)
    found = jnp.where(fits, jnp.where(fits, array, 0).astype(whole), np.iinfo(whole).min).astype(dtype)
    if dtype != np.uint64:
        return found
    is_large = array >= limit
    return jnp.where(is_large, jnp.where(is_large & (array < 2 * limit), array, 0).astype(dtype), found)


def host_array(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """A private numpy copy of a CPU tensor's values, same shape and dtype, row-major."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dtype = to_numpy_dtype(plain.dtype)
    if dtype.type.__module__ == "ml_dtypes" or plain.dtype in (torch.bfloat16,):
        return np.array(plain.contiguous().view(_AS_BITS[plain.element_size()]).numpy(), order="C", copy=True).view(dtype)
    return np.array(plain.numpy(), order="C", copy=True)


def host_tensor(array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    """A CPU tensor that owns a copy of `array`, same shape and dtype."""
    dtype = to_torch_dtype(array.dtype)
    if array.dtype.type.__module__ == "ml_dtypes":
        bits = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(np.array(array, order="C", copy=True).view(bits)).view(dtype)
    return torch.from_numpy(np.array(array, order="C", copy=True))
