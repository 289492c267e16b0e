"""`assume_pure`: a function without side effects, traced once per signature, then run as one forward and one backward program.

    block = spmd.assume_pure(block)        # the same results and gradients, without PyTorch's work per operation

Unlike those of `spmd.compile`, its results take part in autograd. Inside a compiled function it calls the function directly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, message
from spmd.base._exact import exactly
from spmd.base._jax import is_tracing
from spmd.base._torch import pytree
from spmd.base._wrong_arguments import require_function
from spmd.device._once_differentiable import once_differentiable
from spmd.device._partitioner import PartitionedJit
from spmd.device._random_stream import default_stream
from spmd.device._storage import load, recording, wrap
from spmd.program.find._discover import reachable
from spmd.program.find._objects import is_size
from spmd.program.flow._joint import Joint, captured_by, trace_joint
from spmd.program.reuse._signature import modes

P = ParamSpec("P")
R = TypeVar("R")
_is_training = attrgetter("training")


def assume_pure(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function equivalent to `fn` that is traced once per signature.

    A signature consists of the structure, shapes, dtypes and non-tensor values of the arguments, the autocast state, and the training or
    evaluation mode of modules.

    Args:
        fn: a function without side effects that reads only its arguments and tensors that stay the same objects (parameters). Other values
            that it reads, such as a module's `p` or `eps`, keep their values from the trace.

    Returns:
        The function. Its results have gradients with respect to arguments and parameters.

    Raises:
        TraceError: while tracing, if `fn` writes in place to a tensor from outside or needs a value on the host.
        SpmdError: `fn` is no function, or an argument is neither a tensor nor hashable.
    """
    require_function(fn, "assume_pure", "block = spmd.assume_pure(block)")
    programs: dict[Any, _Program] = {}

    @functools.cache
    def modules() -> list[torch.nn.Module]:
        return [module for _, module in reachable(fn, (), {}).all_modules()]

    @functools.wraps(fn)
    def pure(*args: P.args, **kwargs: P.kwargs) -> R:
        if recording.get() is not None or is_tracing():
            return fn(*args, **kwargs)
        flat, tree = pytree.tree_flatten((args, kwargs), is_leaf=is_size)
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        with_gradient = torch.is_grad_enabled()
        wanted = [with_gradient and t.requires_grad for t in tensors]
        key = (str(tree), *map(_described, flat), tuple(wanted), modes(), *map(_is_training, modules()))
        program = programs.get(key)
        if program is None:
            program = programs[key] = _Program(fn, flat, tree, wanted, with_gradient)
        return program(tensors)

    return pure


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    try:
        hash(leaf)
    except TypeError:
        raise SpmdError(
            message(
                f"assume_pure was given a {type(leaf).__name__}, which cannot be compared between calls",
                fix="pass tensors and plain values",
            )
        ) from None
    return type(leaf), exactly(leaf)


class _Program:
    """Forward and backward program for one signature."""

    def __init__(self, fn: Callable[..., Any], flat: list[Any], tree: Any, wanted: list[bool], with_gradient: bool) -> None:
        is_tensor = [isinstance(leaf, torch.Tensor) for leaf in flat]
        static = [None if tensor else leaf for tensor, leaf in zip(is_tensor, flat, strict=True)]

        def of_tensors(*tensors: torch.Tensor) -> Any:
            given = iter(tensors)
            leaves = [next(given) if tensor else leaf for tensor, leaf in zip(is_tensor, static, strict=True)]
            args, kwargs = pytree.tree_unflatten(leaves, tree)
            return fn(*args, **kwargs)

        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        captured = captured_by(fn) if with_gradient else []
        self.joint: Joint = trace_joint(of_tensors, tensors, wanted, captured, default_stream.words())
        self.forward = PartitionedJit(self.joint.run_forward)
        self.backward = PartitionedJit(self.joint.run_backward)

    def __call__(self, tensors: list[torch.Tensor]) -> Any:
        joint = self.joint
        words = np.array(default_stream.words())
        default_stream.draws += joint.draws
        inputs = [*tensors, *joint.captured]
        if joint.gradient_of and any(joint.has_gradient):
            results = iter(_Passes.apply(self, words, *inputs))
        else:
            with exact_dtypes():
                results = iter([wrap(a) for a in self.forward(joint.outer_values(), [load(t) for t in inputs], words)[0]])
        return pytree.tree_unflatten([next(results) if leaf is None else leaf[0] for leaf in joint.leaves], joint.tree)


@once_differentiable("a function of assume_pure", fix="fn(x): call the function itself, or compile the step with spmd.compile")
class _Passes(torch.autograd.Function):
    """Both passes as an autograd function."""

    @staticmethod
    def forward(ctx: Any, program: _Program, words: Any, *tensors: torch.Tensor) -> Any:
        joint = program.joint
        with exact_dtypes():
            outputs, residuals = program.forward(joint.outer_values(), [load(t) for t in tensors], words)
        ctx.program, ctx.count = program, len(tensors)
        return joint.results(ctx, outputs, residuals)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        joint: Joint = ctx.program.joint
        flowing = [g for g, takes in zip(grads, joint.has_gradient, strict=True) if takes]
        with exact_dtypes():
            computed = ctx.program.backward([load(t) for t in ctx.saved_tensors], [load(g) for g in flowing])
        result: list[Any] = [None] * ctx.count
        for position, gradient in zip(joint.gradient_of, computed, strict=True):
            result[position] = wrap(gradient)
        return None, None, *result
