"""The Trainer's own FSDPv2 path under torch_xla's names: prints what it logs as JSON; with `cpu`,
what CPU torch logs. Run by `test_fsdp_v2.py`.
"""

import json
import sys
from pathlib import Path

import mesh
import spmd.compat.torch_xla

mesh.virtual_devices(8)
options = {}
if sys.argv[1] == "xla":
    spmd.compat.torch_xla.install()  # before transformers, which looks for torch_xla when it is imported
    layers = ["LlamaDecoderLayer"]
    config = {"xla": True, "xla_fsdp_v2": True, "xla_fsdp_grad_ckpt": False, "transformer_layer_cls_to_wrap": layers}
    options = {"fsdp": True, "fsdp_config": config}

from tests.huggingface.scripts import fit, history, llama, texts  # noqa: E402

options |= {"dataloader_drop_last": True, "eval_strategy": "steps", "eval_steps": 2}
# transformers 5.23 makes no optimizer on this path, nor takes one
trainer = fit(llama, texts(), Path(sys.argv[1]), before=lambda trainer: trainer.create_optimizer(), **options)
trainer.save_model(str(Path(sys.argv[1], "last")))
print(json.dumps(history(trainer)))
