"""`torch_xla.core.xla_model`."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import torch

from mesh import device_attributes
from mesh import devices as all_devices
from spmd.base._torch import pytree
from spmd.compat.torch_xla._device_names import XLA
from spmd.compat.torch_xla._step_ends import add_step_closure as add_step_closure
from spmd.compat.torch_xla._step_ends import mark_step as mark_step
from spmd.compat.torch_xla._step_ends import wait_device_ops as wait_device_ops
from spmd.compat.torch_xla._xm_collectives import REDUCE_AND as REDUCE_AND
from spmd.compat.torch_xla._xm_collectives import REDUCE_MAX as REDUCE_MAX
from spmd.compat.torch_xla._xm_collectives import REDUCE_MIN as REDUCE_MIN
from spmd.compat.torch_xla._xm_collectives import REDUCE_MUL as REDUCE_MUL
from spmd.compat.torch_xla._xm_collectives import REDUCE_OR as REDUCE_OR
from spmd.compat.torch_xla._xm_collectives import REDUCE_SUM as REDUCE_SUM
from spmd.compat.torch_xla._xm_collectives import all_gather as all_gather
from spmd.compat.torch_xla._xm_collectives import all_reduce as all_reduce
from spmd.compat.torch_xla._xm_collectives import all_to_all as all_to_all
from spmd.compat.torch_xla._xm_collectives import collective_permute as collective_permute
from spmd.compat.torch_xla._xm_collectives import reduce_scatter as reduce_scatter
from spmd.device._random_stream import default_stream
from spmd.xla_names._barrier import optimization_barrier_ as optimization_barrier_
from spmd.xla_names._device_loader import placed


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The one PyTorch device, "xla:0", which represents all devices."""
    return XLA


def xla_device_hw(device: Any) -> str:
    """Kind of hardware: "CPU", "TPU" or "CUDA"."""
    platform = all_devices()[0].platform.upper()
    return "CUDA" if platform == "GPU" else platform


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "jax"


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    return ["xla:0"]


def xla_real_devices(devices: Any = None) -> list[str]:
    """The real devices: "CPU:0", "CPU:1", ... For given devices, the first real device of each."""
    names = [str(attributes["name"]) for attributes in device_attributes()]
    return names if devices is None else [names[torch.device(device).index or 0] for device in devices]


def xla_replication_devices(local_devices: Any = None) -> list[str]:
    """The real devices over which values on the one device are spread."""
    return xla_real_devices()


def set_replication(device: Any, devices: Any) -> None:
    """Do nothing: there are no replicas to set up."""


def xla_device_kind(device: Any = None) -> str:
    """The devices' own name of their kind."""
    return all_devices()[0].device_kind


def parse_xla_device(device: str) -> tuple[str, int] | None:
    match = re.match(r"([A-Z]+):(\d+)$", device)
    return (match[1], int(match[2])) if match else None


def xrt_world_size(defval: int = 1) -> int:
    """Number of replicas: always one under SPMD."""
    return 1


def get_ordinal(defval: int = 0) -> int:
    return 0


get_local_ordinal = get_ordinal


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is the first process."""
    return local or jax.process_index() == 0


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    if is_master_ordinal(local):
        stream = fd or sys.stdout
        stream.write(" ".join(map(str, args)) + "\n")
        if flush:
            stream.flush()


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """Wait for all processes. Returns their payloads, in order."""
    if jax.process_count() == 1:
        return [payload]
    from jax.experimental import multihost_utils

    multihost_utils.sync_global_devices(tag)
    sizes = multihost_utils.process_allgather(np.array([len(payload)]))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(payload)] = np.frombuffer(payload, np.uint8)
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[: int(size)]) for row, size in zip(rows, sizes.ravel(), strict=True)]


def xla_rendezvous(payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None) -> list[bytes]:
    """`rendezvous` with an optional tag."""
    return rendezvous(tag or "torch_xla.core.xla_model.xla_rendezvous", payload)


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """`reduce_fn` of a list with the data of each process, tensors on the CPU. A single process has a list of one."""
    mine = _on_host(data)
    if jax.process_count() == 1:
        return reduce_fn([mine])
    written = io.BytesIO()
    torch.save(mine, written)
    return reduce_fn([torch.load(io.BytesIO(theirs), weights_only=False) for theirs in rendezvous(tag, written.getvalue())])


def do_on_ordinals(target: Callable[..., Any], data: Any = (), ordinals: Sequence[int] = (0,)) -> None:
    """Call `target(*data)`, with tensors on the CPU, if this process is one of `ordinals`."""
    if jax.process_index() in ordinals:
        target(*_on_host(data))
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Do nothing: there is only one copy of the parameters."""


def _on_host(data: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu().as_subclass(torch.Tensor), data)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: Any = None,
    pin_layout: bool = True,
) -> Any:
    """`optimizer.step(**optimizer_args)`. Gradients are already global, so nothing is reduced."""
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


def reduce_gradients(optimizer: torch.optim.Optimizer, groups: Any = None, pin_layout: bool = True) -> None:
    """Do nothing: gradients of global tensors are global."""


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:  # pyright: ignore[reportUnusedFunction]
    """An empty list: no gradients remain to be reduced. accelerate calls it and passes the result to `all_reduce`."""
    return []


def _maybe_convert_to_cpu(data: Any, convert: bool = True) -> Any:  # pyright: ignore[reportUnusedFunction]
    """Containers with their device tensors on the host, for Hugging Face's Trainer to save."""
    return _on_host(data) if convert else data


def send_cpu_data_to_device(data: Any, device: Any, input_sharding: Any = None) -> Any:
    """A container with its tensors on the device, laid out by `input_sharding` where it fits."""
    return placed(data, input_sharding)


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    wait_device_ops()


def set_rng_state(seed: int, device: Any = None) -> None:
    """Set the device's random stream to a seed, or restore a result of `get_rng_state`."""
    draws, start = divmod(int(seed), _DRAWS)
    torch.get_device_module("jax").manual_seed(start)
    default_stream.draws = draws


def get_rng_state(device: Any = None) -> int:
    """The state of the device's random stream: its seed, and in the higher bits its number of draws."""
    return default_stream.seed + default_stream.draws * _DRAWS


@contextmanager
def fork_rng(device: Any = None, enabled: bool = True) -> Generator[None]:
    """Restore the device's random stream after the `with` block."""
    before = get_rng_state()
    try:
        yield
    finally:
        if enabled:
            set_rng_state(before)


_DRAWS = 2**64


def save(data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False) -> None:
    """`torch.save` of CPU copies. With `master_only` only the first process writes."""
    on_host = _on_host(data)
    if not master_only or is_master_ordinal(local=not global_master):
        torch.save(on_host, file_or_path)
    rendezvous("torch_xla.core.xla_model.save")


def get_memory_info(device: Any = None) -> dict[str, int]:
    """Bytes in use and the limit, of the first device; zeros if the platform does not report them."""
    found: Any = all_devices()[0]
    stats = found.memory_stats() or {}
    return {"bytes_used": stats.get("bytes_in_use", 0), "bytes_limit": stats.get("bytes_limit", 0)}


class RateTracker:
    """Counts per second, smoothed."""

    def __init__(self, smooth_factor: float = 0.4) -> None:
        self._smooth = smooth_factor
        self._start = self._partial_start = time.time()
        self._partial = self._count = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        self._count += count
        self._partial += count

    def rate(self) -> float:
        elapsed = time.time() - self._partial_start
        if elapsed > 0:
            now = self._partial / elapsed
            self._rate = now if self._rate is None else (1 - self._smooth) * now + self._smooth * self._rate
            self._partial, self._partial_start = 0.0, time.time()
        return self._rate or 0.0

    def global_rate(self) -> float:
        elapsed = time.time() - self._start
        return self._count / elapsed if elapsed > 0 else 0.0


def check_view_sharing(obj: Any) -> None:
    """Do nothing: views that share a storage are saved and restored as such."""
