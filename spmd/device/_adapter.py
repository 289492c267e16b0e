"""Runs a lowering for a call that PyTorch dispatched: converts the arguments, calls the rule, and wraps the results.

There is one `Adapter` per ATen overload. It makes a `Plan` for each new combination of dtypes and static arguments: torch's meta
kernel gives the result dtypes, and torch's promotion rules give the dtype to compute in. Every further call is a dictionary
look-up. Eagerly a plan runs as one `jax.jit` call. While jax traces, the operations of that call are recorded inline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from spmd.base import _counters
from spmd.base._convert import ComputeDtype, cast, exact_dtypes, host_array, to_numpy_dtype, to_torch_dtype
from spmd.base._exact import exactly
from spmd.base._jax import is_tracing
from spmd.base._torch import ELEMENTWISE_TYPE_PROMOTION_KIND as KIND
from spmd.base._torch import elementwise_dtypes
from spmd.device import _generator, _indices
from spmd.device._arrays import padded, stored_shape
from spmd.device._copy import host_value, like_placement
from spmd.device._inlined import Inlined
from spmd.device._numbers import carried, data_dependent, decided, number_of, sample, with_known
from spmd.device._pacing import note_operation
from spmd.device._partitioner import PartitionedJit
from spmd.device._random_stream import typed_key
from spmd.device._refusals import MetaCheck, kind_of_number, meta_argument, refuse_large_ints
from spmd.device._representable_numbers import with_representable
from spmd.device._saved_results import reuse_or_save
from spmd.device._storage import load, on_other_device, once, store, trace_setting, wrap
from spmd.device._trace_lock import was_taken, with_trace_lock
from spmd.device._value_rules import run_on_values
from spmd.lowering._registry import MAY_BE_LIFTED, Lowering

_ARRAYS = (jax.Array, np.ndarray)
_IGNORED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"})
_LARGEST_FLOAT, _LARGEST_INT = torch.finfo(torch.float32).max, torch.iinfo(torch.int32).max
_HALF = (torch.float16, torch.bfloat16)
_INT64_VECTOR, _INT32_SCALAR = torch.zeros(1, dtype=torch.int64), torch.zeros((), dtype=torch.int32)


class _Dynamic:
    """Placeholder for the i-th array or number of a call."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Plan:
    """An overload with fixed dtypes and static arguments, ready to run."""

    __slots__ = ("bound", "compute", "jitted", "jitted_to", "lowering", "meta_check", "results", "seen", "template")

    def __init__(
        self,
        lowering: Lowering,
        template: tuple[list[Any], dict[str, Any]],
        compute: tuple[ComputeDtype | None, ...],
        results: tuple[np.dtype[Any] | None, ...] | None,
        meta_check: MetaCheck,
    ) -> None:
        self.lowering = lowering
        self.meta_check = meta_check
        self.template = template
        self.compute = compute
        self.results = results
        self.jitted = PartitionedJit(self.run)
        self.jitted_to = functools.cache(
            lambda sharding: PartitionedJit(functools.partial(self._run_to, sharding), out_shardings=(sharding, None))
        )
        self.bound: dict[Any, Any] = {}
        self.seen: set[Any] = set()

    def run(self, dynamic: Sequence[Any], key: Any = None) -> tuple[Any, tuple[Any, ...]]:
        """Call the rule with the dynamic values (arrays and numbers) filled in; cast its operands and its results.

        Returns:
            The op's result or results, and the new values of the arguments in `lowering.updates`.
        """
        self.check(dynamic)
        values = [value if dtype is None else dtype.of(value) for value, dtype in zip(dynamic, self.compute, strict=True)]
        args = [_filled(arg, values) for arg in self.template[0]]
        kwargs = {name: _filled(arg, values) for name, arg in self.template[1].items()}
        if self.lowering.random:
            args.insert(0, None if key is None else typed_key(key))
        with np.errstate(over="ignore"), self.meta_check.explaining(dynamic):  # a number that the dtype cannot hold is infinite
            out = self.lowering.rule(*args, **kwargs)
        updated: tuple[Any, ...] = ()
        if self.lowering.updates:
            count = len(self.lowering.op._schema.returns)
            out = out if isinstance(out, (tuple, list)) else (out,)
            out, updated = out[0] if count == 1 else out[:count], tuple(out[count:])
        _check_count(self.lowering, out)
        if self.results is None:
            return out, updated
        if isinstance(out, tuple | list):
            return type(out)(_cast(o, self.results[min(i, len(self.results) - 1)]) for i, o in enumerate(out)), updated
        return _cast(out, self.results[0]), updated

    def check(self, dynamic: Sequence[Any]) -> None:
        """Raise torch's error for invalid shapes and arguments. Runs together with the rule: while jax traces, once per shape."""
        self.meta_check.check(dynamic)
        if self.lowering.check is not None:
            args, kwargs = self.template
            self.lowering.check(*(_filled(arg, dynamic) for arg in args), **{n: _filled(a, dynamic) for n, a in kwargs.items()})

    def _run_to(self, sharding: Any, dynamic: Sequence[Any], key: Any = None) -> tuple[Any, tuple[Any, ...]]:
        """`run`, with the result padded as it is stored under `sharding`."""
        out, updated = self.run(dynamic, key)
        return (out if stored_shape(out.shape, sharding) == out.shape else padded(out, sharding)), updated

    def traced(self, dynamic: Sequence[Any], key: Any) -> Any:
        """`run` inside a trace.

        From the second call with the same shapes and Python numbers on, the rule's jaxpr is recorded again instead of calling the rule.
        The first call makes no jaxpr: most ops of a small model occur once, and a jit of their own would cost more than their rule.
        """
        values = [_cast_scalar(value, dtype) for value, dtype in zip(dynamic, self.compute, strict=True)]
        if key is None and not any(getattr(value, "shape", None) for value in values):
            return once(self, values, lambda: self.run(values))
        arrays = [value for value in values if isinstance(value, _ARRAYS)]
        numbers = tuple((i, type(v), repr(v)) for i, v in enumerate(values) if not isinstance(v, _ARRAYS))  # repr: 0.0 == -0.0
        seen = (numbers, *((value.shape, value.dtype) for value in arrays))
        if seen not in self.seen or self.lowering.by_origin:
            self.seen.add(seen)
            return self.run(values, key)
        if (bound := self.bound.get(numbers)) is None:
            scalars = [None if isinstance(value, _ARRAYS) else value for value in values]
            bound = self.bound[numbers] = Inlined(lambda arrays, key: self.run(_with_arrays(scalars, iter(arrays)), key))
        return bound(arrays, key)


def _with_arrays(scalars: list[Any], arrays: Iterator[Any]) -> list[Any]:
    return [next(arrays) if value is None else value for value in scalars]


class Adapter:
    """Runs one lowering on device tensors."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.op = lowering.op
        self.name = lowering.op._schema.name.partition("::")[2]
        schema = lowering.op._schema
        self.names = [argument.name for argument in schema.arguments]
        self.is_scalar = [str(argument.type) in ("number", "Optional[number]") for argument in schema.arguments]
        self.is_tensor = [str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in schema.arguments]
        self.is_host = [name in lowering.host for name in self.names]
        self.dynamic_scalar = [scalar and name not in lowering.static for scalar, name in zip(self.is_scalar, self.names, strict=True)]
        self.accepts = {name: i for i, name in enumerate(self.names)}
        operands = {"self", "other", "alpha"} if "other" in self.accepts else {"self"}  # `alpha` is a factor of `other`
        self.is_operand = [is_tensor or name in operands for is_tensor, name in zip(self.is_tensor, self.names, strict=True)]
        self.takes_indices = self.names[1:2] == ["indices"] and str(schema.arguments[1].type) == "List[Optional[Tensor]]"
        self.fills_dtype = "dtype" in self.names and not lowering.pointwise
        self.known = lowering.static - MAY_BE_LIFTED
        self.is_plain = not (lowering.random or lowering.data_dependent or lowering.updates)
        self.bounds = _indices.bounds_of(self.op)
        self.plans: dict[Any, Plan] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run on tensors, return tensors."""
        with exact_dtypes():
            if self.is_plain and not is_tracing():
                plan, dynamic = self.plan(args, kwargs)
                try:
                    out = plan.jitted(dynamic)[0]
                except (RuntimeError, ValueError) as error:  # see Note [Threads]
                    if not was_taken(error):
                        raise
                    with with_trace_lock():
                        out = plan.jitted(self.plan(args, kwargs)[1])[0]
                note_operation(out)
            else:
                out = self.arrays(args, kwargs)
            if not self.op._schema.returns:  # the op only writes its arguments
                return None
            out = reuse_or_save(self.name, out)
            return wrap(out) if isinstance(out, jax.Array) else self._wrapped(out)

    def arrays(self, args: tuple[Any, ...], kwargs: dict[str, Any], sharding: Any = None) -> Any:
        """Run on tensors, write the arguments that the op updates, and return arrays. Call it inside `exact_dtypes`.

        `sharding` is that of an eager result; None: jax chooses.
        """
        if self.takes_indices and any(i is not None and i.device.type != "jax" for i in args[1]):  # as on other devices
            self.check_indices(args, kwargs, of_host=False)  # before the indices are uploaded
            args = (args[0], [i if i is None else i.to("jax") for i in args[1]], *args[2:])
        if self.known:
            args, kwargs = with_known(self.known, self.names, args, kwargs)
        args, kwargs = with_representable(self.name, args, kwargs)
        plan, dynamic = self.plan(args, kwargs)
        key = self.key(args, kwargs)
        needs_values = self.needs_values(args, kwargs)
        if not is_tracing():
            if needs_values:
                _counters.count("host_reads")
            jitted = plan.jitted if sharding is None else plan.jitted_to(sharding)
            out, updated = (plan.run if needs_values else jitted)(dynamic, key)
            note_operation(out)
        else:
            try:
                out, updated = run_on_values(plan, dynamic, key) if needs_values else plan.traced(dynamic, key)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
                if not needs_values:
                    raise
                raise data_dependent(self.op) from error
        self.update(updated, args, kwargs)
        return out

    def check_indices(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, of_host: bool = True) -> None:
        """Raise if an index is out of bounds whose value is known on the host. `of_host`: check no others."""
        if self.bounds is not None:
            _indices.check(self.bounds, self.name, {**dict(zip(self.names, args, strict=False)), **kwargs}, of_host=of_host)

    def needs_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the shape of this call's result depends on values."""
        needs = self.lowering.data_dependent
        return bool(needs(*args, **kwargs)) if callable(needs) else needs

    def key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Key data of a random op's next draw; None for other ops, and for a call that draws nothing."""
        if not self.lowering.random or self._draws_nothing(args, kwargs):
            return None
        return _generator.next_key(self.argument("generator", args, kwargs))

    def _draws_nothing(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True for dropout that is switched off: as in torch, evaluation does not advance the random stream."""
        if "training" in self.accepts or "dropout_p" in self.accepts:
            return not self.argument("training" if "training" in self.accepts else "dropout_p", args, kwargs)
        chance = self.argument("p" if "p" in self.accepts else "dropout", args, kwargs)
        return "train" in self.accepts and (self.argument("train", args, kwargs) is False or chance == 0)

    def update(self, values: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write `values` into the arguments that the lowering updates in place."""
        for name, value in zip(self.lowering.updates, values, strict=True) if values else ():
            target = self.argument(name, args, kwargs)
            if target is not None and value is not None:
                store(target, like_placement(value, target))

    def argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument called `name`, or None if the call did not pass it."""
        position = self.accepts.get(name, len(args))
        return args[position] if position < len(args) else kwargs.get(name)

    def plan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plan, list[Any]]:
        """The plan for this call, and the call's dynamic values in order. Raises torch's errors for values that the host knows."""
        refused: Exception | None = None
        if self.bounds is not None:
            try:
                self.check_indices(args, kwargs, of_host=False)
            except (IndexError, RuntimeError) as error:
                refused = error  # torch refuses dtypes and shapes first
        dynamic: list[Any] = []
        key: list[Any] = []
        for index, arg in enumerate(args):
            if isinstance(arg, torch.Tensor) and not (arg.is_cpu or arg.is_meta or self.is_host[index]):  # the common case
                dynamic.append(load(arg))
                key.append(arg.dtype if arg.dim() else (arg.dtype,))
            else:
                self._describe(index, arg, dynamic, key)
        for name, arg in kwargs.items():
            if name not in _IGNORED:
                key.append(name)
                self._describe(self.accepts[name], arg, dynamic, key)
            elif name == "memory_format":  # does not change the value, but torch refuses some formats
                key.append(arg)
        key.extend(map(trace_setting, self.lowering.told))
        if self.lowering.decides is not None:
            key.append(decided(self.lowering.decides, self.accepts, args, kwargs))
        found = (*key, torch.get_default_dtype())  # the dtype that Python numbers and integer tensors are promoted to
        plan = self.plans.get(found)
        if plan is None:
            plan = self._new_plan(args, kwargs, dynamic)
            plan.check(dynamic)  # a refused call must not add a plan or draw a random number
            self.plans[found] = plan
        if refused is not None:
            plan.check(dynamic)
            raise refused
        return plan, dynamic

    def _describe(self, index: int, arg: Any, dynamic: list[Any], key: list[Any]) -> None:
        """Append the argument's value to `dynamic` if it is dynamic, and the properties that the plan depends on to `key`."""
        if self.is_host[index] and arg is not None:
            key.append(tuple(map(exactly, arg.reshape(-1).tolist())))
        elif isinstance(arg, torch.Tensor):
            value, described = _tensor_value(arg)
            dynamic.append(value)
            key.append(described)
        elif isinstance(arg, list | tuple):
            if any(isinstance(item, torch.Tensor) for item in arg):
                key.append("[")
                for item in arg:
                    self._describe(index, item, dynamic, key)
                key.append("]")
            elif arg and isinstance(arg[0], torch.SymFloat):
                dynamic.extend(carried(item) if isinstance(item, torch.SymFloat) else item for item in arg)
                key.append(("lifted", len(arg)))
            else:
                key.append(tuple((type(item), exactly(item)) for item in arg))
        elif isinstance(arg, torch.SymFloat):
            dynamic.append(carried(arg))
            # SymFloat instead of float in the key: a Python float is weakly typed, but this array is cast
            key.append((torch.SymFloat, type(sample(arg))))
        elif self.is_dynamic(index, arg):
            dynamic.append(arg)
            key.append(kind_of_number(arg))
        elif isinstance(arg, int | float):
            key.append((type(arg), exactly(arg)))
        else:
            key.append(exactly(arg))

    def is_dynamic(self, place: int | str, arg: Any) -> bool:
        """Whether an argument that is not a tensor is a dynamic value of the call instead of a part of the plan.

        A number in place of a tensor is dynamic if 32 bits can represent it and division by it is valid: then no check depends on
        its value, except for the dtypes that cannot represent it, which are a part of the plan (`kind_of_number`).

        Args:
            place: position or name of the argument.
        """
        index = self.accepts.get(place, -1) if isinstance(place, str) else place
        if index < 0:
            return False
        if self.is_tensor[index]:
            return (type(arg) is float and abs(arg) <= _LARGEST_FLOAT) or (type(arg) is int and arg != 0 and abs(arg) <= _LARGEST_INT)
        return self.dynamic_scalar[index] and arg is not None

    def _new_plan(self, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: list[Any]) -> Plan:
        counter = [0]
        positional = [self._placed(index, arg, counter) for index, arg in enumerate(args)]
        named = {name: self._placed(self.accepts[name], arg, counter) for name, arg in kwargs.items() if name not in _IGNORED}
        meta_check = MetaCheck(
            self.op,
            tuple(meta_argument(arg, place) for arg, place in zip(args, positional, strict=True)),
            {name: meta_argument(arg, named.get(name)) for name, arg in kwargs.items()},
        )
        results = meta_check.results(dynamic)
        on_cpu = meta_check.check_on_cpu(dynamic, draws=self.lowering.random)
        if on_cpu is not None and results is not None and on_cpu.dtypes is not None:
            # meta kernels in Python differ (bools ** True are bools); for floats they state what accelerators keep in float32
            results = tuple(m if m is None or m.is_floating_point else c for m, c in zip(results, on_cpu.dtypes, strict=True))
        places = *enumerate(args), *((self.accepts[name], arg) for name, arg in kwargs.items() if name not in _IGNORED)
        refuse_large_ints(self.name, (arg for i, arg in places if self.is_tensor[i] or self.dynamic_scalar[i]))
        compute: list[ComputeDtype | None] = [None] * counter[0]
        if self.lowering.pointwise:
            compute = self._compute_dtypes(args, kwargs, results, counter[0])
        elif self.fills_dtype and results is not None and results[0] is not None:
            position = self.accepts["dtype"]
            if position < len(positional):
                positional[position] = to_numpy_dtype(results[0])
            else:
                named["dtype"] = to_numpy_dtype(results[0])
        named |= {name: trace_setting(name) for name in self.lowering.told}
        if self.lowering.decides is not None:
            named["decided"] = decided(self.lowering.decides, self.accepts, args, kwargs)
        cast = None if results is None else tuple(None if dtype is None else to_numpy_dtype(dtype) for dtype in results)
        return Plan(self.lowering, (positional, named), tuple(compute), cast, meta_check)

    def _placed(self, index: int, arg: Any, counter: list[int]) -> Any:
        """The argument's entry in the rule's template: a placeholder if the value is dynamic."""
        if self.is_host[index] and arg is not None:
            return host_array(arg)
        if isinstance(arg, list | tuple):
            if any(isinstance(item, torch.Tensor | torch.SymFloat) for item in arg):
                return [self._placed(index, item, counter) for item in arg]
            return tuple(arg)
        if isinstance(arg, torch.Tensor | torch.SymFloat) or self.is_dynamic(index, arg):
            counter[0] += 1
            return _Dynamic(counter[0] - 1)
        return to_numpy_dtype(arg) if isinstance(arg, torch.dtype) else arg

    def _compute_dtypes(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[torch.dtype | None, ...] | None, count: int
    ) -> list[ComputeDtype | None]:
        """The dtype to compute in for each dynamic value: torch's promoted dtype, or float32 for 16-bit floats."""
        named = [*zip(self.names, args, strict=False), *((n, a) for n, a in kwargs.items() if n not in _IGNORED)]
        chosen = self.lowering.promoted
        operands = [_number_or_tensor(a) for n, a in named if (n in chosen if chosen else True) and _is_operand(a)]
        promoted = _promoted(operands)
        result = (results[0] if results else None) or promoted
        if result.is_floating_point and not (promoted.is_floating_point or promoted.is_complex):
            promoted = result
        if promoted in _HALF and self.lowering.widened:
            promoted = torch.float32
        dtype, half = to_numpy_dtype(promoted), to_numpy_dtype(result) if result in _HALF else None
        compute: list[ComputeDtype | None] = []
        for name, arg in named:
            for item in arg if isinstance(arg, list | tuple) else [arg]:
                position, is_tensor = self.accepts[name], isinstance(item, torch.Tensor | torch.SymFloat)
                if is_tensor or self.is_dynamic(position, item):
                    takes_part = name in chosen if chosen else True
                    # an input of the program that stands for a number has 64 bits; torch converts the number to the operands' dtype
                    takes_part |= isinstance(item, torch.SymFloat) and promoted.is_floating_point
                    is_rounded = half is not None and self.is_operand[position]  # other Scalars keep 32 bits
                    takes_part &= is_tensor or self.is_tensor[position] or is_rounded
                    own = ComputeDtype(dtype, half if is_rounded else None, name == self.lowering.wide)
                    compute.append(own if takes_part else None)
        assert len(compute) == count, f"{self.op}: {len(compute)} operands described, {count} placed"
        return compute

    def _wrapped(self, out: Any) -> Any:
        if isinstance(out, tuple | list):
            return type(out)(None if o is None else wrap(o) for o in out)
        return wrap(out)


def _check_count(lowering: Lowering, out: Any) -> None:
    """Fail if the rule returned too few or too many results: C++ would read past them."""
    returns = lowering.op._schema.returns
    if len(returns) > 1 or (len(returns) == 1 and str(returns[0].type) == "Tensor"):
        count = len(out) if isinstance(out, tuple | list) else 1
        assert count == len(returns), f"{lowering.op} has {len(returns)} results, its rule at {lowering.source} returned {count}"


def _filled(arg: Any, values: Sequence[Any]) -> Any:
    if isinstance(arg, _Dynamic):
        return values[arg.index]
    return [_filled(item, values) for item in arg] if isinstance(arg, list) else arg


def _cast_scalar(value: Any, compute: ComputeDtype | None) -> Any:
    """A 0-dim value in the dtype that it has first, converted once for all ops that use it."""
    if compute is None or not isinstance(value, jax.Array) or value.shape or value.dtype == (dtype := compute.first(())):
        return value
    return once(dtype, (value,), lambda: cast(value, dtype))


def _cast(value: Any, dtype: np.dtype[Any] | None) -> Any:
    if value is None or dtype is None:
        return value
    if not isinstance(value, jax.Array):
        return jnp.asarray(value, dtype)
    return value if value.dtype == dtype else cast(value, dtype)


def _tensor_value(tensor: torch.Tensor) -> tuple[Any, Any]:
    """The value of a tensor argument and its part of the plan's key: dtype and whether it is 0-dim, or a wrapped number's type."""
    if tensor.device.type == "jax":
        return load(tensor), (tensor.dtype if tensor.dim() else (tensor.dtype,))
    if (number := number_of(tensor)) is not None:
        return carried(number), (torch.SymFloat, type(sample(number)))
    if tensor.dim() == 0 and tensor.device.type == "cpu":
        if is_wrapped_number(tensor):
            value = tensor.item()
            return value, type(value)
        return host_value(tensor), (tensor.dtype,)
    raise on_other_device(tensor)


def is_wrapped_number(tensor: torch.Tensor) -> bool:
    """True if a 0-dim CPU tensor stands for a Python number. It is a wrapped number in C++, which Python cannot query directly.

    A real float64 tensor promotes an int64 tensor to float64, a wrapped number only to the default dtype; a real int64
    tensor promotes a 0-dim int32 tensor to int64, a wrapped number does not.
    """
    if tensor.dtype in (torch.float64, torch.complex128):
        return torch.result_type(_INT64_VECTOR, tensor) != tensor.dtype
    if tensor.dtype == torch.int64:
        return torch.result_type(_INT32_SCALAR, tensor) == torch.int32
    return False


def _is_operand(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor | torch.SymFloat | int | float | complex) and not isinstance(arg, torch.dtype)


def _promoted(operands: list[Any]) -> torch.dtype:
    """The dtype that torch promotes to. `elementwise_dtypes` knows no complex dtype for a 0-dim float8: it gets a float16 instead."""
    if any(isinstance(arg, torch.Tensor) and arg.is_complex() and arg.dim() for arg in operands):
        operands = [
            _HALF_NUMBER if isinstance(a, torch.Tensor) and a.dtype.itemsize == 1 and a.is_floating_point() and not a.dim() else a
            for a in operands
        ]
    return elementwise_dtypes(*operands, type_promotion_kind=KIND.DEFAULT)[1]


def _number_or_tensor(arg: Any) -> Any:
    if (number := number_of(arg)) is not None:
        return sample(number)
    is_plain = isinstance(arg, torch.Tensor) and arg.is_cpu and arg.dim() == 0 and is_wrapped_number(arg)
    return arg.item() if is_plain else arg


_HALF_NUMBER = torch.empty((), dtype=torch.float16, device="meta")
Kernel = Callable[..., Any]
__all__ = ["Adapter", "Kernel", "Plan", "is_wrapped_number", "to_torch_dtype"]
