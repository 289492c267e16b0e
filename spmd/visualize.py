"""Pictures of shardings: of tensors of any rank, sharding strings, meshes, modules and reports.

rich.print(spmd.visualize(model.head.weight))       # coloured tiles; in a notebook the last line of a cell is enough
spmd.visualize(m).to_svg()                           # the same for a file; .to_html() for a page
spmd.visualize_sharding("{devices=[2,2]0,1,2,3}")
rich.print(spmd.visualize(model))                    # a table of its parameters and buffers
"""

from __future__ import annotations

import math
from typing import Any

import jax
import torch
from torch import nn

from mesh import Mesh, Placement, RulesReport, ShardingSpec
from spmd.base._errors import SpmdError, message, shown
from spmd.base._wrong_arguments import wrong_argument
from spmd.device._layout import annotation_of
from spmd.draw._picture import Picture
from spmd.draw._tiling import Tiling
from spmd.rules import sized_tensors
from spmd.sharding._annotate import as_mesh
from spmd.sharding._names import name_of
from spmd.sharding._tensor import sharding_of


def visualize(thing: Any) -> Picture | RulesReport:
    """Draw the sharding of an object.

    Args:
        thing: a tensor on device 'jax', or marked on the host or on 'meta'; a `mesh.ShardingSpec`, a `mesh.Mesh`, a
            `jax.sharding.Mesh` or a torch `DeviceMesh`; a module; or a sharding as XLA writes it.

    Returns:
        A `Picture`, or for a module a report, which is shown as a table. `rich.print` and notebooks display both.

    Raises:
        SpmdError: the object has no sharding.
    """
    if isinstance(thing, str):
        return visualize_sharding(thing)
    if isinstance(thing, nn.Module):
        return module_report(thing)
    if isinstance(thing, RulesReport):
        return thing
    if isinstance(thing, ShardingSpec):
        return Picture(Tiling.of_spec(thing, None, str(thing)))
    if isinstance(thing, Mesh):
        return Picture(Tiling.of_mesh(thing), f"{thing.size()} devices")
    if isinstance(thing, jax.sharding.Mesh) or type(thing).__name__ == "DeviceMesh":
        return visualize(as_mesh(thing))
    if isinstance(thing, torch.Tensor):
        return _tensor_picture(thing)
    raise SpmdError(message(f"{type(thing).__name__} cannot be drawn", fix="pass a tensor, a module, a mesh, a spec or a sharding string"))


def visualize_sharding(sharding: str, num_devices: int | None = None) -> Picture:
    """A picture of a sharding as XLA and torch_xla write it, e.g. "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}".

    Args:
        num_devices: number of devices for "{replicated}" and "{manual}", which do not contain it; by default all devices.

    Raises:
        SpmdError: the string is not a sharding.
    """
    if not isinstance(sharding, str):  # pyright: ignore[reportUnnecessaryIsInstance]  (a user's value)
        what = f"visualize_sharding takes the text of a sharding, got {shown(sharding)}"
        raise wrong_argument(what, 'spmd.visualize_sharding("{devices=[2,2]0,1,2,3}"), or of a tensor: spmd.visualize(x)')
    tiling = Tiling.of_string(sharding, num_devices)
    return Picture(tiling, f"{math.prod(tiling.tiles)} tiles, each on {tiling.copies} device{'s' * (tiling.copies > 1)}")


def module_report(module: nn.Module) -> RulesReport:
    """The shardings of a module's parameters and buffers as a report. Unmarked tensors count as replicated.

    Raises:
        SpmdError: no tensor is marked, or tensors are marked over several meshes.
    """
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    marks = {name: annotation_of(tensor) for name, tensor in tensors.items()}
    meshes = list(dict.fromkeys(mark.mesh for mark in marks.values() if mark is not None))
    if len(meshes) != 1:
        where = "no mesh" if not meshes else f"{len(meshes)} meshes: {', '.join(map(str, meshes))}"
        raise SpmdError(message(f"{type(module).__name__} is on {where}", fix="mark it first: spmd.shard_module(model, mesh, rules)"))
    found: list[Placement] = []
    for name, sized in sized_tensors(module).items():
        mark = marks[name]
        sharding = mark or ShardingSpec(meshes[0], (None,) * len(sized.shape))
        piece = math.prod(sharding.shard_shape(sized.shape)) * sized.itemsize
        word = "unmarked" if mark is None else "marked"
        found.append(Placement(name, sized.shape, sharding, word, math.prod(sized.shape) * sized.itemsize, piece))
    return RulesReport(meshes[0], tuple(found))


def _tensor_picture(tensor: torch.Tensor) -> Picture:
    sharding = sharding_of(tensor)
    shape = tuple(tensor.shape)
    if sharding is None:
        where = f"on device '{tensor.device}'" if tensor.device.type != "jax" else "on one device"
        raise SpmdError(message(f"{name_of(tensor)} is not on a mesh: it is {where}", fix="mark it: spmd.mark_sharding(t, mesh, spec)"))
    name, size = name_of(tensor), "×".join(map(str, shape)) or "scalar"
    title = name if name.startswith("tensor ") else f"{name}  {size}"
    tiling = Tiling.of_spec(sharding, shape, f"{title}  {sharding.partition_spec}")
    piece = sharding.shard_shape(shape)
    num_bytes = math.prod(piece) * tensor.element_size()
    copies = f", {tiling.copies} copies" if tiling.copies > 1 else ""
    return Picture(tiling, f"{sharding.mesh}: shards of {'×'.join(map(str, piece)) or 'scalar'}, {num_bytes} bytes per device{copies}")


__all__ = ["module_report", "visualize", "visualize_sharding"]
