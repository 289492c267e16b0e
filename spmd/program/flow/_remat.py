"""Recomputation in the backward pass: `spmd.remat`, and `torch.utils.checkpoint` in a compiled program.

    for block in model.blocks:
        spmd.remat("dots")(block)       # keeps results of matrix products, recomputes the others

A recomputed forward pass consists of the same operations on the same values as the first one, so XLA's common-subexpression
elimination would merge them and save no memory. During a trace the inputs of every recomputation therefore pass through an optimization
barrier, as in `jax.checkpoint`. For `remat` the barrier also depends on the incoming gradient, so that the compiler cannot recompute early
and keep the result.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import jax
import torch
import torch.utils.checkpoint as checkpoint_module

from spmd.base._errors import SpmdError, message, shown
from spmd.base._torch import CheckpointFrame, pytree
from spmd.base._wrong_arguments import require_function, wrong_argument
from spmd.device._fence import fenced, is_fencing
from spmd.device._saved_results import SavedResults
from spmd.device._storage import is_device_tensor, recording
from spmd.patches._table import current, replaced
from spmd.program.find._objects import is_size

F = TypeVar("F", bound=Callable[..., Any])
Policy = str | Callable[[str], bool]

_DOTS = frozenset(
    (
        *("linear", "matmul", "mm", "bmm", "mv", "dot", "vdot", "einsum", "addmm", "addmv", "addbmm", "baddbmm"),
        *("convolution", "scaled_dot_product_attention"),
    )
)
_POLICIES: dict[str, Callable[[str], bool]] = {"nothing": lambda name: False, "dots": _DOTS.__contains__, "everything": lambda name: True}


def remat(policy: Policy = "nothing") -> Callable[[F], F]:
    """Recompute a module or a function in the backward pass instead of keeping its activations.

    Args:
        policy: the results to keep: "nothing", "dots" (results of matrix products, convolutions and attention),
            "everything" (no recomputation), each also by jax's name (`"dots_saveable"`); or a function from an operator's name
            (`"linear"`, `"gelu"`) to whether its result is kept.

    Returns:
        A decorator. It returns a new function for a function. It changes a module in place, leaves its `state_dict` unchanged,
        and returns it.

    Raises:
        SpmdError: there is no policy of that name, or `policy` is a module.
    """
    if isinstance(policy, torch.nn.Module):
        what = f"remat got a {type(policy).__name__} instead of a policy: it takes a policy and returns a decorator"
        raise SpmdError(message(what, fix='spmd.remat()(module), or spmd.remat("dots")(module)'))
    if not callable(policy) and not isinstance(policy, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        raise wrong_argument(f"remat takes a policy, got {shown(policy)}", 'spmd.remat("dots")(block)')
    chosen = policy if callable(policy) else _POLICIES.get(policy.removesuffix("_saveable"))
    if chosen is None:
        raise SpmdError(message(f"there is no remat policy {policy!r}", f"policies: {', '.join(_POLICIES)}", fix='choose one, e.g. "dots"'))

    def decorate(fn: Any) -> Any:
        require_function(fn, "remat", "spmd.remat()(block)")
        if chosen is _POLICIES["everything"]:
            return fn
        if isinstance(fn, torch.nn.Module):
            inner = getattr(fn.forward, "__func__", None)
            fn.forward = types.MethodType(_recomputed(inner, chosen) if inner else _ignoring_self(_recomputed(fn.forward, chosen)), fn)
            return fn
        return _recomputed(fn, chosen)

    return decorate


def _recomputed(fn: Callable[..., Any], policy: Callable[[str], bool]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        kept, flowing = SavedResults(policy), list[torch.Tensor]()

        def run(*args: Any, **kwargs: Any) -> Any:
            if flowing and is_fencing():  # the second time, in the backward pass
                flat, tree = pytree.tree_flatten((args, kwargs), is_leaf=is_size)
                args, kwargs = pytree.tree_unflatten(_behind_barrier(flat, flowing), tree)
                flowing.clear()  # with retain_graph=True there may be another backward pass
            return fn(*args, **kwargs)

        contexts = (kept.first(), kept.again())
        result = checkpoint_module.checkpoint(run, *args, use_reentrant=False, context_fn=lambda: contexts, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(lambda grads: flowing.extend(g for g in grads if g is not None))
        return result

    return forward


def _ignoring_self(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: fn(*args, **kwargs)


@contextmanager
def barrier_on_recompute() -> Generator[None]:
    """While active, checkpointed functions recompute from inputs that pass through an optimization barrier."""
    torchs_init: Callable[..., None] = CheckpointFrame.__init__
    detach_variable = current("torch.utils.checkpoint.detach_variable")

    def detached_behind_barrier(inputs: Any) -> Any:
        return tuple(_behind_barrier(detach_variable(inputs)))

    def init(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        torchs_init(self, _with_fenced_randomness(recompute_fn), *args, **kwargs)

    with (
        replaced("torch.utils.checkpoint._CheckpointFrame.__init__", init),
        replaced("torch.utils.checkpoint.detach_variable", detached_behind_barrier),
        _saved_inputs_behind_barrier(),
    ):
        yield


def _saved_inputs_behind_barrier() -> AbstractContextManager[None]:
    """While active, inputs saved by non-reentrant checkpoints pass through an optimization barrier when they are read."""
    if not hasattr(CheckpointFrame, "get_inputs"):  # torch 2.11: the node that saved them has `get_args` instead
        setup_context: Callable[..., None] = current("torch.utils.checkpoint._NoopSaveInputs.setup_context")

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            setup_context(ctx, inputs, output)
            get_args: Callable[[Any], Any] = ctx.get_args
            ctx.get_args = lambda saved: _behind_barrier(get_args(saved))

        return replaced("torch.utils.checkpoint._NoopSaveInputs.setup_context", staticmethod(setup))
    get_inputs: Callable[[Any], Any] = current("torch.utils.checkpoint._CheckpointFrame.get_inputs")
    return replaced("torch.utils.checkpoint._CheckpointFrame.get_inputs", lambda self: _behind_barrier(get_inputs(self)))


def _with_fenced_randomness(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` for the recomputation: it draws the same random numbers again, as keeping a dropout mask takes as much memory as its operand."""

    def again(*args: Any, **kwargs: Any) -> Any:
        recorder = recording.get()
        if recorder is None:
            return fn(*args, **kwargs)
        words = recorder.words
        recorder.words = jax.lax.optimization_barrier(words)
        try:
            return fn(*args, **kwargs)
        finally:
            recorder.words = words

    return again


def _behind_barrier(values: Any, after: Sequence[torch.Tensor] = ()) -> list[Any]:
    """The same values, with device tensors as new leaves that XLA can neither merge with the old ones nor compute before `after`."""
    held = list(values)
    places = [i for i, v in enumerate(held) if is_device_tensor(v)]
    behind = fenced([*(held[i] for i in places), *after])
    if is_fencing():
        for i, tensor in zip(places, behind, strict=False):
            held[i] = tensor.as_subclass(type(held[i])).requires_grad_(held[i].requires_grad)
    return held
