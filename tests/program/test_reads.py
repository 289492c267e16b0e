"""Python values that a compiled function reads: a change of one is noticed, and the changes it makes itself happen in every call."""

import pickle
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

import spmd
from spmd.program.reads import _places_read
from spmd.program.reads._library import is_recorded
from tests.oracle import assert_same, batch, twins

SCALE = 2.0


def scaled_by_global(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


@dataclass
class Config:
    scale: float = 2.0
    unread: float = 0.0


class Base:
    scale = 2.0
    factor = 2.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return self._by_helper(x)

    def _by_helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class ConfiguredLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.config.scale


def in_global(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    return lambda x: scaled_by_global(x), lambda v: monkeypatch.setitem(globals(), "SCALE", v)


def in_closure(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    scale = 2.0

    def write(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda x: x * scale, write


def in_dict(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    config = {"model": {"scale": 2.0}}
    return lambda x: x * config["model"]["scale"], lambda v: config["model"].update(scale=v)


def in_list(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    scales = [1.0, 2.0]
    return lambda x: x * scales[1], lambda v: scales.__setitem__(1, v)


def in_dataclass(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    config = Config()
    return lambda x: x * config.scale, lambda v: setattr(config, "scale", v)


def in_namespace(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    config = types.SimpleNamespace(model=types.SimpleNamespace(scale=2.0))
    return lambda x: x * config.model.scale, lambda v: setattr(config.model, "scale", v)


def in_class(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    return lambda x: x * Base.factor, lambda v: monkeypatch.setattr(Base, "factor", v)


def in_method(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    held = Base()
    return lambda x: held.scaled(x), lambda v: setattr(held, "scale", v)


def in_module(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    layer = nn.Sequential(Layer(), nn.ReLU())
    return lambda x: layer(x), lambda v: setattr(layer[0], "scale", v)


def in_module_method(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    layer = Layer()
    return lambda x: layer.encode(x), lambda v: setattr(layer, "scale", v)


def in_module_config(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    layer = ConfiguredLayer()
    return lambda x: layer(x), lambda v: setattr(layer.config, "scale", v)


def in_a_decorated_helper(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Callable[[float], None]]:
    config = Config()
    inner = spmd.compile(lambda x: x * config.scale)
    return lambda x: inner(x), lambda v: setattr(config, "scale", v)


PLACES = [
    in_global,
    in_closure,
    in_dict,
    in_list,
    in_dataclass,
    in_namespace,
    in_class,
    in_method,
    in_module,
    in_module_method,
    in_module_config,
    in_a_decorated_helper,
]


@pytest.mark.parametrize("place", PLACES, ids=[p.__name__ for p in PLACES])
def test_a_changed_value_is_used_with_one_retrace(place: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, write = place(monkeypatch)
    step = spmd.compile(fn)
    x = torch.ones(2).to("jax")
    write(2.0)
    got = [step(x)[0].item(), step(x)[0].item()]
    write(3.0)
    got += [step(x)[0].item(), step(x)[0].item()]
    write(2.0)
    got.append(step(x)[0].item())
    assert got == [2.0, 2.0, 3.0, 3.0, 2.0]
    assert step.num_traces == 2
    assert "changed from 2.0 to 3.0" in step.retraces[0]


def test_a_value_that_the_function_does_not_read_costs_nothing() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.epoch, self.history = 0, [0.0]
            self.weight = torch.ones(2).to("jax")

        @spmd.compile
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    trainer = Trainer()
    for _ in range(3):
        trainer.history.append(trainer.step(torch.ones(2).to("jax")).sum().item())
        trainer.epoch += 1
    assert trainer.step.num_traces == 1


def test_the_work_of_a_trace_grows_with_the_number_of_modules_and_not_with_its_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """`named_modules` asks for every module whether it is in a set of those before it."""

    def num_searched(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers))).to("jax")
        searched: list[Any] = []

        def objects_in(value: Any, **options: Any) -> list[Any]:
            members = [value, *value] if isinstance(value, (set, tuple, list)) else [value]
            searched.extend(members)
            return list(original(value, **options))

        monkeypatch.setattr(_places_read, "objects_in", objects_in)
        step = spmd.compile(lambda x: x * len([name for name, _ in model.named_modules() if name]))
        assert step(torch.ones(2, device="jax")).tolist() == [layers] * 2
        return len(searched)

    original = _places_read.objects_in
    small, large = num_searched(20), num_searched(80)
    assert 0 < large < 5 * small


def test_a_tensor_that_an_attribute_holds_is_read_anew() -> None:
    class Batches:
        current = torch.ones(2)

    held = Batches()
    step = spmd.compile(lambda: held.current * 2)
    for value in (1.0, 3.0, 3.0):
        if value != getattr(held, "value", None):
            held.current, held.value = torch.full((2,), value).to("jax"), value
        assert step().tolist() == [2 * value] * 2
    assert step.num_traces == 2


def test_a_counter_in_the_function_counts_every_call() -> None:
    counter, log = types.SimpleNamespace(calls=0), []

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        counter.calls += 1
        log.append(counter.calls)
        return x * counter.calls

    x = torch.ones(1).to("jax")
    assert [step(x).item() for _ in range(4)] == [1.0, 2.0, 3.0, 4.0]
    assert log == [1, 2, 3, 4]
    assert step.num_traces == 2  # from the second trace on the count is an input


def test_a_flag_set_in_the_function_is_set_again_by_every_call() -> None:
    layer = Layer()

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        layer.scale = 5.0
        return layer(x)

    x = torch.ones(1).to("jax")
    for _ in range(3):
        layer.scale = 2.0
        assert step(x).item() == 5.0
        assert layer.scale == 5.0
    assert step.num_traces == 1


class Averaged(nn.Module):
    """Keeps a running mean by assignment or in place."""

    mean: torch.Tensor

    def __init__(self, in_place: bool, as_buffer: bool) -> None:
        super().__init__()
        self.in_place = in_place
        if as_buffer:
            self.register_buffer("mean", torch.zeros(()))
        else:
            self.mean = torch.zeros((), device="jax")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.mean * 0.5 + x.mean() * 0.5
        if self.in_place:
            self.mean.copy_(new)
        else:
            self.mean = new
        return x - self.mean


@pytest.mark.parametrize("as_buffer", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_running_mean_is_torchs_and_one_program(in_place: bool, as_buffer: bool) -> None:
    model = Averaged(in_place, as_buffer).to("jax")
    step = spmd.compile(lambda x: model(x))
    held = model.mean
    assert [step(torch.ones(2).to("jax"))[0].item() for _ in range(4)] == [0.5, 0.25, 0.125, 0.0625]
    assert (model.mean.item(), step.num_traces) == (0.9375, 1)
    assert (held.item(), held is model.mean) == ((0.9375, True) if in_place else (0.0, False))


def test_a_loss_that_a_layer_leaves_on_itself_is_part_of_the_program() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.extra: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.extra = x.square().mean()
            return self.linear(x)

    host, device = twins(Routed)
    step = spmd.compile(lambda x: device(x).sum() + device.extra)
    for i in range(4):
        x = batch(4, 8, seed=i)
        assert_same(step(x.to("jax")), host(x).sum() + host.extra)
        assert_same(device.extra, host.extra)
    assert step.num_traces <= 2


def test_a_cache_filled_in_the_first_call_holds_its_values_afterwards() -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cached: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.cached is None:
                self.cached = torch.arange(x.shape[-1], device=x.device).float().cos()
            return x * self.cached

    host, device = twins(Rotary)
    step = spmd.compile(lambda x: device(x))
    for i in range(3):
        x = batch(4, 8, seed=i)
        assert_same(step(x.to("jax")), host(x))
    assert_same(device(x.to("jax")), host(x))
    assert_same(device.cached, host.cached)
    assert step.num_traces == 2  # the branch that fills it, and the one that finds it


def test_a_function_may_do_other_things_while_its_cache_is_empty() -> None:
    def run(held: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        is_first = not held
        held["mask"] = torch.ones(2, device=x.device) * (len(held) + 1)
        return x + held["mask"] if is_first else x - held["mask"]

    ours, torchs = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    step = spmd.compile(lambda x: run(ours, x))
    for _ in range(3):
        assert_same(step(torch.ones(2).to("jax")), run(torchs, torch.ones(2)))
        for held in (ours, torchs):
            held["mask"].mul_(2)


def test_hidden_state_that_starts_in_the_first_call_goes_on_from_it() -> None:
    def run(held: types.SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
        if held.state is None:
            held.state = torch.zeros_like(x)
        held.state = held.state * 0.5 + x
        return held.state * 1

    ours, torchs = types.SimpleNamespace(state=None), types.SimpleNamespace(state=None)
    step = spmd.compile(lambda x: run(ours, x))
    for i in range(4):
        assert_same(step(torch.ones(2).to("jax") * i), run(torchs, torch.ones(2) * i))
        assert_same(ours.state, torchs.state)
    assert step.num_traces == 2


def test_a_list_that_the_function_appends_to_grows_in_every_call() -> None:
    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append(len(self.seen))
            return x * len(self.seen)

    model = Recording()
    step = spmd.compile(lambda x: model(x))
    assert [step(torch.ones(1).to("jax")).item() for _ in range(3)] == [1.0, 2.0, 3.0]
    assert model.seen == [0, 1, 2]
    assert "seen has 1 items, it had 0" in step.retraces[0]


def test_an_attribute_that_appears_later_is_seen() -> None:
    held = types.SimpleNamespace()
    step = spmd.compile(lambda x: x * getattr(held, "scale", 2.0) if not hasattr(held, "scale") else x * held.scale)
    x = torch.ones(1).to("jax")
    first = step(x).item()
    held.unread = 1
    second = step(x).item()
    held.scale = 5.0
    assert (first, second, step(x).item(), step.num_traces) == (2.0, 2.0, 5.0, 2)


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.is_double = False

    @property
    def forward(self) -> Any:  # type: ignore[override]
        return self.double_ if self.is_double else self.triple_

    def double_(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def triple_(self, x: torch.Tensor) -> torch.Tensor:
        return x * 3


def test_a_property_that_finds_forward_is_recorded() -> None:
    model, x = Switched(), torch.ones(1).to("jax")
    step = spmd.compile(lambda x: model(x))
    for model.is_double in (False, True, False):
        assert step(x).item() == (2.0 if model.is_double else 3.0)


def test_a_hook_that_removes_itself_is_gone_in_the_next_call() -> None:
    model, x = nn.Identity(), torch.ones(1).to("jax")

    def once(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return out * 10

    handle = model.register_forward_hook(once)
    step = spmd.compile(lambda x: model(x))
    assert [step(x).item() for _ in range(3)] == [10.0, 1.0, 1.0]
    assert not model._forward_hooks


def test_a_hook_of_several_gradients_is_removed_by_every_call() -> None:
    weights, seen = [nn.Parameter(torch.ones(1, device="jax")) for _ in range(2)], []

    @spmd.compile
    def step(x: torch.Tensor) -> None:
        handle = torch.autograd.graph.register_multi_grad_hook(weights, lambda grads: seen.append(len(grads)))
        (weights[0] * weights[1] * x).sum().backward()
        handle.remove()
        for weight in weights:
            weight.grad = None

    for _ in range(3):
        step(torch.ones(1).to("jax"))
    assert seen == [2, 2, 2]
    assert not any(weight._backward_hooks for weight in weights)


def test_what_a_text_shows_of_an_array_is_read() -> None:
    array, seen = np.array(1.5), []

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(f"{array:.2f} {array!s} {array}")
        return x * 2

    for array[...] in (1.5, 2.5):
        step(torch.ones(1).to("jax"))
    assert seen == ["1.50 1.5 1.5", "2.50 2.5 2.5"]


@pytest.mark.parametrize(
    ("module", "is_looked_into"),
    [
        *[("torch.functional", False), ("torch.nn.modules.linear", True), ("einops.einops", False), ("einops.layers.torch", True)],
        *[("einx._src.frontend.backend", False), ("einx.nn.torch", True), ("x_transformers.x_transformers", True), ("__main__", True)],
    ],
)
def test_a_library_is_taken_as_a_whole_but_for_the_objects_that_it_gives(module: str, is_looked_into: bool) -> None:
    assert is_recorded(module) is is_looked_into


def test_a_list_that_is_mapped_is_read_with_its_length() -> None:
    held = [1.0, 2.0]
    step, x = spmd.compile(lambda x: [x * value for value in map(float, held)]), torch.ones(1).to("jax")
    for change in (
        lambda: None,
        lambda: held.__setitem__(0, 5.0),
        lambda: held.append(9.0),
    ):  # the second makes the item a number that varies
        change()
        assert [found.item() for found in step(x)] == held


def test_a_pickle_of_numbers_that_change_is_pythons() -> None:
    held: dict[str, Any] = {"n": 0}
    step, x = spmd.compile(lambda x: (x, pickle.dumps(held))), torch.ones(1).to("jax")
    for held["n"] in range(4):
        assert step(x)[1] == pickle.dumps(held)
