"""Features of PyTorch that this device does not support: inductor, DataParallel, names of `torch.cuda`. Errors name a replacement.

A graph that `torch.compile(model)` gives to inductor, its default backend, is compiled by backend "spmd" if its tensors are on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from mesh._mesh_errors import nearest
from spmd.base._errors import SpmdError, message
from spmd.base._torch import pytree
from spmd.base._torch_late import dynamo_backend
from spmd.patches._table import current, replace

_COMPILER, _DATA_PARALLEL = "torch._TorchCompileInductorWrapper.__call__", "torch.nn.parallel.DataParallel.__init__"

# Names of torch.cuda that torch.jax does not have, and their replacements.
INSTEAD = {
    "amp": 'torch.autocast("jax", dtype=torch.bfloat16), torch.amp.GradScaler("jax")',
    "CUDAGraph": "spmd.compile(fn): one program, dispatched at once",
    "graph": "spmd.compile(fn): one program, dispatched at once",
    "make_graphed_callables": "spmd.compile(fn): one program, dispatched at once",
    "nvtx": "jax.profiler.TraceAnnotation(name)",
    "profiler": "jax.profiler.trace(folder)",
    "memory_snapshot": "jax.profiler.save_device_memory_profile(file)",
    "nccl": "torch.jax has no communicators, since the compiler inserts the collectives: step.collectives() lists them",
    "comm": "spmd.mark_sharding(t, mesh, spec) splits and gathers tensors",
    "get_device_capability": "torch.jax.get_device_properties()",
    "can_device_access_peer": "torch.jax.device_count() is 1: a mesh of any number of chips is one device",
    "set_per_process_memory_fraction": "XLA_PYTHON_CLIENT_MEM_FRACTION in the environment, before the program starts",
    "OutOfMemoryError": "except RuntimeError: jax raises one that says RESOURCE_EXHAUSTED",
    "utilization": "the platform's own tools",
}


def no_such_name(name: str, known: list[str]) -> AttributeError:
    """The error for a name that `torch.jax` does not have.

    Args:
        known: the names that it has.
    """
    near = nearest(name, known)
    fix = INSTEAD.get(name) or (near.removeprefix("; ") if near else "print(dir(torch.jax)) lists its names")
    return AttributeError(message(f"torch.jax has no {name!r}", fix=fix), name=name)


def register() -> None:
    """Compile graphs on this device without inductor, and refuse DataParallel, from now on. Other devices are not affected."""
    compile_fx, data_parallel = current(_COMPILER), current(_DATA_PARALLEL)

    def inductor(self: Any, model_: Any, inputs_: Any, **options: Any) -> Any:
        if not _is_on_device(model_, inputs_):
            return compile_fx(self, model_, inputs_, **options)
        given = {**self.config, **(options.get("config_patches") or {})}
        if given:
            raise SpmdError(
                message(
                    "torch.compile was given a mode or options of inductor, which generates code for CPUs and GPUs, not for device 'jax'",
                    f"options of inductor: {', '.join(given)}",
                    fix='torch.compile(fn), torch.compile(fn, backend="spmd"), or spmd.compile(fn)',
                )
            )
        return dynamo_backend("spmd")(model_, inputs_)

    def __init__(self: Any, module: torch.nn.Module, *args: Any, **options: Any) -> None:
        if not torch.cuda.is_available() or any(p.device.type == "jax" for p in module.parameters()):
            raise SpmdError(
                message(
                    "nn.DataParallel splits a batch over devices, but PyTorch sees all chips as the one device 'jax'",
                    fix='spmd.mark_sharding(x, mesh, ("data", None)) splits the batch; DistributedDataParallel(model) does it for you',
                )
            )
        data_parallel(self, module, *args, **options)

    replace(_COMPILER, inductor)
    replace(_DATA_PARALLEL, __init__)


def _is_on_device(graph: Any, inputs: Iterable[Any]) -> bool:
    """Whether an input of a graph, a parameter, or a value that it computes is on this device: it may create its tensors itself."""
    state = chain(graph.parameters(), graph.buffers()) if isinstance(graph, torch.nn.Module) else ()
    nodes = graph.graph.nodes if isinstance(graph, torch.fx.GraphModule) else ()
    values = (pytree.tree_leaves(node.meta.get("example_value")) for node in nodes)
    return any(isinstance(t, torch.Tensor) and t.device.type == "jax" for t in chain(inputs, state, chain.from_iterable(values)))


__all__ = ["INSTEAD", "no_such_name", "register"]
