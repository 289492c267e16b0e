"""Runs Hugging Face's Trainer, Accelerate and PEFT over a device mesh with one call and no change to the training script.

import spmd.huggingface

spmd.huggingface.train_on(spmd.Mesh(range(8), (8,), ("fsdp",)), rules="fsdp")
Trainer(model, args, train_dataset=data).train()
"""

from spmd.huggingface._train_on import Training as Training
from spmd.huggingface._train_on import train_on as train_on

__all__ = ["Training", "train_on"]
