"""PyTorch models, annotated with `mark_sharding` over a device mesh, as one sharded `jax.jit` program.

Importing it makes `torch.device("jax")` a real PyTorch device. See `docs/architecture.md` for how.
"""

from spmd import checkpoint as checkpoint
from spmd import lowering as lowering
from spmd import metrics as metrics
from spmd._annotate import mark_sharding as mark_sharding
from spmd._errors import CheckpointError as CheckpointError
from spmd._errors import DeviceSlotError as DeviceSlotError
from spmd._errors import DroppedValueError as DroppedValueError
from spmd._errors import NonFiniteError as NonFiniteError
from spmd._errors import SpmdError as SpmdError
from spmd._errors import TraceError as TraceError
from spmd._errors import UnsupportedOpError as UnsupportedOpError
from spmd._precision import MixedPrecisionPolicy as MixedPrecisionPolicy
from spmd._precision import mixed_precision as mixed_precision
from spmd._precision import register as _register_precision
from spmd._tensor import XLAShard as XLAShard
from spmd._tensor import XLAShardedParameter as _XLAShardedParameter
from spmd._tensor import XLAShardedTensor as XLAShardedTensor
from spmd.data import shard_loader as shard_loader
from spmd.device._backend import accept_in_foreach as _accept_in_foreach
from spmd.device._backend import register as _register
from spmd.program._accumulate import accumulate as accumulate
from spmd.program._control_flow import register as _register_control_flow
from spmd.program._remat import remat as remat
from spmd.program._step import Step as Step
from spmd.program._step import compile as compile

_register()
_register_control_flow()
_register_precision()
_accept_in_foreach(XLAShardedTensor, _XLAShardedParameter)

__all__ = [
    # annotate
    "XLAShard",
    "XLAShardedTensor",
    "mark_sharding",
    "MixedPrecisionPolicy",
    "mixed_precision",
    # compile
    "Step",
    "accumulate",
    "compile",
    "remat",
    # operators
    "lowering",
    # data and checkpoints
    "checkpoint",
    "shard_loader",
    # counts
    "metrics",
    # errors
    "CheckpointError",
    "DeviceSlotError",
    "DroppedValueError",
    "NonFiniteError",
    "SpmdError",
    "TraceError",
    "UnsupportedOpError",
]
