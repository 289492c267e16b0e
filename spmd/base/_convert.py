"""Conversion of dtypes and host arrays between torch and numpy or jax. No other file maps the dtypes of one library to the other.

Torch's dtypes are kept exactly: int64 stays int64, and float64 stays float64. So this package runs and traces everything inside
`exact_dtypes()`, jax's thread-local 64-bit context. The process-wide flag stays as the user set it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

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
# Names of dtypes in torch's errors, where they are not the numpy name with a capital letter.
_SCALAR_TYPES = {
    "int8": "Char",
    "uint8": "Byte",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "Float",
    "float64": "Double",
    "complex64": "ComplexFloat",
    "complex128": "ComplexDouble",
    **{f"uint{bits}": f"UInt{bits}" for bits in (16, 32, 64)},
}
HALVES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))
_LARGEST_E4M3 = 448.0
# Some versions of torch convert numbers that are too large to the largest finite number, others to NaN as jax does.
_E4M3_SATURATES = bool((torch.tensor(1e4).to(torch.float8_e4m3fn).float() == _LARGEST_E4M3).item())
# Torch cannot convert bfloat16 and float8 to numpy, so they are converted as integers of the same width. By element size in bytes.
_AS_BITS = {2: torch.int16, 1: torch.uint8}


def exact_dtypes() -> AbstractContextManager[None]:
    """A context in which jax keeps 64-bit types, on this thread only."""
    return jax.enable_x64(True)


def to_numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """The numpy dtype with the same representation as a torch dtype.

    Raises:
        SpmdError: jax has no such dtype (quantized dtypes, `torch.bits8`).
    """
    try:
        return _TO_NUMPY[dtype]
    except KeyError:
        raise SpmdError(message(f"device 'jax' does not support {dtype}", fix="convert the tensor to a dtype that jax supports")) from None


def to_torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype with the same representation as a numpy or jax dtype.

    Raises:
        SpmdError: torch has no such dtype (int4, float0).
    """
    try:
        return _TO_TORCH[dtype if isinstance(dtype, np.dtype) else np.dtype(dtype)]
    except KeyError:
        raise SpmdError(message(f"torch has no dtype for jax's {dtype}", fix="convert the array to a dtype that torch has")) from None


def scalar_type(dtype: Any) -> str:
    """The name of a dtype, of torch or numpy, in the errors of torch's C++: `Long` for int64."""
    name = str(dtype).removeprefix("torch.")
    return _SCALAR_TYPES.get(name, name.capitalize())


def cast(array: Any, dtype: Any) -> Any:
    """Convert a jax array to another dtype, with the results of torch on the CPU.

    Bools are converted to floats through integers. XLA replaces a product with a directly converted bool by a select, so that
    `inf * False` would be 0 instead of NaN.
    """
    if jnp.issubdtype(array.dtype, jnp.complexfloating) and dtype == np.bool_:
        return array != 0
    if array.dtype == np.bool_ and jnp.issubdtype(dtype, jnp.inexact):
        array = array.astype(np.int8)
    if jnp.issubdtype(array.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.integer):
        return _truncated(array, np.dtype(dtype))
    if _E4M3_SATURATES and dtype == ml_dtypes.float8_e4m3fn and not jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.clip(array, -_LARGEST_E4M3, _LARGEST_E4M3)  # NaN stays NaN
    with np.errstate(over="ignore"):  # numpy converts constants of a trace
        return array.astype(dtype)


class ComputeDtype(NamedTuple):
    """How an operand of an elementwise operation is converted.

    Attributes:
        dtype: the dtype to compute in.
        half: the 16 bits to which the operand is rounded first, as on torch's CPU; None: to none.
        is_wide: whether an operand that is a number or 0-dim keeps at least 32 bits instead.
    """

    dtype: np.dtype[Any]
    half: np.dtype[Any] | None = None
    is_wide: bool = False

    def of(self, value: Any) -> Any:
        """The operand in this dtype. A Python number stays one."""
        if isinstance(value, jax.Array):
            return _converted(_converted(value, self.first(value.shape)), self._last(value.shape))
        return value if self.is_wide or type(value) not in (int, float) else rounded(value, self.half)

    def first(self, shape: tuple[int, ...]) -> np.dtype[Any]:
        """The dtype that an operand of this shape has first."""
        return self._last(shape) if self.half is None or (self.is_wide and not shape) else self.half

    def _last(self, shape: tuple[int, ...]) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.is_wide and not shape and self.dtype in HALVES else self.dtype


def _converted(array: Any, dtype: np.dtype[Any]) -> Any:
    return array if array.dtype == dtype else cast(array, dtype)


def rounded(number: Any, half: Any) -> Any:
    """A Python number with the 16 bits of a float dtype, infinite if it is too large, as in torch; other dtypes and None leave it."""
    if half is None or half not in HALVES:
        return number
    with np.errstate(over="ignore"):
        return float(np.asarray(number, half))


def _truncated(array: Any, dtype: np.dtype[Any]) -> Any:
    """Convert floats to integers, with torch's results for numbers out of range, for which C++ leaves the result undefined.

    XLA clamps to the nearest integer of the dtype. Torch on the CPU gives the lowest int32 (int64) for numbers out of the range of
    int32 (int64), and for NaN. A narrower dtype gets the low bits of the int32: 300.0 becomes 44 as uint8.
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
    """Copy a CPU tensor to a row-major numpy array of the same shape and dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    dtype = to_numpy_dtype(plain.dtype)
    if dtype.type.__module__ == "ml_dtypes" or plain.dtype in (torch.bfloat16,):
        return np.array(plain.contiguous().view(_AS_BITS[plain.element_size()]).numpy(), order="C", copy=True).view(dtype)
    return np.array(plain.numpy(), order="C", copy=True)


def host_tensor(array: np.ndarray[Any, np.dtype[Any]]) -> torch.Tensor:
    """Copy a numpy array to a CPU tensor of the same shape and dtype."""
    dtype = to_torch_dtype(array.dtype)
    if array.dtype.type.__module__ == "ml_dtypes":
        bits = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(np.array(array, order="C", copy=True).view(bits)).view(dtype)
    return torch.from_numpy(np.array(array, order="C", copy=True))
