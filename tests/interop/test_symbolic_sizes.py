"""Torch code over the symbols of `jax.export`: values and gradients at any size, or a refusal; programs of `torch.export`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd.demo._gpt2 import GPT, GPTConfig
from tests.interop.test_functionalize import as_jax, assert_close, assert_gradients
from tests.oracle import batch, twins


def shapes(*specs: str, constraints: tuple[str, ...] = (), dtype: Any = np.float32) -> list[jax.ShapeDtypeStruct]:
    scope = jax.export.SymbolicScope(constraints)
    return [jax.ShapeDtypeStruct(jax.export.symbolic_shape(spec, scope=scope), dtype) for spec in specs]


def exported(call: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return jax.jit(jax.export.export(jax.jit(call))(*args).call)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def test_a_model_and_its_gradient_are_one_program_for_every_batch() -> None:
    host, model = twins(lambda: network().eval())
    fn, params, buffers = spmd.functionalize(model)

    def loss(p: Any, x: Any) -> Any:
        return jnp.square(fn(p, buffers, None, x)).sum()

    step = exported(jax.value_and_grad(loss), params, *shapes("b, 8", constraints=("b >= 2",)))
    for size in (2, 3, 90):
        value, grads = step(params, as_jax(batch(size, 8)))
        host.zero_grad()
        want = host(batch(size, 8)).square().sum()
        want.backward()
        assert_close(value, want)
        assert_gradients(grads, host)


def test_buffers_that_are_written_and_gradients_of_gradients() -> None:
    host, model = twins(network)
    fn, params, buffers = spmd.functionalize(model)
    step = exported(lambda x: fn.with_buffers(params, buffers, None, x), *shapes("b, 8", constraints=("b >= 2",)))
    out, after = step(as_jax(batch(5, 8)))
    assert_close(out, host(batch(5, 8)))
    assert_close(after["1.running_var"], host.get_buffer("1.running_var"))
    cubed, _, _ = spmd.functionalize(lambda x: (x**3).sum())
    second = exported(
        jax.grad(lambda x: jnp.square(jax.grad(lambda x: cubed({}, {}, None, x))(x)).sum()), *shapes("b", constraints=("b >= 2",))
    )
    assert_close(second(jnp.arange(5.0)), 36 * torch.arange(5.0) ** 3)


def test_two_symbols_and_products_of_them() -> None:
    host, model = twins(lambda: GPT(GPTConfig(vocabulary=32, seq=16, width=16, layers=1, heads=2, dropout=0.0)))
    fn, params, buffers = spmd.functionalize(model)
    run = exported(lambda ids: fn(params, buffers, None, ids), *shapes("b, t", constraints=("b >= 2", "t >= 2", "t <= 16"), dtype=np.int32))
    for B, T in ((2, 16), (3, 5)):
        ids = torch.arange(B * T).view(B, T) % 32
        assert_close(run(jnp.asarray(ids.numpy(), np.int32)), host(ids))


def test_an_expression_of_symbols_and_random_numbers() -> None:
    fn, _, _ = spmd.functionalize(lambda x, y: F.dropout(x @ y, 0.5))
    call = lambda x, y: fn({}, {}, jax.random.key(3), x, y)  # noqa: E731
    run = exported(call, *shapes("2*b, 4", "4, c", constraints=("b >= 2", "c >= 2")))
    x, y = as_jax(batch(6, 4)), as_jax(batch(4, 5))
    np.testing.assert_array_equal(run(x, y), call(x, y))


def pieces(x: torch.Tensor) -> torch.Tensor:
    return x[1:] - x[:-1]


def named(x: torch.Tensor) -> Any:
    return x.shape[0], x


def equal(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] == 24 else x


def large(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.shape[0] > 30 else x


def first(x: torch.Tensor) -> torch.Tensor:
    return torch.topk(x, 5, dim=0)[0]


REFUSED: dict[str, tuple[Callable[..., Any], tuple[str, ...], str]] = {
    "a size of 1": (torch.sin, (), r"not known: b >= 2(?s:.*)symbolic_shape\('b', constraints=\['b >= 2'\]\)"),
    "a part of one": (pieces, ("b >= 2",), r"not known: b - 1 >= 2"),
    "a question": (equal, ("b >= 2",), r"not known: b != 24(?s:.*)constraints=\['b > 24'\]"),
    "a branch": (large, ("b >= 2",), r"a Python condition on a size has different results(?s:.*)as jax.jit does by itself"),
    "an error": (
        first,
        ("b >= 2",),
        r"raises RuntimeError for b = 3, which(?s:.*)selected index k out of range(?s:.*)restrict them: ",
    ),
    "a number": (named, ("b >= 2",), r"named returns a value that depends on the sizes"),
    "no room": (torch.sin, ("b >= 2", "b <= 4"), r"symbol 'b' varies from 2 to 4: too few sizes"),
}


@pytest.mark.parametrize(("fn", "constraints", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_one_program_is_refused(fn: Callable[..., Any], constraints: tuple[str, ...], text: str) -> None:
    call, _, _ = spmd.functionalize(fn)
    with pytest.raises(spmd.TraceError if "value" not in text else spmd.SpmdError, match=text):
        exported(lambda x: call({}, {}, None, x), *shapes("b, 4", constraints=constraints))


@pytest.mark.parametrize(("fn", "least"), [(pieces, 3), (equal, 25), (large, 31), (first, 5)])
def test_with_what_was_asked_for_it_is_one(fn: Callable[..., Any], least: int) -> None:
    call, _, _ = spmd.functionalize(fn)
    run = exported(lambda x: call({}, {}, None, x), *shapes("b, 4", constraints=(f"b >= {least}",)))
    for size in (least, 50):
        assert_close(run(as_jax(batch(size, 4))), fn(batch(size, 4)))


class Made(nn.Module):
    """Makes tensors on its own device, has constants, and a branch with more of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 4), torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(x.shape[0]).to(torch.float32)[:, None]
        chosen = torch.cond(x.sum() > 0, lambda v: v + torch.ones(4), lambda v: v * 2, (x,))
        return self.layer(x) + rows + self.steps + torch.tensor([1.0, 2.0, 3.0, 4.0]) + chosen.to("cpu")


def test_a_program_of_torch_runs_at_every_size_that_it_allows() -> None:
    host = Made()
    program = torch.export.export(host, (batch(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch", max=9)},))
    fn, params, buffers = spmd.functionalize(program)
    assert params.keys() == dict(host.named_parameters()).keys()
    run = jax.jit(fn)
    for size in (1, 5, 9):
        assert_close(run(params, buffers, None, as_jax(batch(size, 4))), host(batch(size, 4)))
    with pytest.raises(AssertionError, match=r"x.size\(\)\[0\] <= 9"):
        run(params, buffers, None, as_jax(batch(10, 4)))
    assert_close(program.module()(batch(4, 4)).detach(), host(batch(4, 4)))  # as it was, on the CPU


def test_a_program_of_torch_with_symbols_is_one_of_jax() -> None:
    host = Made()
    program = torch.export.export(host, (batch(3, 4),), dynamic_shapes=({0: torch.export.Dim("batch", max=90)},))
    fn, params, buffers = spmd.functionalize(program)
    run = exported(lambda x: fn(params, buffers, None, x), *shapes("b, 4", constraints=("b >= 2", "b <= 90")))
    assert_close(run(as_jax(batch(7, 4))), host(batch(7, 4)))
    with pytest.raises(spmd.TraceError, match=r"raises AssertionError for b = [0-9]+(?s:.*)x.size\(\)\[0\] <= 90"):
        exported(lambda x: fn(params, buffers, None, x), *shapes("b, 4", constraints=("b >= 40",)))
