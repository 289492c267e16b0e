"""Whether dicts were written to since somebody last looked at all their values, for the price of a look at one number each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.base._torch import dict_version as _version


class DictVersions:
    """Remembers a state of some dicts. Writing the value that an entry already has may count as a change; nothing else is missed."""

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._known: list[int] | None = None

    def are_known(self) -> bool:
        """No dict was written to since `know`; False before it, and always with a torch that cannot tell."""
        return self._known is not None and list(map(_version, self._dicts)) == self._known  # pyright: ignore[reportArgumentType]

    def know(self) -> None:
        """The dicts as they are now are the ones to remember."""
        if _version is not None:
            self._known = list(map(_version, self._dicts))
