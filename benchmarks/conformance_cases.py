"""The files of pytorch/xla that `conformance.py` runs, and the reasons for the tests that cannot pass here."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One file.

    Attributes:
        file: its path in the checkout.
        arguments: command line arguments; `{devices}` is the number of devices, `{folder}` an empty folder.
        environment: environment variables that torch_xla's test runner sets for it.
        limit_s: timeout, in seconds.
        is_script: it has no unittests and passes if it exits without an error.
    """

    file: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = 300.0
    is_script: bool = False

    @property
    def name(self) -> str:
        """The file, and its first argument if that is not an option."""
        what = [argument for argument in self.arguments[:1] if not argument.startswith("-")]
        return " ".join([self.file, *what])


_SAVES = {"XLA_SAVE_TENSORS_FILE": "{folder}/graphs", "XLA_SAVE_TENSORS_FMT": "hlo"}
_SPMD = """
dtensor_convert_mesh dtensor_integration dtensor_integration2 dtensor_integration3 dtensor_redistribute dynamo_spmd fsdp_v2
mp_input_sharding spmd_debugging spmd_parameter_wrapping train_spmd_linear_model xla_auto_sharding xla_distributed_checkpoint
xla_dtensor_placements xla_dtensor_spec_conversion xla_sharded_tensor xla_sharding xla_sharding_hlo xla_spmd_python_api_interaction
xla_virtual_device
"""
FILES = (
    *(Case(f"test/spmd/test_{name}.py") for name in _SPMD.split()),
    Case("test/spmd/test_spmd_graph_dump.py", environment=_SAVES),
    Case("test/spmd/test_spmd_lowering_context.py", environment=_SAVES),
    Case(
        "test/spmd/test_sharding_strategies.py",
        arguments=("--batch_size", "64", "--embedding_dimension", "64", "--ici_fsdp_parallelism", "{devices}"),
        is_script=True,
    ),
    Case("test/scan/test_scan.py"),
    Case("test/scan/test_scan_debug.py", environment={"XLA_HLO_DEBUG": "1"}),
    Case("test/scan/test_scan_layers.py"),
    Case("test/scan/test_scan_pallas.py"),
    Case("test/scan/test_scan_spmd.py"),
    Case("test/eager/test_eager.py"),
    Case("test/eager/test_eager_all_reduce_in_place.py", is_script=True),
    Case("test/eager/test_eager_spmd.py"),
    Case("test/eager/test_eager_with_torch_compile.py"),
    Case("test/eager/test_eager_with_xla_compile.py"),
    Case("test/test_assume_pure.py"),
    Case("test/test_assume_pure_spmd.py"),
    Case("test/test_assume_pure_torch.py"),
    Case("test/test_jax_interop.py"),
    Case("test/test_gradient_accumulation.py"),
)
_SMALL = (
    "--num-steps",
    "3",
    "--hidden-size",
    "64",
    "--intermediate-size",
    "128",
    "--num-attention-heads",
    "4",
    "--num-key-value-heads",
    "2",
)
_EXAMPLES = """
train_resnet_base train_resnet_amp data_parallel/train_resnet_spmd_data_parallel data_parallel/train_resnet_xla_ddp
debug/train_resnet_benchmark debug/train_resnet_profile eager/train_decoder_only_eager eager/train_decoder_only_eager_multi_process
eager/train_decoder_only_eager_spmd_data_parallel eager/train_decoder_only_eager_with_compile
flash_attention/train_decoder_only_flash_attention flash_attention/train_decoder_only_flash_attention_fsdp_v2
fsdp/train_decoder_only_fsdp_v2 fsdp/train_resnet_fsdp_auto_wrap scan/scan_examples
"""
EXAMPLES = (
    Case("examples/train_decoder_only_base.py", arguments=_SMALL, is_script=True),
    Case("examples/train_decoder_only_base.py", arguments=("scan.decoder_with_scan.DecoderWithScan", *_SMALL), is_script=True),
    *(Case(f"examples/{name}.py", is_script=True) for name in _EXAMPLES.split()),
)

_GRAPH = "compares the text of torch_xla's lowered graph, including names of instructions"
_ONE = "the test is written for one device"
_SOME = "expects an error for a mesh of some of the devices, which is allowed here"
_AUTO = "XLA's automatic sharding is not available (`xr.use_spmd(auto=True)` raises an error)"
_LARGE = "trains 142 million parameters eagerly several times, which takes too long on the machine of this record"

# (pattern of "file test", the reason why it cannot pass here)
REASONS: tuple[tuple[str, str], ...] = (
    (
        r"test_(backward_optimization_barrier|inplace_add_with_sharding|mark_sharding_ir|xla_sharded_hlo_dump|spmd_full_to_shard_shape)",
        _GRAPH,
    ),
    (r"test_(spmd_shard_to_full_shape|annotate_custom_sharding|scan_with_rematerialization|scan_xla_patched_linear|fsdp_v2_basic)", _GRAPH),
    (r"test_scan_layers.py .*test_(decoder_model|linear_layers|tuple_layers)", _GRAPH),
    (r"test_spmd_graph_dump|test_spmd_lowering_context", "reads graphs of torch_xla's C++ extension (`LoweringContext`, dumps)"),
    (r"test_mark_manual_sharding", "marks a global value as manual, which XLA cannot run according to the test; an error here"),
    (r"test_(mismatch_global_devices|device_count_mismatch_assertion)", _SOME),
    (r"test_fsdp_v2_multi_slice_error", "on one device its mesh has the shape (2, 0, 1)"),
    (r"test_xla_sharding.py .*test_clone", "on one device a result is not shown as replicated over a mesh"),
    (r"test_hybrid_mesh", "its mesh has 8 devices, and devices that do not exist are an error"),
    (r"test_xla_auto_sharding|test_dtensor_integration2", _AUTO),
    (r"test_(global|addressable)_runtime_device_count", _ONE),
    (r"test_spmd_debugging.py .*_cpu", _ONE),
    (
        r"test_(async_redistribute|device_mesh_dimensions)",
        "the test is for 4 devices: it expects 2 and 4 where 8 devices give 4 and 2",
    ),
    (
        r"test_xlashardedtensor_is_dtensor",
        "XLAShardedTensor is a global tensor and not a DTensor, which libraries treat as one process's shard",
    ),
    (r"test_xla_placement", "reads a tensor that requires grad as an array, which is an error in PyTorch"),
    (r"test_xla_sharded_tensor_repr", "`mark_sharding` returns its argument, so results of a marked tensor are shown as sharded"),
    (r"test_fallback", "expects a fallback to the CPU for `torch.polar`, which runs on the device here"),
    (
        r"test_(propagate_replicated_sharding|input_sharding_none)",
        "a tensor that was not marked is on one device until a program needs it elsewhere",
    ),
    (r"test_sharded_tensor_aliasing", "counts buffers that torch_xla's step donates; eager operations donate none"),
    (r"test_sharding_propagation", "counts gathers of sharded values; the result of the layer is replicated here"),
    (r"test_scan_debug", "counts torch_xla's cache of graphs, which eager operations do not fill"),
    (r"test_scan_external_in_place_mutation", "expects an error for an in-place write to an outer tensor, which works here as in Python"),
    (r"test_scan_activation_aliases_input", "an eager scan runs as a loop, which saves slices for backward"),
    (r"test_scan_tracing_does_not_allocate", "a tensor from the host is uploaded at its first use, not at `sync`"),
    (r"test_dynamo_input_sharding_changed", "counts compilations of a step, but each eager operation is compiled too"),
    (r"test_dynamo_input_sharding_threashold", "checks that a result is a placeholder after a crash, which does not happen here"),
    (
        r"test_eager.py .*test_(eager_basic|eager_in_place)",
        "counts torch_xla's programs for one operation; here it is one or none",
    ),
    (r"test_eager.py .*execute_once", "counts executions by ATen operator; here programs are counted"),
    (r"test_virtual_device_upload_after_tracing", "a tensor from the host is uploaded when the step that uses it runs"),
    (r"test_assume_pure_avoid_retracing", "a function with a gradient is traced twice, first for the shapes of its results"),
    (r"test_train_spmd_linear_model", _LARGE),
)


def reason(file: str, test: str) -> str | None:
    """The listed reason why a test cannot pass here, or None."""
    return next((why for pattern, why in REASONS if re.search(pattern, f"{file} {test}")), None)
