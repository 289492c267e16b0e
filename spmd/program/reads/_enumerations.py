"""Reads of enumerations: their members, by name, by value or all, and the values that `|` and `&` of flags combine."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

from spmd.program.find._static import attributes_of
from spmd.program.reads._library import is_library

if TYPE_CHECKING:
    from spmd.program.reads._places_read import PlacesRead
    from spmd.program.reads._recorder import Recording


def read_members(recording: Recording, value: Any) -> None:
    """Record the members of an enumeration of the user's, or the value of a member; nothing for other classes and objects."""
    if isinstance(value, enum.Enum):
        recording._entry(attributes_of(value) or {}, "_value_", value, ".")
    elif isinstance(value, enum.EnumMeta) and not is_library(value.__module__):
        by_value = () if issubclass(value, enum.Flag) else (value._value2member_map_,)  # of flags, it grows with every combination
        for held in (value._member_map_, value._member_names_, *by_value):
            recording.read_content(recording.owned(value, held))


def read_members_by_name(recording: PlacesRead, cls: Any, name: str) -> None:
    """Record the read of `Mode.__members__`; nothing for other attributes."""
    if name == "__members__" and isinstance(cls, enum.EnumMeta):
        recording._whole_dict(recording.owned(cls, cls._member_map_))


def note_lookup(recording: Recording, cls: Any, args: tuple[Any, ...]) -> None:
    """Record the lookup of a member by its value, `Mode(2)`, if a class is an enumeration of the user's."""
    if isinstance(cls, enum.EnumMeta) and len(args) == 1 and not is_library(cls.__module__):
        recording._title_of(cls._value2member_map_, f"{cls.__qualname__}._value2member_map_")
        recording._read_item(recording.owned(cls, cls._value2member_map_), args[0])


__all__ = ["note_lookup", "read_members", "read_members_by_name"]
