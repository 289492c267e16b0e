"""All private names of jax that `mesh` uses. Those that `spmd` uses are in `spmd/base/_jax.py`.

Any version of jax may remove one. Importing this file then raises an ImportError that lists the versions that have it.
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
except ImportError:  # `mesh._devices` then tries to change the number of CPU devices, which jax refuses once started
    _backends_are_initialized = None
backends_are_initialized: Callable[[], bool] | None = _backends_are_initialized


def coordination_client() -> Any:
    """The client of the coordination service that `jax.distributed.initialize` started; None before."""
    return cast("Any", global_state).client
