"""Functions of torch as compositions that take program numbers. See `_number_arguments`.

The formulas are those of torch, in `aten/src/ATen/native/` Activation.cpp, Loss.cpp, LossNLL.cpp, Normalization.cpp and TriangularOps.cpp.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from spmd.device._numbers import is_program_number
from spmd.device._representable_numbers import with_representable
from spmd.program.reads._number_arguments import (
    as_tensor,
    by_composition,
    composes,
    is_int,
    require,
    require_floats,
    require_number,
    require_one_dtype,
)

_EPSILON = 1e-12  # of the cosine embedding loss


def _loss(fn: Any) -> Callable[[Callable[..., torch.Tensor]], Callable[..., Any]]:
    """Register the decorated function, which computes the losses that `fn` reduces from `fn`'s other arguments, in the place of `fn`."""
    signature = inspect.signature(fn)

    def register(losses_of: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        @composes(fn)
        @functools.wraps(fn)
        def reduced(*given: Any, **options: Any) -> torch.Tensor:
            arguments = signature.bind(*given, **options)
            arguments.apply_defaults()
            reduction = arguments.arguments.pop("reduction")
            _require_reduction(reduction, *(arguments.arguments.pop(name, None) for name in ("size_average", "reduce")))
            losses = losses_of(**arguments.arguments)
            return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()

        return reduced

    return register


def _require_reduction(reduction: str, size_average: Any, reduce: Any) -> None:
    require(size_average is None, reduce is None, reduction in ("none", "mean", "sum"))


def _exponent_of(base: torch.Tensor, exponent: Any) -> Any:
    """The exponent, or its value if the dtype of the base does not represent it, which torch then refuses."""
    return with_representable("pow", (base, exponent), {})[0][1]


@composes(torch.pow, operator.pow, builtins.pow, method="pow")
def power(input: Any, exponent: Any) -> torch.Tensor:
    """`torch.pow`, also of a number to the power of a tensor."""
    require_number(input, exponent)
    if isinstance(input, torch.Tensor):
        require_floats(input)
        exponent = _exponent_of(input, exponent)
        return torch.pow(input, as_tensor(exponent, input) if is_program_number(exponent) else exponent)
    require_floats(exponent)
    return torch.pow(as_tensor(input, exponent), exponent)


@composes(operator.ipow, method="pow_")
def power_(self: torch.Tensor, exponent: Any) -> torch.Tensor:
    """`Tensor.pow_`."""
    require_number(exponent)
    require_floats(self)
    exponent = _exponent_of(self, exponent)
    return self.pow_(as_tensor(exponent, self) if is_program_number(exponent) else exponent)


raised = functools.partial(by_composition, power, operator.pow)  # `left ** right`
raised_in_place = functools.partial(by_composition, power_, operator.ipow)  # `left **= right`


class _PowerOperand:
    """Takes the place of the left operand of `left ** right`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __pow__(self, other: Any) -> Any:
        return raised(self.value, other)


def power_operand(left: Any, right: Any) -> Any:
    """The left operand to use for `left ** right`, where one is a tensor and the other may be a program number."""
    operands = {type(left), type(right)}
    return _PowerOperand(left) if torch.SymFloat in operands and any(isinstance(v, torch.Tensor) for v in (left, right)) else left


@composes(torch.lerp, method="lerp")
def lerp(input: torch.Tensor, end: torch.Tensor, weight: Any) -> torch.Tensor:
    """`torch.lerp`."""
    require_number(weight)
    require_one_dtype(input, end)
    require(input.dtype in (torch.float32, torch.float64))
    return torch.lerp(input, end, as_tensor(weight, input))


@composes(torch.xlogy, torch.special.xlogy, method="xlogy")
def xlogy(input: Any, other: Any) -> torch.Tensor:
    """`torch.xlogy`."""
    require_number(input, other)
    if isinstance(input, torch.Tensor):
        require_floats(input)
        return torch.xlogy(input, as_tensor(other, input))
    require_floats(other)
    return torch.xlogy(as_tensor(input, other), other)


@composes(F.celu, torch.celu)
def celu(input: torch.Tensor, alpha: Any = 1.0, inplace: bool = False) -> torch.Tensor:
    """`F.celu`."""
    require_number(alpha)
    require_one_dtype(input)
    require(alpha != 0, not inplace, input.dtype is not torch.float64)  # torch computes its gradient with 1 / alpha in 32 bits
    negative = torch.where(input > 0, torch.zeros((), dtype=input.dtype, device=input.device), input)
    return torch.where(input > 0, input, (negative / alpha).expm1() * alpha)


@composes(F.softshrink)
def softshrink(input: torch.Tensor, lambd: Any = 0.5) -> torch.Tensor:
    """`F.softshrink`."""
    require_number(lambd)
    require_one_dtype(input)
    require(lambd >= 0)
    zero_or_nan = torch.where(input.isnan(), input, torch.zeros((), dtype=input.dtype, device=input.device))
    return torch.where(input > lambd, input - lambd, torch.where(input < -lambd, input + lambd, zero_or_nan))


@composes(F.pad)
def pad(input: torch.Tensor, pad: Sequence[int], mode: str = "constant", value: Any = None) -> torch.Tensor:
    """`F.pad` with a constant."""
    require_number(value)
    require(input.device.type == "jax", mode == "constant", all(type(n) is int for n in pad))
    return torch.constant_pad_nd(input, pad, value)


@composes(torch.nan_to_num, method="nan_to_num")
def nan_to_num(input: torch.Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> torch.Tensor:
    """`torch.nan_to_num`."""
    require_number(nan, posinf, neginf)
    require_floats(input)
    found = torch.nan_to_num(input)
    for number, is_replaced in ((nan, torch.isnan), (posinf, torch.isposinf), (neginf, torch.isneginf)):
        if number is not None:
            found = torch.where(is_replaced(input), torch.full((), number, dtype=input.dtype, device=input.device), found)
    return found


@composes(torch.quantile, method="quantile")
def quantile(input: torch.Tensor, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear") -> torch.Tensor:
    """`torch.quantile` for one number."""
    require_number(q)
    require_one_dtype(input)
    require(q >= 0, q <= 1)
    return torch.quantile(input, as_tensor(q, input), dim, keepdim, interpolation=interpolation)


@_loss(F.huber_loss)
def huber_losses(input: torch.Tensor, target: torch.Tensor, delta: Any, weight: torch.Tensor | None) -> torch.Tensor:
    """The losses of `F.huber_loss`."""
    require_number(delta)
    require_one_dtype(input, target)
    require(delta > 0, weight is None, input.shape == target.shape)
    distance, near = _distances(input, target, delta)
    return torch.where(distance < delta, 0.5 * near * near, delta * (distance - 0.5 * delta))


@_loss(F.smooth_l1_loss)
def smooth_l1_losses(input: torch.Tensor, target: torch.Tensor, beta: Any) -> torch.Tensor:
    """The losses of `F.smooth_l1_loss`."""
    require_number(beta)
    require_one_dtype(input, target)
    require(beta > 0, input.shape == target.shape)
    distance, near = _distances(input, target, beta)
    return torch.where(distance < beta, 0.5 * near * near / beta, distance - 0.5 * beta)


def _distances(input: torch.Tensor, target: torch.Tensor, limit: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The distances, and those below the limit, otherwise 0: for infinity the gradient of the square is NaN, also behind `where`."""
    distance = (input - target).abs()
    return distance, torch.where(distance < limit, distance, torch.zeros((), dtype=distance.dtype, device=distance.device))


@_loss(F.margin_ranking_loss)
def margin_ranking_losses(input1: torch.Tensor, input2: torch.Tensor, target: torch.Tensor, margin: Any) -> torch.Tensor:
    """The losses of `F.margin_ranking_loss`."""
    require_number(margin)
    require_one_dtype(input1, input2)
    require(input1.dim() == input2.dim() == target.dim())
    return (-target * (input1 - input2) + margin).clamp_min(0)


@_loss(F.hinge_embedding_loss)
def hinge_embedding_losses(input: torch.Tensor, target: torch.Tensor, margin: Any) -> torch.Tensor:
    """The losses of `F.hinge_embedding_loss`."""
    require_number(margin)
    require_one_dtype(input)
    zeros = torch.zeros_like(input)
    return torch.where(target != 1, (margin - input).clamp_min(0), zeros) + torch.where(target != -1, input, zeros)


@_loss(F.cosine_embedding_loss)
def cosine_embedding_losses(input1: torch.Tensor, input2: torch.Tensor, target: torch.Tensor, margin: Any) -> torch.Tensor:
    """The losses of `F.cosine_embedding_loss`."""
    require_number(margin)
    require_one_dtype(input1, input2)
    require(target.dim() in (0, 1), input1.dim() == input2.dim() == target.dim() + 1)
    squares = ((input1 * input1).sum(-1) + _EPSILON) * ((input2 * input2).sum(-1) + _EPSILON)
    cosine = (input1 * input2).sum(-1) / squares.sqrt()
    zeros = torch.zeros_like(cosine)
    return torch.where(target == 1, 1 - cosine, zeros) + torch.where(target == -1, (cosine - margin).clamp_min(0), zeros)


@_loss(F.triplet_margin_loss)
def triplet_margin_losses(
    anchor: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor, margin: Any, p: Any, eps: Any, swap: bool
) -> torch.Tensor:
    """The losses of `F.triplet_margin_loss`."""
    require_number(margin)
    require_one_dtype(anchor, positive, negative)
    require(margin > 0, anchor.dim() == positive.dim() == negative.dim(), type(p) in (int, float), type(eps) is float)
    near, far = F.pairwise_distance(anchor, positive, p, eps), F.pairwise_distance(anchor, negative, p, eps)
    far = torch.minimum(far, F.pairwise_distance(positive, negative, p, eps)) if swap else far
    return (margin + near - far).clamp_min(0)


@composes(F.cross_entropy)
def cross_entropy(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: Any = 0.0,
) -> torch.Tensor:
    """`F.cross_entropy` with smoothed labels: a mean of the loss of the labels and of that of all classes."""
    require_number(label_smoothing)
    require_one_dtype(input)
    require(label_smoothing > 0, label_smoothing <= 1, type(ignore_index) is int, input.dim() > 0)
    require(not target.is_floating_point() or (ignore_index < 0 and target.dtype == input.dtype))
    _require_reduction(reduction, size_average, reduce)
    dim = min(input.dim() - 1, 1)
    if target.is_floating_point():
        smoothed = target * (1 - label_smoothing) + label_smoothing / input.shape[dim]
        return F.cross_entropy(input, smoothed, weight, reduction=reduction)
    logs = F.log_softmax(input, dim)
    of_labels = F.nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    by_class = logs if weight is None else logs * weight.view([-1 if i == dim else 1 for i in range(input.dim())])
    ignored = target == ignore_index
    of_classes = (-by_class.sum(dim)).masked_fill(ignored, 0)
    if reduction == "mean":
        counts = ~ignored if weight is None else weight[target.masked_fill(ignored, 0)].masked_fill(ignored, 0)
        of_classes = of_classes.sum() / counts.sum()
    elif reduction == "sum":
        of_classes = of_classes.sum()
    return of_labels * (1 - label_smoothing) + of_classes * (label_smoothing / input.shape[dim])


@composes(F.batch_norm)
def batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """`F.batch_norm`: the statistics of the batch, and then the running ones, with the momentum."""
    require_number(momentum)
    require_floats(input)
    require((running_mean is None) == (running_var is None))
    if not training or running_mean is None or running_var is None:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)
    mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
    result = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, eps)
    with torch.no_grad():
        running_mean.mul_(1 - momentum).add_(mean * momentum)
        running_var.mul_(1 - momentum).add_(variance * momentum)
    return result


@composes(torch.roll, method="roll")
def roll(input: torch.Tensor, shifts: Any, dims: Any = None) -> torch.Tensor:
    """`torch.roll` by one number."""
    shifts = shifts[0] if isinstance(shifts, (tuple, list)) and len(shifts) == 1 else shifts
    dims = dims[0] if isinstance(dims, (tuple, list)) and len(dims) == 1 else dims
    require_number(shifts)
    require(is_int(shifts))
    require(input.device.type == "jax", input.numel(), dims is None or type(dims) is int)
    if dims is None:
        return roll(input.reshape(-1), shifts, 0).view(input.shape)
    size = input.shape[dims]
    return input.index_select(dims, (torch.arange(size, device=input.device) - shifts) % size)


def _triangle(name: str, kept: Callable[[Any, Any], torch.Tensor]) -> None:
    @composes(getattr(torch, name), method=name)
    def triangle(input: torch.Tensor, diagonal: Any = 0) -> torch.Tensor:
        require_number(diagonal)
        require(is_int(diagonal))
        require(input.device.type == "jax", input.dim() > 1)
        rows, columns = (torch.arange(size, device=input.device) for size in input.shape[-2:])
        return input.masked_fill(~kept(columns - rows[:, None], diagonal), 0)


_triangle("tril", operator.le)
_triangle("triu", operator.ge)


@composes(torch.arange)
def arange(
    start: Any, end: Any = None, step: Any = 1, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> torch.Tensor:
    """`torch.arange` from a number to another one that is as far from it in every call."""
    require(end is not None, type(step) is int and step > 0, not requires_grad)
    require_number(start, end)
    require(is_int(start), is_int(end), dtype is None or not (dtype is torch.bool or dtype.is_complex))
    device = torch.get_default_device() if device is None else torch.device(device)
    size = -(-(end - start).node.known("size") // step)
    require(device.type == "jax", size >= 0)
    return (torch.arange(size, device=device) * step + start).to(torch.int64 if dtype is None else dtype)


__all__ = ["power_operand", "raised", "raised_in_place"]
