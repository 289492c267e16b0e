"""PyTorch models, annotated with `mark_sharding` over a device mesh, as one sharded `jax.jit` program.

Importing it makes `torch.device("jax")` a real PyTorch device. See `docs/architecture.md` for how.
"""

from spmd import collectives as collectives
from spmd import lowering as lowering
from spmd import metrics as metrics
from spmd._annotate import mark_sharding as mark_sharding
from spmd._errors import DeviceSlotError as DeviceSlotError
from spmd._errors import DroppedValueError as DroppedValueError
from spmd._errors import NonFiniteError as NonFiniteError
from spmd._errors import SpmdError as SpmdError
from spmd._errors import TraceError as TraceError
from spmd._errors import UnsupportedOpError as UnsupportedOpError
from spmd._moves import register as _show_layouts
from spmd._tensor import XLAShard as XLAShard
from spmd._tensor import XLAShardedParameter as _XLAShardedParameter
from spmd._tensor import XLAShardedTensor as XLAShardedTensor
from spmd.device._backend import accept_in_foreach as _accept_in_foreach
from spmd.device._backend import register as _register
from spmd.fsdp import fully_shard as fully_shard
from spmd.program._accumulate import accumulate as accumulate
from spmd.program._step import Step as Step
from spmd.program._step import compile as compile
from spmd.rules import shard_module as shard_module
from spmd.shard_map import shard_map as shard_map
from spmd.visualize import visualize as visualize
from spmd.visualize import visualize_sharding as visualize_sharding

_register()
_show_layouts()
_accept_in_foreach(XLAShardedTensor, _XLAShardedParameter)

__all__ = [
    # annotate
    "XLAShard",
    "XLAShardedTensor",
    "mark_sharding",
    "fully_shard",
    "shard_module",
    # compile
    "Step",
    "accumulate",
    "compile",
    # manual regions
    "collectives",
    "shard_map",
    # seeing it
    "visualize",
    "visualize_sharding",
    # operators
    "lowering",
    # counts
    "metrics",
    # errors
    "DeviceSlotError",
    "DroppedValueError",
    "NonFiniteError",
    "SpmdError",
    "TraceError",
    "UnsupportedOpError",
]
