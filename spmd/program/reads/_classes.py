"""Reads of classes that no instruction shows: an object's class, its special methods, the order of its bases.

`a + b`, `len(a)` and `with a:` look up a method that no instruction names. So all special methods of each class whose objects the trace
uses are guarded, including those that the class does not define.
"""

from __future__ import annotations

import abc
import builtins
import types
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch

from spmd.program.find._static import attributes_of, class_dict
from spmd.program.reads._places import ContentPlace, Expected, Place, is_same
from spmd.program.reads._special_names import SPECIAL

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

ORDER = attrgetter("__mro__")
_OF_TENSORS = class_dict(torch.Tensor)
_DICT = attrgetter("__dict__")


class ClassPlace(Place):
    """The class of an object, which `__class__ = ...` changes, and which dict has its attributes, which `__dict__ = ...` changes.

    Attributes:
        columns: what reads the two from the object, without code of the user's.
    """

    __slots__ = ("attributes", "cls", "columns")

    def __init__(self, holder: Any, title: str) -> None:
        super().__init__(holder, title)
        self.cls, self.attributes = type(holder), _settable_attributes(holder)
        is_in_c = isinstance(self.cls.__getattribute__, types.WrapperDescriptorType)
        self.columns = (type,) if self.attributes is None else (type, _DICT if is_in_c else _settable_attributes)

    def settle(self, expected: Expected) -> None:
        self.cls, self.attributes = type(self.holder), _settable_attributes(self.holder)

    def difference(self) -> str | None:
        now = type(self.holder)
        if now is not self.cls:
            return f"{self.title} is a {now.__qualname__} now, it was a {self.cls.__qualname__}"
        return None if _settable_attributes(self.holder) is self.attributes else f"{self.title}.__dict__ was replaced"


def _settable_attributes(holder: Any) -> dict[str, Any] | None:
    """The attribute dict of an object that may get another one; None if it cannot."""
    own = next((found for cls in type(holder).__mro__ if (found := vars(cls).get("__dict__")) is not None), None)
    return attributes_of(holder) if isinstance(own, types.GetSetDescriptorType) else None


class SpecialPlace(Place):
    """The special methods of a class and of its bases, and the order of the bases.

    Attributes:
        dicts: the dicts of those classes that can change.
    """

    __slots__ = ("dicts", "methods", "order")

    def __init__(self, holder: type, dicts: Sequence[dict[str, Any]]) -> None:
        super().__init__(holder, holder.__qualname__)
        self.dicts = dicts
        self.order, self.methods = holder.__mro__, self._methods()

    def _methods(self) -> list[dict[str, Any]]:
        found = [{name: own.get(name) for name in SPECIAL} for own in self.dicts]
        for methods, own in zip(found, self.dicts, strict=True):
            if own is _OF_TENSORS:
                del methods["__len__"]  # which a trace replaces if sizes vary
        return found

    def settle(self, expected: Expected) -> None:
        self.order, self.methods = self.holder.__mro__, self._methods()

    def difference(self) -> str | None:
        if self.holder.__mro__ is not self.order and self.holder.__mro__ != self.order:
            return f"{self.title} has different base classes"
        for now, old in zip(self._methods(), self.methods, strict=True):
            for name, new in now.items():
                if new is not (before := old[name]) and not is_same(new, before):
                    return f"{self.title}.{name} was replaced"
        return None


class AbstractPlace(Place):
    """Whether classes are subclasses of abstract classes, which `register` changes.

    Attributes:
        answers: the answers of `issubclass`, by (class, abstract class).
    """

    __slots__ = ("answers",)

    def __init__(self) -> None:
        super().__init__(abc.ABCMeta, "abc")
        self.answers: dict[tuple[type, type], bool | None] = {}

    def settle(self, expected: Expected) -> None:
        self.answers = {pair: issubclass(*pair) for pair in self.answers}

    def difference(self) -> str | None:
        for (cls, abstract), before in self.answers.items():
            if issubclass(cls, abstract) is not before:
                return f"{cls.__qualname__} {'was' if before else 'is now'} a subclass of {abstract.__qualname__}"
        return None


def registrations(holder: Any) -> int:
    """Number of `register` calls of all abstract classes so far."""
    return cast(int, abc.get_cache_token())


def ask_classes(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Before `isinstance`, `issubclass`, `callable` or `type`: record the classes that it reads."""
    if isinstance(args[0], type):
        recording.read_special_methods(args[0])
    recording.read_class_of(args[0])
    if fn is builtins.isinstance or fn is builtins.issubclass:
        for cls in _classes_in(args[1:]):
            if type(cls) is not type:
                recording.read_special_methods(cls) if isinstance(cls, type) else recording.read_class_of(cls)
                if isinstance(cls, abc.ABCMeta):
                    ask_abstract(recording, type(args[0]) if fn is builtins.isinstance else args[0], cls)
                    if getattr(cls, "_is_protocol", False) and fn is builtins.isinstance:
                        for name in _names_of(cls):
                            recording.load_attr(args[0], name)


def _classes_in(kinds: Any) -> Iterator[Any]:
    if isinstance(kinds, (tuple, types.UnionType)):
        for kind in kinds if isinstance(kinds, tuple) else kinds.__args__:
            yield from _classes_in(kind)
    else:
        yield kinds


def ask_abstract(recording: Recording, cls: type, abstract: type) -> None:
    """Record whether a class is a subclass of an abstract class."""
    place: Any = recording.places.setdefault(id(abc.ABCMeta), AbstractPlace())
    place.answers.setdefault((cls, abstract))  # answered after the trace, because `__subclasshook__` may be user code


def _names_of(protocol: type) -> Iterator[str]:
    """The attributes that a `typing.Protocol` requires of an object."""
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False) and base.__name__ != "Protocol":
            names = (*vars(base), *vars(base).get("__annotations__", ()))
            yield from (
                name for name in names if not hasattr(object, name) and not name.startswith(("_abc_", "_is_", "__p", "__annotations"))
            )


def ask_names(recording: Recording, owner: Any, what: str, answer: Any) -> None:
    """Before `dir(owner)` or `owner.__subclasses__()`: record the names that `answer()` gives; `what` names them in messages."""
    key = hash((what, id(owner)))
    if key not in recording.places:
        recording.places[key] = ContentPlace(owner, f"{what} of {recording.name_of(owner)}", lambda: tuple(answer()))


__all__ = ["ORDER", "AbstractPlace", "ClassPlace", "SpecialPlace", "ask_abstract", "ask_classes", "ask_names", "registrations"]
