"""Generates text from a Hugging Face model with a static cache that is updated in place: one prefill program and one decode program."""

import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

import spmd
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
mesh = Mesh(range(8), (8,), ("model",))
PROMPT, NEW = 16, 32

torch.manual_seed(0)
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
config = LlamaConfig(**sizes, num_key_value_heads=8)
host = AutoModelForCausalLM.from_config(config).eval()  # or .from_pretrained(...)
model = AutoModelForCausalLM.from_config(config).eval()
model.load_state_dict(host.state_dict())
model.to("jax")
spmd.shard_module(model, mesh, "megatron")
cache = StaticCache(config=config, max_cache_len=PROMPT + NEW)


@spmd.compile
@torch.no_grad()
def next_token(tokens: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=tokens, past_key_values=cache).logits
    return logits[:, -1].argmax(-1, keepdim=True)


prompt = torch.randint(3, config.vocab_size, (4, PROMPT))
token = next_token(prompt.to("jax"))
found = [token]
began = time.perf_counter()
for _ in range(NEW - 1):
    token = next_token(token)  # stays on the devices; no token is read until the end
    found.append(token)
drawn = torch.cat(found, 1).cpu()
print(f"{drawn.shape[0]} texts of {drawn.shape[1]} tokens, {next_token.num_executables} programs, {time.perf_counter() - began:.1f} s")

wanted = host.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False, pad_token_id=0)
print("CPU torch's tokens:", torch.equal(drawn, wanted[:, PROMPT:]))
