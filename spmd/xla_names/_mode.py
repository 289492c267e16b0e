"""torch_xla's switch for SPMD execution, the only mode here."""

from __future__ import annotations

from spmd.base._errors import SpmdError, message


def use_spmd(auto: bool = False) -> None:
    """Does nothing: one process always drives all devices. May be called at any time, also after tensors were created.

    Args:
        auto: torch_xla's automatic sharding by the compiler, which does not exist here.

    Raises:
        SpmdError: `auto` is True.
    """
    if auto:
        raise SpmdError(
            message(
                "use_spmd(auto=True) asks for XLA's automatic sharding, which is not available",
                fix="xla_distribute_module(model, mesh, auto_policy) splits every parameter along its largest dim",
            )
        )


def is_spmd() -> bool:
    """Always True."""
    return True
