"""What torch's CPU refuses, this device refuses: torch's own kernels are asked, with shapes and dtypes in place of values.

A `MetaCheck` asks the meta kernel once per plan and combination of shapes; the same answer gives the result dtypes. Where it
refuses, the CPU kernel has the last word, on zeros, so that a user sees the CPU's own error and a meta kernel that is too
strict refuses nothing. What neither sees without values (an index out of bounds) is not refused; what a meta kernel leaves
to others is in the `check` of a lowering. Tensors that an op writes are looked at where they are written.

    meta_check = MetaCheck(torch.ops.aten.gather.default, (TensorSlot(0, torch.float32), 1, TensorSlot(1, torch.int64)), {})
    meta_check.results([jnp.ones((1, 1)), jnp.ones((2, 2))])     # RuntimeError: Size does not match at dimension 0 ...
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from spmd.base._errors import SpmdError, called_at, message
from spmd.base._torch import DisableAutocast, OpOverload, custom_operators, dispatch_has_kernel_for_dispatch_key
from spmd.device._numbers import sample
from spmd.device._storage import buffer_of, is_device_tensor

_FEW, _SMALL = 2**16, 8  # elements of all arguments up to which they are asked for as they are; size of a dim else
_MASKS = {torch.bool, torch.uint8}
_MIXED = {torch.float32, torch.bfloat16, torch.float16}
_IS_OF_DTYPES = re.compile(r"type|not implemented for|floating.point|[Bb]ool|[Cc]omplex|integ")
# What accelerators do and the CPU does not: integers are counted (a size that follows from values is refused elsewhere), and the
# statistics of a 16-bit batch norm are kept in float32
_OTHER_ON_ACCELERATORS = {"aten::histc", "aten::bincount", "aten::native_batch_norm_backward"}
_LACKS_A_KERNEL = re.compile(r"not implemented for '(Half|BFloat16|Float8\w*|ComplexHalf)'")
Dtypes = tuple[torch.dtype | None, ...] | None
_LIMITS_OF_A_KERNEL = frozenset({"aten::_grouped_mm"})  # torch refuses strides that its kernel does not take: no matter here


class TensorSlot:
    """A device tensor's place among a call's arguments: its dtype, and the position of its shape."""

    __slots__ = ("dtype", "index")

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        self.index = index
        self.dtype = dtype


class MetaCheck:
    """One way to call an overload, shapes left open.

    Attributes:
        accepted: the combinations of shapes that torch accepted.
        is_complete: the call has every argument that the overload needs; torch can be asked.
    """

    __slots__ = ("accepted", "args", "holes", "is_complete", "kwargs", "op")

    def __init__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = {name: arg for name, arg in kwargs.items() if name != "generator"}
        self.holes = [hole.index for hole in _tensor_slots((*args, *kwargs.values()))]
        self.accepted: set[Any] = set()
        rest = op._schema.arguments[len(args) :]  # C++ leaves an in-place form's defaults out, which its functional form may not have
        self.is_complete = all(a.has_default_value() or a.name in kwargs for a in rest) and _has_fake(op)

    def check(self, values: Sequence[Any]) -> None:
        """Raise what torch raises for arrays of these shapes, if it has not accepted them before."""
        if tuple([values[index].shape for index in self.holes]) not in self.accepted:
            self.results(values)

    def results(self, values: Sequence[Any]) -> Dtypes:
        """What torch's meta kernel says the result dtypes are; None if it has no meta kernel or cannot tell.

        One of several results is None where the op leaves it undefined (`output_mask`).

        Raises:
            Exception: torch's CPU refuses the call; its own error.
        """
        shapes = {index: values[index].shape for index in self.holes}
        refused, out = False, None
        try:
            out = self._asked("meta", shapes) if self.is_complete else None
        except (NotImplementedError, Warning):
            out = None  # it has no meta kernel
        except Exception as error:
            if not self.op._schema.name.startswith("aten::"):  # a library's own check of shapes; its CPU kernel is the user's code
                if "get_ctx()" in str(error):  # it would make up a size, which depends on values
                    return None
                raise
            refused = self.op._schema.name not in _LIMITS_OF_A_KERNEL
        if refused:
            self._ask_cpu(shapes)
        self.accepted.add(tuple(shapes.values()))
        outs = out if isinstance(out, tuple | list) else (out,)
        if out is not None and all(o is None or isinstance(o, torch.Tensor) for o in outs):
            return tuple(None if o is None else o.dtype for o in outs) or None
        return None

    def check_dtypes(self, values: Sequence[Any], *, draws: bool) -> None:
        """Raise what torch's CPU raises for arguments of these dtypes, which meta kernels seldom look at.

        Asked once per plan, with small zeros in place of large ones; what they make the CPU refuse for another reason is not
        refused. Nor is what only a 16-bit float's missing CPU kernel refuses: accelerators have it.

        Args:
            draws: the op draws random numbers, which is not to be seen in the user's stream.
        """
        if not self.is_complete or self.op._schema.name in _LIMITS_OF_A_KERNEL | _OTHER_ON_ACCELERATORS:
            return
        if self.op._schema.name == "aten::linear" and {slot.dtype for slot in _tensor_slots(self.args)} <= _MIXED:
            return  # parameters are casts, inputs not
        shapes = {index: tuple(values[index].shape) for index in self.holes}
        whole, args = shapes, self._cut_args()
        if sum(map(math.prod, shapes.values())) > _FEW:
            shapes = {index: tuple(min(size, _SMALL) for size in shape) for index, shape in shapes.items()}
        is_whole = shapes == whole and args == list(self.args)
        with warnings.catch_warnings(), torch.random.fork_rng((), enabled=draws, device_type="cpu"):
            warnings.simplefilter("ignore")
            try:
                self._asked("cpu", shapes, args)
            except IndexError as error:  # a position in a small dim says nothing of the large one
                if (is_whole or _IS_OF_DTYPES.search(str(error))) and not self._is_of_masks_values(error):
                    raise
            except (RuntimeError, TypeError, ValueError) as error:
                said = str(error)
                if _IS_OF_DTYPES.search(said) and not _LACKS_A_KERNEL.search(said):
                    raise

    def _ask_cpu(self, shapes: dict[int, tuple[int, ...]]) -> None:
        with contextlib.suppress(NotImplementedError, Warning):
            try:
                self._asked("cpu", shapes)
            except IndexError as error:
                if not self._is_of_masks_values(error):
                    raise

    def _is_of_masks_values(self, error: IndexError) -> bool:
        """Whether torch only refuses how many places a mask selects: one of zeros selects none."""
        return "broadcast together" in str(error) and any(slot.dtype in _MASKS for slot in _tensor_slots(self.args))

    def _cut_args(self) -> list[Any]:
        """The arguments with small sizes in place of those of a large result, which the CPU would write (`slice_backward`)."""
        return [[min(size, _SMALL) for size in arg] if _is_sizes(arg) and math.prod(map(abs, arg)) > _FEW else arg for arg in self.args]

    def _asked(self, device: str, shapes: dict[int, tuple[int, ...]], given: Sequence[Any] | None = None) -> Any:
        def made(arg: Any) -> Any:
            if isinstance(arg, TensorSlot):
                return torch.zeros(shapes[arg.index], dtype=arg.dtype, device=device)  # the system gives no memory for unwritten zeros
            return [made(item) for item in arg] if isinstance(arg, list) else arg

        args = [made(arg) for arg in (self.args if given is None else given)]
        kwargs = {name: device if name == "device" else made(arg) for name, arg in self.kwargs.items()}
        if device == "cpu" and any(
            a.name == "generator" for a in self.op._schema.arguments[len(args) :]
        ):  # not to draw from the user's stream
            kwargs["generator"] = torch.Generator()
        with DisableAutocast():
            return self.op(*args, **kwargs)


def _is_sizes(arg: Any) -> bool:
    return isinstance(arg, list) and all(type(item) is int for item in arg)


def _has_fake(op: OpOverload) -> bool:
    """Whether a library's operator says what its results are like (`register_fake`); ATen's always may."""
    if op._schema.name.startswith("aten::"):
        return True
    made = custom_operators.get(op._schema.name)  # of `custom_op`, which registers a fake that raises until it is given one
    if made is not None:
        return made._abstract_fn is not None
    return dispatch_has_kernel_for_dispatch_key(op.name(), "Meta")


def _tensor_slots(args: Iterable[Any]) -> Iterable[TensorSlot]:
    for arg in args:
        if isinstance(arg, TensorSlot):
            yield arg
        elif isinstance(arg, list):
            yield from _tensor_slots(arg)


def meta_argument(arg: Any, index_of: Any) -> Any:
    """An argument as a `MetaCheck` holds it.

    Args:
        arg: what the call gave.
        index_of: its counterpart in the plan's template, whose `index` is the value's position; a list for a list.
    """
    if isinstance(arg, torch.Tensor):
        if arg.device.type == "jax":
            return TensorSlot(index_of.index, arg.dtype)
        number = getattr(arg, "__wrapped_number", None)
        return arg if number is None else sample(number)
    if isinstance(arg, list | tuple):
        return [meta_argument(item, index_of[i] if isinstance(index_of, list) else None) for i, item in enumerate(arg)]
    if isinstance(arg, torch.Generator):
        return None
    return sample(arg) if isinstance(arg, torch.SymFloat) else arg


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_FLOATS = (torch.float8_e4m3fnuz, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32)
_HIGHS = sorted({*(torch.iinfo(dtype).max for dtype in _INTEGERS), *(torch.finfo(dtype).max for dtype in _FLOATS)})
_LOWS = sorted({*(-high for high in _HIGHS), *(torch.iinfo(dtype).min for dtype in _INTEGERS)})  # unsigned ones take what wraps once


def range_of(number: Any) -> Any:
    """Which dtypes hold a number (None: all), since the CPU refuses to put it into others: `fill_(1e6)` of float16."""
    if type(number) is complex:
        return range_of(number.real), range_of(number.imag)
    if -128 <= number <= 127:
        return None
    return (bisect_left(_HIGHS, number), bisect_right(_LOWS, number)) if math.isfinite(number) else str(number)


# Ops that write an expanded tensor on the CPU too: they repeat one number, or never look.
# fmt: off
_WRITES_EXPANDED = frozenset({
    "addmv_", "baddbmm_", "conj_physical_", "fill", "fill_", "full", "index_fill", "index_put", "masked_fill", "ones", "threshold",
    "tril", "triu", "zeros",
})
# Ops that may not write what they read, be it the same window.
_READS_ALL_ALONG = frozenset({"cat", "gather", "index_select", "kthvalue", "linalg_cross", "masked_select", "take"})
# In-place ops that may not read what they write at all; pointwise ones may, where it is the same window.
WRITES_APART = frozenset({"index_add", "index_copy", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce"})
# Ops whose `out=` has the result's dtype exactly; others cast.
_EXACT_OUT = frozenset({
    "addmm", "addmv", "aminmax", "argmax", "argmin", "baddbmm", "bmm", "bucketize", "ceil", "complex", "cummax", "cummin", "diag",
    "floor", "frac", "gather", "heaviside", "index_copy", "index_reduce", "index_select", "kthvalue", "lerp", "linalg_cholesky_ex",
    "linalg_cross", "linalg_inv_ex", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_lu", "linalg_lu_factor_ex", "linalg_lu_solve",
    "linalg_qr", "logcumsumexp", "lu_unpack", "masked_select", "max", "median", "min", "mm", "mode", "multinomial", "nanmedian", "neg",
    "nonzero", "polar", "renorm", "round", "scatter", "scatter_add", "scatter_reduce", "searchsorted", "sgn", "sign", "sort", "take",
    "topk", "triangular_solve", "tril", "triu", "trunc",
})
# fmt: on
_SHARED = (
    "unsupported operation: some elements of the input tensor and the written-to tensor refer to a single memory location. "
    "Please clone() the tensor before performing the operation."
)
_C_NAMES = {
    torch.bool: "bool",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short int",
    torch.int32: "int",
    torch.int64: "long int",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}  # fmt: skip


def check_in_place(name: str, target: torch.Tensor) -> None:
    """Raise as torch does where a tensor is to be written whose elements share their place.

    Args:
        name: the op without its overload.
        target: the tensor to write.

    Raises:
        RuntimeError: a dim was expanded.
    """
    if target.is_contiguous() or name in _WRITES_EXPANDED:
        return
    if any(step == 0 and size > 1 for size, step in zip(target.shape, target.stride(), strict=True)):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory location. "
            "Please clone() the tensor before performing the operation."
        )


def require_apart(name: str, target: torch.Tensor) -> None:
    """Raise where an op that reads what it writes, or writes a part of it, is given overlapping windows (`x.unfold(0, 3, 1).add_(1)`).

    What CPU torch leaves there depends on the order in which it happens to go; it asks to clone, and refuses expanded dims alone.

    Raises:
        SpmdError: two elements of the target share their place.
    """
    reach = 0
    for step, size in sorted((s, n) for n, s in zip(target.shape, target.stride(), strict=True) if n > 1):
        if step <= reach:
            places = np.zeros((), np.int64)
            for n, s in zip(target.shape, target.stride(), strict=True):
                places = places[..., None] + np.arange(n) * s
            if np.unique(places).size < places.size:
                what = f"{name} in place of a view whose elements share memory: shape {tuple(target.shape)}, strides {target.stride()}"
                raise SpmdError(message(what, *called_at(), fix="clone the view first, and write the result back where it belongs"))
            return
        reach += (size - 1) * step


def check_out(name: str, targets: Sequence[torch.Tensor], read: Iterable[Any]) -> None:
    """Raise as torch does where what an op writes (`out=`) shares memory within itself or with what the op reads.

    Args:
        name: the op without its overload.
        targets: the tensors to write.
        read: the op's arguments.

    Raises:
        RuntimeError: elements are shared.
    """
    for target in targets:
        check_in_place(name, target)
    for arg in read:
        if isinstance(arg, list | tuple):
            check_out(name, targets, arg)
        elif _is_shared(targets, arg, may_be_read=name not in _READS_ALL_ALONG):
            raise RuntimeError(_SHARED)


def check_overlap(name: str, target: torch.Tensor, read: Iterable[Any]) -> None:
    """Raise as torch does where a tensor that is written in place shares part of its memory with what the op reads.

    Args:
        name: the op without its overload.
        target: the tensor to write.
        read: the op's other arguments.

    Raises:
        RuntimeError: they share elements, and are not the same window.
    """
    for arg in read:
        if isinstance(arg, torch.Tensor) and _is_shared((target,), arg, may_be_read=name not in WRITES_APART):
            raise RuntimeError(_SHARED)


def check_expands(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise as torch does where what is copied cannot be expanded to the tensor that is written."""
    if source.dim() > target.dim():
        raise RuntimeError(f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(source.shape)}")
    for dim in range(-1, -source.dim() - 1, -1):
        if source.shape[dim] not in (1, target.shape[dim]):
            raise RuntimeError(
                f"The size of tensor a ({target.shape[dim]}) must match the size of tensor b ({source.shape[dim]}) "
                f"at non-singleton dimension {target.dim() + dim}"
            )


def check_out_dtype(name: str, computed: torch.dtype, target: torch.Tensor) -> None:
    """Raise as torch does where a result cannot be written to `target` because of its dtype.

    Args:
        name: the op without its overload.
        computed: the result's dtype.
        target: the tensor to write.

    Raises:
        RuntimeError: torch does not cast so, or casts nothing for this op.
    """
    if not torch.can_cast(computed, target.dtype):
        raise RuntimeError(f"result type {_title(computed)} can't be cast to the desired output type {_title(target.dtype)}")
    if computed != target.dtype and name in _EXACT_OUT:
        wanted, got = _C_NAMES.get(computed, computed), _C_NAMES.get(target.dtype, target.dtype)
        raise RuntimeError(f"Expected out tensor to have dtype {wanted}, but got {got} instead")


def _title(dtype: torch.dtype) -> str:
    names = {torch.float32: "Float", torch.float64: "Double", torch.int64: "Long", torch.int32: "Int", torch.bool: "Bool"}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def _is_shared(targets: Sequence[torch.Tensor], arg: Any, *, may_be_read: bool) -> bool:
    if not isinstance(arg, torch.Tensor) or arg.device.type != "jax":
        return False
    return any(_overlap(target, arg, may_be_read=may_be_read) for target in targets)


def _overlap(target: torch.Tensor, arg: torch.Tensor, *, may_be_read: bool) -> bool:
    """True if the two share elements, as far as torch looks: at the extents of dense windows."""
    if target is arg:
        return not may_be_read
    if not (is_device_tensor(target) and is_device_tensor(arg)):
        return False
    if not (target.numel() and arg.numel()) or buffer_of(target) is not buffer_of(arg):
        return False
    if not (_is_dense(target) and _is_dense(arg)):
        return False
    (start, stop), (first, last) = _extent(target), _extent(arg)
    if (start, stop) == (first, last) and target.stride() == arg.stride():
        return not may_be_read
    return start < last and first < stop


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + tensor.numel() * tensor.itemsize


__all__ = [
    "WRITES_APART",
    "Dtypes",
    "TensorSlot",
    "MetaCheck",
    "meta_argument",
    "check_expands",
    "check_in_place",
    "check_out",
    "check_out_dtype",
    "check_overlap",
    "require_apart",
]
