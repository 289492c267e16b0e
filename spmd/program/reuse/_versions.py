"""Whether dicts were written to since somebody last looked at all their values, for the price of a look at one number each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import ne
from typing import Any, TypeVar

from spmd.base._torch import dict_version as _version

T = TypeVar("T")


class DictVersions:
    """Remembers a state of some dicts. Writing the value that an entry already has may count as a change; nothing else is missed.

    `know` and `changed` speak of the versions that `unchanged` has just seen.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._known: list[int] | None = None
        self._seen: list[int] | None = None

    def unchanged(self) -> bool:
        """No dict was written to since `know`; False before it, and always with a torch that cannot tell."""
        if _version is None:
            return False
        self._seen = list(map(_version, self._dicts))
        return self._seen == self._known

    def changed(self, parallel: Sequence[T]) -> list[T]:
        """Of a sequence parallel to the dicts, the items whose dict may have been written to since `know`; all of them before it."""
        if self._known is None or self._seen is None:
            return list(parallel)
        return list(compress(parallel, map(ne, self._seen, self._known)))

    def know(self) -> None:
        """The dicts as they were seen are the ones to remember."""
        self._known = self._seen
