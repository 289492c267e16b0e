"""TRL's SFT trainer over 8 virtual devices: two added lines before an ordinary script, which also creates its tokenizer and texts."""

# pyright: reportMissingImports=none

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import spmd.huggingface
from mesh import Mesh, virtual_devices

virtual_devices(8)  # 8 virtual CPU devices; omit this line on a machine with accelerators
training = spmd.huggingface.train_on(Mesh(range(8), (2, 4), ("data", "model")), rules="megatron")

vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *map(str, range(3, 128))])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")

torch.manual_seed(0)
texts = [" ".join(map(str, row)) for row in torch.randint(3, 128, (64, 15)).tolist()]
model = LlamaForCausalLM(
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128, eos_token_id=2)
)
arguments = SFTConfig("sft", max_length=16, per_device_train_batch_size=8, num_train_epochs=2, logging_steps=4, bf16=False, report_to=[])
trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer)
trainer.train()
print(f"{training.lazy.num_executables} programs, loss {trainer.state.log_history[-1]['train_loss']:.4f}")
