"""Fine-tunes a Hugging Face model from safetensors and saves it as safetensors; no host ever needs memory for the whole model.

python examples/finetune_safetensors.py [FOLDER]     # a folder with config.json and *.safetensors; by default a small model is created
"""

import sys
import tempfile

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import spmd
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
mesh = Mesh(range(8), (4, 2), ("data", "model"))
scratch = tempfile.mkdtemp()
torch.manual_seed(0)
if len(sys.argv) == 1:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_key_value_heads=4)).save_pretrained(f"{scratch}/given")
source = sys.argv[1] if len(sys.argv) > 1 else f"{scratch}/given"

config = AutoConfig.from_pretrained(source)
with torch.device("meta"):  # shapes without memory
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
spmd.shard_module(model, mesh, "fsdp+megatron")  # Megatron over "model", and FSDP of every parameter over "data"
model.to_empty(device="jax")
spmd.checkpoint.load_safetensors(source, model, dtype=torch.float32)  # each process reads only the bytes of its shards
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()


@spmd.compile
def train_step(tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


texts = torch.randint(3, config.vocab_size, (16, 32))  # your tokens
for step in range(20):
    loss = train_step(spmd.mark_sharding(texts.to("jax"), mesh, ("data", None)))
    if step % 5 == 4:
        print(f"step {step + 1}: loss {loss.item():.3f}")

tuned = f"{scratch}/tuned"
spmd.checkpoint.save_safetensors(tuned, model)
config.save_pretrained(tuned)
print(model.model.layers[0].mlp.up_proj.weight)

again = AutoModelForCausalLM.from_pretrained(tuned)  # plain transformers can read it
with torch.no_grad():
    print(f"loaded on the CPU: loss {again(input_ids=texts, labels=texts).loss.item():.3f}")
