"""Installs the lowerings as PyTorch kernels of device 'jax', together with the kernels derived from them.

Each lowering provides the functional kernel, the in-place and `out=` forms (found by matching ATen schemas), and an autograd kernel
if it is a composite. An op without a lowering uses torch's decomposition table; an op without either raises. Only the few ops that
move values or make views are named here.
"""

from __future__ import annotations

import math
import warnings
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes, to_torch_dtype
from spmd.base._errors import TraceError, UnsupportedOpError, called_at, message
from spmd.base._jax import is_tracing
from spmd.base._torch import OpOverload, decomposition_table, dispatch_has_kernel_for_dispatch_key
from spmd.device import _aliases, _asserted, _autocast, _copy, _derivatives, _experts, _fused_steps, _like, _pinned, _strided_linalg
from spmd.device._adapter import Adapter
from spmd.device._attention_masks import Attention
from spmd.device._deferred import Deferrable
from spmd.device._host_counters import updated
from spmd.device._indices import checked_composite
from spmd.device._only_device import on_only_device, takes_device
from spmd.device._overlaps import WRITES_APART, check_in_place, check_out, check_overlap, require_apart
from spmd.device._refusals import check_cast, check_results
from spmd.device._storage import Buffer, buffer_of, load, recording, store
from spmd.device._whole import WeightedLoss, WholeOp
from spmd.lowering import Lowering, lookup, lowerings
from spmd.lowering._registry import is_composite, listen, resolve

_SPECIAL = {
    # nn.TransformerEncoder calls it to decide whether padding may become a nested tensor, which this device does not support
    "_nested_tensor_from_mask_left_aligned": lambda t, mask: False,
    "empty.memory_format": _copy.empty_memory_format,
    "empty_strided": _copy.empty_strided,
    "empty_like": _like.empty_like,
    "new_empty_strided": _copy.new_empty_strided,
    "clone": _copy.clone,
    "_to_copy": _copy.to_copy,
    "_copy_from": _copy.copy_from,
    "_copy_from_and_resize": _copy.copy_from,
    "copy_": _copy.copy_,
    "zero_": _copy.zero_,
    "_local_scalar_dense": _copy.local_scalar_dense,
    "is_nonzero": _copy.is_nonzero,
    "equal": _copy.equal,
    "one_hot": _like.one_hot,
    "_new_zeros_with_same_feature_meta": _like.new_zeros_with_same_feature_meta,
    "_assert_async": _asserted.assert_async,
    "_assert_async.msg": _asserted.assert_async,
    "as_strided_scatter": _copy.as_strided_scatter,
}
# composites whose autograd kernel does more than differentiate the rule
_WHOLE = {
    "scaled_dot_product_attention": Attention,
    **dict.fromkeys(("cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"), WeightedLoss),
}
# ops that fill a tensor with one number: this one, or the argument `fill_value` if it is None
_FILLED = {"zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1, "full": None, "full_like": None}


# Note [Which mechanism serves an operator]
# An overload is served by the first of these mechanisms that supports it. `Installed.by` records it, and `spmd ops NAME` prints it.
MECHANISMS = {
    "device": "a kernel of the device itself: moves, copies, reads values (`_SPECIAL`, `resize_`)",
    "view": "PyTorch's own strides on the shared storage (`_aliases`)",
    "strides": "a kernel that reads the strides of its tensors (`_strided_linalg`)",
    "filled": "one repeated number, with no memory until it is used (`_FILLED`)",
    "whole": "a rule of the lowering table, run as one call of jax with jax's gradient (`whole=True`)",
    "in place": "a rule whose result is the new value of its first argument",
    "rule": "a rule of the lowering table; the gradient is PyTorch's formula",
    "derived": "the in-place or `out=` form of an overload that has a rule",
    "composite": "PyTorch's C++ calls other operators",
    "decomposition": "PyTorch's Python decomposition into other operators, or the functional form of an overload that writes",
}


# Mechanisms whose kernels may be deferred. The others make views, or tensors without memory before their first use.
DEFERRED = frozenset({"device", "strides", "whole", "in place", "rule", "derived"})
# Kernels of the device that are never deferred: they return a Python value, nothing, or a tensor that has no memory yet.
_NEVER_DEFERRED = frozenset(
    {
        *("_nested_tensor_from_mask_left_aligned", "empty.memory_format", "empty_strided", "empty_like", "new_empty_strided"),
        *("_local_scalar_dense", "is_nonzero", "equal", "one_hot", "_assert_async", "_assert_async.msg", "resize_", "as_strided_scatter"),
        *("_pin_memory", "is_pinned", "_new_zeros_with_same_feature_meta"),
    }
)


def deferrable(name: str, kernel: Any) -> Deferrable:
    """Wrap the kernel of overload `name` so that a queue may run it later."""
    adapter = getattr(kernel, "adapter", kernel)
    writes = name.partition(".")[0].endswith("_")
    if name.startswith("_fused_"):
        return Deferrable(name, kernel, lambda place, value: place in _fused_steps.NUMBERS, writes=True)
    if not isinstance(adapter, Adapter):
        return Deferrable(name, kernel, writes=writes)
    check = None if adapter.bounds is None else adapter.check_indices
    return Deferrable(name, kernel, adapter.is_dynamic, writes=writes, needs_values=adapter.needs_values, check=check)


class Installed:
    """The kernels of one process. Keeps torch's `Library` objects alive, because freeing one would unregister its kernels.

    Attributes:
        by: mechanism, a key of `MECHANISMS`, of each overload that this package has a kernel for.
    """

    def __init__(self) -> None:
        self.any = torch.library.Library("_", "IMPL")
        self.libraries: dict[str, torch.library.Library] = {}
        self.experts = _experts.install()
        self.kernels: dict[str, Any] = {}
        self.by: dict[str, str] = {}

    def add(self, op_name: str, kernel: Any, key: str = "PrivateUse1", by: str = "rule") -> None:
        """Register `kernel` for an overload such as `add.Tensor`. It must be the first one for this dispatch key."""
        assert (op_name + key) not in self.kernels, f"two kernels for {op_name} on {key}"
        if key == "PrivateUse1" and by in DEFERRED and op_name not in _NEVER_DEFERRED:
            kernel = deferrable(op_name, kernel)
        self.kernels[op_name + key] = kernel
        self.by.setdefault(op_name, by)
        namespace, _, name = op_name.rpartition("::")
        library = self.libraries.get(namespace or "aten")
        if library is None:
            library = self.libraries[namespace or "aten"] = torch.library.Library(namespace or "aten", "IMPL")
        library.impl(name, on_only_device(kernel) if key == "PrivateUse1" and takes_device(op_name) else kernel, key)

    def has(self, op_name: str) -> bool:
        """Whether this package has a kernel for the overload."""
        return op_name + "PrivateUse1" in self.kernels

    def refuse(self, op: OpOverload) -> None:
        """Raise if a lowering of `op` cannot be installed now.

        Raises:
            TraceError: a function is being traced.
            ValueError: `op` already has a kernel.
        """
        name = _short(op)
        if recording.get() is not None or is_tracing():
            raise TraceError(
                message(
                    f"a lowering of {op} is registered while a function is traced",
                    *called_at(),
                    "the program would compute the op differently before and after this line",
                    fix=f'move @spmd.lowering.lower("{name}") to module level',
                )
            )
        if self.has(name) or dispatch_has_kernel_for_dispatch_key(op.name(), "PrivateUse1"):
            by = MECHANISMS.get(self.by.get(name, ""), "a kernel that another package registered for PrivateUse1")
            raise ValueError(message(f"{op} already has a kernel on device 'jax'", by, fix="give the operator another name"))

    def install(self, lowering: Lowering) -> None:
        """Install the kernels of a lowering, and the in-place and `out=` forms derived from it."""
        self.install_functional(lowering)
        self.install_variants(lowering.op)

    def install_functional(self, lowering: Lowering) -> None:
        """Install the kernel of the overload itself and, for a composite, the autograd kernel that differentiates the rule."""
        op, name, adapter = lowering.op, _short(lowering.op), Adapter(lowering)
        if name in _FILLED:
            self.add(name, _like.filled(adapter, _FILLED[name]), by="filled")
        elif name == "scalar_tensor":
            self.add(name, _like.scalar(adapter), by="filled")
        if not self.has(name):
            in_place = _is_in_place(op) and not lowering.updates
            by = "in place" if in_place else "whole" if lowering.whole else "rule"
            self.add(name, _in_place_kernel(adapter) if in_place else adapter, by=by)
        if lowering.whole:
            self.add(name, _WHOLE.get(name, WholeOp)(adapter), "AutogradPrivateUse1")

    def install_variants(self, op: OpOverload) -> None:
        """Install the in-place and `out=` forms of a lowered overload that have no kernel yet."""
        lowering = lookup(op)
        assert lowering is not None
        for variant, kernel in variants(op, Adapter(lowering)):
            if not self.has(_short(variant)) and not is_composite(variant):  # a composite calls the functional form itself
                self.add(_short(variant), kernel, by="derived")


def install() -> Installed:
    """Register every kernel, in the order of `MECHANISMS`. `_backend` calls it once; lowerings added later install themselves."""
    installed = Installed()
    for by, kernels in (
        ("device", {**_SPECIAL, **_fused_steps.kernels(), "resize_": resize_}),
        ("view", _aliases.view_kernels()),
        ("strides", _strided_linalg.linalg_kernels()),
    ):
        for name, kernel in kernels.items():
            installed.add(name, kernel, by=by)
    for lowering in lowerings().values():
        installed.install_functional(lowering)
    for op in lowerings():
        installed.install_variants(op)
    for name in ("quantile", "nanquantile"):
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            installed.add(name, checked_composite(resolve(name)), key, by="composite")
    installed.add("is_nonzero", _copy.is_nonzero, "AutogradPrivateUse1", by="device")
    for name, kernel in _derivatives.kernels().items():
        installed.add(name, kernel, "AutogradPrivateUse1")
    for name, kernel in _autocast.kernels().items():
        installed.add(name, kernel, "AutocastPrivateUse1")
    for name, kernel in _pinned.kernels().items():
        installed.add(name, kernel, "CPU", by="device")
    installed.any.fallback(fallback, "PrivateUse1")
    for kind, refused in (("SparsePrivateUse1", sparse), ("SparseCsrPrivateUse1", sparse), ("NestedTensorPrivateUse1", nested)):
        installed.any.fallback(refused, kind)
    installed.any.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    listen(installed)
    return installed


def variants(op: OpOverload, adapter: Adapter) -> list[tuple[OpOverload, Any]]:
    """The in-place and out= overloads of the functional `op`, each with its kernel."""
    found: list[tuple[OpOverload, Any]] = []
    for other in variants_of(op):
        if _out_names(other):
            found.append((other, _out_kernel(adapter, other, takes_dtype=_dtype_is_left_to_out(op, other))))
        elif other._schema.name.endswith("_"):
            found.append((other, _in_place_kernel(adapter)))
    return found


def variants_of(op: OpOverload) -> list[OpOverload]:
    """The in-place and out= overloads of the functional `op`."""
    found: list[OpOverload] = []
    namespace, base = op._schema.name.split("::")
    signature = _signature(op)
    for name in (base, base + "_"):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for overload in packet.overloads() if packet is not None else ():
            other = getattr(packet, overload)
            if other is not op and other._schema.is_mutable and _signature(other) == signature:
                found.append(other)
    return found


def _signature(op: OpOverload) -> tuple[tuple[str, str], ...]:
    """Names and types of the arguments that the in-place, out= and functional forms share."""
    return tuple((a.name, str(a.type)) for a in op._schema.arguments if not a.is_out and a.name not in _FACTORY)


_FACTORY = ("dtype", "layout", "device", "pin_memory", "memory_format")


def _is_in_place(op: OpOverload) -> bool:
    """True if the op writes its first argument and returns it, as `normal_` does."""
    first = op._schema.arguments[0].alias_info if op._schema.arguments else None
    return op._schema.name.endswith("_") and first is not None and first.is_write


def _in_place_kernel(adapter: Adapter) -> Any:
    # These do not read the old value, so XLA cannot infer from an operand that the result is sharded.
    fills = adapter.lowering.random or adapter.op._schema.name in ("aten::fill", "aten::fill_")
    is_checked = adapter.lowering.pointwise or adapter.name in WRITES_APART

    def in_place(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if buffer_of(self).dropped is not None:  # an update of a dropped value is dropped too: reading it raises
            return self
        if not self.is_contiguous():
            check_in_place(adapter.name, self)
            if not fills:
                require_apart(adapter.name, self)
        if is_checked:
            check_overlap(adapter.name, self, args)
        if not adapter.lowering.random and updated(adapter.op, self, args, kwargs, fills=fills):
            return self
        with exact_dtypes():
            value = adapter.arrays((self, *args), kwargs, _copy.filled_sharding(self) if fills else None)
            if value.shape not in (tuple(self.shape), buffer_of(self).stored):
                raise RuntimeError(
                    message(
                        f"the result of in-place {adapter.op} has shape {tuple(value.shape)}, but the tensor has {tuple(self.shape)}",
                        *called_at(),
                        fix="use the out-of-place form",
                    )
                )
            check_cast(to_torch_dtype(value.dtype), self.dtype)
            store(self, _copy.like_placement(value, self))
        return self

    in_place.adapter = adapter  # pyright: ignore[reportFunctionMemberAccess]
    return in_place


def _dtype_is_left_to_out(functional: OpOverload, op: OpOverload) -> bool:
    """Whether `functional` takes the dtype of a new tensor and its out= form `op` does not, because the tensor exists already."""
    return "dtype" in {a.name for a in functional._schema.arguments} - {a.name for a in op._schema.arguments}


_SUMMED_IN_OUT = frozenset({"cumprod", "cumsum", "mean", "nansum", "prod", "sum"})  # computed in the dtype of their `out`


def _out_kernel(adapter: Adapter, op: OpOverload, *, takes_dtype: bool) -> Any:
    """The kernel of the `out=` overload `op`.

    Args:
        adapter: runs the functional form.
        op: the overload.
        takes_dtype: pass the dtype of the tensor that is written as the argument `dtype`.
    """
    names = _out_names(op)

    def out(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) if name in kwargs else args[len(args) - len(names) + i] for i, name in enumerate(names)]
        given = dict(kwargs)
        check_out(adapter.name, targets, (*args, *kwargs.values()))
        if takes_dtype or (adapter.name in _SUMMED_IN_OUT and kwargs.get("dtype") is None):
            kwargs["dtype"] = targets[0].dtype
        with exact_dtypes():
            values = adapter.arrays(args, kwargs)
            values = list(values) if isinstance(values, tuple | list) else [values]
            results = [(to_torch_dtype(value.dtype), tuple(value.shape)) for value in values]
            others = args[: len(adapter.names)]
            warns = check_results(op, others, given, dict(zip(names, targets, strict=True)), results, draws=adapter.lowering.random)
            if any(tuple(target.shape) != shape for target, (_, shape) in zip(targets, results, strict=True)):
                for value, target in zip(values, targets, strict=True):
                    _resize_out(target, value.shape, warns=warns)
                check_out(adapter.name, targets, (*args, *kwargs.values()))  # a resized target may overlap what is read
            for value, target in zip(values, targets, strict=True):
                store(target, value)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return out


def _resize_out(target: torch.Tensor, shape: tuple[int, ...], *, warns: bool) -> None:
    """Resize the tensor that is written to the shape of the result; with `warns`, warn like torch if it has elements."""
    if tuple(target.shape) == tuple(shape):
        return
    if warns and target.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(target.shape)}, which does not match the required "
            f"output shape {list(shape)}. This behavior is deprecated, and in a future PyTorch release outputs will not be resized "
            "unless they have zero elements. You can explicitly reuse an out tensor t by resizing it, inplace, to zero elements with "
            "t.resize_(0).",
            stacklevel=3,
        )
    target.resize_(shape)


def resize_(self: torch.Tensor, size: Any, memory_format: Any = None) -> torch.Tensor:
    """`tensor.resize_`: extend the storage with zeros if it is too short."""
    size = tuple(size)
    buffer = buffer_of(self)
    needed = self.storage_offset() + math.prod(size)
    if needed > math.prod(buffer.shape):
        with exact_dtypes():
            flat = buffer.get().reshape(-1)
            grown = jnp.concatenate([flat, jnp.zeros((needed - flat.size,), flat.dtype)])
            grown = grown.reshape(size) if self.storage_offset() == 0 else grown
            buffer.reshape(tuple(grown.shape))
            buffer.set(grown)
    if size == tuple(self.shape) and memory_format in (None, torch.preserve_format):
        return self
    stride = torch.empty(size, device="meta", memory_format=memory_format or torch.contiguous_format).stride()
    return _aliases.as_strided_(self, size, stride)


def fallback(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an op without a kernel by torch's decomposition, or by its functional form if it is an in-place or out= form.

    Without a kernel, a structured op's functional, in-place and out= forms call each other in a cycle. If an op occurs repeatedly
    inside itself, none of the forms has a lowering.

    Raises:
        UnsupportedOpError: there is neither a decomposition nor a functional form.
    """
    inside = _inside.get()
    if inside.count(op) >= _MAX_ROUNDS:
        raise unsupported(op, args, kwargs)
    token = _inside.set((*inside, op))
    try:
        decomposition = decomposition_table.get(op)
        if decomposition is not None:
            out = _to_out_tensors(op, decomposition, args, kwargs) if _out_names(op) else decomposition(*args, **kwargs)
            if out is not NotImplemented:
                return out
        functional = _functional_of(op)
        if functional is not None and _out_names(op):
            return _to_out_tensors(op, functional, args, kwargs, takes_dtype=_dtype_is_left_to_out(functional, op))
        if functional is not None:
            args[0].copy_(functional(*args, **kwargs))
            return args[0]
    finally:
        _inside.reset(token)
    raise unsupported(op, args, kwargs)


def sparse(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Fallback for ops that take or return sparse tensors: raise, because the device does not support them."""
    raise _of_sparse(op)


def nested(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Fallback for ops on nested tensors: raise, because the device does not support them."""
    what = f"{op} of a nested tensor: device 'jax' supports only tensors of one shape"
    raise UnsupportedOpError(message(what, *called_at(), fix="torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), and a mask"))


def _of_sparse(op: OpOverload) -> UnsupportedOpError:
    what = f"{op} of a sparse tensor: device 'jax' has only dense tensors"
    how = "sparse=False for an embedding, sparse_grad=False for gather; x.to_dense() before a tensor is moved to 'jax'"
    return UnsupportedOpError(message(what, *called_at(), fix=how))


_inside: ContextVar[tuple[OpOverload, ...]] = ContextVar("ops that the fallback is resolving", default=())
_MAX_ROUNDS = 3


def _functional_of(op: OpOverload) -> OpOverload | None:
    """The functional overload of the in-place or out= overload `op`; None if there is none."""
    if not op._schema.is_mutable:
        return None
    namespace, base = op._schema.name.split("::")
    for name in (base, base.removesuffix("_")):
        packet = getattr(getattr(torch.ops, namespace), name, None)
        for overload in packet.overloads() if packet is not None else ():
            other = getattr(packet, overload)
            if not other._schema.is_mutable and _signature(other) == _signature(op):
                return other
    return None


def _out_names(op: OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.is_out]


def _to_out_tensors(op: OpOverload, functional: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, takes_dtype: bool = False) -> Any:
    """Write the results of `functional` to the tensors that the `out=` overload `op` is given."""
    names = _out_names(op)
    others = args[: len(op._schema.arguments) - len(names)]
    given = {name: arg for name, arg in kwargs.items() if name not in names}
    targets = [kwargs[name] if name in kwargs else args[len(args) - len(names) + i] for i, name in enumerate(names)]
    check_out(op._schema.name.partition("::")[2], targets, (*others, *given.values()))
    results = functional(*others, **({**given, "dtype": targets[0].dtype} if takes_dtype else given))
    if results is NotImplemented:
        return results
    results = results if isinstance(results, tuple | list) else (results,)
    computed = [(result.dtype, tuple(result.shape)) for result in results]
    warns = check_results(op, others, given, dict(zip(names, targets, strict=True)), computed, draws=False)
    for target, result in zip(targets, results, strict=True):
        _resize_out(target, result.shape, warns=warns)
        target.copy_(result)
    return targets[0] if len(targets) == 1 else tuple(targets)


def unsupported(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> UnsupportedOpError:
    """The error for an op that has neither lowering nor decomposition."""
    if "sparse" in op.name():
        return _of_sparse(op)
    shown = ", ".join(_shown(a) for a in args) + "".join(f", {n}={_shown(a)}" for n, a in kwargs.items())
    short = _short(op)
    return UnsupportedOpError(
        message(
            f"{op} has no lowering for device 'jax'",
            *called_at(),
            f"with {shown}",
            fix=f'register one with @spmd.lowering.lower("{short}")',
        )
    )


def _shown(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return f"{str(arg.dtype).removeprefix('torch.')}{list(arg.shape)}"
    if isinstance(arg, list | tuple) and arg and isinstance(arg[0], torch.Tensor):
        return f"[{', '.join(_shown(a) for a in arg)}]"
    return repr(arg)


def _short(op: OpOverload) -> str:
    """`add.Tensor` of `aten::add.Tensor`; `relu` of `aten::relu`."""
    return op.name().removeprefix("aten::")


__all__ = ["Buffer", "Installed", "fallback", "install", "load", "resize_", "unsupported", "variants", "variants_of"]
