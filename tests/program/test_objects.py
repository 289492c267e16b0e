"""Objects that hold tensors go into and out of compiled functions as containers do: a model's cache, a state that is no pytree."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd
from spmd.program.find import _objects
from tests.oracle import batch


class Layer:
    """Keys of one layer, which grow."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.calls = 0

    def add(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.calls += 1
        return self.keys


class Cache:
    """A list of layers, as transformers' caches are."""

    def __init__(self, num_layers: int = 2) -> None:
        self.layers = [Layer() for _ in range(num_layers)]
        self.title = "cache"


def extend(x: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
    sums = [layer.add(x * (i + 1)).sum(0) for i, layer in enumerate(cache.layers)]
    return torch.stack(sums), cache


def contents(cache: Cache) -> list[Any]:
    return [(layer.calls, None if layer.keys is None else layer.keys.cpu()) for layer in cache.layers]


def require_equal(cache: Cache, host: Cache) -> None:
    for (calls, keys), (host_calls, host_keys) in zip(contents(cache), contents(host), strict=True):
        assert calls == host_calls
        torch.testing.assert_close(keys, host_keys)


def test_a_returned_object_holds_the_values_of_its_call() -> None:
    @spmd.compile
    def make(x: torch.Tensor) -> Cache:
        cache = Cache()
        extend(x, cache)
        return cache

    for seed in (1, 2):
        x, host = batch(3, 2, seed=seed), Cache()
        extend(x, host)
        cache = make(x.to("jax"))
        assert type(cache) is Cache and type(cache.layers[0]) is Layer and cache.title == "cache"
        require_equal(cache, host)
    assert make.num_traces == 1


def test_what_a_function_does_to_an_object_it_does_to_the_callers() -> None:
    step = spmd.compile(extend)
    cache, host = Cache(), Cache()
    layers = cache.layers
    for number in range(3):
        x = batch(1, 2, seed=number)
        sums, same = step(x.to("jax"), cache)
        want, _ = extend(x, host)
        torch.testing.assert_close(sums.cpu(), want)
        assert same is cache and cache.layers[0] is layers[0]
        require_equal(cache, host)


def test_another_object_of_the_same_contents_runs_the_same_program() -> None:
    @spmd.compile
    def total(cache: Cache) -> torch.Tensor:
        return torch.stack([layer.keys.sum() for layer in cache.layers if layer.keys is not None]).sum()

    for seed in (1, 2):
        cache, x = Cache(), batch(3, 2, seed=seed)
        extend(x.to("jax"), cache)
        torch.testing.assert_close(total(cache).cpu(), 3 * x.sum())
    assert total.num_traces == 1


def test_a_tensor_written_in_place_stays_the_tensor_it_is() -> None:
    @spmd.compile
    def double(cache: Cache) -> None:
        for layer in cache.layers:
            if layer.keys is not None:
                layer.keys.mul_(2)

    cache, x = Cache(), batch(3, 2)
    extend(x.to("jax"), cache)
    before = cache.layers[1].keys
    double(cache)
    assert cache.layers[1].keys is before
    torch.testing.assert_close(before.cpu(), 4 * x)


def test_a_dict_of_a_class_of_its_own_keeps_items_and_attributes() -> None:
    class Result(OrderedDict[str, Any]):
        pass

    @spmd.compile
    def make(x: torch.Tensor) -> Result:
        result = Result(a=x + 1)
        result.b = x + 2  # type: ignore[attr-defined]
        return result

    result = make(batch(2).to("jax"))
    assert type(result) is Result and list(result) == ["a"]
    torch.testing.assert_close(result["a"].cpu(), batch(2) + 1)
    torch.testing.assert_close(result.b.cpu(), batch(2) + 2)  # type: ignore[attr-defined]


def test_an_object_met_twice_is_put_together_once() -> None:
    cache = Cache()
    extend(batch(2, 2).to("jax"), cache)
    cache.again = cache  # type: ignore[attr-defined]
    flat = _objects.flatten([cache, cache.layers[0]])
    (first, layer), made = _objects.unflatten(flat.leaves, flat.tree)
    assert first is not cache and first.again is first and first.layers[0] is layer
    assert made == [first, layer, first.layers[1]]


@pytest.mark.parametrize("value", [nn.Linear(1, 1), "text", 3, torch.float32, Cache(), len, [1]])
def test_a_value_without_device_tensors_of_its_own_is_no_holder(value: Any) -> None:
    assert not _objects.is_holder(value)


def test_an_object_with_a_compiled_method_is_no_holder() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.state = torch.zeros(2, device="jax")

        @spmd.compile
        def step(self) -> torch.Tensor:
            return self.state + 1

    assert not _objects.is_holder(Trainer())
