"""Generators of the device as arguments of a compiled step, and those that are replaced between calls: their state is an input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import mesh
import spmd
from spmd.base._torch import torch_at_least

pytestmark = pytest.mark.skipif(not torch_at_least("2.13"), reason="torch.Generator cannot be made for a device written in Python")


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device="jax").manual_seed(seed)


def drawn(g: torch.Generator) -> torch.Tensor:
    return torch.randint(1000, (4,), device="jax", generator=g)


class Sampler:
    def __init__(self, seed: int) -> None:
        self.generator = generator(seed)


def through_methods(g: torch.Generator) -> Any:
    state, other = g.get_state(), g.clone_state()
    first, again = drawn(g), drawn(other)
    g.set_state(state)
    return first, again, drawn(g), g.manual_seed(9), drawn(g), g.get_state()


def sampled(shape: torch.Size, g: torch.Generator | None = None) -> torch.Tensor:
    """As in pipelines of diffusers."""
    device = torch.device("jax") if g is None or g.device.type != "jax" else g.device
    return sum((torch.randint(1000, shape, generator=g, device=device) for _ in range(3)), torch.zeros(shape, device=device))


STEPS: dict[str, tuple[Callable[..., Any], Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]], int]] = {
    "argument": (drawn, lambda k: ((generator(k),), {}), 1),
    "keyword": (lambda generator=None: drawn(generator), lambda k: ((), {"generator": generator(k)}), 1),
    "list": (lambda gs: drawn(gs[0]) - drawn(gs[1]), lambda k: (([generator(k), generator(k + 1)],), {}), 1),
    "object": (lambda sampler: drawn(sampler.generator), lambda k: ((Sampler(k),), {}), 1),
    "two draws": (lambda g: (drawn(g), drawn(g)), lambda k: ((generator(k),), {}), 1),
    "returned": (lambda g: (drawn(g), g), lambda k: ((generator(k),), {}), 1),
    "twice": (lambda g, h: drawn(g) - drawn(h), lambda k: ((g := generator(k), g), {}), 1),
    "or none": (lambda g: 0 if g is None else drawn(g), lambda k: ((generator(k) if k % 2 else None,), {}), 2),
    "methods": (through_methods, lambda k: ((generator(k),), {}), 1),
    "diffusers": (sampled, lambda k: ((torch.Size([2, 3]), generator(k)), {}), 1),
    "seed": (lambda g: (drawn(g), g.initial_seed()), lambda k: ((generator(k // 2),), {}), 2),
    "large seed": (lambda g: (drawn(g), g.initial_seed()), lambda k: ((generator(2**63 + 5),), {}), 1),
}


def shown(value: Any, args: Any) -> Any:
    if isinstance(value, torch.Generator):
        assert any(value is one for one in args)
        return value.get_state().tolist()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [shown(part, args) for part in value] if isinstance(value, tuple) else value


def states(args: Any, kwargs: Any) -> list[Any]:
    found = [part for value in (*args, *kwargs.values()) for part in (value if isinstance(value, list) else [value])]
    found = [value.generator if isinstance(value, Sampler) else value for value in found]
    return [(g.get_state().tolist(), g.initial_seed()) for g in found if isinstance(g, torch.Generator)]


@pytest.mark.parametrize("name", STEPS)
def test_a_new_generator_for_each_call_draws_as_in_eager_code(name: str) -> None:
    fn, given, num_traces = STEPS[name]
    step = spmd.compile(fn)
    for k in range(4):
        (args, kwargs), (eager_args, eager_kwargs) = given(k), given(k)
        assert shown(step(*args, **kwargs), args) == shown(fn(*eager_args, **eager_kwargs), eager_args)
        assert states(args, kwargs) == states(eager_args, eager_kwargs)
    assert step.num_traces == num_traces


def test_one_generator_goes_on_from_call_to_call() -> None:
    step, given, eager = spmd.compile(drawn), generator(3), generator(3)
    for _ in range(3):
        assert torch.equal(step(given), drawn(eager))
    assert given.get_state().tolist() == eager.get_state().tolist()
    assert step.num_traces == 1


def put(holder: Any, k: int) -> None:
    holder.generator = generator(k)


def put_in_list(holder: Any, k: int) -> None:
    holder.generator = [generator(k)]


def put_in_place(holder: Any, k: int) -> None:
    if not isinstance(holder.generator, list):
        holder.generator = [generator(0)]
    holder.generator[0] = generator(k)


@pytest.mark.parametrize(
    "replace, fn",
    [
        (put, lambda holder: drawn(holder.generator)),
        (put, lambda holder: sampled(torch.Size([3]), holder.generator)),
        (put_in_list, lambda holder: drawn(holder.generator[0])),
        (put_in_place, lambda holder: drawn(holder.generator[0])),
    ],
)
def test_a_generator_that_is_replaced_between_calls_is_traced_twice(replace: Callable[[Any, int], None], fn: Callable[[Any], Any]) -> None:
    holder = Sampler(0)
    step = spmd.compile(lambda: fn(holder))
    for k in range(5):
        replace(holder, k)
        found = step(), step()
        replace(holder, k)
        assert [t.tolist() for t in found] == [fn(holder).tolist(), fn(holder).tolist()]
    assert step.num_traces == 2


def test_one_that_is_a_key_is_known_by_identity() -> None:
    holder, names = Sampler(0), dict[torch.Generator, int]()
    step = spmd.compile(lambda x: x * names[holder.generator])
    for k in range(3):
        put(holder, k)
        names[holder.generator] = k
        assert step(torch.ones((), device="jax")).item() == k


def test_a_generator_in_a_closure_that_is_seeded_again_gives_its_seed() -> None:
    g = generator(1)
    step = spmd.compile(lambda: (drawn(g), g.initial_seed()))
    assert [step()[1] for _ in range(2)] == [1, 1]
    g.manual_seed(7)
    assert [step()[1] for _ in range(2)] == [7, 7]
    assert step.num_traces == 2


def test_over_a_mesh(mesh_4x2: mesh.Mesh) -> None:
    x = spmd.mark_sharding(torch.arange(8.0).to("jax"), mesh_4x2, (mesh_4x2.axis_names[0],))
    step = spmd.compile(lambda x, g: x + torch.randint(1000, (8,), device="jax", generator=g))
    for k in range(3):
        expected = torch.arange(8.0) + torch.randint(1000, (8,), device="jax", generator=generator(k)).cpu()
        assert torch.equal(step(x, generator(k)).cpu(), expected)
    assert (step.num_traces, step.num_executables) == (1, 1)


OF_HOST: Any = torch.Generator()
OF_DEVICE: Any = torch.Generator("jax") if torch_at_least("2.13") else None
READS: dict[str, Callable[[], Any]] = {
    "seed": lambda: torch.initial_seed(),
    "seed of the default": lambda: torch.default_generator.initial_seed(),
    "seed of the device": lambda: torch.jax.initial_seed(),  # type: ignore[attr-defined]
    "seed of a generator of the host": lambda: OF_HOST.initial_seed(),
    "seed of a generator of the device": lambda: OF_DEVICE.initial_seed(),
    "state of a generator of the host": lambda: OF_HOST.get_state().sum().item(),
}


@pytest.mark.parametrize("name", READS)
def test_what_a_step_reads_of_a_generator_is_that_of_each_call(name: str) -> None:
    step = spmd.compile(lambda x: (x + 1, READS[name]()))
    found = []
    for seed in (1, 1, 2, 3, 1):
        torch.manual_seed(seed)
        for generator in (OF_HOST, OF_DEVICE):
            generator.manual_seed(10 * seed)
        expected = READS[name]()
        assert step(torch.ones(2, device="jax"))[1] == expected
        found.append(expected)
    assert len(set(found)) == 3 and step.num_traces == 3
