"""Hugging Face's Trainer over 8 virtual devices: two added lines before an otherwise unchanged script."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import spmd.huggingface
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
training = spmd.huggingface.train_on(Mesh(range(8), (2, 4), ("data", "model")), rules="megatron")

torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)
model = LlamaForCausalLM(config)
texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 128, (64, 32))]
arguments = TrainingArguments(
    "llama",
    per_device_train_batch_size=8,  # size of the global batch, because the Trainer sees one process with one device
    num_train_epochs=2,
    learning_rate=1e-3,
    logging_steps=4,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:16])
trainer.train()
trainer.save_model("llama/last")

print(model.model.layers[0].mlp.up_proj.weight)
print(f"{training.lazy.num_executables} programs, loss {trainer.evaluate()['eval_loss']:.4f}")
