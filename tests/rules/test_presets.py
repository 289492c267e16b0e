"""Presets, on models of Hugging Face and torch: the layouts, no finding that is an error, and losses of the unsharded model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from tests.oracle import assert_same

transformers = pytest.importorskip("transformers", reason="the models come from transformers")
pytestmark = [
    pytest.mark.multidevice(num=8),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers"),
]


def gpt2() -> nn.Module:
    sizes = dict(n_layer=2, n_embd=16, n_head=4, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(config)


def llama(kv_heads: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=kv_heads, vocab_size=32
    )
    return transformers.LlamaForCausalLM(config)


def vit() -> nn.Module:
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32, image_size=16, patch_size=8)
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 8))


def resnet(kind: str) -> nn.Module:
    return transformers.ResNetForImageClassification(
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type=kind, num_channels=3)
    )


def tokens(model: nn.Module, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def images(model: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(8, 3, 16, 16, generator=generator), "labels": torch.arange(8) % 2}


M = "model"
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any], str, dict[str, Any]]] = {
    "GPT-2": (
        gpt2,
        tokens,
        "megatron",
        {"h.0.attn.c_attn.weight": (None, M), "h.1.mlp.c_proj.weight": (M, None), "wte.weight": (M, None), "h.0.mlp.c_fc.bias": (M,)},
    ),
    "Llama": (
        llama,
        tokens,
        "megatron",
        {"layers.0.self_attn.k_proj.weight": (M, None), "layers.1.mlp.down_proj.weight": (None, M), "embed_tokens.weight": (M, None)},
    ),
    "Llama's own plan": (
        llama,
        tokens,
        "auto",
        {"layers.0.self_attn.k_proj.weight": (M, None), "layers.1.mlp.down_proj.weight": (None, M), "lm_head.weight": (M, None)},
    ),
    "Llama, both": (
        llama,
        tokens,
        "fsdp+megatron",
        {"layers.0.self_attn.k_proj.weight": (M, "data"), "layers.1.mlp.down_proj.weight": ("data", M), "model.norm.weight": ("data",)},
    ),
    "ViT": (
        vit,
        images,
        "megatron",
        {"attention.q_proj.weight": (M, None), "attention.o_proj.weight": (None, M), "mlp.fc2.weight": (None, M), "mlp.fc1.bias": (M,)},
    ),
    "ViT, FSDP": (vit, images, "fsdp", {"attention.q_proj.weight": ("data", None), "mlp.fc2.weight": (None, "data")}),
    "ResNet, bottleneck": (
        lambda: resnet("bottleneck"),
        images,
        "megatron",
        {"layer.1.convolution.weight": (M, None, None, None), "layer.2.convolution.weight": (None, M, None, None)},
    ),
    "ResNet, basic": (
        lambda: resnet("basic"),
        images,
        "megatron",
        {"layer.0.convolution.weight": (M, None, None, None), "layer.1.convolution.weight": (None, M, None, None)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_preset_lays_the_model_out_and_changes_no_loss(case: str, mesh_4x2: mesh.Mesh) -> None:
    make, inputs, rules, expected = CASES[case]
    torch.manual_seed(0)
    host = make()
    torch.manual_seed(0)
    device = make().to("jax")
    report = spmd.shard_module(device, mesh_4x2, rules)
    assert not report.errors
    for tail, spec in expected.items():
        found = [tuple(p.sharding.partition_spec) for p in report if p.name.endswith(tail)]
        assert found and set(found) == {spec}, tail
    on_host = inputs(host)
    on_device = {name: t.to("jax") for name, t in on_host.items()}
    for tensor in on_device.values():
        spmd.mark_sharding(tensor, mesh_4x2, ("data", *(None,) * (tensor.dim() - 1)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (host, device)]

    def train(model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    step = spmd.compile(lambda batch: train(device, optimizers[1], batch))
    for _ in range(2):
        assert_same(step(on_device).detach(), train(host, optimizers[0], on_host).detach(), (1e-4, 1e-5))


def test_torchs_own_encoder_is_known(mesh_4x2: mesh.Mesh) -> None:
    torch.manual_seed(0)
    host = encoder().eval()
    torch.manual_seed(0)
    device = encoder().eval().to("jax")
    report = spmd.shard_module(device, mesh_4x2, "megatron")
    assert tuple(report["0.layers.1.self_attn.in_proj_weight"].sharding.partition_spec) == (M, None)
    assert tuple(report["0.layers.0.linear2.weight"].sharding.partition_spec) == (None, M)
    x = torch.randn(4, 8, 16)
    with torch.no_grad():
        assert_same(device(x.to("jax")), host(x))


def test_too_few_key_value_heads_for_the_axis_is_an_error() -> None:
    grid = mesh.Mesh(range(8), (2, 4), ("data", "model"))
    with pytest.raises(mesh.RulesError, match=r"k_proj.weight': dim 0 holds 2 heads of 4, its axes make 4 shards"):
        spmd.shard_module(llama().to("jax"), grid, "megatron")
    assert not spmd.shard_module(llama(4).to("jax"), grid, "megatron").errors


def test_the_packed_projection_of_gpt2_is_noted_once(mesh_4x2: mesh.Mesh) -> None:
    findings = spmd.shard_module(gpt2().to("jax"), mesh_4x2, "megatron").findings
    assert [(f.kind, f.is_error) for f in findings] == [("packed", False)]
