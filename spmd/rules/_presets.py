"""Rules for models whose parameter names are known: Megatron tensor parallelism by family, and FSDP for any model.

Megatron: of each pair of linears the first is split by outputs (`column`), the second by inputs (`row`), so that a pair costs
one all-reduce forward and one backward. torch's Linear holds [out, in], Hugging Face's Conv1D [in, out].
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import nn

from mesh import Mesh, Rules
from spmd.base._errors import SpmdError, message

MODEL_AXES = ("model", "tensor", "tp")
FSDP_AXES = ("fsdp", "shard", "data", "dp")


Lines: TypeAlias = list[tuple[str, tuple[str | None, ...] | None]]


@dataclass(frozen=True)
class Family:
    """Models that name their parameters alike.

    Attributes:
        pattern: found in the parameter names, one per line, of a model that is one.
        lines: its Megatron rules over an axis, for a model with such names.
    """

    name: str
    pattern: str
    lines: Callable[[str, Sequence[str]], Lines]

    def rules(self, axis: str, names: Sequence[str]) -> Rules:
        """The rules; one that fits no name of this model is no mistake."""
        return Rules(*(replace(rule, is_optional=True) for rule in Rules(*self.lines(axis, names))))


Preset: TypeAlias = Callable[[nn.Module, Mesh], Any]

_own: dict[str, Preset] = {}


def register_preset(name: str) -> Callable[[Preset], Preset]:
    """Make the decorated function a preset: `shard_module(model, m, name)` uses the rules that it returns for a model and a mesh,
    pairs of pattern and spec or `mesh.Rules`; `name + "+fsdp"` splits them further.

    Raises:
        SpmdError: the name is taken, or has a '+'.
    """
    taken = {"megatron", "fsdp", "auto", *_own}
    if name in taken or "+" in name or not name:
        what = f"{name!r} cannot be the name of a preset"
        raise SpmdError(message(what, f"taken: {', '.join(sorted(taken))}; '+' joins two", fix="choose another name"))

    def register(preset: Preset) -> Preset:
        _own[name] = preset
        return preset

    return register


def preset(name: str, model: nn.Module, mesh: Mesh, axis: str | None = None) -> Rules:
    """The rules that a string names.

    Args:
        name: "megatron", "fsdp", a registered one, or one of these and "fsdp" joined by '+'.
        axis: the axis for Megatron; default: the mesh's axis of one of the names `MODEL_AXES`.

    Raises:
        SpmdError: another name, a model of no known family, or a mesh without a fitting axis.
    """
    wanted = set(name.split("+"))
    own = [n for n in wanted if n in _own]
    if not wanted or wanted - {"megatron", "fsdp", *own} or len(wanted - {"fsdp"}) > 1:
        known = ["megatron", "fsdp", "fsdp+megatron", "auto", *_own]
        raise SpmdError(message(f"{name!r} names no rules", f"known: {', '.join(map(repr, known))}", fix="write one of these"))
    rules = Rules()
    if own:
        made = _own[own[0]](model, mesh)
        rules = made if isinstance(made, Rules) else Rules(*made)
    if "megatron" in wanted:
        rules = family_of(model).rules(axis or megatron_axis(mesh), _names(model))
    return rules.split_further(fsdp_axis(mesh), frozenset(_names(model))) if "fsdp" in wanted else rules


def family_of(model: nn.Module) -> Family:
    """The family that the model belongs to.

    Raises:
        SpmdError: none of them.
    """
    names = _names(model)
    for family in FAMILIES:
        if re.search(family.pattern, "\n".join(names), re.MULTILINE):
            return family
    raise SpmdError(
        message(
            f"no Megatron rules are known for {type(model).__name__}",
            f"its parameters are named like {', '.join(map(repr, names[:3]))}; known: {', '.join(f.name for f in FAMILIES)}",
            fix="pass rules: [('**.up.weight', ('model', None)), ('**.down.weight', (None, 'model'))], or rules='fsdp'",
        )
    )


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def megatron_axis(mesh: Mesh) -> str:
    """The axis for tensor parallelism: the one so named, or the mesh's only one."""
    return _axis(mesh, MODEL_AXES, "tensor parallelism")


def fsdp_axis(mesh: Mesh) -> str:
    """The axis over which FSDP splits: the one so named, or the mesh's only one."""
    return _axis(mesh, FSDP_AXES, "FSDP")


def _axis(mesh: Mesh, names: Sequence[str], purpose: str) -> str:
    if len(mesh.axis_names) == 1:
        return mesh.axis_names[0]
    for name in names:
        if name in mesh.axis_names:
            return name
    raise SpmdError(
        message(
            f"{mesh} has no axis for {purpose}",
            f"axes of the mesh: {', '.join(map(repr, mesh.axis_names))}; looked for: {', '.join(map(repr, names))}",
            fix=f"name an axis {names[0]!r}, or write the rules with your own names",
        )
    )


def column(axis: str, *modules: str) -> Lines:
    """Linears [out, in] split by outputs, with their bias."""
    return [pair for name in modules for pair in ((f"{name}.weight", (axis, None)), (f"{name}.bias", (axis,)))]


def row(axis: str, *modules: str) -> Lines:
    """Linears [out, in] split by inputs; the bias is added once, so whole."""
    return [pair for name in modules for pair in ((f"{name}.weight", (None, axis)), (f"{name}.bias", None))]


def gpt2(axis: str, names: Sequence[str]) -> Lines:
    """Hugging Face's GPT-2: Conv1D layers, weights [in, out]; the vocabulary split."""
    columns = ("attn.c_attn", "crossattention.{c_attn,q_attn}", "mlp.c_fc")
    rows = ("{attn,crossattention}.c_proj", "mlp.c_proj")
    return [
        *((f"{name}.weight", (None, axis)) for name in columns),
        *((f"{name}.bias", (axis,)) for name in columns),
        *((f"{name}.weight", (axis, None)) for name in rows),
        *((f"{name}.bias", None) for name in rows),
        ("{wte,lm_head}.weight", (axis, None)),
        ("wpe.weight", None),
        ("{ln_1,ln_2,ln_f,ln_cross_attn}.*", None),
    ]


def llama(axis: str, names: Sequence[str]) -> Lines:
    """Llama, Mistral, Qwen, Phi-3, Gemma and their like."""
    return [
        *column(axis, "{q_proj,k_proj,v_proj,gate_proj,up_proj,qkv_proj,gate_up_proj}"),
        *row(axis, "{o_proj,down_proj}"),
        ("{embed_tokens,lm_head}.weight", (axis, None)),
        ("{q_norm,k_norm,norm,input_layernorm,post_attention_layernorm}.*", None),
    ]


def vit(axis: str, names: Sequence[str]) -> Lines:
    """Vision transformers of Hugging Face, timm and torchvision, and torch's own encoder layers."""
    return [
        *row(axis, "attention.output.dense", "{output.dense,attn.proj,attention.o_proj}", "mlp.fc2", "linear2"),
        *column(axis, "attention.{query,key,value,q_proj,k_proj,v_proj}", "intermediate.dense", "mlp.fc1", "attn.qkv", "linear1"),
        *row(axis, "{self_attn,self_attention}.out_proj", "mlp.3"),
        *column(axis, "mlp.0"),
        ("{self_attn,self_attention}.in_proj_weight", (axis, None)),
        ("{self_attn,self_attention}.in_proj_bias", (axis,)),
        ("{position_embeddings,pos_embed,pos_embedding,cls_token,class_token}", None),
    ]


def resnet(axis: str, names: Sequence[str]) -> Lines:
    """ResNets of torchvision, timm and Hugging Face: in each block the convolution before the last is split by outputs, with
    the norm behind it, and the last by inputs."""
    has_third = any(re.search(r"layer\d?\.\d+\.conv3\.|layer\.2\.convolution", name) for name in names)
    first, last = (2, 3) if has_third else (1, 2)
    norm = "{weight,bias,running_mean,running_var}"
    return [
        (f"^**.layer?.*.conv{first}.weight", (axis, None, None, None)),
        (f"^**.layer?.*.bn{first}.{norm}", (axis,)),
        (f"^**.layer?.*.conv{last}.weight", (None, axis, None, None)),
        (f"layers.*.layer.{first - 1}.convolution.weight", (axis, None, None, None)),
        (f"layers.*.layer.{first - 1}.normalization.{norm}", (axis,)),
        (f"layers.*.layer.{last - 1}.convolution.weight", (None, axis, None, None)),
        ("{conv1,conv2,conv3,convolution}.weight", None),
        ("downsample.*.weight", None),
        *column(axis, "fc"),
    ]


FAMILIES = (
    Family("GPT-2", r"attn\.c_attn\.weight$", gpt2),
    Family("Llama", r"(self_attn|attention)\.(q_proj|qkv_proj)\.weight$(?s:.*)(down_proj|gate_up_proj)\.weight$", llama),
    Family(
        "ViT and encoders",
        r"(attention\.query|attention\.q_proj|attn\.qkv)\.weight$|self_att(n|ention)\.in_proj_weight$",
        vit,
    ),
    Family("ResNet", r"(layer\d\.\d+\.conv2|layers\.\d+\.layer\.1\.convolution)\.weight$", resnet),
)
