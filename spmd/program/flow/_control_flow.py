"""PyTorch's control flow operators on device tensors: `torch.cond`, `while_loop`, `scan`, `associative_scan`.

In eager mode they run the equivalent Python code. In a trace they become lax's operators (`_cond`, `_loops`). `associative_scan` is
torch's recursion over halves in both cases, as in jax. torch calls these operators through Dynamo, which this device bypasses: a module's
parameter is a constant of the trace in Dynamo, but state of the program here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from spmd.base._errors import TraceError, called_at, message
from spmd.base._torch import (
    DispatchKey,
    FakeTensor,
    associative_scan,
    associative_scan_op,
    cond_op,
    generic_associative_scan,
    higher_order_utils,
    pytree,
    scan_op,
    while_loop_op,
)
from spmd.device._host_copies import is_host_copy
from spmd.device._numbers import NumberNode, carried
from spmd.device._storage import is_device_tensor, recording, wrap
from spmd.patches._table import current, replace, replace_everywhere
from spmd.program.flow._body import Fn
from spmd.program.flow._cond import conditional
from spmd.program.flow._loops import looped, scanned

_DEVICE_KEYS = (DispatchKey.PrivateUse1, DispatchKey.AutogradPrivateUse1)


def register() -> None:
    """Register kernels of the operators for this device, and let calls with its tensors bypass Dynamo."""
    kernels: dict[Any, Fn] = {cond_op: cond, while_loop_op: while_loop, scan_op: scan, associative_scan_op: combine}
    for op, kernel in kernels.items():
        for key in _DEVICE_KEYS:
            op.py_impl(key)(_on_values(op, kernel))
        op.fallthrough(DispatchKey.AutocastPrivateUse1)  # pyright: ignore[reportAttributeAccessIssue]
    entry_points = ["_hop_compile_and_call", "_maybe_compile_and_run_fn"]
    if not hasattr(higher_order_utils, entry_points[0]):  # torch 2.11
        _bypass_dynamo_in_torch_2_11(entry_points.pop(0))
    for name in entry_points:
        target = f"torch._higher_order_ops.utils.{name}"
        replace_everywhere(target, _bypassing_dynamo(current(target)), "torch._higher_order_ops")
    replace_everywhere("torch._higher_order_ops.associative_scan.associative_scan", _associative_scan, "torch._higher_order_ops")


def _on_values(op: Any, kernel: Fn) -> Fn:
    """A kernel that passes Dynamo's fake tensors to torch's own. Needed since the autograd key precedes the fake mode."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return op.py_kernels[DispatchKey.Autograd](*args, **kwargs)
        return kernel(*args, **kwargs)

    return call


def _bypassing_dynamo(original: Fn) -> Fn:
    """An entry point of torch through which these operators call Dynamo, bypassed for tensors on this device."""

    @functools.wraps(original)
    def call(fn: Fn, *args: Any, **kwargs: Any) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        ours = recording.get() is not None or any(is_device_tensor(leaf) or _is_lifted(leaf) for leaf in leaves)
        if not ours or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return original(fn, *args, **kwargs)
        if any(map(is_host_copy, leaves)):
            what = "an operand of torch.cond, scan or while_loop is a copy to the host of a traced tensor"
            raise TraceError(
                message(what, *called_at(), "branches and loops run on the device", fix="pass the tensor itself, without .cpu()")
            )
        if original.__name__ == "_hop_compile_and_call":  # its arguments come as one tuple
            args, kwargs = args[0], kwargs.get("kwargs") or (args[1] if len(args) > 1 else None) or {}
        args, kwargs = pytree.tree_map(lambda v: wrap(carried(v)) if _is_lifted(v) else v, (args, kwargs))
        return fn(*args, **kwargs)

    return call


def _bypass_dynamo_in_torch_2_11(name: str) -> None:
    """Route the `torch.compile` that torch 2.11's `cond` and `while_loop` call themselves through `_bypassing_dynamo`."""

    class Torch(ModuleType):
        def __getattr__(self, attribute: str) -> Any:
            return getattr(torch, attribute)

        @staticmethod
        def compile(fn: Fn, **options: Any) -> Fn:
            def compiled(fn: Fn, args: tuple[Any, ...]) -> Any:
                return torch.compile(fn, **options)(*args)

            compiled.__name__ = name
            entry_point = _bypassing_dynamo(compiled)
            return lambda *args: entry_point(fn, args)

    for op in ("cond", "while_loop"):
        replace(f"torch._higher_order_ops.{op}.torch", Torch("torch"))


def _is_lifted(value: Any) -> bool:
    return isinstance(value, torch.SymBool) and isinstance(value.node, NumberNode)


@functools.wraps(associative_scan)
def _associative_scan(combine_fn: Fn, xs: Any, dim: int, reverse: bool = False, combine_mode: str = "pointwise") -> Any:
    """`associative_scan` that runs mode "pointwise", which torch has for two device types only, as "generic" on this device.

    Code that imported the function before `spmd` has torch's own, which asks for `combine_mode="generic"`.
    """
    if all(map(is_device_tensor, pytree.tree_leaves(xs))) and combine_mode == "pointwise":
        combine_mode = "generic"
    return associative_scan(combine_fn, xs, dim, reverse, combine_mode)


def cond(pred: Any, true_fn: Fn, false_fn: Fn, operands: Sequence[Any]) -> Any:
    """Kernel of `cond`; `pred`: one element."""
    if recording.get() is not None and isinstance(pred, torch.Tensor):
        return conditional(pred if is_device_tensor(pred) else pred.to("jax"), true_fn, false_fn, operands)
    return true_fn(*operands) if pred else false_fn(*operands)


def while_loop(
    cond_fn: Fn, body_fn: Fn, carried_inputs: Sequence[Any], additional_inputs: Sequence[Any], mutated_arg_indices: str = ""
) -> Any:
    """Kernel of `while_loop`."""
    if recording.get() is not None:
        return looped(cond_fn, body_fn, carried_inputs, additional_inputs)
    values = tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in carried_inputs)
    while cond_fn(*values, *additional_inputs):
        values = body_fn(*values, *additional_inputs)
    return values


def scan(combine_fn: Fn, init: Sequence[torch.Tensor], xs: Sequence[torch.Tensor], additional_inputs: Sequence[Any]) -> Any:
    """Kernel of `scan`: returns the container of `combine_fn`, with the last carry and stacked results."""
    if recording.get() is not None:
        return scanned(combine_fn, init, xs, additional_inputs)
    carry, rounds, tree = list(init), [], None
    for i in range(xs[0].shape[0]):
        flat, tree = pytree.tree_flatten(combine_fn(*carry, *(x[i] for x in xs), *additional_inputs))
        carry = flat[: len(carry)]
        rounds.append(flat[len(carry) :])
    assert tree is not None, "torch refuses a scan over nothing"
    return pytree.tree_unflatten([*carry, *(torch.stack(parts) for parts in zip(*rounds, strict=True))], tree)


def combine(combine_fn: Fn, xs: Sequence[torch.Tensor], additional_inputs: Sequence[Any]) -> Any:
    """Kernel of an `associative_scan` that Dynamo traced."""
    return generic_associative_scan(combine_fn, xs, additional_inputs=additional_inputs)


__all__ = ["register"]
