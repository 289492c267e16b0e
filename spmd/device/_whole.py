"""Runs composite ops as one jax call each: the rule computes the result, and `jax.vjp` of the rule the gradient.

C++ would decompose a 4-D matmul into expand, view to 3-D and bmm, and the view merges dims that may be sharded over different axes.
The vjp's residuals are saved with `save_for_backward`, so that saved-tensor hooks and `torch.utils.checkpoint` see them. A backward
under `create_graph` is itself one jax call, so gradients of any order work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from torch.autograd import forward_ad

from spmd.base._convert import exact_dtypes, to_numpy_dtype
from spmd.base._errors import called_at, message
from spmd.base._jax import inputs_of_each_output
from spmd.base._torch import (
    AutoDispatchBelowAutograd,
    OpOverload,
    are_functorch_transforms_active,
    dispatch_mode_at,
    num_torch_dispatch_modes,
)
from spmd.device._adapter import Adapter
from spmd.device._deferred import ByIdentity, Deferrable
from spmd.device._inlined import Inlined
from spmd.device._pacing import note_operation
from spmd.device._partitioner import PartitionedJit
from spmd.device._saved_results import reuse_or_save
from spmd.device._storage import load, wrap
from spmd.device._trace_lock import was_taken, with_trace_lock
from spmd.lowering._registry import is_composite

_DIFFERENTIABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


# The tensor of each edge of an autograd node, if torch's own node has them in another order: the bias comes first there.
_EDGES = {"aten::linear": (2, 0, 1)}
_CLASS_WEIGHT = 2  # position of the argument
_WITH_BIAS = 3
_FIRST = 4  # number of arguments of `_Differentiable.apply` before the edges


class WholeOp:
    """The autograd kernel of one composite lowering."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.op = adapter.op
        self.decomposes = adapter.op.name().startswith("aten::") or is_composite(adapter.op)
        self._calls: dict[Any, Call] = {}
        check = None if adapter.bounds is None else adapter.check_indices
        self._plain = Deferrable(adapter.name, adapter, check=check)
        without_wanted = None if check is None else lambda args, kwargs: adapter.check_indices(args[1:], kwargs)
        self._differentiated = Deferrable(adapter.name, self._forward, check=without_wanted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Autograd kernel: differentiate the rule as one op; decompose it for tracers other than jax's and for modes that see operators."""
        flat = [t for name, t in _tensors(self.adapter.names, args, kwargs) if name not in self.adapter.lowering.host]
        is_foreign = any(type(t).__name__ in ("FakeTensor", "FunctionalTensor") for t in flat)
        if not self.decomposes and is_foreign:
            with AutoDispatchBelowAutograd():
                return self.op(*args, **kwargs)
        has_tangents = _has_tangents(flat)
        is_transformed = has_tangents or are_functorch_transforms_active()
        if self.decomposes and (is_transformed or is_foreign or _is_view(self.op, flat) or _is_observed()):
            return self.op.decompose(*args, **kwargs)
        if has_tangents:
            what = f"{self.op} of a dual tensor: its lowering has no forward-mode derivative"
            raise NotImplementedError(message(what, *called_at(), fix="torch.func.vjp, or torch.autograd.grad"))
        if self.decomposes and any(t.device.type != "jax" and t.dim() for t in flat):  # mixed devices: torch's own checks raise
            return self.op.decompose(*args, **kwargs)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in flat)):
            with AutoDispatchBelowAutograd():
                return self._plain(*args, **kwargs)
        order = _EDGES.get(self.op.name()) if len(flat) == _WITH_BIAS else None
        edges = flat if order is None else [flat[i] for i in order]
        return _Differentiable.apply(self._differentiated, args, kwargs, order, *edges)

    def _forward(self, wanted: tuple[int, ...], *args: Any, **kwargs: Any) -> Forward:
        """Run the forward pass and return what the gradient needs (see `_Differentiable`)."""
        plan, _ = self.adapter.plan(args, kwargs)
        call = self._calls.get(id(plan))
        if call is None:
            call = self._calls[id(plan)] = Call(plan.run, self.adapter.name)
        tensors = [t for name, t in _tensors(self.adapter.names, args, kwargs) if name not in self.adapter.lowering.host]
        result, updated = call.run(wanted, self.adapter.key(args, kwargs), tensors)
        with exact_dtypes():
            self.adapter.update(updated, args, kwargs)
        return result


class WeightedLoss(WholeOp):
    """A loss with class weights, whose gradient torch has for probabilities only: for indices, its own formula raises its error."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight = args[_CLASS_WEIGHT] if len(args) > _CLASS_WEIGHT else kwargs.get("weight")
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return self.op.decompose(*args, **kwargs)
        return super().__call__(*args, **kwargs)


def _has_tangents(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of the tensors is a dual tensor of forward-mode differentiation."""
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def _is_observed() -> bool:
    """Whether a dispatch mode of the user's (`FlopCounterMode`) is active. It sees the operators of the CPU, also those of the gradient.

    Selective checkpoints are no such modes: in programs, matmuls that are decomposed into views need more communication.
    """
    modes = map(dispatch_mode_at, range(num_torch_dispatch_modes()))
    return any(not type(mode).__module__.startswith(("spmd.", "torch.utils.checkpoint")) for mode in modes)


def _is_view(op: OpOverload, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether torch's own op returns a view, to which a program may write: an einsum of one tensor (`"ii->i"`)."""
    return op.name() == "aten::einsum" and len(tensors) == 1


class Call:
    """A function of arrays `fn(dynamic, key) -> (results, updated)`, jitted together with its vjp. Its gradient is another `Call`."""

    def __init__(self, fn: Callable[..., Any], name: str, is_gradient: bool = False) -> None:
        self.fn = fn
        self.name = name
        self.is_gradient = is_gradient
        self.forward_jit = PartitionedJit(self.forward, static=(2,), inline=True)
        self.vjp_jit = PartitionedJit(_pulled_back, inline=True)
        self.differentiated = Deferrable(name, self._forward)
        self.pulled = Deferrable(f"{name}_backward", _pulled)
        self._backward_call: dict[Any, Call] = {}
        self._flows: dict[Any, list[list[bool]]] = {}
        self._gives_zeros = name.startswith(("rnn_relu", "nll_loss"))  # torch's second derivatives of these are zeros, not None

    def forward(self, dynamic: Sequence[Any], key: Any, wanted: tuple[int, ...]) -> Any:
        """(results, vjp with respect to the dynamic values at the positions `wanted`, new values of the updated arguments)."""

        def of_wanted(*chosen: Any) -> Any:
            filled = list(dynamic)
            for position, value in zip(wanted, chosen, strict=True):
                filled[position] = value
            return self.fn(filled, key)

        return jax.vjp(of_wanted, *(dynamic[i] for i in wanted), has_aux=True)

    def _forward(self, wanted: tuple[int, ...], key: torch.Tensor | None, *tensors: torch.Tensor) -> Forward:
        with exact_dtypes():
            return self.run(wanted, None if key is None else load(key), tensors)[0]

    def run(self, wanted: tuple[int, ...], key: Any, tensors: Sequence[torch.Tensor]) -> tuple[Forward, tuple[Any, ...]]:
        """Run the forward pass on tensors.

        Args:
            wanted: positions of the inputs that need a gradient.
            key: key data (uint32[2]) of a random op's draw, or None.

        Returns:
            The forward pass, and the new values of the updated arguments.
        """
        with exact_dtypes():
            arrays = _arrays(tensors)
            try:
                out, vjp, updated = self.forward_jit(arrays, key, wanted)
            except (RuntimeError, ValueError) as error:  # see Note [Threads]
                if not was_taken(error):
                    raise
                with with_trace_lock():
                    arrays = _arrays(tensors)
                    out, vjp, updated = self.forward_jit(arrays, key, wanted)
            note_operation(out)
            out = reuse_or_save(self.name, out)
            flows = self.flows(arrays, key, wanted) if self.is_gradient else None
            leaves, tree = jax.tree.flatten(vjp)
            by_identity = {id(a): t for a, t in zip(arrays, tensors, strict=True)}
            saved = [by_identity[id(leaf)] if id(leaf) in by_identity else wrap(leaf) for leaf in leaves]
            shapes = [(o.shape, o.dtype) for o in _as_tuple(out)]
            pull = Pull(self, tree, shapes, isinstance(out, tuple | list), flows)
            return Forward(tuple(wrap(o) for o in _as_tuple(out)), saved, None if key is None else wrap(key), pull), tuple(updated)

    def backward_call(self, wanted: tuple[int, ...], given: tuple[bool, ...]) -> Call:
        """This call's gradient as a `Call`, for higher orders: a function of the dynamic values and one cotangent per `given` result."""
        made = self._backward_call.get((wanted, given))
        if made is None:
            count = sum(given)

            def gradient(dynamic: Sequence[Any], key: Any) -> Any:
                values, cotangents = dynamic[:-count], dynamic[-count:]
                _, vjp, _ = self._of_given(given).forward(values, key, wanted)
                out = _pulled_back(vjp, tuple(cotangents))
                return (out[0] if len(out) == 1 else out), ()

            made = self._backward_call[wanted, given] = Call(gradient, f"{self.name}_backward", is_gradient=True)
        return made

    def _of_given(self, given: tuple[bool, ...]) -> Call:
        """This call without the results that get no cotangent."""

        def of_given(dynamic: Sequence[Any], key: Any) -> Any:
            out, updated = self.fn(dynamic, key)
            return tuple(o for o, has in zip(_as_tuple(out), given, strict=True) if has), updated

        return Call(of_given, self.name)

    def flows(self, dynamic: Sequence[Any], key: Any, wanted: tuple[int, ...]) -> list[list[bool]]:
        """For each value at the positions `wanted`, the results on whose cotangents its gradient depends.

        torch's derivative formulas make the same distinction: no gradient differs from a gradient of zeros, with which an optimizer
        would apply weight decay. The dependencies come from the traced vjp, once per combination of shapes.
        """
        seen = (wanted, *(_shape_and_dtype(value) for value in dynamic))
        found = self._flows.get(seen)
        if found is None:

            def gradients(values: Sequence[Any], key: Any) -> Any:
                out, vjp, _ = self.forward(values, key, wanted)
                return out, vjp

            def pulled(values: Sequence[Any], key: Any, cotangents: Any) -> Any:
                return _pulled_back(gradients(values, key)[1], cotangents)

            shapes: Any = jax.eval_shape(lambda values, key: gradients(values, key)[0], list(dynamic), key)
            traced: Any = jax.make_jaxpr(pulled)(list(dynamic), key, shapes)
            count = len(jax.tree.leaves(shapes))
            depends = [inputs[-count:] for inputs in inputs_of_each_output(traced.jaxpr)]
            found = self._flows[seen] = [[True] * count for _ in depends] if self._gives_zeros else depends
        return found


def _pulled_back(vjp: Any, cotangent: Any) -> Any:
    """Apply the vjp in torch's convention, in which the gradient of a complex value is the conjugate of jax's."""

    def conjugated(value: Any) -> Any:
        return jnp.conj(value) if jnp.iscomplexobj(value) else value

    return jax.tree.map(conjugated, vjp(jax.tree.map(conjugated, cotangent)))


_apply_vjp = Inlined(_pulled_back)


@dataclass(eq=False)
class Pull:
    """The parts of one forward pass that its gradient needs and that do not depend on values.

    Attributes:
        call: the call that ran.
        tree: pytree structure of the vjp; its leaves are saved as tensors.
        shapes: shape and dtype of each result.
        is_tuple: whether the rule returns several results.
        flows: see `Call.flows`; None if the gradient of every input depends on every result.
    """

    call: Call
    tree: Any
    shapes: list[tuple[Any, Any]]
    is_tuple: bool
    flows: list[list[bool]] | None


class Forward(NamedTuple):
    """The outcome of a forward pass.

    Attributes:
        results: the results of the op.
        leaves: leaves of the vjp.
        key: key data (uint32[2]) of a random op's draw, or None.
        pull: the rest that the gradient needs.
    """

    results: tuple[torch.Tensor, ...]
    leaves: list[torch.Tensor]
    key: torch.Tensor | None
    pull: Pull


def _pulled(
    held: ByIdentity,
    all_wanted: tuple[int, ...],
    wanted: tuple[int, ...],
    leaves: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, ...]:
    """The gradients of the inputs at the positions `wanted`, from the gradients of the results (None: zero)."""
    pull: Pull = held.value
    with exact_dtypes():
        vjp = jax.tree.unflatten(pull.tree, [load(leaf) for leaf in leaves])
        arrays = [jnp.zeros(*s) if g is None else load(g) for g, s in zip(grads, pull.shapes, strict=True)]
        apply = pull.call.vjp_jit if pull.call.forward_jit.is_affected else _apply_vjp
        out = apply(vjp, tuple(arrays) if pull.is_tuple else arrays[0])
        note_operation(out)
        return tuple(wrap(jnp.asarray(o)) for position, o in zip(all_wanted, out, strict=True) if position in wanted)


# torch computes the gradient of these from their results, so a write to one in between is an error
_KEEP_RESULTS = frozenset(("softmax", "special_softmax", "log_softmax", "special_log_softmax", "scaled_dot_product_attention"))


class _Differentiable(torch.autograd.Function):
    """A composite op, or its gradient, as one node on autograd's tape."""

    @staticmethod
    def forward(
        ctx: Any, operation: Deferrable, args: tuple[Any, ...], kwargs: dict[str, Any], order: tuple[int, ...] | None, *edges: torch.Tensor
    ) -> Any:
        """Run `operation(wanted, *args, **kwargs)`, which returns a `Forward`; `edges`: its tensor arguments, permuted by `order`."""
        at = ctx.at = range(len(edges)) if order is None else [order.index(i) for i in range(len(edges))]
        tensors = edges if order is None else [edges[i] for i in at]
        wanted = tuple(i for i, t in enumerate(tensors) if ctx.needs_input_grad[at[i] + _FIRST] and t.dtype in _DIFFERENTIABLE)
        run = operation.kernel if any(t.is_cpu for t in tensors) else operation
        results, leaves, key, pull = run(wanted, *args, **kwargs)
        ctx.wanted, ctx.count, ctx.pull, ctx.key = wanted, len(tensors), pull, key
        kept = results if pull.call.name in _KEEP_RESULTS else ()
        ctx.num_leaves = len(leaves)
        ctx.save_for_backward(*tensors, *leaves, *kept)
        ctx.set_materialize_grads(False)
        if pull.flows is not None:
            ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if not any(depends[i] for depends in pull.flows)))
        return results if pull.is_tuple else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved, pull = ctx.saved_tensors, ctx.pull
        tensors, leaves = saved[: ctx.count], saved[ctx.count : ctx.count + ctx.num_leaves]
        given = tuple(g is not None for g in grads)
        reached = _reached(ctx, tensors, given)
        wanted = tuple(position for position, is_reached in zip(ctx.wanted, reached, strict=True) if is_reached)
        result: list[Any] = [None] * (ctx.count + _FIRST)
        if not wanted:
            return tuple(result)
        if torch.is_grad_enabled():
            operands = (*tensors, *(g for g in grads if g is not None))
            out = _Differentiable.apply(pull.call.backward_call(wanted, given).differentiated, (ctx.key, *operands), {}, None, *operands)
            found = out if isinstance(out, tuple) else (out,)
        else:
            found = pull.call.pulled(ByIdentity(pull), ctx.wanted, wanted, list(leaves), list(grads))
        for position, grad in zip(wanted, found, strict=True):
            result[ctx.at[position] + _FIRST] = grad
        return tuple(result)


def _reached(ctx: Any, tensors: Sequence[torch.Tensor], given: tuple[bool, ...]) -> list[bool]:
    """Whether each of the wanted inputs gets a gradient, from the results that get one (`given`)."""
    flows = ctx.pull.flows
    if all(given) and flows is None:
        return [True] * len(ctx.wanted)
    if flows is None:
        with exact_dtypes():
            shapes = [jax.ShapeDtypeStruct(t.shape, to_numpy_dtype(t.dtype)) if t.device.type == "jax" else t.item() for t in tensors]
            key = None if ctx.key is None else jax.ShapeDtypeStruct(ctx.key.shape, to_numpy_dtype(ctx.key.dtype))
            flows = ctx.pull.call.flows(shapes, key, ctx.wanted)
    return [any(is_used and has for is_used, has in zip(depends, given, strict=True)) for depends in flows]


def _arrays(tensors: Sequence[torch.Tensor]) -> list[Any]:
    return [load(t) if t.device.type == "jax" else t.item() for t in tensors]


def _shape_and_dtype(value: Any) -> tuple[Any, Any]:
    return (tuple(value.shape), value.dtype) if hasattr(value, "dtype") else ((), jnp.result_type(value))


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def differentiable(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """Run `call` on tensors of device 'jax', on autograd's tape; returns a tensor or a tuple of several."""
    return _Differentiable.apply(call.differentiated, (None, *tensors), {}, None, *tensors)


def _tensors(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments, also in lists, with the name of its parameter."""
    for name, arg in (*zip(names, args, strict=False), *kwargs.items()):
        for item in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(item, torch.Tensor):
                yield name, item
