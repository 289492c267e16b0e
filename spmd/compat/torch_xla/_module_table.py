"""Which module of torch_xla is made of what. A name that is missing is refused with the module's name and a way on."""

from __future__ import annotations

import importlib.machinery
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from spmd.compat.torch_xla import _debug_metrics, _debugging, _others, _root, _runtime, _spmd, _xla_model, _xlac
from spmd.program.flow._pure import assume_pure
from spmd.program.flow._scan import scan, scan_layers
from spmd.xla_names._fsdp_v2 import SpmdFullyShardedDataParallel
from spmd.xla_names._gradient_accumulation import gradient_accumulation


def _names(module: Any) -> dict[str, Any]:
    """What a module offers: its public names, and private ones that are no dunder."""
    return {name: value for name, value in vars(module).items() if not name.startswith("__") and not isinstance(value, types.ModuleType)}


def _of(module: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


_WRAP = ("always_wrap_policy", "recursive_wrap", "size_based_auto_wrap_policy", "transformer_auto_wrap_policy")
_SHARDED = {"XLAShard": _spmd.XLAShard, "XLAShardedTensor": _spmd.XLAShardedTensor}


def contents() -> dict[str, Mapping[str, Any]]:
    """Module name -> its names."""
    spmd_names = {**_names(_spmd), "_mark_manual_sharding": _spmd.manual_only}
    profiler = _of(_others, ["StepTrace", "Trace", "start_server", "start_trace", "stop_trace"])
    return {
        "torch_xla": {**_names(_root), "__version__": _root.__version__},
        "torch_xla._XLAC": _xlac.QUERIES,
        "torch_xla.amp": {**_of(_others, ["autocast"])},
        "torch_xla.amp.syncfree": {name: getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW")},
        "torch_xla.core": {},
        "torch_xla.core.xla_model": _names(_xla_model),
        "torch_xla.core.xla_builder": _of(_others, ["call_jax"]),
        "torch_xla.core.dynamo_bridge": _of(_others, ["extract_compiled_graph"]),
        "torch_xla.debug": {},
        "torch_xla.debug.metrics": _names(_debug_metrics),
        "torch_xla.debug.profiler": profiler,
        "torch_xla.distributed": {},
        "torch_xla.distributed.fsdp": {**_of(_others, ["checkpoint_module"])},
        "torch_xla.distributed.fsdp.utils": {
            **_of(_others, ["checkpoint_module"]),
            "apply_xla_patch_to_nn_linear": _spmd.apply_xla_patch_to_nn_linear,
        },
        "torch_xla.distributed.fsdp.wrap": _of(_others, _WRAP),
        "torch_xla.distributed.parallel_loader": _of(_others, ["MpDeviceLoader", "ParallelLoader"]),
        "torch_xla.distributed.spmd": {**spmd_names, "__all__": _spmd.__all__},
        "torch_xla.distributed.spmd.api": spmd_names,
        "torch_xla.distributed.spmd.debugging": _of(_debugging, ["visualize_sharding", "visualize_tensor_sharding"]),
        "torch_xla.distributed.spmd.xla_sharded_tensor": _SHARDED,
        "torch_xla.distributed.spmd.xla_sharding": spmd_names,
        "torch_xla.experimental": {**_of(_others, ["eager_mode"]), "compile": _root.compile},
        "torch_xla.experimental.assume_pure": {"assume_pure": assume_pure},
        "torch_xla.experimental.eager": _of(_others, ["eager_mode", "is_eager_mode"]),
        "torch_xla.experimental.gradient_accumulation": {"gradient_accumulation": gradient_accumulation},
        "torch_xla.experimental.scan": {"scan": scan},
        "torch_xla.experimental.scan_layers": {"scan_layers": scan_layers},
        "torch_xla.experimental.spmd_fully_sharded_data_parallel": {"SpmdFullyShardedDataParallel": SpmdFullyShardedDataParallel},
        "torch_xla.experimental.xla_sharded_tensor": _SHARDED,
        "torch_xla.experimental.xla_sharding": spmd_names,
        "torch_xla.runtime": _names(_runtime),
        "torch_xla.utils": {},
        "torch_xla.utils.checkpoint": _of(_others, ["checkpoint"]),
        "torch_xla.utils.utils": _of(_others, ["SampleGenerator"]),
    }


def modules() -> dict[str, types.ModuleType]:
    """The modules, each with its submodules as attributes."""
    made: dict[str, types.ModuleType] = {}
    for name, names in contents().items():
        module = types.ModuleType(name, f"{name} over spmd; see docs/migration.md.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(names)
        vars(module)["__getattr__"] = _refusal(name)
        made[name] = module
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            vars(made[parent]).setdefault(last, module)
    made["torch_xla"]._XLAC = made["torch_xla._XLAC"]  # pyright: ignore[reportAttributeAccessIssue]
    return made


def _refusal(module: str) -> Any:
    def missing(name: str) -> Any:
        raise AttributeError(
            f"{module}.{name} does not exist under spmd.compat.torch_xla\n"
            "  fix: docs/migration.md lists what there is and what to use instead"
        )

    return missing
