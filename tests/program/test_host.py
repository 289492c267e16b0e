"""CPU tensors and host random numbers in a compiled function: inputs of the program, constants that are watched, or refused."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import spmd
from tests.oracle import assert_same, batch

INPUTS: dict[str, Callable[..., torch.Tensor]] = {
    "to": lambda x: x.to("jax") * 2,
    "to_dtype": lambda x: x.to("jax", torch.float64) * 2,
    "to_like": lambda x: torch.empty(3, device="jax").copy_(x) * 2,
    "keyword": lambda x: x.to(device="jax", non_blocking=True) * 2,
    "looked_at": lambda x: x.to("jax") * x.shape[0] * x.dim(),
    "same_view": lambda x: x.detach().to("jax") * 2,
}


@pytest.mark.parametrize("name", list(INPUTS))
def test_a_cpu_argument_moved_inside_is_an_input(name: str) -> None:
    step = spmd.compile(INPUTS[name])
    for seed in (1, 2):
        x = batch(3, seed=seed)
        want = x.double() * 2 if name == "to_dtype" else x * 3 if name == "looked_at" else x * 2
        assert_same(step(x), want)
    assert step.num_traces == 1


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda x: x[:2],
    "row": lambda x: x[1],
    "steps": lambda x: x[::2, 1:],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
    "expanded": lambda x: x[:, :1].expand(-1, 4),
    "cut": lambda x: x.chunk(2)[1],
}


@pytest.mark.parametrize("name", list(VIEWS))
def test_a_view_of_a_cpu_argument_is_an_input(name: str) -> None:
    step = spmd.compile(lambda x: VIEWS[name](x).to("jax") * 2)
    for seed in (1, 2, 3):
        x = batch(4, 3, seed=seed)
        assert_same(step(x), VIEWS[name](x) * 2)
    assert step.num_traces == 1


def test_a_transposed_cpu_argument_keeps_its_strides() -> None:
    step = spmd.compile(lambda x: x.to("jax"))
    assert step(batch(4, 3).t()).stride() == (1, 3)


def test_a_zero_dim_cpu_argument_in_an_op_is_an_input() -> None:
    step = spmd.compile(lambda x, c: x * c)
    x = torch.ones(2).to("jax")
    assert [step(x, torch.tensor(c))[0].item() for c in (2.0, 5.0)] == [2.0, 5.0]
    assert step.num_traces == 1


COMPUTED: dict[str, Callable[..., Any]] = {
    "arithmetic": lambda x, i: (x * 2).to("jax"),
    "dtype": lambda x, i: x.double().to("jax"),
    "sum": lambda x, i: torch.ones(1, device="jax") * x.sum().item(),
    "result": lambda x, i: x.exp() + i,
    "several": lambda x, i: (x.square().mean(), (x > 0).sum(), x[1].item(), i.item() * 2),
    "in a list": lambda x, i: torch.stack([x, x + i]).to("jax"),
    "beside 0-dim": lambda x, i: torch.ones(2, device="jax") * i,
    "text": lambda x, i: f"{i}, {x}",
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_from_a_cpu_argument_is_computed_by_the_program(name: str) -> None:
    step = spmd.compile(COMPUTED[name])
    for seed in (1, 2, 3):
        given = batch(3, seed=seed), torch.tensor(seed)
        assert_same(step(*given), COMPUTED[name](*given))
    assert step.num_traces == 1


READ: dict[str, Callable[..., Any]] = {
    "index": lambda x, i: x[i],
    "slice": lambda x, i: x[i:],
    "size": lambda x, i: torch.full((i,), 2.0, device=x.device),
    "view": lambda x, i: x.view(i, -1),
    "sizes": lambda x, i: x.tensor_split((i, i + 1)),
    "positions": lambda x, i: x.tensor_split(i[None]),
    "narrow": lambda x, i: torch.narrow(x, 0, i, 2),
    "alpha": lambda x, i: torch.add(x, x, alpha=i),
    "roll": lambda x, i: x.roll(i),
    "tril": lambda x, i: x.view(2, 3).tril(i),
    "pad": lambda x, i: torch.nn.functional.pad(x, (i, 1)),
    "arange": lambda x, i: torch.arange(i, i + 2, device=x.device),
    "topk": lambda x, i: torch.topk(x, i)[0],
    "range": lambda x, i: sum((x * n for n in range(i)), x),
    "branch": lambda x, i: x * 2 if i > 2 else x,
    "bool": lambda x, i: x * 2 if i - 2 else x,
    "list": lambda x, i: x * [1, 2, 3, 4][i],
    "key": lambda x, i: x * {1: 2, 2: 3, 3: 4}[i.item()],
    "tolist": lambda x, i: x.reshape(torch.stack([i, 6 // i]).tolist()),
    "equal": lambda x, i: x * 2 if torch.equal(i, torch.tensor(3)) else x,
    "contains": lambda x, i: x * 2 if 3 in torch.stack([i, i * 2]) else x,
    "dim": lambda x, i: x.view(1, 2, 1, 3).sum(i),
    "interpolate": lambda x, i: torch.nn.functional.interpolate(x.view(1, 1, 6), size=i),
}


@pytest.mark.parametrize("name", READ)
def test_what_reads_an_integer_of_a_cpu_argument_has_the_value_of_each_call(name: str) -> None:
    step = spmd.compile(READ[name])
    i = torch.tensor(0)
    for number in (1, 2, 3, 1):
        i.fill_(number)
        given = batch(6, seed=number), i
        assert_same(step(given[0].to("jax"), i), READ[name](*given))
    assert step.num_traces <= 3


REFUSED: dict[str, Callable[..., Any]] = {
    "numpy": lambda x: torch.from_numpy(x.numpy() * 2).to("jax"),
    "numpy function": lambda x: np.mean(x),
    "memory": lambda x: x.data_ptr(),
    "in_place": lambda x: x.add_(1).to("jax"),
    "in_place view": lambda x: x[1:].zero_(),
    "shape in place": lambda x: x.unsqueeze_(0),
    "list in place": lambda x: torch._foreach_add_([x], 1),
    "set_item": lambda x: (x.__setitem__(0, 1.0), x.to("jax"))[1],
    "out": lambda x: torch.add(x, 1, out=x),
    "flag": lambda x: x.requires_grad_().to("jax").detach(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_write_to_a_cpu_argument_and_a_use_of_its_memory_are_refused(name: str) -> None:
    x = batch(3)
    kept = x.clone()
    with pytest.raises(spmd.TraceError, match=r"(?s)uses a CPU tensor argument on the host.*test_host.py.*fix: move the argument first"):
        spmd.compile(REFUSED[name])(x)
    assert torch.equal(x, kept) and not x.requires_grad


def test_a_cpu_argument_and_its_views_are_the_callers_in_results() -> None:
    state: dict[str, torch.Tensor] = {}

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        state["latest"] = y
        return y, y[1:], y.t().detach(), y is x

    step = spmd.compile(fn)
    for _ in range(2):
        y = batch(3, 4).t()
        same, part, turned, is_same = step(batch(2), y)
        assert same is y and state["latest"] is y and not is_same
        assert part.stride() == y[1:].stride() and turned.is_contiguous()
        y.fill_(7)
        assert part.eq(7).all() and turned.eq(7).all()
    assert step(y, y)[3] and step.num_traces == 2


def test_the_gradient_of_a_cpu_argument_is_refused_and_its_class_kept() -> None:
    weight = torch.nn.Parameter(batch(3))

    def fn(x: torch.Tensor, w: torch.Tensor) -> Any:
        (w.to("jax") * x).sum().backward()

    with pytest.raises(spmd.TraceError, match="the backward pass gives it a gradient"):
        spmd.compile(fn)(batch(3).to("jax"), weight)
    assert weight.grad is None
    described = spmd.compile(lambda w: (isinstance(w, torch.nn.Parameter), type(w), vars(w), copy.deepcopy(w), str(w)))
    for _ in range(2):
        is_parameter, kind, attributes, copied, text = described(weight)
        assert is_parameter and kind is type(copied) is torch.nn.Parameter and attributes == {}
        assert torch.equal(copied, weight) and copied is not weight and text == str(weight)
    with pytest.raises(spmd.TraceError, match="a CPU tensor of class Named"):
        spmd.compile(lambda x: x.to("jax"))(batch(3).as_subclass(Named))


class Named(torch.Tensor):
    pass


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_cpu_constant_that_changes_retraces(shape: tuple[int, ...]) -> None:
    constant = torch.full(shape, 2.0)
    step = spmd.compile(lambda x: x * (constant if not shape else constant.to("jax")))
    x = torch.ones(3).to("jax")
    assert step(x).tolist() == step(x).tolist() == [2.0] * 3
    constant.mul_(2)
    assert step(x).tolist() == [4.0] * 3
    constant = torch.full(shape, 7.0)
    assert step(x).tolist() == [7.0] * 3
    assert step.num_traces == 3
    assert "the content of constant changed" in step.retraces[0] and "constant is another tensor" in step.retraces[1]


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_a_sparse_constant_of_the_host_is_watched_and_as_an_argument_refused(layout: torch.layout) -> None:
    constant = torch.eye(3).to_sparse(layout=layout)
    step = spmd.compile(lambda x: constant.to_dense().to("jax") @ x)
    x = torch.ones(3).to("jax")
    assert step(x).tolist() == step(x).tolist() == [1.0] * 3
    (constant._values() if layout == torch.sparse_coo else constant.values()).mul_(2)
    assert step(x).tolist() == [2.0] * 3 and step.num_traces == 2
    with pytest.raises(spmd.TraceError, match=r"layout sparse_\w+, and device 'jax' has only dense tensors(?s:.*)fix: pass x.to_dense\(\)"):
        spmd.compile(lambda x, a: a.to_dense().to("jax") @ x)(x, constant)


def test_a_view_of_a_cpu_constant_that_changes_retraces() -> None:
    constant = torch.full((4,), 2.0)
    step = spmd.compile(lambda x: x * constant[:2].to("jax"))
    x = torch.ones(2).to("jax")
    step(x)
    constant.mul_(2)
    assert step(x).tolist() == [4.0] * 2


DRAWS: dict[str, tuple[Callable[[], Any], str]] = {
    "python": (random.random, "Python's random"),
    "numpy": (lambda: float(np.random.rand()), "numpy.random"),
    "torch": (lambda: torch.rand(2).to("jax"), "torch's CPU generator"),
}


@pytest.mark.parametrize("name", list(DRAWS))
def test_random_numbers_of_the_host_are_refused_and_put_back(name: str) -> None:
    draw, title = DRAWS[name]
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    with pytest.raises(spmd.TraceError, match=f"draws random numbers on the host, from {title}"):
        spmd.compile(lambda x: x * draw())(torch.ones(2).to("jax"))
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_the_seed_of_a_loader_that_a_step_iterates_is_named() -> None:
    loader = torch.utils.data.DataLoader(torch.arange(8.0).to("jax"), batch_size=4)
    batches = list(loader)
    step = spmd.compile(lambda batches: sum(batch.sum() for batch in batches))
    with pytest.raises(spmd.TraceError, match=r"DataLoader draws too: a seed(?s:.*)loop over batches = list\(loader\)"):
        spmd.compile(lambda: sum(batch.sum() for batch in loader))()
    assert step(batches).item() == 28.0


GENERATORS: dict[str, tuple[Any, Any, str]] = {
    "torch, from the step": (None, lambda _: torch.Generator().manual_seed(3).initial_seed(), "a Generator was seeded or drawn from"),
    "torch": (torch.Generator(), lambda g: torch.rand(2, generator=g), "a Generator was seeded or drawn from"),
    "numpy": (np.random.default_rng(0), lambda g: g.random(), "a Generator from before the call was seeded or drawn from"),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_the_host_is_refused_in_words_that_are_true(name: str) -> None:
    generator, use, text = GENERATORS[name]
    with pytest.raises(spmd.TraceError, match=f"{text}: random numbers of the host"):
        spmd.compile(lambda x: (use(generator), x)[1])(torch.ones(2).to("jax"))


def test_the_seed_cannot_be_set_inside() -> None:
    with pytest.raises(spmd.TraceError, match="sets the random seed"):
        spmd.compile(lambda x: (torch.manual_seed(1), x)[1])(torch.ones(1).to("jax"))


def test_output_is_written_while_the_function_is_traced(capsys: pytest.CaptureFixture[str]) -> None:
    step = spmd.compile(lambda x: (print("traced"), x * 2)[1])
    for _ in range(3):
        step(torch.ones(2).to("jax"))
    assert capsys.readouterr().out == "traced\n"
