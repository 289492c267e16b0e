"""Places of Python that a function reads, each with a way to change it: the rows of test_python_places."""

import abc
import argparse
import array
import bisect
import builtins
import collections
import collections.abc
import contextvars
import copy
import copyreg
import csv
import ctypes
import dataclasses
import decimal
import enum
import fileinput
import fractions
import functools
import glob
import gzip
import heapq
import importlib
import inspect
import io
import itertools
import json
import logging
import operator
import os
import pickle
import queue
import random
import runpy
import string
import sys
import tempfile
import types
import typing
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageEnhance
import scipy.interpolate
import torch
import torch.nn as nn
import tqdm

Read, Write = Callable[[], Any], Callable[[float], Any]
Place = Callable[[], tuple[Read, Write]]

PLACES: dict[str, Place] = {}
GLOBAL = 2.0
CONFIG = {"scale": 2.0}
LEVEL = contextvars.ContextVar("LEVEL", default=2.0)


def place(make: Place) -> Place:
    PLACES[make.__name__] = make
    return make


def set_global(value: float) -> None:
    global GLOBAL
    GLOBAL = value


class Plain:
    def __init__(self) -> None:
        self.scale = 2.0


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 2.0


class Items:
    def __init__(self) -> None:
        self._values = [2.0]

    def __getitem__(self, index: int) -> float:
        return self._values[index]


class Computed:
    def __init__(self) -> None:
        self._scale = 2.0

    @property
    def scale(self) -> float:
        return self._scale


class Forwarding:
    def __init__(self) -> None:
        self._data = {"scale": 2.0}

    def __getattr__(self, name: str) -> float:
        return self.__dict__["_data"][name]


class Guarded:
    def __init__(self) -> None:
        self.scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Callee:
    def __init__(self) -> None:
        self.scale = 2.0

    def __call__(self) -> float:
        return self.scale


class Comparing:
    def __init__(self) -> None:
        self.scale = 2.0

    def __float__(self) -> float:
        return float(self.scale)

    def __len__(self) -> int:
        return int(self.scale)


class Child(Plain):
    def scaled(self) -> float:
        return super().__getattribute__("scale")


@dataclasses.dataclass
class Data:
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class SlotData:
    scale: float = 2.0


Row = collections.namedtuple("Row", ["scale"])


class Mode(enum.Enum):
    LOW = 2.0
    HIGH = 3.0
    TOP = 5.0


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.config = Plain()
        self.values = [2.0]
        self.register_buffer("count", torch.zeros(()))


class MyList(list[float]):
    pass


class MyDict(dict[str, float]):
    pass


class Doubling(dict[str, float]):
    def __getitem__(self, key: str) -> float:
        return super().__getitem__(key) * 1


def attribute(holder: Any, name: str = "scale") -> tuple[Read, Write]:
    return lambda: getattr(holder, name), lambda v: setattr(holder, name, v)


@place
def in_a_global() -> tuple[Read, Write]:
    set_global(2.0)
    return lambda: GLOBAL, set_global


@place
def in_a_global_dict() -> tuple[Read, Write]:
    CONFIG["scale"] = 2.0
    return lambda: CONFIG["scale"], lambda v: CONFIG.__setitem__("scale", v)


@place
def in_a_closure() -> tuple[Read, Write]:
    scale = 2.0

    def write(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda: scale, write


@place
def in_a_nested_closure() -> tuple[Read, Write]:
    scale = 2.0

    def write(value: float) -> None:
        nonlocal scale
        scale = value

    def outer() -> float:
        def inner() -> float:
            return scale

        return inner()

    return outer, write


@place
def in_an_imported_module() -> tuple[Read, Write]:
    module = sys.modules.setdefault("hyper_parameters_of_a_test", types.ModuleType("hyper_parameters_of_a_test"))
    module.SCALE = 2.0  # type: ignore[attr-defined]

    def read() -> float:
        import hyper_parameters_of_a_test as hyper  # type: ignore[import-not-found]

        return hyper.SCALE

    return read, lambda v: setattr(module, "SCALE", v)


@place
def in_a_module_that_is_replaced() -> tuple[Read, Write]:
    def write(value: float) -> None:
        module: Any = types.ModuleType("replaced_module_of_a_test")
        module.SCALE = value
        sys.modules["replaced_module_of_a_test"] = module

    def read() -> float:
        import replaced_module_of_a_test as hyper  # type: ignore[import-not-found]

        return hyper.SCALE

    write(2.0)
    return read, write


@place
def in_a_builtin() -> tuple[Read, Write]:
    held: Any = builtins
    held.SCALE_OF_A_TEST = 2.0
    return lambda: SCALE_OF_A_TEST, lambda v: setattr(held, "SCALE_OF_A_TEST", v)  # type: ignore[name-defined]  # noqa: F821


@place
def from_an_imported_module() -> tuple[Read, Write]:
    module = sys.modules.setdefault("hyper_parameters_of_a_test", types.ModuleType("hyper_parameters_of_a_test"))
    module.SCALE = 2.0  # type: ignore[attr-defined]

    def read() -> float:
        from hyper_parameters_of_a_test import SCALE  # type: ignore[import-not-found]

        return SCALE

    return read, lambda v: setattr(module, "SCALE", v)


@place
def in_an_attribute() -> tuple[Read, Write]:
    held = Plain()
    return lambda: held.scale, lambda v: setattr(held, "scale", v)


@place
def in_a_dict_that_replaces_the_attributes() -> tuple[Read, Write]:
    held = Plain()
    return lambda: held.scale, lambda v: setattr(held, "__dict__", {"scale": v})


@place
def in_attributes_that_two_objects_share() -> tuple[Read, Write]:
    held, other = Plain(), Plain()
    other.__dict__ = held.__dict__

    def write(value: float) -> None:
        other.__dict__ = {"scale": value}

    return lambda: held.scale * 0 + other.scale, write


@place
def by_getattr() -> tuple[Read, Write]:
    return attribute(Plain())


@place
def by_getattr_with_a_default() -> tuple[Read, Write]:
    held = types.SimpleNamespace()
    return lambda: getattr(held, "scale", 2.0), lambda v: setattr(held, "scale", v)


@place
def by_hasattr() -> tuple[Read, Write]:
    held = types.SimpleNamespace()
    return lambda: held.scale if hasattr(held, "scale") else 2.0, lambda v: setattr(held, "scale", v)


@place
def by_vars() -> tuple[Read, Write]:
    held = Plain()
    return lambda: vars(held)["scale"], lambda v: setattr(held, "scale", v)


@place
def by_dict_of_an_object() -> tuple[Read, Write]:
    held = Plain()
    return lambda: held.__dict__["scale"], lambda v: setattr(held, "scale", v)


@place
def by_attrgetter() -> tuple[Read, Write]:
    held, get = Plain(), operator.attrgetter("scale")
    return lambda: get(held), lambda v: setattr(held, "scale", v)


@place
def by_itemgetter() -> tuple[Read, Write]:
    held, get = {"scale": 2.0}, operator.itemgetter("scale")
    return lambda: get(held), lambda v: held.update(scale=v)


@place
def in_a_slot() -> tuple[Read, Write]:
    held = Slots()
    return lambda: held.scale, lambda v: setattr(held, "scale", v)


@place
def in_a_dataclass() -> tuple[Read, Write]:
    held = Data()
    return lambda: held.scale, lambda v: setattr(held, "scale", v)


@place
def in_a_dataclass_with_slots() -> tuple[Read, Write]:
    held = SlotData()
    return lambda: held.scale, lambda v: setattr(held, "scale", v)


@place
def by_asdict() -> tuple[Read, Write]:
    held = Data()
    return lambda: dataclasses.asdict(held)["scale"], lambda v: setattr(held, "scale", v)


@place
def in_a_frozen_dataclass_that_is_replaced() -> tuple[Read, Write]:
    held = types.SimpleNamespace(config=Frozen())
    return lambda: held.config.scale, lambda v: setattr(held, "config", dataclasses.replace(held.config, scale=v))


@place
def in_a_named_tuple_that_is_replaced() -> tuple[Read, Write]:
    held = types.SimpleNamespace(row=Row(2.0))
    return lambda: held.row.scale, lambda v: setattr(held, "row", held.row._replace(scale=v))


@place
def in_an_enum() -> tuple[Read, Write]:
    held = types.SimpleNamespace(mode=Mode.LOW)
    return lambda: held.mode.value, lambda v: setattr(held, "mode", Mode(v))


@place
def in_a_namespace_of_arguments() -> tuple[Read, Write]:
    held = argparse.Namespace(scale=2.0)
    return lambda: held.scale, lambda v: setattr(held, "scale", v)


@place
def in_a_property() -> tuple[Read, Write]:
    held = Computed()
    return lambda: held.scale, lambda v: setattr(held, "_scale", v)


@place
def by_getitem() -> tuple[Read, Write]:
    held = Items()
    return lambda: held[0], lambda v: held._values.__setitem__(0, v)


@place
def by_dunder_getattr() -> tuple[Read, Write]:
    held = Forwarding()
    return lambda: held.scale, lambda v: held._data.update(scale=v)


@place
def by_dunder_getattribute() -> tuple[Read, Write]:
    held = Guarded()
    return lambda: held.scale, lambda v: setattr(held, "scale", v)


@place
def by_super() -> tuple[Read, Write]:
    held = Child()
    return held.scaled, lambda v: setattr(held, "scale", v)


@place
def by_a_callable_object() -> tuple[Read, Write]:
    held = Callee()
    return lambda: held(), lambda v: setattr(held, "scale", v)


@place
def by_float_of_an_object() -> tuple[Read, Write]:
    held = Comparing()
    return lambda: float(held), lambda v: setattr(held, "scale", v)


@place
def by_len_of_an_object() -> tuple[Read, Write]:
    held = Comparing()
    return lambda: float(len(held)), lambda v: setattr(held, "scale", v)


@place
def in_a_class_attribute() -> tuple[Read, Write]:
    class Settings:
        scale = 2.0

    return lambda: Settings.scale, lambda v: setattr(Settings, "scale", v)


@place
def in_a_base_class() -> tuple[Read, Write]:
    class Base:
        scale = 2.0

    class Derived(Base):
        pass

    held = Derived()
    return lambda: held.scale, lambda v: setattr(Base, "scale", v)


@place
def in_a_dict_of_a_class() -> tuple[Read, Write]:
    class Settings:
        table: dict[str, float] = {"scale": 2.0}  # noqa: RUF012

    return lambda: Settings.table["scale"], lambda v: Settings.table.update(scale=v)


@place
def in_an_attribute_that_shadows_a_class() -> tuple[Read, Write]:
    class Settings:
        scale = 2.0

    held = Settings()
    return lambda: held.scale, lambda v: setattr(held, "scale", v)


@place
def in_a_static_method_that_is_replaced() -> tuple[Read, Write]:
    class Settings:
        @staticmethod
        def scale() -> float:
            return 2.0

    return lambda: Settings.scale(), lambda v: setattr(Settings, "scale", staticmethod(lambda: v))


@place
def in_a_method_that_is_replaced() -> tuple[Read, Write]:
    class Settings:
        def scale(self) -> float:
            return 2.0

    held = Settings()
    return lambda: held.scale(), lambda v: setattr(Settings, "scale", lambda self: v)


@place
def in_a_method_of_the_object_itself() -> tuple[Read, Write]:
    class Settings:
        def scale(self) -> float:
            return 2.0

    held: Any = Settings()
    return lambda: held.scale(), lambda v: setattr(held, "scale", lambda: v)


@place
def in_a_keyword_default() -> tuple[Read, Write]:
    def scaled(*, scale: float = 2.0) -> float:
        return scale

    return lambda: scaled(), lambda v: scaled.__kwdefaults__.update(scale=v)


@place
def in_a_default() -> tuple[Read, Write]:
    def scaled(scale: float = 2.0) -> float:
        return scale

    return lambda: scaled(), lambda v: setattr(scaled, "__defaults__", (v,))


@place
def in_an_attribute_of_a_function() -> tuple[Read, Write]:
    def scaled() -> float:
        return scaled.scale  # type: ignore[attr-defined]

    scaled.scale = 2.0  # type: ignore[attr-defined]
    return lambda: scaled(), lambda v: setattr(scaled, "scale", v)


@place
def in_code_that_is_replaced() -> tuple[Read, Write]:
    def scaled() -> float:
        return 2.0

    return lambda: scaled(), lambda v: setattr(scaled, "__code__", {2.0: scaled, 3.0: three, 5.0: five}[v].__code__)


def three() -> float:
    return 3.0


def five() -> float:
    return 5.0


@place
def in_a_function_that_is_rebound() -> tuple[Read, Write]:
    held = types.SimpleNamespace(fn=lambda: 2.0)
    return lambda: held.fn(), lambda v: setattr(held, "fn", lambda: v)


@place
def in_a_partial() -> tuple[Read, Write]:
    held = functools.partial(lambda scale: scale, scale=2.0)
    return lambda: held(), lambda v: held.keywords.update(scale=v)


@place
def in_a_decorated_function() -> tuple[Read, Write]:
    held = Plain()

    @functools.wraps(three)
    @torch.no_grad()
    def scaled() -> float:
        return held.scale

    return lambda: scaled(), lambda v: setattr(held, "scale", v)


@place
def in_a_dict() -> tuple[Read, Write]:
    held = {"scale": 2.0}
    return lambda: held["scale"], lambda v: held.update(scale=v)


@place
def by_get_of_a_dict() -> tuple[Read, Write]:
    held: dict[str, float] = {}
    return lambda: held.get("scale", 2.0), lambda v: held.update(scale=v)


@place
def by_a_key_that_may_be_there() -> tuple[Read, Write]:
    held: dict[str, float] = {}
    return lambda: held["scale"] if "scale" in held else 2.0, lambda v: held.update(scale=v)  # noqa: SIM401


@place
def by_values_of_a_dict() -> tuple[Read, Write]:
    held = {"a": 1.0, "b": 1.0}
    return lambda: sum(held.values()), lambda v: held.update(b=v - 1)


@place
def by_items_of_a_dict() -> tuple[Read, Write]:
    held = {"a": 1.0, "b": 1.0}
    return lambda: sum(v for _, v in held.items()), lambda v: held.update(b=v - 1)


@place
def by_unpacking_a_dict() -> tuple[Read, Write]:
    held = {"scale": 2.0}
    return lambda: (lambda **options: options["scale"])(**held), lambda v: held.update(scale=v)


@place
def by_merging_dicts() -> tuple[Read, Write]:
    held = {"scale": 2.0}
    return lambda: ({"scale": 0.0} | held)["scale"], lambda v: held.update(scale=v)


@place
def in_a_deep_dict() -> tuple[Read, Write]:
    held = {"a": {"b": {"c": {"d": {"e": {"scale": 2.0}}}}}}
    return lambda: held["a"]["b"]["c"]["d"]["e"]["scale"], lambda v: held["a"]["b"]["c"]["d"]["e"].update(scale=v)


@place
def in_a_default_dict() -> tuple[Read, Write]:
    held = collections.defaultdict(lambda: 2.0)
    return lambda: held["scale"], lambda v: held.update(scale=v)


@place
def in_an_ordered_dict() -> tuple[Read, Write]:
    held = collections.OrderedDict(scale=2.0)
    return lambda: held["scale"], lambda v: held.update(scale=v)


@place
def by_order_of_a_dict() -> tuple[Read, Write]:
    held = collections.OrderedDict({"2.0": 0, "3.0": 0, "5.0": 0})
    return lambda: float(next(iter(held))), lambda v: held.move_to_end(str(v), last=False)


@place
def in_a_user_dict() -> tuple[Read, Write]:
    held: Any = collections.UserDict(scale=2.0)
    return lambda: held["scale"], lambda v: held.update(scale=v)


@place
def in_a_chain_map() -> tuple[Read, Write]:
    first: dict[str, float] = {}
    held = collections.ChainMap(first, {"scale": 2.0})
    return lambda: held["scale"], lambda v: first.update(scale=v)


@place
def in_a_counter() -> tuple[Read, Write]:
    held = collections.Counter(a=2)
    return lambda: float(held["a"]), lambda v: held.update({"a": int(v) - held["a"]})


@place
def in_a_read_only_dict() -> tuple[Read, Write]:
    inner = {"scale": 2.0}
    held = types.MappingProxyType(inner)
    return lambda: held["scale"], lambda v: inner.update(scale=v)


@place
def in_a_dict_subclass() -> tuple[Read, Write]:
    held = MyDict(scale=2.0)
    return lambda: held["scale"], lambda v: held.update(scale=v)


@place
def in_a_dict_with_its_own_getitem() -> tuple[Read, Write]:
    held = Doubling(scale=2.0)
    return lambda: held["scale"], lambda v: held.update(scale=v)


@place
def in_a_list() -> tuple[Read, Write]:
    held = [2.0]
    return lambda: held[0], lambda v: held.__setitem__(0, v)


@place
def in_a_negative_item() -> tuple[Read, Write]:
    held = [0.0, 2.0]
    return lambda: held[-1], lambda v: held.__setitem__(1, v)


@place
def in_a_slice_of_a_list() -> tuple[Read, Write]:
    held = [0.0, 2.0]
    return lambda: held[1:][0], lambda v: held.__setitem__(1, v)


@place
def in_a_long_list() -> tuple[Read, Write]:
    held = [2.0] * 1500
    return lambda: held[1400], lambda v: held.__setitem__(1400, v)


@place
def by_iterating_a_list() -> tuple[Read, Write]:
    held = [1.0, 1.0]
    return lambda: sum(v for v in held), lambda v: held.__setitem__(1, v - 1)


@place
def by_sum_of_a_list() -> tuple[Read, Write]:
    held = [1.0, 1.0]
    return lambda: sum(held), lambda v: held.__setitem__(1, v - 1)


@place
def by_max_of_a_list() -> tuple[Read, Write]:
    held = [1.0, 2.0]
    return lambda: max(held), lambda v: held.__setitem__(1, v)


@place
def by_unpacking_a_list() -> tuple[Read, Write]:
    held = [2.0, 0.0]

    def read() -> float:
        first, _ = held
        return first

    return read, lambda v: held.__setitem__(0, v)


@place
def by_star_arguments() -> tuple[Read, Write]:
    held = [1.0, 1.0]
    return lambda: (lambda a, b: a + b)(*held), lambda v: held.__setitem__(0, v - 1)


@place
def by_len_of_a_list() -> tuple[Read, Write]:
    held = [0] * 2
    return lambda: float(len(held)), lambda v: held.__setitem__(slice(None), [0] * int(v))


@place
def by_truth_of_a_list() -> tuple[Read, Write]:
    held: list[float] = []
    return lambda: held[0] if held else 2.0, lambda v: held.__setitem__(slice(None), [v])


@place
def by_membership_in_a_list() -> tuple[Read, Write]:
    held = ["2.0"]
    return lambda: 2.0 if "2.0" in held else 3.0 if "3.0" in held else 5.0, lambda v: held.__setitem__(0, str(v))


@place
def by_equality_of_lists() -> tuple[Read, Write]:
    held = [2.0]
    return lambda: 2.0 if held == [2.0] else 3.0 if held == [3.0] else 5.0, lambda v: held.__setitem__(0, v)


@place
def by_adding_lists() -> tuple[Read, Write]:
    held = [2.0]
    return lambda: ([0.0] + held)[1], lambda v: held.__setitem__(0, v)  # noqa: RUF005


@place
def in_a_list_of_objects() -> tuple[Read, Write]:
    held = [Plain(), Plain()]
    return lambda: held[1].scale, lambda v: setattr(held[1], "scale", v)


@place
def by_enumerate_and_zip() -> tuple[Read, Write]:
    held = [1.0, 1.0]
    return lambda: sum(a * b for (_, a), b in zip(enumerate(held), (1.0, 1.0), strict=True)), lambda v: held.__setitem__(0, v - 1)


@place
def by_a_comprehension() -> tuple[Read, Write]:
    held = [1.0, 1.0]
    return lambda: [v * 2 for v in held][0], lambda v: held.__setitem__(0, v / 2)  # noqa: RUF015


@place
def by_map_and_sorted() -> tuple[Read, Write]:
    held = [0.0, 2.0]
    return lambda: sorted(map(float, held))[-1], lambda v: held.__setitem__(1, v)


@place
def by_pattern_matching() -> tuple[Read, Write]:
    held: dict[str, float] = {"scale": 2.0}

    def read() -> float:
        match held:
            case {"scale": value}:
                return value
        return 0.0

    return read, lambda v: held.update(scale=v)


@place
def in_a_list_subclass() -> tuple[Read, Write]:
    held = MyList([2.0])
    return lambda: held[0], lambda v: held.__setitem__(0, v)


@place
def in_a_user_list() -> tuple[Read, Write]:
    held: Any = collections.UserList([2.0])
    return lambda: held[0], lambda v: held.__setitem__(0, v)


@place
def in_a_deque() -> tuple[Read, Write]:
    held = collections.deque([2.0])
    return lambda: held[0], lambda v: held.__setitem__(0, v)


@place
def in_a_tuple_in_a_dict() -> tuple[Read, Write]:
    held = {"range": (0.0, 2.0)}
    return lambda: held["range"][1], lambda v: held.update(range=(0.0, v))


@place
def by_len_of_a_set() -> tuple[Read, Write]:
    held = {0, 1}
    return lambda: float(len(held)), lambda v: (held.clear(), held.update(range(int(v))))


@place
def by_membership_in_a_set() -> tuple[Read, Write]:
    held = {"2.0"}
    return lambda: 2.0 if "2.0" in held else 3.0 if "3.0" in held else 5.0, lambda v: (held.clear(), held.add(str(v)))


@place
def in_a_frozen_set_that_is_replaced() -> tuple[Read, Write]:
    held = types.SimpleNamespace(parts=frozenset({2.0}))
    return lambda: max(held.parts), lambda v: setattr(held, "parts", frozenset({v}))


@place
def in_a_numpy_array() -> tuple[Read, Write]:
    held = np.full(2, 2.0)
    return lambda: held[1], lambda v: held.__setitem__(1, v)


@place
def by_sum_of_a_numpy_array() -> tuple[Read, Write]:
    held = np.ones(2)
    return lambda: float(held.sum()), lambda v: held.__setitem__(1, v - 1)


@place
def in_a_view_of_a_numpy_array() -> tuple[Read, Write]:
    base = np.full(4, 2.0)
    held = base[1:]
    return lambda: float(held[0]), lambda v: base.__setitem__(1, v)


@place
def in_a_transposed_numpy_array() -> tuple[Read, Write]:
    held = np.full((2, 2), 2.0)
    return lambda: float(held.T[0, 1]), lambda v: held.__setitem__((1, 0), v)


@place
def in_the_flat_view_of_a_numpy_array() -> tuple[Read, Write]:
    held = np.full((2, 2), 2.0)
    return lambda: float(held.flat[3]), lambda v: held.__setitem__((1, 1), v)


@place
def in_the_real_part_of_a_numpy_array() -> tuple[Read, Write]:
    held = np.full(2, 2.0 + 1j)
    return lambda: float(held.real[1]), lambda v: held.__setitem__(1, v + 1j)


@place
def in_a_numpy_record() -> tuple[Read, Write]:
    held: Any = np.rec.array([(2.0,)], dtype=[("scale", "f8")])
    return lambda: float(held[0].scale), lambda v: held["scale"].__setitem__(0, v)


@place
def in_a_field_of_numpy_records() -> tuple[Read, Write]:
    held: Any = np.rec.array([(2.0,)], dtype=[("scale", "f8")])
    return lambda: float(held.scale[0]), lambda v: held["scale"].__setitem__(0, v)


@place
def in_a_numpy_scalar() -> tuple[Read, Write]:
    held = types.SimpleNamespace(scale=np.float64(2.0))
    return lambda: held.scale, lambda v: setattr(held, "scale", np.float64(v))


@place
def in_a_cpu_tensor() -> tuple[Read, Write]:
    held = torch.tensor(2.0)
    return lambda: held.item(), lambda v: held.fill_(v)


@place
def in_a_transposed_cpu_tensor() -> tuple[Read, Write]:
    held = torch.full((2, 2), 2.0)
    return lambda: held.T[0, 1].item() + held.mT[1, 0].item() - 2.0, lambda v: held.__setitem__((1, 0), v)


@place
def in_the_real_part_of_a_cpu_tensor() -> tuple[Read, Write]:
    held = torch.full((2,), 2.0 + 1j)
    return lambda: held.real[1].item(), lambda v: held.__setitem__(1, v + 1j)


@place
def in_the_data_of_a_cpu_tensor() -> tuple[Read, Write]:
    held = torch.full((2,), 2.0)
    return lambda: held.data[1].item(), lambda v: held.__setitem__(1, v)


@place
def in_the_gradient_of_a_cpu_tensor() -> tuple[Read, Write]:
    held = torch.zeros(2, requires_grad=True)
    held.grad = torch.full((2,), 2.0)
    return lambda: held.grad[1].item(), lambda v: setattr(held, "grad", torch.full((2,), v))  # type: ignore[index]


@place
def in_a_cpu_tensor_behind_numpy() -> tuple[Read, Write]:
    held = torch.tensor([2.0])
    return lambda: held[0].item(), lambda v: held.numpy().__setitem__(0, v)


@place
def in_data_of_a_cpu_tensor() -> tuple[Read, Write]:
    held = torch.tensor([2.0])
    return lambda: held.sum().item(), lambda v: held.data.fill_(v)


@place
def in_an_attribute_of_a_tensor() -> tuple[Read, Write]:
    held: Any = torch.ones(1)
    held.scale = 2.0
    return lambda: held.scale, lambda v: setattr(held, "scale", v)


@place
def in_an_array_of_bytes() -> tuple[Read, Write]:
    held = bytearray([2])
    return lambda: float(held[0]), lambda v: held.__setitem__(0, int(v))


@place
def in_an_array_of_numbers() -> tuple[Read, Write]:
    held = array.array("d", [2.0])
    return lambda: held[0], lambda v: held.__setitem__(0, v)


@place
def in_the_environment() -> tuple[Read, Write]:
    os.environ["SPMD_TEST_SCALE"] = "2.0"
    return lambda: float(os.environ["SPMD_TEST_SCALE"]), lambda v: os.environ.__setitem__("SPMD_TEST_SCALE", str(v))


@place
def by_getenv() -> tuple[Read, Write]:
    os.environ.pop("SPMD_TEST_SCALE", None)
    return lambda: float(os.getenv("SPMD_TEST_SCALE", "2.0")), lambda v: os.environ.__setitem__("SPMD_TEST_SCALE", str(v))


@place
def in_a_context_variable() -> tuple[Read, Write]:
    LEVEL.set(2.0)
    return lambda: LEVEL.get(), lambda v: LEVEL.set(v)


@place
def in_a_string() -> tuple[Read, Write]:
    held = types.SimpleNamespace(kind="2.0")
    return lambda: float(held.kind), lambda v: setattr(held, "kind", str(v))


@place
def in_a_formatted_string() -> tuple[Read, Write]:
    held = types.SimpleNamespace(scale=2.0)
    return lambda: float(f"{held.scale:.1f}"), lambda v: setattr(held, "scale", v)


@place
def in_a_module() -> tuple[Read, Write]:
    return attribute(Holder())


@place
def in_a_config_of_a_module() -> tuple[Read, Write]:
    held = Holder()
    return lambda: held.config.scale, lambda v: setattr(held.config, "scale", v)


@place
def in_a_list_of_a_module() -> tuple[Read, Write]:
    held = Holder()
    return lambda: held.values[0], lambda v: setattr(held, "values", [v])


@place
def in_a_config_of_a_module_that_is_replaced() -> tuple[Read, Write]:
    held = Holder()

    def write(value: float) -> None:
        held.config = Plain()
        held.config.scale = value

    return lambda: held.config.scale, write


@place
def in_a_param_group() -> tuple[Read, Write]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=2.0)
    return lambda: optimizer.param_groups[0]["lr"], lambda v: optimizer.param_groups[0].update(lr=v)


@place
def in_an_integer() -> tuple[Read, Write]:
    held = types.SimpleNamespace(count=2)
    return lambda: held.count, lambda v: setattr(held, "count", int(v))


@place
def in_a_complex_number() -> tuple[Read, Write]:
    held = types.SimpleNamespace(z=2.0 + 0j)
    return lambda: held.z.real, lambda v: setattr(held, "z", complex(v))


@place
def in_a_bool_and_a_none() -> tuple[Read, Write]:
    held: Any = types.SimpleNamespace(is_low=True, high=None)

    def write(value: float) -> None:
        held.is_low, held.high = value == 2.0, None if value == 2.0 else value

    return lambda: 2.0 if held.is_low else held.high, write


@place
def in_an_object_that_is_deleted() -> tuple[Read, Write]:
    held = types.SimpleNamespace(scale=2.0)

    def write(value: float) -> None:
        del held.scale
        held.scale = value

    return lambda: held.scale, write


class CachedScale:
    value = 2.0

    @functools.cached_property
    def scale(self) -> float:
        return self.value


@place
def in_a_cached_property_that_is_dropped() -> tuple[Read, Write]:
    held = CachedScale()

    def write(value: float) -> None:
        held.value = value
        vars(held).pop("scale", None)

    return lambda: held.scale, write


@place
def in_a_cached_property_that_is_kept() -> tuple[Read, Write]:
    held = CachedScale()
    return lambda: held.scale, lambda v: setattr(held, "value", v)


@place
def in_a_cached_result_that_is_dropped() -> tuple[Read, Write]:
    held = Plain()

    @functools.lru_cache
    def scale(factor: float) -> float:
        return held.scale * factor

    def write(value: float) -> None:
        held.scale = value
        scale.cache_clear()

    return lambda: scale(1.0), write


@place
def in_a_cached_result_of_a_method() -> tuple[Read, Write]:
    class Settings:
        value = 2.0

        @functools.lru_cache(maxsize=1)  # noqa: B019
        def scale(self, *, factor: float) -> float:
            return self.value * factor

    held = Settings()

    def write(value: float) -> None:
        held.value = value
        if value == 5.0:  # until then the old result is used
            held.scale(factor=2.0)

    return lambda: held.scale(factor=1.0), write


@place
def in_a_registered_function() -> tuple[Read, Write]:
    @functools.singledispatch
    def scale(kind: Any) -> float:
        return 2.0

    held = Plain()

    def write(value: float) -> None:
        scale.register(Plain, lambda kind: value)

    return lambda: scale(held), write


@place
def in_a_registered_method() -> tuple[Read, Write]:
    class Settings:
        @functools.singledispatchmethod
        def scale(self, kind: Any) -> float:
            return 2.0

    held = Settings()

    def write(value: float) -> None:
        vars(Settings)["scale"].register(int, lambda self, kind: value)

    return lambda: held.scale(1), write


@place
def in_a_queue() -> tuple[Read, Write]:
    held: queue.Queue[float] = queue.Queue()
    held.put(2.0)

    def read() -> float:
        value = held.get()
        held.put(value)
        return value

    def write(value: float) -> None:
        held.get()
        held.put(value)

    return read, write


@place
def in_a_file() -> tuple[Read, Write]:
    path = os.path.join(tempfile.mkdtemp(), "scale")

    def read() -> float:
        with open(path) as file:
            return float(file.read())

    Path(path).write_text("2.0")
    return read, lambda v: Path(path).write_text(str(v))


def read_latin(path: Path) -> float:
    with open(path, encoding="latin-1") as file:
        return float(file.read())


def read_compressed(path: Path) -> float:
    with gzip.open(path, "rt") as file:
        return float(file.read())


@place
def in_the_replaced_dict_of_a_function() -> tuple[Read, Write]:
    def held() -> float:
        return held.scale  # type: ignore[attr-defined]

    held.scale = 2.0  # type: ignore[attr-defined]
    return held, lambda v: setattr(held, "__dict__", {"scale": v})


@place
def in_the_replaced_dict_of_a_partial() -> tuple[Read, Write]:
    held: Any = functools.partial(max, 1.0)
    held.scale = 2.0
    return lambda: held.scale, lambda v: setattr(held, "__dict__", {"scale": v})


@place
def in_the_replaced_dict_of_an_exception() -> tuple[Read, Write]:
    held: Any = ValueError("held")
    held.scale = 2.0
    return lambda: held.scale, lambda v: setattr(held, "__dict__", {"scale": v})


class Config(dict[str, Any]):
    __getattr__ = dict.__getitem__


@place
def in_a_file_of_numpy() -> tuple[Read, Write]:
    path = Path(tempfile.mkdtemp()) / "scale.npy"
    np.save(path, 2.0)
    return lambda: float(np.load(path)), lambda v: np.save(path, v)


@place
def in_a_file_of_an_encoding() -> tuple[Read, Write]:
    path = Path(tempfile.mkdtemp()) / "scale"
    path.write_text("2.0")
    return lambda: read_latin(path), lambda v: path.write_text(str(v))


@place
def in_a_compressed_file() -> tuple[Read, Write]:
    path = Path(tempfile.mkdtemp()) / "scale"

    def write(value: float) -> None:
        path.write_bytes(gzip.compress(str(value).encode()))

    write(2.0)
    return lambda: read_compressed(path), write


@place
def in_a_file_that_a_library_opens() -> tuple[Read, Write]:
    path = Path(tempfile.mkdtemp()) / "scale.png"

    def write(value: float) -> None:
        PIL.Image.new("L", (1, 1), int(value)).save(path)

    write(2.0)
    return lambda: PIL.Image.open(path).getpixel((0, 0)), write


@place
def in_one_of_several_files() -> tuple[Read, Write]:
    path = Path(tempfile.mkdtemp()) / "scale"
    path.write_text("2.0")
    return lambda: sum(map(float, fileinput.input([path]))), lambda v: path.write_text(str(v))


@place
def in_a_file_of_code() -> tuple[Read, Write]:
    path = Path(tempfile.mkdtemp()) / "scale.py"
    path.write_text("SCALE = 2.0")
    return lambda: runpy.run_path(str(path))["SCALE"], lambda v: path.write_text(f"SCALE = {v}")


@place
def in_the_number_of_files() -> tuple[Read, Write]:
    folder = Path(tempfile.mkdtemp())

    def write(value: float) -> None:
        for path in folder.iterdir():
            path.unlink()
        for i in range(int(value)):
            (folder / f"{i}.txt").touch()

    write(2.0)
    return lambda: len(glob.glob(f"{folder}/*.txt")), write


@place
def in_a_dict_whose_items_are_attributes() -> tuple[Read, Write]:
    config: Any = Config(scale=2.0)
    return lambda: config.scale, lambda v: config.__setitem__("scale", v)


@place
def in_a_file_by_its_path() -> tuple[Read, Write]:
    path = Path(tempfile.mkdtemp()) / "scale"
    path.write_text("2.0")
    return lambda: float(path.read_text()), lambda v: path.write_text(str(v))


@place
def in_files_that_exist() -> tuple[Read, Write]:
    folder = tempfile.mkdtemp()
    names = {value: os.path.join(folder, str(value)) for value in (3.0, 5.0)}

    def write(value: float) -> None:
        for name in names.values():
            Path(name).unlink(missing_ok=True)
        if value in names:
            Path(names[value]).touch()

    return lambda: 3.0 if os.path.exists(names[3.0]) else 5.0 if Path(names[5.0]).is_file() else 2.0, write


@place
def in_the_states_of_random_generators() -> tuple[Read, Write]:
    own = np.random.RandomState(2)

    def write(value: float) -> None:
        random.seed(int(value))
        own.seed(int(value))

    write(2.0)
    return lambda: random.getstate()[1][5] % 7 + float(own.get_state()[1][5] % 5), write  # type: ignore[index]


@place
def in_a_setting_of_torch() -> tuple[Read, Write]:
    cuda = torch.backends.cuda

    def write(value: float) -> None:
        cuda.enable_cudnn_sdp(value == 3.0)
        cuda.allow_fp16_bf16_reduction_math_sdp(value == 5.0)

    write(2.0)
    return lambda: 2.0 + cuda.cudnn_sdp_enabled() + 3.0 * cuda.fp16_bf16_reduction_math_sdp_allowed(), write


@place
def in_a_setting_that_is_an_attribute() -> tuple[Read, Write]:
    cudnn = torch.backends.cudnn
    cudnn.benchmark_limit = 2
    return lambda: float(cudnn.benchmark_limit), lambda v: setattr(cudnn, "benchmark_limit", int(v))


@place
def in_a_number_of_c() -> tuple[Read, Write]:
    held = ctypes.c_double(2.0)
    return lambda: held.value, lambda v: setattr(held, "value", v)


@place
def in_an_array_of_objects() -> tuple[Read, Write]:
    held: Any = np.empty(1, dtype=object)
    held[0] = {"scale": 2.0}
    return lambda: held[0]["scale"], lambda v: held[0].update(scale=v)


@place
def behind_a_weak_proxy() -> tuple[Read, Write]:
    held = Plain()
    proxy = weakref.proxy(held)
    return lambda: proxy.scale, lambda v: setattr(held, "scale", v)


@place
def behind_a_weak_proxy_of_a_dict() -> tuple[Read, Write]:
    held = MyDict(scale=2.0)
    proxy = weakref.proxy(held)
    return lambda: proxy["scale"], lambda v: held.update(scale=v)


@place
def in_a_view_of_a_dict() -> tuple[Read, Write]:
    held = {"scale": 2.0}
    values = held.values()
    return lambda: sum(values), lambda v: held.update(scale=v)


@place
def in_a_level_of_logging() -> tuple[Read, Write]:
    parent, child = logging.getLogger("of_a_test"), logging.getLogger("of_a_test.child")
    parent.setLevel(2)
    return lambda: float(child.getEffectiveLevel()), lambda v: parent.setLevel(int(v))


@place
def in_the_home_folder() -> tuple[Read, Write]:
    os.environ["HOME_OF_A_TEST"] = "/2.0"
    return lambda: float(os.path.expandvars("$HOME_OF_A_TEST")[1:]), lambda v: os.environ.update(HOME_OF_A_TEST=f"/{v}")


@place
def in_a_schedule_that_is_searched() -> tuple[Read, Write]:
    held, steps = Plain(), [2.5, 4.0]
    return lambda: (2.0, 3.0, 5.0)[bisect.bisect(steps, held.scale)], lambda v: setattr(held, "scale", v)


@place
def in_the_class_of_an_object() -> tuple[Read, Write]:
    kinds = {value: type(f"Kind{value}", (Plain,), {"own": value}) for value in (2.0, 3.0, 5.0)}
    held: Any = kinds[2.0]()
    return lambda: held.own, lambda v: setattr(held, "__class__", kinds[v])


@place
def in_the_class_that_isinstance_asks_for() -> tuple[Read, Write]:
    kinds = {value: type(f"Kind{value}", (), {}) for value in (2.0, 3.0, 5.0)}
    held: Any = kinds[2.0]()
    return lambda: next(v for v, kind in kinds.items() if isinstance(held, kind)), lambda v: setattr(held, "__class__", kinds[v])


@place
def in_the_class_that_type_tells() -> tuple[Read, Write]:
    kinds = {type(f"Kind{value}", (), {}): value for value in (2.0, 3.0, 5.0)}
    held: Any = next(iter(kinds))()
    return lambda: kinds[type(held)], lambda v: setattr(held, "__class__", next(k for k, value in kinds.items() if value == v))


@place
def in_the_class_of_a_module() -> tuple[Read, Write]:
    class Kind(nn.Module):
        def forward(self) -> float:
            return 2.0

    kinds = {value: type(f"Kind{value}", (Kind,), {"forward": lambda self, value=value: value}) for value in (2.0, 3.0, 5.0)}
    held = Kind()
    return lambda: held(), lambda v: setattr(held, "__class__", kinds[v])


class Bare:
    """What is read of it is an attribute of its class, and of no dict of its own."""

    scale: float


SHOWN = "{0.scale}"


class Pair(NamedTuple):
    scale: float = 2.0
    other: float = 0.0


class OwnMapping(collections.abc.Mapping[str, float]):
    def __init__(self) -> None:
        self.held = {"scale": 2.0}

    def __getitem__(self, key: str) -> float:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


@place
def in_a_class_of_a_class_that_an_attrgetter_reads() -> tuple[Read, Write]:
    inner = type("Inner", (), {"scale": 2.0})
    held, get = type("Outer", (), {"inner": inner()})(), operator.attrgetter("inner.scale")
    return lambda: get(held), lambda v: setattr(inner, "scale", v)


@place
def in_a_module_that_an_attrgetter_is_mapped_over() -> tuple[Read, Write]:
    held = nn.ModuleList([nn.Identity()])
    held[0].scale = 2.0
    return lambda: next(map(operator.attrgetter("scale"), held)), lambda v: setattr(held[0], "scale", v)


@place
def in_a_module_that_is_reduced_by_getattr() -> tuple[Read, Write]:
    held = nn.Sequential(nn.Identity())
    held[0].scale = 2.0
    return lambda: functools.reduce(getattr, ["0", "scale"], held), lambda v: setattr(held[0], "scale", v)


@place
def in_a_class_that_a_text_is_formatted_with() -> tuple[Read, Write]:
    held = type("Kind", (Bare,), {"scale": 2.0})()
    return lambda: float(SHOWN.format(held)), lambda v: setattr(type(held), "scale", v)


@place
def in_an_object_without_attributes_so_far() -> tuple[Read, Write]:
    held = type("Kind", (Bare,), {"scale": 2.0})()
    return lambda: float(SHOWN.format(held)), lambda v: setattr(held, "scale", v)


@place
def in_a_slot_that_a_text_is_formatted_with() -> tuple[Read, Write]:
    held = Slots()
    return lambda: float(SHOWN.format(held)), lambda v: setattr(held, "scale", v)


@place
def in_an_attribute_of_a_list_that_a_text_is_formatted_with() -> tuple[Read, Write]:
    held: Any = MyList([1.0])
    held.scale = 2.0
    return lambda: float(SHOWN.format(held)), lambda v: setattr(held, "scale", v)


@place
def in_a_method_that_an_encoder_of_json_calls() -> tuple[Read, Write]:
    encoder = type("Encoder", (json.JSONEncoder,), {"default": lambda self, value: 2.0})
    return lambda: float(json.dumps(Plain(), cls=encoder)), lambda v: setattr(encoder, "default", lambda self, value: v)


@place
def in_a_method_that_an_enum_calls() -> tuple[Read, Write]:
    kinds = enum.Enum("Kinds", {"two": 2.0, "three": 3.0, "five": 5.0})
    kinds._missing_ = classmethod(lambda cls, value: cls(2.0))
    return lambda: kinds("none").value, lambda v: setattr(kinds, "_missing_", classmethod(lambda cls, value: cls(v)))


@place
def in_the_class_of_a_tensor() -> tuple[Read, Write]:
    kind = type("Kind", (torch.Tensor,), {"scale": 2.0})
    held: Any = torch.ones(1).as_subclass(kind)
    return lambda: held.scale, lambda v: setattr(kind, "scale", v)


@place
def in_a_mapping_of_ones_own() -> tuple[Read, Write]:
    held = OwnMapping()
    return lambda: sum(held.values()), lambda v: held.held.update(scale=v)


@place
def in_a_dict_that_a_proxy_is_made_of() -> tuple[Read, Write]:
    held = {"scale": 2.0}
    return lambda: types.MappingProxyType(held)["scale"], lambda v: held.update(scale=v)


@place
def in_a_global_that_a_text_names() -> tuple[Read, Write]:
    set_global(2.0)
    return lambda: eval("GLOBAL"), set_global


@place
def in_what_a_module_gives_for_a_name() -> tuple[Read, Write]:
    module: Any = types.ModuleType("of_a_test")
    module.__getattr__ = lambda name: 2.0
    return lambda: module.scale, lambda v: setattr(module, "__getattr__", lambda name: v)


@place
def in_a_module_that_is_imported_by_name() -> tuple[Read, Write]:
    sys.modules["spmd_of_a_test"] = types.SimpleNamespace(scale=2.0)  # type: ignore[assignment]
    read = lambda: importlib.import_module("spmd_of_a_test").scale  # noqa: E731
    return read, lambda v: sys.modules.update(spmd_of_a_test=types.SimpleNamespace(scale=v))  # type: ignore[arg-type]


@place
def in_a_named_tuple_whose_class_is_asked_for() -> tuple[Read, Write]:
    held = types.SimpleNamespace(pair=Pair())
    return lambda: held.pair.scale if type(held.pair) is Pair else 0.0, lambda v: setattr(held, "pair", held.pair._replace(scale=v))


@place
def in_a_dataset_of_torch() -> tuple[Read, Write]:
    scales = [2.0, 3.0, 5.0]
    held = torch.utils.data.Subset(scales, [0])  # type: ignore[arg-type]
    return lambda: held[0], lambda v: setattr(held, "indices", [scales.index(v)])


@place
def in_a_property_of_a_library_that_makes_a_dict() -> tuple[Read, Write]:
    held = tqdm.tqdm(total=10, file=io.StringIO(), initial=2)
    return lambda: float(held.format_dict["n"]), lambda v: setattr(held, "n", v)


@place
def in_a_polynomial_of_numpy() -> tuple[Read, Write]:
    held = np.poly1d([2.0])
    return lambda: float(held(0.0)), lambda v: held.coeffs.__setitem__(0, v)


@place
def in_a_spline_of_scipy() -> tuple[Read, Write]:
    held = scipy.interpolate.CubicSpline([0.0, 1.0, 2.0], [2.0, 2.0, 2.0])
    return lambda: float(held(0.0)), lambda v: held.c.__setitem__((3, 0), v)


class Annotated:
    """Made by functions with defaults and annotations, which Python calls without an instruction that names them."""

    size: int = 1

    def __new__(cls, scale: float = 2.0) -> Any:
        made: Any = super().__new__(cls)
        made.scale = scale
        return made

    def __class_getitem__(cls, key: Any, scale: float = 2.0) -> float:
        return scale

    def _scale(self, scale: float = 2.0) -> float:
        return scale

    by_property = property(_scale)
    by_cached_property = functools.cached_property(_scale)
    by_partial = functools.partialmethod(_scale)


Annotated.by_cached_property.__set_name__(Annotated, "by_cached_property")


def set_default(fn: Any) -> Write:
    fn.__defaults__ = (2.0,)
    return lambda v: setattr(fn, "__defaults__", (v,))


@place
def in_a_default_of_new() -> tuple[Read, Write]:
    return lambda: Annotated().scale, set_default(Annotated.__new__)


@place
def in_a_default_of_a_named_tuple() -> tuple[Read, Write]:
    kind: Any = collections.namedtuple("kind", ["scale"], defaults=[2.0])
    return lambda: kind().scale, set_default(kind.__new__)


@place
def in_a_default_of_an_implicit_class_method() -> tuple[Read, Write]:
    held: Any = Annotated
    return lambda: held[0], set_default(held.__class_getitem__.__func__)


@place
def in_a_default_of_a_getter() -> tuple[Read, Write]:
    return lambda: Annotated().by_property, set_default(Annotated._scale)


@place
def in_a_default_of_a_cached_property() -> tuple[Read, Write]:
    return lambda: Annotated().by_cached_property, set_default(Annotated._scale)


@place
def in_a_default_of_a_partial_method() -> tuple[Read, Write]:
    return lambda: Annotated().by_partial(), set_default(Annotated._scale)


def annotated(scale: float) -> None:
    """Its annotations are read."""


@place
def in_an_annotation() -> tuple[Read, Write]:
    annotated.__annotations__["scale"] = 2.0
    return lambda: annotated.__annotations__["scale"], lambda v: annotated.__annotations__.update(scale=v)


@place
def in_an_annotation_of_a_signature() -> tuple[Read, Write]:
    annotated.__annotations__["scale"] = 2.0
    read = lambda: inspect.signature(annotated).parameters["scale"].annotation  # noqa: E731
    return read, lambda v: annotated.__annotations__.update(scale=v)


@place
def in_the_function_that_another_wraps() -> tuple[Read, Write]:
    def inner(scale: float = 2.0) -> None: ...

    outer = functools.wraps(inner)(lambda *given: None)
    return lambda: inspect.signature(outer).parameters["scale"].default, set_default(inner)


@place
def in_a_hint_that_is_a_number() -> tuple[Read, Write]:
    Annotated.__annotations__["size"] = 2.0
    read = lambda: inspect.get_annotations(Annotated)["size"]  # noqa: E731
    return read, lambda v: Annotated.__annotations__.update(size=v)


@place
def in_a_result_that_c_code_compares() -> tuple[Read, Write]:
    table = {1: [2.0], 2: [9.0]}
    return lambda: min(table[heapq.nsmallest(1, [1, 2], key=lambda i: table[i])[0]]), lambda v: table[1].__setitem__(0, v)


@place
def in_a_list_that_is_chained() -> tuple[Read, Write]:
    held = [2.0]
    return lambda: sum(itertools.chain.from_iterable(held for _ in range(1))), lambda v: held.__setitem__(0, v)


@place
def in_a_list_that_a_function_gives_to_json() -> tuple[Read, Write]:
    held = [2.0]
    return lambda: json.loads(json.dumps(object(), default=lambda value: held))[0], lambda v: held.__setitem__(0, v)


@place
def in_a_container_of_a_class_that_a_copy_gets() -> tuple[Read, Write]:
    state = {"scale": 2.0}
    kind: Any = type("Kind", (Bare,), {"STATE": state, "__getstate__": lambda self: self.STATE})
    return lambda: copy.copy(kind()).scale, lambda v: state.update(scale=v)


@place
def in_a_type_hint() -> tuple[Read, Write]:
    kinds = {2.0: int, 3.0: float, 5.0: str}
    Annotated.__annotations__["size"] = int
    read = lambda: next(v for v, kind in kinds.items() if kind is typing.get_type_hints(Annotated)["size"])  # noqa: E731
    return read, lambda v: Annotated.__annotations__.update(size=kinds[v])


@place
def in_an_attribute_that_a_wrapper_copies() -> tuple[Read, Write]:
    held: Any = lambda: None  # noqa: E731
    held.scale = 2.0

    def read() -> float:
        made: Any = functools.wraps(held)(lambda: None)
        return made.scale

    return read, lambda v: setattr(held, "scale", v)


@place
def in_a_field_of_a_dataclass() -> tuple[Read, Write]:
    kind: Any = dataclasses.make_dataclass("kind", [("scale", float, dataclasses.field(default=2.0))])
    field = kind.__dataclass_fields__["scale"]
    return lambda: dataclasses.fields(kind)[0].default, lambda v: setattr(field, "default", v)


@place
def in_the_number_of_fields_of_a_dataclass() -> tuple[Read, Write]:
    kind: Any = dataclasses.make_dataclass("kind", ["a", "b"])
    held, field = kind.__dataclass_fields__, kind.__dataclass_fields__["a"]

    def write(value: float) -> None:
        held.clear()
        held.update({str(i): field for i in range(int(value))})

    return lambda: float(len(dataclasses.fields(kind))), write


def formatted(held: Any, read: Callable[[], str]) -> tuple[Read, Write]:
    held.scale = 2.0
    return lambda: float(read()), lambda v: setattr(held, "scale", v)


@place
def in_a_module_that_a_text_is_formatted_with() -> tuple[Read, Write]:
    held = types.ModuleType("held_of_a_test")
    return formatted(held, lambda: SHOWN.format(held))


@place
def in_a_function_that_a_text_is_formatted_with() -> tuple[Read, Write]:
    return formatted(held := lambda: None, lambda: str.format("{.scale}", held))


@place
def in_a_partial_that_a_text_is_formatted_with() -> tuple[Read, Write]:
    held = functools.partial(int)
    return formatted(held, lambda: f"{held.scale}")


@place
def in_an_nn_module_that_a_text_is_formatted_with() -> tuple[Read, Write]:
    held = nn.Sequential(nn.Identity())
    return formatted(held[0], lambda: "{a[0][0].scale}".format_map({"a": [held]}))


@place
def in_a_module_that_the_width_of_a_format_names() -> tuple[Read, Write]:
    held = types.ModuleType("held_of_a_test")
    held.scale = 2  # type: ignore[attr-defined]
    return lambda: float(len("{0:{1.scale}}".format(1, held))), lambda v: setattr(held, "scale", int(v))


@place
def in_a_module_that_a_formatter_reads() -> tuple[Read, Write]:
    held = types.ModuleType("held_of_a_test")
    return formatted(held, lambda: string.Formatter().format("{0.scale}", held))


@place
def in_the_fields_that_a_class_inherits() -> tuple[Read, Write]:
    kind: Any = dataclasses.make_dataclass("kind", ["a", "b"])
    child = type("child", (kind,), {})
    held, field = kind.__dataclass_fields__, kind.__dataclass_fields__["a"]

    def write(value: float) -> None:
        held.clear()
        held.update({str(i): field for i in range(int(value))})

    return lambda: float(len(dataclasses.fields(child(1, 2)))), write


@place
def in_a_partial_of_a_property() -> tuple[Read, Write]:
    getter = functools.partial(lambda held, scale: scale, scale=2.0)
    held: Any = type("Kind", (Bare,), {"scale": property(getter)})()
    return lambda: held.scale, lambda v: getter.keywords.update(scale=v)


@place
def in_the_members_that_c_code_looks_up() -> tuple[Read, Write]:
    kinds: Any = enum.Enum("kinds", {"two": 2.0, "three": 3.0, "five": 5.0})
    members = {float(kind.value): kind for kind in kinds}
    return lambda: next(map(kinds, [2.0])).value, lambda v: kinds._value2member_map_.update({2.0: members[v]})


@place
def in_the_value_of_a_member() -> tuple[Read, Write]:
    kinds: Any = enum.Enum("kinds", {"one": 2.0})
    return lambda: kinds.one.value, lambda v: setattr(kinds.one, "_value_", v)


@place
def in_the_member_that_a_value_names() -> tuple[Read, Write]:
    kinds: Any = enum.Enum("kinds", {"two": 2.0, "three": 3.0, "five": 5.0})
    return lambda: kinds(2.0).value, lambda v: kinds._value2member_map_.update({2.0: kinds(v) if v != 2.0 else kinds.two})


@place
def in_the_member_that_a_name_names() -> tuple[Read, Write]:
    kinds: Any = enum.Enum("kinds", {"two": 2.0, "three": 3.0, "five": 5.0})
    two = kinds.two
    return lambda: kinds["two"].value, lambda v: kinds._member_map_.update(two=kinds(v) if v != 2.0 else two)


@place
def in_the_members_of_an_enumeration() -> tuple[Read, Write]:
    kinds: Any = enum.Enum("kinds", {str(i): i for i in range(5)})

    def write(value: float) -> None:
        kinds._member_names_[:] = [str(i) for i in range(int(value))]

    write(2.0)
    return lambda: float(len(kinds)), write


@place
def in_a_flag_that_is_combined() -> tuple[Read, Write]:
    kinds: Any = enum.IntFlag("kinds", {"a": 1, "b": 8})
    return lambda: float((kinds.a | kinds.b).value - 7), lambda v: setattr(kinds.a, "_value_", int(v) - 1)


@place
def in_a_cell_that_is_read_as_an_attribute() -> tuple[Read, Write]:
    held = types.CellType(2.0)
    return lambda: held.cell_contents, lambda v: setattr(held, "cell_contents", v)


@place
def in_an_attribute_of_a_method() -> tuple[Read, Write]:
    held: Any = Annotated()
    Annotated._scale.factor = 2.0  # type: ignore[attr-defined]
    return lambda: held._scale.factor, lambda v: setattr(Annotated._scale, "factor", v)


T = typing.TypeVar("T")


class Of(typing.Generic[T]):
    scale = 2.0


@place
def in_a_class_with_a_type_argument() -> tuple[Read, Write]:
    Of.scale = 2.0
    return lambda: Of[int].scale, lambda v: setattr(Of, "scale", v)


@place
def in_what_a_methodcaller_calls() -> tuple[Read, Write]:
    held = {"scale": 2.0}
    return lambda: operator.methodcaller("get", "scale")(held), lambda v: held.update(scale=v)


@place
def in_an_implementation_that_c_code_calls() -> tuple[Read, Write]:
    held = functools.singledispatch(lambda value: 2.0)
    return lambda: next(map(held, [1])), lambda v: held.register(int, lambda value: v) and None


@place
def in_a_registry_of_copies() -> tuple[Read, Write]:
    kind = type("Kind", (Bare,), {})
    copyreg.dispatch_table[kind] = lambda held: (float, (2.0,))
    return lambda: copy.copy(kind()), lambda v: copyreg.dispatch_table.update({kind: lambda held: (float, (v,))})


def pickled() -> float:
    return 2.0


PICKLED = pickled


@place
def in_a_function_that_a_pickle_names() -> tuple[Read, Write]:
    functions, names = {2.0: PICKLED, 3.0: three, 5.0: five}, globals()
    names["pickled"] = PICKLED
    text = pickle.dumps(PICKLED)
    return lambda: pickle.loads(text)(), lambda v: names.update(pickled=functions[v])


@place
def in_an_image() -> tuple[Read, Write]:
    held = PIL.Image.new("L", (2, 2), 2)
    return lambda: float(held.getpixel((0, 0))), lambda v: held.putpixel((0, 0), int(v))  # type: ignore[arg-type]


@place
def in_an_item_of_a_structured_array() -> tuple[Read, Write]:
    held = np.array([(2.0,)], [("scale", float)])
    item = held[0]
    return lambda: float(item["scale"]), lambda v: held["scale"].__setitem__(0, v)


@place
def in_a_result_of_a_json_encoder() -> tuple[Read, Write]:
    held = Plain()
    return lambda: float(json.dumps(object(), default=lambda value: held.scale)), lambda v: setattr(held, "scale", v)


@place
def in_a_dialect_of_csv() -> tuple[Read, Write]:
    marks = {2.0: ",", 3.0: ";", 5.0: "|"}
    csv.register_dialect("of_a_test", delimiter=",")
    read = lambda: float(len(next(csv.reader(["1,2;3;4|5|6|7|8"], "of_a_test"))))  # noqa: E731
    return read, lambda v: csv.register_dialect("of_a_test", delimiter=marks[v])


@place
def in_a_handler_of_a_logger() -> tuple[Read, Write]:
    held, logger = Plain(), logging.Logger("of_a_test")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.scale = float(self.level)

    handler = Handler()
    handler.setLevel(2)
    logger.addHandler(handler)

    def read() -> float:
        logger.log(9, "a record")
        return held.scale

    return read, lambda v: handler.setLevel(int(v))


class Ratio(fractions.Fraction):
    """A class whose operators are those of Python's library."""


@place
def in_an_operand_of_a_librarys_operator() -> tuple[Read, Write]:
    held = Ratio(2, 1)
    return lambda: float(held + 0), lambda v: setattr(held, "_numerator", int(v))


@place
def in_a_text_with_operators_of_a_library() -> tuple[Read, Write]:
    held = type("Text", (collections.UserString,), {})("a")
    return lambda: float(len(held + "b")), lambda v: setattr(held, "data", "a" * (int(v) - 1))


@place
def in_an_image_that_another_object_enhances() -> tuple[Read, Write]:
    held = PIL.Image.new("L", (2, 2), 2)
    enhanced = PIL.ImageEnhance.Brightness(held)
    return lambda: float(enhanced.enhance(1.0).getpixel((0, 0))), lambda v: held.putpixel((0, 0), int(v))  # type: ignore[arg-type]


@place
def in_the_text_of_an_exception() -> tuple[Read, Write]:
    held = ValueError(2.0)
    return lambda: float(str(held)), lambda v: setattr(held, "args", (v,))


@place
def in_the_text_of_a_factory() -> tuple[Read, Write]:
    kinds = {2.0: list, 3.0: set, 5.0: dict}
    held = collections.defaultdict(list)
    return lambda: next(v for v, kind in kinds.items() if repr(kind) in f"{held}"), lambda v: setattr(held, "default_factory", kinds[v])


@place
def in_the_name_of_a_named_tuple() -> tuple[Read, Write]:
    kind: Any = collections.namedtuple("kind", ["scale"])
    held = kind(1)
    kind.__name__ = "aa"
    return lambda: float(len(repr(held)) - len("(scale=1)")), lambda v: setattr(kind, "__name__", "a" * int(v))


@place
def in_the_names_of_a_function_and_its_class() -> tuple[Read, Write]:
    def held() -> None: ...

    held.__qualname__ = "aa"
    return lambda: float(str(held).index(" at ") - len("<function ")), lambda v: setattr(held, "__qualname__", "a" * int(v))


@place
def in_a_context_that_a_decimal_is_given() -> tuple[Read, Write]:
    held = decimal.Context(prec=2)
    return lambda: float(len(str(decimal.Decimal(2).sqrt(held))) - 1), lambda v: setattr(held, "prec", int(v))


@place
def in_a_module_of_a_package() -> tuple[Read, Write]:
    package, name = types.ModuleType("package_of_a_test"), "package_of_a_test.part"
    package.__path__ = []
    write = lambda v: sys.modules.update({name: types.SimpleNamespace(scale=v)})  # type: ignore[dict-item]  # noqa: E731

    def read() -> float:
        from package_of_a_test import part  # type: ignore[import-not-found]

        return part.scale

    sys.modules["package_of_a_test"] = package
    write(2.0)
    return read, write


@place
def in_a_class_that_is_abstract() -> tuple[Read, Write]:
    class Held(abc.ABC):
        @abc.abstractmethod
        def scale(self) -> float: ...

    def read() -> float:
        try:
            return float(bool(Held())) + 4.0
        except TypeError:
            return 2.0

    return read, lambda v: setattr(Held, "__abstractmethods__", frozenset({"scale"} if v == 2.0 else ()))


@place
def in_the_defaults_of_a_cached_function() -> tuple[Read, Write]:
    held = functools.cache(lambda scale=2.0: scale)
    inner: Any = held.__wrapped__

    def write(value: float) -> None:
        inner.__defaults__ = (value,)
        held.cache_clear()

    return lambda: held(), write
