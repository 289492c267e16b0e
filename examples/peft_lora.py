"""Trains PEFT's LoRA adapters with the Trainer over 8 virtual devices, merges them, and saves the model."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import spmd.huggingface
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
training = spmd.huggingface.train_on(Mesh(range(8), (8,), ("fsdp",)), rules="fsdp")

torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.print_trainable_parameters()
texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 128, (64, 32))]
arguments = TrainingArguments("adapters", per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=8, report_to=[])
Trainer(model, arguments, train_dataset=texts).train()

model.save_pretrained("adapters/last")  # only the adapters
merged = model.merge_and_unload()
merged.save_pretrained("merged")
print(f"{training.lazy.num_executables} programs")
