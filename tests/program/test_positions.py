"""Items at a position that only the program knows, or that differs in every call: one program, with CPU torch's values and gradients."""

import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mesh
import spmd
from tests.oracle import assert_same, batch

KEYS = [
    "p",
    ":, p",
    "..., p",
    "0, p",
    "p, 1",
    "None, p",
    ":, None, p",
    "1:, p",
    "::2, p, 1:3",
    "p, :, q",
    "..., q, p",
    "p - 2",
    "p.int(), q",
    "i",
    ":, i",
    "..., i",
    "1, i, 1:",
    "i, :, q",
    ":, i:i + 2",
    "..., i:i + 2",
]


def written(source: str) -> Callable[..., Any]:
    """A function of this text, whose code can be recorded."""
    name, scope = f"<{source}>", {"torch": torch}
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), scope)
    return scope["step"]


def calls(step: Any, device: str) -> list[Any]:
    """What it returns and the gradient, in calls with other positions, of which all but the first are computed."""
    p, q = (torch.tensor(i).to(device) for i in (0, 1))
    found: list[Any] = []
    for i in range(3):
        x = batch(3, 4, 5, seed=i).to(device).requires_grad_()
        *results, p = step(x, p, q, i)
        found += results
    return found


@pytest.mark.parametrize("key", KEYS)
def test_an_item_is_written_and_read_by_one_program(key: str) -> None:
    lines = [
        f"y = x * 2; y[{key}] = x[{key}].sin() + y[{key}]",
        "g, = torch.autograd.grad(y.square().sum(), x)",
        "return y.detach(), g, (p + 1) % 3",
    ]
    step = written("\n    ".join(["def step(x, p, q, i):", *lines]) + "\n")
    together = spmd.compile(step)
    assert_same(calls(together, "jax"), calls(step, "cpu"))
    assert together.num_executables <= 2  # Python's number is a constant of the first one


@pytest.mark.parametrize(
    "text", ["y = x * 1; r = y[p]; r.add_(1)", "y = x * 1; y[p] += 1", "y = x[p]", "y = x * 1; y[p][1] = 5.0", "y = x * 1; y[p > 0] = 4.0"]
)
def test_what_must_be_a_view_of_a_position_is_refused_where_only_the_program_knows_it(text: str) -> None:
    step = written(f"def step(x, p):\n    {text}\n    return y\n")
    x = batch(3, 4).to("jax")
    assert_same(spmd.compile(step)(x, torch.tensor(1).to("jax")), step(batch(3, 4), torch.tensor(1)))  # which the host knows
    with pytest.raises(spmd.TraceError, match="was needed as a Python"):
        spmd.compile(step)(x, torch.tensor(1).to("jax") * 1)


@pytest.mark.parametrize("position", [4, -5])
def test_a_position_out_of_bounds_is_an_error_before_the_call(position: int) -> None:
    step = written("def step(x, p):\n    x[:, p] = 1.0\n    return x.sum()\n")
    x = batch(3, 4).to("jax")
    with pytest.raises(IndexError, match="is out of bounds for dimension"):
        spmd.compile(step)(x, torch.tensor(position).to("jax"))
    assert_same(x, batch(3, 4))


LISTS = [
    *("[2, 0], i % 4", "i, [2, 0]", "torch.tensor([2, 0, 2], device=x.device), i % 4", "i, torch.tensor([0, 1], device=x.device)"),
    *("[2, 0], i % 2 : i % 2 + 2", "i % 2 : i % 2 + 2, [1, 0]", "[0, 1], [i, i - 1]", "[i, 0, i]", "[[2, 0]][0], i % 4, [1, 2]"),
    *("[1, 0], :, i % 4", "..., i % 4, [1, 0]", "[0, 1], i % 4, [1, 2]", "[0, 1], i % 3 : i % 3 + 1, [1, 2]"),
]


@pytest.mark.parametrize("key", LISTS)
def test_lists_of_indices_beside_numbers_are_read_by_one_program(key: str) -> None:
    lines = [f"y = x[{key}]", "g, = torch.autograd.grad(y.square().sum(), x)", "return y.detach(), g"]
    step = written("\n    ".join(["def step(x, i):", *lines]) + "\n")
    together = spmd.compile(step)
    for i in (0, 1, 2, -1, -2):
        x = batch(3, 4, 5, seed=i + 2)
        assert_same(together(x.to("jax").requires_grad_(), i), step(x.requires_grad_(), i))
    assert together.num_traces == 2


@pytest.mark.parametrize("key", ["[2, 0], i", "i, [2, 0]", "[0, 1], [0, i]", "[i]"])
def test_a_number_out_of_bounds_beside_a_list_is_the_cpus_error(key: str) -> None:
    step = written(f"def step(x, i):\n    return x[{key}]\n")
    together = spmd.compile(step)
    for i in (0, 1, 7, 2, -7):
        if abs(i) < 3:
            assert_same(together(batch(3, 4).to("jax"), i), step(batch(3, 4), i))
        else:
            with pytest.raises(IndexError, match="out of") as expected:
                step(batch(3, 4), i)
            with pytest.raises(IndexError, match="out of") as found:
                together(batch(3, 4).to("jax"), i)
            assert str(found.value).splitlines()[0] == str(expected.value)
    assert together.num_traces <= 3


class Decoder(torch.nn.Module):
    """Attention over a cache of one size, to which each call writes at a position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 11)
        self.register_buffer("keys", torch.zeros(2, 16, 8))
        self.register_buffer("values", torch.zeros(2, 16, 8))

    def forward(self, tokens_B: torch.Tensor, position: Any) -> torch.Tensor:
        q_BD, k_BD, v_BD = self.mix(self.embed(tokens_B)).chunk(3, -1)
        self.keys[:, position] = k_BD
        self.values[:, position] = v_BD
        scores_BL = torch.einsum("bd,bld->bl", q_BD, self.keys)
        scores_BL = scores_BL.masked_fill(torch.arange(16, device=scores_BL.device) > position, float("-inf"))
        return self.out(torch.einsum("bl,bld->bd", scores_BL.softmax(-1), self.values)).argmax(-1)


@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("kind", ["number", "tensor", "counted"])
def test_a_loop_over_a_cache_has_one_program(kind: str, is_sharded: bool, mesh_4x2: mesh.Mesh) -> None:
    found: list[Any] = []
    for device in ("cpu", "jax"):
        torch.manual_seed(0)
        model = Decoder().to(device)
        if is_sharded and device == "jax":
            for name in ("keys", "values"):
                spmd.mark_sharding(getattr(model, name), mesh_4x2, (None, None, "model"))
        step: Any = torch.no_grad()(model.forward)
        step = spmd.compile(step) if device == "jax" else step
        tokens, position = torch.tensor([3, 4]).to(device), torch.tensor(0).to(device)
        for i in range(10):
            tokens = step(tokens, {"number": i, "tensor": torch.tensor(i).to(device), "counted": position}[kind])
            position = position + 1
            found.append(tokens.cpu())
        if device == "jax":
            assert step.num_executables == 1 + (kind == "number") + is_sharded  # the first tokens are not marked
    assert_same(found[10:], found[:10])
