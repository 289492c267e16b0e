"""Recurrent networks, kept whole: per layer and direction, one matmul over all steps and one `lax.scan`.

Packed sequences run as padded ones with a constant mask. The state of a sample does not change at steps that it lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd.lowering._registry import lower
from spmd.lowering.matmul import linear
from spmd.lowering.random import with_dropout

State = tuple[Any, ...]
Cell = Callable[[Any, State, list[Any]], State]


def _lstm_cell(gates: Any, state: State, weights: list[Any]) -> State:
    """One step. `gates` is the contribution of the input, in the order input, forget, cell, output."""
    h, c = state
    i, f, g, o = jnp.split(gates + linear(h, weights[1], weights[3]), 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h if weights[4] is None else linear(h, weights[4])), c


def _gru_cell(gates: Any, state: State, weights: list[Any]) -> State:
    """One step, with gates in the order reset, update, new. The reset gate applies after the matmul with the hidden state."""
    (h,) = state
    r_x, z_x, n_x = jnp.split(gates, 3, axis=-1)
    r_h, z_h, n_h = jnp.split(linear(h, weights[1], weights[3]), 3, axis=-1)
    r, z = jax.nn.sigmoid(r_x + r_h), jax.nn.sigmoid(z_x + z_h)
    n = jnp.tanh(n_x + r * n_h)
    return ((h - n) * z + n,)


def _tanh_cell(gates: Any, state: State, weights: list[Any]) -> State:
    return (jnp.tanh(gates + linear(state[0], weights[1], weights[3])),)


def _relu_cell(gates: Any, state: State, weights: list[Any]) -> State:
    return (jax.nn.relu(gates + linear(state[0], weights[1], weights[3])),)


def _direction(cell: Cell, x: Any, start: State, weights: list[Any], mask: Any, reverse: bool) -> tuple[Any, State]:
    """One layer in one direction over x [T, B, I]. `mask` [T, B, 1]: whether a sample has the step."""
    gates = linear(x, weights[0], weights[2])

    def step(state: State, now: Any) -> tuple[State, Any]:
        new = cell(now[0], state, weights)
        if mask is not None:
            new = tuple(jnp.where(now[1], a, b) for a, b in zip(new, state, strict=True))
        return new, new[0]

    last, out = lax.scan(step, start, (gates, mask), reverse=reverse)
    return out, last


def _layers(
    key: Any,
    cell: Cell,
    x: Any,
    mask: Any,
    start: State,
    params: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Any, State]:
    """All layers over x [T, B, I], from initial states [layers * directions, B, H]. Returns outputs and last states."""
    directions = 2 if bidirectional else 1
    size = len(params) // (num_layers * directions)
    lasts: list[State] = []
    for layer in range(num_layers):
        outs: list[Any] = []
        for direction in range(directions):
            at = layer * directions + direction
            weights = _layer_weights(params[at * size : (at + 1) * size], has_biases)
            out, last = _direction(cell, x, tuple(s[at] for s in start), weights, mask, direction == 1)
            outs.append(out)
            lasts.append(last)
        x = jnp.concatenate(outs, -1) if bidirectional else outs[0]
        if train and dropout > 0 and layer < num_layers - 1:
            x = with_dropout(jax.random.fold_in(key, layer), x, dropout, x.shape)
    return x, tuple(jnp.stack(states) for states in zip(*lasts, strict=True))


def _layer_weights(weights: Any, has_biases: bool) -> list[Any]:
    """[w_ih, w_hh, b_ih, b_hh, w_hr], with None for weights that the layer lacks."""
    biases = list(weights[2:4]) if has_biases else [None, None]
    projection = weights[4 if has_biases else 2 :]
    return [weights[0], weights[1], *biases, projection[0] if projection else None]


def _padded(key: Any, cell: Cell, input: Any, start: State, params: Any, *settings: Any) -> tuple[Any, ...]:
    """A network over a padded input. `settings`: those of `_layers`, then whether the batch is the first dim."""
    *of_layers, batch_first = settings
    x = jnp.swapaxes(input, 0, 1) if batch_first else input
    out, last = _layers(key, cell, x, None, start, params, *of_layers)
    return (jnp.swapaxes(out, 0, 1) if batch_first else out), *last


def _packed(key: Any, cell: Cell, data: Any, batch_sizes: Any, start: State, params: Any, *settings: Any) -> tuple[Any, ...]:
    """A network over a packed sequence. `data` [all steps, I]: for each step, the inputs of the `batch_sizes` samples that have it."""
    samples = np.arange(batch_sizes[0])
    inside = samples < batch_sizes[:, None]
    at = np.where(inside, np.cumsum(batch_sizes)[:, None] - batch_sizes[:, None] + samples, 0)
    mask = None if inside.all() else jnp.asarray(inside[:, :, None])
    x = jnp.take(data, at, axis=0, mode="clip")
    out, last = _layers(key, cell, x, mask, start, params, *settings)
    rows = np.flatnonzero(inside)
    return jnp.take(out.reshape(-1, out.shape[-1]), rows, axis=0, mode="clip"), *last


@lower("lstm.input", whole=True, random=True)
def lstm_input(key: Any, input: Any, hx: Any, params: Any, *rest: Any) -> Any:
    return _padded(key, _lstm_cell, input, tuple(hx), params, *rest)


@lower("lstm.data", whole=True, random=True, host=("batch_sizes",))
def lstm_data(key: Any, data: Any, batch_sizes: Any, hx: Any, params: Any, *rest: Any) -> Any:
    return _packed(key, _lstm_cell, data, batch_sizes, tuple(hx), params, *rest)


def _lower_simple(name: str, cell: Cell) -> None:
    """Register a network whose only state is the hidden state."""

    def padded(key: Any, input: Any, hx: Any, params: Any, *rest: Any) -> Any:
        return _padded(key, cell, input, (hx,), params, *rest)

    def packed(key: Any, data: Any, batch_sizes: Any, hx: Any, params: Any, *rest: Any) -> Any:
        return _packed(key, cell, data, batch_sizes, (hx,), params, *rest)

    lower(f"{name}.input", whole=True, random=True)(padded)
    lower(f"{name}.data", whole=True, random=True, host=("batch_sizes",))(packed)


_lower_simple("gru", _gru_cell)
_lower_simple("rnn_tanh", _tanh_cell)
_lower_simple("rnn_relu", _relu_cell)


def _cell(cell: Cell, input: Any, start: State, w_ih: Any, w_hh: Any, b_ih: Any, b_hh: Any) -> State:
    return cell(linear(input, w_ih, b_ih), start, [w_ih, w_hh, b_ih, b_hh, None])


@lower("lstm_cell", whole=True)
def lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return _cell(_lstm_cell, input, tuple(hx), w_ih, w_hh, b_ih, b_hh)


@lower("gru_cell", whole=True)
def gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return _cell(_gru_cell, input, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@lower("rnn_tanh_cell", whole=True)
def rnn_tanh_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return _cell(_tanh_cell, input, (hx,), w_ih, w_hh, b_ih, b_hh)[0]


@lower("rnn_relu_cell", whole=True)
def rnn_relu_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    return _cell(_relu_cell, input, (hx,), w_ih, w_hh, b_ih, b_hh)[0]
