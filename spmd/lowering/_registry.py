"""The table of lowerings, from operator overloads to jax functions. It only grows, and only `lower` writes to it.

Importing `spmd` fills it for ATen. A program may add overloads of ATen and of its own libraries at any time (docs/extending.md).

A *rule* is a pure function of jax arrays and Python values, with the argument order and names of the schema. It knows no mesh,
no tensor class and no result dtype. The adapter (`spmd.device._adapter`) promotes inputs, casts results, drops
`device`/`layout`/`pin_memory`/`memory_format`/`non_blocking`/`generator` arguments and derives in-place and `out=` forms.

    @lower("add.Tensor", pointwise=True)
    def add(self, other, *, alpha=1):
        return self + scaled(other, alpha)

For an overload that writes to arguments without returning them (`(Tensor(a!) x) -> ()`), the rule returns their new values after its
results. A mutating overload without a functional twin (`normal_`) can have a rule too: it returns the new value of `self`.
An optional result that the call does not request (`output_mask`) is None.

Arguments reach a rule as follows: Tensor -> jax.Array; Tensor[] -> list of arrays; int[] -> tuple; torch.dtype -> numpy dtype;
Scalar -> Python number, or a 0-dim array if only the device knows the number (a *lifted* number; see `is_static`).
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

import jax.numpy as jnp
import torch

from spmd.base._convert import HALVES, rounded
from spmd.base._errors import message
from spmd.base._jax import is_tracer
from spmd.base._torch import OpOverload, OpOverloadPacket, dispatch_get_all_op_names, dispatch_has_kernel_for_dispatch_key, torch_at_least
from spmd.lowering._arithmetic import mul
from spmd.lowering._split import split

Rule = Callable[..., Any]


@dataclass(frozen=True)
class Lowering:
    """The lowering of one overload.

    Attributes:
        op: the overload, e.g. `torch.ops.aten.add.Tensor`.
        rule: the jax function.
        pointwise: promote the tensors like torch, and cast the result.
        widened: with `pointwise`: compute 16-bit floats in float32. False if the op decides by values rounded to 16 bits, as in
            comparisons with a number.
        wide: with `pointwise`: name of the operand that is not rounded to the 16 bits of the result if it is a number or 0-dim.
        promoted: with `pointwise`: names of the tensor parameters that take part in promotion; empty: all.
        whole: a composite op that is kept as one jax call; its gradient is `jax.vjp` of the rule.
        random: the rule takes a PRNG key as its first argument.
        static: names of Scalar parameters whose values the rule needs while tracing.
        data_dependent: the shape of the result depends on values, always or if this function of the call's arguments returns True.
            The rule then gets concrete arrays. In a trace, use of unknown values raises `TraceError`, unless the rule makes an
            assumption about them (`assumed`).
        updates: names of the tensor parameters that the op also writes to (running statistics). The rule returns their new values
            after the op's results, or None if the argument is None.
        host: names of tensor parameters that torch keeps on the CPU (batch sizes of a packed sequence). The rule gets their
            values as a numpy array, which is a constant of the program.
        told: properties of the traced program that the rule takes as keyword arguments; they are None outside a program. "platform":
            'cpu', 'gpu' or 'tpu'. "reduce_dtype": dtype in which gradients of weights are summed over devices (None: their own).
        by_origin: in a trace, the rule inspects how its operands were computed, so its equations are not reused for other operands.
        decides: (name of a Scalar parameter, predicate of its value). If the argument is a setting of an optimizer, the rule gets the
            result of the predicate as keyword argument `decided`, and the program is valid while the result stays the same. Else
            `decided` is None.
        check: takes the rule's arguments, without a random key, and raises torch's error where torch refuses them but its meta kernel
            does not (errors of meta kernels are raised anyway). It sees only shapes, dtypes and static arguments.
        sharding: names of the dims, "b t, b -> b t"; dims with the same name are sharded alike (see `_split`). Empty: XLA's
            propagation shards the operations of the rule.
        source: `file:line` of the rule, or of its registration if the rule is a function of jax.
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
    wide: str = ""
    host: tuple[str, ...] = ()
    told: tuple[str, ...] = ()
    by_origin: bool = False
    decides: tuple[str, Callable[[Any], Any]] | None = None
    check: Callable[..., None] | None = None
    sharding: str = ""
    source: str = ""


_table: dict[OpOverload, Lowering] = {}
_answer: ContextVar[Callable[[Any], Any] | None] = ContextVar("what the host can compute of traced values", default=None)
_assumptions: ContextVar[list[tuple[Any, str, str]] | None] = ContextVar("assumptions about unknown values", default=None)

# Overloads that some supported versions of torch lack: the version that added, or removed, each. Any other unknown name is an error.
SINCE = {"_upsample_lanczos2d_aa": "2.12", "_upsample_lanczos2d_aa_backward": "2.12"}
UNTIL = {"cholesky": "2.14"}


class Listener(Protocol):
    """Notified of lowerings that are added after the kernels of the table were installed."""

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
    wide: str = "",
    host: tuple[str, ...] = (),
    told: tuple[str, ...] = (),
    by_origin: bool = False,
    decides: tuple[str, Callable[[Any], Any]] | None = None,
    check: Callable[..., None] | None = None,
    sharding: str = "",
) -> Callable[[Rule], Rule]:
    """Register the decorated rule for overloads such as `"add.Tensor"` (`"relu"` means `relu.default`) or `"mylib::op"`.

    The kernel and its in-place and `out=` forms are available immediately, in eager code and in programs, which are traced again.

    Args:
        names: overloads by name. A function made by `torch.library.custom_op`, or an overload (`torch.ops.mylib.op.default`), is
            accepted too. A name in `SINCE` or `UNTIL` that this version of torch lacks is skipped.
        others: see the attributes of `Lowering`.

    Raises:
        ValueError: an overload does not exist, already has a lowering or a kernel, or is a composite registered without
            `whole=True` (a plain kernel for a composite would silently cut its gradient). None of the names is then registered.
        TraceError: a function is being traced.
    """

    def decorate(rule: Rule) -> Rule:
        source = _source(rule, sys._getframe(1))
        run = split(rule, sharding) if sharding else rule
        told_also = tuple(dict.fromkeys((*told, "platform"))) if sharding else told
        ops = [_overload_of(name) for name in names if not (isinstance(name, str) and is_of_other_torch(name))]
        flags = (pointwise, promoted, whole, random, frozenset(static), data_dependent)
        others = (by_origin, decides, check, sharding)
        _add([Lowering(op, run, *flags, updates or _written(op), widened, wide, host, told_also, *others, source) for op in ops])
        return rule

    return decorate


def _add(lowerings: list[Lowering]) -> None:
    """Add all of these lowerings to the table and notify the listeners, or raise and add none."""
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
        raise ValueError(f'{name!r} is not an operator\n  fix: pass its name, as in @spmd.lowering.lower("mylib::op")')
    return op


def _written(op: OpOverload) -> tuple[str, ...]:
    """Names of the tensors that an overload of a library writes to, if it returns none of them."""
    schema = op._schema
    if schema.name.startswith("aten::") or any(value.alias_info is not None for value in schema.returns):
        return ()
    return tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


def _source(rule: Rule, caller: FrameType) -> str:
    """`file:line` of the rule if the file that registers it also defines it, else of its registration (functions of jax)."""
    code = getattr(rule, "__code__", None)
    if code is not None and code.co_filename == caller.f_code.co_filename:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"


def resolve(name: str) -> OpOverload:
    """The overload named `"packet.overload"` (namespace `aten`) or `"ns::packet.overload"`.

    Raises:
        ValueError: it does not exist.
    """
    namespace, _, rest = name.rpartition("::")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), overload or "default")
    except AttributeError as error:
        raise ValueError(_no_such(name, namespace or "aten")) from error


def _no_such(name: str, namespace: str) -> str:
    """Error text for a name without an overload, with the nearest name that exists."""
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
    """Whether this version of torch has the overload. Tables for several versions ask this first."""
    try:
        resolve(name)
    except ValueError:
        return False
    return True


def is_of_other_torch(name: str) -> bool:
    """Whether this version of torch lacks the overload and `SINCE` or `UNTIL` says so."""
    is_later, is_gone = name in SINCE and not torch_at_least(SINCE[name]), name in UNTIL and torch_at_least(UNTIL[name])
    return (is_later or is_gone) and not exists(name)


def is_composite(op: OpOverload) -> bool:
    """Whether PyTorch differentiates the op through a C++ composite. A plain kernel for it would cut the gradient."""
    return dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def lowerings() -> dict[OpOverload, Lowering]:
    """A copy of the table."""
    return dict(_table)


def num_lowerings() -> int:
    """Number of lowerings. If it changes, programs may compute something else."""
    return len(_table)


def listen(listener: Listener) -> None:
    """Notify `listener` of every lowering added from now on."""
    _listeners.append(listener)


def lookup(op: OpOverload) -> Lowering | None:
    """The lowering of `op`, if it has one."""
    return _table.get(op)


MAY_BE_LIFTED = frozenset({"exponent", "correction", "alpha", "beta"})  # static parameters whose rules also accept a lifted number


@contextmanager
def assuming() -> Generator[list[tuple[Any, str, str]]]:
    """While active, rules of data-dependent ops may make assumptions about unknown values, which the program then checks.

    Yields:
        The assumptions so far: (0-dim bool that is True if the assumption is wrong, text of the error, its fix).
    """
    made: list[tuple[Any, str, str]] = []
    token = _assumptions.set(made)
    try:
        yield made
    finally:
        _assumptions.reset(token)


def assumed(is_wrong: Callable[[], Any], text: str, fix: str) -> bool:
    """Assume that `is_wrong()`, a 0-dim bool, is False. Returns whether the rule may make the assumption (see `assuming`).

    Args:
        is_wrong: computes the negated assumption.
        text, fix: the error if the assumption is wrong.
    """
    made = _assumptions.get()
    if made is not None:
        made.append((is_wrong(), text, fix))
    return made is not None


@contextmanager
def sizes_from(answer: Callable[[Any], Any]) -> Generator[None]:
    """While active, `answer` tells rules of data-dependent ops the value of a traced number on the host, or None (`size_if_traced`)."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def size_if_traced(values: Any, count: Callable[[], Any]) -> int | None:
    """`count()`, the size of a result, if `values` are traced and the host can compute it (see `sizes_from`); else None.

    The program then serves all values with this size.
    """
    answer = _answer.get()
    known = answer(count()) if answer is not None and is_tracer(values) else None
    return None if known is None else int(known)


def is_static(number: Any) -> bool:
    """Whether a Scalar argument is a Python number. Otherwise it is lifted: only the device knows it."""
    return isinstance(number, (bool, int, float, complex))


def scaled(array: Any, factor: Any) -> Any:
    """`array * factor`, without a multiplication if the factor is the Python number 1. For integers the factor is its integer part.

    A real factor that is an input of the program has 64 bits. Floats take it in 32 bits at least and in those of `array`, as in torch.
    """
    if is_static(factor) and factor == 1:
        return array
    if isinstance(array, jnp.ndarray) and jnp.issubdtype(jnp.result_type(factor), jnp.floating):
        if jnp.issubdtype(array.dtype, jnp.integer):
            factor = jnp.asarray(factor).astype(array.dtype)
        elif jnp.issubdtype(array.dtype, jnp.floating) and (not is_static(factor) or array.dtype in HALVES):
            factor = jnp.asarray(factor).astype(jnp.promote_types(array.dtype, jnp.float32))
    return mul(array, factor)


def rounded_factor(factor: Any, dtype: Any) -> Any:
    """A factor as torch's CPU takes it beside arrays of 16-bit floats, where the operation rounds it to these bits."""
    if dtype not in HALVES:
        return factor
    return rounded(factor, dtype) if is_static(factor) else factor.astype(dtype).astype(jnp.float32)
