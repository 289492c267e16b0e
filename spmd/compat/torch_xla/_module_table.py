"""Table of torch_xla's modules and their contents. A missing name raises an error that names a replacement."""

from __future__ import annotations

import importlib.machinery
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from spmd.compat.torch_xla import (
    _attention_kernels,
    _debug_metrics,
    _debugging,
    _distributed_checkpoints,
    _distributed_planners,
    _environment_names,
    _jax_calls,
    _micro_batches,
    _missing,
    _others,
    _partitioned_scan,
    _process_groups,
    _pure_functions,
    _reference_files,
    _replica_fsdp,
    _replicas,
    _root,
    _runtime,
    _script_tools,
    _sharding_ops,
    _spmd,
    _tpu_facts,
    _training_reports,
    _xla_model,
    _xlac,
)
from spmd.xla_names._fsdp_v2 import SpmdFullyShardedDataParallel


def _names(module: Any) -> dict[str, Any]:
    """A module's public names, and its private names except dunders."""
    return {name: value for name, value in vars(module).items() if not name.startswith("__") and not isinstance(value, types.ModuleType)}


def _of(module: Any, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(module, name) for name in names}


_WRAP = ("always_wrap_policy", "recursive_wrap", "size_based_auto_wrap_policy", "transformer_auto_wrap_policy")
# imported by `torch_xla` itself, where programs look them up
_SHORT = {
    "xm": "torch_xla.core.xla_model",
    "xr": "torch_xla.runtime",
    "xu": "torch_xla.utils.utils",
    "xenv": "torch_xla.core.xla_env_vars",
    "xmp": "torch_xla.distributed.xla_multiprocessing",
}
_SHARDED = {"XLAShard": _spmd.XLAShard, "XLAShardedTensor": _spmd.XLAShardedTensor}


def contents() -> dict[str, Mapping[str, Any]]:
    """Module name -> its names."""
    spmd_names = _spmd_names()
    profiler = _of(_others, ["StepTrace", "Trace", "start_server", "start_trace", "stop_trace", "trace", "trace_detached"])
    return {
        "torch_xla": {**_names(_root), "__version__": _root.__version__},
        "torch_xla._XLAC": _xlac.QUERIES,
        "torch_xla.amp": _of(_others, ["GradScaler", "autocast"]),
        "torch_xla._internal": {},
        "torch_xla._internal.jax_workarounds": _of(_jax_calls, ["jax_import_guard", "requires_jax"]),
        "torch_xla._internal.tpu": _names(_tpu_facts),
        "torch_xla.amp.syncfree": {name: getattr(torch.optim, name) for name in ("SGD", "Adam", "AdamW")},
        "torch_xla.core": {},
        "torch_xla.core.xla_model": _names(_xla_model),
        "torch_xla.core.xla_builder": _names(_jax_calls),
        "torch_xla.core.xla_env_vars": _environment_names.VARIABLES,
        "torch_xla.core.dynamo_bridge": _of(_others, ["extract_compiled_graph"]),
        "torch_xla.debug": {},
        "torch_xla.debug.metrics": _names(_debug_metrics),
        "torch_xla.debug.profiler": profiler,
        "torch_xla.distributed": {},
        "torch_xla.distributed.fsdp": {
            **_of(_others, ["checkpoint_module"]),
            **_of(_replica_fsdp, ["XlaFullyShardedDataParallel", "consolidate_sharded_model_checkpoints"]),
        },
        "torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel": _of(_replica_fsdp, ["XlaFullyShardedDataParallel"]),
        "torch_xla.distributed.fsdp.utils": {
            **_of(_others, ["checkpoint_module"]),
            "apply_xla_patch_to_nn_linear": _spmd.apply_xla_patch_to_nn_linear,
        },
        "torch_xla.distributed.fsdp.wrap": _of(_others, _WRAP),
        "torch_xla.distributed.xla_backend": _of(_process_groups, ["ProcessGroupXla"]),
        "torch_xla.distributed.xla_multiprocessing": _names(_replicas),
        "torch_xla.distributed.parallel_loader": _of(_others, ["MpDeviceLoader", "ParallelLoader"]),
        "torch_xla.distributed.spmd": {**spmd_names, "__all__": _spmd.__all__},
        "torch_xla.distributed.spmd.api": spmd_names,
        "torch_xla.distributed.spmd.debugging": _of(
            _debugging, ["construct_v1_sharding_str", "visualize_sharding", "visualize_tensor_sharding"]
        ),
        "torch_xla.distributed.spmd.xla_sharded_tensor": _SHARDED,
        "torch_xla.distributed.spmd.xla_sharding": spmd_names,
        **_experimental(),
        "torch_xla.runtime": _names(_runtime),
        "torch_xla.utils": {},
        "torch_xla.utils.checkpoint": _of(_others, ["checkpoint"]),
        "torch_xla.utils.serialization": _of(_reference_files, ["TensorReference", "load", "save"]),
        "torch_xla.utils.utils": _names(_script_tools),
        "torch_xla.test": {},
        "torch_xla.test.test_utils": _names(_training_reports),
    }


def _experimental() -> dict[str, Mapping[str, Any]]:
    spmd_names = _spmd_names()
    return {
        "torch_xla.experimental": {**_of(_others, ["eager_mode", "is_eager_mode"]), "compile": _root.compile},
        "torch_xla.experimental.assume_pure": _names(_pure_functions),
        "torch_xla.experimental.custom_kernel": _of(_attention_kernels, ["FlashAttention", "flash_attention", "paged_attention"]),
        "torch_xla.experimental.distributed_checkpoint": {
            **_of(_distributed_planners, ["SPMDLoadPlanner", "SPMDSavePlanner"]),
            **_of(_distributed_checkpoints, ["CheckpointManager", "prime_optimizer"]),
        },
        "torch_xla.experimental.distributed_checkpoint._helpers": _of(
            _distributed_planners, ["_CpuShards", "_is_sharded_tensor", "_sharded_cpu_state_dict"]
        ),
        "torch_xla.experimental.eager": _of(_others, ["eager_mode", "is_eager_mode"]),
        "torch_xla.experimental.gradient_accumulation": _of(_micro_batches, ["gradient_accumulation"]),
        "torch_xla.experimental.scan": _names(_partitioned_scan),
        "torch_xla.experimental.scan_layers": _of(_partitioned_scan, ["_ONE_LAYER_CACHE", "scan", "scan_layers"]),
        "torch_xla.experimental.spmd_fully_sharded_data_parallel": {"SpmdFullyShardedDataParallel": SpmdFullyShardedDataParallel},
        "torch_xla.experimental.xla_sharded_tensor": _SHARDED,
        "torch_xla.experimental.xla_sharding": spmd_names,
    }


def _spmd_names() -> dict[str, Any]:
    return {**_names(_spmd), "_mark_manual_sharding": _spmd.manual_only, "MarkShardingFunction": _sharding_ops.MarkShardingFunction}


def modules() -> dict[str, types.ModuleType]:
    """The modules, each with its submodules as attributes."""
    made: dict[str, types.ModuleType] = {}
    for name, names in contents().items():
        module = types.ModuleType(name, f"{name} over spmd; see docs/migration.md.")
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        vars(module).update(names)
        vars(module)["__getattr__"] = _missing.refusal(name)
        made[name] = module
    for name, module in made.items():
        parent, _, last = name.rpartition(".")
        if parent:
            vars(made[parent]).setdefault(last, module)
    for short, name in _SHORT.items():
        setattr(made["torch_xla"], short, made[name])
    made["torch_xla"]._XLAC = made["torch_xla._XLAC"]  # pyright: ignore[reportAttributeAccessIssue]
    return made
