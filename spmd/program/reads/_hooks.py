"""What instrumented code calls: each hook hands the operands to the recording of this thread, if there is one."""

from __future__ import annotations

import sys
from _thread import get_ident
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd.base._torch import DisableTorchFunction, num_torch_function_modes

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_now: dict[int, Recording] = {}  # by thread


def start(recording: Recording) -> Recording | None:
    """Let this thread's code tell `recording`; returns the one that it told before."""
    before = _now.get(get_ident())
    _now[get_ident()] = recording
    return before


def stop(before: Recording | None) -> None:
    """Go back to the recording `before`."""
    if before is None:
        _now.pop(get_ident(), None)
    else:
        _now[get_ident()] = before


def _told(recording: Recording, name: str, operands: tuple[Any, ...]) -> Any:
    """The recording's answer. It looks at things unseen: by no hook, and by no mode of the user's that sees torch's functions."""
    recording.is_busy = True
    try:
        if num_torch_function_modes():
            with DisableTorchFunction():
                return getattr(recording, name)(*operands)
        return getattr(recording, name)(*operands)
    finally:
        recording.is_busy = False


def _teller(name: str) -> Callable[..., Any]:
    def tell(*operands: Any) -> None:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy:
            _told(recording, name, operands)

    return tell


def _caller(name: str) -> Callable[..., Any]:
    def tell(fn: Any, *operands: Any) -> Any:
        recording = _now.get(get_ident())
        return fn if recording is None or recording.is_busy else _told(recording, name, (fn, *operands))

    return tell


def _item(name: str) -> Callable[[Any, Any], tuple[Any, Any]]:
    def tell(holder: Any, key: Any) -> tuple[Any, Any]:
        recording = _now.get(get_ident())
        return (key, holder) if recording is None or recording.is_busy else _told(recording, name, (holder, key))

    return tell


def _choice(condition: Any, enters_if: bool) -> Any:
    recording = _now.get(get_ident())
    return bool(condition) is enters_if if recording is None or recording.is_busy else recording.choose(condition, enters_if)


def _chosen(choice: Any, before: Any, after: Any) -> Any:
    recording = _now.get(get_ident())
    return after if choice is True or recording is None else recording.chosen(choice, before, after)


def _global_teller(name: str) -> Callable[[str], None]:
    def tell(variable: str) -> None:
        recording = _now.get(get_ident())
        if recording is not None and not recording.is_busy:  # looking at an object may run its own `__getattribute__`
            _told(recording, name, (sys._getframe(1).f_globals, variable))

    return tell


HOOKS: dict[str, Callable[..., Any]] = {
    **{
        name: _teller(name)
        for name in (
            *("load_cell", "store_cell", "load_attr", "store_attr", "look_into", "mutate"),
            *("iterate", "contains", "made_with_keys"),
        )
    },
    **{name: _global_teller(name) for name in ("load_global", "store_global")},
    **{name: _item(name) for name in ("load_item", "store_item", "delete_item")},
    **{name: _caller(name) for name in ("call", "call_ex", "match_class", "as_key", "operate", "operate_in_place")},
    "choice": _choice,
    "chosen": _chosen,
    "super_of": lambda made_by, cls, instance: made_by(cls, instance),
}
