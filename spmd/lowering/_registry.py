"""The table from an ATen overload to the jax function that means it. Grows only, filled at import, one writer: `lower`.

A *rule* is a pure function of jax arrays and Python values with the schema's argument order and names. It knows no mesh,
no tensor class and no result dtype: the adapter in `spmd.device._kernels` promotes inputs, casts results, drops
`device`/`layout`/`pin_memory`/`memory_format`/`non_blocking`/`generator` arguments and derives in-place and `out=` forms.

    @lower("add.Tensor", pointwise=True)
    def add(self, other, *, alpha=1):
        return self + scaled(other, alpha)

A mutating overload without a functional twin (`normal_`) may be lowered too: its rule returns the new value of `self`.
An op's optional result that was not asked for (`output_mask`) is None.

Arguments reach a rule as: Tensor -> jax.Array; Tensor[] -> list of arrays; int[] -> tuple; torch.dtype -> numpy dtype;
Scalar -> Python number, or a 0-dim array where the number is known only to the device ("lifted"; `is_static` tells).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from packaging.version import Version

from spmd.base._torch import OpOverload, dispatch_has_kernel_for_dispatch_key
from spmd.lowering._arithmetic import mul

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Lowering:
    """How one ATen overload is computed.

    Attributes:
        op: the overload, e.g. `torch.ops.aten.add.Tensor`.
        rule: the jax function.
        pointwise: promote the tensors as torch promotes, cast the result.
        widened: with `pointwise`: 16-bit floats are computed in float32; not where rounding to 16 bits comes before a decision,
            as in comparisons with a number.
        promoted: with `pointwise`: names of the tensor parameters that take part in promotion; empty means all.
        whole: a composite op kept as one jax call, its gradient by `jax.vjp` of the rule.
        random: the rule takes a PRNG key as first argument.
        static: names of Scalar parameters whose value the rule must know while tracing.
        data_dependent: the result's shape depends on values, always or where this function of the call's arguments says so:
            the rule then gets concrete arrays; in a trace, what jax cannot do without the values raises `TraceError`.
        updates: names of the tensor parameters that the op also writes (running statistics): after the op's results the rule
            returns their new values, None where the argument is None.
        host: names of tensor parameters that torch keeps on the CPU (a packed sequence's batch sizes): the rule gets their
            values as a numpy array, a constant of the program.
        told: what of the program being traced the rule is told, as keyword arguments that are None outside one: "platform", 'cpu', 'gpu' or
            'tpu'; "reduce_dtype", in which gradients of weights, sums over what devices share, are to be summed (None: their own).
        check: takes the rule's arguments, a random key left out, and raises torch's error where torch refuses them and its meta kernel
            does not (those errors come by themselves); shapes, dtypes and static arguments are all it sees.
        source: `file:line` of the rule, or of its registration where the rule is a function of jax.
    """

    op: OpOverload
    rule: Rule
    pointwise: bool = False
    promoted: tuple[str, ...] = ()
    whole: bool = False
    random: bool = False
    static: frozenset[str] = field(default_factory=frozenset[str])
    data_dependent: bool | Callable[..., bool] = False
    updates: tuple[str, ...] = ()
    widened: bool = True
    host: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    check: Callable[..., None] | None = None
    source: str = ""


_table: dict[OpOverload, Lowering] = {}

# Overloads that the oldest supported torch lacks, and the version of torch they came with. Any other unknown name is a mistake.
SINCE = {"_upsample_lanczos2d_aa": "2.13", "_upsample_lanczos2d_aa_backward": "2.13"}


def lower(
    *names: str,
    pointwise: bool = False,
    promoted: tuple[str, ...] = (),
    whole: bool = False,
    random: bool = False,
    static: tuple[str, ...] = (),
    data_dependent: bool | Callable[..., bool] = False,
    updates: tuple[str, ...] = (),
    widened: bool = True,
    host: tuple[str, ...] = (),
    told: tuple[str, ...] = (),
    check: Callable[..., None] | None = None,
) -> Callable[[Rule], Rule]:
    """Register the decorated rule for ATen overloads such as `"add.Tensor"` (`"relu"` means `relu.default`).

    Raises:
        ValueError: the overload does not exist, has a lowering already, or is a composite registered without `whole=True`
            (a plain kernel for a composite would cut its gradient silently). A name in `SINCE` that this torch is too old
            for is left out instead.
    """

    def decorate(rule: Rule) -> Rule:
        source = _source(rule, sys._getframe(1))
        for name in names:
            if is_of_later_torch(name):
                continue
            op = resolve(name)
            if op in _table:
                raise ValueError(f"{op} already has a lowering at {_table[op].source}; a second one stands at {source}")
            if is_composite(op) and not whole:
                raise ValueError(f"{op} is a composite: register it with whole=True, or its gradient would be cut silently")
            _table[op] = Lowering(
                op,
                rule,
                pointwise,
                promoted,
                whole,
                random,
                frozenset(static),
                data_dependent,
                updates,
                widened,
                host,
                told,
                check,
                source,
            )
        return rule

    return decorate


def _source(rule: Rule, caller: FrameType) -> str:
    """`file:line` of the rule where it stands in the file that registers it, else of its registration (jax's own functions)."""
    code = getattr(rule, "__code__", None)
    if code is not None and code.co_filename == caller.f_code.co_filename:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"


def resolve(name: str) -> OpOverload:
    """The overload that `"packet.overload"` names; namespace `aten` unless given as `"ns::packet.overload"`."""
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default")
    except AttributeError as error:
        raise ValueError(f"there is no ATen overload {name!r} in torch {torch.__version__}") from error


def exists(name: str) -> bool:
    """True if this torch has the overload (tables that span torch versions ask first)."""
    try:
        resolve(name)
    except ValueError:
        return False
    return True


def is_of_later_torch(name: str) -> bool:
    """True if this torch lacks the overload because it came with a later version, as `SINCE` says."""
    return name in SINCE and Version(torch.__version__) < Version(SINCE[name]) and not exists(name)


def is_composite(op: OpOverload) -> bool:
    """True if PyTorch differentiates the op through a C++ composite, so that a plain kernel would cut the gradient."""
    return dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def lowerings() -> dict[OpOverload, Lowering]:
    """A copy of the table."""
    return dict(_table)


def lookup(op: OpOverload) -> Lowering | None:
    """The lowering of `op`, if it has one."""
    return _table.get(op)


def is_static(number: Any) -> bool:
    """True if a Scalar argument is a Python number, False if only the device knows it."""
    return isinstance(number, (bool, int, float, complex))


def scaled(array: Any, factor: Any) -> Any:
    """`array * factor`, without the multiplication when the factor is the Python number one."""
    return array if is_static(factor) and factor == 1 else mul(array, factor)
