"""Composite ops kept as one jax call: forward by the rule, gradient by `jax.vjp` of the same rule.

Left to C++, a 4-D matmul becomes expand, view to 3-D and bmm, and the view merges dims that may be sharded over different
axes. Here the whole op stays one call. The vjp's residuals go through `save_for_backward`, so saved-tensor hooks and
`torch.utils.checkpoint` see them; a backward under `create_graph` runs as a whole op of its own, so any order works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._jax import inputs_of_each_output
from spmd.base._torch import AutoDispatchBelowAutograd, are_functorch_transforms_active
from spmd.device._adapter import Adapter
from spmd.device._kept import reuse_or_save
from spmd.device._pacing import note_operation
from spmd.device._partitioner import PartitionedJit
from spmd.device._storage import load, wrap
from spmd.device._turn import turn, was_taken
from spmd.lowering._registry import is_composite

_DIFFERENTIABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)


class WholeOp:
    """The autograd kernel of one composite lowering."""

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.op = adapter.op
        self.decomposes = adapter.op.name().startswith("aten::") or is_composite(adapter.op)
        self._calls: dict[Any, Call] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Autograd kernel: differentiate the rule as one op; decompose for tracers that are not jax's."""
        flat = [t for name, t in _tensors(self.adapter.names, args, kwargs) if name not in self.adapter.lowering.host]
        is_foreign = any(type(t).__name__ in ("FakeTensor", "FunctionalTensor") for t in flat)
        if not self.decomposes and is_foreign:
            with AutoDispatchBelowAutograd():
                return self.op(*args, **kwargs)
        if self.decomposes and (are_functorch_transforms_active() or is_foreign):
            return self.op.decompose(*args, **kwargs)
        if self.decomposes and any(t.device.type != "jax" and t.dim() for t in flat):  # mixed devices: let torch's own checks speak
            return self.op.decompose(*args, **kwargs)
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in flat)):
            with AutoDispatchBelowAutograd():
                return self.adapter(*args, **kwargs)
        plan, _ = self.adapter.plan(args, kwargs)
        call = self._calls.get(id(plan))
        if call is None:
            call = self._calls[id(plan)] = Call(plan.run, self.adapter.name)
        updated: list[Any] = []
        out = _Differentiable.apply(call, self.adapter.key(args, kwargs), updated, *flat)
        with exact_dtypes():
            self.adapter.update(tuple(updated), args, kwargs)
        return out


class Call:
    """A function of arrays `fn(dynamic, key) -> (results, updated)`, jitted with its vjp, which is another `Call`."""

    def __init__(self, fn: Callable[..., Any], name: str, is_gradient: bool = False) -> None:
        self.fn = fn
        self.name = name
        self.is_gradient = is_gradient
        self.forward_jit = PartitionedJit(self.forward, static=(2,), inline=True)
        self.vjp_jit = PartitionedJit(_pulled_back, inline=True)
        self._backward_call: dict[Any, Call] = {}
        self._flows: dict[Any, list[list[bool]]] = {}
        self._gives_zeros = name.startswith(("rnn_relu", "nll_loss"))  # torch's second derivatives of these are zeros, not None

    def forward(self, dynamic: Sequence[Any], key: Any, wanted: tuple[int, ...]) -> Any:
        """(results, vjp with respect to the dynamic values at the positions `wanted`, updated arguments' new values)."""

        def of_wanted(*chosen: Any) -> Any:
            filled = list(dynamic)
            for position, value in zip(wanted, chosen, strict=True):
                filled[position] = value
            return self.fn(filled, key)

        return jax.vjp(of_wanted, *(dynamic[i] for i in wanted), has_aux=True)

    def backward_call(self, wanted: tuple[int, ...], given: tuple[bool, ...]) -> Call:
        """This call's gradient as a call of (dynamic values, one cotangent per result that is `given` one), for higher orders."""
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
        """This call without the results that are not given a cotangent."""

        def of_given(dynamic: Sequence[Any], key: Any) -> Any:
            out, updated = self.fn(dynamic, key)
            return tuple(o for o, has in zip(_as_tuple(out), given, strict=True) if has), updated

        return Call(of_given, self.name)

    def flows(self, dynamic: Sequence[Any], key: Any, wanted: tuple[int, ...]) -> list[list[bool]]:
        """For each of the values at the positions `wanted`, to which results' cotangents its gradient owes something.

        As torch's derivative formulas: no gradient is not a gradient of zeros, which weight decay would move. Found in the traced
        vjp, once for the same shapes.
        """
        seen = (wanted, *((jnp.shape(value), jnp.result_type(value)) for value in dynamic))
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
            owes = [inputs[-count:] for inputs in inputs_of_each_output(traced.jaxpr)]
            found = self._flows[seen] = [[True] * count for _ in owes] if self._gives_zeros else owes
        return found


def _pulled_back(vjp: Any, cotangent: Any) -> Any:
    """The vjp in torch's convention, where the gradient of a complex value is the conjugate of jax's."""

    def conjugated(value: Any) -> Any:
        return jnp.conj(value) if jnp.iscomplexobj(value) else value

    return jax.tree.map(conjugated, vjp(jax.tree.map(conjugated, cotangent)))


_apply_vjp = jax.jit(_pulled_back, inline=True)


class _Differentiable(torch.autograd.Function):
    """One whole op on autograd's tape."""

    @staticmethod
    def forward(ctx: Any, call: Call, key: Any, updated: list[Any], *tensors: torch.Tensor) -> Any:
        wanted = tuple(i for i, t in enumerate(tensors) if ctx.needs_input_grad[i + 3] and t.dtype in _DIFFERENTIABLE)
        with exact_dtypes():
            arrays = [load(t) if t.device.type == "jax" else t.item() for t in tensors]
            try:
                out, vjp, new_values = call.forward_jit(arrays, key, wanted)
            except (RuntimeError, ValueError) as error:  # see Note [Threads]
                if not was_taken(error):
                    raise
                with turn:
                    arrays = [load(t) if t.device.type == "jax" else t.item() for t in tensors]
                    out, vjp, new_values = call.forward_jit(arrays, key, wanted)
            note_operation(out)
            out = reuse_or_save(call.name, out)
            flows = call.flows(arrays, key, wanted) if call.is_gradient else None
        updated.extend(new_values)
        leaves, ctx.tree = jax.tree.flatten(vjp)
        ctx.call, ctx.wanted, ctx.key, ctx.count, ctx.flows = call, wanted, key, len(tensors), flows
        ctx.shapes = [(o.shape, o.dtype) for o in _as_tuple(out)]
        ctx.is_tuple = isinstance(out, tuple | list)
        by_identity = {id(a): t for a, t in zip(arrays, tensors, strict=True)}
        ctx.save_for_backward(*tensors, *(by_identity.get(id(leaf)) if id(leaf) in by_identity else wrap(leaf) for leaf in leaves))
        ctx.set_materialize_grads(False)
        results = tuple(wrap(o) for o in _as_tuple(out))
        if flows is not None:
            ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if not any(owes[i] for owes in flows)))
        return results if ctx.is_tuple else results[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        saved = ctx.saved_tensors
        tensors, leaves = saved[: ctx.count], saved[ctx.count :]
        given = tuple(g is not None for g in grads)
        reached = _reached(ctx, tensors, given)
        wanted = tuple(position for position, is_reached in zip(ctx.wanted, reached, strict=True) if is_reached)
        result: list[Any] = [None] * (ctx.count + 3)
        if not wanted:
            return tuple(result)
        if torch.is_grad_enabled():
            cotangents = [g for g in grads if g is not None]
            out = _Differentiable.apply(ctx.call.backward_call(wanted, given), ctx.key, [], *tensors, *cotangents)
            found = dict(zip(wanted, out if isinstance(out, tuple) else (out,), strict=True))
        else:
            with exact_dtypes():
                vjp = jax.tree.unflatten(ctx.tree, [load(leaf) for leaf in leaves])
                arrays = [jnp.zeros(*s) if g is None else load(g) for g, s in zip(grads, ctx.shapes, strict=True)]
                pull = ctx.call.vjp_jit if ctx.call.forward_jit.is_affected else _apply_vjp
                out = pull(vjp, tuple(arrays) if ctx.is_tuple else arrays[0])
                note_operation(out)
                found = {position: wrap(jnp.asarray(o)) for position, o in zip(ctx.wanted, out, strict=True) if position in wanted}
        for position, grad in found.items():
            result[position + 3] = grad
        return tuple(result)


def _reached(ctx: Any, tensors: Sequence[torch.Tensor], given: tuple[bool, ...]) -> list[bool]:
    """Which of the wanted inputs get a gradient from the results that are given one."""
    if all(given) and ctx.flows is None:
        return [True] * len(ctx.wanted)
    flows = ctx.flows
    if flows is None:
        with exact_dtypes():
            arrays = [load(t) if t.device.type == "jax" else t.item() for t in tensors]
            flows = ctx.call.flows(arrays, ctx.key, ctx.wanted)
    return [any(owed and has for owed, has in zip(owes, given, strict=True)) for owes in flows]


def _as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


def differentiable(call: Call, tensors: Sequence[torch.Tensor]) -> Any:
    """The result of `call` (an array or a tuple of several) on tensors of device 'jax', on autograd's tape."""
    return _Differentiable.apply(call, None, [], *tensors)


def _tensors(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor among the arguments, also in lists, with its parameter's name."""
    for name, arg in (*zip(names, args, strict=False), *kwargs.items()):
        for item in arg if isinstance(arg, list | tuple) else (arg,):
            if isinstance(item, torch.Tensor):
                yield name, item
