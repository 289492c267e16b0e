"""TRL's SFT and DPO trainers on CPU torch and over a mesh; prints "equal" where they log the same. Run by `test_trl.py`."""

# pyright: reportMissingImports=none

import contextlib
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from mesh import virtual_devices

virtual_devices(8)

from tests.huggingface.scripts import history, llama, on_cpu, texts, training_on  # noqa: E402 (jax starts there)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words "3" to "63" as ids, with the special tokens below."""
    special = ["<pad>", "<s>", "</s>"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*special, *map(str, range(3, 64))])}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=special[0], bos_token=special[1], eos_token=special[2])


def words(length: int) -> list[str]:
    return [" ".join(map(str, text["input_ids"].tolist())) for text in texts(32, length)]


def sft(**options: Any) -> Any:
    data = Dataset.from_dict({"text": words(10)})
    return SFTTrainer(llama(), SFTConfig(max_length=16, **options), train_dataset=data, processing_class=tokenizer())


def dpo(**options: Any) -> Any:
    data = Dataset.from_dict({"prompt": [f"{text} " for text in words(5)], "chosen": words(6), "rejected": words(7)})
    return DPOTrainer(llama(), llama(), DPOConfig(max_length=16, **options), train_dataset=data, processing_class=tokenizer())


def trained(make: Any, on_host: bool) -> Any:
    set_seed(0)
    usual = {"per_device_train_batch_size": 8, "max_steps": 4, "logging_steps": 1, "report_to": [], "save_strategy": "no"}
    trainer = make(output_dir=str(Path("out")), learning_rate=1e-3, bf16=False, use_cpu=on_host, dataloader_pin_memory=False, **usual)
    with contextlib.redirect_stdout(sys.stderr):
        trainer.train()
    return trainer


make = {"sft": sft, "dpo": dpo}[sys.argv[1]]
with on_cpu():
    wanted = history(trained(make, on_host=True))
with training_on(sys.argv[2]) as training:
    got = history(trained(make, on_host=False))
far = [(g, w) for g, w in zip(got, wanted, strict=True) if g[:2] != w[:2] or abs(g[2] - w[2]) > 1e-5 * abs(w[2])]
print(far or "equal", f"{training.lazy.num_executables} programs")
