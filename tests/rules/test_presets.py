"""Presets, on models of Hugging Face and torch: the layouts, no finding that is an error, and losses of the unsharded model."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from benchmarks import presets
from benchmarks.preset_models import SAMPLES
from tests.later import transformers
from tests.oracle import assert_same

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models come from transformers"),
    pytest.mark.multidevice(num=8),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers", "ignore:.*:FutureWarning:transformers", "ignore:.*:UserWarning:peft"),
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
    with pytest.raises(mesh.RulesError, match=r"k_proj.weight': dim 0 has 2 heads of 4, split into 4 shards"):
        spmd.shard_module(llama().to("jax"), grid, "megatron")
    assert not spmd.shard_module(llama(4).to("jax"), grid, "megatron").errors


def test_the_packed_projection_of_gpt2_is_noted_once(mesh_4x2: mesh.Mesh) -> None:
    findings = spmd.shard_module(gpt2().to("jax"), mesh_4x2, "megatron").findings
    assert [(f.kind, f.is_error) for f in findings] == [("packed", False)]


SMALL = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=32)
ENDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
PARTS = dict(
    encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32, encoder_attention_heads=4, decoder_attention_heads=4
)
FAMILY_MEMBERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Phi", "Mixtral", "StableLm", "Starcoder2", "Olmo2"), SMALL),
    "Qwen2Moe": {**SMALL, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "GptOss": {**SMALL, "num_local_experts": 4},
    "GPTNeoX": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
    "GPTJ": dict(n_embd=16, n_layer=2, n_head=4, vocab_size=32, rotary_dim=4),
    "GPT2": dict(n_embd=16, n_layer=2, n_head=4, vocab_size=32),
    "Bloom": dict(hidden_size=16, n_layer=2, n_head=4, vocab_size=32),
    "OPT": dict(hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=32, word_embed_proj_dim=16),
    "Bert": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
    "Roberta": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
    "DistilBert": dict(dim=16, hidden_dim=32, n_layers=2, n_heads=4, vocab_size=32),
    "Albert": {**{k: v for k, v in SMALL.items() if k != "num_key_value_heads"}, "embedding_size": 8},
    "ModernBert": {**SMALL, **ENDS, "cls_token_id": 1, "sep_token_id": 2},
    "T5": dict(d_model=16, d_ff=32, num_layers=2, num_heads=4, d_kv=4, vocab_size=32, feed_forward_proj="gated-gelu"),
    "Bart": dict(d_model=16, vocab_size=32, decoder_start_token_id=2, **PARTS, **ENDS),
    "Whisper": dict(d_model=16, vocab_size=32, decoder_start_token_id=2, **PARTS, **ENDS),
    "Dinov2": dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=8),
    "Wav2Vec2": {**SMALL, "num_conv_pos_embedding_groups": 4},
}
ROUTERS = {"gate", "router", "shared_expert_gate"}  # an output for each expert, or one


@pytest.mark.parametrize("name", FAMILY_MEMBERS)
def test_a_family_is_known_down_to_its_last_linear(name: str) -> None:
    kinds = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification", "ForCTC")
    make = next(cls for kind in kinds if (cls := getattr(transformers, name + kind, None)) is not None)
    with torch.device("meta"):
        model = make(getattr(transformers, f"{name}Config")(**FAMILY_MEMBERS[name]))
    grid = mesh.Mesh(range(8), (4, 2), ("data", "model"))
    spmd.shard_module(model, grid, "megatron")
    whole: set[str] = set()
    for block in (m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(c) for c in m}) == 1):
        for path, module in block.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2 and not isinstance(module, nn.Embedding):
                is_split = any(entry is not None for entry in getattr(weight, "partition_spec", ()))
                whole.update({path.rpartition(".")[2]} if not is_split else ())
    assert whole <= ROUTERS


def test_a_transposed_weight_is_told_by_its_modules_type(mesh_4x2: mesh.Mesh) -> None:
    of_torch = spmd.shard_module(SAMPLES["nanoGPT"].make().to("jax"), mesh_4x2, "megatron")
    of_hugging_face = spmd.shard_module(gpt2().to("jax"), mesh_4x2, "megatron")
    found = [
        r[f"transformer.h.0.{n}.weight"].sharding.partition_spec
        for r in (of_torch, of_hugging_face)
        for n in ("attn.c_attn", "attn.c_proj")
    ]
    assert list(map(tuple, found)) == [(M, None), (None, M), (None, M), (M, None)]


@pytest.mark.parametrize("third", [False, True])
def test_the_stem_of_torchvisions_resnet_is_no_half(third: bool, mesh_4x2: mesh.Mesh) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
            self.conv2, self.bn2 = nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
            if third:
                self.conv3, self.bn3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)

    model = nn.ModuleDict(dict(conv1=nn.Conv2d(3, 8, 7), layer1=nn.Sequential(Block(), Block()), fc=nn.Linear(8, 16))).to("jax")
    report = spmd.shard_module(model, mesh_4x2, "megatron")
    first, last = ("conv2", "conv3") if third else ("conv1", "conv2")
    specs = {p.name: tuple(p.sharding.partition_spec) for p in report}
    assert specs["conv1.weight"] == (None,) * 4 and specs["fc.weight"] == (M, None)
    assert specs[f"layer1.1.{first}.weight"] == (M, None, None, None) and specs[f"layer1.1.{last}.weight"] == (None, M, None, None)


def test_half_a_pair_is_refused(mesh_4x2: mesh.Mesh) -> None:
    model = SAMPLES["nanoGPT"].make()
    for block in model.get_submodule("transformer.h").children():
        mlp: Any = block.mlp
        mlp.out = mlp.c_proj
        del mlp.c_proj
    with pytest.raises(mesh.RulesError, match=r"'transformer.h.0.mlp.c_fc' would be split by outputs, but no sibling 'c_proj'"):
        spmd.shard_module(model.to("jax"), mesh_4x2, "megatron")


@pytest.mark.parametrize(("name", "form"), [("nanoGPT", "megatron"), ("Llama", "fsdp+megatron"), ("GPT-2", "lora")])
def test_a_preset_moves_what_rules_by_hand_move(name: str, form: str) -> None:
    if form == "lora":
        pytest.importorskip("peft", reason="the adapters come from peft")
    hand, ours = (presets.collectives(SAMPLES[name], form, is_preset) for is_preset in (False, True))
    assert ours == hand


def test_adapters_lie_as_the_linear_that_they_adapt(mesh_4x2: mesh.Mesh) -> None:
    pytest.importorskip("peft", reason="the adapters come from peft")
    report = spmd.shard_module(presets.made(SAMPLES["Llama"], "lora"), mesh_4x2, "fsdp+megatron")
    specs = {p.name.partition("layers.0.self_attn.")[2]: tuple(p.sharding.partition_spec) for p in report}
    expected = {
        "q_proj.lora_A": (None, "data"),
        "q_proj.lora_B": (M, "data"),
        "o_proj.lora_A": ("data", M),
        "o_proj.lora_B": ("data", None),
    }
    assert {name: specs[f"{name}.default.weight"] for name in expected} == expected


def test_a_model_is_laid_out_anew_by_a_second_call(mesh_4x2: mesh.Mesh) -> None:
    model = llama().to("jax")
    counts: list[tuple[int, int]] = []
    for rules in ("fsdp+megatron", "fsdp", "fsdp"):
        spmd.shard_module(model, mesh_4x2, rules)
        counts.append((sum(len(m._forward_pre_hooks) for m in model.modules()), sum(len(m._forward_hooks) for m in model.modules())))
    assert counts == [(3, 6)] * 3  # two blocks and the model are units; blocks and the table of tokens lay out what they return
    assert model.get_parameter("model.layers.0.mlp.up_proj.weight").partition_spec == ("data", None)  # pyright: ignore[reportAttributeAccessIssue]


def test_units_by_hand_are_not_made_anew(mesh_4x2: mesh.Mesh) -> None:
    model = llama().to("jax")
    spmd.fully_shard(model, mesh_4x2)
    with pytest.raises(spmd.SpmdError, match="is already a unit of fully_shard"):
        spmd.shard_module(model, mesh_4x2, "fsdp")


def test_activations_are_split_over_the_batch(mesh_4x2: mesh.Mesh) -> None:
    model = llama().to("jax")
    spmd.shard_module(model, mesh_4x2, "fsdp+megatron")
    found: list[Any] = []
    model.get_submodule("model.layers.0").register_forward_hook(lambda module, args, out: found.append(out.partition_spec))
    model(torch.zeros(8, 8, dtype=torch.int64, device="jax"))
    assert list(map(tuple, found)) == [("data", None, None)]
