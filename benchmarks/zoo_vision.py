"""Third part of the table for benchmarks/models.py: vision-language models and detectors.

These models read values of their inputs: the grids of image patches, and the positions of images in the text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.zoo import BATCH, BERT, LLAMA, VIT, Architecture, Inputs, ids, normal, seeded

IMAGE, PADDING, START, END, VIDEO = 96, 0, 91, 92, 94  # tokens
TEXT = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_TEXT = {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
QWEN_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
QWEN = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BACKBONE = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 16, 24, 32],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
PYRAMID = {**BACKBONE, "out_features": ["stage2", "stage3", "stage4"]}
DETR = {
    "use_timm_backbone": False,
    "backbone": None,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_queries": 6,
    "num_labels": 4,
}


def captioned(num_tokens: int, *shape: int, **others: Any) -> Callable[[], Inputs]:
    """`num_tokens` image tokens before a text, and images [batch, *shape]."""

    def inputs() -> Inputs:
        words, images = ids(6, 90), torch.full((BATCH, num_tokens), IMAGE)
        labels = torch.cat([torch.full_like(images, -100), words], 1)
        return {"input_ids": torch.cat([images, words], 1), "pixel_values": normal(BATCH, *shape), "labels": labels, **others}

    return inputs


def of_grids(*grids: tuple[int, int, int]) -> Inputs:
    """One text with an image for each grid (frames, rows, columns of patches), padded to one length as by Qwen2-VL's processor."""
    sizes = torch.tensor(grids)
    counts = (sizes.prod(-1) // 4).tolist()
    words = torch.randint(4, 90, (len(grids), 4), generator=seeded(3)).tolist()
    rows = [[*w[:2], START, *[IMAGE] * count, END, *w[2:]] for w, count in zip(words, counts, strict=True)]
    length = max(map(len, rows))
    tokens = torch.tensor([row + [PADDING] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "mm_token_type_ids": (tokens == IMAGE).long(),
        "pixel_values": normal(int(sizes.prod(-1).sum()), 3 * 2 * 4 * 4),
        "image_grid_thw": sizes,
        "labels": tokens.masked_fill(mask == 0, -100),
    }


def patches() -> Inputs:
    """Texts, and two images of different shapes as patches, padded to the same number of patches."""
    shapes = torch.tensor([[4, 4], [3, 4]])
    mask = (torch.arange(16)[None] < shapes.prod(-1, keepdim=True)).long()
    values = normal(BATCH, 16, 48)
    return {"input_ids": ids(8), "pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes, "return_loss": True}


def padded_image(size: int = 32) -> Inputs:
    """Images with a mask, of which the second is narrower."""
    mask = torch.ones(BATCH, size, size, dtype=torch.int64)
    mask[1, :, size * 3 // 4 :] = 0
    return {"pixel_values": normal(BATCH, 3, size, size), "pixel_mask": mask}


def tiles() -> Inputs:
    """One wide image, as an overview and two tiles."""
    tokens = torch.cat([torch.full((1, 52), IMAGE), ids(6, 90)[:1]], 1)
    return {"input_ids": tokens, "pixel_values": normal(1, 3, 3, 32, 32), "image_sizes": torch.tensor([[32, 64]])}


def _row(name: str, model: str, sizes: dict[str, Any], inputs: Callable[[], Inputs], remark: str = "") -> Architecture:
    return Architecture(name, "detection" if "Detection" in model else "multimodal", model, sizes, inputs, remark=remark)


CLIP_TOWER = {**VIT, "model_type": "clip_vision_model", "projection_dim": 16}
_BY_PIXELS = "it skips images whose pixels are all 0; programs are not specialized on the values of floating tensors"
_ROWS = (
    _row(
        "LLaVA-NeXT",
        "LlavaNextForConditionalGeneration",
        {
            "text_config": {**LLAMA, "model_type": "llama"},
            "vision_config": CLIP_TOWER,
            "image_token_index": IMAGE,
            "vision_feature_layer": -1,
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
        },
        tiles,
    ),
    _row(
        "Qwen2-VL",
        "Qwen2VLForConditionalGeneration",
        {"text_config": QWEN_TEXT, "vision_config": {**QWEN_VISION, "embed_dim": 32, "mlp_ratio": 2}, **QWEN},
        lambda: of_grids((1, 4, 4), (1, 4, 8)),
    ),
    _row(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": QWEN_TEXT,
            "vision_config": {
                **QWEN_VISION,
                "out_hidden_size": 32,
                "intermediate_size": 48,
                "window_size": 16,
                "fullatt_block_indexes": [1],
            },
            **QWEN,
        },
        lambda: of_grids((1, 4, 4), (1, 4, 8)),
    ),
    _row(
        "SigLIP 2",
        "Siglip2Model",
        {"text_config": {**BERT, "projection_size": 32}, "vision_config": {**TOWER, "patch_size": 4, "num_patches": 16}},
        patches,
    ),
    _row(
        "PaliGemma",
        "PaliGemmaForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "gemma", "head_dim": 8},
            "vision_config": {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 32},
            "image_token_index": IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
        },
        lambda: (
            captioned(16, 3, 32, 32)()
            | {"attention_mask": torch.ones(BATCH, 22).long(), "token_type_ids": torch.arange(22).gt(17).long().repeat(BATCH, 1)}
        ),
    ),
    _row(
        "Idefics2",
        "Idefics2ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**VIT, "model_type": "idefics2_vision"},
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 2,
                "resampler_head_dim": 8,
                "num_key_value_heads": 1,
            },
            "image_token_id": IMAGE,
        },
        captioned(4, 1, 3, 32, 32, pixel_attention_mask=torch.ones(BATCH, 1, 32, 32, dtype=torch.int64)),
        _BY_PIXELS,
    ),
    _row(
        "Idefics3",
        "Idefics3ForConditionalGeneration",
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**VIT, "model_type": "idefics3_vision"},
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        captioned(4, 1, 3, 32, 32, pixel_attention_mask=torch.ones(BATCH, 1, 32, 32, dtype=torch.int64)),
        _BY_PIXELS,
    ),
    _row(
        "OWL-ViT",
        "OwlViTForObjectDetection",
        {
            "text_config": {
                **TOWER,
                "max_position_embeddings": 16,
                **{k: v for k, v in TEXT.items() if k == "vocab_size" or k.endswith("token_id")},
            },
            "vision_config": {**TOWER, "image_size": 32, "patch_size": 8},
            "projection_dim": 32,
        },
        lambda: {
            "input_ids": torch.cat([ids(8), ids(8, seed=4)]),
            "attention_mask": torch.ones(2 * BATCH, 8, dtype=torch.int64),
            "pixel_values": normal(BATCH, 3, 32, 32),
        },
    ),
    _row("DETR", "DetrForObjectDetection", {"backbone_config": BACKBONE, **DETR}, padded_image),
    _row("Conditional DETR", "ConditionalDetrForObjectDetection", {"backbone_config": BACKBONE, **DETR}, padded_image),
    _row(
        "Deformable DETR",
        "DeformableDetrForObjectDetection",
        {"backbone_config": PYRAMID, "num_feature_levels": 3, "encoder_n_points": 2, "decoder_n_points": 2, **DETR},
        padded_image,
    ),
    _row(
        "RT-DETR",
        "RTDetrForObjectDetection",
        {
            "backbone_config": {**PYRAMID, "model_type": "rt_detr_resnet"},
            "encoder_hidden_dim": 32,
            "encoder_in_channels": [16, 24, 32],
            "feat_strides": [8, 16, 32],
            "encoder_layers": 1,
            "encoder_ffn_dim": 48,
            "encoder_attention_heads": 2,
            "d_model": 32,
            "num_queries": 6,
            "decoder_in_channels": [32, 32, 32],
            "decoder_ffn_dim": 48,
            "decoder_layers": 1,
            "decoder_attention_heads": 2,
            "num_denoising": 0,
            "decoder_n_points": 2,
            "num_labels": 4,
        },
        lambda: {"pixel_values": normal(BATCH, 3, 64, 64)},
    ),
    _row(
        "Grounding DINO",
        "GroundingDinoForObjectDetection",
        {
            "backbone_config": {
                "model_type": "swin",
                "image_size": 32,
                "embed_dim": 8,
                "depths": [1, 1, 1, 1],
                "num_heads": [1, 2, 4, 8],
                "window_size": 4,
                "out_features": ["stage2", "stage3", "stage4"],
            },
            "text_config": {**BERT, "model_type": "bert"},
            "num_feature_levels": 4,
            "encoder_n_points": 2,
            "decoder_n_points": 2,
            "max_text_len": 16,
            **{k: v for k, v in DETR.items() if k not in ("use_timm_backbone", "backbone")},
        },
        lambda: {
            "input_ids": torch.tensor([[2, 5, 6, 3, 7, 3], [2, 8, 3, 9, 10, 3]]),
            "attention_mask": torch.ones(BATCH, 6, dtype=torch.int64),
            "pixel_values": normal(BATCH, 3, 64, 64),
            "pixel_mask": torch.ones(BATCH, 64, 64, dtype=torch.int64),
        },
    ),
)
ARCHITECTURES = {a.name: a for a in _ROWS}
