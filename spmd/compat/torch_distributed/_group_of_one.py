"""Process groups of a single program: backend "spmd" of `torch.distributed`. Its only rank is the program with its devices.

    dist.init_process_group("spmd", init_method="spmd://")     # init_device_mesh("jax", ...) calls it
    dist.get_rank(), dist.get_world_size()                     # 0, 1

In torch a rank is a process. Here one process drives all devices and its tensors are global, so a sum over ranks is the tensor
itself, and a gathered list has one element.
"""

# pyright: reportIncompatibleMethodOverride=none, reportIncompatibleVariableOverride=none, reportAssignmentType=none
# (torch's signatures differ from version to version)

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from spmd.base._errors import SpmdError, message
from spmd.base._torch import is_registered_group, pytree, work_of_future

BACKEND = "spmd"
_registered: list[bool] = []
when_made: list[Callable[[], None]] = []  # callbacks that run when such a group is created


class GroupError(SpmdError, RuntimeError):
    """A process group that a single program cannot have."""


class GroupOfOne(dist.ProcessGroup):
    """The group of a single program. Each collective returns its input."""

    supports_splitting = False  # asked of a device's backend by `init_process_group(device_id=)`

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # pyright: ignore[reportCallIssue]
        self._name = ""
        self.bound_device_id: Any = torch.device("jax", 0)  # else `barrier` warns that no device was given

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> Any:
        """The name that torch assigned. The C++ property would ask a backend."""
        return self._name

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of the group; none while torch creates it: torch 2.15 attaches a recorder in C++ to a group that has some."""
        return [torch.device("jax")] if is_registered_group(self) else []

    def _get_backend(self, device: torch.device) -> GroupOfOne:
        """The backend for a device: one group serves all. C++ knows none for a group written in Python."""
        return self

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return _done(tensors)

    allreduce_coalesced = broadcast = reduce = allreduce

    def barrier(self, opts: Any = None) -> Any:
        return _done(None)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        return _copied(outputs, inputs)

    allgather_coalesced = gather = scatter = reduce_scatter = alltoall = allgather
    all_gather_single = _allgather_base = allgather_into_tensor_coalesced = all_gather_single_coalesced = allgather
    reduce_scatter_single = _reduce_scatter_base = reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = allgather

    def all_to_all_single(self, output: Any, given: Any, output_sizes: Any = None, input_sizes: Any = None, opts: Any = None) -> Any:
        return _copied(output, given)

    alltoall_base = all_to_all_single

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Any:
        raise GroupError(
            message("a single program has no other rank to send to", f"rank {peer} was named", fix="use the tensor itself: it is global")
        )

    recv = recv_anysource = send


def _done(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return work_of_future(future)


def _copied(outputs: Any, inputs: Any) -> Any:
    """Copy each input to its output."""
    targets, sources = pytree.tree_leaves(outputs), pytree.tree_leaves(inputs)
    if len(targets) != len(sources):
        what = f"a collective of one rank was given {len(sources)} input and {len(targets)} output tensors"
        raise GroupError(message(what, fix="one program is one rank: dist.get_world_size() is 1"))
    with torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.reshape(target.shape))
    return _done(outputs)


def register() -> None:
    """Register the backend, the default for device 'jax', and `spmd://` with torch.distributed, once per process."""
    if _registered or not dist.is_available():
        return
    _registered.append(True)
    dist.Backend.register_backend(BACKEND, _made, devices=["jax"])
    register_rendezvous_handler(BACKEND, _rendezvous)


def require_group() -> Any:
    """The default process group: the user's group of one rank, else a new one of ours.

    Raises:
        GroupError: the user's group has several ranks.
    """
    if not dist.is_initialized():
        dist.init_process_group(BACKEND, init_method=f"{BACKEND}://")
    _require_one(dist.get_world_size())
    return dist.group.WORLD


def _made(store: Any, rank: int, size: int, timeout: Any) -> GroupOfOne:
    _require_one(size)
    for tell in when_made:
        tell()
    return GroupOfOne(rank, size)


def _rendezvous(url: str, timeout: Any = None, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """(store, rank, world size) of a single process."""
    yield dist.HashStore(), 0, 1  # pyright: ignore[reportPrivateImportUsage]


def _require_one(size: int) -> None:
    if jax.process_count() > 1:
        what = f"torch.distributed's groups need a program in one process, but this job has {jax.process_count()}"
        raise GroupError(message(what, fix="use mesh.init(), mesh.Mesh and spmd.mark_sharding, which know the job"))
    if size != 1:
        raise GroupError(
            message(
                f"device 'jax' has one rank, but the process group has {size}",
                "one process drives all devices, and several processes would use the same ones",
                fix="start the program once: torchrun --nproc-per-node 1, or python alone",
            )
        )


__all__ = ["BACKEND", "GroupError", "GroupOfOne", "register", "require_group", "when_made"]
