"""Attention equals torch's on the CPU: masks, causality, grouped queries, and the fused forms of evaluation."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.against_cpu import assert_equal, check, normal, on_jax
from tests.oracle import assert_same

B, H, T, S, D = 2, 4, 5, 7, 8
VISIBLE = torch.ones(T, S, dtype=torch.bool).tril(1)
ONE_ROW_HIDDEN = VISIBLE.clone().index_fill(0, torch.tensor([2]), False)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "boolean": {"attn_mask": VISIBLE},
    "row fully masked": {"attn_mask": ONE_ROW_HIDDEN},
    "row of -inf": {"attn_mask": torch.zeros(T, S).masked_fill(~ONE_ROW_HIDDEN, -math.inf)},
    "float per sample": {"attn_mask": normal(B, 1, T, S, seed=9, grad=False)},
    "boolean per head": {"attn_mask": normal(B, H, T, S, seed=9, grad=False) > 0},
    "scaled": {"scale": 0.3},
}


@pytest.mark.parametrize("kv_heads", [H, 2, 1])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_equals_cpu(mask: str, kv_heads: int) -> None:
    q, k, v = normal(B, H, T, D), normal(B, kv_heads, S, D, seed=1), normal(B, kv_heads, S, D, seed=2)
    check(F.scaled_dot_product_attention, q, k, v, enable_gqa=kv_heads != H, **MASKS[mask])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_attention_keeps_its_dtype(dtype: torch.dtype) -> None:
    check(F.scaled_dot_product_attention, *(normal(T, D, seed=i, dtype=dtype) for i in range(3)))


def test_float_mask_gets_its_gradient() -> None:
    q, k, v = (normal(B, H, T, D, seed=i) for i in range(3))
    check(F.scaled_dot_product_attention, q, k, v, normal(T, T, seed=4))


def test_mask_beside_is_causal_is_refused() -> None:
    q = normal(1, 1, 2, 4).to("jax")
    with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
        F.scaled_dot_product_attention(q, q, q, torch.ones(2, 2, dtype=torch.bool).to("jax"), is_causal=True)


def test_attention_dropout_keeps_the_mean_and_repeats_under_a_seed() -> None:
    q, k, v = (normal(64, 32, D, seed=i, grad=False).to("jax") for i in range(3))
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.3).cpu())
    assert torch.equal(*drawn)
    plain = F.scaled_dot_product_attention(q, k, v).cpu()
    assert not torch.allclose(drawn[0], plain)
    assert (drawn[0] - plain).mean().abs() < 0.02


CAUSAL = torch.ones(T, T, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without weights": {"need_weights": False},
    "weights per head": {"average_attn_weights": False},
    "padding": {"key_padding_mask": PADDING},
    "causal": {"attn_mask": CAUSAL},
    "causal and padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("call", CALLS)
def test_multihead_attention_equals_cpu(call: str, training: bool) -> None:
    torch.manual_seed(0)
    cpu = torch.nn.MultiheadAttention(D, 2, batch_first=True).train(training)
    device = copy.deepcopy(cpu).to("jax")
    x = normal(3, T, D, grad=False)
    with torch.set_grad_enabled(training):  # without gradients, evaluation takes the fused op
        expected = cpu(x, x, x, **CALLS[call])
        x_jax = x.to("jax")
        assert_equal(device(x_jax, x_jax, x_jax, **on_jax(CALLS[call])), expected)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")  # torch's own remark on norm_first
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")  # the CPU's fast path makes one
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("call", [{}, {"src_key_padding_mask": PADDING}, {"mask": CAUSAL}], ids=["plain", "padding", "causal"])
def test_transformer_encoder_equals_cpu(call: dict[str, Any], norm_first: bool, training: bool) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(D, 2, 16, 0.0, activation="gelu", batch_first=True, norm_first=norm_first)
    cpu = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(training)
    device = copy.deepcopy(cpu).to("jax")
    x = normal(3, T, D, grad=False)
    with torch.set_grad_enabled(training):
        expected, actual = cpu(x, **call), device(x.to("jax"), **on_jax(call))
    visible = ~PADDING if "src_key_padding_mask" in call else torch.ones(3, T, dtype=torch.bool)
    assert_same(actual.cpu()[visible], expected[visible])
