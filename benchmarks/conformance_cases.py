"""Which files of pytorch/xla are run, how, and what of them cannot be had here and why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """One file.

    Attributes:
        file: its path in the checkout.
        arguments: its own flags; `{devices}` is the number of devices, `{folder}` an empty folder.
        environment: variables that torch_xla's own test runner sets for it.
        limit_s: seconds it may take.
        is_script: it has no unittests: that it ends without an error is what counts.
    """

    file: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    limit_s: float = 300.0
    is_script: bool = False


_SAVES = {"XLA_SAVE_TENSORS_FILE": "{folder}/graphs", "XLA_SAVE_TENSORS_FMT": "hlo"}
_SPMD = """
dtensor_convert_mesh dtensor_integration dtensor_integration2 dtensor_integration3 dtensor_redistribute dynamo_spmd fsdp_v2
mp_input_sharding spmd_debugging spmd_parameter_wrapping train_spmd_linear_model xla_auto_sharding xla_distributed_checkpoint
xla_dtensor_placements xla_dtensor_spec_conversion xla_sharded_tensor xla_sharding xla_sharding_hlo xla_spmd_python_api_interaction
xla_virtual_device
"""
FILES = (
    *(Case(f"test/spmd/test_{name}.py", limit_s=900.0 if name.startswith("train") else 300.0) for name in _SPMD.split()),
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
EXAMPLES = (Case("examples/scan/scan_examples.py", is_script=True),)

# (pattern of "file test", why it cannot pass here)
REASONS: tuple[tuple[str, str], ...] = ()


def reason(file: str, test: str) -> str | None:
    """Why a test cannot be had here, or None if nothing is known."""
    return next((why for pattern, why in REASONS if re.search(pattern, f"{file} {test}")), None)
