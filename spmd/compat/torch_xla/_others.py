"""Smaller modules of torch_xla: loader, wrapping policies, checkpointing, profiling, autocast, compiled graphs."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import torch
import torch.utils.checkpoint as torchs_checkpoint
from torch import nn

from mesh import has_topology
from spmd.base._errors import SpmdError, message
from spmd.compat.torch_xla import _debug_metrics, _device_names
from spmd.compat.torch_xla._step_ends import is_eager, mark_step, record, run_eagerly
from spmd.xla_names._device_loader import MpDeviceLoader as OurLoader
from spmd.xla_names._fsdp_v2 import recursive_wrap as recursive_wrap


class MpDeviceLoader(OurLoader):
    """`spmd.MpDeviceLoader`; a step ends when the next batch is requested."""

    def __init__(self, loader: Iterable[Any], device: Any = None, **options: Any) -> None:
        super().__init__(loader, "jax" if device is None else device, **options)

    def __iter__(self) -> Iterator[Any]:
        sharding = self._parallel_loader_kwargs["input_sharding"]
        inside = OurLoader(_InMode(self._loader, sharding), "jax", input_sharding=sharding, device_prefetch_size=self._prefetch)
        for batch in inside:
            yield batch
            mark_step()

    def close(self) -> None:
        """Do nothing: prefetching ends with the iteration."""


class ParallelLoader(MpDeviceLoader):
    """`MpDeviceLoader` under another name; `devices` is a list of the one device."""

    def __init__(self, loader: Iterable[Any], devices: Any, **options: Any) -> None:
        super().__init__(loader, devices[0] if isinstance(devices, list | tuple) and len(devices) == 1 else devices, **options)

    def per_device_loader(self, device: Any) -> Iterator[Any]:
        return iter(self)


class _InMode:
    """The program's loader, run in the prefetching thread with "xla" meaning device 'jax'.

    Raises:
        InputShardingError: while iterating: shardings by key for a batch that is not a dict, or a key without one (ValueError, KeyError).
    """

    def __init__(self, loader: Any, input_sharding: Any = None) -> None:
        self._loader = loader
        self._keys = list(input_sharding) if isinstance(input_sharding, Mapping) else None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._loader)
        while True:
            with _device_names.mode:
                item = next(items, _END)
            if item is _END:
                return
            if self._keys is not None:
                _require_keys(item, self._keys)
            yield item


_END = object()


class InputShardingError(SpmdError, ValueError):
    """Shardings by key were given for a batch that is not a dict."""


class NoInputShardingError(SpmdError, KeyError):
    """A key of the batch has no sharding."""

    __str__ = Exception.__str__


def _require_keys(batch: Any, keys: Sequence[Any]) -> None:
    if not isinstance(batch, Mapping):
        fix = "input_sharding=ShardingSpec(mesh, spec) for tensors and tuples"
        raise InputShardingError(message(f"input_sharding by keys {keys} was given for a batch that is a {type(batch).__name__}", fix=fix))
    absent = [key for key in batch if key not in keys]
    if absent:
        what = f"input_sharding has no entry for {', '.join(map(repr, absent))} of the batch"
        raise NoInputShardingError(message(what, f"it has {keys}", fix=f"{{..., {absent[0]!r}: None}} replicates it"))


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint` without reentrance; compiled steps recompute behind an optimization barrier."""
    return torchs_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Checkpoint the module's forward pass, in place."""
    forward = module.forward
    module.forward = functools.wraps(forward)(lambda *args, **kwargs: checkpoint(forward, *args, **kwargs))
    return module


def transformer_auto_wrap_policy(module: nn.Module, recurse: bool, unwrapped_params: int, transformer_layer_cls: Iterable[type]) -> bool:
    """Wrap modules of these classes."""
    return True if recurse else isinstance(module, tuple(transformer_layer_cls))


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    unwrapped_params: int,
    min_num_params: int = 100_000_000,
    force_leaf_modules: Iterable[type] = (nn.MultiheadAttention,),
    exclude_wrap_modules: Iterable[type] = (nn.ModuleList, nn.ModuleDict),
) -> bool:
    """Wrap modules with at least `min_num_params` elements that are not wrapped yet."""
    is_large = unwrapped_params >= min_num_params
    if recurse:
        return is_large and not isinstance(module, tuple(force_leaf_modules))
    return is_large and not isinstance(module, tuple(exclude_wrap_modules))


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    return True


class Trace(jax.profiler.TraceAnnotation):
    """Names a part of the program in profiles: its Python code, and the operations that a compiled function records in it."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name, **kwargs)
        self._name = name

    def __enter__(self) -> Any:
        self._scope: Any = jax.named_scope(self._name)
        self._scope.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        result = super().__exit__(*error)
        self._scope.__exit__(*error)
        return result


class StepTrace(jax.profiler.StepTraceAnnotation):
    """Names a step of the program in profiles."""

    def __init__(self, name: str, **kwargs: Any) -> None:
        super().__init__(name, **kwargs)


def start_server(port: int, only_on_master: bool = True) -> Any:
    return jax.profiler.start_server(port)


def start_trace(log_dir: str) -> None:
    """Start a profile, written to a folder.

    Raises:
        ProfileError: libtpu is loaded on a machine without TPUs, where starting a profile would end the process.
    """
    _require_no_topology()
    jax.profiler.start_trace(log_dir)


class ProfileError(SpmdError, RuntimeError):
    """A profile cannot be taken here."""


def _require_no_topology() -> None:
    if has_topology() and jax.default_backend() != "tpu":
        raise ProfileError(
            message(
                "no profile can be taken in this process",
                "it has compiled for a TPU topology, and libtpu without a TPU ends the process when a profile starts",
                fix="take the profile in another process, without mesh.Mesh(..., topology=...)",
            )
        )


def stop_trace() -> None:
    jax.profiler.stop_trace()


def trace_detached(service_addr: str, logdir: str, duration_ms: int = 1000, **options: Any) -> threading.Thread:
    """Profile this process in the background for some time, into a folder. Returns the thread that does it.

    Args:
        service_addr: accepted for compatibility; the profiled process is always this one.
        logdir: the folder.
        duration_ms: duration in milliseconds.
        options: torch_xla's other arguments, which tune its server; no effect.
    """
    _require_no_topology()
    ended = threading.Event()

    def take() -> None:
        start_trace(logdir)
        ended.wait(duration_ms / 1000)
        stop_trace()

    thread = threading.Thread(target=take, name="torch_xla.trace", daemon=True)
    thread.start()
    atexit.register(lambda: (ended.set(), thread.join()))  # a program that ends earlier still writes the profile
    return thread


def trace(service_addr: str, logdir: str, duration_ms: int = 1000, **options: Any) -> None:
    """`trace_detached`, but waits for the end."""
    trace_detached(service_addr, logdir, duration_ms).join()


class autocast(torch.autocast):
    """`torch.autocast` on the device, with bfloat16 by default."""

    def __init__(
        self, device: Any = None, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool | None = None
    ) -> None:
        super().__init__("jax", dtype=dtype or torch.bfloat16, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` on the device."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        super().__init__("jax", init_scale, growth_factor, backoff_factor, growth_interval, enabled)


def eager_mode(enable: bool) -> None:
    """Whether operations run immediately, or are deferred to the end of the step and run as one program."""
    if enable:
        run_eagerly()
    else:
        record()


def is_eager_mode() -> bool:
    return is_eager()


def extract_compiled_graph(graph: Any, args: Any) -> Callable[..., Any]:
    """The graph as a function that is compiled as one program, for PyTorch's own backend "openxla".

    A graph that writes to its inputs runs operation by operation.
    """
    from spmd.base._errors import TraceError
    from spmd.program.flow._pure import assume_pure

    pure = assume_pure(graph.forward)

    def run(*inputs: Any) -> Any:
        try:
            with torch.no_grad(), _debug_metrics.program():
                return pure(*inputs)
        except TraceError:
            return graph.forward(*inputs)

    return run
