"""One trace of a graph that Dynamo captured: flat lists of arrays in and out, forward and, where gradients flow, backward.

torch's autograd writes the backward pass in the trace of the forward pass; what does not depend on a cotangent is the forward pass (as in
`spmd.program.flow._joint`). What the graph does besides computing is found and told: which inputs it wrote to, which results are
inputs, views of them, or views of each other, how many random numbers it drew.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import torch

from spmd.base._convert import exact_dtypes
from spmd.base._errors import called_at, message
from spmd.base._jax import eval_jaxpr, split_by_dependence, with_constants_as_inputs
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer, buffer_of, load, recording, wrap
from spmd.dynamo._graph_backward import Backward, reached_by, tie_derivatives
from spmd.dynamo._graph_inputs import Given
from spmd.dynamo._graph_results import Made, Plain, Results, Shown, Untraceable
from spmd.dynamo._size_buckets import NotByRows, Rows, by_rows
from spmd.program.flow._round import Round, one_round
from spmd.program.trace._buffer_use import TraceRecorder
from spmd.program.trace._window import Window

Graph = Callable[..., Sequence[Any]]
Recorded = Callable[[Sequence[Any], Any], TraceRecorder]


@dataclass
class Traced:
    """What one trace found.

    Attributes:
        forward: jaxpr of values from outside, inputs, random words to computed values, new values of written inputs, what is kept for
            `backward`; each flat.
        backward: what it needs and cotangents to gradients; None where none flow.
        outer: values from outside the graph: with the buffer to read in each call, or None where it never changes.
        results: how each of the graph's results is made.
        windows: of the computed values, as in `Results`.
        flowing: which computed values take a cotangent.
        written: positions of inputs whose new values follow.
        kept_inputs: positions of inputs that `backward` takes, before what the forward pass computed for it.
        gradients: positions of the inputs whose gradients `backward` gives.
        draws: random numbers drawn.
        rows: of a program of rows, the dim of each computed value, then of each gradient, that holds them, or None.
    """

    forward: Any
    backward: Backward | None
    outer: list[tuple[Any, Buffer | None]]
    results: list[Made | Shown | Plain]
    windows: list[Window | None]
    flowing: list[int]
    written: list[int]
    kept_inputs: list[int]
    gradients: list[int]
    draws: int
    rows: list[int | None] | None = None

    def run_forward(self, *arrays: Any) -> list[Any]:
        """`forward` of arrays."""
        return eval_jaxpr(self.forward.jaxpr, self.forward.consts, *arrays)


class _GraphRound(Round):
    """A round that may write to what it is given, and to nothing around it."""

    def will_write(self, buffer: Buffer) -> None:
        if buffer not in self.newborn:
            raise Untraceable(
                message(
                    "a graph writes in place to a tensor that is not among its inputs",
                    *called_at(),
                    f"the tensor has shape {buffer.shape}",
                    fix="pass the tensor to the compiled function",
                )
            )
        super().will_write(buffer)


class GraphTrace:
    """The trace of one graph, run twice where gradients flow: once for the shapes of the cotangents.

    Args:
        graph: a function of tensors of the device, each as `given` says.
        layouts: per tensor, the sharding of the value that is written to it and of its gradient, or None.
        recorded: the recorder of a trace in which CPU tensors have these values, and the random state these words.
    """

    def __init__(self, graph: Graph, given: Sequence[Given], layouts: Sequence[Any], recorded: Recorded) -> None:
        self._graph, self._given, self._layouts, self._recorded = graph, given, layouts, recorded
        self._wanted = [i for i, one in enumerate(given) if one.wants_gradient]
        self._found: Results
        self._written: list[int] = []
        self._gradients: list[int] = []
        self._reached: list[list[bool]] = []
        self._reads: dict[int, Buffer] = {}
        self._draws = 0

    def traced(self, examples: Sequence[Any], hosts: Sequence[Any]) -> Traced:
        """What it finds, given an array (or its shape and dtype) for each tensor and the values of CPU tensors.

        Raises:
            Untraceable: it writes to a tensor from outside, or a value with a gradient to an input, or replaces an input's memory; a
                result is a view that no view has.
            TraceError: Python or the host needs a value.
        """
        with exact_dtypes():
            closed, consts, num_cotangents = self._closed(examples, hosts)
            return self._split(closed, [(value, self._reads.get(id(value))) for value in consts], num_cotangents)

    def traced_by_rows(self, other: GraphTrace, examples: Sequence[Sequence[Any]], hosts: Sequence[Any], sizes: tuple[int, int]) -> Traced:
        """What this trace and the same at another size find: a program of rows, whose last host value is how many are real.

        Args:
            examples: for each of the two, the shapes of the arrays.

        Raises:
            NotByRows: it is not proved to be exact with rows that are padding.
        """
        with exact_dtypes():
            first, consts, num_cotangents = self._closed(examples[0], hosts)
            second, others, _ = other._closed(examples[1], hosts)
            if len(consts) != len(others) or any(a is not b for a, b in zip(consts, others, strict=True)):
                raise NotByRows("values that the trace made")
            if self._draws or self._written:
                raise NotByRows("random numbers, or a write to an input")
            found, again = self._found, other._found
            if [r for r in found.results if not isinstance(r, Made)] or any(found.windows) or found.results != again.results:
                raise NotByRows("a result that is a view, or no tensor")
            closed = by_rows(first, second, sizes, len(consts) + len(self._given) + len(hosts) - 1)
            traced = self._split(closed, [(value, self._reads.get(id(value))) for value in consts], num_cotangents)
            rows = Rows(sizes, None)
            outs = [rows.rows_of(a, b) for a, b in zip(first.out_avals, second.out_avals, strict=True)]
        if any(row is not None and row[1] != 1 for row in outs):
            raise NotByRows("a result whose rows lie beside others")
        return replace(traced, rows=[None if row is None else row[0] for row in outs])

    def _closed(self, examples: Sequence[Any], hosts: Sequence[Any]) -> tuple[Any, list[Any], int]:
        """The jaxpr of both passes, values from outside first, these values, and how many cotangents come last."""
        known = [*map(jax.typeof, (*examples, *map(jnp.asarray, hosts))), jax.ShapeDtypeStruct((4,), jnp.uint32)]
        cotangents: list[Any] = []
        if self._wanted:
            values = jax.eval_shape(lambda *arrays: self._run(arrays, None)[0], *known)
            cotangents = [jax.ShapeDtypeStruct(tuple(self._found.made[i].shape), values[i].dtype) for i in self._found.flowing]
        closed, consts = with_constants_as_inputs(jax.make_jaxpr(self._run)(known, cotangents))
        return closed, consts, len(cotangents)

    def _run(self, arrays: Sequence[Any], cotangents: Sequence[Any] | None) -> tuple[list[Any], list[Any], list[Any]]:
        """(computed values, new values of written inputs, gradients) of traced arrays: tensors, CPU tensors, random words."""
        words, hosts = arrays[-1], arrays[len(self._given) : -1]
        one_thread = torch.autograd.set_multithreading_enabled(False)  # jax's trace is this thread's
        with _in(self._recorded(hosts, words)), one_round(words, _GraphRound) as part, one_thread:
            inputs = [one.in_trace(array) for one, array in zip(self._given, arrays, strict=False)]
            buffers = list(map(buffer_of, inputs))
            start, shapes = [b.value for b in buffers], list(map(_shape, inputs))
            found = self._found = Results(self._graph(*inputs), inputs)
            if [*map(buffer_of, inputs)] != buffers or [*map(_shape, inputs)] != shapes:
                fix = "write to its elements, or return the new tensor"
                raise Untraceable(message("a graph gives an input other memory, or another shape", *called_at(), fix=fix))
            self._written = [i for i, (b, was) in enumerate(zip(buffers, start, strict=True)) if b.value is not was]
            if any(inputs[i].grad_fn is not None for i in self._written):
                raise Untraceable(message("a graph writes a value with a gradient to an input", fix="return the new value instead"))
            grads: Any = ()
            reaches: list[list[bool]] = []
            if cotangents:
                flowing, sources = [found.made[i] for i in found.flowing], [inputs[i] for i in self._wanted]
                reaches = [reached_by(output, sources) if len(flowing) > 1 else [True] * len(sources) for output in flowing]
                if len(flowing) > 1:
                    tie_derivatives(flowing)
                try:
                    grads = torch.autograd.grad(flowing, sources, list(map(wrap, cotangents)), allow_unused=True)
                except RuntimeError as error:  # eagerly, it is raised where somebody asks for gradients
                    raise Untraceable(message("the gradient of a graph cannot be computed", str(error), fix="see there")) from error
            reached = [(i, g) for i, g in zip(self._wanted, grads, strict=False) if g is not None]
            self._gradients = [i for i, _ in reached]
            self._reached = [[r for r, g in zip(own, grads, strict=True) if g is not None] for own in reaches]
            self._draws = default_stream.draws - part.start_draws
            self._reads = {id(value): buffer for buffer, value in part.seen.items()}
            new = [self._laid(i, buffers[i].raw()) for i in self._written]
            return found.values(), new, [self._laid(i, load(g)) for i, g in reached]

    def _laid(self, position: int, value: Any) -> Any:
        sharding = self._layouts[position]
        return value if sharding is None else jax.lax.with_sharding_constraint(value, sharding)

    def _split(self, closed: Any, outer: list[tuple[Any, Buffer | None]], num_cotangents: int) -> Traced:
        """The two passes; what the second needs of the inputs is taken from there and not returned by the first."""
        found, num_known = self._found, len(closed.in_avals) - num_cotangents
        forward, rest, is_unknown = split_by_dependence(closed, [False] * num_known + [True] * num_cotangents)
        num_own = len(found.made) + len(self._written)
        assert not any(is_unknown[:num_own])
        is_known = [not unknown for unknown in is_unknown[num_own:]]
        kept_inputs, backward = list[int](), None
        if num_cotangents:
            forward, kept_inputs, places = self._without_inputs(forward, num_own, len(outer))
            backward = Backward(rest, places, is_known, self._reached)  # gradients that no cotangent has part in are computed forwards
        return Traced(
            *(forward, backward, outer, found.results, found.windows, found.flowing if num_cotangents else [], self._written),
            *(kept_inputs, self._gradients, self._draws),
        )

    def _without_inputs(self, forward: Any, num_own: int, num_outer: int) -> tuple[Any, list[int], list[int]]:
        """The forward pass without what follows its own outputs and is an input, or there twice.

        Returns:
            (forward, kept_inputs, places); `places`: for each value that followed, which it is of these inputs and what is computed.
        """
        jaxpr = forward.jaxpr
        given = jaxpr.invars[num_outer : num_outer + len(self._given)]
        source = {id(v): i for i, v in enumerate(given) if i not in self._written}  # those have other values after the call
        values = jaxpr.outvars[num_own:]
        inputs = list(dict.fromkeys(source[id(v)] for v in values if id(v) in source))
        computed = list({id(v): v for v in values if id(v) not in source}.values())
        slot = {id(v): len(inputs) + i for i, v in enumerate(computed)}
        places = [inputs.index(source[id(v)]) if id(v) in source else slot[id(v)] for v in values]
        info = jaxpr.debug_info._replace(result_paths=None)
        return forward.replace(jaxpr=jaxpr.replace(outvars=[*jaxpr.outvars[:num_own], *computed], debug_info=info)), inputs, places


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.requires_grad


@contextmanager
def _in(recorder: TraceRecorder) -> Generator[None]:
    token = recording.set(recorder)
    try:
        yield
    finally:
        recording.reset(token)


__all__ = ["GraphTrace", "Traced"]
