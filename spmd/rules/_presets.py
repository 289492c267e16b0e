"""The strings that `shard_module` accepts: Megatron's tensor parallelism for known model families, FSDP for any model.

Both also lay out the outputs of embeddings and blocks: the batch is split over the axes that do not split the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn

from mesh import Mesh, PartitionSpec, Rules
from spmd.base._errors import SpmdError, message
from spmd.rules._blocks import activation_borders, blocks_of
from spmd.rules._families import FAMILIES, Side, Split, split_of
from spmd.rules._parallel_plan import Border, Plan
from spmd.rules._sides import spec_of_side, split_dim
from spmd.sharding._axes import batch_axes, fsdp_axis, megatron_axis

Preset: TypeAlias = Callable[[nn.Module, Mesh], Any]

_own: dict[str, Preset] = {}


def register_preset(name: str) -> Callable[[Preset], Preset]:
    """Register the decorated function as a preset. It takes a model and a mesh and returns pairs of pattern and spec, or `mesh.Rules`.

    `shard_module(model, m, name)` applies these rules; `name + "+fsdp"` splits the parameters further.

    Raises:
        SpmdError: the name is taken, empty, or contains a '+'.
    """
    taken = {"megatron", "fsdp", "auto", *_own}
    if name in taken or "+" in name or not name:
        what = f"{name!r} cannot be the name of a preset"
        raise SpmdError(message(what, f"taken: {', '.join(sorted(taken))}; '+' joins two", fix="choose another name"))

    def register(preset: Preset) -> Preset:
        _own[name] = preset
        return preset

    return register


def preset(name: str, model: nn.Module, mesh: Mesh, axis: str | None = None) -> Plan:
    """The plan that a string names.

    Args:
        name: "megatron", "fsdp", a registered preset, or one of these joined with "fsdp" by '+'.
        axis: the axis for Megatron; default: the mesh's axis with one of the names `MODEL_AXES`.

    Raises:
        SpmdError: an unknown name, a model of no known family, or a mesh without a suitable axis.
    """
    wanted = set(name.split("+"))
    own = [n for n in wanted if n in _own]
    if not wanted or wanted - {"megatron", "fsdp", *own} or len(wanted - {"fsdp"}) > 1:
        known = ["megatron", "fsdp", "fsdp+megatron", "auto", *_own]
        raise SpmdError(message(f"{name!r} is not a preset", f"known: {', '.join(map(repr, known))}", fix="write one of these"))
    rules, split, model_axis = Rules(), Split(), None
    if own:
        made = _own[own[0]](model, mesh)
        rules = made if isinstance(made, Rules) else Rules(*made)
    if "megatron" in wanted:
        model_axis = axis or megatron_axis(mesh)
        split = _split(model, model_axis)
        rules = megatron_rules(model, split, model_axis)
    shards = fsdp_axis(mesh) if "fsdp" in wanted else None
    borders: tuple[tuple[nn.Module, Border], ...] = ()
    if not own:
        borders = activation_borders(model, mesh, batch_axes(mesh, model_axis, shards))
    return Plan(rules, borders, (*blocks_of(model), model) if shards is not None else (), shards, tuple(split.findings))


def _split(model: nn.Module, axis: str) -> Split:
    split = split_of(model)
    if split.sides or split.dims or split.findings:
        return split
    names = _names(model)
    first = next((name for name, p in model.named_parameters() if p.dim() == 2), "weight")
    raise SpmdError(
        message(
            f"no Megatron rules are known for {type(model).__name__}",
            f"its parameters are named like {', '.join(map(repr, names[:3]))}; known: {', '.join(f.name for f in FAMILIES)}",
            fix=f"spmd.shard_module(model, mesh, [({first!r}, ({axis!r}, None)), ('**', None)]), or rules='fsdp'",
        )
    )


def megatron_rules(model: nn.Module, split: Split, axis: str) -> Rules:
    """The rules of a split, one for equal layers; also "replicated" for norms, embeddings and convolutions that no family splits."""
    specs = _specs(model, split, axis)
    by_pattern: dict[str, dict[str, PartitionSpec | None]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if id(tensor) in specs:
            by_pattern.setdefault("^" + re.sub(r"(?<![^.])\d+(?![^.])", "*", name), {})[name] = specs[id(tensor)]
    lines: list[tuple[str, PartitionSpec | None]] = []
    for pattern, by_name in by_pattern.items():
        is_one = len(set(by_name.values())) == 1
        lines.extend([(pattern, next(iter(by_name.values())))] if is_one else ((f"^{name}", spec) for name, spec in by_name.items()))
    return Rules(*(replace(rule, is_optional=True) for rule in Rules(*lines)))  # another stack may have the same names


def _specs(model: nn.Module, split: Split, axis: str) -> dict[int, PartitionSpec | None]:
    """The spec of each tensor, by id, so that tied tensors share one."""
    specs: dict[int, PartitionSpec | None] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, dim in split.dims.items():
        specs[id(parameters[name])] = split_dim(dim, parameters[name].dim(), axis)
    for name, side in split.sides.items():
        if name in parameters:
            owner = model.get_submodule(name.rpartition(".")[0])
            specs.setdefault(id(parameters[name]), spec_of_side(side, owner, parameters[name], axis))
            continue
        for path, module in model.get_submodule(name).named_modules():
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                specs.setdefault(id(tensor), spec_of_side(_adapter_side(side, path), module, tensor, axis))
    for module in model.modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.dim() != 2 or isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower():
                specs.setdefault(id(tensor), None)
    return specs


def _adapter_side(side: Side, path: str) -> Side | None:
    """The side of a submodule of a split module. An adapter's first factor takes the inputs, its second makes the outputs."""
    part = path.partition(".")[0]
    if part.startswith("lora_A"):
        return "row" if side == "row" else None
    if part.startswith("lora_B"):
        return "column" if side == "column" else None
    return None if part.startswith("lora_") else side


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


__all__ = ["Preset", "preset", "register_preset"]
