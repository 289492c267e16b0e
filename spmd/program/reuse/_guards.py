"""What Python state a trace baked in, and whether it still holds: each guard gives a reason to retrace, or None.

A program may be reused only while everything the trace read that is not an input of it is unchanged. Guards are cheap:
a call of a step with a hundred modules checks them in some tens of microseconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import numpy as np
import torch

from spmd.base._torch import storage_id
from spmd.device._storage import Buffer, buffer_of
from spmd.program.optim._preparation import LiftedNumbers, static_settings
from spmd.program.reuse._versions import DictVersions

Guard = Callable[[], str | None]


class LeafState:
    """Of leaf tensors, what a step may not rely on without looking: whether they require gradients, their hooks, their `.grad`.

    While all is well it reads one attribute of all tensors after the other, in C and without a tuple for each tensor.

    Attributes:
        has_left_gradients: at the last look each had the gradient that the program leaves there: none has to be put.
    """

    def __init__(self, named: list[tuple[str, torch.Tensor]], left: dict[int, Any]) -> None:
        """`left`: by id of a tensor, the gradient that a call leaves."""
        self._named = named
        self._tensors = [p for _, p in named]
        self._then = [(p.requires_grad, *map(_hook_keys, _hooks_of(p))) for p in self._tensors]
        self._left = left
        self._is_all = left.keys() <= {id(p) for p in self._tensors}
        self._usual: list[list[Any]] = []  # per attribute what was read when all was well, with the gradients that a call leaves
        self.has_left_gradients = False

    def reason(self) -> str | None:
        """What changed, or None."""
        tensors = self._tensors
        self.has_left_gradients = (
            self._is_all
            and bool(self._usual)
            and all(all(map(is_, map(read, tensors), usual)) for read, usual in zip(_COLUMNS, self._usual, strict=True))
        )
        if self.has_left_gradients:
            return None
        now = list(map(_of_leaf, tensors))
        for (name, _), (flag, before, after), (requires_grad, *hooks, _) in zip(self._named, self._then, now, strict=True):
            if requires_grad is not flag:
                return f"requires_grad of a parameter of {name} changed from {flag} to {not flag}"
            if tuple(map(_hook_keys, hooks)) != (before, after):
                return f"a parameter of {name} got or lost a hook"
        if not any(keys for _, *both in self._then for keys in both):  # hooks in a dict may change without it
            grads = (self._left.get(id(p), grad) for p, (*_, grad) in zip(self._tensors, now, strict=True))
            *columns, _ = map(list, zip(*now, strict=True)) if now else [[]] * len(_COLUMNS)
            self._usual = [*columns, list(grads)]
        return None


def modules_guard(modules: list[tuple[str, torch.nn.Module]], leaves: LeafState) -> Guard:
    """Which parameters of the modules require gradients, and the hooks of the modules and their parameters (`leaves`)."""
    hooks = [(name, module.__dict__[kind], tuple(module.__dict__[kind])) for name, module in modules for kind in _HOOKS]
    registries = [registry for _, registry, _ in hooks]
    has_hooks = any(keys for _, _, keys in hooks)

    def check() -> str | None:
        reason = leaves.reason()
        if reason is not None or not (has_hooks or any(registries)):
            return reason
        for name, registry, keys in hooks:
            if (registry or keys) and tuple(registry) != keys:
                return f"{name} got or lost a hook"
        return None

    return check


def parameters_of(modules: list[tuple[str, torch.nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    """The modules' own parameters, each with its module's name."""
    return [(name, p) for name, module in modules for p in module.__dict__["_parameters"].values() if p is not None]


_LEAF = ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks", "grad")
_of_leaf, _COLUMNS = attrgetter(*_LEAF), tuple(map(attrgetter, _LEAF))
_hooks_of = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
_params = itemgetter("params")
_value = attrgetter("value")


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _hook_keys(hooks: Any) -> tuple[Any, ...]:
    return tuple(hooks or ())


def storages_guard(tensors: list[tuple[str, torch.Tensor]]) -> Guard:
    """The tensors still show the storages that the program updates (`p.data = ...` gives one another)."""
    shown, buffers = [tensor for _, tensor in tensors], [buffer_of(tensor) for _, tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in shown]  # held, so that no other storage gets the address of one
    addresses = [storage._cdata for storage in storages]

    def check() -> str | None:
        ids = map(storage_id, shown)  # pyright: ignore[reportAttributeAccessIssue]
        if list(ids) == addresses and len(storages) == len(shown):
            return None
        for (name, tensor), buffer in zip(tensors, buffers, strict=True):
            if buffer_of(tensor) is not buffer:
                return f"{name} was given another storage"
        return None

    return check


def annotation_guard(buffers: list[Buffer]) -> Guard:
    """No state tensor was marked anew."""
    kept, marks = [b.annotation for b in buffers], Buffer.marks

    def check() -> str | None:
        nonlocal marks
        if marks == Buffer.marks:
            return None
        for buffer, annotation in zip(buffers, kept, strict=True):
            if buffer.annotation is not annotation and buffer.annotation != annotation:
                return f"a state tensor of shape {list(buffer.shape)} was marked {buffer.annotation}, it was {annotation}"
        marks = Buffer.marks
        return None

    return check


def optimizer_guard(optimizer: torch.optim.Optimizer, numbers: LiftedNumbers) -> Guard:
    """Same groups, flags and state as traced; only the lifted numbers may differ."""
    state, groups, settings = optimizer.state, optimizer.param_groups, static_settings(optimizer)
    lifted = {(id(holder), key) for holder, key, _ in numbers.slots}
    held = [s for s in state.values() if isinstance(s, dict)]
    sizes = [len(s) for s in held]
    entries = [(s, k, v) for s in held for k, v in s.items() if (id(s), k) not in lifted]
    values = [v for s in held for v in s.values()]
    versions, same_groups = DictVersions([state, *held]), list(groups)
    group_versions = DictVersions(same_groups)
    title = type(optimizer).__name__
    lists = [group["params"] for group in groups]
    parameters = list(chain.from_iterable(lists))
    lengths = list(map(len, lists))

    def has_same_parameters() -> bool:
        now = list(map(_params, groups))
        return list(map(len, now)) == lengths and all(map(is_, chain.from_iterable(now), parameters))

    def check() -> str | None:
        if optimizer.state is not state:
            return f"{title}'s state was replaced (load_state_dict)"
        if not versions.unchanged():
            if len(state) != len(sizes) or list(map(len, held)) != sizes:
                return f"{title}'s state has other entries than when it was traced"
            is_same = all(map(is_, chain.from_iterable(map(dict.values, held)), values))
            if not is_same and any(s.get(k) is not v for s, k, v in entries):
                return f"an entry of {title}'s state was replaced"
            versions.know()
        changed = f"{title}'s param_groups changed: other parameters, flags or kinds of numbers"
        if optimizer.param_groups is not groups or not has_same_parameters():
            return changed
        if not (all(map(is_, groups, same_groups)) and group_versions.unchanged()):
            if static_settings(optimizer) != settings:
                return changed
            group_versions.know()
        return None

    return check


def numbers_guard(numbers: LiftedNumbers) -> Guard:
    """The lifted numbers are still there; takes their values of today, on which the branch guards decide."""

    def check() -> str | None:
        try:
            numbers.today = numbers.values()
        except (KeyError, IndexError, TypeError, ValueError):
            return "an optimizer's param_groups or state lost a number"
        return None if numbers.have_same_types() else "a number that is an input of the program is of another type now"

    return check


def branch_guard(evaluate: Callable[[], bool], outcome: bool) -> Guard:
    """What Python computed from numbers that are inputs of the program, and depended on, is the same."""

    def check() -> str | None:
        now = evaluate()
        if now == outcome and type(now) is type(outcome):
            return None
        if type(outcome) is bool:
            return f"a branch on a number now goes the other way ({now})"
        return f"a number that the program was made for changed from {outcome!r} to {now!r}"

    return check


def equal_counters_guard(leaders: dict[Buffer, Buffer]) -> Guard:
    """State that the trace read as one value still is. See Note [Equal counters]."""
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
                follower.set(leader.value)  # so that the next call need not look
        return None

    return check


def host_tensor_guard(tensor: torch.Tensor) -> Guard:
    """A CPU tensor whose values became constants of the program is unchanged."""
    owner = tensor if tensor._base is None else tensor._base  # a view dies soon, its base has the same version counter
    reference, version = weakref.ref(owner), None if owner.is_inference() else owner._version
    copy = owner.clone() if version is None else None  # a tensor of inference mode has no version

    def check() -> str | None:
        alive = reference()
        if alive is None:
            return None
        if alive._version != version if copy is None else not torch.equal(alive, copy):
            return f"a CPU tensor of shape {tuple(alive.shape)} that the program holds as a constant was changed in place"
        return None

    return check


def first_reason(guards: list[Guard]) -> str | None:
    """The first guard's reason that no longer holds."""
    for guard in guards:
        reason = guard()
        if reason is not None:
            return reason
    return None
