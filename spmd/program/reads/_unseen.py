"""Refuses, when a trace ends, what later calls cannot check: advanced iterators, closed files, and writes that were not recorded."""

from __future__ import annotations

import collections.abc
import gc
import itertools
import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmd.program.reads._hidden_state import IN_MEMORY
from spmd.program.reads._images import is_image, put_pixels
from spmd.program.reads._late_writes import LateWritesNeeded
from spmd.program.reads._memos import require_unwritten
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._places import ContentPlace
from spmd.program.reads._random_generators import state_of
from spmd.program.reads._trace_errors import refused, written_tensor

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording


def refuse_unseen(recording: Recording) -> None:
    """Raise TraceError if the trace did what no call can repeat, or check, to an object from before it."""
    for handles, how in recording.advanced.values():
        used = next((value for get in handles if (value := get()) is not None and recording.is_before(value)), None)
        if used is not None and not _is_endless(used):
            kind = "an iterator" if isinstance(used, collections.abc.Iterator) else "an object"
            raise refused(f"{kind} from before the call ({type(used).__name__}) was {how}")
    for generator, state in recording.generators.values():
        is_before, is_known = recording.is_before(generator), gc.is_tracked(generator)  # one that is not tracked may be from the trace
        if (is_before or not is_known) and state_of(generator) != state:
            whose = " from before the call" if is_before and is_known else ""
            raise refused(f"a {type(generator).__name__}{whose} was seeded or drawn from: random numbers of the host")
    places = [place for place in recording.places.values() if isinstance(place, ContentPlace) and recording.is_before(place.holder)]
    for error in [error for place in places if (error := _unseen_write(recording, place)) is not None][:1]:
        raise error
    require_unwritten(recording)


def _unseen_write(recording: Recording, place: ContentPlace) -> Exception | None:
    """What to raise if a file was closed, or an array or CPU tensor that was read was changed without a recorded write. Restores it."""
    held = place.holder
    if isinstance(held, IN_MEMORY):
        if type(place) is ContentPlace and held.closed and place.content is not None:
            return refused(f"{place.title} was closed, and no call can open it again")
    elif isinstance(held, (np.ndarray, torch.Tensor)) and not recording.journal.is_written(held, ABSENT) and place.difference() is not None:
        place.put_back()
        if isinstance(held, torch.Tensor):
            return written_tensor(place) if recording.late.takes_all else LateWritesNeeded()
        return refused(f"{place.title} was written to by code that is not recorded")
    elif is_image(held) and place.difference() is not None:
        put_pixels(held, place.content)
        return refused(f"{place.title}, an image, was written to")
    return None


def _is_endless(iterator: Any) -> bool:
    """Whether an iterator gives the same value forever, so that advancing it changes nothing."""
    return isinstance(iterator, itertools.repeat) and operator.length_hint(iterator, -1) == -1  # one without `times` has no length


__all__ = ["refuse_unseen"]
