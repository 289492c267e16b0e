"""Converts tensor-parallel plans to rules and activation layouts: DTensor's `{fqn: ColwiseParallel()}` and Hugging Face's
`{fqn: "colwise"}`.

A plan lays out the parameters of modules and, in DTensor's case, the values at their borders. Here every tensor is global, so the compiler
does what a plan does to keep ranks consistent (gradient all-reduces, masks, local outputs). What remains is a spec for each
parameter and a constraint on the values that the plan redistributes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from mesh import Finding, Mesh, PartitionSpec, Rule, Rules, ShardingSpec, entry_axes, without_axes
from spmd.base._errors import SpmdError, message
from spmd.device._layout import annotation_of
from spmd.rules._sides import outputs_last
from spmd.sharding._annotate import mark_sharding
from spmd.sharding._constraint import constrain

Axes: TypeAlias = "str | tuple[str, ...]"
_COLUMN, _ROW, _WHOLE = "column", "row", "whole"
# Hugging Face's names (transformers.integrations.tensor_parallel). What `_WHOLE` styles add is about ranks' gradients, or experts.
HUGGING_FACE: dict[str, str] = {
    **dict.fromkeys(("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise", "local_colwise", "embedding_colwise"), _COLUMN),
    **dict.fromkeys(("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise", "local_rowwise", "embedding_rowwise"), _ROW),
    **dict.fromkeys(("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "all_reduce", "sequence_parallel"), _WHOLE),
    **dict.fromkeys(("local", "local_params", "gather", "isolated", "moe_identity_expert", "moe_tp_experts"), _WHOLE),
}


@dataclass(frozen=True)
class Plan:
    """A plan resolved for one model.

    Attributes:
        rules: specs of parameters.
        borders: pairs of a module and the layouts at its border.
        units: modules that are FSDP units, inner ones first.
        fsdp_axis: the axis over which FSDP splits parameters further than the rules do.
        findings: suspicious properties of the model.
    """

    rules: Rules
    borders: tuple[tuple[nn.Module, Border], ...] = ()
    units: tuple[nn.Module, ...] = ()
    fsdp_axis: str | None = None
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True)
class Border:
    """Layouts of the values that enter and leave a module, as placements on the plan's axis; None leaves a value alone.

    Attributes:
        axis: the plan's axis or axes; empty if it has none.
        inputs: layouts of the positional arguments in order; further arguments are left alone.
        keywords: layouts by keyword argument.
        outputs: layouts of the outputs in order.
        batch: axes that split dim 0; None: all but the plan's.
    """

    mesh: Mesh
    axis: Axes
    inputs: tuple[Placement | None, ...] = ()
    keywords: tuple[tuple[str, Placement | None], ...] = ()
    outputs: tuple[Placement | None, ...] = ()
    batch: tuple[str, ...] | None = None

    def install(self, module: nn.Module) -> None:
        """Register hooks that constrain the values at `module`'s border."""
        if self.inputs or self.keywords:
            module.register_forward_pre_hook(self.enter, with_kwargs=True)
        if self.outputs:
            module.register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Forward pre-hook: lay out the arguments."""
        keywords = dict(self.keywords)
        return self._laid_out(args, self.inputs), {name: self._value(value, keywords.get(name)) for name, value in kwargs.items()}

    def leave(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Forward hook: lay out the results."""
        if isinstance(result, tuple | list):
            laid_out = self._laid_out(tuple(result), self.outputs)
            return type(result)(*laid_out) if hasattr(result, "_fields") else type(result)(laid_out)
        return self._value(result, self.outputs[0])

    def _laid_out(self, values: tuple[Any, ...], layouts: tuple[Placement | None, ...]) -> tuple[Any, ...]:
        each = (*layouts, *(None,) * (len(values) - len(layouts)))
        return tuple(self._value(value, layout) for value, layout in zip(values, each, strict=False))

    def _value(self, value: Any, layout: Placement | None) -> Any:
        if layout is None or not isinstance(value, torch.Tensor) or value.device.type != "jax" or not value.dim():
            return value
        spec = ShardingSpec(self.mesh, self.spec(layout, tuple(value.shape)))
        return constrain(value, spec, spec if value.is_floating_point() else None)

    def spec(self, layout: Placement, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec of a value: the plan's axes where `layout` says, and the batch axes on dim 0 as far as they divide it."""
        others = entry_axes(self.axis) if self.batch is None else [a for a in self.mesh.axis_names if a not in self.batch]
        entries = [entry_axes(entry) for entry in batch_over_other_axes(shape, self.mesh, others)]
        if isinstance(layout, Shard):
            entries[layout.dim] = (*entries[layout.dim], *entry_axes(self.axis))
        return PartitionSpec(*(axes or None for axes in entries))


def batch_over_other_axes(shape: tuple[int, ...], mesh: Mesh, axes: Sequence[str | int]) -> PartitionSpec:
    """The default layout of a value along all axes but `axes`: dim 0, the batch, is split over those that divide it."""
    over: list[str] = []
    size = shape[0] if shape else 1
    for axis in mesh.axis_names:
        if axis not in axes and size % mesh.axis_size(axis) == 0:
            size //= mesh.axis_size(axis)
            over.append(axis)
    return PartitionSpec(*((tuple(over) or None) if dim == 0 else None for dim in range(len(shape))))


def parallelize(style: ParallelStyle, module: nn.Module, mesh: Mesh, axes: tuple[str, ...]) -> bool:
    """Lay out one module as a `parallelize_module` style says, over `axes`. Along other axes it keeps its layout.

    Returns:
        False, with nothing changed, if the style or the module has no equivalent here.
    """
    kind = _STYLES.get(type(style))
    if kind is None or (isinstance(style, ColwiseParallel | RowwiseParallel) and not isinstance(module, nn.Linear | nn.Embedding)):
        return False
    side, border = kind(style, mesh, axes)
    if side is not None:
        held = [(name, p) for name, p in module.named_parameters(recurse=side == _WHOLE)]
        for name, parameter in (*held, *module.named_buffers(recurse=side == _WHOLE)):
            split = BySide(side, axes, isinstance(module, nn.Embedding))(name, tuple(parameter.shape), mesh)
            mark_sharding(parameter, mesh, _joined(annotation_of(parameter), split, parameter.dim(), mesh, axes))
    border.install(module)
    return True


def _joined(before: ShardingSpec | None, split: PartitionSpec | None, rank: int, mesh: Mesh, axes: tuple[str, ...]) -> PartitionSpec:
    """The layout of `before` along other axes, combined with `split` along `axes`."""
    nowhere = PartitionSpec(*(None,) * rank)
    kept = without_axes(before.partition_spec, axes) if before is not None and before.mesh == mesh else nowhere
    pairs = zip(kept, split or nowhere, strict=True)
    return PartitionSpec(*((*entry_axes(old), *entry_axes(new)) or None for old, new in pairs))


def dtensor_plan(model: nn.Module, mesh: Mesh, plan: Mapping[str, ParallelStyle], axis: str) -> Plan:
    """Rules and borders of a plan for `parallelize_module`, over one axis of the mesh.

    Raises:
        SpmdError: a style, or a module's class, has no equivalent here.
    """
    rules: list[Any] = []
    borders: list[tuple[nn.Module, Border]] = []
    for key, style in plan.items():
        anchored = Rule(f"^{key}", None)
        modules = [(name, module) for name, module in model.named_modules() if name == key or anchored.matches(name)]
        kind = _STYLES.get(type(style))
        if kind is None:
            known = ", ".join(c.__name__ for c in _STYLES)
            raise SpmdError(
                message(f"{type(style).__name__} for {key!r} has no equivalent here", f"known: {known}", fix="write rules for it")
            )
        held, border = kind(style, mesh, axis)
        borders.extend((module, border) for _, module in modules if border.inputs or border.keywords or border.outputs)
        if held is not None or not modules:
            rules.extend(_parameter_rules(f"^{key}" if key else "^", [m for _, m in modules], held or _WHOLE, axis))
    return Plan(Rules(*rules), tuple(borders))


def hugging_face_plan(model: nn.Module, plan: Mapping[str, str], axis: str) -> Plan:
    """Rules of a `base_model_tp_plan`: names of modules or parameters below a base model, which may be inside another model.

    Raises:
        SpmdError: an unknown style.
    """
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    rules: list[Any] = []
    for key, style in plan.items():
        if style not in HUGGING_FACE:
            raise SpmdError(message(f"{key!r} has style {style!r}", f"known: {', '.join(HUGGING_FACE)}", fix="write a rule for it"))
        rule = Rule(key, None)
        held = [module for name, module in modules.items() if name and rule.matches(name)]
        if not held and any(rule.matches(name) for name in parameters):
            rules.append((key, BySide(HUGGING_FACE[style], axis, transposed=False)))
        elif held or key in ("lm_head", "score"):  # a family's plan names heads that a model may not have
            rules.extend(_parameter_rules(key, held, HUGGING_FACE[style], axis))
    return Plan(Rules(*rules))


def automatic_plan(model: nn.Module) -> dict[str, str]:
    """The plan of the model's class and configuration, which `tp_plan="auto"` selects.

    Raises:
        SpmdError: the model has no plan.
    """
    config = getattr(model, "config", None)
    plan: dict[str, str] = dict(getattr(config, "base_model_tp_plan", None) or {})
    for module in model.modules():  # entries of the head, and of the base model inside it
        plan.update({k.removeprefix("model."): v for k, v in (getattr(module, "_tp_plan", None) or {}).items()})
    if not plan:
        raise SpmdError(
            message(
                f"{type(model).__name__} has no tensor-parallel plan",
                "looked at model.config.base_model_tp_plan and model._tp_plan",
                fix="pass rules='megatron' or rules of your own",
            )
        )
    return plan


def _parameter_rules(key: str, modules: list[nn.Module], side: str, axis: str) -> list[Any]:
    """Rules for the direct parameters of the modules that match one entry of a plan."""
    separator = "" if key == "^" else "."
    if not modules:
        return [(f"{key}{separator}weight", BySide(side, axis, transposed=False))]
    if side == _WHOLE:
        return [Rule(f"{key}{separator}**", None, is_optional=True)]
    transposed = any(outputs_last(module) for module in modules)
    names = dict.fromkeys(name for module in modules for name, _ in module.named_parameters(recurse=False))
    return [(f"{key}{separator}{name}", BySide(side, axis, transposed)) for name in names]


@dataclass(frozen=True)
class BySide:
    """Spec function of a parameter that is split by its module's outputs (`column`) or inputs (`row`).

    A Linear's weight is [out, in]; `transposed` weights (Embedding, Conv1D) are [in, out]; batch dims come first.
    """

    side: str
    axis: Axes
    transposed: bool

    def __call__(self, name: str, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec | None:
        if self.side == _WHOLE or (self.side == _ROW and len(shape) < 2):
            return None
        outputs_last = self.transposed or len(shape) < 2
        dim = len(shape) - 1 if (self.side == _COLUMN) == outputs_last else len(shape) - 2
        return PartitionSpec(*(self.axis if d == dim else None for d in range(len(shape))))

    def __str__(self) -> str:
        return f"{self.side} over {self.axis!r}"


def _layouts(value: Any) -> tuple[Placement | None, ...]:
    """A single layout, a tuple of layouts or None, as a tuple."""
    return () if value is None else tuple(value) if isinstance(value, tuple | list) else (value,)


def _redistributed(given: Any, wanted: Any) -> tuple[Placement | None, ...]:
    """The layouts to change to; None where a value already has the wanted layout."""
    pairs = zip(_layouts(given), _layouts(wanted), strict=True)
    changed = tuple(after if before != after else None for before, after in pairs)
    return changed if any(layout is not None for layout in changed) else ()


def _column_style(style: Any, mesh: Mesh, axis: Axes) -> tuple[str | None, Border]:
    outputs = () if style.output_layouts == (Shard(-1),) else _layouts(style.output_layouts)
    return _COLUMN, Border(mesh, axis, _redistributed(style.input_layouts, (Replicate(),)), (), outputs)


def _row_style(style: Any, mesh: Mesh, axis: Axes) -> tuple[str | None, Border]:
    is_tokens = style.input_layouts == (Replicate(),)  # ids of an embedding, or an input that the split weight splits
    inputs = () if is_tokens else _redistributed(style.input_layouts, (Shard(-1),))
    return _ROW, Border(mesh, axis, inputs, (), _layouts(style.output_layouts))


def _sequence_style(style: Any, mesh: Mesh, axis: Axes) -> tuple[str | None, Border]:
    return _WHOLE, Border(mesh, axis, style.sequence_sharding, (), style.sequence_sharding)


def _input_style(style: Any, mesh: Mesh, axis: Axes) -> tuple[str | None, Border]:
    inputs = () if style.input_layouts is None else _redistributed(style.input_layouts, style.desired_input_layouts)
    given, wanted = style.input_kwarg_layouts or {}, style.desired_input_kwarg_layouts or {}
    return None, Border(mesh, axis, inputs, tuple((k, wanted[k]) for k in given if given[k] != wanted[k]))


def _output_style(style: Any, mesh: Mesh, axis: Axes) -> tuple[str | None, Border]:
    return None, Border(mesh, axis, outputs=_redistributed(style.output_layouts, style.desired_output_layouts))


def _both_style(style: Any, mesh: Mesh, axis: Axes) -> tuple[str | None, Border]:
    _, entering = _input_style(style.prepare_module_input, mesh, axis)
    _, leaving = _output_style(style.prepare_module_output, mesh, axis)
    return None, Border(mesh, axis, entering.inputs, entering.keywords, leaving.outputs)


_STYLES = cast(
    "dict[type[ParallelStyle], Callable[[Any, Mesh, Axes], tuple[str | None, Border]]]",
    {
        ColwiseParallel: _column_style,
        RowwiseParallel: _row_style,
        SequenceParallel: _sequence_style,
        PrepareModuleInput: _input_style,
        PrepareModuleOutput: _output_style,
        PrepareModuleInputOutput: _both_style,
    },
)


__all__ = [
    "HUGGING_FACE",
    "Border",
    "Plan",
    "automatic_plan",
    "batch_over_other_axes",
    "dtensor_plan",
    "hugging_face_plan",
    "parallelize",
]
