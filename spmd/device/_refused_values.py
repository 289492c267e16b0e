"""Invalid values, other than indices, for which CPU torch raises: integers divided by 0, probabilities outside [0, 1], negative rates,
masks that select another number of elements than there are values.

For values that the host knows, the error is raised immediately. For others, the program or the eager operation makes a check
(`_checks`), which is raised at the next read. The body of `spmd.scan` and of a manual region checks only values that the host knows,
because no flag can leave it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd.base._open_sizes import are_sizes_open
from spmd.device._numbers import number_of, sample
from spmd.lowering.index import masked_count, selected_shape, shape_mismatch


@dataclass(frozen=True)
class Refused:
    """A condition under which CPU torch refuses the elements of a tensor.

    Attributes:
        index: the tensor.
        is_wrong: called with numpy or jax.numpy and an array; returns a 0-dim bool, True if the array has invalid elements.
        text: CPU torch's message.
        kind: class of CPU torch's exception.
        fix: fix that the error of a check on the device suggests.
    """

    index: torch.Tensor
    is_wrong: Callable[[Any, Any], Any]
    text: str
    kind: type[Exception] = RuntimeError
    fix: str = "check the values before this line, and mask invalid ones"

    def found(self, lib: Any, values: Any) -> Any:
        """1 if the values are invalid, else 0."""
        return lib.asarray(self.is_wrong(lib, values), np.int64) if lib is np else _on_device(self.is_wrong, values)

    def require(self, values: np.ndarray[Any, Any]) -> None:
        """Raise CPU torch's error if values that the host knows are invalid."""
        if self.found(np, values):
            raise self.kind(self.text)


@functools.partial(jax.jit, static_argnums=0)
def _on_device(is_wrong: Callable[[Any, Any], Any], values: Any) -> Any:
    return jnp.asarray(is_wrong(jnp, values), jnp.int64)


def _has_zero(lib: Any, values: Any) -> Any:
    return (values == 0).any()


def _not_in_unit(lib: Any, values: Any) -> Any:
    return ~((values >= 0) & (values <= 1)).all()


def _has_negative(lib: Any, values: Any) -> Any:
    return ~(values >= 0).all()


def _no_probabilities(lib: Any, values: Any) -> Any:
    return ~((values >= 0) & lib.isfinite(values)).all()


def _is_not_finite(lib: Any, values: Any) -> Any:
    return ~lib.isfinite(values).all()


def _adds_to_zero(lib: Any, values: Any) -> Any:
    return (values.sum(-1) <= 0).any()


@dataclass(frozen=True)
class _Selects:
    """Whether a mask selects too many elements, `times` for each of its own, or with `exactly` another number than `count`."""

    count: int
    times: int = 1
    exactly: bool = False

    def __call__(self, lib: Any, mask: Any) -> Any:
        selected = lib.count_nonzero(mask) * self.times
        return selected != self.count if self.exactly else selected > self.count


@dataclass(frozen=True)
class _AddsTo:
    """Whether the sum of all numbers is another one than `total`."""

    total: int

    def __call__(self, lib: Any, values: Any) -> Any:
        return values.sum() != self.total


_Named = dict[str, Any]
INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64})
_DIVISOR = "mask the divisor before this line: torch.where(n == 0, 1, n)"


def _divisor(named: _Named) -> Iterator[Refused]:
    """Checks only integer division: floats have infinities, and bools are not divided."""
    self, other = (arg if (number := number_of(arg)) is None else sample(number) for arg in (named["self"], named["other"]))
    if torch.result_type(self, other) not in INTEGERS or (isinstance(self, torch.Tensor) and not self.numel()):
        return
    if isinstance(other, torch.Tensor):
        yield Refused(other, _has_zero, "ZeroDivisionError", fix=_DIVISOR)
    elif int(other) % (1 << 8 * torch.result_type(self, other).itemsize) == 0:  # the number wraps to 0 in the dtype
        raise RuntimeError("ZeroDivisionError")


def _rounded_divisor(named: _Named) -> Iterator[Refused]:
    if named.get("rounding_mode") is not None:
        yield from _divisor(named)


def _each(name: str, is_wrong: Callable[[Any, Any], Any], text: str) -> Callable[[_Named], Iterator[Refused]]:
    def refused(named: _Named) -> Iterator[Refused]:
        yield Refused(named[name], is_wrong, text)

    return refused


def _weights(named: _Named) -> Iterator[Refused]:
    yield Refused(named["self"], _no_probabilities, "probability tensor contains either `inf`, `nan` or element < 0")
    yield Refused(named["self"], _adds_to_zero, "invalid multinomial distribution (sum of probabilities <= 0)")


def _probabilities(named: _Named) -> Iterator[Refused]:
    for name in ("input", "target"):
        tensor = named["self" if name == "input" else name]
        yield Refused(tensor, _not_in_unit, f"all elements of {name} should be between 0 and 1")


def _fractions(named: _Named) -> Iterator[Refused]:
    if named["q"].numel():
        yield Refused(named["q"], _not_in_unit, "quantile() q values must be in the range [0, 1]")


def values_of_mask(named: _Named) -> Iterator[Refused]:
    """Checks `x[mask] = values` where there is a value for each element that is selected."""
    self, indices, values = named["self"], named["indices"], named["values"]
    count = masked_count(self, indices, values)
    if count is not None:
        mask = next(index for index in indices if index is not None)
        text = shape_mismatch(values, selected_shape(self, indices))
        yield Refused(mask, _Selects(count, exactly=True), text, fix="x = torch.where(mask, values, x), with a value for every element")


def _selected(named: _Named) -> Iterator[Refused]:
    """Checks `masked_scatter`, unless `source` has an element for each one of `self`."""
    mask, given = named["mask"], named["source"].numel()
    elements = math.prod(torch.broadcast_shapes(named["self"].shape, mask.shape))
    if mask.dtype is torch.bool and (given < elements or are_sizes_open()):  # at another size there may be fewer
        text = "Number of elements of source < number of ones in mask"
        yield Refused(mask, _Selects(given, elements // mask.numel()), text, fix="compare mask.sum() with source.numel() before this line")


def _repeats(named: _Named) -> Iterator[Refused]:
    """Checks the sum of `repeats` where `output_size` gives it; else the kernel has their values."""
    size = named.get("output_size")
    if size is not None:
        fix = "compare repeats.sum() with output_size before this line"
        yield Refused(named["repeats"], _AddsTo(int(size)), "allocated size does not match required size", fix=fix)
        yield Refused(named["repeats"], _has_negative, "repeats can not be negative")


def _range(named: _Named) -> Iterator[Refused]:
    """Checks the range of `histc`, which is that of the data if its ends are equal."""
    low, high = named.get("min", 0), named.get("max", 0)
    if low == high:
        if named["self"].is_floating_point() and named["self"].numel():
            yield Refused(named["self"], _is_not_finite, "torch.histc: range of the data is not finite")
    elif not (math.isfinite(low) and math.isfinite(high)):
        raise RuntimeError(f"torch.histc: range of [{low:g}, {high:g}] is not finite")


_CHANCE = "Expected p_in >= 0 && p_in <= 1 to be true, but got false."
_DEVIATION = "normal expects all elements of std >= 0.0"
_REMAINDERS = ("remainder.Tensor", "remainder.Scalar", "remainder.Scalar_Tensor", "fmod.Tensor", "fmod.Scalar")
REFUSED: dict[str, Callable[[_Named], Iterator[Refused]]] = {
    **dict.fromkeys(_REMAINDERS, _divisor),
    **dict.fromkeys(("div.Tensor_mode", "div.Scalar_mode"), _rounded_divisor),
    **dict.fromkeys(("floor_divide", "floor_divide.Scalar"), _divisor),
    "masked_scatter": _selected,
    "repeat_interleave.Tensor": _repeats,
    "histc": _range,
    "multinomial": _weights,
    "bernoulli": _each("self", _not_in_unit, _CHANCE),
    "bernoulli.Tensor": _each("p", _not_in_unit, _CHANCE),
    **dict.fromkeys(("normal.float_Tensor", "normal.Tensor_Tensor"), _each("std", _has_negative, _DEVIATION)),
    "poisson": _each("self", _has_negative, "invalid Poisson rate, expected rate to be non-negative"),
    "binary_cross_entropy": _probabilities,
    **dict.fromkeys(("quantile", "nanquantile"), _fractions),
}

__all__ = ["INTEGERS", "REFUSED", "Refused", "values_of_mask"]
