"""Pairs of linear layers that Megatron's tensor parallelism splits together, by the names that model families give them.

The first linears of a pair are split by outputs (`columns`), and the linear that takes their results by inputs (`row`). So a pair
costs one all-reduce in the forward pass and one in the backward pass (Shoeybi et al., "Megatron-LM", 2019, section 3). Pairs are
looked for below every module, so they are found in a model and in any wrapper of it. Half a pair splits nothing.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast

import torch
from torch import nn

from mesh import Finding, Rule

Side: TypeAlias = Literal["column", "row"]


@dataclass(frozen=True)
class Pair:
    """Two groups of modules below a common ancestor, the holder.

    Attributes:
        columns: glob of the names, below the holder, of modules or own parameters of the holder that are split by outputs.
        row: name of the module that takes their results, split by inputs.
        holder: glob of the holder's name.
    """

    columns: str
    row: str
    holder: str = "**"


@dataclass(frozen=True)
class Family:
    """A family of models with the same module names.

    Attributes:
        pairs: what is split together; if two pairs share a module, the earlier one applies.
        tables: glob of embeddings that are split by rows, usually over the vocabulary.
        heads: glob of linears that are split by outputs without a second half: logits.
    """

    name: str
    pairs: tuple[Pair, ...]
    tables: str = "{wte,embed_tokens,shared,word_embeddings,tok_embeddings,token_embedding,embed_in}"
    heads: str = "{lm_head,proj_out,embed_out,vocab_projector,generator_lm_head,predictions.decoder,lm_head.decoder}"


FAMILIES = (
    Family(
        "GPT-2",
        (
            Pair("{c_attn,q_attn}", "c_proj"),
            Pair("c_fc", "c_proj"),
            Pair("query_key_value", "dense"),
            Pair("dense_h_to_4h", "dense_4h_to_h"),
            Pair("fc_in", "fc_out"),
        ),
    ),
    Family(
        "Llama",
        (
            Pair("{q_proj,k_proj,v_proj,q_b_proj,kv_b_proj,sinks}", "{o_proj,out_proj}"),
            Pair("{q_proj,k_proj,v_proj}", "dense"),
            Pair("qkv_proj", "o_proj"),
            Pair("{gate_proj,up_proj}", "down_proj"),
            Pair("gate_up_proj", "down_proj"),
            Pair("{wq,wk,wv}", "wo"),
            Pair("{w1,w3}", "w2"),
        ),
    ),
    Family(
        "BERT",
        (
            Pair("self.{query,key,value,query_proj,key_proj,value_proj}", "output.dense"),
            Pair("intermediate.dense", "output.dense"),
            Pair("{query,key,value}", "dense"),
            Pair("ffn", "ffn_output"),
            Pair("{q_lin,k_lin,v_lin}", "out_lin"),
            Pair("lin1", "lin2"),
            Pair("Wqkv", "Wo"),
            Pair("Wi", "Wo"),
            Pair("intermediate_dense", "output_dense"),
        ),
    ),
    Family(
        "T5",
        (Pair("{q,k,v,relative_attention_bias}", "o"), Pair("{wi,wi_0,wi_1}", "wo")),
    ),
    Family(
        "ViT and encoders",
        (
            Pair("fc1", "fc2"),
            Pair("linear1", "linear2"),
            Pair("attention.{query,key,value}", "output.dense"),
            Pair("qkv", "proj"),
            Pair("{in_proj_weight,in_proj_bias}", "out_proj"),
            Pair("0", "3", holder="**.mlp"),
        ),
    ),
    Family(
        "ResNet",
        (
            Pair("{conv2,bn2}", "conv3"),
            Pair("{conv1,bn1}", "conv2"),
            Pair("layer.1.{convolution,normalization}", "layer.2.convolution"),
            Pair("layer.0.{convolution,normalization}", "layer.1.convolution"),
        ),
        heads="fc",
    ),
)


@dataclass
class Split:
    """The modules and parameters of a model that are split.

    Attributes:
        sides: side of each split module or parameter, by name.
        dims: for parameters with a weight per expert, the dim that is split, by name.
        families: families of which a pair was found, as keys.
        findings: halves of pairs whose other half is missing.
    """

    sides: dict[str, Side] = field(default_factory=dict[str, Side])
    dims: dict[str, int] = field(default_factory=dict[str, int])
    families: dict[Family, None] = field(default_factory=dict[Family, None])
    findings: list[Finding] = field(default_factory=list[Finding])


def split_of(model: nn.Module) -> Split:
    """Find every pair, embedding and head of the known families in a model. The result is empty if there is no pair."""
    split = Split()
    modules = dict(model.named_modules(remove_duplicate=False))
    halves: dict[str, str] = {}
    for name, module in modules.items():
        _note_pairs(split, halves, name, module)
    for name, row in halves.items():
        if name not in split.sides:
            what = f"{name!r} would be split by outputs, but no sibling {row!r} takes them by inputs"
            split.findings.append(
                Finding("pair", what, f"rename its other half to {row!r}, or write rules for both: ({name + '.weight'!r}, None)")
            )
    if not split.sides and not split.dims:
        return split
    for family in split.families:
        for name, module in modules.items():
            if isinstance(module, nn.Embedding) and _matches(family.tables, name):
                split.sides.setdefault(name, "row")
            elif is_product(module) and _matches(family.heads, name):
                split.sides.setdefault(name, "column")
    return split


def is_table(name: str) -> bool:
    """Whether an embedding of this name maps tokens to vectors."""
    return any(_matches(family.tables, name) for family in FAMILIES)


def _note_pairs(split: Split, halves: dict[str, str], name: str, module: nn.Module) -> None:
    own = {k for k, p in module.named_parameters(recurse=False) if p.dim()}
    if own.issuperset(("gate_up_proj", "down_proj")):
        split.dims.update((_join(name, k), dim) for k, dim in _expert_dims(module).items() if k in own)
        return
    below = {k: child for k, child in module.named_modules() if k and k.count(".") < 3}
    for family, pair in ((each, pair) for each in FAMILIES for pair in each.pairs):
        if not _matches(pair.holder, name):
            continue
        columns = [k for k in (*below, *own) if _matches(f"^{pair.columns}", k)]
        products = [k for k in columns if k in own or is_product(below[k])]
        rows = [k for k in below if _matches(f"^{pair.row}", k)] if products else []
        if products and not rows:  # a single convolution is the stem of a ResNet
            halves.update((_join(name, k), pair.row) for k in products if k not in own and not is_convolution(below[k]))
        elif rows and not any(_join(name, k) in split.sides for k in (*products, *rows)):
            split.families[family] = None
            split.sides.update((_join(name, k), "column") for k in columns)
            split.sides.update((_join(name, k), "row") for k in rows)


def _expert_dims(module: nn.Module) -> dict[str, int]:
    """The dim of the hidden features in stacked expert weights, [experts, out, in] or [experts, in, out], by parameter name."""
    up, down = cast("torch.Tensor", module.gate_up_proj), cast("torch.Tensor", module.down_proj)
    is_transposed = up.shape[-1] == 2 * down.shape[-2]
    return {"gate_up_proj": 2, "gate_up_proj_bias": 1, "down_proj": 1} if is_transposed else {"gate_up_proj": 1, "down_proj": 2}


def is_convolution(module: nn.Module) -> bool:
    """Whether the module is a convolution with weight [out, in, ...]."""
    return isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)


def is_product(module: nn.Module) -> bool:
    """Whether the module multiplies by a single weight: a linear or convolution, or an adapter around one."""
    weight = getattr(getattr(module, "base_layer", module), "weight", None)
    return isinstance(weight, torch.Tensor) and weight.dim() >= 2 and not isinstance(module, nn.Embedding)


@functools.cache
def _rule(pattern: str) -> Rule:
    return Rule(pattern, None)


def _matches(pattern: str, name: str) -> bool:
    return pattern == "**" or _rule(pattern).matches(name)


def _join(holder: str, name: str) -> str:
    return f"{holder}.{name}" if holder else name


__all__ = ["FAMILIES", "Family", "Pair", "Side", "Split", "is_convolution", "is_product", "is_table", "split_of"]
