"""`MpDeviceLoader`: uploads batches to the devices, laid out over a mesh, while a step runs.

    loader = spmd.MpDeviceLoader(train_loader, "jax", input_sharding=spmd.ShardingSpec(m, ("data", None)))
    for x, y in loader: ...

If a batch has tensors of different rank, pass a dict of specs, or one spec; tensors of another rank are then replicated.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import jax
import torch

from mesh import ShardingSpec
from spmd.base._convert import exact_dtypes, host_array
from spmd.base._errors import ShardError, SpmdError, message, shown
from spmd.base._torch import pytree
from spmd.base._wrong_arguments import require_iterable, wrong_argument
from spmd.device._deferred import end_step
from spmd.device._storage import buffer_of, wrap
from spmd.sharding._annotate import mark_sharding
from spmd.sharding._tensor import become_sharded

InputSharding = ShardingSpec | Mapping[str, "ShardingSpec | None"]


class MpDeviceLoader:
    """An iterable of batches on device 'jax' around an iterable of batches on the host.

    Under `spmd.lazy()` a step ends when the next batch is requested.

    Args:
        loader: any iterable, such as a `torch.utils.data.DataLoader`; iterated once per epoch.
        device: device of the batches; always 'jax'.
        input_sharding: layout of tensors with as many dims as the spec; a dict of specs for batches that are dicts. Other
            tensors stay unmarked, which replicates them. With `minibatch=True` the batch is this host's part.
        device_prefetch_size: number of batches that are uploaded ahead.
        options: torch_xla's other arguments (`batchdim`, `loader_prefetch_size`, ...); they have no effect here.

    Raises:
        SpmdError: an argument is of a wrong type. While iterating: the keys of `input_sharding` do not fit the batch.
        ShardError: while iterating: this host's devices do not divide a minibatch.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: Any = "jax",
        *,
        input_sharding: InputSharding | None = None,
        device_prefetch_size: int = 8,
        **options: Any,
    ) -> None:
        unknown = options.keys() - {"batchdim", "batches_per_execution", "loader_prefetch_size", "host_to_device_transfer_threads"}
        if unknown:
            raise SpmdError(message(f"MpDeviceLoader has no option {', '.join(sorted(unknown))}", fix="leave it out"))
        _require(loader, device, input_sharding, device_prefetch_size)
        self._loader = loader
        # torch_xla's name, because Hugging Face's Trainer writes the sharding of its batches there.
        self._parallel_loader_kwargs: dict[str, Any] = {"input_sharding": input_sharding}
        self._prefetch = max(1, device_prefetch_size)

    def __len__(self) -> int:
        return len(cast("Any", self._loader))

    def __iter__(self) -> Iterator[Any]:
        batches = (placed(batch, self._parallel_loader_kwargs["input_sharding"]) for batch in self._loader)
        pool = ThreadPoolExecutor(1, "spmd.MpDeviceLoader")
        ahead = deque(pool.submit(next, batches, _END) for _ in range(self._prefetch))
        try:
            while (batch := ahead.popleft().result()) is not _END:  # raises exceptions of the loader and the upload
                ahead.append(pool.submit(next, batches, _END))
                yield batch
                end_step()
        finally:
            pool.shutdown(cancel_futures=True)


def _require(loader: object, device: object, sharding: object, prefetch: object) -> None:
    require_iterable(loader, "MpDeviceLoader", 'spmd.MpDeviceLoader(DataLoader(dataset, 64), "jax")')
    if not isinstance(device, str | torch.device) or str(device).partition(":")[0] not in ("jax", "xla"):
        raise wrong_argument(f"device of MpDeviceLoader is always 'jax', got {shown(device)}", 'spmd.MpDeviceLoader(loader, "jax")')
    specs = [*sharding.values()] if isinstance(sharding, Mapping) else [sharding]
    if not all(spec is None or isinstance(spec, ShardingSpec) for spec in specs):
        what = f"input_sharding of MpDeviceLoader must be a ShardingSpec, or a dict of them, got {shown(sharding)}"
        raise wrong_argument(what, 'spmd.MpDeviceLoader(loader, input_sharding=spmd.ShardingSpec(mesh, ("data", None)))')
    if type(prefetch) is not int:
        what = f"device_prefetch_size of MpDeviceLoader must be a number of batches, got {shown(prefetch)}"
        raise wrong_argument(what, "spmd.MpDeviceLoader(loader, device_prefetch_size=8)")


def placed(batch: Any, input_sharding: InputSharding | None) -> Any:
    """A batch with its tensors on device 'jax', laid out by the spec with as many dims."""
    if isinstance(input_sharding, Mapping):
        if not isinstance(batch, Mapping) or not input_sharding.keys() <= batch.keys():
            found = f"its keys: {list(batch)}" if isinstance(batch, Mapping) else f"it is a {type(batch).__name__}"
            raise SpmdError(
                message(f"input_sharding for {list(input_sharding)} does not fit the batch", found, fix="use the keys of the batch")
            )
        return _mapped(batch, lambda key, value: placed(value, input_sharding.get(key)))
    if isinstance(batch, Mapping) and type(batch) not in pytree.SUPPORTED_NODES:  # a leaf to torch: Hugging Face's BatchEncoding
        return _mapped(batch, lambda key, value: placed(value, input_sharding))
    return pytree.tree_map_only(torch.Tensor, lambda t: _on_device(t, input_sharding), batch)


def _mapped(batch: Mapping[Any, Any], fn: Callable[[Any, Any], Any]) -> Mapping[Any, Any]:
    """Apply `fn` to each key and value. The result has the mapping's class if that is mutable, else it is a dict."""
    made: MutableMapping[Any, Any] = copy.copy(batch) if isinstance(batch, MutableMapping) else {}
    for key, value in batch.items():
        made[key] = fn(key, value)
    return made


def _on_device(tensor: torch.Tensor, spec: ShardingSpec | None) -> torch.Tensor:
    if spec is None or tensor.dim() != len(spec.partition_spec):
        return tensor.to("jax")
    if spec.minibatch:
        return _from_part(tensor, spec)
    return mark_sharding(tensor.to("jax"), spec.mesh, spec.partition_spec)


def _from_part(tensor: torch.Tensor, spec: ShardingSpec) -> torch.Tensor:
    """The global batch of which `tensor` is this host's part; dim 0 concatenates the parts of all hosts in order."""
    local, hosts = jax.local_device_count(), jax.process_count()
    if tensor.shape[0] % local:
        raise ShardError(
            message(
                "When minibatch is configured, the per-host batch size must be divisible by local runtime device count. "
                f"Per host input data shape {tuple(tensor.shape)}, {local} devices",
                fix=f"use a batch of {-(-tensor.shape[0] // local) * local}, or drop_last=True in the loader",
            )
        )
    shape = (tensor.shape[0] * hosts, *tensor.shape[1:])
    spec.validate(shape)
    with exact_dtypes():
        array = jax.make_array_from_process_local_data(spec.to_jax(), host_array(tensor), shape)
    out = wrap(array)
    buffer_of(out).annotation = spec
    return become_sharded(out)


_END = object()
