"""Master weights in one dtype, computation in another: the policy, and a module that follows it.

    model = spmd.mixed_precision(GPT().to("jax"), spmd.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters())     # the parameters stay float32, so does its state

While the module runs, its parameters are their casts, so gradients arrive at the parameters in the parameters' own dtype. The
dtype in which gradients are summed over devices is that of the operation whose result is summed: the lowerings that make
weight gradients are told it while a program is traced.
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
from spmd.device._storage import recording
from spmd.patches._table import replace

M = TypeVar("M", bound=torch.nn.Module)


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Which dtype does what; fields and meaning are those of FSDP2's policy of the same name. None: leave it as it is.

    Attributes:
        param_dtype: of the parameters while the module runs, so of its matrix products.
        reduce_dtype: in which gradients are summed over devices; None: in `param_dtype`.
        output_dtype: of the module's floating results.
        cast_forward_inputs: cast floating arguments to `param_dtype`.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise SpmdError(message(f"{name} of a MixedPrecisionPolicy is {dtype!r}", fix="give a floating dtype, e.g. torch.bfloat16"))


def require_policy(policy: object) -> None:
    """Refuse what has not the fields of a policy; torch's own `MixedPrecisionPolicy` has them.

    Raises:
        SpmdError: it has not.
    """
    if not hasattr(policy, "param_dtype") or not hasattr(policy, "output_dtype"):
        fix = "spmd.MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        raise SpmdError(message(f"{policy!r} is no policy of mixed precision", fix=fix))


def mixed_precision(module: M, policy: MixedPrecisionPolicy) -> M:
    """Let a module compute by `policy`, whatever the dtype of its parameters; a module inside it may have a policy of its own.

    Args:
        module: changed in place: parameters, `state_dict` and optimizer keep their dtype.
        policy: which dtype does what.

    Returns:
        The module.

    Raises:
        SpmdError: it is no policy.
    """
    require_policy(policy)
    inner = getattr(module.forward, "__func__", None) or _without_self(module.forward)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        with _computing(self, policy):
            out = inner(self, *args, **kwargs)
        return out if policy.output_dtype is None else cast_floating(out, policy.output_dtype)

    module.forward = types.MethodType(forward, module)
    module._spmd_precision = repr(policy)  # pyright: ignore[reportArgumentType]  (a plain value: another policy is seen as a change)
    return module


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """A container with its floating tensors in `dtype`."""
    return pytree.tree_map(lambda t: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree)


def sum_gradients_wide(param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> None:
    """Tell the program being traced, if there is one, to sum gradients in `reduce_dtype` where that is wider than `param_dtype`."""
    recorder = recording.get()
    if recorder is None or param_dtype is None or reduce_dtype is None or reduce_dtype.itemsize <= param_dtype.itemsize:
        return
    recorder.reduce_in(to_numpy_dtype(reduce_dtype))


_active: ContextVar[tuple[tuple[torch.nn.Module, MixedPrecisionPolicy], ...]] = ContextVar("modules that compute by a policy", default=())


@contextmanager
def _computing(module: torch.nn.Module, policy: MixedPrecisionPolicy) -> Generator[None]:
    """While active, the parameters of `module` and of the modules in it without a policy of their own are their casts."""
    casts: dict[int, torch.Tensor] = {}  # a tied weight is cast once
    swapped: list[tuple[dict[str, Any], str, Any]] = []
    if policy.param_dtype is not None:
        for holder in _governed(module):
            for name, p in list(holder._parameters.items()):
                if p is not None and p.is_floating_point() and p.dtype != policy.param_dtype:
                    if id(p) not in casts:
                        casts[id(p)] = p.to(policy.param_dtype)
                    swapped.append((holder._parameters, name, p))
                    holder._parameters[name] = casts[id(p)]  # pyright: ignore[reportArgumentType]
    sum_gradients_wide(policy.param_dtype, policy.reduce_dtype)
    token = _active.set((*_active.get(), (module, policy)))
    try:
        yield
    finally:
        _active.reset(token)
        for parameters, name, p in swapped:
            parameters[name] = p


def _governed(module: torch.nn.Module) -> Sequence[torch.nn.Module]:
    found = [module]
    for child in module.children():
        if "_spmd_precision" not in child.__dict__:
            found.extend(_governed(child))
    return list({id(m): m for m in found}.values())


def _without_self(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: fn(*args, **kwargs)


def _under_active_policies(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, which a backward pass will run again, under the policies that are active now."""
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
    """Let `torch.utils.checkpoint` recompute under the policies that were active the first time."""
    torchs = CheckpointFrame.__init__

    def init(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        torchs(self, _under_active_policies(recompute_fn), *args, **kwargs)

    replace("torch.utils.checkpoint._CheckpointFrame.__init__", init)


__all__ = ["MixedPrecisionPolicy", "cast_floating", "mixed_precision", "register", "sum_gradients_wide"]
