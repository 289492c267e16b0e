"""Devices, meshes of devices, and the sharding of tensors over a mesh. Imports numpy and jax only, never torch.

import mesh

mesh.virtual_devices(8)
m = mesh.Mesh.from_string("data=4,model=2")
sharding = mesh.ShardingSpec(m, mesh.PartitionSpec("data", None))
sharding.shard_shape((64, 16))  # (16, 16)
"""

from mesh._devices import Device, device_count, devices, virtual_devices
from mesh._hybrid import HybridMesh, device_attributes, simulated_slices
from mesh._mesh import Mesh, init_device_mesh
from mesh._mesh_errors import AcceleratorIdle, DeviceError, JobError, MeshError, RulesError, SpecError
from mesh._report import LARGE_BYTES, Finding, Placement, RulesReport, Sized, rules_report, size_text
from mesh._rules import Rule, Rules, SpecFunction, largest_dim, split_largest_dim, without_axes
from mesh._sharding import ShardingSpec, ShardingType, ShardSlice
from mesh._spec import PartitionSpec, SpecLike, as_spec, entry_axes
from mesh._topology import has_topology, topology_devices, topology_options
from mesh.job._clusters import register_cluster
from mesh.job._join import barrier, extended_timeout, init, report_saved, should_stop
from mesh.job._join import long as long
from mesh.job._place import PREEMPTED, Host

__all__ = [
    # devices
    "Device",
    "device_count",
    "devices",
    "has_topology",
    "topology_devices",
    "topology_options",
    "virtual_devices",
    # mesh
    "HybridMesh",
    "Mesh",
    "device_attributes",
    "init_device_mesh",
    "simulated_slices",
    # specs
    "PartitionSpec",
    "SpecLike",
    "as_spec",
    "entry_axes",
    # shardings
    "ShardSlice",
    "ShardingSpec",
    "ShardingType",
    # jobs of several processes
    "Host",
    "PREEMPTED",
    "barrier",
    "extended_timeout",
    "init",
    "register_cluster",
    "report_saved",
    "should_stop",
    # rules
    "LARGE_BYTES",
    "Finding",
    "Placement",
    "Rule",
    "Rules",
    "RulesReport",
    "Sized",
    "SpecFunction",
    "largest_dim",
    "rules_report",
    "size_text",
    "split_largest_dim",
    "without_axes",
    # errors
    "AcceleratorIdle",
    "DeviceError",
    "JobError",
    "MeshError",
    "RulesError",
    "SpecError",
]
