"""Whether dicts were written to since somebody last looked at all their values, for the price of a look at one number each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from spmd.base._torch import dict_version as _version

T = TypeVar("T")


class DictVersions:
    """Remembers a state of some dicts. Writing the value that an entry already has may count as a change; nothing else is missed."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._known: list[int] | None = None

    def are_known(self) -> bool:
        """No dict was written to since `know`; False before it, and always with a torch that cannot tell."""
        return self._known is not None and list(map(_version, self._dicts)) == self._known  # pyright: ignore[reportArgumentType]

    def changed(self, parallel: Sequence[T]) -> list[T]:
        """Of a sequence parallel to the dicts, the items whose dict may have been written to since `know`; all of them before it."""
        if self._known is None:
            return list(parallel)
        return [item for item, d, known in zip(parallel, self._dicts, self._known, strict=True) if _version(d) != known]  # pyright: ignore[reportOptionalCall]

    def know(self) -> None:
        """The dicts as they are now are the ones to remember."""
        if _version is not None:
            self._known = list(map(_version, self._dicts))
