"""What a function can reach, found without running it: modules and their names, optimizers, tensors, of which hooks too."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd
from spmd.program.find._discover import Reachable, reachable

MODEL = nn.Linear(2, 2).to("jax")
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
step = nn.Linear(3, 3).to("jax")  # a global that has the name of a method


class Holder:
    """Holds a model that its methods name, and another that no function names."""

    shared = nn.Linear(2, 2).to("jax")

    def __init__(self) -> None:
        self.model, self.unnamed = nn.Linear(2, 2).to("jax"), nn.Linear(2, 2).to("jax")

    def run(self) -> Any:
        return self.model

    def __call__(self) -> Any:
        return self.inner

    @property
    def inner(self) -> Any:
        return self.model

    @staticmethod
    def still() -> Any:
        return MODEL

    @classmethod
    def of_class(cls) -> Any:
        return OPTIMIZER


class Slotted:
    """An object without a dict of attributes."""

    __slots__ = ("model",)


def named(found: Reachable) -> dict[str, nn.Module]:
    return dict(found.modules.values())


def look(fn: Any, *args: Any, **kwargs: Any) -> Reachable:
    return reachable(fn, args, kwargs)


def by_global() -> Any:
    return MODEL


def by_an_inner_function() -> Any:
    return lambda: [MODEL for _ in range(2)]


def by_another_function() -> Any:
    return by_global()


def by_a_default(model: Any = MODEL) -> Any:
    return model


def by_a_keyword_default(*, model: Any = MODEL) -> Any:
    return model


@functools.wraps(by_global)
def by_what_it_wraps() -> Any:
    return None


def by_closure(model: Any) -> Callable[[], Any]:
    return lambda: model


def by_argument(model: Any) -> None: ...


def first(model: Any, *args: Any) -> Any:
    return model


@pytest.mark.parametrize(
    "fn",
    [
        *(by_global, by_an_inner_function, by_another_function, by_a_default, by_a_keyword_default, by_what_it_wraps),
        by_closure(MODEL),
        by_closure([{"net": (MODEL,)}]),
        functools.partial(first, MODEL),
        functools.partial(by_argument, model=MODEL),
        by_closure(functools.partial(first, MODEL)),
        MODEL,
        MODEL.forward,
        Holder.still,
    ],
    ids=lambda fn: getattr(fn, "__qualname__", type(fn).__name__),
)
def test_a_model_is_found_wherever_a_function_can_name_it(fn: Any) -> None:
    assert [id(m) for _, m in look(fn).modules.values()] == [id(MODEL)]


@pytest.mark.parametrize("kind", ["bound method", "callable object", "closure", "argument"])
def test_of_an_object_the_attributes_count_that_a_function_names(kind: str) -> None:
    one = Holder()

    def reads() -> Any:
        return one.model

    def takes(one: Any) -> Any:
        return one.model

    found = {"bound method": (one.run,), "callable object": (one,), "closure": (reads,), "argument": (takes, one)}[kind]
    assert named(look(*found)) == {"model": one.model}


def test_the_code_of_a_library_is_not_searched_and_its_objects_are_not_opened() -> None:
    inside = torch.utils.data.TensorDataset(torch.ones(2, device="jax"))

    def reads() -> Any:
        return inside.tensors

    assert not look(reads).tensors
    assert not look(functools.partial(torch.add, 1)).modules


def test_a_class_brings_the_methods_that_are_named() -> None:
    def makes() -> Any:
        return Holder.of_class()

    found = look(makes)
    assert [id(o) for o in found.optimizers] == [id(OPTIMIZER)] and not found.modules


def test_the_name_of_a_method_is_not_the_global_of_that_name() -> None:
    def calls(optimizer: Any) -> None:
        optimizer.step()

    found = look(calls, OPTIMIZER)
    assert [id(o) for o in found.optimizers] == [id(OPTIMIZER)]
    assert not found.modules


def test_a_global_among_more_than_256_names_is_found() -> None:
    source = "def long():\n" + "".join(f"    x.a{i}\n" for i in range(600)) + "    return last\n"
    scope: dict[str, Any] = {"__name__": __name__, "x": None, "last": MODEL}
    exec(source, scope)
    assert named(look(scope["long"])) == {"last": MODEL}


def test_a_name_that_is_bound_later_is_passed_over() -> None:
    def reads() -> Any:
        return later

    assert not look(reads).modules
    later = MODEL
    assert named(look(reads)) == {"later": MODEL}


@pytest.mark.parametrize(("levels", "is_found"), [(4, True), (5, False)])
def test_containers_are_opened_four_levels_deep(levels: int, is_found: bool) -> None:
    nest: Any = MODEL
    for _ in range(levels - 1):
        nest = [nest]
    assert bool(look(by_closure(nest)).modules) is is_found


def test_what_holds_itself_is_walked_once() -> None:
    own: list[Any] = [MODEL]
    own.append(own)
    assert len(look(by_closure(own)).modules) == 1


class Unbuilt:
    """As a lazily built settings object: its class is that of an object which it would have to build."""

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("built")


def test_an_object_is_not_built_to_learn_its_class() -> None:
    settings = {"lazy": Unbuilt(), "model": MODEL}
    assert len(look(by_closure(settings)).modules) == 1


def test_an_object_without_attributes_of_its_own_is_passed_over() -> None:
    one = Slotted()
    one.model = MODEL

    def reads() -> Any:
        return one.model

    assert not look(reads).modules


def test_modules_are_named_by_what_leads_to_them() -> None:
    nets = {"body": nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))}
    rows = [nn.Linear(2, 2)]

    def reads(head: Any, *, tail: Any) -> Any:
        return nets, rows, head, tail

    found = look(reads, nn.Linear(2, 2), tail=nn.Linear(2, 2))
    assert set(named(found)) == {"body", "rows[0]", "head", "args"}
    assert [name for name, _ in found.all_modules()] == ["body", "0", "1", "1.0", "rows[0]", "head", "args"]


def test_a_module_under_two_roots_is_told_once() -> None:
    inner = nn.Linear(2, 2)
    outer = nn.Sequential(inner)

    def reads() -> Any:
        return outer, inner

    assert sorted(id(m) for _, m in look(reads).all_modules()) == sorted([id(outer), id(inner)])


def test_tensors_are_named_and_told_once() -> None:
    net = nn.BatchNorm1d(2).to("jax")
    free = torch.ones(2, device="jax", requires_grad=True)
    optimizer = torch.optim.SGD([net.weight, free, alone := nn.Parameter(torch.ones(2, device="jax"))], lr=0.1)
    host = torch.ones(2)

    def reads() -> Any:
        return net, free, optimizer, net.weight, host

    found = look(reads)
    names = {id(t): name for name, t in found.named_tensors()}
    assert names[id(net.weight)] == "net.weight" and names[id(net.running_mean)] == "net.running_mean"
    assert names[id(alone)] == "a parameter of an optimizer"
    assert len(names) == len(found.device_tensors()) == 7
    assert [(name, id(t)) for name, t in found.cpu_tensors()] == [("a tensor that the function reads", id(host))]
    assert {id(t) for t in found.leaves()} == {id(t) for t in (net.weight, net.bias, free, alone)}


def test_a_tensor_among_the_arguments_is_no_tensor_in_reach() -> None:
    assert not look(lambda x: x, torch.ones(2, device="jax"), [torch.ones(2, device="jax")]).device_tensors()


def test_an_optimizer_of_another_device_is_left_alone() -> None:
    elsewhere = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert not look(by_closure(elsewhere)).optimizers


def test_state_of_optimizers_is_told_by_what_lies_on_the_device() -> None:
    weight = nn.Parameter(torch.ones(2, device="jax"))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    found = look(by_closure(optimizer))
    assert not found.optimizer_tensors()
    weight.grad = torch.ones(2, device="jax")
    optimizer.step()
    state = optimizer.state[weight]
    assert {id(t) for t in found.optimizer_tensors()} == {id(t) for t in state.values() if t.device.type == "jax"} != set()


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_an_optimizer_that_a_gradient_hook_steps_is_found_where_hooks_are_asked_for(register: str) -> None:
    weight = nn.Parameter(torch.ones(2, device="jax"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    getattr(weight, register)(lambda *_: optimizer.step())
    found = look(lambda: weight)
    assert not found.optimizers
    found.add_hooks()
    assert [id(o) for o in found.optimizers] == [id(optimizer)]


def test_what_is_met_later_is_added_with_what_it_can_reach() -> None:
    one = Holder()
    found = look(lambda: None)
    found.add(one.run)
    assert named(found) == {"model": one.model}


class EqualClasses(type):
    def __eq__(cls, other: object) -> bool:
        return cls is other


class Unhashable(metaclass=EqualClasses):
    factor = 2


def test_a_class_that_cannot_be_hashed_is_refused_by_name() -> None:
    instance = Unhashable()
    step = spmd.compile(lambda x: x * instance.factor)
    with pytest.raises(spmd.TraceError, match=r"class Unhashable, which a compiled function reaches, cannot be hashed"):
        step(torch.ones(2).to("jax"))
