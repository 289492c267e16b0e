"""Stored traces of programs with classes that are not variables of a module: made in functions, by `type`, by libraries."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.program.stored_harness import Values, calls, case


def scaled(scale: float) -> Any:
    class Scaled:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * scale

    return Scaled()


@case
def a_class_whose_method_has_a_closure(device: str, wrap: Any, changed: bool) -> Values:
    scale = scaled(3.0 if changed else 2.0)
    return calls(wrap(lambda x: scale(x)), device)


@case
def a_class_of_another_branch(device: str, wrap: Any, changed: bool) -> Values:
    if changed:

        class Block(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 3
    else:

        class Block(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * 2

    return calls(wrap(Block()), device)


@case
def a_class_made_by_type(device: str, wrap: Any, changed: bool) -> Values:
    methods = {"scale": lambda self, x: x * 3} if changed else {"scale": lambda self, x: x * 2}
    made = type("Made", (), methods)()
    return calls(wrap(lambda x: made.scale(x)), device)


@case
def a_made_class_with_a_number(device: str, wrap: Any, changed: bool) -> Values:
    made = type("Made", (), {"scale": 3.0 if changed else 2.0})()
    return calls(wrap(lambda x: x * made.scale), device)


@case
def a_made_class_with_a_base(device: str, wrap: Any, changed: bool) -> Values:
    base = type("Base", (), {"scale": lambda self: 3.0} if changed else {"scale": lambda self: 2.0})
    made = type("Made", (base,), {})()
    return calls(wrap(lambda x: x * made.scale()), device)


@case
def a_special_method_that_is_added(device: str, wrap: Any, changed: bool) -> Values:
    made = type("Made", (), {"__bool__": lambda self: False} if changed else {})()
    return calls(wrap(lambda x: x * 2 if made else x * 3), device)


@case
def a_length_that_is_added(device: str, wrap: Any, changed: bool) -> Values:
    made = type("Made", (), {"__len__": lambda self: 0} if changed else {"size": 1})()
    return calls(wrap(lambda x: x * 2 if made else x * 3), device)


@case
def a_metaclass(device: str, wrap: Any, changed: bool) -> Values:
    meta = type("Meta", (type,), {"scale": property(lambda cls: 3.0) if changed else property(lambda cls: 2.0)})
    made = meta("Made", (), {})
    return calls(wrap(lambda x: x * made.scale), device)


@case
def slots_of_a_made_class(device: str, wrap: Any, changed: bool) -> Values:
    made = type("Made", (), {"__slots__": ("a", "b")})()
    made.a, made.b = (3.0, 2.0) if changed else (2.0, 3.0)
    return calls(wrap(lambda x: x * made.a + made.b), device)


@case
def an_attribute_of_a_made_class_that_hides_another(device: str, wrap: Any, changed: bool) -> Values:
    made = type("Made", (), {"scale": 2.0})()
    if changed:
        made.scale = 3.0
    return calls(wrap(lambda x: x * made.scale), device)


@case
def a_descriptor_of_a_made_class(device: str, wrap: Any, changed: bool) -> Values:
    kind = type("Scale", (), {"__get__": lambda self, instance, owner: self.value})
    descriptor = kind()
    descriptor.value = 3.0 if changed else 2.0
    made = type("Made", (), {"scale": descriptor})()
    return calls(wrap(lambda x: x * made.scale), device)


@case
def a_getattr_of_a_made_class(device: str, wrap: Any, changed: bool) -> Values:
    missing = (lambda self, name: 3.0) if changed else (lambda self, name: 2.0)
    made = type("Made", (), {"__getattr__": missing})()
    return calls(wrap(lambda x: x * made.scale), device)


@case
def an_enumeration_in_a_function(device: str, wrap: Any, changed: bool) -> Values:
    kind = enum.Enum("Kind", {"ONE": 3.0, "TWO": 2.0} if changed else {"ONE": 2.0, "TWO": 3.0})
    return calls(wrap(lambda x: x * kind.ONE.value + kind["TWO"].value), device)


@case
def members_of_an_enumeration_in_a_function(device: str, wrap: Any, changed: bool) -> Values:
    class Kind(enum.IntEnum):
        ONE = 3 if changed else 2
        TWO = 4

    return calls(wrap(lambda x: x * Kind.ONE + len(Kind) + max(Kind)), device)


@case
def a_dataclass_in_a_function(device: str, wrap: Any, changed: bool) -> Values:
    @dataclasses.dataclass
    class Config:
        scale: float = 3.0 if changed else 2.0

    return calls(wrap(lambda x: x * Config().scale), device)


@case
def fields_of_a_dataclass_in_a_function(device: str, wrap: Any, changed: bool) -> Values:
    kind: Any = dataclasses.make_dataclass("Config", [("a", float), ("b", float)] if changed else [("b", float), ("a", float)])
    config = kind(2.0, 3.0)
    return calls(wrap(lambda x: x * dataclasses.astuple(config)[0] + config.a), device)


@case
def a_named_tuple_in_a_function(device: str, wrap: Any, changed: bool) -> Values:
    class Pair(NamedTuple):
        a: float = 3.0 if changed else 2.0
        b: float = 1.0

    return calls(wrap(lambda x: x * Pair().a + Pair(b=2.0).b), device)


@case
def two_classes_that_change_places(device: str, wrap: Any, changed: bool) -> Values:
    def made(scale: float) -> Any:
        class Scale:
            @staticmethod
            def value() -> float:
                return scale

        return Scale

    pair = [made(2.0), made(3.0)]
    if changed:
        pair.reverse()
    return calls(wrap(lambda x: x * pair[0].value() - pair[1].value()), device)


@case
def a_class_that_two_objects_share(device: str, wrap: Any, changed: bool) -> Values:
    first = type("Made", (), {})
    second = type("Made", (), {}) if changed else first
    a, b = first(), second()
    return calls(wrap(lambda x: x * 2 if type(a) is type(b) else x * 3), device)


@case
def an_instance_of_a_made_class(device: str, wrap: Any, changed: bool) -> Values:
    kind, other = type("Kind", (), {}), type("Kind", (), {})
    value = other() if changed else kind()
    return calls(wrap(lambda x: x * 2 if isinstance(value, kind) else x * 3), device)


@case
def the_backward_of_a_function_in_a_function(device: str, wrap: Any, changed: bool) -> Values:
    scale = 3.0 if changed else 2.0

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * scale

    weight = torch.ones(4, device=device, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(Scaled.apply(x * weight).sum(), weight)[0]

    return calls(wrap(step), device)


@case
def an_exception_in_a_function(device: str, wrap: Any, changed: bool) -> Values:
    class Missing(KeyError if changed else ValueError):
        pass

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            raise Missing
        except KeyError:
            return x * 3
        except ValueError:
            return x * 2

    return calls(wrap(step), device)
