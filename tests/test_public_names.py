"""Every public name that there has been can still be imported from where it was: a name may get a better one, and keeps the old.

The names are those of docs/api.md, and of `__all__` of the public modules, on 22 November 2026. Names are only added.
"""

import importlib
import importlib.util

import pytest

NAMES = {
    "mesh": """
        Device device_count devices topology_devices topology_options virtual_devices HybridMesh Mesh
        device_attributes init_device_mesh simulated_slices PartitionSpec SpecLike as_spec entry_axes
        ShardSlice ShardingSpec ShardingType Host PREEMPTED barrier init long report_saved should_stop
        LARGE_BYTES Finding Placement Rule Rules RulesReport Sized SpecFunction largest_dim rules_report
        split_largest_dim without_axes AcceleratorIdle DeviceError JobError MeshError RulesError SpecError
    """,
    "spmd": """
        HybridMesh Mesh PartitionSpec ShardingSpec ShardingType get_1d_mesh get_global_mesh set_global_mesh
        use_spmd XLAShard XLAShardedTensor annotate_custom_sharding clear_sharding
        mark_sharding_with_gradients shard_as wrap_if_sharded SpmdFullyShardedDataParallel XLAPatchedLinear
        apply_backward_optimization_barrier auto_policy xla_distribute_module xla_distribute_tensor
        xla_patched_nn_linear_forward disable_manual_sharding enable_manual_sharding MpDeviceLoader
        MixedPrecisionPolicy mixed_precision mark_sharding fully_shard shard_module Step accumulate
        assume_pure call_jax gradient_accumulation scan scan_layers compile collectives shard_map visualize
        visualize_sharding checkpoint remat lowering metrics shard_loader CheckFailed CheckpointError DeviceSlotError
        DroppedValueError NonFiniteError ShardError SpmdError TraceError UnsupportedOpError
    """,
    "mesh.launch": """
        main
    """,
    "spmd.checkpoint": """
        Restored Saving has_step join restore save Step Verdict reshard steps verify verify_step Loaded
        load_safetensors save_safetensors
    """,
    "spmd.collectives": """
        Group all_gather all_reduce all_to_all axis_index permute reduce_scatter
    """,
    "spmd.metrics": """
        counters reset
    """,
    "spmd.lowering": """
        DOMAINS Lowering lookup lower lowerings
    """,
    "spmd.fsdp": """
        MixedPrecision fully_shard
    """,
    "spmd.data": """
        ShardedLoader shard_loader
    """,
    "spmd.shard_map": """
        shard_map
    """,
    "spmd.visualize": """
        module_report visualize visualize_sharding
    """,
    "spmd.ops": """
        MEANING OUT_OF_SCOPE How Operator counts coverage left_out reason_left_out
    """,
    "spmd.rules": """
        FAMILIES fsdp_axis megatron_axis rules_for shard_module sized_tensors
    """,
    "spmd.demo": """
        GPT SHARDINGS DemoArgs GPTConfig main standard_library
    """,
    "spmd.bench": """
        BenchArgs run script suite
    """,
    "spmd.compat.torch_xla": """
        install installed uninstall
    """,
    "spmd.huggingface": """
        Training train_on
    """,
    "spmd.doctor": """
        Report examine
    """,
    "spmd.cli": """
        main
    """,
}


@pytest.mark.parametrize("module", NAMES)
def test_public_imports_of_before_still_work(module: str) -> None:
    found = importlib.import_module(module)
    gone = [name for name in NAMES[module].split() if not hasattr(found, name)]
    assert not gone, f"{module} had {', '.join(gone)}"


@pytest.mark.parametrize("module", ["mesh.launch.__main__", "spmd.compat.torch_xla.__main__", "spmd.bench.__main__"])
def test_commands_are_where_they_were(module: str) -> None:
    assert importlib.util.find_spec(module) is not None
