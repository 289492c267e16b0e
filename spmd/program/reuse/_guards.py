"""Guards on the state of modules, optimizers and tensors that a trace assumed. Each returns a reason to retrace, or None.

A program may be reused only while everything that its trace read, and that is not an input, is unchanged. Each function here adds one or
more guards to a program's, with the values that they depend on (see Note [Columns]).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
import torch

from spmd.base._settings import in_force
from spmd.base._torch import hooks_of_leaf, storage_id
from spmd.device._storage import Buffer, buffer_of
from spmd.program.optim._lifted_numbers import LiftedNumbers, static_settings
from spmd.program.reuse._columns import Guards, differ

_requires_grad, *_LEAF_HOOKS = map(attrgetter, ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_state, _param_groups, _value, _marks, _today = map(attrgetter, ("state", "param_groups", "value", "marks", "today"))
_params = itemgetter("params")
_restrided = attrgetter("restrided")
_check_indices = attrgetter("check_indices")


def guard_modules(guards: Guards, modules: list[tuple[str, torch.nn.Module]], tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Guard the hooks of modules, and `requires_grad` and the hooks of their own parameters and of the leaf tensors in `tensors`."""
    named = [(f"a parameter of {name}", p) for name, module in modules for p in module.__dict__["_parameters"].values() if p is not None]
    known = {id(p) for _, p in named}
    named.extend((name, t) for name, t in tensors if id(t) not in known and t.is_leaf)
    for has_some in (False, True):  # separate guards, since leaves with hooks must be checked before every call
        _guard_leaves(guards, [(name, p) for name, p in named if any(hooks_of_leaf(p)) is has_some], has_some)
    hooks = [(name, module.__dict__[kind]) for name, module in modules for kind in _HOOKS]
    for has_some in (False, True):
        _guard_registries(guards, [(name, registry) for name, registry in hooks if bool(registry) is has_some])


def _guard_leaves(guards: Guards, named: list[tuple[str, torch.Tensor]], have_hooks: bool) -> None:
    then, leaves = [(p.requires_grad, *hooks_of_leaf(p)) for _, p in named], [p for _, p in named]

    def check() -> str | None:
        for (name, p), (flag, before, after) in zip(named, then, strict=True):
            if p.requires_grad is not flag:
                return f"requires_grad of {name} changed from {flag} to {not flag}"
            if any(map(differ, hooks_of_leaf(p), (before, after))):
                return f"{name} got or lost a hook"
        return None

    if have_hooks and leaves:
        guards.add(check)
    elif leaves:
        guards.add(check, numbers=[(_requires_grad, leaves)], blank=[(read, leaves) for read in _LEAF_HOOKS])


def _guard_registries(guards: Guards, hooks: list[tuple[str, dict[Any, Any]]]) -> None:
    expected = [tuple(registry) for _, registry in hooks]

    def check() -> str | None:
        for (name, registry), keys in zip(hooks, expected, strict=True):
            if tuple(registry) != keys:
                return f"{name} got or lost a hook"
        return None

    if hooks:
        guards.add(check, dicts=[registry for _, registry in hooks])


def guard_storages(guards: Guards, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Guard that tensors have the same storage (`p.data = ...` replaces it), sizes, strides and offset (`t_()` changes them)."""
    buffers = [buffer_of(tensor) for _, tensor in tensors]
    storages = [tensor.untyped_storage() for _, tensor in tensors]  # kept alive, so that their addresses are not reused
    windows = [_window(tensor) for _, tensor in tensors]

    def check() -> str | None:
        for (name, tensor), buffer, window, _ in zip(tensors, buffers, windows, storages, strict=True):
            if buffer_of(tensor) is not buffer:
                return f"{name} was given another storage"
            if _window(tensor) != window:
                return f"{name} of shape {list(window[0])} was given other sizes or strides in place: now {list(tensor.shape)}"
        return None

    guards.add(check, numbers=[(storage_id, [tensor for _, tensor in tensors]), (_restrided, [Buffer])])


def _window(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], int]:
    return tensor.shape, tensor.stride(), int(tensor.storage_offset())


def guard_annotations(guards: Guards, buffers: list[Buffer]) -> None:
    """Guard that no state tensor was marked with another sharding, nor given another one for its gradient and optimizer state."""
    kept = [(b.annotation, b.state_annotation) for b in buffers]

    def check() -> str | None:
        for buffer, (annotation, of_state) in zip(buffers, kept, strict=True):
            if buffer.annotation is not annotation and buffer.annotation != annotation:
                return f"the sharding of a state tensor of shape {list(buffer.shape)} changed from {annotation} to {buffer.annotation}"
            if buffer.state_annotation is not of_state and buffer.state_annotation != of_state:
                then, now = (f"that of the parameter, {annotation}" if s is None else s for s in (of_state, buffer.state_annotation))
                return f"the sharding of the optimizer's state of a parameter of shape {list(buffer.shape)} changed from {then} to {now}"
        return None

    guards.add(check, numbers=[(_marks, [Buffer])])


def guard_configured_checks(guards: Guards) -> None:
    """Guard the setting of `spmd.configure(check_indices=...)`."""
    was = in_force.check_indices

    def check() -> str | None:
        return None if in_force.check_indices is was else f"spmd.configure(check_indices={not was}) was called"

    guards.add(check, values=[(_check_indices, [in_force])])


def guard_optimizer(guards: Guards, optimizer: torch.optim.Optimizer, numbers: LiftedNumbers) -> None:
    """Guard the groups, flags and state of an optimizer. Only numbers that are inputs of the program may differ."""
    state, groups, settings = optimizer.state, optimizer.param_groups, static_settings(optimizer)
    lifted = {(id(holder), key) for holder, key, _ in numbers.slots}
    owners = [(p, s) for p, s in state.items() if isinstance(s, dict)]
    held = [s for _, s in owners]
    names = list(chain.from_iterable(held))
    entries = [(s, k, v) for s in held for k, v in s.items() if (id(s), k) not in lifted]
    alone = [(k, v) for k, v in state.items() if not isinstance(v, dict) and (id(state), k) not in lifted]
    values = [v for s in held for v in s.values()]
    sizes = [len(s) for s in held]
    same_groups, lists = list(groups), [group["params"] for group in groups]
    parameters = list(map(list, lists))
    title, num_entries = type(optimizer).__name__, len(state)

    def check_state() -> str | None:
        if optimizer.state is not state:
            return f"{title}'s state was replaced (load_state_dict)"
        if len(state) != num_entries or list(map(len, held)) != sizes:
            return f"{title}'s state has other entries than when it was traced"
        if any(state.get(p) is not s for p, s in owners) or any(state.get(k) is not v for k, v in alone):
            return f"{title}'s state was replaced in part"
        is_same = list(chain.from_iterable(held)) == names and all(map(is_, chain.from_iterable(map(dict.values, held)), values))
        if not is_same and any(s.get(k) is not v for s, k, v in entries):
            return f"an entry of {title}'s state was replaced"
        return None

    def check_groups() -> str | None:
        is_same = (
            optimizer.param_groups is groups
            and len(groups) == len(same_groups)
            and all(map(is_, groups, same_groups))
            and all(map(is_, map(_params, groups), lists))
            and all(len(now) == len(old) and all(map(is_, now, old)) for now, old in zip(lists, parameters, strict=True))
            and static_settings(optimizer) == settings
        )
        return None if is_same else f"{title}'s param_groups changed: other parameters, flags or kinds of numbers"

    guards.add(check_state, dicts=[state, *held], values=[(_state, [optimizer])])
    guards.add(check_groups, dicts=same_groups, values=[(_param_groups, [optimizer])], parts=[(iter, groups), *((iter, p) for p in lists)])


def guard_numbers(guards: Guards, numbers: LiftedNumbers) -> None:
    """Guard that the numbers that are inputs still exist and have the same types."""

    def check() -> str | None:
        if numbers.today is None:
            return "a number that is an input of the program was removed from its dict, list or object"
        return None if numbers.have_same_types() else "a number that is an input of the program has another type now"

    guards.add(check, values=[(_today, [numbers])])


def guard_branch(guards: Guards, numbers: LiftedNumbers, evaluate: Callable[[], bool], outcome: bool) -> None:
    """Guard a value that Python computed from numbers that are inputs, and that the program depends on.

    Args:
        evaluate: computes the value from the current numbers.
        outcome: the value in the trace.
    """

    def check() -> str | None:
        now = evaluate()
        if now == outcome and type(now) is type(outcome):
            return None
        if type(outcome) is bool:
            return f"a branch on a number now goes the other way ({now})"
        return f"a number that the program depends on changed from {outcome!r} to {now!r}"

    guards.add(check, values=[(_today, [numbers])])


def guard_equal_counters(guards: Guards, leaders: dict[Buffer, Buffer]) -> None:
    """Guard that step counters that the trace read as one are still equal. See Note [Equal counters]."""
    if not leaders:
        return
    pairs = list(leaders.items())
    followers, their_leaders = list(leaders), list(leaders.values())

    def check() -> str | None:
        if all(map(is_, map(_value, followers), map(_value, their_leaders))):
            return None
        for follower, leader in pairs:
            if follower.value is not leader.value:
                its, other = np.asarray(follower.get()), np.asarray(leader.get())
                if its.tobytes() != other.tobytes():
                    return f"step counters of an optimizer that were equal are now {other} and {its}"
                follower.set(leader.value)  # so that the next call finds the same array
        return None

    guards.add(check)


def guard_host_tensor(guards: Guards, tensor: torch.Tensor) -> None:
    """Guard that a CPU tensor whose values are constants of the program is unchanged."""
    owner = tensor if tensor._base is None else tensor._base  # a view is often temporary; its base shares its version counter
    reference, version = weakref.ref(owner), None if owner.is_inference() else owner._version
    copy = owner.clone() if version is None else None  # an inference tensor has no version

    def check() -> str | None:
        alive = reference()
        if alive is None:
            return None
        if alive._version != version if copy is None else not torch.equal(alive, copy):
            return f"a CPU tensor of shape {tuple(alive.shape)} that is a constant of the program was changed in place"
        return None

    guards.add(check, owner=reference)
