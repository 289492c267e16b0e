"""`shard_module`: rules assign a spec to every parameter and buffer of a model, and a report shows the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from mesh import LARGE_BYTES, Mesh, Rule, Rules, RulesReport, Sized, SpecFunction, rules_report
from spmd.base._errors import SpmdError, message
from spmd.base._wrong_arguments import require_module, require_parameters
from spmd.fsdp import dissolve, fully_shard, require_no_unit
from spmd.rules._blocks import remove_borders
from spmd.rules._heads import head_findings
from spmd.rules._parallel_plan import Plan, automatic_plan, dtensor_plan, hugging_face_plan
from spmd.rules._presets import preset
from spmd.sharding._annotate import as_mesh, mark_sharding
from spmd.sharding._axes import megatron_axis
from spmd.sharding._dtensor_placements import is_placements, spec_of_placements

ParameterFunction: TypeAlias = Callable[[str, torch.Tensor], Any]
RulesLike: TypeAlias = Rules | Sequence[tuple[Any, Any]] | Mapping[Any, Any] | ParameterFunction | str
_BY_RULES = "_spmd_units_by_rules"


def shard_module(
    model: nn.Module,
    mesh: Any,
    rules: RulesLike,
    *,
    strict: bool = True,
    axis: str | None = None,
    large_bytes: int = LARGE_BYTES,
) -> RulesReport:
    """Mark every parameter and buffer of `model` by rules. Tensors that no rule matches are replicated.

    Args:
        model: on device 'jax', or on the host or 'meta', where layouts are recorded and applied when the model moves to the device.
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`.
        rules: one of
            ordered (pattern, spec) pairs, a dict of them or `mesh.Rules`; a spec is one entry per dim, None (replicated on
            purpose), DTensor placements (one per mesh axis), or a function of name, shape and mesh;
            a function `(name, parameter) -> spec`;
            a DTensor plan `{fqn: ColwiseParallel()}`; a Hugging Face plan `{fqn: "colwise"}`, or "auto" for the model's own;
            "megatron", "fsdp" or "fsdp+megatron" (see `docs/sharding.md`).
        strict: raise on findings of the report that are errors, before anything is marked.
        axis: the mesh axis that plans and "megatron" split over; default: the axis named 'model', 'tensor' or 'tp'.
        large_bytes: a parameter of at least this size, in bytes, that no rule matches is an error.

    Returns:
        The report: each tensor's spec, rule and bytes per device, and the findings. `rich.print` shows it as a table.

    Raises:
        RulesError: with `strict`, the report has errors.
        SpecError: a spec does not fit its tensor's rank or the mesh.
        SpmdError: `model` is not a module, or `rules` is of no supported kind, or names an unknown preset or style.
    """
    require_module(model, "shard_module", "spmd.shard_module(model, mesh, rules), or for one tensor spmd.mark_sharding(x, mesh, spec)")
    mesh = as_mesh(mesh)
    plan = rules_for(model, mesh, rules, axis)
    sized = sized_tensors(model)
    report = computed = rules_report(sized, mesh, plan.rules, large_bytes)  # layouts during computation, before FSDP splits further
    if plan.fsdp_axis is not None:
        names = frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))
        report = rules_report(sized, mesh, plan.rules.split_further(plan.fsdp_axis, names), large_bytes)
    report = report.with_findings([*plan.findings, *head_findings(model, computed)])
    if strict:
        report.raise_errors()
    if _BY_RULES in vars(model):  # remove the units of an earlier call
        dissolve(model)
    require_no_unit(plan.units)
    tensors = dict(named_tensors(model))
    for placement in report:
        mark_sharding(tensors[placement.name], mesh, placement.sharding.partition_spec)
    for unit in plan.units:
        fully_shard(unit, mesh, axis=plan.fsdp_axis)
        vars(model)[_BY_RULES] = True
    remove_borders(model)  # those of an earlier preset
    for module, border in plan.borders:
        border.install(module)
    return report


def rules_for(model: nn.Module, mesh: Mesh, rules: RulesLike, axis: str | None = None) -> Plan:
    """Convert anything that is accepted as `rules` to `mesh.Rules` and layouts at module borders."""
    if isinstance(rules, str):
        if rules != "auto":
            return preset(rules, model, mesh, axis)
        rules = automatic_plan(model)
    if isinstance(rules, Rules):
        return Plan(rules)
    if isinstance(rules, Mapping):
        return _from_mapping(model, mesh, rules, axis)
    if callable(rules):
        require_parameters(rules, ("name", "parameter"), "the function of rules of shard_module")
        return Plan(Rules(Rule("**", _of_parameter(rules, dict(named_tensors(model)), mesh), is_optional=True)))
    if isinstance(rules, list | tuple):  # pyright: ignore[reportUnnecessaryIsInstance]
        return Plan(Rules(*(_with_placements(pair) for pair in rules)))
    raise SpmdError(
        message(
            f"rules of type {type(rules).__name__} are not supported",
            fix="pass [(pattern, spec), ...], a plan, a function (name, parameter) -> spec, or 'megatron', 'fsdp', 'auto'",
        )
    )


def _from_mapping(model: nn.Module, mesh: Mesh, rules: Mapping[Any, Any], axis: str | None) -> Plan:
    from torch.distributed.tensor.parallel import ParallelStyle

    styles = {key: value for key, value in rules.items() if isinstance(value, ParallelStyle)}
    names = {key: value for key, value in rules.items() if isinstance(value, str)}
    if (styles or names) and len(styles or names) != len(rules):
        raise SpmdError(message("a plan mixes styles and specs", fix="make two calls, one with the plan and one with the specs"))
    if styles:
        return dtensor_plan(model, mesh, styles, axis or megatron_axis(mesh))
    if names:
        return hugging_face_plan(model, names, axis or megatron_axis(mesh))
    return Plan(Rules(*(_with_placements(pair) for pair in rules.items())))


def _with_placements(pair: Any) -> Any:
    """A (pattern, spec) pair; DTensor placements as the spec are converted."""
    if isinstance(pair, tuple | list) and len(pair) == 2 and is_placements(pair[1]):
        placements = pair[1]
        return pair[0], lambda name, shape, mesh: spec_of_placements(placements, len(shape), mesh.axis_names)
    return pair


def _of_parameter(function: ParameterFunction, tensors: dict[str, torch.Tensor], mesh: Mesh) -> SpecFunction:
    def spec(name: str, shape: tuple[int, ...], mesh: Mesh) -> Any:
        found = function(name, tensors[name])
        return spec_of_placements(found, len(shape), mesh.axis_names) if is_placements(found) else found

    return spec


def named_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, each once under its first name."""
    return [*model.named_parameters(), *model.named_buffers()]


def sized_tensors(model: nn.Module) -> dict[str, Sized]:
    """Shape, element size and tied names of a model's parameters and buffers, by name."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        aliases.setdefault(id(tensor), []).append(name)
    buffers = {id(tensor) for tensor in model.buffers()}
    return {
        name: Sized(tuple(tensor.shape), tensor.element_size(), tuple(n for n in aliases[id(tensor)] if n != name), id(tensor) in buffers)
        for name, tensor in named_tensors(model)
    }


__all__ = ["ParameterFunction", "RulesLike", "named_tensors", "rules_for", "shard_module", "sized_tensors"]
