"""Runs PyTorch models, annotated with `mark_sharding` over a device mesh, as one sharded `jax.jit` program.

Importing the package makes `torch.device("jax")` a real PyTorch device. `docs/architecture.md` explains how.
"""

from mesh import HybridMesh as HybridMesh
from mesh import Mesh as Mesh
from mesh import PartitionSpec as PartitionSpec
from mesh import ShardingType as ShardingType
from spmd import checkpoint as checkpoint
from spmd import collectives as collectives
from spmd import lowering as lowering
from spmd import metrics as metrics
from spmd._version import __version__ as __version__
from spmd.base._errors import CheckFailed as CheckFailed
from spmd.base._errors import CheckpointError as CheckpointError
from spmd.base._errors import DeviceSlotError as DeviceSlotError
from spmd.base._errors import DroppedValueError as DroppedValueError
from spmd.base._errors import NonFiniteError as NonFiniteError
from spmd.base._errors import ShardError as ShardError
from spmd.base._errors import SpmdError as SpmdError
from spmd.base._errors import TraceError as TraceError
from spmd.base._errors import UnsupportedOpError as UnsupportedOpError
from spmd.base._settings import Settings as Settings
from spmd.base._settings import configure as configure
from spmd.compat.torch_distributed import register as _register_distributed
from spmd.data import shard_loader as shard_loader
from spmd.device._backend import accept_in_foreach as _accept_in_foreach
from spmd.device._backend import register as _register
from spmd.device._call_jax import call_jax as call_jax
from spmd.fsdp import fully_shard as fully_shard
from spmd.huggingface._generate import register as _register_generation
from spmd.interop._export_program import export as export
from spmd.interop._from_dlpack import from_dlpack as from_dlpack
from spmd.interop._functionalize import Functionalized as Functionalized
from spmd.interop._functionalize import functionalize as functionalize
from spmd.interop._to_jax import from_jax as from_jax
from spmd.interop._to_jax import to_jax as to_jax
from spmd.patches._module_apply import register as _register_moves
from spmd.patches._parameter import register as _register_parameters
from spmd.patches._running_averages import register as _register_averages
from spmd.program._step import Step as Step
from spmd.program._step import compile as compile
from spmd.program.flow._accumulate import accumulate as accumulate
from spmd.program.flow._control_flow import register as _register_control_flow
from spmd.program.flow._pure import assume_pure as assume_pure
from spmd.program.flow._remat import remat as remat
from spmd.program.flow._scan import scan as scan
from spmd.program.flow._scan import scan_layers as scan_layers
from spmd.program.lazy._session import Lazy as Lazy
from spmd.program.lazy._session import lazy as lazy
from spmd.program.lazy._session import sync as sync
from spmd.program.optim._state_rules import register_state_rule as register_state_rule
from spmd.program.optim._state_rules import set_state_sharding as set_state_sharding
from spmd.program.sizes._dims import Dim as Dim
from spmd.program.sizes._learned_dims import mark_dynamic as mark_dynamic
from spmd.rules import shard_module as shard_module
from spmd.shard_map import shard_map as shard_map
from spmd.sharding._annotate import clear_sharding as clear_sharding
from spmd.sharding._annotate import mark_sharding as mark_sharding
from spmd.sharding._annotate import wrap_if_sharded as wrap_if_sharded
from spmd.sharding._dynamo import register as _register_in_graphs
from spmd.sharding._precision import MixedPrecisionPolicy as MixedPrecisionPolicy
from spmd.sharding._precision import mixed_precision as mixed_precision
from spmd.sharding._precision import register as _register_precision
from spmd.sharding._shard import XLAShard as XLAShard
from spmd.sharding._tensor import XLAShardedParameter as _XLAShardedParameter
from spmd.sharding._tensor import XLAShardedTensor as XLAShardedTensor
from spmd.visualize import visualize as visualize
from spmd.visualize import visualize_sharding as visualize_sharding
from spmd.xla_names._barrier import apply_backward_optimization_barrier as apply_backward_optimization_barrier
from spmd.xla_names._device_loader import MpDeviceLoader as MpDeviceLoader
from spmd.xla_names._distribute import auto_policy as auto_policy
from spmd.xla_names._distribute import xla_distribute_module as xla_distribute_module
from spmd.xla_names._distribute import xla_distribute_tensor as xla_distribute_tensor
from spmd.xla_names._fsdp_v2 import SpmdFullyShardedDataParallel as SpmdFullyShardedDataParallel
from spmd.xla_names._functional import annotate_custom_sharding as annotate_custom_sharding
from spmd.xla_names._functional import mark_sharding_with_gradients as mark_sharding_with_gradients
from spmd.xla_names._functional import shard_as as shard_as
from spmd.xla_names._global_mesh import get_1d_mesh as get_1d_mesh
from spmd.xla_names._global_mesh import get_global_mesh as get_global_mesh
from spmd.xla_names._global_mesh import set_global_mesh as set_global_mesh
from spmd.xla_names._gradient_accumulation import gradient_accumulation as gradient_accumulation
from spmd.xla_names._linear import XLAPatchedLinear as XLAPatchedLinear
from spmd.xla_names._linear import xla_patched_nn_linear_forward as xla_patched_nn_linear_forward
from spmd.xla_names._manual import disable_manual_sharding as disable_manual_sharding
from spmd.xla_names._manual import enable_manual_sharding as enable_manual_sharding
from spmd.xla_names._mode import use_spmd as use_spmd
from spmd.xla_names._sharding_spec import ShardingSpec as ShardingSpec

_register()
_register_control_flow()
_register_precision()
_register_in_graphs()
_register_moves()
_register_parameters()
_register_averages()
_register_distributed()
_register_generation()
_accept_in_foreach(XLAShardedTensor, _XLAShardedParameter)

__all__ = [
    # meshes and specs
    "HybridMesh",
    "Mesh",
    "PartitionSpec",
    "ShardingSpec",
    "ShardingType",
    "get_1d_mesh",
    "get_global_mesh",
    "set_global_mesh",
    "use_spmd",
    # annotations
    "XLAShard",
    "XLAShardedTensor",
    "annotate_custom_sharding",
    "clear_sharding",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "shard_as",
    "wrap_if_sharded",
    # whole modules
    "MixedPrecisionPolicy",
    "SpmdFullyShardedDataParallel",
    "XLAPatchedLinear",
    "apply_backward_optimization_barrier",
    "auto_policy",
    "fully_shard",
    "mixed_precision",
    "shard_module",
    "register_state_rule",
    "set_state_sharding",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
    # compiled functions
    "Dim",
    "Step",
    "accumulate",
    "assume_pure",
    "call_jax",
    "compile",
    "gradient_accumulation",
    "Lazy",
    "lazy",
    "mark_dynamic",
    "remat",
    "scan",
    "scan_layers",
    "sync",
    # manual regions
    "collectives",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "shard_map",
    # pictures
    "visualize",
    "visualize_sharding",
    # operators
    "lowering",
    # JAX
    "Functionalized",
    "export",
    "from_dlpack",
    "from_jax",
    "functionalize",
    "to_jax",
    # data and checkpoints
    "MpDeviceLoader",
    "checkpoint",
    "shard_loader",
    # counters
    "metrics",
    # settings
    "Settings",
    "configure",
    # errors
    "CheckFailed",
    "CheckpointError",
    "DeviceSlotError",
    "DroppedValueError",
    "NonFiniteError",
    "ShardError",
    "SpmdError",
    "TraceError",
    "UnsupportedOpError",
]
