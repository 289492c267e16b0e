"""Shardings for a whole model by rules instead of line by line: `shard_module`, and the rules people already have.

report = spmd.shard_module(model, m, [("up.weight", ("model", None)), ("down.weight", (None, "model"))])
report = spmd.shard_module(model, m, "fsdp+megatron")
"""

from spmd.rules._families import FAMILIES
from spmd.rules._parallel_plan import batch_over_other_axes, parallelize
from spmd.rules._presets import register_preset
from spmd.rules._shard_module import rules_for, shard_module, sized_tensors
from spmd.sharding._axes import fsdp_axis, megatron_axis

__all__ = [
    "FAMILIES",
    "batch_over_other_axes",
    "fsdp_axis",
    "megatron_axis",
    "parallelize",
    "register_preset",
    "rules_for",
    "shard_module",
    "sized_tensors",
]
