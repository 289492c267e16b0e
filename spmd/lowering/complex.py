"""Complex numbers: parts, conjugates and constructors. Lazy conjugation (`conj`) is a bit of the view, resolved when it is read."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd.lowering._registry import lower


@lower("_conj_physical")
@lower("conj_physical", whole=True)
def conj_physical(self: Any) -> Any:
    return jnp.conj(self)


@lower("angle", pointwise=True)
def angle(self: Any) -> Any:
    if jnp.issubdtype(self.dtype, jnp.complexfloating):
        return jnp.arctan2(jnp.imag(self), jnp.real(self))
    return jnp.where(jnp.isnan(self), self, jnp.where(self < 0, jnp.asarray(jnp.pi, self.dtype), jnp.zeros((), self.dtype)))


def _require_real_floats(one: Any, other: Any) -> None:
    if any(part.dtype not in (jnp.float16, jnp.float32, jnp.float64) for part in (one, other)):
        names: list[str] = [part.dtype.name for part in (one, other)]
        kinds = " and ".join(_TORCH_NAMES.get(name, name) for name in names)
        raise RuntimeError(f"Expected both inputs to be Half, Float or Double tensors but got {kinds}")


_TORCH_NAMES = {"bfloat16": "BFloat16", "int64": "Long", "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool"}


@lower("complex", check=_require_real_floats)
def complex_(real: Any, imag: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(real, imag))


@lower("polar", check=_require_real_floats)
def polar(abs: Any, angle: Any) -> Any:
    return lax.complex(*jnp.broadcast_arrays(abs * jnp.cos(angle), abs * jnp.sin(angle)))


@lower("view_as_real_copy")
def view_as_real_copy(self: Any) -> Any:
    return jnp.stack([jnp.real(self), jnp.imag(self)], -1)


@lower("view_as_complex_copy")
def view_as_complex_copy(self: Any) -> Any:
    return lax.complex(self[..., 0], self[..., 1])
