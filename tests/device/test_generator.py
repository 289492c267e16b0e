"""A generator of the device: reproducible, independent of the device's own stream, and state of a compiled step."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext

import jax
import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd.base._errors import SpmdError
from spmd.base._torch import torch_at_least


def generator(seed: int = 3) -> torch.Generator:
    if not torch_at_least("2.13"):
        with pytest.raises(NotImplementedError, match="getNewGenerator"):
            torch.Generator(device="jax")
        pytest.skip("before torch 2.13 torch.Generator is a plain class of C++, which refuses every device written in Python")
    return torch.Generator(device="jax").manual_seed(seed)


DRAWS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "rand": lambda g: torch.rand(40, device="jax", generator=g),
    "randn": lambda g: torch.randn(40, device="jax", generator=g),
    "randint": lambda g: torch.randint(1000, (40,), device="jax", generator=g),
    "randperm": lambda g: torch.randperm(40, device="jax", generator=g),
    "normal": lambda g: torch.normal(0.0, 1.0, (40,), device="jax", generator=g),
    "normal of tensors": lambda g: torch.normal(torch.ones(40, device="jax"), torch.ones(40, device="jax"), generator=g),
    "multinomial": lambda g: torch.multinomial(torch.ones(40, device="jax"), 20, generator=g),
    "bernoulli": lambda g: torch.bernoulli(torch.full((40,), 0.5, device="jax"), generator=g),
    "poisson": lambda g: torch.poisson(torch.full((40,), 5.0, device="jax"), generator=g),
    "normal_": lambda g: torch.zeros(40, device="jax").normal_(generator=g),
    "uniform_": lambda g: torch.zeros(40, device="jax").uniform_(generator=g),
    "bernoulli_": lambda g: torch.zeros(40, device="jax").bernoulli_(0.5, generator=g),
    "random_": lambda g: torch.zeros(40, device="jax").random_(1000, generator=g),
    "exponential_": lambda g: torch.zeros(40, device="jax").exponential_(generator=g),
    "kaiming_uniform_": lambda g: torch.nn.init.kaiming_uniform_(torch.zeros(8, 5, device="jax"), generator=g),
    "trunc_normal_": lambda g: torch.nn.init.trunc_normal_(torch.zeros(40, device="jax"), generator=g),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_generator_repeats_its_seed_and_advances(name: str) -> None:
    g = generator()
    first, second = DRAWS[name](g), DRAWS[name](g)
    assert not torch.equal(first, second)
    torch.manual_seed(99)  # the device's own stream has no part in it
    assert torch.equal(DRAWS[name](generator()), first)


def test_drawing_from_a_generator_leaves_the_devices_stream_alone() -> None:
    before = torch.jax.get_rng_state()
    torch.rand(3, device="jax", generator=generator())
    assert torch.equal(torch.jax.get_rng_state(), before)


def test_a_generator_draws_what_the_devices_stream_draws_from_the_same_seed() -> None:
    torch.manual_seed(3)
    expected = [torch.rand(5, device="jax") for _ in range(3)]
    g = generator(3)
    assert all(torch.equal(torch.rand(5, device="jax", generator=g), x) for x in expected)


def test_a_new_generator_has_torchs_default_seed_and_seed_draws_another() -> None:
    assert generator().initial_seed() == 3
    g = torch.Generator("jax")
    assert isinstance(g, torch.Generator)
    assert g.device == torch.device("jax", 0)
    assert g.initial_seed() == torch.Generator().initial_seed()
    assert g.seed() == g.initial_seed() != torch.Generator().initial_seed()
    assert g.manual_seed(5) is g
    assert g.initial_seed() == 5


@pytest.mark.parametrize(
    "copied",
    [
        lambda g: torch.Generator(device="jax").set_state(g.get_state()),
        lambda g: g.clone_state(),
        copy.deepcopy,
        lambda g: pickle.loads(pickle.dumps(g)),
    ],
    ids=["set_state", "clone_state", "deepcopy", "pickle"],
)
def test_a_copy_goes_on_from_where_the_generator_is(copied: Callable[[torch.Generator], torch.Generator]) -> None:
    g = generator()
    torch.rand(2, device="jax", generator=g)
    other = copied(g)
    assert other.initial_seed() == 3
    assert torch.equal(torch.rand(4, device="jax", generator=other), torch.rand(4, device="jax", generator=g))


def test_a_compiled_function_advances_the_generator_as_eager_calls_do() -> None:
    eager, compiled = generator(), generator()

    def draw(g: torch.Generator) -> torch.Tensor:
        order = torch.randperm(3, device="jax", generator=g)
        return torch.randint(1000, (3,), device="jax", generator=g)[order] - torch.randint(9, (3,), device="jax", generator=g)

    step = spmd.compile(lambda: draw(compiled))
    for _ in range(3):
        assert torch.equal(step(), draw(eager))
    assert torch.equal(compiled.get_state(), eager.get_state())
    assert step.num_executables == 1


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises(SpmdError, match=r"cannot draw from a generator on cpu(?s:.*)fix: make it with torch.Generator\(device='jax'\)"):
        torch.zeros(3, device="jax").normal_(generator=torch.Generator())
    with pytest.raises(SpmdError, match="cannot draw from a generator on cpu"):
        torch.randperm(3, device="jax", generator=torch.Generator())


def test_the_cpu_keeps_its_generators() -> None:
    drawn = torch.rand(3, generator=torch.Generator("cpu").manual_seed(0))
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator(device=torch.device("cpu")).manual_seed(0)))
    assert torch.equal(drawn, torch.rand(3, generator=generator(0)))  # cannot be refused, and is at least seeded


def test_no_other_state_is_taken() -> None:
    with pytest.raises(SpmdError, match="not a random state of device 'jax'"):
        generator().set_state(torch.Generator().get_state())


def test_the_devices_state_is_saved_and_restored() -> None:
    torch.manual_seed(1)
    state, states = torch.jax.get_rng_state(), torch.jax.get_rng_state_all()
    first = torch.rand(3, device="jax")
    torch.jax.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="jax"), first)
    torch.jax.set_rng_state_all(states)
    assert torch.equal(torch.rand(3, device="jax"), first)
    with torch.random.fork_rng(devices=[0], device_type="jax"):
        inside = torch.rand(3, device="jax")
    assert torch.equal(torch.rand(3, device="jax"), inside)


@pytest.mark.parametrize("how", ["eager", "compiled", "lazy"])
@pytest.mark.parametrize("name", ["rbg", "unsafe_rbg"])
def test_draws_do_not_depend_on_jaxs_default_generator(name: str, how: str) -> None:
    def draws(like: torch.Tensor, high: int) -> list[torch.Tensor]:
        return [torch.rand_like(like), torch.poisson(like), torch.randint(high, (3,), device="jax"), F.dropout(like)]

    like = torch.full((4,), 2.0, device="jax")
    torch.manual_seed(3)
    wanted = [draw.tolist() for high in (5, 9) for draw in draws(like, high)]
    torch.manual_seed(3)
    run = spmd.compile(draws) if how == "compiled" else draws
    with jax.default_prng_impl(name), spmd.lazy() if how == "lazy" else nullcontext():
        assert [draw.tolist() for high in (5, 9) for draw in run(like, high)] == wanted
