"""The table from an operator's overload to the jax function that means it. Grows only, one writer: `lower`.

Importing `spmd` fills it for ATen; a program may add overloads of ATen and of its own libraries at any time (docs/extending.md).

A *rule* is a pure function of jax arrays and Python values with the schema's argument order and names. It knows no mesh,
no tensor class and no result dtype: the adapter (`spmd.device._adapter`) promotes inputs, casts results, drops
`device`/`layout`/`pin_memory`/`memory_format`/`non_blocking`/`generator` arguments and derives in-place and `out=` forms.

    @lower("add.Tensor", pointwise=True)
    def add(self, other, *, alpha=1):
        return self + scaled(other, alpha)

Of an overload that writes arguments and returns others (`(Tensor(a!) x) -> ()`) the rule returns their new values after its results.
A mutating overload without a functional twin (`normal_`) may be lowered too: its rule returns the new value of `self`.
An op's optional result that was not asked for (`output_mask`) is None.

Arguments reach a rule as: Tensor -> jax.Array; Tensor[] -> list of arrays; int[] -> tuple; torch.dtype -> numpy dtype;
Scalar -> Python number, or a 0-dim array where the number is known only to the device ("lifted"; `is_static` tells).
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

import torch

from spmd.base._errors import message
from spmd.base._torch import OpOverload, OpOverloadPacket, dispatch_get_all_op_names, dispatch_has_kernel_for_dispatch_key, torch_at_least
from spmd.lowering._arithmetic import mul
from spmd.lowering._split import split

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
            the rule then gets concrete arrays; in a trace, what needs the values raises `TraceError`, unless it is `assumed`.
        updates: names of the tensor parameters that the op also writes (running statistics): after the op's results the rule
            returns their new values, None where the argument is None.
        host: names of tensor parameters that torch keeps on the CPU (a packed sequence's batch sizes): the rule gets their
            values as a numpy array, a constant of the program.
        told: what of the program being traced the rule is told, as keyword arguments that are None outside one: "platform", 'cpu', 'gpu' or
            'tpu'; "reduce_dtype", in which gradients of weights, sums over what devices share, are to be summed (None: their own).
        by_origin: in a trace the rule looks at what its operands were made from: what it recorded for others does not stand for them.
        decides: name of a Scalar parameter, and a question about it with a yes or no. Where an optimizer's setting is given for it, the
            rule is told the answer as keyword argument `decided` (the program then holds while the answer is the same); None elsewhere.
        check: takes the rule's arguments, a random key left out, and raises torch's error where torch refuses them and its meta kernel
            does not (those errors come by themselves); shapes, dtypes and static arguments are all it sees.
        sharding: which dims belong together, "b t, b -> b t" (see `_split`); empty: XLA's propagation decides by the rule's operations.
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
    by_origin: bool = False
    decides: tuple[str, Callable[[Any], Any]] | None = None
    check: Callable[..., None] | None = None
    sharding: str = ""
    source: str = ""


_table: dict[OpOverload, Lowering] = {}
_assumptions: ContextVar[list[tuple[Any, str, str]] | None] = ContextVar("what a rule without values assumes of them", default=None)

# Overloads that not every supported torch has, and the version of torch they came with, or went with. Any other unknown name is a mistake.
SINCE = {"_upsample_lanczos2d_aa": "2.12", "_upsample_lanczos2d_aa_backward": "2.12"}
UNTIL = {"cholesky": "2.14"}


class Listener(Protocol):
    """Told of lowerings that are added once the table's kernels are installed."""

    def refuse(self, op: OpOverload) -> None:
        """Raise if a kernel for `op` cannot be installed now."""

    def install(self, lowering: Lowering) -> None:
        """Install the kernels of one lowering."""


_listeners: list[Listener] = []


def lower(
    *names: str | OpOverload | Any,
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
    by_origin: bool = False,
    decides: tuple[str, Callable[[Any], Any]] | None = None,
    check: Callable[..., None] | None = None,
    sharding: str = "",
) -> Callable[[Rule], Rule]:
    """Register the decorated rule for overloads such as `"add.Tensor"` (`"relu"` means `relu.default`) or `"mylib::op"`.

    The kernel, its in-place and `out=` forms are there at once, for eager code and for programs, which are traced again.
    A function that `torch.library.custom_op` made, and an overload (`torch.ops.mylib.op.default`), may stand for their names.

    Raises:
        ValueError: the overload does not exist, has a lowering or a kernel already, or is a composite registered without
            `whole=True` (a plain kernel for a composite would cut its gradient silently). Then none of the names is registered.
            A name in `SINCE` or `UNTIL` that this torch is too old or too new for is left out instead.
        TraceError: a function is being traced.
    """

    def decorate(rule: Rule) -> Rule:
        source = _source(rule, sys._getframe(1))
        run = split(rule, sharding) if sharding else rule
        told_also = tuple(dict.fromkeys((*told, "platform"))) if sharding else told
        ops = [_overload_of(name) for name in names if not (isinstance(name, str) and is_of_other_torch(name))]
        flags = (pointwise, promoted, whole, random, frozenset(static), data_dependent)
        _add(
            [
                Lowering(op, run, *flags, updates or _written(op), widened, host, told_also, by_origin, decides, check, sharding, source)
                for op in ops
            ]
        )
        return rule

    return decorate


def _add(lowerings: list[Lowering]) -> None:
    """Put all of them into the table and tell the listeners, or raise and put none."""
    added: dict[OpOverload, Lowering] = {}
    for lowering in lowerings:
        op = lowering.op
        first = _table.get(op) or added.get(op)
        if first is not None:
            what = f"{op} already has a lowering at {first.source}; a second one is at {lowering.source}"
            raise ValueError(message(what, fix="remove the second one: a lowering cannot be replaced"))
        if is_composite(op) and not lowering.whole:
            what = f"{op} is a composite: register it with whole=True, otherwise its gradient would be lost silently"
            raise ValueError(message(what, fix=f'@spmd.lowering.lower("{op.name().removeprefix("aten::")}", whole=True)'))
        for listener in _listeners:
            listener.refuse(op)
        added[op] = lowering
    _table.update(added)
    for lowering in added.values():
        for listener in _listeners:
            listener.install(lowering)


def _overload_of(name: Any) -> OpOverload:
    if isinstance(name, str):
        return resolve(name)
    op = getattr(name, "_opoverload", name)
    op = op.default if isinstance(op, OpOverloadPacket) else op
    if not isinstance(op, OpOverload):
        raise ValueError(f'{name!r} is not an operator\n  fix: name it, as in @spmd.lowering.lower("mylib::op")')
    return op


def _written(op: OpOverload) -> tuple[str, ...]:
    """The tensors that an overload of a library writes, if it returns none of them."""
    schema = op._schema
    if schema.name.startswith("aten::") or any(value.alias_info is not None for value in schema.returns):
        return ()
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


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
        raise ValueError(_no_such(name, namespace or "aten")) from error


def _no_such(name: str, namespace: str) -> str:
    """The error's text for a name that no overload has, with the nearest one that does."""
    own = [n.removeprefix("aten::") for n in dispatch_get_all_op_names() if n.startswith(f"{namespace}::")]
    nearest = difflib.get_close_matches(name.removeprefix("aten::").removesuffix(".default"), own, 1, cutoff=0.5)
    if namespace == "aten":
        what = f"there is no ATen overload {name!r} in torch {torch.__version__}"
    else:
        what = f"there is no overload {name!r}: namespace {namespace!r} has {len(own)} operators"
    if nearest:
        return message(what, f"the nearest name is {nearest[0]!r}", fix=f'@spmd.lowering.lower("{nearest[0]}")')
    return message(what, fix="define the operator first (torch.library.custom_op), or import the library that does")


def exists(name: str) -> bool:
    """True if this torch has the overload (tables that span torch versions ask first)."""
    try:
        resolve(name)
    except ValueError:
        return False
    return True


def is_of_other_torch(name: str) -> bool:
    """True if this torch lacks the overload because it came with a later version or went with an earlier one, as the tables say."""
    is_later, is_gone = name in SINCE and not torch_at_least(SINCE[name]), name in UNTIL and torch_at_least(UNTIL[name])
    return (is_later or is_gone) and not exists(name)


def is_composite(op: OpOverload) -> bool:
    """True if PyTorch differentiates the op through a C++ composite, so that a plain kernel would cut the gradient."""
    return dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def lowerings() -> dict[OpOverload, Lowering]:
    """A copy of the table."""
    return dict(_table)


def num_lowerings() -> int:
    """How many there are: another number means that programs may compute something else."""
    return len(_table)


def listen(listener: Listener) -> None:
    """From now on tell `listener` of each lowering that is added."""
    _listeners.append(listener)


def lookup(op: OpOverload) -> Lowering | None:
    """The lowering of `op`, if it has one."""
    return _table.get(op)


MAY_BE_LIFTED = frozenset({"exponent", "correction", "alpha", "beta"})  # static, and their rules take a lifted number too


@contextmanager
def assuming() -> Generator[list[tuple[Any, str, str]]]:
    """While active, the rule of a data-dependent op has no values, and may assume what the program checks: (wrong, text, fix) each."""
    made: list[tuple[Any, str, str]] = []
    token = _assumptions.set(made)
    try:
        yield made
    finally:
        _assumptions.reset(token)


def assumed(is_wrong: Callable[[], Any], text: str, fix: str) -> bool:
    """Whether a rule that has no values may go on as if `is_wrong()`, a 0-dim bool, were false; `text` says what would be otherwise."""
    made = _assumptions.get()
    if made is not None:
        made.append((is_wrong(), text, fix))
    return made is not None


def is_static(number: Any) -> bool:
    """True if a Scalar argument is a Python number, False if only the device knows it."""
    return isinstance(number, (bool, int, float, complex))


def scaled(array: Any, factor: Any) -> Any:
    """`array * factor`, without the multiplication when the factor is the Python number one."""
    return array if is_static(factor) and factor == 1 else mul(array, factor)
