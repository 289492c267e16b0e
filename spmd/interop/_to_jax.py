"""`to_jax` and `from_jax`: a tensor on device 'jax' and a `jax.Array` are one array seen from two sides. Nothing is copied.

    a = spmd.to_jax(x)                        # any container of tensors; layout and mesh kept
    x = spmd.from_jax(jnp.sin(a))             # any container of arrays; laid out as the array is

Neither side sees the other's writes: JAX writes nothing in place, and a tensor's write gives the tensor another array. A compiled
step that would donate a shared array copies it first (Note [Lent arrays]).
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
from spmd.device._lent import note_lent
from spmd.device._storage import buffer_of, load, wrap
from spmd.sharding._names import name_of
from spmd.sharding._tensor import become_sharded


def to_jax(tree: Any) -> Any:
    """Tensors on device 'jax' as `jax.Array`s: the arrays that they hold, with their shape, dtype and sharding.

    No copy, but for a view, which is computed, and a tensor that is padded in storage, which is cut. In a function that is traced the
    arrays are tracers.

    Args:
        tree: a tensor, or any container of tensors that torch or JAX knows; what is no tensor stays as it is.

    Returns:
        The same container; a dict in place of a mapping that JAX does not know (an output of transformers).

    Raises:
        SpmdError: a tensor is not on device 'jax'; torch would record what is done with it, which JAX cannot (`requires_grad`); it has
            64-bit elements, which JAX's operations would cut to 32 bits as it is set now.
    """
    return as_jax_container(tree_map(_array_of, tree))


def from_jax(tree: Any) -> Any:
    """`jax.Array`s as tensors on device 'jax' that hold them: same shape, dtype, devices; a layout over a mesh is kept as a mark.

    No copy. The tensors require no gradient. JAX must not differentiate through them: what `detach`, `no_grad` and custom Functions
    mean to torch it does not see, so a derivative taken through `from_jax` raises; `spmd.functionalize` gives torch's own.

    Args:
        tree: an array (a tracer, where a function is traced), or any container of arrays; what is no array stays as it is.

    Raises:
        SpmdError: an array is deleted, lies on devices that are not device 'jax', or is of a dtype that torch does not have; a leaf
            is a numpy array.
    """
    return jax.tree.map(_tensor_of, tree)


def tree_map(of_leaf: Callable[[Any], Any], tree: Any) -> Any:
    """`of_leaf` on every leaf of a container that JAX knows, and of those in it that only torch does."""

    def on(leaf: Any) -> Any:
        return of_leaf(leaf) if pytree.tree_is_leaf(leaf) else pytree.tree_map(of_leaf, leaf)

    return jax.tree.map(on, tree)


def as_jax_container(value: Any) -> Any:
    """`value` with a dict in place of each mapping of a class that JAX does not know."""

    def plain(leaf: Any) -> Any:
        return {key: as_jax_container(item) for key, item in leaf.items()} if isinstance(leaf, dict) else leaf

    return jax.tree.map(plain, value)


def keeps_64_bits() -> bool:
    """Whether JAX has 64-bit types as it is set now, on this thread."""
    return bool(jax.config.read("jax_enable_x64"))


def require_numbers(array: Any) -> None:
    """Raise if a size of an array is a symbol of `jax.export.symbolic_shape`."""
    if not all(isinstance(size, int) for size in array.shape):
        raise SpmdError(
            message(
                f"torch code was given an array of shape {array.shape}: a tensor's sizes are numbers",
                *called_at(),
                fix="spmd.functionalize(fn) takes symbols; or trace each size, as jax.jit does by itself",
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
                f"to_jax was given {name_of(leaf)}, which requires grad: torch sees nothing of what JAX does, so no gradient comes back",
                *called_at(),
                fix="spmd.to_jax(x.detach()), or let torch differentiate the JAX function: spmd.call_jax(fn, (x,))",
            )
        )
    array = load(leaf)
    if array.dtype.itemsize == (16 if array.dtype.kind == "c" else 8) and not keeps_64_bits():
        narrow = {"i": "x.int()", "u": "x.to(torch.uint32)", "f": "x.float()", "c": "x.to(torch.complex64)"}[array.dtype.kind]
        raise SpmdError(
            message(
                f"to_jax was given {name_of(leaf)} of {leaf.dtype}: JAX has no 64-bit types as it is set now",
                *called_at(),
                "its operations would take the low 32 bits and say nothing",
                fix=f'jax.config.update("jax_enable_x64", True), or spmd.to_jax({narrow})',
            )
        )
    if not is_tracer(array) and buffer_of(leaf).value is array:
        note_lent(array)
    return array


def _tensor_of(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        raise SpmdError(message(f"from_jax was given a numpy array of shape {leaf.shape}", fix="torch.from_numpy(array).to('jax')"))
    if not isinstance(leaf, jax.Array):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise SpmdError(message("from_jax was given a key of jax.random, which torch has no dtype for", fix="jax.random.key_data(key)"))
    to_torch_dtype(leaf.dtype)
    require_numbers(leaf)
    if is_tracer(leaf):
        return wrap(_into_torch(leaf))
    if leaf.is_deleted():
        what = f"from_jax was given an array of shape {leaf.shape} that is deleted: a jitted function has taken its memory"
        raise SpmdError(message(what, *called_at(), fix="pass jnp.copy(array) to functions that donate it"))
    if not leaf.sharding.device_set <= set(devices()):
        where, ours = sorted({d.platform for d in leaf.sharding.device_set}), devices()[0]
        raise SpmdError(
            message(
                f"from_jax was given an array on {', '.join(where)}, device 'jax' computes on {ours.platform}",
                fix="jax.device_put(array, jax.devices()[0])",
            )
        )
    return _with_layout(leaf)


def _with_layout(array: jax.Array) -> torch.Tensor:
    """A tensor that holds `array`, marked as that lies if it lies on a mesh."""
    sharding, spec = array.sharding, None
    if isinstance(sharding, NamedSharding):
        spec = ShardingSpec.from_jax(sharding, array.ndim)
        if any(kind is not AxisType.Auto for kind in sharding.mesh.axis_types):  # the same devices, the same pieces
            array = jax.device_put(array, spec.to_jax())
    if getattr(array, "weak_type", False):
        array = jax.lax.convert_element_type(array, array.dtype)
    note_lent(array)
    tensor = wrap(array)
    if spec is None:
        return tensor
    buffer_of(tensor).annotation = spec
    return become_sharded(tensor)


@jax.custom_jvp
def _into_torch(array: Any) -> Any:
    """The array itself; differentiating it raises."""
    return array


@_into_torch.defjvp
def _(primals: Any, tangents: Any) -> Any:
    raise SpmdError(
        message(
            "JAX differentiates through spmd.from_jax: it would not see what detach, no_grad or a custom Function mean to torch",
            *called_at(),
            fix="let torch write the gradient: fn, params, buffers = spmd.functionalize(module_or_function)",
        )
    )


__all__ = ["as_jax_container", "from_jax", "keeps_64_bits", "require_numbers", "to_jax", "tree_map"]
