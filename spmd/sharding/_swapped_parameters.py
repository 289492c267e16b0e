"""Parameters of modules that are others for a while: gathered ones, casts.

    swapped = SwappedParameters()
    swapped.put(module._parameters, "weight", gathered)
    ...
    swapped.restore()

A trace records what these methods write, as it does for the user's own code. So a module that is passed on meanwhile, to
`functools.partial` or to a library, has its own parameters when the trace ends: nothing has changed.
"""

from __future__ import annotations

from typing import Any

import torch


class SwappedParameters:
    """Entries of the dicts `_parameters` of modules, and the parameters that belong there."""

    def __init__(self) -> None:
        self._own: list[tuple[dict[str, Any], str, Any]] = []

    def put(self, parameters: dict[str, Any], name: str, value: torch.Tensor) -> None:
        """Put a tensor in place of a parameter."""
        self._own.append((parameters, name, parameters[name]))
        parameters[name] = value

    def restore(self) -> None:
        """Put all parameters back."""
        while self._own:
            parameters, name, parameter = self._own.pop()
            parameters[name] = parameter


__all__ = ["SwappedParameters"]
