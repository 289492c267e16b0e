"""Runs a recording operation by operation if it cannot be compiled, so that an error is the one that eager execution would raise."""

from __future__ import annotations

import jax.numpy as jnp

from spmd.base._convert import exact_dtypes, to_torch_dtype
from spmd.device._random_stream import default_stream
from spmd.device._storage import Buffer
from spmd.program.lazy._described import repeated_number
from spmd.program.lazy._recording import Recording
from spmd.program.lazy._region import bind
from spmd.program.lazy._replay import Replay


def run_one_by_one(recorded: Recording) -> None:
    """Compute the value of every pending buffer.

    Raises:
        Exception: the exception of the first operation that fails. Earlier operations have taken effect. Reading a result of a later
            operation raises an error that names the failed operation.
    """
    replay = Replay()
    inputs = {one.place: one for one in recorded.inputs}
    end, streams, has_drawn = default_stream.get_state(), iter(recorded.words), False
    why = ""
    try:
        for node in recorded.node.path():
            for place, found in node.inputs:
                if found.fill is None:
                    value, host = inputs[place].value, inputs[place].host
                    buffer = Buffer(value, found.shape, host, found.annotation)
                else:
                    with exact_dtypes():
                        buffer = Buffer(jnp.full(found.shape, repeated_number(found)), found.shape)
                        buffer.annotation = found.annotation
                        if found.annotation is not None:
                            buffer.place(found.annotation.to_jax())
                replay.put(place, buffer, to_torch_dtype(found.dtype))
            if node.effect.draws:
                if not has_drawn or node.sets_stream:
                    default_stream.set_words(next(streams))
                has_drawn = True
            why = node.operation.name + (f", called at {node.line}" if node.line else "")
            result, _ = replay.run(node.operation, node.args, node.kwargs, recorded.numbers[node.first_number :])
            bind(replay, node.effect.result, result, node.first_made)
        why = ""
    finally:
        default_stream.set_state(end)
        _store_values(recorded, replay, why)


def _store_values(recorded: Recording, replay: Replay, why: str) -> None:
    """Store the computed values in the pending buffers. The others are marked as dropped for the reason `why`."""
    for place, ref in enumerate(recorded.buffers):
        buffer = ref()
        if buffer is None or buffer.queue is not recorded or not buffer.is_waiting:
            continue
        buffer.queue = None
        if replay.has(place):
            source = replay.buffer(place)
            buffer.value, buffer.host = source.value, source.host
        else:
            buffer.dropped = f"this tensor was not computed, because an earlier operation failed: {why}"


__all__ = ["run_one_by_one"]
