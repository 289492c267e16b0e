"""Raises CPU torch's errors for invalid calls on this device, by running torch's own kernels with shapes and dtypes instead of values.

A `MetaCheck` runs the meta kernel once per plan and combination of shapes; the result dtypes come from the same run. If the meta
kernel raises, the CPU kernel runs on zeros and decides. The user therefore sees the CPU's own error, and a meta kernel that is too
strict has no effect. Errors that depend on values (an index out of bounds) are not found here. Checks that a meta kernel lacks are
in the `check` of the lowering. Tensors that an op writes are checked where they are written.

    meta_check = MetaCheck(torch.ops.aten.gather.default, (TensorSlot(0, torch.float32), 1, TensorSlot(1, torch.int64)), {})
    meta_check.results([jnp.ones((1, 1)), jnp.ones((2, 2))])     # RuntimeError: Size does not match at dimension 0 ...
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import torch

from spmd.base._convert import scalar_type
from spmd.base._errors import SpmdError, UnsupportedOpError, called_at, message
from spmd.base._torch import (
    DisableAutocast,
    LinAlgError,
    OpOverload,
    custom_operators,
    disable_current_modes,
    dispatch_has_kernel_for_dispatch_key,
)
from spmd.device._numbers import number_of, sample

_FEW = 2**16  # total number of elements up to which the real shapes are used
_LARGEST = torch.iinfo(torch.int64).max
_SMALL = 8  # maximum size of a dim for larger calls
_MASKS = {torch.bool, torch.uint8}
_MIXED = {torch.float32, torch.bfloat16, torch.float16}
_IS_OF_DTYPES = re.compile(r"[Tt]ype|not implemented for|floating.point|[Bb]ool|[Cc]omplex|integ|expects Long|a long tensor")
_IS_OF_SHAPES = re.compile(r"\b(dims?|dimensions?|dimensional|sizes?|shapes?|vector|matrix|\d-?D|number of elements)\b", re.IGNORECASE)
_IS_OF_SELECTED = re.compile("broadcast together|cannot be broadcast to indexing result")
# Their sizes have to agree with values of tensors, which are not those of the call here.
_SIZES_ARE_VALUES = frozenset(
    f"aten::{name}"
    for name in (
        *("ctc_loss", "_ctc_loss", "_ctc_loss_backward", "_pack_padded_sequence", "_pad_packed_sequence"),
        *("lu_unpack", "repeat_interleave", "segment_reduce"),
    )
)
# Ops for which accelerators accept more than the CPU: `histc` counts integers, and a 16-bit batch norm keeps statistics in float32.
_OTHER_ON_ACCELERATORS = {"aten::histc", "aten::native_batch_norm_backward"}
_LACKS_A_KERNEL = re.compile(r"not implemented for '(Half|BFloat16|Float8\w*|ComplexHalf)'")
# Ops that move elements, which other accelerators have for float8 too. They have none that compute.
_TAKES_FLOAT8 = re.compile("aten::(count_nonzero|flip|gather|index_(copy|fill|put)|isinf|masked_.*|nonzero|put|scatter|take|tri[lu])")
_WIDER = dict.fromkeys((torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2), torch.float32)
Dtypes = tuple[torch.dtype | None, ...] | None
_LIMITS_OF_A_KERNEL = frozenset({"aten::_grouped_mm"})  # torch refuses strides that its own kernel lacks; this device supports them


class TensorSlot:
    """Placeholder for a device tensor among a call's arguments: its dtype, and the position of its value."""

    __slots__ = ("dtype", "index")

    def __init__(self, index: int, dtype: torch.dtype) -> None:
        self.index = index
        self.dtype = dtype


class OnCpu(NamedTuple):
    """How the CPU ran a call: dtypes of its results, and its warnings."""

    dtypes: Dtypes
    warnings: list[str]


class MetaCheck:
    """A check of calls of an overload with fixed dtypes and static arguments, for any shapes.

    Attributes:
        accepted: combinations of shapes that torch accepted.
        holes: positions of the device tensors' values.
        is_complete: whether the call has every required argument and the op has a meta kernel, so that torch can run it.
    """

    __slots__ = ("accepted", "args", "holes", "is_complete", "kwargs", "op")

    def __init__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.op = op
        self.args = args
        self.kwargs = {name: arg for name, arg in kwargs.items() if name != "generator"}
        self.holes = [hole.index for hole in _tensor_slots((*args, *kwargs.values()))]
        self.accepted: set[Any] = set()
        rest = op._schema.arguments[len(args) :]  # C++ omits defaults of an in-place form, which the functional form may lack
        self.is_complete = all(a.has_default_value() or a.name in kwargs for a in rest) and _has_fake(op)

    def check(self, values: Sequence[Any]) -> None:
        """Raise torch's error for arrays of these shapes, unless it has accepted them before."""
        if tuple([values[index].shape for index in self.holes]) not in self.accepted:
            self.check_on_cpu(values, draws=True)
            self.results(values)

    def results(self, values: Sequence[Any]) -> Dtypes:
        """Result dtypes according to torch's meta kernel; None if there is no meta kernel or it cannot infer them.

        The dtype of a result that the op leaves undefined (`output_mask`) is None.

        Raises:
            Exception: CPU torch's own error, if it refuses the call.
        """
        shapes = {index: values[index].shape for index in self.holes}
        refused, out = False, None
        try:
            out = self._run("meta", shapes) if self.is_complete else None
        except (NotImplementedError, Warning):
            out = None  # no meta kernel
        except Exception as error:
            if not self.op._schema.name.startswith("aten::"):  # a library's own shape check; its CPU kernel is user code
                if "get_ctx()" in str(error):  # it would create an unbacked size, which depends on values
                    return None
                raise
            refused = self.op._schema.name not in _LIMITS_OF_A_KERNEL
        if refused:
            self._check_on_cpu(shapes)
        self.accepted.add(tuple(shapes.values()))
        return _dtypes(out)

    def check_on_cpu(self, values: Sequence[Any], *, draws: bool) -> OnCpu | None:
        """Raise CPU torch's error for arguments of these dtypes, which meta kernels seldom check, or of these shapes.

        Runs once per combination of shapes, with small tensors of zeros instead of large ones. Errors that come from the smaller shapes or
        from the zeros are ignored. Errors because the CPU has no kernel for a 16-bit float are ignored: accelerators have one.

        Args:
            draws: whether the op draws random numbers, which must not advance the user's stream.

        Returns:
            What the CPU said if it accepted the call; None if it was not asked, or its error was ignored.
        """
        if not self.is_complete or self.op._schema.name in _LIMITS_OF_A_KERNEL | _OTHER_ON_ACCELERATORS:
            return None
        if self.op._schema.name == "aten::linear" and {slot.dtype for slot in _tensor_slots(self.args)} <= _MIXED:
            return None  # parameters are cast, but inputs are not
        shapes = {index: tuple(values[index].shape) for index in self.holes}
        whole, args = shapes, self._cut_args()
        if sum(map(math.prod, shapes.values())) > _FEW:
            shapes = {index: tuple(min(size, _SMALL) for size in shape) for index, shape in shapes.items()}
        is_whole = shapes == whole and args == list(self.args)
        with warnings.catch_warnings(record=True) as warned, torch.random.fork_rng((), enabled=draws, device_type="cpu"):
            warnings.simplefilter("always")
            try:
                out = self._run("cpu", shapes, args)
                return OnCpu(_dtypes(out), [str(warning.message) for warning in warned])
            except IndexError as error:  # an index out of bounds of the small dim may be valid in the large one
                if (is_whole or _IS_OF_DTYPES.search(str(error))) and not self._is_of_masks_values(error):
                    raise
            except (RuntimeError, TypeError, ValueError) as error:
                text = str(error)
                if is_whole and self._is_of_shapes(error):
                    raise
                if _IS_OF_DTYPES.search(text) and not (self._lacks_only_a_kernel(text) and self._takes_float32(shapes, args)):
                    raise
        return None

    def _is_of_shapes(self, error: Exception) -> bool:
        """Whether an error depends on the shapes of the arguments and not on their values."""
        if isinstance(error, LinAlgError) or self.op._schema.name in _SIZES_ARE_VALUES or self._is_of_masks_values(error):
            return False
        return _IS_OF_SHAPES.search(str(error)) is not None

    @contextlib.contextmanager
    def explaining(self, values: Sequence[Any]) -> Generator[None]:
        """If a rule fails for these arrays, raise the CPU's error instead where the CPU refuses their shapes too."""
        try:
            yield
        except (TypeError, ValueError, IndexError) as error:
            if isinstance(error, SpmdError | jax.errors.JAXTypeError | jax.errors.JAXIndexError) or not self.is_complete:
                raise
            try:
                self._run("cpu", {index: tuple(values[index].shape) for index in self.holes})
            except (RuntimeError, IndexError) as on_cpu:
                if self._is_of_shapes(on_cpu):
                    raise on_cpu from error
            raise

    def _lacks_only_a_kernel(self, text: str) -> bool:
        """Whether the CPU's error says that it has no kernel for a short float, for which accelerators have one."""
        lacking = _LACKS_A_KERNEL.search(text)
        return bool(lacking and ("Float8" not in lacking[1] or _TAKES_FLOAT8.fullmatch(self.op._schema.name)))

    def _takes_float32(self, shapes: dict[int, tuple[int, ...]], args: Sequence[Any]) -> bool:
        """Whether the CPU accepts these dtypes with float32 in place of shorter floats, as far as dtypes are concerned."""
        try:
            self._run("cpu", shapes, args, _WIDER)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return not _IS_OF_DTYPES.search(str(error))
        return True

    def _check_on_cpu(self, shapes: dict[int, tuple[int, ...]]) -> None:
        with contextlib.suppress(NotImplementedError, Warning):
            try:
                self._run("cpu", shapes)
            except IndexError as error:
                if not self._is_of_masks_values(error):
                    raise

    def _is_of_masks_values(self, error: Exception) -> bool:
        """Whether the error is only about the number of elements that a mask selects: a mask of zeros selects none."""
        return _IS_OF_SELECTED.search(str(error)) is not None and any(slot.dtype in _MASKS for slot in _tensor_slots(self.args))

    def _cut_args(self) -> list[Any]:
        """The arguments, with small sizes in place of those of a large result that the CPU would allocate (`slice_backward`)."""
        return [[min(size, _SMALL) for size in arg] if _is_sizes(arg) and math.prod(map(abs, arg)) > _FEW else arg for arg in self.args]

    def _run(
        self,
        device: str,
        shapes: dict[int, tuple[int, ...]],
        given: Sequence[Any] | None = None,
        dtypes: Mapping[torch.dtype, torch.dtype] = MappingProxyType({}),
    ) -> Any:
        def made(arg: Any) -> Any:
            if isinstance(arg, TensorSlot):  # the system allocates no memory for unwritten zeros
                return torch.zeros(shapes[arg.index], dtype=dtypes.get(arg.dtype, arg.dtype), device=device)
            if isinstance(arg, torch.dtype):
                return dtypes.get(arg, arg)
            return [made(item) for item in arg] if isinstance(arg, list) else arg

        args = [made(arg) for arg in (self.args if given is None else given)]
        kwargs = {name: device if name == "device" else made(arg) for name, arg in self.kwargs.items()}
        if device == "cpu" and any(
            a.name == "generator" for a in self.op._schema.arguments[len(args) :]
        ):  # must not draw from the user's stream
            kwargs["generator"] = torch.Generator()
        with DisableAutocast(), disable_current_modes():  # a mode of the user's must not see this call
            return self.op(*args, **kwargs)


def _dtypes(out: Any) -> Dtypes:
    outs = out if isinstance(out, tuple | list) else (out,)
    if out is None or not all(o is None or isinstance(o, torch.Tensor) for o in outs):
        return None
    return tuple(None if o is None else o.dtype for o in outs) or None


def _is_sizes(arg: Any) -> bool:
    return isinstance(arg, list) and all(type(item) is int for item in arg)


def _has_fake(op: OpOverload) -> bool:
    """Whether an operator can infer the properties of its results (`register_fake`); assumed for ATen's."""
    if op._schema.name.startswith("aten::"):
        return True
    made = custom_operators.get(op._schema.name)  # made by `custom_op`, whose default fake raises
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
    """An argument in the form that `MetaCheck` takes.

    Args:
        arg: argument of the call.
        index_of: its counterpart in the plan's template, whose `index` is the position of its value; a list for a list.
    """
    if isinstance(arg, torch.Tensor):
        if arg.device.type == "jax":
            return TensorSlot(index_of.index, arg.dtype)
        number = number_of(arg)
        return arg if number is None else sample(number)
    if isinstance(arg, list | tuple):
        return [meta_argument(item, index_of[i] if isinstance(index_of, list) else None) for i, item in enumerate(arg)]
    if isinstance(arg, torch.Generator):
        return None
    return sample(arg) if isinstance(arg, torch.SymFloat) else arg


_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_FLOATS = (torch.float8_e4m3fnuz, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32)
_HIGHS = sorted({*(torch.iinfo(dtype).max for dtype in _INTEGERS), *(torch.finfo(dtype).max for dtype in _FLOATS)})
# Unsigned dtypes also accept negative numbers that wrap around once.
_LOWS = sorted({*(-high for high in _HIGHS), *(torch.iinfo(dtype).min for dtype in _INTEGERS)})


def kind_of_number(number: Any) -> tuple[Any, ...]:
    """What torch's checks ask of a number: its class, the dtypes that can represent it, and whether unsigned tensors refuse it."""
    return "number", type(number), range_of(number), not isinstance(number, complex) and number < 0


def refuse_large_ints(op: str, args: Iterable[Any]) -> None:
    """Raise UnsupportedOpError for a Python int that torch takes as uint64: jax's Python ints are int64.

    Args:
        op: name of the operator.
        args: the arguments that the operator computes with.
    """
    large = next((arg for arg in args if type(arg) is int and arg > _LARGEST), None)
    if large is not None:
        raise UnsupportedOpError(
            message(
                f"{op} on device 'jax' got the Python int {large}",
                f"the largest one is 2**63 - 1 = {_LARGEST}",
                *called_at(),
                fix="number - 2**64, which are the same 64 bits, beside integers; float(number) beside floats",
            )
        )


def range_of(number: Any) -> Any:
    """Key for the set of dtypes that can represent a number; None: all. The CPU refuses other dtypes: `fill_(1e6)` of float16."""
    if type(number) is complex:
        return range_of(number.real), range_of(number.imag)
    if -128 <= number <= 127:
        return None
    return (bisect_left(_HIGHS, number), bisect_right(_LOWS, number)) if math.isfinite(number) else str(number)


def check_expands(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise torch's error if `source` cannot be expanded to the shape of `target`, to which it is copied."""
    if source.dim() > target.dim():
        raise RuntimeError(f"output with shape {list(target.shape)} doesn't match the broadcast shape {list(source.shape)}")
    for dim in range(-1, -source.dim() - 1, -1):
        if source.shape[dim] not in (1, target.shape[dim]):
            raise RuntimeError(
                f"The size of tensor a ({target.shape[dim]}) must match the size of tensor b ({source.shape[dim]}) "
                f"at non-singleton dimension {target.dim() + dim}"
            )


def check_cast(computed: torch.dtype, target: torch.dtype) -> None:
    """Raise torch's error if a result of dtype `computed` cannot be written to a tensor of dtype `target`."""
    if not torch.can_cast(computed, target):
        raise RuntimeError(f"result type {scalar_type(computed)} can't be cast to the desired output type {scalar_type(target)}")


def check_results(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    targets: dict[str, torch.Tensor],
    results: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    *,
    draws: bool,
) -> bool:
    """Raise CPU torch's error if it does not write these results to the tensors of `out=`.

    Some ops cast, and some need exactly the result's dtype. Some warn about a resize. So if a dtype or shape differs, the CPU runs the op
    once with zeros.

    Args:
        op: the `out=` overload.
        args, kwargs: its other arguments.
        targets: the tensors to write to, by parameter.
        results: dtype and shape of each result.
        draws: whether the op draws random numbers.

    Returns:
        Whether the CPU warns about tensors that it resizes.
    """
    if all((t.dtype, tuple(t.shape)) == result for t, result in zip(targets.values(), results, strict=True)):
        return False
    tensors: list[torch.Tensor] = []

    def placed(arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            return [placed(item) for item in arg]
        if not (isinstance(arg, torch.Tensor) and arg.device.type == "jax"):
            return meta_argument(arg, None)
        tensors.append(arg)
        return TensorSlot(len(tensors) - 1, arg.dtype)

    check = MetaCheck(op, tuple(map(placed, args)), {name: placed(arg) for name, arg in {**kwargs, **targets}.items()})
    on_cpu = check.check_on_cpu(tensors, draws=draws)
    if on_cpu is None:
        for target, (computed, _) in zip(targets.values(), results, strict=True):
            check_cast(computed, target.dtype)
    return on_cpu is None or any("resized" in text for text in on_cpu.warnings)


__all__ = [
    "Dtypes",
    "TensorSlot",
    "MetaCheck",
    "kind_of_number",
    "meta_argument",
    "refuse_large_ints",
    "check_cast",
    "check_expands",
    "check_results",
]
