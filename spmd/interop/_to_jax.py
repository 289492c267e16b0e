"""`to_jax` and `from_jax`: view a tensor on device 'jax' as a `jax.Array` and back, without a copy.

    a = spmd.to_jax(x)                        # any container of tensors; keeps layout and mesh
    x = spmd.from_jax(jnp.sin(a))             # any container of arrays; keeps the sharding

Neither side sees writes of the other: JAX arrays are immutable, and a write to the tensor gives the tensor another array. A compiled
step that would donate a shared array copies it first (Note [Shared arrays]).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import AxisType, NamedSharding

from mesh import ShardingSpec
from mesh._devices import devices
from spmd.base._convert import to_torch_dtype
from spmd.base._errors import SpmdError, called_at, message
from spmd.base._jax import is_tracer
from spmd.base._torch import pytree
from spmd.device._shared_arrays import note_shared
from spmd.device._storage import buffer_of, load, wrap
from spmd.sharding._names import name_of
from spmd.sharding._tensor import become_sharded


def to_jax(tree: Any) -> Any:
    """Tensors on device 'jax' as `jax.Array`s, with their shape, dtype and sharding.

    Nothing is copied, except that a view is computed and padding in device memory is cut off. In a function that is being traced
    the arrays are tracers.

    Args:
        tree: a tensor, or any pytree of torch or JAX with tensors; other leaves are unchanged.

    Returns:
        The same container; a mapping that JAX does not support (an output of transformers) becomes a dict.

    Raises:
        SpmdError: a tensor is not on device 'jax'; it requires grad, and torch could not record JAX's operations on it; or it has 64-bit
            elements while JAX's 64-bit types are disabled, so that JAX's operations would truncate them.
    """
    return as_jax_container(tree_map(_array_of, tree))


def from_jax(tree: Any) -> Any:
    """`jax.Array`s as tensors on device 'jax' with the same shape, dtype and devices; a layout over a mesh becomes an annotation.

    Nothing is copied. The tensors do not require grad. JAX must not differentiate through them, because it cannot see `detach`,
    `no_grad` and custom Functions of torch. Such a derivative raises; `spmd.functionalize` gives torch's own.

    Args:
        tree: an array (or a tracer, in a function that is being traced), or any container of arrays; other leaves are unchanged.

    Raises:
        SpmdError: an array is deleted, is on devices that are not device 'jax', or has a dtype that torch lacks; or a leaf is a
            numpy array.
    """
    return jax.tree.map(_tensor_of, tree)


def tree_map(of_leaf: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `of_leaf` to every leaf of a JAX pytree, including leaves in containers that only torch supports."""

    def on(leaf: Any) -> Any:
        return of_leaf(leaf) if pytree.tree_is_leaf(leaf) else pytree.tree_map(of_leaf, leaf)

    return jax.tree.map(on, tree)


def as_jax_container(value: Any) -> Any:
    """`value` with each mapping that JAX does not support converted to a dict."""

    def plain(leaf: Any) -> Any:
        return {key: as_jax_container(item) for key, item in leaf.items()} if isinstance(leaf, dict) else leaf

    return jax.tree.map(plain, value)


def keeps_64_bits() -> bool:
    """Whether JAX's 64-bit types are currently enabled on this thread."""
    return bool(jax.config.read("jax_enable_x64"))


def require_numbers(array: Any) -> None:
    """Raise SpmdError if a size of an array is a symbol of `jax.export.symbolic_shape`."""
    if not all(isinstance(size, int) for size in array.shape):
        raise SpmdError(
            message(
                f"torch code was given an array of shape {array.shape}, but the sizes of a tensor must be numbers",
                *called_at(),
                fix="spmd.functionalize(fn) supports symbols; or trace each size, as jax.jit does by itself",
            )
        )


def _array_of(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.device.type != "jax":
        what = f"to_jax was given {name_of(leaf)}, which is on device '{leaf.device}'"
        raise SpmdError(message(what, *called_at(), fix="move it first: x.to('jax'); or share CPU memory: jax.dlpack.from_dlpack(x)"))
    if leaf.requires_grad and torch.is_grad_enabled():
        raise SpmdError(
            message(
                f"to_jax was given {name_of(leaf)}, which requires grad",
                *called_at(),
                "torch cannot record JAX's operations, so the gradient would be lost",
                fix="spmd.to_jax(x.detach()), or let torch differentiate the JAX function: spmd.call_jax(fn, (x,))",
            )
        )
    array = load(leaf)
    if array.dtype.itemsize == (16 if array.dtype.kind == "c" else 8) and not keeps_64_bits():
        narrow = {"i": "x.int()", "u": "x.to(torch.uint32)", "f": "x.float()", "c": "x.to(torch.complex64)"}[array.dtype.kind]
        raise SpmdError(
            message(
                f"to_jax was given {name_of(leaf)} of {leaf.dtype}, but JAX's 64-bit types are disabled",
                *called_at(),
                "its operations would silently truncate to 32 bits",
                fix=f'jax.config.update("jax_enable_x64", True), or spmd.to_jax({narrow})',
            )
        )
    if not is_tracer(array) and buffer_of(leaf).value is array:
        note_shared(array)
    return array


def _tensor_of(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        raise SpmdError(message(f"from_jax was given a numpy array of shape {leaf.shape}", fix="torch.from_numpy(array).to('jax')"))
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise SpmdError(message("from_jax was given a key of jax.random, for which torch has no dtype", fix="jax.random.key_data(key)"))
    to_torch_dtype(leaf.dtype)
    require_numbers(leaf)
    if is_tracer(leaf):
        return wrap(_into_torch(leaf))
    if leaf.is_deleted():
        what = f"from_jax was given an array of shape {leaf.shape} that is deleted: it was donated to a jitted function"
        raise SpmdError(message(what, *called_at(), fix="pass jnp.copy(array) to functions that donate it"))
    if not leaf.sharding.device_set <= set(devices()):
        where, ours = sorted({d.platform for d in leaf.sharding.device_set}), devices()[0]
        raise SpmdError(
            message(
                f"from_jax was given an array on {', '.join(where)}, but device 'jax' computes on {ours.platform}",
                fix="jax.device_put(array, jax.devices()[0])",
            )
        )
    return _with_layout(leaf)


def _with_layout(array: jax.Array) -> torch.Tensor:
    """A tensor on `array`, annotated with its layout if it is over a mesh."""
    sharding, spec = array.sharding, None
    if isinstance(sharding, NamedSharding):
        spec = ShardingSpec.from_jax(sharding, array.ndim)
        if any(kind is not AxisType.Auto for kind in sharding.mesh.axis_types):  # the same devices and shards
            array = jax.device_put(array, spec.to_jax())
    if getattr(array, "weak_type", False):
        array = jax.lax.convert_element_type(array, array.dtype)
    note_shared(array)
    tensor = wrap(array)
    if spec is None:
        return tensor
    buffer_of(tensor).annotation = spec
    return become_sharded(tensor)


@jax.custom_jvp
def _into_torch(array: Any) -> Any:
    """The array itself. Differentiating it raises."""
    return array


@_into_torch.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise SpmdError(
        message(
            "JAX differentiates through spmd.from_jax, but it cannot see detach, no_grad and custom Functions of torch",
            *called_at(),
            fix="use torch's gradient: fn, params, buffers = spmd.functionalize(module_or_function)",
        )
    )


__all__ = ["as_jax_container", "from_jax", "keeps_64_bits", "require_numbers", "to_jax", "tree_map"]
