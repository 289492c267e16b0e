"""How device 'jax' computes each of PyTorch's operators, for `spmd ops` and docs/ops.md. Nothing here prints.

Nothing is listed by hand: ATen's overloads come from the dispatcher, and their implementations from the table of lowerings and the
installed kernels. Functional forward overloads that take or return a tensor are counted. In-place and `out=` overloads are counted
as variants of their functional overload. Operators that match `OUT_OF_SCOPE` are left out.

    for operator in coverage("softmax"):
        print(operator.name, operator.how, operator.where)
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from spmd.base._torch import OpOverload, decomposition_table, dispatch_get_all_op_names, dispatch_has_kernel_for_dispatch_key
from spmd.device._backend import installed
from spmd.device._deferred import Deferrable
from spmd.device._kernels import MECHANISMS, variants_of
from spmd.lowering import Lowering, lookup, lowerings

How = Literal["rule", "device", "view", "composite", "decomposition", "unsupported"]
MEANING: dict[How, str] = {
    "rule": "a lowering: a jax function",
    "device": "a kernel of the device itself: moves, copies, reads values",
    "view": "PyTorch's own strides on the shared storage",
    "composite": "PyTorch's C++ calls other operators of this table",
    "decomposition": "PyTorch's Python decomposition into other operators of this table",
    "unsupported": "raises UnsupportedOpError",
}
# Patterns of operator names that are left out, by reason.
OUT_OF_SCOPE: dict[str, str] = {
    "sparse tensors": r"sparse|spsolve|spdiags|hspmm|_?coalesced?$|^_?(row_|c?col_|c?crow_|ccol_)?indices$|^_?values$|^_(nnz|dim[IV])$"
    r"|coo|csr|csc|bsr|bsc|cslt|to_dense|^smm$|^sspaddmm$",
    "quantized tensors": r"quantized|quantize_|_quant_|empty_affine|empty_per_channel|fbgemm|^q_|qscheme|qparams|int_repr|int[48]pack"
    r"|_scaled_mm|_scaled_grouped_mm|_mixed_dtypes_linear|dequantize"
    r"|^_wrapped_linear_prepack|^_fused_moving_avg|^_saturate_weight|^_rowwise_prune",
    "nested tensors": r"nested|jagged|to_padded_tensor",
    "operators of another backend": r"cudnn|miopen|mkldnn|mps|_triton|flash_attention|efficient_attention"
    r"|_cpu_fallback$|^_propagate_xla|_overrideable$|^thnn_conv2d$|^_pin_memory$"
    r"|thnn_fused|conv_depthwise|slow_conv|^batch_norm_(stats|elemt|gather|update)|_weight_norm_interface|_nnpack|_masked_scale|_compute_linear_combination",
    "PyTorch's own machinery": r"^_test|_foobar|_fw_primal|_(make|unpack)_dual|_philox|_dep_token|assert|^sym_|_jvp$|^lift|_functional_sym"
    r"|^_?is_|^_has_|^_use_|^from_file|_sdp_choice$|^_debug|^_cast_|^_version|_autocast_to|_sobol_engine",
}


@dataclass(frozen=True)
class Operator:
    """One functional overload.

    Attributes:
        name: `add.Tensor`; `relu` for `relu.default`.
        how: how device 'jax' computes it.
        mechanism: the first of `MECHANISMS` that supports the overload; empty if none does.
        where: `file:line` of the rule, kernel or decomposition, relative to the project or to site-packages; empty for C++.
        variants: names of the in-place and `out=` overloads, such as `add_.Tensor`.
    """

    name: str
    how: How
    where: str
    variants: tuple[str, ...]
    mechanism: str = ""


def coverage(pattern: str = "") -> list[Operator]:
    """All counted ATen overloads whose name contains a match of the regular expression `pattern`, sorted by name.

    If `pattern` contains "::", overloads of other libraries that have a lowering are returned instead.

    Raises:
        ValueError: `pattern` is not a valid regular expression.
    """
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}\n  fix: quote it, as in spmd ops '^add'") from error
    if "::" in pattern:
        return [_operator(op) for op in lowerings() if not op.name().startswith("aten::") and wanted.search(op.name())]
    return [_operator(op) for op in _functional() if wanted.search(_short(op)) and reason_left_out(op) is None]


def left_out() -> Counter[str]:
    """Number of functional forward overloads that are out of scope, by reason."""
    return Counter(reason for op in _functional() if (reason := reason_left_out(op)) is not None)


def counts(operators: Sequence[Operator]) -> dict[How, tuple[int, int]]:
    """Number of overloads, and of their in-place and `out=` variants, by `how` in the order of `MEANING`."""
    return {how: (sum(o.how == how for o in operators), sum(len(o.variants) for o in operators if o.how == how)) for how in get_args(How)}


def markdown(operators: Sequence[Operator]) -> str:
    """The page docs/ops.md. It omits line numbers, which change with every edit."""
    lines = [_HEAD.format(torch=torch.__version__.partition("+")[0]), "| computed by | overloads | in-place and `out=` |  |"]
    lines.append("| --- | ---: | ---: | --- |")
    lines += [f"| {how} | {count} | {variants} | {MEANING[how]} |" for how, (count, variants) in counts(operators).items()]
    lines += ["", "Left out:", "", *(f"- {number}: {reason}" for reason, number in sorted(left_out().items())), ""]
    for how in get_args(How):
        chosen = [operator for operator in operators if operator.how == how]
        lines += [f"## {how}", ""]
        if how in ("view", "composite", "unsupported"):
            lines += textwrap.wrap(", ".join(f"`{operator.name}`" for operator in chosen) + ".", 140, break_on_hyphens=False)
        else:
            lines += ["| overload | file | in-place and `out=` |", "| --- | --- | --- |"]
            lines += [f"| `{o.name}` | {o.where.rpartition(':')[0]} | {' '.join(f'`{v}`' for v in o.variants)} |" for o in chosen]
        lines.append("")
    return "\n".join(lines)


_HEAD = """\
# Operators

Generated by `spmd ops --markdown` (`make docs`); do not edit. `spmd ops PATTERN` prints the same with line numbers.

The tables count functional forward overloads of ATen in torch {torch} that take or return a tensor. An in-place or `out=` overload is
counted with the functional overload that has the same arguments. Gradients are PyTorch's own formulas in terms of these operators. For a
composite with a rule, it is the derivative of the rule. Results of torch's operator database are in `benchmarks/results/ops.json`.
"""


def reason_left_out(op: OpOverload) -> str | None:
    """Why the overload is not counted; None if it is."""
    if any("Dimname" in str(a.type) or str(a.type) in ("Storage", "Stream") for a in op._schema.arguments):
        return "named dims and raw storages"
    name = op._schema.name.removeprefix("aten::")
    return next((reason for reason, names in OUT_OF_SCOPE.items() if re.search(names, name)), None)


def _functional() -> list[OpOverload]:
    """Functional forward overloads that take or return a tensor, by name."""
    found: list[OpOverload] = []
    for name in sorted(dispatch_get_all_op_names()):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or packet.endswith("backward") or "_backward_" in packet:
            continue
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        schema = op._schema
        if schema.is_mutable or torch.Tag.view_copy in op.tags or packet.endswith("_copy") or overload.endswith("functional"):
            continue
        if any("Tensor" in str(value.type) for value in (*schema.arguments, *schema.returns)):
            found.append(op)
    return found


def _operator(op: OpOverload) -> Operator:
    how, where = _computed_by(op)
    mechanism = installed().by.get(_short(op)) or ("composite" if how == "view" else how if how != "unsupported" else "")
    return Operator(_short(op), how, where, tuple(_short(variant) for variant in variants_of(op)), mechanism)


def _computed_by(op: OpOverload) -> tuple[How, str]:
    """How an overload is computed, and where, in the dispatcher's order: kernels of this package, C++ composites, then the fallback."""
    lowering = lookup(op)
    kernel = installed().kernels.get(f"{_short(op)}PrivateUse1")
    kernel = kernel.kernel if isinstance(kernel, Deferrable) else kernel
    if lowering is not None:
        return "rule", _rule_source(lowering)
    if kernel is not None and installed().by.get(_short(op)) != "composite":
        return ("view" if op.is_view else "device"), _source(kernel)
    if op.is_view:
        return "view", ""
    if _has_kernel(op, "CompositeImplicitAutograd") or _has_kernel(op, _EXPLICIT):
        return "composite", ""
    called = op  # the overload that reaches the fallback
    if _has_kernel(op, f"{_EXPLICIT}NonFunctional"):  # a structured op, whose kernel calls its out= overload, or a composite
        called = next((variant for variant in variants_of(op) if variant._schema.arguments[-1].is_out), op)
        if called is op or _has_kernel(called, _EXPLICIT):
            return "composite", ""
    decomposition = decomposition_table.get(called)
    if decomposition is None:
        return "unsupported", ""
    return "decomposition", _source(decomposition)


def _has_kernel(op: OpOverload, key: str) -> bool:
    return dispatch_has_kernel_for_dispatch_key(op.name(), key)


_EXPLICIT = "CompositeExplicitAutograd"


def _rule_source(lowering: Lowering) -> str:
    """`file:line` of the rule; for a rule from a table the line of the op in the table."""
    file, _, line = lowering.source.rpartition(":")
    key = re.compile(rf'^\s*"(?:[^"]* )?{re.escape(_short(lowering.op))}(?: [^"]*)?":')
    if not Path(file).is_file():  # defined in an interactive session
        return lowering.source
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    line = next((str(number) for number, text in enumerate(lines, 1) if key.match(text)), line)
    return f"{_shortened(file)}:{line}"


def _source(function: Callable[..., Any]) -> str:
    code: Any = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f"{_shortened(code.co_filename)}:{code.co_firstlineno}"


def _shortened(file: str) -> str:
    """A path relative to the folder that contains this project or PyTorch."""
    for package in (Path(torch.__file__).parents[1], Path(__file__).parents[1]):  # the environment may be inside the project
        if Path(file).is_relative_to(package):
            return Path(file).relative_to(package).as_posix()
    return file


def _short(op: OpOverload) -> str:
    return op.name().removeprefix("aten::")


__all__ = ["MEANING", "MECHANISMS", "OUT_OF_SCOPE", "How", "Operator", "counts", "coverage", "left_out", "reason_left_out"]
