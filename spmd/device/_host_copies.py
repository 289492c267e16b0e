"""`HostCopy`: what a copy to the host of a traced tensor is during a trace. A call makes it a CPU tensor where it leaves the function.

log.append(loss.detach().cpu())         # the trace appends a HostCopy; every call appends a new CPU tensor

A `HostCopy` is a CPU tensor without memory, which holds a device tensor of the same shape, strides and dtype. Operations of CPU tensors
with one are computed by the program, on the device tensors that they hold, and give another. CPU tensors beside it are inputs or constants
of the program, as where they are moved to the device. What needs memory of the host, or its random generator, is refused by name.

A CPU tensor among the arguments of a traced function is one too: it holds an input of the program. It must not be written.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NoReturn, TypeGuard

import numpy as np
import torch

from spmd.base._convert import host_tensor
from spmd.base._errors import TraceError, called_at, message
from spmd.base._torch import (
    DisableTorchFunctionSubclass,
    disabled_torch_function,
    has_meta_kernels,
    make_wrapper_subclass,
    no_dispatch,
    pytree,
    set_conj,
    set_neg,
    use_meta_kernels,
)
from spmd.device._host_answers import host_answer
from spmd.device._indices import checked
from spmd.device._storage import is_device_tensor, load, recording

_aten = torch.ops.aten
_INDEXING = frozenset(("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"))
_CHANGE_MEMORY = frozenset(("aten::resize_", "aten::set_", "aten::resize_as_", "aten::_pin_memory"))


class HostCopy(torch.Tensor):
    """A copy on the host of a traced tensor.

    Attributes:
        held: the device tensor that has its values, with the same strides. Its views, and no other tensor, share its memory.
        cls: the class that it has in a call.
    """

    __slots__ = ("cls", "held")
    __torch_function__ = disabled_torch_function
    held: torch.Tensor
    cls: type

    @staticmethod
    def __new__(cls: type[HostCopy], held: torch.Tensor, in_call: type = torch.Tensor) -> HostCopy:
        made = make_wrapper_subclass(
            cls,
            tuple(held.shape),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="cpu",
        )
        made.held, made.cls = held, in_call
        if held.is_conj():
            set_conj(made, True)
        if held.is_neg():
            set_neg(made, True)
        return made

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The class that it has in a call."""
        return self.cls

    @property
    def _is_param(self) -> bool:  # for `isinstance(copy, nn.Parameter)`  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.cls is torch.nn.Parameter

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatched(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        what = f"a copy to the host of a traced tensor, {_described(self)}, was printed or made a string"
        _refuse(what, "return it from the step and print it there; x.shape and x.dtype are known here")

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if not self.dim() else self.__repr__()

    def __reduce_ex__(self, proto: Any) -> NoReturn:
        _refuse(
            f"a copy to the host of a traced tensor, {_described(self)}, was pickled or saved", "return it from the step and save it there"
        )

    def __bool__(self) -> bool:
        return bool(self.held)

    def __float__(self) -> float:
        return float(self.held)

    def __int__(self) -> int:
        return int(self.held)

    def __index__(self) -> int:
        return self.held.__index__()

    def __complex__(self) -> complex:
        return complex(self.held)

    def item(self) -> Any:
        return self.held.item()

    def tolist(self) -> Any:
        known = host_answer(load(self.held))
        if known is None:
            self._need_memory("tolist()", "return it from the step and call tolist() there")
        return known.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        self._need_memory("numpy()", "return it from the step and call numpy() there, or compute with torch's functions")

    def __array__(self, dtype: Any = None) -> Any:
        self._need_memory("a function of numpy", "return it from the step and call the function there, or compute with torch's functions")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment.")
        copied: Any = self.detach().clone().requires_grad_(self.requires_grad)
        copied.cls, memo[id(self)] = self.cls, copied
        vars(copied).update(vars(self))
        return copied

    def __copy__(self) -> torch.Tensor:
        copied: Any = self.detach().requires_grad_(self.requires_grad)
        copied.cls = self.cls
        vars(copied).update(vars(self))
        return copied

    def as_subclass(self, cls: Any) -> Any:
        """Itself: a call makes a plain tensor."""
        if cls is not torch.Tensor:
            what = f"a copy to the host of a traced tensor, {_described(self)}, would have the class {cls.__name__}"
            raise TraceError(message(what, *called_at(), "a call makes a plain tensor", fix="x.as_subclass(torch.Tensor).cpu()"))
        return self

    def fix_for_end(self) -> None:
        """Refuse writes to its memory from now on: Python uses its values when the call ends."""
        if self.grad_fn is not None:
            what = f"a copy to the host of a traced tensor with a graph, {_described(self)}, is used when the call ends"
            raise TraceError(message(what, *called_at(), "a call makes a CPU tensor without a graph", fix="x.detach().cpu()"))
        self.held.untyped_storage().is_fixed_copy = True  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.detach()

    @data.setter
    def data(self, new: Any) -> None:
        _refuse_kind("an assignment to .data changes", "it has no memory during the trace", "c.copy_(new), or use the new tensor")

    def data_ptr(self) -> int:
        self._need_memory("data_ptr()", "return it from the step and use it there")

    def untyped_storage(self) -> Any:
        self._need_memory("untyped_storage()", "return it from the step and use it there")

    def storage(self) -> Any:
        self._need_memory("storage()", "return it from the step and use it there")

    def share_memory_(self) -> Any:
        self._need_memory("share_memory_()", "return it from the step and share it there")

    def pin_memory(self, device: Any = None) -> Any:
        self._need_memory("pin_memory()", "return it from the step and pin it there")

    def apply_(self, callable: Any) -> Any:
        self._need_memory("apply_()", "use torch's functions, or return it from the step and call apply_() there")

    def map_(self, other: Any, callable: Any) -> Any:
        self._need_memory("map_()", "use torch's functions, or return it from the step and call map_() there")

    def map2_(self, x: Any, y: Any, callable: Any) -> Any:
        self._need_memory("map2_()", "use torch's functions, or return it from the step and call map2_() there")

    def __dlpack__(self, *args: Any, **options: Any) -> Any:
        self._need_memory("__dlpack__()", "return it from the step and use it there")

    def _need_memory(self, name: str, fix: str) -> NoReturn:
        if is_argument(self):
            raise computed_on_host(name)
        _refuse(f"a copy to the host of a traced tensor, {_described(self)}, was needed in memory, by {name}", fix)


def makes_host_copy(tensor: torch.Tensor) -> bool:
    """Whether a copy of `tensor` to the host is a `HostCopy` now: in the trace of a compiled function, but not in a body in it."""
    recorder = recording.get()
    makes = False if recorder is None else recorder.makes_host_copy()
    return host_answer(load(tensor)) is None if makes is None else makes


def is_host_copy(value: Any) -> TypeGuard[HostCopy]:
    """Whether it is a copy to the host of a traced tensor."""
    return type(value) is HostCopy


def stands_for_argument(copy: HostCopy) -> HostCopy:
    """The copy, which stands for a CPU tensor argument from now on, as do all views of it."""
    copy.held.untyped_storage().is_argument = True  # pyright: ignore[reportAttributeAccessIssue]
    return copy


def is_argument(value: Any) -> bool:
    """Whether it stands for (a view of) a CPU tensor argument."""
    return type(value) is HostCopy and hasattr(value.held.untyped_storage(), "is_argument")


def computed_on_host(what: str) -> TraceError:
    """The error for a use of a CPU tensor argument that only the trace would make. `what`: the operation."""
    return TraceError(
        message(
            f"the compiled function uses a CPU tensor argument on the host: {what}",
            *called_at(),
            "only the trace would do so, and its result would be the same in every call",
            fix="move the argument first, x = x.to('jax'), or do it before the call",
        )
    )


def held_of(value: Any) -> Any:
    """The device tensor that a `HostCopy` holds; any other value itself."""
    return value.held if type(value) is HostCopy else value


def refuse_to_write(copied: str, target: torch.Tensor) -> NoReturn:
    """Raise the error for a traced value that is written into a CPU tensor."""
    what = f"{copied} was written into a CPU tensor, {_described(target)}"
    _refuse(what, "make a new tensor of the copies, torch.stack(copies), or keep the tensor on device 'jax'")


def method_of(fn: Any) -> Any:
    """The method of a `HostCopy` for a function that would read its memory: `torch.Tensor.data_ptr`, `to_dlpack`; None for others."""
    if fn is torch.to_dlpack:
        return HostCopy.__dlpack__
    return next((own for name, own in vars(HostCopy).items() if callable(own) and getattr(torch.Tensor, name, None) is fn), None)


def with_memory(value: Any, name: str) -> Any:
    """A CPU tensor with the values of a `HostCopy`, which the host must know, for C++ code that reads memory; others as they are.

    Args:
        name: the function that reads it.
    """
    if type(value) is not HostCopy:
        return value
    if (known := host_answer(load(value.held))) is None:
        what = f"{name}() reads a copy to the host of a traced tensor, {_described(value)}"
        _refuse(what, f"pass {name}() a list of Python ints, or a CPU tensor that the host knows")
    return host_tensor(np.array(known))


def not_a_parameter() -> TraceError:
    """The error for `nn.Parameter(copy)`."""
    what, why = "a parameter was made of a copy to the host of a traced tensor", "its memory would be that of the copy"
    return TraceError(message(what, *called_at(), why, fix="return the copy, and make the parameter of it there"))


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _refuse(what: str, fix: str) -> NoReturn:
    raise TraceError(message(what, *called_at(), "its values are known only when the compiled program runs", fix=fix))


def _dispatched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation with at least one `HostCopy`, computed on the device."""
    name = func._schema.name
    if name == "aten::is_pinned":
        return False
    _require_possible(func, name)
    kind = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    if kind not in (None, "cpu", "jax"):
        return _on_other_device(func, args, kwargs)
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    written = _written(func, args, kwargs)
    gives_device = kind == "jax" or (name == "aten::copy_" and is_device_tensor(args[0])) or _is_of_device(func, name, args, tensors)
    target = next((t for t in written.values() if type(t) is not HostCopy and not is_device_tensor(t)), None)
    if gives_device is None or target is not None:
        if (plain := _plain((args, kwargs), tensors)) is not None:
            return func(*plain[0], **plain[1])
        if target is not None:
            refuse_to_write("a copy to the host of a traced tensor", target)
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices, jax:0 and cpu!")
    for copy in written.values():
        if type(copy) is HostCopy:
            _require_writable(copy, name)
    if kind is not None:
        kwargs = {**kwargs, "device": torch.device("jax")}
    if kwargs.get("pin_memory"):
        _refuse("pinned memory was asked for, beside a copy to the host of a traced tensor", "pin_memory=False")
    given, options = pytree.tree_map(_operand, (args, kwargs))
    without_autocast = torch.autocast("jax", enabled=False) if torch.is_autocast_enabled("jax") else nullcontext()
    with without_autocast, checked(None if gives_device else True):  # the CPU raises for an index out of bounds
        out = _with_strides(func, given, options, func(*given, **options))
    if torch.Tag.inplace_view in func.tags:
        _change_shape(func, args, kwargs)
    return _results(func, out, written, bool(gives_device))


def _require_possible(func: Any, name: str) -> None:
    title = name.partition("::")[2]
    if torch.Tag.nondeterministic_seeded in func.tags:
        _refuse_kind(
            f"{title} draws random numbers of the host for",
            "a program has no random generator of the host",
            "draw on the device, before .cpu()",
        )
    if name in _CHANGE_MEMORY:
        _refuse_kind(f"{title} changes the memory of", "it has no memory during the trace", "make a new tensor")


def _refuse_kind(what: str, why: str, fix: str) -> NoReturn:
    raise TraceError(message(f"{what} a copy to the host of a traced tensor", *called_at(), why, fix=fix))


def _require_writable(copy: HostCopy, name: str) -> None:
    if is_argument(copy):
        raise computed_on_host(f"{name.partition('::')[2]}()")
    if hasattr(copy.held.untyped_storage(), "is_fixed_copy"):
        why = "a text or an array is made of its values when the call ends"
        _refuse_kind("an operation in place changes", why, "write to it before, or to a clone: c = c.clone()")


def _is_of_device(func: Any, name: str, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> bool | None:
    """Whether the result is on the device, by torch's rules for tensors on two devices. None: torch does not take them together."""
    if name == "aten::copy_" or not any(map(is_device_tensor, tensors)):
        return False
    if name in _INDEXING and is_device_tensor(args[0]):
        return True
    return True if torch.Tag.pointwise in func.tags and all(is_device_tensor(t) or not t.dim() for t in tensors) else None


def _plain(given: Any, tensors: list[torch.Tensor]) -> Any:
    """The arguments with CPU tensors for copies whose values the host knows, which become constants with a guard; None if it does not."""
    known: dict[int, torch.Tensor] = {}
    for copy in tensors:
        if type(copy) is HostCopy:
            values = host_answer(load(copy.held))
            if values is None:
                return None
            known[id(copy)] = host_tensor(np.array(values))
    return pytree.tree_map(lambda value: known.get(id(value), value), given)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that the operation writes, by the alias set in its schema, with a number for the later ones of a list."""
    found: dict[str, torch.Tensor] = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) and not argument.kwarg_only else kwargs.get(argument.name)
            for number, one in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(one, torch.Tensor):
                    found[f"{min(argument.alias_info.before_set, default=argument.name)}{number or ''}"] = one  # a list has no alias set
    return found


def _operand(value: Any) -> Any:
    """The device tensor for a tensor of the host."""
    if type(value) is HostCopy:
        return value.held
    if not isinstance(value, torch.Tensor) or is_device_tensor(value) or getattr(value, "__wrapped_number", None) is not None:
        return value
    if value.requires_grad and torch.is_grad_enabled():
        what = f"a CPU tensor that requires a gradient, {_described(value)}, is used together with a copy to the host of a traced tensor"
        raise TraceError(
            message(what, *called_at(), "the program has no gradients of CPU tensors", fix="move it to the device before the call")
        )
    with DisableTorchFunctionSubclass():
        return _aten._to_copy.default(value, device=torch.device("jax"))


def _meta(value: Any) -> Any:
    """A tensor of shape, strides and dtype alone in the place of a tensor."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta") if isinstance(value, torch.Tensor) else value


def _results(func: Any, out: Any, written: dict[str, torch.Tensor], gives_device: bool) -> Any:
    returns = func._schema.returns
    if written and returns and all(r.alias_info is not None and r.alias_info.is_write for r in returns):
        given = [written[min(r.alias_info.before_set)] for r in returns]
        for copy in given:
            if type(copy) is HostCopy and copy.shape != copy.held.shape:
                _refuse_kind(
                    "an operation with out= changes the shape of", "it has no memory during the trace", "give it the shape of the result"
                )
        return given[0] if len(given) == 1 else tuple(given)
    if gives_device:
        return out
    return pytree.tree_map(lambda value: HostCopy(value) if is_device_tensor(value) else value, out)


def _with_strides(func: Any, given: tuple[Any, ...], options: dict[str, Any], out: Any) -> Any:
    """The results of an operation on the device, with the strides that they have on the CPU."""
    tensors = [t for t in pytree.tree_leaves((given, options)) if isinstance(t, torch.Tensor)]
    is_plain = torch.Tag.pointwise in func.tags and all(t.is_contiguous() for t in tensors)
    if is_plain or any(r.alias_info is not None for r in func._schema.returns):
        return out
    given, options = pytree.tree_map(_meta, (given, options))
    options = {**options, "device": torch.device("meta")} if options.get("device") is not None else options
    try:
        model = func(*given, **options)
    except Exception:  # a kernel for shapes alone may be missing, and may need values
        return out
    return pytree.tree_map(lambda value, own: _strided(value, own) if is_device_tensor(value) else value, out, model)


def _strided(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    if tensor.stride() == model.stride() or tensor.shape != model.shape:
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: -model.stride(dim))
    back = sorted(range(tensor.dim()), key=order.__getitem__)
    return tensor.permute(order).contiguous().permute(back)


def _change_shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Repeat a change of shape and strides in place, which the held tensor has made, on the copy."""
    include = has_meta_kernels()
    with no_dispatch():
        use_meta_kernels(True)
        try:
            func(*args, **kwargs)
        finally:
            use_meta_kernels(include)


def _on_other_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if torch.device(kwargs["device"]).type != "meta":
        _refuse_kind(
            f"{func._schema.name.partition('::')[2]} to {kwargs['device']} moves", "a program has one device", "move it after the call"
        )
    return func(*pytree.tree_map(_meta, args), **kwargs)


__all__ = [
    "HostCopy",
    "computed_on_host",
    "held_of",
    "is_argument",
    "is_host_copy",
    "makes_host_copy",
    "method_of",
    "not_a_parameter",
    "refuse_to_write",
    "stands_for_argument",
    "with_memory",
]
