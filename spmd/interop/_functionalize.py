"""`functionalize`: turns a module into a JAX function of its parameters, buffers and a random key.

    fn, params, buffers = spmd.functionalize(model)
    loss, grads = jax.value_and_grad(lambda p: fn(p, buffers, key, x).sum())(params)
    out, buffers = fn.with_buffers(params, buffers, key, x)      # for a module that writes to its buffers

The function works under `jax.jit`, `grad`, `vmap`, `checkpoint`, `lax.scan` and `shard_map`. Python code in the module runs when JAX
traces the function, as in any function under `jax.jit`. For sizes that are symbols of `jax.export` see `_symbolic_sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from spmd.base._convert import cast, exact_dtypes, to_numpy_dtype
from spmd.base._errors import SpmdError, TraceError, called_at, message, nothing_swallowed, shown
from spmd.base._torch import pytree
from spmd.device._random_stream import default_stream
from spmd.device._storage import is_device_tensor
from spmd.device._trace_lock import trace_lock
from spmd.interop._stand_ins import StandIns, module_tensors
from spmd.interop._symbolic_sizes import has_symbols
from spmd.interop._to_jax import as_jax_container, keeps_64_bits, to_jax
from spmd.interop._torch_gradient import TensorFunction, Tensors
from spmd.interop._torch_programs import module_on_device
from spmd.patches._constraints import without_branches
from spmd.patches._running_averages import counting_on_device
from spmd.program.trace._host_effects import no_host_random
from spmd.program.trace._module_calls import report_compiling

Arrays = dict[str, Any]
_NARROW = {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def functionalize(module: nn.Module | Callable[..., Any] | torch.export.ExportedProgram) -> tuple[Functionalized, Arrays, Arrays]:
    """Convert a module to (a JAX function, its parameters, its buffers).

    Args:
        module: a module on device 'jax'; a function of tensors, which has no parameters and buffers; or a program of `torch.export` on
            any device, which becomes a function for all sizes that it allows. The module is not changed, neither now nor by calls.

    Returns:
        `fn`, called as `fn(params, buffers, key, *args, **kwargs)`; `params`, a flat dict of the tensors that require grad; `buffers`, a
        dict of the others: buffers and frozen parameters. Names are those of `state_dict`; a tied tensor occurs once, under its first
        name. The arrays are the module's own, not copies. If JAX's 64-bit types are disabled, 64-bit integers (counters) are converted
        to 32 bits.

    Raises:
        SpmdError: `module` is none of these, or is not on device 'jax', or has float64 values (or large integers) and JAX's 64-bit types
            are disabled.
    """
    if isinstance(module, torch.export.ExportedProgram):
        module = module_on_device(module)
    if not callable(module):
        what = f"functionalize takes a module or a function of tensors, got {shown(module)}"
        raise SpmdError(message(what, fix="fn, params, buffers = spmd.functionalize(model)"))
    held = module_tensors(module) if isinstance(module, nn.Module) else {}
    for name, (tensor, _) in held.items():
        if tensor.device.type != "jax":
            raise SpmdError(
                message(f"functionalize was given a module whose {name!r} is on device '{tensor.device}'", fix="model = model.to('jax')")
            )
    params = {name: _as_array(name, tensor) for name, (tensor, _) in held.items() if tensor.requires_grad}
    buffers = {name: _as_array(name, tensor) for name, (tensor, _) in held.items() if not tensor.requires_grad}
    return Functionalized(module), params, buffers


def _as_array(name: str, tensor: torch.Tensor) -> Any:
    narrow = None if keeps_64_bits() else _NARROW.get(to_numpy_dtype(tensor.dtype))
    if narrow is None:
        return to_jax(tensor.detach())
    with exact_dtypes():
        array = to_jax(tensor.detach())
        limits = jnp.iinfo(narrow)
        if array.size and not bool(((array >= limits.min) & (array <= limits.max)).all()):
            raise SpmdError(
                message(
                    f"{name!r} has integers that do not fit in 32 bits, and JAX's 64-bit types are disabled",
                    fix='jax.config.update("jax_enable_x64", True)',
                )
            )
        return array.astype(narrow)


class Functionalized:
    """A module, or a function of tensors, as a JAX function. Returned by `spmd.functionalize`.

    Attributes:
        module: the module that is called, in its current state: training or evaluation mode, hooks.
    """

    def __init__(self, module: nn.Module | Callable[..., Any]) -> None:
        self.module = module
        self.__name__ = type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "function")

    def __repr__(self) -> str:
        return f"<functionalized {self.__name__}>"

    def __call__(self, params: Mapping[str, Any], buffers: Mapping[str, Any], key: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the module on arrays.

        Args:
            params, buffers: arrays by name, all those that `functionalize` returned. They may be cast to other dtypes, and frozen
                parameters may be in either dict.
            key: a key of `jax.random` for random numbers, or None. `jax.random.key(s)` gives the draws that follow
                `torch.manual_seed(s)`.
            args, kwargs: arrays in any pytree of JAX become tensors; other values are passed through.

        Returns:
            The module's result, with arrays instead of tensors.

        Raises:
            SpmdError: names or shapes do not match the module, or JAX does not support the type of an argument or result.
            TraceError: the module writes to a buffer, whose new value this call would lose; it draws random numbers and `key` is None;
                or it writes to something that is not a buffer.
        """
        call = _Call(self.module, self.__name__, params, buffers, key, args, kwargs)
        result, written = call.run()
        if written:
            raise TraceError(
                message(
                    f"{self.__name__} writes to buffer {next(iter(written))!r}, and this call would lose the new value",
                    f"buffers written: {len(written)}",
                    fix="out, buffers = fn.with_buffers(params, buffers, key, ...), or module.eval()",
                )
            )
        return result

    def with_buffers(
        self, params: Mapping[str, Any], buffers: Mapping[str, Any], key: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Arrays]:
        """Call the module. Returns (its result, all buffers, with new values for those that it wrote to). Arguments as for a call.

        A new value has the dtype of the buffer that was passed.
        """
        call = _Call(self.module, self.__name__, params, buffers, key, args, kwargs)
        result, written = call.run()
        return result, {**buffers, **{name: value.astype(jnp.result_type(buffers[name])) for name, value in written.items()}}


class _Call:
    """One call: its arrays as a flat list, and the structure of the module's result."""

    def __init__(
        self, module: Any, name: str, params: Mapping[str, Any], buffers: Mapping[str, Any], key: Any, args: Any, kwargs: Any
    ) -> None:
        self.module, self.name, self.params, self.key = module, name, params, key
        self.state = {**buffers, **params}
        self.held = module_tensors(module) if isinstance(module, nn.Module) else {}
        self._require_names()
        leaves, self.tree = jax.tree.flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                what = f"{name} is a JAX function, but was given a tensor of shape {tuple(leaf.shape)}"
                raise SpmdError(message(what, *called_at(), fix="pass arrays: spmd.to_jax(x)"))
        self.is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves]
        self.static = [None if is_array else leaf for leaf, is_array in zip(leaves, self.is_array, strict=True)]
        self.given = [leaf for leaf, is_array in zip(leaves, self.is_array, strict=True) if is_array]
        self.written: list[str] = []
        self.leaves: list[Any] = []
        self.out_tree: Any = None

    def _require_names(self) -> None:
        missing, unknown = [n for n in self.held if n not in self.state], [n for n in self.state if n not in self.held]
        if missing or unknown:
            found = [f"missing: {', '.join(map(repr, missing[:3]))}"] if missing else []
            found += [f"unknown: {', '.join(map(repr, unknown[:3]))}"] if unknown else []
            fix = "pass the dicts that spmd.functionalize(module) returned, with new values"
            raise SpmdError(message(f"params and buffers do not match {self.name}", *found, *called_at(), fix=fix))
        if jax.sharding.get_abstract_mesh().manual_axes:  # inside shard_map the arrays may be shards
            return
        for name, (tensor, _) in self.held.items():
            shape = jnp.shape(self.state[name])
            if shape != tuple(tensor.shape):
                raise SpmdError(
                    message(
                        f"{name!r} of {self.name} has shape {tuple(tensor.shape)}, but the array passed for it has {shape}",
                        *called_at(),
                        fix="under jax.vmap, map over params too: in_axes=(0, ...)",
                    )
                )

    def run(self) -> tuple[Any, dict[str, Any]]:
        """(result, new values of the written buffers), as arrays."""
        function = TensorFunction(self._on_tensors)
        with trace_lock:
            found = function([*self.state.values(), *self.given], _words(self.key))
        found = [as_wide_as_allowed(array) for array in found]
        count = len(found) - len(self.written)
        rest = iter(found[:count])
        leaves = [next(rest) if leaf is None else leaf[0] for leaf in self.leaves]
        result = as_jax_container(pytree.tree_unflatten(leaves, self.out_tree))
        return result, dict(zip(self.written, found[count:], strict=True))

    def _on_tensors(self, tensors: Tensors) -> Tensors:
        """Run the module on tensors. Returns the tensors of its result, then the buffers that it wrote."""
        num_state = len(self.state)
        state = {name: self._widened(name, tensor) for name, tensor in zip(self.state, tensors, strict=False)}
        # Cloned, because an argument that gets a gradient is a leaf, which torch does not allow to be written in place.
        rest = iter([t.clone() if t.requires_grad else t for t in tensors[num_state:]])
        args, kwargs = jax.tree.unflatten(
            self.tree, [next(rest) if is_array else leaf for leaf, is_array in zip(self.static, self.is_array, strict=True)]
        )
        draws = default_stream.draws
        with ExitStack() as stack:
            for context in (report_compiling(), no_host_random(), counting_on_device(), without_branches(), nothing_swallowed()):
                stack.enter_context(context)
            stand_ins = stack.enter_context(StandIns(self.module, state)) if self.held else None
            result = self.module(*args, **kwargs)
            written = {} if stand_ins is None else stand_ins.written()
        if self.key is None and default_stream.draws != draws:
            what = f"{self.name} draws random numbers, but was given no key"
            raise TraceError(message(what, fix="fn(params, buffers, jax.random.key(0), ...), or module.eval()"))
        for name in written:
            if name in self.params:
                what = f"{self.name} writes to its parameter {name!r}, but a JAX function cannot change its arguments"
                raise TraceError(message(what, *called_at(), fix="write to a buffer, or change params outside the function"))
        self.written = list(written)
        leaves, self.out_tree = pytree.tree_flatten(result)
        before, self.leaves = self.leaves, [None if is_device_tensor(leaf) else (leaf,) for leaf in leaves]
        if has_symbols(self.given) and before not in ([], self.leaves):
            what = f"{self.name} returns a value that depends on the sizes, which are symbols"
            raise SpmdError(message(what, f"{before} and {self.leaves}", fix="return tensors; the sizes are in an array's shape"))
        self._require_plain(leaves)
        return [*(leaf for leaf in leaves if is_device_tensor(leaf)), *(t.detach() for t in written.values())]

    def _widened(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A parameter or buffer at its original width if JAX narrowed its integers."""
        wanted = self.held[name].tensor.dtype
        is_narrowed = _NARROW.get(to_numpy_dtype(wanted)) == to_numpy_dtype(tensor.dtype)
        return tensor.to(wanted) if is_narrowed else tensor

    def _require_plain(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and not is_device_tensor(leaf):
                what = f"{self.name} returns a tensor of shape {tuple(leaf.shape)} on device '{leaf.device}', which would be a constant"
                raise TraceError(message(what, fix="make it on the device of an argument: torch.zeros(..., device=x.device)"))
            if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
                what = f"{self.name} returns a {type(leaf).__name__}, which is not a container of tensors"
                raise SpmdError(message(what, fix="return its tensors in a tuple or dict (transformers: use_cache=False)"))


def _words(key: Any) -> Any:
    """The random state, uint32[4], for a key of `jax.random`. For None it is zeros, and drawing from it is an error."""
    if key is None:
        return np.zeros(4, np.uint32)
    if isinstance(key, torch.Tensor) or not hasattr(key, "dtype"):
        what = f"key is a {type(key).__name__}, but the third argument must be a key of jax.random or None"
        raise SpmdError(message(what, *called_at(), fix="fn(params, buffers, jax.random.key(0), ...)"))
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if is_typed else jnp.asarray(key)
    if data.shape != (2,):
        data = jax.random.bits(key, (2,), np.uint32)
    return jnp.concatenate([data.astype(np.uint32), np.zeros(2, np.uint32)])


def as_wide_as_allowed(array: Any) -> Any:
    """The array with 64-bit elements converted to 32-bit ones if JAX's 64-bit types are disabled, like results of its operations."""
    if keeps_64_bits():
        return array
    narrow = jax.dtypes.canonicalize_dtype(array.dtype)
    if narrow == array.dtype:
        return array
    with exact_dtypes():
        return cast(array, narrow) if array.dtype.kind == "f" else array.astype(narrow)


__all__ = ["Functionalized", "as_wide_as_allowed", "functionalize"]
