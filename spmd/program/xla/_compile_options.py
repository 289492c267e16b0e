"""The compiler options of programs.

Note [Matrix products of XLA:CPU]
    XLA:CPU gives matrix products to the library YNNPACK by default. To read an executable, it then searches all instructions of the
    program once per product (`YnnFusionThunkFromProto`), and the first run prepares every product. For GPT-2 with 24 layers, not
    rolled, this is half of the time to read the executable, and most of the first run. Eigen, the default before, needs neither and is
    as fast in later runs, or faster.
"""

from __future__ import annotations

from typing import Any

import jax

from mesh import topology_options
from mesh.job._join import program_environment

_PRODUCTS = "xla_cpu_experimental_ynn_fusion_type"
_unknown: set[str] = set()  # options that this version of XLA does not have


def compiled(lowered: jax.stages.Lowered, platform: str, *, is_ahead: bool = False) -> Any:
    """The executable of a lowered program.

    Args:
        platform: of its devices ("cpu", "gpu", "tpu").
        is_ahead: it is compiled for a topology that is not attached.
    """
    options: dict[str, Any] = topology_options() if is_ahead else {}
    is_given = any(_PRODUCTS in flags for flags in program_environment().values())
    if platform == "cpu" and not is_given and _PRODUCTS not in _unknown:
        try:
            return lowered.compile({**options, _PRODUCTS: ""})
        except jax.errors.JaxRuntimeError as error:
            if _PRODUCTS not in str(error):
                raise
            _unknown.add(_PRODUCTS)
    return lowered.compile(options or None)


__all__ = ["compiled"]
