"""Functions over names of jax that are private, or public only in some versions.

With `_jax_executables` this is the only file of `spmd` that uses private names of jax. Those that `mesh` uses are in
`mesh/platform/_jax_runtime.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeGuard

import jax
import jax.core
import jax.export
import jax.extend.core
import numpy as np

from mesh._devices import host_device
from mesh.platform._jax_runtime import missing

try:
    from jax._src.array import ArrayImpl as ArrayImpl
    from jax._src.compilation_cache_interface import CacheInterface as CacheInterface
    from jax._src.config import trace_context as _trace_context
    from jax._src.core import InconclusiveDimensionOperation as InconclusiveDimensionOperation
    from jax._src.core import eval_context as _eval_context
    from jax._src.core import trace_ctx as _trace_ctx
    from jax._src.core import trace_state_clean as _trace_state_clean
    from jax._src.export._export import _export_lowered
    from jax._src.export.shape_poly import BoundsPrecision as _BoundsPrecision
    from jax._src.export.shape_poly import _bounds_decision as _bounds
    from jax._src.export.shape_poly import all_dim_vars as _all_dim_vars
    from jax._src.interpreters.mlir import LoweringParameters as _LoweringParameters
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace as _DynamicJaxprTrace
    from jax._src.interpreters.partial_eval import convert_constvars_jaxpr as _convert_constvars
    from jax._src.interpreters.partial_eval import dce_jaxpr as _dce_jaxpr
    from jax._src.interpreters.partial_eval import inline_jaxpr_into_trace as _inline_jaxpr_into_trace
    from jax._src.interpreters.partial_eval import partial_eval_jaxpr_nounits as _partial_eval_jaxpr
    from jax._src.lax.lax import _pad_lower
    from jax._src.source_info_util import current as _current_source
    from jax._src.source_info_util import current_name_stack as _current_name_stack
    from jax._src.source_info_util import user_context as _user_context
    from jax._src.util import _caches
except ImportError as error:
    raise missing(str(error)) from error

pad_lower = _pad_lower

# jax's caches of traces, by the names of the cached functions
_TRACE_CACHES = (
    *("_infer_params_cached", "_process_in_axis_resources", "_check_and_canonicalize_out_shardings", "trace_to_jaxpr"),
    *("_cached_abstract_eval", "_linearize_jaxpr", "_prune_closed_jaxpr_outputs", "_dce_jaxpr", "_dce_jaxpr_pjit"),
)


_clear_hooks: list[Callable[[], None]] = []


def with_traces(forget: Callable[[], None]) -> None:
    """Register a function that `forget_traces` calls too."""
    _clear_hooks.append(forget)


def forget_traces() -> None:
    """Clear jax's caches of traces, each with some thousand jaxprs. Compiled programs are kept; the next trace takes longer."""
    for forget in _clear_hooks:
        forget()
    for cache, name in list(_caches.items()):
        if any(f" {function} " in name for function in _TRACE_CACHES):
            cache.cache_clear()


def is_tracing() -> bool:
    """Whether jax is tracing a function on this thread."""
    return not _trace_state_clean()


def is_tracer(value: Any) -> TypeGuard[jax.core.Tracer[Any]]:
    """Whether `value` is a tracer of jax."""
    return isinstance(value, jax.core.Tracer)


def current_trace() -> Any:
    """The `jax.core.Trace` that processes jax's operations on this thread now."""
    return _trace_ctx.trace


def variable_of(tracer: Any) -> Any:
    """The jaxpr variable of a tracer; None for a concrete value."""
    return getattr(tracer, "val", None)


def rows_folded_from(matrix: Any) -> Any:
    """The array [..., K] with more than two dims that was reshaped to a traced matrix [M, K]; None if it is not such a reshape."""
    equation = getattr(matrix, "parent", None)
    if equation is None or equation.primitive.name != "reshape" or matrix.ndim != 2:
        return None
    (array,) = equation.in_tracers
    is_folded = array.ndim > 2 and array.shape[-1] == matrix.shape[-1] and math.prod(array.shape[:-1]) == matrix.shape[0]
    return array if is_folded else None


def transposed_from(matrix: Any) -> Any:
    """The matrix that was transposed to a traced matrix; None if it is not the result of a transpose."""
    equation = getattr(matrix, "parent", None)
    is_transpose = equation is not None and equation.primitive.name == "transpose" and matrix.ndim == 2
    return equation.in_tracers[0] if is_transpose else None  # pyright: ignore[reportOptionalMemberAccess]


def counted_from(number: Any) -> Any:
    """The array (or argument) from which a traced number results by adding integral constants; None if by any other operation."""
    while (equation := getattr(number, "parent", None)) is not None:
        operands, name = equation.in_tracers, equation.primitive.name
        if name == "add":
            operands = [o for o in operands if not _is_integral_constant(o)]
        elif name not in ("convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "copy"):
            return None
        if len(operands) != 1:
            return None
        (number,) = operands
    return _atom(number)


def varying_axes(array: Any) -> frozenset[str]:
    """The manual mesh axes (of `jax.shard_map`) along which an array varies between devices."""
    kind: Any = jax.typeof(array)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else kind.vma  # `vma` in jax 0.10.0


def tracing_context() -> Any:
    """Everything besides the arguments that a trace depends on: jax's settings, and the manual axes. Hashable."""
    return _trace_context()


def recording_trace() -> Any:
    """The `DynamicJaxprTrace` that records a jaxpr on this thread; None if operations run eagerly or under a transform."""
    trace = _trace_ctx.trace
    return trace if type(trace) is _DynamicJaxprTrace else None


class ToInline:
    """A closed jaxpr whose equations are copied into a trace. No rule of a primitive runs again."""

    __slots__ = ("_consts", "_whole")

    def __init__(self, closed: Any) -> None:
        jaxpr = closed.jaxpr
        names = jaxpr.debug_info._replace(arg_names=None)
        self._consts = closed.consts
        self._whole = jaxpr.replace(constvars=(), invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=names)

    def __call__(self, trace: Any, args: Sequence[Any]) -> list[Any]:
        """Copy the equations into `trace`, which is `recording_trace()`, and return the results as tracers."""
        source = _current_source()
        tracer_of = trace.to_jaxpr_tracer
        found = _inline_jaxpr_into_trace(trace, source, self._whole, (), *[tracer_of(v, source) for v in (*self._consts, *args)])
        return [tracer_of(v, source) for v in found]


def inline_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """`eval_jaxpr` inside a trace, in a third of the time. See `ToInline`."""
    return ToInline(jax.extend.core.ClosedJaxpr(jaxpr, consts))(_trace_ctx.trace, args)


def inputs_of_each_output(jaxpr: Any) -> list[list[bool]]:
    """For each output of a jaxpr, a mask of the inputs that it depends on."""
    count = len(jaxpr.outvars)
    return [_dce_jaxpr(jaxpr, [i == output for i in range(count)])[1] for output in range(count)]


def known_value(value: Any, is_input: Callable[[Any], bool], of: Callable[[Any], Any] | None = None, num_alike: int = 0) -> Any:
    """The value of a tracer that was computed from constants alone (positions, masks); None if it depends on an input.

    Args:
        value: a tracer.
        is_input: whether a constant of the trace will be an input of the program.
        of: a function of the value, whose result is returned instead. Value and function are computed in one program, so that
            large intermediate values need not be stored.
        num_alike: number of leading dims that the value passed to `of` may have with size 1, if it is constant along them.
    """
    listed = _ancestry(value, lambda atom: not is_tracer(atom) and not is_input(atom))
    if listed is None:
        return None
    if of is None:
        with jax.ensure_compile_time_eval():
            return _evaluated([value], listed, _itself, {})[0]
    with _eval_context():  # `ensure_compile_time_eval` would run each operation of the new program separately
        known = _alike_parts(listed, num_alike)
        rest = [e for e in listed if not all(id(variable) in known for variable in e.outvars)]
        return jax.jit(lambda: of(_evaluated([value], rest, _itself, known)[0]))()


def derived(
    value: Any, is_input: Callable[[Any], bool], known: Callable[[Any], Any], ends: Collection[int] = ()
) -> tuple[list[Any], Any] | None:
    """The inputs that a tracer depends on, and a closed jaxpr that computes it from them; None if the value of one is unknown.

    Args:
        value: a tracer.
        is_input: whether a constant of the trace will be an input of the program. Its arguments are inputs.
        known: returns the value of an input (an array, or the tracer of an argument), or None if it is unknown.
        ends: ids of variables that count as arguments, although the trace computes them.
    """
    inputs: dict[int, tuple[Any, Any]] = {}

    def is_known(atom: Any) -> bool:
        if not is_tracer(atom) and not is_input(atom):
            return True
        if id(atom) not in inputs:
            inputs[id(atom)] = atom, known(atom)
        return inputs[id(atom)][1] is not None

    listed = _ancestry(value, is_known, ends)
    if listed is None:
        return None

    def run(given: list[Any]) -> Any:
        found = dict(zip(inputs, given, strict=True))
        return _evaluated([value], listed, lambda atom: found.get(id(atom), atom), {})[0]

    with _eval_context():
        return [atom for atom, _ in inputs.values()], jax.make_jaxpr(run)([host for _, host in inputs.values()])


def evaluated(closed: Any, given: Sequence[Any]) -> Any:
    """Evaluate a closed jaxpr with one result on values that the host has. It runs on the host and waits for no device."""
    host: Any = host_device()
    with jax.ensure_compile_time_eval(), jax.default_device(host):
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *map(jax.numpy.asarray, given))[0]


def _ancestry(value: Any, accepts: Callable[[Any], bool], ends: Collection[int] = ()) -> list[Any] | None:
    """The equations that compute a tracer, in order; None if one has effects, or if `accepts` refuses an input. `ends`: see `derived`."""
    equations: dict[int, Any] = {}
    waiting: list[tuple[Any, bool]] = [(value, False)]
    while waiting:  # no recursion: a trace is thousands of equations deep
        tracer, are_operands_done = waiting.pop()
        equation = getattr(tracer, "parent", None)
        if equation is None or id(variable_of(tracer)) in ends:
            if not accepts(_atom(tracer)):
                return None
        elif equation.effects:
            return None
        elif are_operands_done:
            equations[id(equation)] = equation
        elif id(equation) not in equations:
            waiting.append((tracer, True))
            waiting.extend((operand, False) for operand in equation.in_tracers)
    return list(equations.values())


def is_same_value(one: Any, other: Any) -> bool:
    """Whether two tracers of one trace certainly have equal values: the same operations computed them from the same operands."""
    seen: set[tuple[int, int]] = set()
    waiting = [(one, other)]
    while waiting:
        one, other = waiting.pop()
        if one is other or (id(one), id(other)) in seen:
            continue
        seen.add((id(one), id(other)))
        equation, second = getattr(one, "parent", None), getattr(other, "parent", None)
        if equation is None or second is None:
            if equation is not second or not _is_same_atom(_atom(one), _atom(other)):
                return False
        elif [v is one.val for v in equation.outvars] != [v is other.val for v in second.outvars]:
            return False
        elif equation is not second:
            if equation.primitive is not second.primitive or equation.effects or not _are_same(equation.params, second.params):
                return False
            if len(equation.in_tracers) != len(second.in_tracers):
                return False
            waiting.extend(zip(equation.in_tracers, second.in_tracers, strict=True))
    return True


def _is_same_atom(one: Any, other: Any) -> bool:
    if one is other:
        return True
    numbers = (int, float, np.ndarray, np.generic)
    if type(one) is not type(other) or not isinstance(one, numbers):
        return False
    first, second = np.asarray(one), np.asarray(other)
    return first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes()


def _are_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two equations have the same parameters. Parameters that cannot be compared count as different."""
    try:
        return one.keys() == other.keys() and all(one[key] is other[key] or bool(one[key] == other[key]) for key in one)
    except (TypeError, ValueError):
        return False


def _atom(value: Any) -> Any:
    """The constant (array or number) of a tracer without an equation; for an argument, or a value of an outer trace, the tracer itself."""
    if not is_tracer(value):
        return value
    atom = value.val  # pyright: ignore[reportAttributeAccessIssue]
    constant = atom.val if hasattr(atom, "val") else value._trace.frame.constvar_to_val.get(atom)  # pyright: ignore[reportAttributeAccessIssue]
    return value if constant is None else constant


def _is_integral_constant(operand: Any) -> bool:
    atom = None if getattr(operand, "parent", None) is not None else _atom(operand)
    return getattr(atom, "ndim", 0) == 0 and isinstance(atom, (int, float, np.ndarray, np.generic)) and float(atom).is_integer()


def _itself(atom: Any) -> Any:
    return atom


_LARGE = 1 << 22  # elements; a mask [batch, 1, positions, positions] has more, its operands have fewer
_ELEMENTWISE = frozenset(
    ("add", "sub", "mul", "max", "min", "and", "or", "xor", "not", "eq", "ne", "lt", "le", "gt", "ge", "select_n", "convert_element_type")
)


def _alike_parts(equations: list[Any], num_alike: int) -> dict[int, Any]:
    """Values of the operands of large elementwise equations, with each leading dim along which they are constant cut to size 1.

    So a mask that is equal for 256 sequences is computed for one of them.

    Args:
        equations: in the order in which they run.
        num_alike: number of leading dims that may be cut.

    Returns:
        Values by `id` of the variable, None for variables that are no longer needed. Empty if nothing can be cut, or if an
        equation with a large result is not elementwise.
    """
    large = [e for e in equations if any(variable.aval.size > _LARGE for variable in e.outvars)]
    results = {id(variable) for e in large for variable in e.outvars}
    if not num_alike or not large or any(e.primitive.name not in _ELEMENTWISE for e in large):
        return {}
    small = [e for e in equations if not any(id(variable) in results for variable in e.outvars)]
    if any(id(operand.val) in results for e in small for operand in e.in_tracers):
        return {}
    needed = list({id(o.val): o for e in large for o in e.in_tracers if id(o.val) not in results}.values())
    needed = [o for o in needed if getattr(o, "parent", None) is not None]
    values = jax.jit(lambda: _evaluated(needed, small, _itself, {}))()
    known = {id(o.val): _cut(value, num_alike) for o, value in zip(needed, values, strict=True)}
    return known | {id(variable): None for e in small for variable in e.outvars if id(variable) not in known}


def _cut(value: Any, num_alike: int) -> Any:
    for dim in range(min(num_alike, value.ndim)):
        first = jax.lax.slice_in_dim(value, 0, 1, axis=dim)
        if value.shape[dim] > 1 and bool((value == first).all()):
            value = first
    return value


def _evaluated(values: list[Any], equations: list[Any], of: Callable[[Any], Any], known: Mapping[int, Any]) -> list[Any]:
    """Run equations, and return the values of the given tracers.

    Args:
        values: tracers.
        equations: in the order in which they run.
        of: returns the value of an array, or of a tracer that is the result of none of the equations.
        known: values of variables, by `id`, which may have size 1 along some dims. If there are any, all equations are elementwise.
    """
    found = dict(known)

    def read(tracer: Any) -> Any:
        number = id(variable_of(tracer))
        return found[number] if number in found else of(_atom(tracer))

    for equation in equations:
        operands = [read(operand) for operand in equation.in_tracers]
        if known:
            operands = jax.numpy.broadcast_arrays(*operands)
        is_layout = equation.primitive.name == "sharding_constraint"
        results = operands[0] if is_layout else equation.primitive.bind(*operands, **equation.params)
        listed = results if equation.primitive.multiple_results else [results]
        found.update((id(variable), result) for variable, result in zip(equation.outvars, listed, strict=True))
    return [read(value) for value in values]


@contextmanager
def as_recorded(equation: Any, names: Any = None) -> Generator[None]:
    """Record operations with the name stack, source line and settings of an equation of a jaxpr.

    Args:
        names: a name stack to use instead of the equation's.
    """
    info = equation.source_info
    stack = info.name_stack if names is None else names
    with _user_context(info.traceback, name_stack=_current_name_stack() + stack), equation.ctx.manager:
        yield


def common_names(one: Any, other: Any) -> Any:
    """The name stack of two equations, with "*" for parts that differ: "h/*/mlp" for "h/0/mlp" and "h/1/mlp"."""
    first, second = one.source_info.name_stack, other.source_info.name_stack
    if first == second or len(first.stack) != len(second.stack):
        return first
    merged = [
        a if a == b or type(a) is not type(b) else type(a)(_merged(a.name, b.name)) for a, b in zip(first.stack, second.stack, strict=True)
    ]
    return type(first)(tuple(merged))


def _merged(one: str, other: str) -> str:
    parts, others = one.split("/"), other.split("/")
    return "/".join(a if a == b else "*" for a, b in zip(parts, others, strict=False)) if len(parts) == len(others) else one


_LITERAL = jax.extend.core.Literal
_JAXPRS = (jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr)


def is_literal(atom: Any) -> bool:
    """Whether an operand of an equation is a literal."""
    return type(atom) is _LITERAL


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr."""
    return isinstance(value, _JAXPRS)


def eval_jaxpr(jaxpr: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Interpret a jaxpr on arrays or tracers."""
    return jax.core.eval_jaxpr(jaxpr, consts, *args)


def split_by_dependence(closed: Any, unknown: Sequence[bool]) -> tuple[Any, Any, list[bool]]:
    """Partial evaluation: split a closed jaxpr into the part that depends only on known inputs, and the rest.

    Args:
        unknown: a mask of the inputs that are unknown.

    Returns:
        (known, rest, is_unknown). `known` maps the known inputs to the known outputs, followed by residuals. `rest` maps the
        residuals and the unknown inputs to the unknown outputs. `is_unknown` is a mask of the outputs of `rest`.
    """
    known, rest, is_unknown, _ = _partial_eval_jaxpr(closed, list(unknown), instantiate=False)
    return known, rest, is_unknown


def with_constants_as_inputs(closed: Any) -> tuple[Any, list[Any]]:
    """A closed jaxpr with its constants as leading inputs, and these constants."""
    return jax.extend.core.ClosedJaxpr(_convert_constvars(closed.jaxpr), ()), list(closed.consts)


def lowered_by(traced: Any, rules: Mapping[Any, Callable[..., Any]]) -> jax.stages.Lowered:
    """Lower a traced function with other lowering rules for some primitives."""
    return traced.lower(_private_parameters=_LoweringParameters(override_lowering_rules=tuple(rules.items())))  # pyright: ignore[reportArgumentType]  (annotated as one pair, but accepts any number)


def exported_by(jitted: Any, args: Sequence[Any], platforms: Sequence[str], amend: Callable[[jax.stages.Lowered], object]) -> Any:
    """`jax.export.export(jitted, platforms=platforms)(*args)`, after `amend` has changed the lowered module in place."""
    traced = jitted.trace(*args)
    parameters = _LoweringParameters(for_export=True, hoist_constants_as_args=False)
    lowered = traced.lower(lowering_platforms=tuple(platforms), _private_parameters=parameters)
    amend(lowered)
    return _export_lowered(lowered, traced.jaxpr, traced.fun_name)


def symbols_in(arrays: Sequence[Any]) -> dict[str, Any]:
    """The symbols of `jax.export.symbolic_shape` in the shapes of arrays, by name, each as a symbolic dim."""
    kinds = [jax.core.ShapedArray(array.shape, array.dtype) for array in arrays]
    dims = [n for kind in kinds for n in kind.shape if not isinstance(n, int)]
    return {name: jax.export.symbolic_shape(name, scope=dims[0].scope)[0] for name in _all_dim_vars(kinds)}


def bounds_of(symbol: Any) -> tuple[float, float]:
    """The smallest and the largest value of a symbol."""
    return _bounds(symbol, _BoundsPrecision.BEST)


def size_at(size: Any, values: Mapping[str, int]) -> int:
    """Evaluate a symbolic size for these values of its symbols, by name."""
    return size if isinstance(size, int) else int(size._evaluate(dict(values)))


def call_of(exported: Any) -> dict[str, Any]:
    """The calling convention of an exported program (everything except its StableHLO), as a JSON value.

    `jax.export`'s own serialization needs a package that jax does not install.
    """

    def specs(shardings: Any) -> list[Any]:
        return [None if s is None else [list(entry) if isinstance(entry, tuple) else entry for entry in s.spec] for s in shardings]

    def kinds(avals: Any) -> list[Any]:
        return [[[n if isinstance(n, int) else str(n) for n in aval.shape], str(aval.dtype)] for aval in avals]

    return {
        "in": kinds(exported.in_avals),
        "out": kinds(exported.out_avals),
        "in_specs": specs(exported._in_named_shardings),
        "out_specs": specs(exported._out_named_shardings),
        "num_devices": exported.nr_devices,
        "version": exported.calling_convention_version,
        "kept": list(exported.module_kept_var_idx),
        "uses_global_constants": exported.uses_global_constants,
    }
