"""Prepares optimizers for a trace: creates their state before the first step, and makes their steps traceable.

State that the first step would create (Adam's moments) is created before the trace, with its parameter's sharding, from a separate trace of
that step. So a training loop has one executable, not two. Numbers in `param_groups` and in the state are inputs of the program
(`_lifted_numbers`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.optim.radam import radam
from torch.optim.rprop import rprop

from spmd.base._convert import exact_dtypes, to_numpy_dtype
from spmd.base._errors import TraceAgain, TraceError, message
from spmd.base._jax import eval_jaxpr, is_same_value
from spmd.base._jax_notes import without_jax_note
from spmd.base._torch import device_dtype_check_for_fused
from spmd.device._arrays import padded, stored_shape
from spmd.device._copy import from_host
from spmd.device._storage import Buffer, buffer_of, is_device_tensor, is_whole, recording, wrap, wrap_stored, wrap_unset
from spmd.patches._table import replaced
from spmd.program.optim._initial_state_recorder import InitialStateRecorder, StateComplete
from spmd.program.optim._state_rules import sharding_of_state
from spmd.program.optim._traced_state import is_of_torch
from spmd.program.reads import LateWritesNeeded, recorded
from spmd.program.xla._jaxpr import constant_outputs, pruned
from spmd.sharding._annotate import clear_sharding
from spmd.sharding._tensor import XLAShardedTensor

Groups = list[dict[str, Any]]


@contextmanager
def traceable(optimizers: list[torch.optim.Optimizer]) -> Generator[None]:
    """Context in which these optimizers do not branch on the value of the step counter, or of a 0-dim mask.

    RAdam and ASGD have a path for graph capture (`capturable`). Adafactor only takes `min` and `max` of numbers. RAdam's path computes
    with the counter as a float32, and its length of the average (1999 - 1994) then loses most of its digits. So RAdam gets its counters as
    float64, which has the precision of Python's floats. Rprop gets 0-dim parameters with one dim, for which its masks have one, too.
    """
    groups = [g for o in optimizers if isinstance(o, (torch.optim.RAdam, torch.optim.ASGD)) for g in o.param_groups]
    kept = [group["capturable"] for group in groups]
    try:
        for group in groups:
            group["capturable"] = True
        with (
            replaced("torch.optim._adafactor.min", torch.sym_min),
            replaced("torch.optim._adafactor.max", torch.sym_max),
            replaced("torch.optim.radam.radam", partial(_with_exact_counts, radam)),
            replaced("torch.optim.rprop.rprop", _with_dims),
        ):
            yield
    finally:
        for group, flag in zip(groups, kept, strict=True):
            group["capturable"] = flag


def _with_exact_counts(
    update: Callable[..., None], params: Any, grads: Any, averages: Any, squares: Any, steps: list[torch.Tensor], **options: Any
) -> None:
    """RAdam's `update` with float64 copies of the counters, parameter by parameter (`foreach` computes in float32).

    The counters of the state are incremented separately.
    """
    counts = [step.to(torch.float64, copy=True) for step in steps]  # a copy also if float64 is the default dtype
    update(params, grads, averages, squares, counts, **{**options, "foreach": False})
    for step in steps:
        step += 1


def _with_dims(params: Any, grads: Any, prevs: Any, sizes: Any, *rest: Any, **options: Any) -> None:
    """`rprop`, with views of one dim in the place of 0-dim tensors."""
    given = [[t if t.dim() else t.view(1) for t in tensors] for tensors in (params, grads, prevs, sizes)]
    rprop(*given, *rest, **options)  # pyright: ignore[reportArgumentType]


def prepare_state(optimizer: torch.optim.Optimizer, *, creates: bool = True) -> list[torch.Tensor]:
    """Create the state that the first step would create, and move counters from the host to the device.

    State is created for optimizers whose new state tensors do not depend on gradients (zeros, ones, constants), and for SGD's momentum
    without dampening, where a zero buffer gives the same first step. Other optimizers create their state in the first traced step.

    Args:
        optimizer: the optimizer.
        creates: whether to create state; otherwise existing state is moved and laid out only.

    Returns:
        The parameters for which state was created.
    """
    if isinstance(optimizer, torch.optim.LBFGS):  # it cannot step inside a compiled function
        return []
    if getattr(optimizer, "_need_device_dtype_check_for_fused", False):  # done here, since a change of the flag would cause a retrace
        for parameter in (p for group in optimizer.param_groups if group.get("fused") for p in group["params"]):
            device_dtype_check_for_fused(parameter)
            vars(optimizer)["_need_device_dtype_check_for_fused"] = False
    missing = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and not optimizer.state.get(p)]
    missing = [p for p in missing if p.device.type == "jax"]
    missing = missing if creates else []
    if missing and type(optimizer) is torch.optim.SGD:
        _prepare_sgd(optimizer)
    elif missing and all(p.device.type == "jax" for group in optimizer.param_groups for p in group["params"]):
        _trace_initial_state(optimizer, missing)
    for parameter, state in optimizer.state.items():
        if is_device_tensor(parameter) and isinstance(state, dict):
            _lay_out(optimizer, parameter, state)
    return [p for p in missing if optimizer.state.get(p)]


def drop_unused_state(optimizer: torch.optim.Optimizer, created: Sequence[torch.Tensor], is_used: Callable[[Buffer], bool]) -> None:
    """Remove the state that was created for parameters that the traced step did not update, because they have no gradient.

    Args:
        optimizer: the optimizer.
        created: the parameters for which `prepare_state` created state.
        is_used: whether the trace read or wrote a buffer.
    """
    for parameter in created:
        state = optimizer.state.get(parameter)
        if isinstance(state, dict) and not any(is_used(buffer_of(v)) for v in state.values() if is_device_tensor(v)):
            del optimizer.state[parameter]


def made_inside(optimizer: torch.optim.Optimizer) -> TraceError:
    """The error for an optimizer that the function creates for parameters from before the call."""
    what = f"the compiled function creates its own {type(optimizer).__name__}"
    why = "each call would start with an optimizer without state"
    return TraceError(message(what, why, fix="create the optimizer once, outside of the function"))


class OptimizerStates:
    """Context that restores the state of optimizers if tracing or compiling fails."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[torch.optim.Optimizer, dict[Any, tuple[Any, Any]]]] = {}

    def keep(self, optimizer: torch.optim.Optimizer) -> None:
        """Save the state of `optimizer`, unless it was saved before.

        Raises:
            TraceError: another optimizer of the same class has the same parameters, so the function creates one in every trace.
        """
        if id(optimizer) in self._kept:
            return
        for other, _ in self._kept.values():
            if type(other) is type(optimizer) and other.param_groups[0]["params"][0] is optimizer.param_groups[0]["params"][0]:
                raise made_inside(optimizer)
        self._kept[id(optimizer)] = optimizer, {p: (s, dict(s) if isinstance(s, dict) else None) for p, s in optimizer.state.items()}

    def __enter__(self) -> OptimizerStates:
        return self

    def forget_all_but(self, stepped: Sequence[torch.optim.Optimizer]) -> None:
        """Remove the state that was created for optimizers that then did not step. `stepped`: those that did."""
        for optimizer, state in self._kept.values():
            for parameter in [] if any(optimizer is o for o in stepped) else list(optimizer.state):
                if parameter not in state:
                    del optimizer.state[parameter]

    def put_back(self) -> None:
        """Restore the saved state of the optimizers."""
        for optimizer, kept in self._kept.values():
            optimizer.state.clear()
            optimizer.state.update({owner: state for owner, (state, _) in kept.items()})
            for state, content in kept.values():
                if content is not None:  # the same dict is refilled, since guards compare it by identity
                    state.clear()
                    state.update(content)

    def __exit__(self, kind: Any, *error: object) -> None:
        if kind is not None:
            self.put_back()


def _prepare_sgd(optimizer: torch.optim.SGD) -> None:
    for group in optimizer.param_groups:
        if group["momentum"] != 0 and group["dampening"] == 0:
            for p in group["params"]:
                if p.requires_grad and not optimizer.state.get(p):
                    optimizer.state[p]["momentum_buffer"] = wrap_unset(tuple(p.shape), to_numpy_dtype(p.dtype))


def _lay_out(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, state: dict[str, Any]) -> None:
    """Move the counters of one parameter's state to the device, and lay out its tensors by `_state_rules`."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            value = state[key] = from_host(value)
        if not is_device_tensor(value):
            continue
        annotation = sharding_of_state(optimizer, parameter, key, value)
        buffer = buffer_of(value)
        if annotation == buffer.annotation or buffer.shape != tuple(value.shape):
            continue
        is_marked = isinstance(value, XLAShardedTensor)  # by the user: state that is laid out here stays a plain tensor
        if annotation is None:
            if not is_marked and value.shape == parameter.shape:  # the sharding of the parameter was cleared
                clear_sharding(value)
        elif not is_marked or buffer.annotation is None or buffer_of(parameter).state_annotation is not None:
            buffer.annotate(annotation)


def equal_counters(optimizers: list[torch.optim.Optimizer], *, are_shared: bool) -> dict[Buffer, Any]:
    """The buffers of the 0-dim state of the optimizers, each with a key that is equal for state of the same name, group and value.

    Counters that are not read as one have arrays of their own afterwards. Without `are_shared` that is all, and the result is empty.

    Note [Equal counters]. torch's Adam keeps one step counter per parameter, where a JAX optimizer keeps one for all. Counters that are
    equal at the start of a trace are read as one. So bias corrections are computed once, and the program has one counter as input and
    output. All counters share its new array afterwards, so 0-dim state is never donated. A guard checks that they are still equal. If a
    trace gives two of them different new values, the function is traced again without sharing.
    """
    found: dict[Buffer, tuple[Any, ...]] = {}
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if is_device_tensor(value) and value.dim() == 0:
                        found[buffer_of(value)] = (id(optimizer), number, key, value.dtype)
    values = jax.device_get([buffer.get() for buffer in found]) if are_shared else [None] * len(found)
    keys: dict[Buffer, Any] = {}
    arrays: dict[int, Any] = {}
    for (buffer, key), value in zip(found.items(), values, strict=True):
        keys[buffer] = id(buffer) if value is None else (*key, value.tobytes())
        if buffer.value is not None and arrays.setdefault(id(buffer.value), keys[buffer]) != keys[buffer]:
            buffer.set(jnp.copy(buffer.value))  # a program tells its inputs apart by their arrays
    return keys if are_shared else {}


def _trace_initial_state(optimizer: torch.optim.Optimizer, missing: list[torch.Tensor]) -> None:
    """Trace one `optimizer.step()` separately, and store the first value of each state tensor that it creates.

    Note [First values]. The first value of a state tensor need not be the value that the first update reads:
    `torch.empty_like(p).fill_(0.1)` writes to it in between. So the step of a user's optimizer is traced a second time, with the same
    gradients and with the first values as its state. If the second trace differs from the first one in any operation, no state is
    created, and the first traced step of the function creates it.
    """
    births = InitialStateRecorder(optimizer, missing if is_of_torch(optimizer) else [])
    made: list[tuple[torch.Tensor, str, torch.Tensor]] = []
    others = [p for group in optimizer.param_groups for p in group["params"] if all(p is not m for m in missing)]
    waiting = [b for b in dict.fromkeys(map(buffer_of, (*missing, *others))) if b.value is None and b.host is not None]

    def step_from(values: list[Any], grads: list[Any]) -> None:
        for buffer, value in zip(waiting, values, strict=True):
            births.before[buffer] = None, buffer.host
            buffer.value = value
        for p in others:
            p.grad = None
        for p, grad in zip(missing, grads, strict=True):
            p.grad = wrap(grad)
        with torch.no_grad(), torch.autograd.set_multithreading_enabled(False), traceable([optimizer]), suppress(StateComplete):
            _separate_step(optimizer)

    def first_step(values: list[Any], grads: list[Any]) -> list[Any]:
        step_from(values, grads)
        for p in missing:
            made.extend((p, k, v) for k, v in optimizer.state.get(p, {}).items() if is_device_tensor(v))
        first = [births.first[buffer_of(v)] for _, _, v in made]
        if made and not is_of_torch(optimizer):
            if not all(is_whole(state, buffer_of(state)) for _, _, state in made):
                raise TraceError("a state tensor is a view of another tensor, or is not contiguous")
            left = _values_after_step(optimizer, missing)
            births.put_back()
            for (_, _, state), value in zip(made, first, strict=True):
                buffer_of(state).value = value
            step_from(values, grads)
            if not _are_equal(left, _values_after_step(optimizer, missing)):
                raise TraceError("the first step writes to its state before it updates it")
        return first

    with _restored(optimizer, [*missing, *others], births, made):
        try:
            with without_jax_note(), exact_dtypes():
                given = [jax.ShapeDtypeStruct(b.stored, b.dtype) for b in waiting]
                grads = [jax.ShapeDtypeStruct(tuple(p.shape), to_numpy_dtype(p.dtype)) for p in missing]
                jaxpr = jax.make_jaxpr(first_step)(given, grads)
        except Exception as error:
            is_left = isinstance(error, (TraceError, LateWritesNeeded)) or not (isinstance(error, TraceAgain) or is_of_torch(optimizer))
            if not is_left:
                raise
            made.clear()  # the state depends on values, or the step needs a closure: the function's first traced step creates it
            return
    _store_first_values(optimizer, made, jaxpr, births.existing)


def _values_after_step(optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> list[tuple[Any, Any]]:
    """The traced values of the parameters and their state after a step, each with its key; None for a parameter."""
    found: list[tuple[Any, Any]] = [(None, buffer_of(p).value) for p in params]
    for p in params:
        found.extend((key, buffer_of(v).value) for key, v in optimizer.state.get(p, {}).items() if is_device_tensor(v))
    return found


def _are_equal(left: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    return [key for key, _ in left] == [key for key, _ in other] and all(
        is_same_value(one, two) for (_, one), (_, two) in zip(left, other, strict=True)
    )


def _separate_step(optimizer: torch.optim.Optimizer) -> None:
    """Run one step, and undo all writes to Python objects by a user's optimizer or a hook except those to the optimizer's state."""
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    if is_of_torch(optimizer) and not any(hooks):
        optimizer.step()
        return
    with recorded(ignored={id(d) for d in (optimizer.state, *optimizer.state.values()) if isinstance(d, dict)}) as reads:
        reads.run(optimizer.step)


@contextmanager
def _restored(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], births: InitialStateRecorder, made: list[Any]
) -> Generator[None]:
    """Context for the trace of a first step. It restores flags, gradients, memory and values, and all state except that in `made`."""
    groups = optimizer.param_groups
    kept_grads, kept_memory = [p.grad for p in params], [p.data for p in params]
    kept_flags = [group.get("capturable") for group in groups]
    kept_state = {p: (s, dict(s) if isinstance(s, dict) else None) for p, s in optimizer.state.items()}
    for group in groups:
        if "capturable" in group:
            group["capturable"] = True
    token = recording.set(births)
    try:
        yield
    finally:
        recording.reset(token)
        for group, flag in zip(groups, kept_flags, strict=True):
            if flag is not None:
                group["capturable"] = flag
        for p, grad, memory in zip(params, kept_grads, kept_memory, strict=True):
            p.grad = grad
            if buffer_of(p) is not buffer_of(memory):  # `p.data = new`
                p.data = memory
        births.put_back()
        with_new_state = {id(p) for p, *_ in made}
        for p in list(optimizer.state):
            if p in kept_state:
                state, content = kept_state[p]
                optimizer.state[p] = state
                if content is not None:
                    state.clear()
                    state.update(content)
            elif id(p) not in with_new_state:
                del optimizer.state[p]


def _store_first_values(
    optimizer: torch.optim.Optimizer, made: list[tuple[torch.Tensor, str, torch.Tensor]], closed: Any, existing: set[int]
) -> None:
    """Give the new state tensors their first values and their sharding, and remove state whose first values depend on other values.

    Args:
        made: (parameter, key, state tensor) of the new state.
        closed: the trace, whose outputs are the first values.
        existing: ids of the arrays that the trace read from older buffers.
    """
    constant = constant_outputs(closed.jaxpr, [id(c) not in existing for c in closed.consts])
    by_parameter: dict[int, list[int]] = {}
    for i, (p, _, _) in enumerate(made):
        by_parameter.setdefault(id(p), []).append(i)
    ready: list[int] = []
    for entries in by_parameter.values():
        state = optimizer.state[made[entries[0]][0]]
        has_stepped = not all(v is None or is_device_tensor(v) for v in state.values())  # Python values are those after the step
        if has_stepped or not all(constant[i] for i in entries):
            del optimizer.state[made[entries[0]][0]]
        else:
            ready.extend(entries)
    if not ready:
        return
    if any(a is not None and a.mesh.topology is not None for a in (buffer_of(p).annotation for p, _, _ in made)):
        for p, key, state in (made[i] for i in ready if made[i][2].dim()):  # for a program that is compiled and not run: shapes only
            optimizer.state[p][key] = wrap_unset(tuple(state.shape), to_numpy_dtype(state.dtype))
        ready = [i for i in ready if not made[i][2].dim()]
    # Two programs, since the trace reads the values of the counters and must not wait for the moments. See Note [Equal counters].
    for chosen in filter(None, ([i for i in ready if not made[i][2].dim()], [i for i in ready if made[i][2].dim()])):
        annotations = [sharding_of_state(optimizer, *made[i]) for i in chosen]
        jaxpr = pruned(closed.jaxpr, chosen)
        placed = [None if a is None else a.to_jax() for a in annotations]
        with exact_dtypes():
            values = jax.jit(lambda jaxpr=jaxpr, placed=placed: _evaluated(jaxpr, closed.consts, placed), out_shardings=placed)()
        for i, value, annotation in zip(chosen, values, annotations, strict=True):
            parameter, key, state = made[i]
            made_now = wrap(value) if annotation is None else wrap_stored(value, tuple(state.shape), annotation)
            optimizer.state[parameter][key] = made_now


def _evaluated(jaxpr: Any, consts: Any, shardings: list[Any]) -> list[Any]:
    """The outputs of a jaxpr, padded where their sharding is uneven."""
    values = eval_jaxpr(jaxpr, consts)
    return [v if stored_shape(v.shape, s) == v.shape else padded(v, s) for v, s in zip(values, shardings, strict=True)]


__all__ = ["OptimizerStates", "drop_unused_state", "equal_counters", "made_inside", "prepare_state", "traceable"]
