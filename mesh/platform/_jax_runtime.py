"""jax's private names that `mesh` uses; no other file of it names one. Those that `spmd` uses are in `spmd/base/_jax.py`.

Each may go with any version of jax. One that is gone says so when this file is imported, with the versions that have it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax

from mesh._mesh_errors import message

TRIED = "jax 0.10.0 to 0.10.2"  # the versions that are known to have all private names


def missing(what: str) -> ImportError:
    """The error for a private name that this jax does not have."""
    return ImportError(
        message(
            f"jax {jax.__version__} has no {what}, a private name that spmd uses",
            f"tested versions: {TRIED}",
            fix="pip install 'jax>=0.10,<0.11'",
        )
    )


try:
    from jax._src.distributed import global_state
    from jax._src.lax.parallel import reduce_scatter_p as reduce_scatter_p
except ImportError as error:
    raise missing(str(error)) from error

try:
    from jax._src.xla_bridge import backends_are_initialized as _backends_are_initialized
except ImportError:  # whether jax refuses another number of devices says the same
    _backends_are_initialized = None
backends_are_initialized: Callable[[], bool] | None = _backends_are_initialized


def coordination_client() -> Any:
    """The client of the coordination service that `jax.distributed.initialize` started; None before."""
    return cast("Any", global_state).client
