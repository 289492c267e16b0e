"""The table for benchmarks/models.py: Hugging Face architectures, each with a tiny configuration and typical inputs.

A row names the model's class, which determines the class of its configuration. Sizes that a family of models shares are defined above the
rows. The inputs include labels if the model computes its own loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

Inputs = dict[str, Any]
VOCABULARY = 97
BATCH, LENGTH = 2, 12


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: its common name.
        kind: decoder, encoder, encoder-decoder, vision, audio, mixture of experts, state space, multimodal, time series.
        model: name of the class in transformers, or of the model in timm.
        sizes: keyword arguments of its configuration; a nested dict is a nested configuration.
        inputs: creates the keyword arguments of a call on the CPU, identical every time.
        then: creates the inputs of a second call, which also gets the cache of the first; None if the model returns no cache.
        samples: whether it draws random numbers in training that no rate turns off. Its training step is then compared in eval mode.
        remark: the reason for a known failure, in terms of the model.
        config: name of the configuration's class if it differs from the one that the model's class names.
        library: its package, `transformers` or `timm`.
    """

    name: str
    kind: str
    model: str
    sizes: dict[str, Any]
    inputs: Callable[[], Inputs]
    then: Callable[[], Inputs] | None = None
    samples: bool = False
    remark: str = ""
    config: str = ""
    library: str = "transformers"


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(length: int = LENGTH, vocabulary: int = VOCABULARY, seed: int = 1) -> torch.Tensor:
    """Random tokens, int64[BATCH, length], without the special tokens below 4."""
    return torch.randint(4, vocabulary, (BATCH, length), generator=seeded(seed))


def padding(length: int = LENGTH, missing: int = 3) -> torch.Tensor:
    """An attention mask whose second sequence is shorter."""
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[1, length - missing :] = 0
    return mask


def normal(*shape: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(shape, generator=seeded(seed))


def text() -> Inputs:
    """A padded batch for a language model, with labels that ignore the padding."""
    tokens, mask = ids(), padding()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def unpadded() -> Inputs:
    return {"input_ids": ids(), "labels": ids()}


def next_token() -> Inputs:
    """One more token after an unpadded batch."""
    return {"input_ids": ids(1, seed=5)}


def sentence() -> Inputs:
    """A padded batch with a class for each sequence."""
    return {"input_ids": ids(), "attention_mask": padding(), "labels": torch.tensor([1, 0])}


def translation() -> Inputs:
    return {"input_ids": ids(), "attention_mask": padding(), "labels": ids(7, seed=3)}


def image(size: int = 32, channels: int = 3) -> Callable[[], Inputs]:
    """Images with classes."""
    return lambda: {"pixel_values": normal(BATCH, channels, size, size), "labels": torch.tensor([1, 0])}


def pixels(size: int = 32) -> Callable[[], Inputs]:
    """Images without classes."""
    return lambda: {"pixel_values": normal(BATCH, 3, size, size)}


def video() -> Callable[[], Inputs]:
    """Videos of four frames with classes."""
    return lambda: {"pixel_values": normal(BATCH, 4, 3, 32, 32), "labels": torch.tensor([1, 0])}


def speech(samples: int = 800) -> Callable[[], Inputs]:
    """Audio with transcriptions."""
    return lambda: {"input_values": 0.3 * normal(BATCH, samples), "labels": ids(4, 30)}


def sound(samples: int = 800) -> Callable[[], Inputs]:
    """Audio with classes."""
    return lambda: {"input_values": 0.3 * normal(BATCH, samples), "labels": torch.tensor([1, 0])}


def scene(size: int = 32) -> Callable[[], Inputs]:
    """Texts and images, for contrastive models."""
    return lambda: {"input_ids": ids(8), "attention_mask": padding(8), "pixel_values": normal(BATCH, 3, size, size), "return_loss": True}


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {**SPECIAL, "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
HIDDEN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT = {**SPECIAL, **HIDDEN, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
BART = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK = {
    **LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
VIT = {**HIDDEN, "image_size": 32, "patch_size": 8}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4}
WAV2VEC2 = {
    **HIDDEN,
    "vocab_size": 32,
    "conv_dim": [16, 16],
    "conv_stride": [5, 4],
    "conv_kernel": [10, 4],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "classifier_proj_size": 16,
}
CLIP_TEXT = {**BERT, "projection_dim": 16}
CLIP = {"text_config": CLIP_TEXT, "vision_config": {**VIT, "projection_dim": 16}, "projection_dim": 16}


def decoder(name: str, model: str, sizes: dict[str, Any], kind: str = "decoder", **more: Any) -> Architecture:
    """A row for a language model: a padded batch with labels, then one more token with the cache of an unpadded batch."""
    return Architecture(name, kind, model, sizes, text, then=next_token, **more)


def encoder(name: str, model: str, sizes: dict[str, Any], inputs: Callable[[], Inputs] = text, **more: Any) -> Architecture:
    return Architecture(name, "encoder", model, sizes, inputs, **more)


def seq2seq(name: str, model: str, sizes: dict[str, Any], inputs: Callable[[], Inputs] = translation, **more: Any) -> Architecture:
    return Architecture(name, "encoder-decoder", model, sizes, inputs, **more)


def vision(name: str, model: str, sizes: dict[str, Any], inputs: Callable[[], Inputs] | None = None, **more: Any) -> Architecture:
    return Architecture(name, "vision", model, sizes, inputs or image(), **more)


def audio(name: str, model: str, sizes: dict[str, Any], inputs: Callable[[], Inputs] | None = None, **more: Any) -> Architecture:
    return Architecture(name, "audio", model, sizes, inputs or speech(), **more)


DECODERS = (
    decoder("GPT-2", "GPT2LMHeadModel", GPT2),
    Architecture("GPT (2018)", "decoder", "OpenAIGPTLMHeadModel", GPT2, text),
    decoder("GPT-J", "GPTJForCausalLM", {**GPT2, "rotary_dim": 4}),
    decoder(
        "GPT-Neo",
        "GPTNeoForCausalLM",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    decoder("GPT-NeoX", "GPTNeoXForCausalLM", BERT),
    decoder("GPT-BigCode", "GPTBigCodeForCausalLM", GPT2),
    decoder("CodeGen", "CodeGenForCausalLM", {**GPT2, "rotary_dim": 4}),
    decoder("CTRL", "CTRLLMHeadModel", {**GPT2, "dff": 48}),
    decoder("OPT", "OPTForCausalLM", {**BERT, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    decoder("BLOOM", "BloomForCausalLM", {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    decoder("MPT", "MptForCausalLM", {**SPECIAL, "vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    decoder("Falcon", "FalconForCausalLM", BERT),
    decoder("BioGPT", "BioGptForCausalLM", BERT),
    decoder(
        "XGLM",
        "XGLMForCausalLM",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 2,
            "attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    decoder("LLaMA", "LlamaForCausalLM", LLAMA),
    decoder("Mistral", "MistralForCausalLM", {**LLAMA, "sliding_window": 8}),
    decoder("Ministral", "MinistralForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 8}),
    decoder("Qwen2", "Qwen2ForCausalLM", LLAMA),
    decoder("Qwen3", "Qwen3ForCausalLM", {**LLAMA, "head_dim": 8}),
    decoder("Gemma", "GemmaForCausalLM", {**LLAMA, "head_dim": 8}),
    decoder("Gemma 2", "Gemma2ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 8}),
    decoder("Gemma 3", "Gemma3ForCausalLM", {**LLAMA, "head_dim": 8, "sliding_window": 8}),
    decoder("Phi", "PhiForCausalLM", LLAMA),
    decoder("Phi-3", "Phi3ForCausalLM", LLAMA),
    decoder("StableLM", "StableLmForCausalLM", LLAMA),
    decoder("StarCoder2", "Starcoder2ForCausalLM", LLAMA),
    decoder("OLMo", "OlmoForCausalLM", LLAMA),
    decoder("OLMo 2", "Olmo2ForCausalLM", LLAMA),
    decoder("OLMo 3", "Olmo3ForCausalLM", LLAMA),
    decoder("Cohere", "CohereForCausalLM", LLAMA),
    decoder("Granite", "GraniteForCausalLM", LLAMA),
    decoder("GLM-4", "Glm4ForCausalLM", {**LLAMA, "head_dim": 8}),
    decoder("Persimmon", "PersimmonForCausalLM", LLAMA),
    decoder("Nemotron", "NemotronForCausalLM", LLAMA),
    decoder("SmolLM3", "SmolLM3ForCausalLM", LLAMA),
    decoder("Helium", "HeliumForCausalLM", {**LLAMA, "head_dim": 8}),
    decoder("EXAONE 4", "Exaone4ForCausalLM", LLAMA),
)
MIXTURES = (
    *(
        decoder(name, model, sizes, "mixture of experts")
        for name, model, sizes in (
            ("Mixtral", "MixtralForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
            ("Qwen2-MoE", "Qwen2MoeForCausalLM", {**LLAMA, **EXPERTS, "shared_expert_intermediate_size": 16}),
            ("Qwen3-MoE", "Qwen3MoeForCausalLM", {**LLAMA, **EXPERTS, "head_dim": 8}),
            ("OLMoE", "OlmoeForCausalLM", {**LLAMA, **EXPERTS}),
            ("Granite-MoE", "GraniteMoeForCausalLM", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
            (
                "DeepSeek-V3",
                "DeepseekV3ForCausalLM",
                {**DEEPSEEK, "n_group": 2, "topk_group": 1},
            ),
            (
                "DeepSeek-V2",
                "DeepseekV2ForCausalLM",
                {**DEEPSEEK, "topk_method": "greedy"},
            ),
            (
                "GPT-OSS",
                "GptOssForCausalLM",
                {
                    **LLAMA,
                    "head_dim": 8,
                    "num_local_experts": 4,
                    "num_experts_per_tok": 2,
                    "sliding_window": 8,
                    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
                },
            ),
        )
    ),
    decoder(
        "PhiMoE",
        "PhimoeForCausalLM",
        {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
        "mixture of experts",
        samples=True,  # draws the expert and the weight of its gradient
    ),
    Architecture(
        "Switch Transformer",
        "mixture of experts",
        "SwitchTransformersForConditionalGeneration",
        {
            **T5,
            "num_experts": 4,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "router_jitter_noise": 0.0,
        },
        translation,
    ),
)
STATE_SPACES = tuple(
    Architecture(name, "state space", model, sizes, text, None if name == "RecurrentGemma" else next_token)
    for name, model, sizes in (
        ("Mamba", "MambaForCausalLM", {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}),
        (
            "Mamba 2",
            "Mamba2ForCausalLM",
            {
                **SPECIAL,
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "state_size": 8,
                "num_hidden_layers": 2,
                "head_dim": 16,
                "num_heads": 4,
                "n_groups": 2,
                "chunk_size": 8,
            },
        ),
        (
            "Falcon-Mamba",
            "FalconMambaForCausalLM",
            {
                **SPECIAL,
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "state_size": 8,
                "num_hidden_layers": 2,
            },
        ),
        (
            "RecurrentGemma",
            "RecurrentGemmaForCausalLM",
            {
                **LLAMA,
                "num_hidden_layers": 3,
                "head_dim": 8,
                "lru_width": 32,
                "attention_window_size": 8,
                "block_types": ["recurrent", "recurrent", "attention"],
            },
        ),
        (
            "Bamba",
            "BambaForCausalLM",
            {
                **LLAMA,
                "mamba_n_heads": 4,
                "mamba_d_head": 16,
                "mamba_d_state": 8,
                "mamba_n_groups": 1,
                "mamba_chunk_size": 8,
                "attn_layer_indices": [1],
            },
        ),
        (
            "Jamba",
            "JambaForCausalLM",
            {
                **LLAMA,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "mamba_d_state": 8,
                "mamba_dt_rank": 4,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "use_mamba_kernels": False,
            },
        ),
        ("RWKV", "RwkvForCausalLM", {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}),
    )
)
ENCODERS = (
    encoder("BERT", "BertForMaskedLM", BERT),
    encoder("RoBERTa", "RobertaForMaskedLM", BERT),
    encoder("XLM-RoBERTa", "XLMRobertaForSequenceClassification", BERT, sentence),
    encoder("CamemBERT", "CamembertForTokenClassification", BERT, lambda: {**text(), "labels": ids() % 2}),
    encoder("DistilBERT", "DistilBertForMaskedLM", {**BERT, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    encoder("ALBERT", "AlbertForMaskedLM", {**BERT, "embedding_size": 16}),
    encoder("ELECTRA", "ElectraForMaskedLM", {**BERT, "embedding_size": 16}),
    encoder("DeBERTa", "DebertaForMaskedLM", {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    encoder("DeBERTa-v2", "DebertaV2ForMaskedLM", {**BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    encoder("MPNet", "MPNetForMaskedLM", BERT),
    encoder("ModernBERT", "ModernBertForMaskedLM", {**BERT, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}),
    encoder("ConvBERT", "ConvBertForMaskedLM", {**BERT, "embedding_size": 32}),
    encoder("SqueezeBERT", "SqueezeBertForMaskedLM", {**BERT, "embedding_size": 32}),
    encoder(
        "MobileBERT",
        "MobileBertForMaskedLM",
        {
            **BERT,
            "embedding_size": 16,
            "intra_bottleneck_size": 32,
            "num_feedforward_networks": 2,
        },
    ),
    encoder("Nystromformer", "NystromformerForMaskedLM", {**BERT, "num_landmarks": 4, "segment_means_seq_len": 12}, unpadded),
    encoder("FNet", "FNetForMaskedLM", BERT, unpadded),
    encoder("RoFormer", "RoFormerForMaskedLM", {**BERT, "embedding_size": 32}),
    encoder("RemBERT", "RemBertForMaskedLM", {**BERT, "input_embedding_size": 16, "output_embedding_size": 16}),
    encoder("Megatron-BERT", "MegatronBertForMaskedLM", BERT),
    encoder("ERNIE", "ErnieForMaskedLM", BERT),
    encoder("ESM", "EsmForMaskedLM", {**BERT, "mask_token_id": 3, "position_embedding_type": "rotary"}),
    encoder("XLNet", "XLNetLMHeadModel", {**SPECIAL, "vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    encoder(
        "Funnel",
        "FunnelForMaskedLM",
        {
            "vocab_size": VOCABULARY,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
            "num_decoder_layers": 1,
        },
    ),
    encoder("Longformer", "LongformerForMaskedLM", {**BERT, "attention_window": 4}),
    encoder("BigBird", "BigBirdForMaskedLM", {**BERT, "attention_type": "original_full"}),
    encoder("CANINE", "CanineForSequenceClassification", {**BERT, "num_hash_buckets": 16, "local_transformer_stride": 4}, sentence),
    encoder("LayoutLM", "LayoutLMForMaskedLM", BERT, lambda: {**text(), "bbox": (torch.arange(48) % 50).view(1, 12, 4).expand(2, 12, 4)}),
    encoder("I-BERT", "IBertForMaskedLM", BERT),
)
ENCODER_DECODERS = (
    seq2seq("T5", "T5ForConditionalGeneration", T5),
    seq2seq("mT5", "MT5ForConditionalGeneration", T5),
    seq2seq("UMT5", "UMT5ForConditionalGeneration", T5),
    seq2seq("LongT5", "LongT5ForConditionalGeneration", {**T5, "local_radius": 4}),
    seq2seq("BART", "BartForConditionalGeneration", BART),
    seq2seq("mBART", "MBartForConditionalGeneration", BART),
    seq2seq("PLBart", "PLBartForConditionalGeneration", BART),
    seq2seq("Pegasus", "PegasusForConditionalGeneration", BART),
    seq2seq("Marian", "MarianMTModel", BART),
    seq2seq("Blenderbot", "BlenderbotForConditionalGeneration", BART),
    seq2seq("M2M-100", "M2M100ForConditionalGeneration", BART),
    seq2seq(
        "LED",
        "LEDForConditionalGeneration",
        {
            **BART,
            "attention_window": 4,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
        },
    ),
    seq2seq(
        "ProphetNet",
        "ProphetNetForConditionalGeneration",
        {
            **SPECIAL,
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "max_position_embeddings": 64,
            "decoder_start_token_id": 2,
        },
    ),
)
VISION = (
    vision("ViT", "ViTForImageClassification", VIT),
    vision("DeiT", "DeiTForImageClassification", VIT),
    vision("BEiT", "BeitForImageClassification", VIT),
    vision("DINOv2", "Dinov2ForImageClassification", VIT),
    vision(
        "Swin",
        "SwinForImageClassification",
        SWIN,
    ),
    vision(
        "Swin v2",
        "Swinv2ForImageClassification",
        SWIN,
    ),
    vision("ConvNeXt", "ConvNextForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    vision("ConvNeXt V2", "ConvNextV2ForImageClassification", {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    vision("ResNet", "ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]}),
    vision(
        "RegNet",
        "RegNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "groups_width": 8,
        },
    ),
    vision("MobileNetV1", "MobileNetV1ForImageClassification", {"depth_multiplier": 0.25, "image_size": 96}, image(96)),
    vision("MobileNetV2", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.35, "image_size": 96}, image(96)),
    vision(
        "MobileViT",
        "MobileViTForImageClassification",
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "num_attention_heads": 2,
        },
        image(64),
    ),
    vision(
        "SegFormer",
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
            "decoder_hidden_size": 16,
            "num_labels": 3,
        },
        lambda: {"pixel_values": normal(BATCH, 3, 32, 32), "labels": torch.arange(2 * 32 * 32).view(2, 32, 32) % 3},
    ),
    vision(
        "PVT",
        "PvtForImageClassification",
        {
            "image_size": 32,
            "hidden_sizes": [8, 16, 16, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 2, 4],
        },
    ),
    vision("PoolFormer", "PoolFormerForImageClassification", {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1]}),
    vision(
        "EfficientNet",
        "EfficientNetForImageClassification",
        {
            "image_size": 32,
            "width_coefficient": 0.25,
            "depth_coefficient": 0.25,
            "hidden_dim": 320,
        },
    ),
    vision(
        "BiT",
        "BitForImageClassification",
        {
            "embedding_size": 16,
            "hidden_sizes": [16, 32],
            "depths": [1, 1],
            "num_groups": 4,
        },
    ),
    vision(
        "LeViT",
        "LevitForImageClassificationWithTeacher",
        {
            "image_size": 128,
            "hidden_sizes": [16, 24, 32],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "down_ops": [["Subsample", 8, 2, 2, 2, 2], ["Subsample", 8, 2, 2, 2, 2]],
        },
        pixels(128),
    ),
    vision("CvT", "CvtForImageClassification", {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, image(96)),
    vision("FocalNet", "FocalNetForImageClassification", {"image_size": 32, "embed_dim": 16, "depths": [1, 1, 1, 1]}),
    vision(
        "DPT",
        "DPTForDepthEstimation",
        {
            **VIT,
            "backbone_out_indices": [0, 1, 2, 3],
            "neck_hidden_sizes": [8, 8, 16, 16],
            "fusion_hidden_size": 16,
            "num_hidden_layers": 4,
        },
        pixels(),
    ),
    vision("YOLOS", "YolosForObjectDetection", {**VIT, "image_size": [32, 32], "num_detection_tokens": 4}, pixels()),
    vision(
        "VideoMAE",
        "VideoMAEForVideoClassification",
        {**VIT, "num_frames": 4},
        video(),
    ),
    vision(
        "TimeSformer",
        "TimesformerForVideoClassification",
        {**VIT, "num_frames": 4},
        video(),
    ),
    vision(
        "ViT-MAE",
        "ViTMAEForPreTraining",
        {
            **VIT,
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 48,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
        },
        lambda: {**pixels()(), "noise": torch.rand(BATCH, 16, generator=seeded())},
    ),
)
AUDIO = (
    audio("Wav2Vec2", "Wav2Vec2ForSequenceClassification", WAV2VEC2, sound()),
    audio("Wav2Vec2 (CTC)", "Wav2Vec2ForCTC", WAV2VEC2),
    audio("HuBERT", "HubertForSequenceClassification", WAV2VEC2, sound()),
    audio("WavLM", "WavLMForSequenceClassification", {**WAV2VEC2, "num_buckets": 16, "max_bucket_distance": 32}, sound()),
    audio("UniSpeech", "UniSpeechForSequenceClassification", WAV2VEC2, sound()),
    audio("SEW", "SEWForSequenceClassification", {**WAV2VEC2, "squeeze_factor": 2}, sound()),
    audio(
        "data2vec audio",
        "Data2VecAudioForSequenceClassification",
        {
            **WAV2VEC2,
            "conv_pos_kernel_size": 5,
            "num_conv_pos_embeddings": 2,
        },
        sound(),
    ),
    audio(
        "Whisper",
        "WhisperForConditionalGeneration",
        {
            **BART,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 32,
        },
        lambda: {"input_features": normal(BATCH, 8, 32), "labels": ids(6)},
    ),
    audio(
        "Speech2Text",
        "Speech2TextForConditionalGeneration",
        {
            **BART,
            "input_feat_per_channel": 8,
            "max_source_positions": 64,
            "max_target_positions": 32,
            "conv_channels": 16,
        },
        lambda: {"input_features": normal(BATCH, 32, 8), "labels": ids(6)},
    ),
    audio(
        "AST",
        "ASTForAudioClassification",
        {
            **HIDDEN,
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 24,
            "num_mel_bins": 16,
        },
        lambda: {"input_values": normal(BATCH, 24, 16), "labels": torch.tensor([1, 0])},
    ),
    audio(
        "EnCodec",
        "EncodecModel",
        {
            "num_filters": 4,
            "hidden_size": 16,
            "upsampling_ratios": [4, 2],
            "codebook_size": 16,
            "codebook_dim": 16,
            "num_lstm_layers": 1,
            "target_bandwidths": [24.0],
        },
        lambda: {"input_values": normal(BATCH, 1, 64)},
    ),
)
OTHERS = (
    Architecture("CLIP", "multimodal", "CLIPModel", CLIP, scene()),
    Architecture("SigLIP", "multimodal", "SiglipModel", {"text_config": BERT, "vision_config": VIT}, scene()),
    Architecture("BLIP", "multimodal", "BlipModel", {**CLIP, "image_text_hidden_size": 16}, scene()),
    Architecture(
        "ViLT",
        "multimodal",
        "ViltForQuestionAnswering",
        {**BERT, **VIT, "num_labels": 3, "max_image_length": 16},
        lambda: {
            "input_ids": ids(8),
            "attention_mask": padding(8),
            "pixel_values": normal(BATCH, 3, 32, 32),
            "labels": torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]),
        },
    ),
    Architecture(
        "LLaVA",
        "multimodal",
        "LlavaForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "llama"},
            "vision_config": {**VIT, "model_type": "clip_vision_model", "projection_dim": 16},
            "image_token_index": 96,
            "vision_feature_layer": -1,
        },
        lambda: {
            "input_ids": torch.cat([torch.full((BATCH, 16), 96), ids(6, 90)], 1),
            "pixel_values": normal(BATCH, 3, 32, 32),
            "labels": torch.cat([torch.full((BATCH, 16), -100), ids(6, 90)], 1),
        },
    ),
    Architecture(
        "Decision Transformer",
        "time series",
        "DecisionTransformerModel",
        {
            **GPT2,
            "state_dim": 5,
            "act_dim": 3,
            "hidden_size": 32,
            "max_ep_len": 32,
        },
        lambda: {
            "states": normal(BATCH, 6, 5),
            "actions": normal(BATCH, 6, 3),
            "rewards": normal(BATCH, 6, 1),
            "returns_to_go": normal(BATCH, 6, 1),
            "timesteps": torch.arange(6).expand(BATCH, 6),
            "attention_mask": torch.ones(BATCH, 6),
        },
    ),
    Architecture(
        "PatchTST",
        "time series",
        "PatchTSTForPrediction",
        {
            "num_input_channels": 2,
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "d_model": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "ffn_dim": 32,
            "prediction_length": 4,
            "loss": "mse",
        },
        lambda: {"past_values": normal(BATCH, 32, 2), "future_values": normal(BATCH, 4, 2, seed=4)},
    ),
    Architecture(
        "PatchTSMixer",
        "time series",
        "PatchTSMixerForPrediction",
        {
            "context_length": 32,
            "patch_length": 8,
            "patch_stride": 8,
            "num_input_channels": 2,
            "d_model": 16,
            "num_layers": 2,
            "prediction_length": 4,
        },
        lambda: {"past_values": normal(BATCH, 32, 2), "future_values": normal(BATCH, 4, 2, seed=4)},
    ),
)
REMARKS = {
    "Switch Transformer": "it loops over the experts that received a token (`nonzero`), also under torch.compile",
    "Nystromformer": "it adds a mask of tokens to scores of landmarks; CPU torch fails in the same way if a mask is given",
    "I-BERT": "training branches on whether its running ranges are still 0, and replaces them otherwise",
    "ViLT": "it draws the patches that it keeps at random on the host",
}
ARCHITECTURES = {
    a.name: replace(a, remark=REMARKS.get(a.name, ""))
    for a in (*DECODERS, *MIXTURES, *STATE_SPACES, *ENCODERS, *ENCODER_DECODERS, *VISION, *AUDIO, *OTHERS)
}
