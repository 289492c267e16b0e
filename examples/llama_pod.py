"""Memory plan for training a Llama on a TPU pod, compiled on a laptop: FSDP over "data", tensor parallelism over "model".

python examples/llama_pod.py                  # two layers of width 1024 on v5e:4x4; takes a minute
python examples/llama_pod.py --topology v5e:16x16 --mesh 32,8 --layers 32 --width 4096 --seq 4096     # Llama-3-8B on 256 chips
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import mesh
import spmd

parser = argparse.ArgumentParser()
parser.add_argument("--topology", default="v5e:4x4")
parser.add_argument("--mesh", default="4,4", help="sizes of the axes data and model")
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--seq", type=int, default=1024)
parser.add_argument("--batch", type=int, default=1, help="sequences per step, for each index of the axis data")
args = parser.parse_args()

data, model_size = map(int, args.mesh.split(","))
pod = mesh.Mesh(range(data * model_size), (data, model_size), ("data", "model"), topology=args.topology)
config = LlamaConfig(
    vocab_size=128256,
    hidden_size=args.width,
    intermediate_size=args.width * 7 // 2,
    num_hidden_layers=args.layers,
    num_attention_heads=args.width // 128,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    use_cache=False,
)
with torch.device("meta"):  # shapes without memory: the model does not fit on the laptop
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
print(spmd.shard_module(model, pod, "fsdp+megatron"))
model.to_empty(device="jax").train()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)


@spmd.compile(roll="auto")  # identical layers become one loop
def train_step(tokens: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return loss


tokens = torch.empty(args.batch * data, args.seq, dtype=torch.int64, device="jax")
program = train_step.program(spmd.mark_sharding(tokens, pod, ("data", None)))
print(program.memory())
print(program.collectives())
