"""Mixed precision: master weights in one dtype, computation in another. The policy, and modules that follow it.

    model = spmd.mixed_precision(GPT().to("jax"), spmd.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters())     # parameters and optimizer state stay float32

While the module runs, its parameters are replaced by casts of them, so gradients reach the parameters in the parameters' own
dtype. Gradients are summed over devices in the dtype of the operation whose result is summed. While a program is traced, the
lowerings that compute weight gradients are therefore told `reduce_dtype`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from spmd.base._convert import to_numpy_dtype
from spmd.base._errors import SpmdError, message
from spmd.base._torch import CheckpointFrame, pytree
from spmd.base._wrong_arguments import require_module
from spmd.device._storage import recording
from spmd.patches._table import replace
from spmd.sharding._swapped_parameters import SwappedParameters

M = TypeVar("M", bound=torch.nn.Module)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtype of each part of a computation. Fields and meaning are those of FSDP2's `MixedPrecisionPolicy`; None means unchanged.

    Attributes:
        param_dtype: dtype of the parameters while the module runs, and so of its matrix products.
        reduce_dtype: dtype in which gradients are summed over devices; None: `param_dtype`.
        output_dtype: dtype of the module's floating-point results.
        cast_forward_inputs: whether floating-point arguments are cast to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise SpmdError(
                    message(f"{name} of a MixedPrecisionPolicy is {dtype!r}", fix="pass a floating-point dtype: torch.bfloat16")
                )


def require_policy(policy: object) -> None:
    """Refuse an object without the fields of a policy. torch's own `MixedPrecisionPolicy` has them.

    Raises:
        SpmdError: a field is missing.
    """
    if not hasattr(policy, "param_dtype") or not hasattr(policy, "output_dtype"):
        fix = "spmd.MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        raise SpmdError(message(f"{policy!r} is not a mixed-precision policy", fix=fix))


def mixed_precision(module: M, policy: MixedPrecisionPolicy) -> M:
    """Make a module compute under `policy`, whatever the dtype of its parameters. A submodule may have its own policy.

    Args:
        module: changed in place; parameters, `state_dict` and optimizer state keep their dtype.
        policy: the dtypes to use.

    Returns:
        The same module.

    Raises:
        SpmdError: `module` is not a module, or `policy` is not a mixed-precision policy.
    """
    require_module(module, "mixed_precision", "spmd.mixed_precision(model, spmd.MixedPrecisionPolicy(torch.bfloat16))")
    require_policy(policy)
    inner = getattr(module.forward, "__func__", None) or _without_self(module.forward)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        with _computing(self, policy):
            out = inner(self, *args, **kwargs)
        return out if policy.output_dtype is None else cast_floating(out, policy.output_dtype)

    module.forward = types.MethodType(forward, module)
    module._spmd_precision = repr(policy)  # pyright: ignore[reportArgumentType]  (plain text, so a change of policy invalidates programs)
    return module


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """A pytree with its floating-point tensors cast to `dtype`."""
    return pytree.tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree)


def sum_gradients_wide(param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
    """Make the program being traced, if any, sum gradients in `reduce_dtype` if that is wider than `param_dtype`."""
    recorder = recording.get()
    if recorder is None or param_dtype is None or reduce_dtype is None or reduce_dtype.itemsize <= param_dtype.itemsize:
        return
    recorder.reduce_in(to_numpy_dtype(reduce_dtype))


_active: ContextVar[tuple[tuple[torch.nn.Module, MixedPrecisionPolicy], ...]] = ContextVar("modules that compute by a policy", default=())


@contextmanager
def _computing(module: torch.nn.Module, policy: MixedPrecisionPolicy) -> Generator[None]:
    """While active, casts replace the parameters of `module` and of its submodules that have no policy of their own."""
    casts: dict[int, torch.Tensor] = {}  # a tied weight is cast once
    swapped = SwappedParameters()
    if policy.param_dtype is not None:
        for holder in _governed(module):
            for name, p in list(holder._parameters.items()):
                if p is not None and p.is_floating_point() and p.dtype != policy.param_dtype:
                    if id(p) not in casts:
                        casts[id(p)] = p.to(policy.param_dtype)
                    swapped.put(holder._parameters, name, casts[id(p)])
    sum_gradients_wide(policy.param_dtype, policy.reduce_dtype)
    token = _active.set((*_active.get(), (module, policy)))
    try:
        yield
    finally:
        _active.reset(token)
        swapped.restore()


def _governed(module: torch.nn.Module) -> Sequence[torch.nn.Module]:
    found = [module]
    for child in module.children():
        if "_spmd_precision" not in child.__dict__:
            found.extend(_governed(child))
    return list({id(m): m for m in found}.values())


def _without_self(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: fn(*args, **kwargs)


def _under_active_policies(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, run again later by a backward pass, under the policies that are active now."""
    frames = _active.get()
    if not frames:
        return fn

    def again(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for module, policy in frames if not _active.get() else ():
                stack.enter_context(_computing(module, policy))
            return fn(*args, **kwargs)

    return again


def register() -> None:
    """Make `torch.utils.checkpoint` recompute under the policies that were active in the forward pass."""
    torchs = CheckpointFrame.__init__

    def init(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        torchs(self, _under_active_policies(recompute_fn), *args, **kwargs)

    replace("torch.utils.checkpoint._CheckpointFrame.__init__", init)


__all__ = ["MixedPrecisionPolicy", "cast_floating", "mixed_precision", "register", "sum_gradients_wide"]
