"""Second part of the table for benchmarks/models.py: timm's image models, one per family.

Each row uses the smallest model of its family, with fewer blocks if `timm.create_model` has an argument for that.
"""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo import Architecture, Inputs, normal

NUM_CLASSES = 10


def images(size: int) -> Inputs:
    """A batch of three images, so that a batch norm over a last feature map of 3 x 3 has 27 values."""
    return {"x": torch.cat([normal(2, 3, size, size), normal(1, 3, size, size, seed=3)])}


def image_model(name: str, model: str, size: int = 96, *, samples: bool = False, remark: str = "", **arguments: Any) -> Architecture:
    """A row of the table. `model` and `arguments` are passed to `timm.create_model`."""
    sizes = {"num_classes": NUM_CLASSES, **arguments}
    return Architecture(name, "image model (timm)", model, sizes, lambda: images(size), samples=samples, remark=remark, library="timm")


def attending(name: str, model: str, size: int = 64, **arguments: Any) -> Architecture:
    """A row for a model with a fixed image size."""
    return image_model(name, model, size, img_size=size, **arguments)


CONVOLUTIONAL = (
    image_model("ResNet-18 (timm)", "resnet18"),
    image_model("ResNeXt", "resnext50_32x4d", layers=(1, 1, 1, 1)),
    image_model("SE-ResNet", "seresnet18"),
    image_model("ECA-ResNet", "ecaresnet26t", layers=(1, 1, 1, 1)),
    image_model("ResNeSt", "resnest14d"),
    image_model("Res2Net", "res2net50_26w_4s", layers=(1, 1, 1, 1)),
    image_model("SK-ResNet", "skresnet18"),
    image_model("ResNetV2", "resnetv2_50", layers=(1, 1, 1, 1)),
    image_model("NF-ResNet", "nf_resnet26"),
    image_model("DenseNet", "densenet121", block_config=(2, 2, 2, 2)),
    image_model("VGG", "vgg11_bn", mlp_ratio=1 / 64),
    image_model("Inception-v3", "inception_v3", 128),
    image_model("Xception", "xception41"),
    image_model("EfficientNet (timm)", "efficientnet_b0"),
    image_model("EfficientNetV2", "tf_efficientnetv2_b0"),
    image_model("MobileNetV3", "mobilenetv3_small_050"),
    image_model("MobileNetV4", "mobilenetv4_conv_small"),
    image_model("MnasNet", "mnasnet_small"),
    image_model("FBNet", "fbnetc_100"),
    image_model("LCNet", "lcnet_050"),
    image_model("GhostNet", "ghostnet_050"),
    image_model("RegNetX", "regnetx_002"),
    image_model("RegNetY (timm)", "regnety_002"),
    image_model("ReXNet", "rexnet_100"),
    image_model("ConvNeXt (timm)", "convnext_atto", depths=(1, 1, 2, 1)),
    image_model("ConvNeXt V2 (timm)", "convnextv2_atto", depths=(1, 1, 2, 1)),
    image_model("InceptionNeXt", "inception_next_atto", depths=(1, 1, 2, 1)),
    image_model("ConvMixer", "convmixer_768_32", 28),
    image_model("HRNet", "hrnet_w18_small"),
    image_model("DLA", "dla34"),
    image_model("DPN", "dpn48b", k_sec=(1, 1, 1, 1)),
    image_model("CSPNet", "cspresnet50"),
    image_model("VoVNet", "ese_vovnet19b_dw"),
    image_model("SelecSLS", "selecsls42"),
    image_model("HGNet", "hgnetv2_b0"),
    image_model("RepVGG", "repvgg_a0"),
    image_model("MobileOne", "mobileone_s0"),
    image_model("RepViT", "repvit_m0_9"),
    image_model("TResNet", "tresnet_m", layers=(1, 1, 1, 1)),
    image_model("GENet", "gernet_s"),
    image_model("StarNet", "starnet_s1"),
    image_model("RDNet", "rdnet_tiny"),
)
NAN_ON_CPU = "the gradient of CPU torch's attention is NaN in float32 and the device's is not; in float64 both agree"
ATTENDING = (
    attending("ViT (timm)", "vit_tiny_patch16_224", depth=2),
    attending("ViT, relative positions", "vit_srelpos_small_patch16_224", depth=2),
    attending("BEiT (timm)", "beit_base_patch16_224", depth=2, embed_dim=64, num_heads=2),
    attending("EVA-02", "eva02_tiny_patch14_224", 56, depth=2),
    attending("CaiT", "cait_xxs24_224", depth=2),
    attending("XCiT", "xcit_nano_12_p16_224", depth=2),
    attending("MLP-Mixer", "mixer_s32_224"),
    attending("ResMLP", "resmlp_12_224"),
    attending("gMLP", "gmlp_ti16_224"),
    attending("Swin (timm)", "swin_tiny_patch4_window7_224", 56, depths=(1, 2), num_heads=(2, 4), embed_dim=32),
    attending("Swin V2 (timm)", "swinv2_tiny_window8_256", depths=(1, 2), num_heads=(2, 4), embed_dim=32),
    attending("CoaT", "coat_lite_tiny"),
    attending("MaxViT", "maxvit_nano_rw_256"),
    attending("CoAtNet", "coatnet_nano_rw_224", depths=(1, 1, 1, 1)),
    attending("PiT", "pit_ti_224"),
    image_model("LeViT (timm)", "levit_128s", 224),
    attending("Visformer", "visformer_tiny"),
    attending("Twins", "twins_svt_small", depths=(1, 1, 2, 1)),
    image_model("PVT v2 (timm)", "pvt_v2_b0", 64),
    image_model("PoolFormer (timm)", "poolformer_s12", 64),
    image_model("CAFormer", "caformer_s18", 64),
    image_model("MobileViT (timm)", "mobilevit_xxs", 64),
    image_model("EdgeNeXt", "edgenext_xx_small", 64),
    image_model("FastViT", "fastvit_t8", 64),
    image_model("EfficientFormer", "efficientformer_l1", 224),
    image_model("EfficientViT", "efficientvit_b0", 64),
    image_model("DaViT", "davit_tiny", 64, depths=(1, 1, 2, 1)),
    image_model("FocalNet (timm)", "focalnet_tiny_srf", 64),
    image_model("GC ViT", "gcvit_xxtiny", 224),
    image_model("NesT", "nest_tiny", 224),
    image_model("VOLO", "volo_d1_224", 224, samples=True),
    image_model("CrossViT", "crossvit_tiny_240", 240),
    attending("ConViT", "convit_tiny", depth=4),
    attending("TNT", "tnt_s_patch16_224", depth=2),
    attending("Sequencer", "sequencer2d_s", layers=(1, 1, 1, 1)),
    image_model("Hiera", "hiera_tiny_224", 224, stages=(1, 1, 1, 1), remark=NAN_ON_CPU),
    image_model("MambaOut", "mambaout_femto", 64, depths=(1, 1, 2, 1)),
    image_model("TinyViT", "tiny_vit_5m_224", 224),
    image_model("SHViT", "shvit_s1", 128),
    image_model("Next-ViT", "nextvit_small", 64),
    image_model("LambdaNetwork", "lambda_resnet26t", 128),
    image_model("HaloNet", "halonet26t", 256),
)
ARCHITECTURES = {row.name: row for row in (*CONVOLUTIONAL, *ATTENDING)}
