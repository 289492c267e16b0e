"""Cases of Python values: functions chosen at import, classes, containers, identities. See `stored_harness`."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import threading
import types
import weakref
from typing import Any, ClassVar

import torch
from torch.nn import functional

from tests.program.stored_harness import Values, calls, case, inputs

CHOSEN: Any = None
OBJECTS: list[Any] = []
SETTINGS = types.SimpleNamespace(scale=1.0)


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Scaled:
    __slots__ = ("extra", "scale")

    def __init__(self, scale: float, extra: Any = None) -> None:
        self.scale, self.extra = scale, extra

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Holder:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@case
def a_method_of_another_instance(device: str, wrap: Any, changed: bool) -> Values:
    global CHOSEN
    OBJECTS[:] = [Holder(scale=2.0), Holder(scale=3.0)]
    CHOSEN = OBJECTS[changed].apply
    return calls(wrap(lambda x: CHOSEN(x) + len(OBJECTS) + OBJECTS[0].scale + OBJECTS[1].scale), device)


@case
def a_method_of_another_instance_with_slots(device: str, wrap: Any, changed: bool) -> Values:
    first, second = Scaled(2.0), Scaled(3.0)
    method = (second if changed else first).apply
    return calls(wrap(lambda x: method(x) + first.scale * second.scale), device)


@case
def a_partial_of_another_instance(device: str, wrap: Any, changed: bool) -> Values:
    objects = [Holder(scale=2.0), Holder(scale=3.0)]
    part = functools.partial(Holder.apply, objects[changed])
    return calls(wrap(lambda x: part(x) + objects[0].scale * objects[1].scale), device)


@case
def an_object_in_a_tuple(device: str, wrap: Any, changed: bool) -> Values:
    objects = [Holder(scale=2.0), Holder(scale=3.0)]
    pair = (objects[changed], 1)
    return calls(wrap(lambda x: x * pair[0].scale + objects[0].scale * objects[1].scale), device)


@case
def a_shared_dict_of_attributes(device: str, wrap: Any, changed: bool) -> Values:
    first, second = Holder(scale=2.0), Holder()
    second.__dict__ = {"scale": 5.0} if changed else first.__dict__
    return calls(wrap(lambda x: x * first.scale + second.scale), device)


@case
def a_shared_closure_variable(device: str, wrap: Any, changed: bool) -> Values:
    def pair(scale: Any) -> Any:
        return (lambda x: x * scale.scale), (lambda x: x + scale.scale)

    one, two = Holder(scale=2.0), Holder(scale=2.0 if not changed else 9.0)
    first, second = pair(one)
    if changed:
        second = pair(two)[1]
    return calls(wrap(lambda x: second(first(x))), device)


def _wrapping(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        return fn(*args) + 1

    return wrapper


@case
def a_wrapper_around_another_function(device: str, wrap: Any, changed: bool) -> Values:
    global CHOSEN
    CHOSEN = _wrapping(_wrapping(thrice if changed else twice))
    return calls(wrap(lambda x: CHOSEN(x)), device)


@case
def a_cached_function(device: str, wrap: Any, changed: bool) -> Values:
    scale = 3.0 if changed else 2.0
    cached = functools.lru_cache(lambda: scale)
    return calls(wrap(lambda x: x * cached()), device)


@case
def a_cached_result(device: str, wrap: Any, changed: bool) -> Values:
    box = [3.0 if changed else 2.0]
    cached = functools.lru_cache(lambda: box[0])
    cached()
    box[0] = 7.0
    return calls(wrap(lambda x: x * cached()), device)


@case
def a_partial_of_a_partial(device: str, wrap: Any, changed: bool) -> Values:
    part = functools.partial(functools.partial(torch.clamp, min=-0.5 if changed else -0.3), max=0.2)
    return calls(wrap(lambda x: part(x)), device)


@case
def an_attribute_getter(device: str, wrap: Any, changed: bool) -> Values:
    get, holder = operator.attrgetter("high" if changed else "low"), Holder(low=2.0, high=3.0)
    return calls(wrap(lambda x: x * get(holder)), device)


@case
def an_item_getter(device: str, wrap: Any, changed: bool) -> Values:
    get, items = operator.itemgetter(1 if changed else 0), [2.0, 3.0]
    return calls(wrap(lambda x: x * get(items)), device)


@case
def a_method_caller(device: str, wrap: Any, changed: bool) -> Values:
    call = operator.methodcaller("add" if changed else "mul", 3)
    return calls(wrap(lambda x: call(x)), device)


@case
def a_method_of_a_dict(device: str, wrap: Any, changed: bool) -> Values:
    tables = {"scale": 2.0}, {"scale": 3.0}
    get = tables[changed].get
    return calls(wrap(lambda x: x * get("scale") + tables[0]["scale"] * tables[1]["scale"]), device)


def _made_class(changed: bool) -> Any:
    class Made:
        scale = 3.0 if changed else 2.0

        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    return Made


@case
def a_class_made_in_a_function(device: str, wrap: Any, changed: bool) -> Values:
    made = _made_class(changed)()
    return calls(wrap(lambda x: made.apply(x)), device)


class Low:
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x - 1


class High:
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Mixed:
    pass


@case
def mixins_in_another_order(device: str, wrap: Any, changed: bool) -> Values:
    global Mixed
    Mixed = type("Mixed", (High, Low) if changed else (Low, High), {"__module__": __name__})  # type: ignore[misc]
    mixed: Any = Mixed()
    return calls(wrap(lambda x: mixed.apply(x)), device)


class Described:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __get__(self, instance: Any, owner: Any = None) -> float:
        return self.scale


class WithDescriptor:
    scale = Described(2.0)

    @property
    def shift(self) -> float:
        return SETTINGS.scale


@case
def a_descriptor_with_state(device: str, wrap: Any, changed: bool) -> Values:
    vars(WithDescriptor)["scale"].scale = 3.0 if changed else 2.0
    held = WithDescriptor()
    return calls(wrap(lambda x: x * held.scale), device)


@case
def a_property_of_module_state(device: str, wrap: Any, changed: bool) -> Values:
    SETTINGS.scale = 3.0 if changed else 1.0
    held = WithDescriptor()
    return calls(wrap(lambda x: x * held.shift), device)


class Meta(type):
    factor = 2.0

    def __call__(cls, x: Any) -> Any:
        return x * cls.factor


class Called(metaclass=Meta):
    pass


@case
def an_attribute_of_a_metaclass(device: str, wrap: Any, changed: bool) -> Values:
    Meta.factor = 3.0 if changed else 2.0
    return calls(wrap(lambda x: Called(x)), device)


class Level(enum.Enum):
    LOW = 1.0


@case
def the_value_of_an_enum(device: str, wrap: Any, changed: bool) -> Values:
    global Level
    Level = enum.Enum("Level", {"LOW": 3.0 if changed else 2.0}, module=__name__)  # type: ignore[misc]
    level = Level.LOW
    return calls(wrap(lambda x: x * level.value), device)


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0
    parts: tuple[Any, ...] = ()


@case
def a_frozen_dataclass(device: str, wrap: Any, changed: bool) -> Values:
    frozen = Frozen(3.0 if changed else 2.0)
    return calls(wrap(lambda x: x * frozen.scale), device)


@case
def a_default_of_a_dataclass(device: str, wrap: Any, changed: bool) -> Values:
    made = dataclasses.make_dataclass("Made", [("scale", float, 3.0 if changed else 2.0)])
    return calls(wrap(lambda x: x * made().scale), device)


@case
def a_default_of_a_named_tuple(device: str, wrap: Any, changed: bool) -> Values:
    global Point
    Point = collections.namedtuple("Point", "scale", defaults=[3.0 if changed else 2.0])
    Point.__module__ = __name__
    return calls(wrap(lambda x: x * Point().scale), device)


Point: Any = None


@case
def a_default_of_a_function(device: str, wrap: Any, changed: bool) -> Values:
    def scaled(x: torch.Tensor, scale: Any = Holder(scale=3.0 if changed else 2.0)) -> torch.Tensor:  # noqa: B008
        return x * scale.scale

    return calls(wrap(lambda x: scaled(x)), device)


@case
def an_attribute_of_a_function(device: str, wrap: Any, changed: bool) -> Values:
    twice.scale = 3.0 if changed else 2.0  # type: ignore[attr-defined]
    return calls(wrap(lambda x: x * twice.scale), device)  # type: ignore[attr-defined]


@case
def a_simple_namespace(device: str, wrap: Any, changed: bool) -> Values:
    space = types.SimpleNamespace(scale=3.0 if changed else 2.0, act=functional.relu if changed else functional.silu)
    return calls(wrap(lambda x: space.act(x) * space.scale), device)


@case
def a_user_dict(device: str, wrap: Any, changed: bool) -> Values:
    table = collections.UserDict(scale=3.0 if changed else 2.0)
    return calls(wrap(lambda x: x * table["scale"]), device)


class Config(dict[str, Any]):
    __getattr__ = dict.__getitem__


@case
def a_dict_whose_items_are_attributes(device: str, wrap: Any, changed: bool) -> Values:
    config: Any = Config(scale=3.0 if changed else 2.0)
    return calls(wrap(lambda x: x * config.scale), device)


@case
def a_chain_map(device: str, wrap: Any, changed: bool) -> Values:
    low, high = {"scale": 2.0}, {"scale": 3.0}
    chain = collections.ChainMap(*((high, low) if changed else (low, high)))
    return calls(wrap(lambda x: x * chain["scale"] + low["scale"] * high["scale"]), device)


@case
def the_length_of_a_deque(device: str, wrap: Any, changed: bool) -> Values:
    recent: Any = collections.deque([1.0, 2.0], maxlen=3 if changed else 2)

    def step(x: torch.Tensor) -> torch.Tensor:
        recent.append(4.0)
        return x * sum(recent)

    return [*calls(wrap(step), device, 1), list(recent)]


@case
def a_factory_of_a_default_dict(device: str, wrap: Any, changed: bool) -> Values:
    table = collections.defaultdict((lambda: 3.0) if changed else (lambda: 2.0))
    return [*calls(wrap(lambda x: x * table["missing"]), device), dict(table)]


@case
def a_counter(device: str, wrap: Any, changed: bool) -> Values:
    counts = collections.Counter("aab" if changed else "abb")
    return calls(wrap(lambda x: x * counts["a"] + counts.most_common(1)[0][1]), device)


@case
def a_member_of_a_set(device: str, wrap: Any, changed: bool) -> Values:
    names = {"low", "high"} if changed else {"low", "middle"}
    return calls(wrap(lambda x: x * 2 if "high" in names else x * 3), device)


@case
def a_member_of_a_frozen_set(device: str, wrap: Any, changed: bool) -> Values:
    names = frozenset((1, 2)) if changed else frozenset((1, 3))
    return calls(wrap(lambda x: x * 2 if 2 in names else x * 3), device)


@case
def a_set_of_functions(device: str, wrap: Any, changed: bool) -> Values:
    functions = {thrice} if changed else {twice}
    return calls(wrap(lambda x: x * 2 if twice in functions else x * 3), device)


@case
def a_set_of_objects(device: str, wrap: Any, changed: bool) -> Values:
    objects = [Holder(scale=2.0), Holder(scale=3.0)]
    members = {objects[changed]}
    return calls(wrap(lambda x: x * 2 if objects[0] in members else x * 3), device)


@case
def the_order_of_a_set_of_numbers(device: str, wrap: Any, changed: bool) -> Values:
    numbers = {1, 2, 3, 9 if changed else 8}

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * n for n in numbers]

    return [v for found in calls(wrap(step), device) for v in found]


@case
def the_order_of_a_dict(device: str, wrap: Any, changed: bool) -> Values:
    table = {"a": 2.0, "b": 3.0}
    if changed:
        table["a"] = table.pop("a")

    def step(x: torch.Tensor) -> torch.Tensor:
        for value in table.values():
            x = x * value + 1
        return x

    return calls(wrap(step), device)


@case
def a_dict_with_objects_as_keys(device: str, wrap: Any, changed: bool) -> Values:
    one, two = Holder(scale=2.0), Holder(scale=3.0)
    table = {one: 5.0, two: 7.0} if not changed else {two: 5.0, one: 7.0}
    return calls(wrap(lambda x: x * table[one] + one.scale * two.scale), device)


@case
def attributes_that_are_one_object(device: str, wrap: Any, changed: bool) -> Values:
    shared = [1.0]
    held = Holder(first=shared, second=[1.0] if changed else shared)

    def step(x: torch.Tensor) -> torch.Tensor:
        held.first.append(2.0)
        return x * len(held.second)

    return calls(wrap(step), device, 1)


@case
def attributes_that_are_two_objects(device: str, wrap: Any, changed: bool) -> Values:
    shared = [1.0]
    held = Holder(first=shared, second=shared if changed else [1.0])
    return calls(wrap(lambda x: x * 2 if held.first is held.second else x * 3), device)


@case
def an_object_that_is_compared(device: str, wrap: Any, changed: bool) -> Values:
    one, two = Holder(scale=1.0), Holder(scale=1.0)
    held = Holder(first=one, second=two, chosen=two if changed else one)
    return calls(wrap(lambda x: x * 2 if held.chosen is held.first else x * 3), device)


def three_of(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def five_of(x: torch.Tensor) -> torch.Tensor:
    return x * 5


@case
def a_weak_reference(device: str, wrap: Any, changed: bool) -> Values:
    one, two = Holder(scale=2.0), Holder(scale=3.0)
    reference = weakref.ref(two if changed else one)
    return calls(wrap(lambda x: x * reference().scale + one.scale * two.scale), device)  # type: ignore[union-attr]


@case
def which_object_an_argument_is(device: str, wrap: Any, changed: bool) -> Values:
    one, two = Holder(scale=2.0), Holder(scale=2.0)
    step, x = wrap(lambda x, held: x * (3 if held is one else 4)), inputs(device)
    return [step(x, one if changed else two) for _ in range(2)]


@case
def which_function_an_argument_is(device: str, wrap: Any, changed: bool) -> Values:
    step, x = wrap(lambda x, fn: x * (3 if fn is three_of else 4)), inputs(device)
    return [step(x, three_of if changed else five_of) for _ in range(2)]


@case
def an_argument_that_an_object_holds(device: str, wrap: Any, changed: bool) -> Values:
    one, two = Holder(scale=2.0), Holder(scale=2.0)
    held = Holder(inner=one if changed else two)
    step, x = wrap(lambda x, given: x * (3 if given is held.inner else 4)), inputs(device)
    return [step(x, one) for _ in range(2)]


@case
def an_argument_that_is_written_and_a_variable(device: str, wrap: Any, changed: bool) -> Values:
    one, two = Holder(scale=2.0), Holder(scale=2.0)

    def step(x: torch.Tensor, given: Any) -> torch.Tensor:
        given.scale = 5.0
        return x * one.scale

    found = wrap(step)(inputs(device), one if changed else two)
    return [found, one.scale, two.scale]


@case
def a_dead_reference(device: str, wrap: Any, changed: bool) -> Values:
    one, two = Holder(scale=2.0), Holder(scale=3.0)
    reference = weakref.ref(two)
    if changed:
        del two
    return calls(wrap(lambda x: x * one.scale if reference() is None else x * one.scale * 2), device)


@case
def a_reference_to_a_tensor(device: str, wrap: Any, changed: bool) -> Values:
    held = torch.full((4,), 3.0 if changed else 2.0)
    reference = weakref.ref(held)
    return calls(wrap(lambda x: x * reference().to(x.device)), device)  # type: ignore[union-attr]


@case
def mutually_recursive_functions(device: str, wrap: Any, changed: bool) -> Values:
    scale = 3.0 if changed else 2.0

    def even(n: int, x: torch.Tensor) -> torch.Tensor:
        return x if n == 0 else odd(n - 1, x) * scale

    def odd(n: int, x: torch.Tensor) -> torch.Tensor:
        return even(n - 1, x) + 1 if n < 10 else odd(n - 1, x)

    return calls(wrap(lambda x: even(2, x)), device)


@case
def a_structure_that_contains_itself(device: str, wrap: Any, changed: bool) -> Values:
    held: Any = Holder(scale=3.0 if changed else 2.0, items=[])
    held.me = held
    held.items.append(held)
    return calls(wrap(lambda x: x * held.me.items[0].me.scale), device)


class Lying:
    """Runs code for everything that is asked of it."""

    asked: ClassVar[list[str]] = []

    def __init__(self, scale: float) -> None:
        object.__setattr__(self, "scale", scale)

    @property
    def __class__(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return float

    def __getattr__(self, name: str) -> Any:
        Lying.asked.append(name)
        raise RuntimeError(name)

    def __eq__(self, other: object) -> bool:
        Lying.asked.append("eq")
        raise RuntimeError("eq")

    def __repr__(self) -> str:
        Lying.asked.append("repr")
        raise RuntimeError("repr")

    def __reduce__(self) -> Any:
        Lying.asked.append("reduce")
        raise RuntimeError("reduce")

    def __len__(self) -> int:
        Lying.asked.append("len")
        raise RuntimeError("len")

    __hash__ = object.__hash__


@case
def an_object_that_refuses(device: str, wrap: Any, changed: bool) -> Values:
    Lying.asked.clear()
    held = Holder(refusing=Lying(3.0 if changed else 2.0))
    return [*calls(wrap(lambda x: x * held.refusing.scale), device), list(Lying.asked)]


@case
def functions_of_the_same_code(device: str, wrap: Any, changed: bool) -> Values:
    scales = [3.0, 2.0, 4.0] if changed else [2.0, 3.0, 4.0]
    steps = [wrap(lambda x, scale=scale: x * scale) for scale in scales]
    return [v for step in steps for v in calls(lambda x, step=step: step(x), device)]


@case
def a_slice_of_objects(device: str, wrap: Any, changed: bool) -> Values:
    index = types.SimpleNamespace(part=slice(0, 3 if changed else 2))
    return calls(wrap(lambda x: x[:, index.part] * 2), device)


@case
def a_function_in_a_namespace_of_its_own(device: str, wrap: Any, changed: bool) -> Values:
    spaces = [{"torch": torch, "scale": 2.0, "__name__": __name__}, {"torch": torch, "scale": 3.0, "__name__": __name__}]
    for space in spaces:
        exec("def scaled(x):\n    return x * scale", space)
    fn: Any = spaces[changed]["scaled"]
    return calls(wrap(lambda x: fn(x) + spaces[0]["scale"] * spaces[1]["scale"]), device)


@case
def a_generator_in_reach(device: str, wrap: Any, changed: bool) -> Values:
    with open(__file__) as file:
        held = Holder(scale=3.0 if changed else 2.0, numbers=(n for n in range(3)), lock=threading.Lock(), file=file)
        return calls(wrap(lambda x: x * held.scale), device)


@case
def a_long_list_in_reach(device: str, wrap: Any, changed: bool) -> Values:
    held = Holder(scale=3.0 if changed else 2.0, rows=[Holder(i=i) for i in range(20_000)])
    return calls(wrap(lambda x: x * held.scale), device)


@case
def writes_to_lists_and_attributes(device: str, wrap: Any, changed: bool) -> Values:
    held = Holder(seen=[], last=None, total=10.0 if changed else 0.0)

    def step(x: torch.Tensor) -> torch.Tensor:
        held.seen.append("step")
        held.last = x * 2
        held.kept = {"x": x}
        return x + held.total

    found = calls(wrap(step), device)
    return [*found, held.seen, held.last, held.kept["x"]]


@case
def objects_that_are_returned(device: str, wrap: Any, changed: bool) -> Values:
    scale = 3 if changed else 2

    def step(x: torch.Tensor) -> Any:
        y = x * scale
        return Frozen(float(scale), (y, y.view(-1), x)), {"twice": y}, SETTINGS

    step_of: Any = wrap(step)
    frozen, table, settings = step_of(inputs_of(device))
    y, flat, x = frozen.parts
    return [y, flat, x, table["twice"], frozen.scale, y is table["twice"], settings is SETTINGS]


def inputs_of(device: str) -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32).reshape(2, 3).to(device)
