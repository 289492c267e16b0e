"""`torch_xla.distributed.xla_backend`: process groups of programs for torch_xla, whose single process drives all devices.

`init_process_group("gloo", init_method="xla://")` makes the group of one that checkpoints and samplers need. Backend "xla", whose
collectives would run between replicas on devices, is refused under SPMD, as in torch_xla.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from spmd.base._errors import SpmdError, message

_registered: list[bool] = []


class BackendError(SpmdError, AssertionError):
    """A process group for reductions over replicas was requested."""


class ProcessGroupXla(dist.ProcessGroup):
    """The class of groups of backend "xla", for `isinstance`; there are no instances."""


def register() -> None:
    """Register backend "xla" and `xla://` with torch.distributed, once per process."""
    if _registered or not dist.is_available():
        return
    _registered.append(True)
    dist.Backend.register_backend("xla", _refused, devices=["xla"])
    register_rendezvous_handler("xla", _rendezvous)


def _refused(*args: Any) -> Any:
    raise BackendError(
        message(
            "process group backend 'xla' reduces over replicas, but SPMD has none: one process drives all devices",
            fix="init_process_group('gloo', init_method='xla://') for values on the host; global tensors need no reduction",
        )
    )


def _rendezvous(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """(store, rank, world size) of a single process."""
    if jax.process_count() > 1:
        fix = "init_process_group('gloo', init_method='env://', rank=xr.process_index(), world_size=xr.process_count())"
        raise BackendError(message(f"xla:// needs a single process, but this job has {jax.process_count()}", fix=fix))
    yield dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]
