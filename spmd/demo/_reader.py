"""Reads the demo's checkpoint with torch alone. A script that runs in its own process and never imports `spmd`.

python _reader.py config.json checkpoint.pt tokens.pt logits.pt
"""

import json
import runpy
import sys
from pathlib import Path

import torch


def main(config: str, checkpoint: str, tokens: str, logits: str) -> None:
    """Load the model from `checkpoint` and write its logits for `tokens` to `logits`."""
    names = runpy.run_path(str(Path(__file__).with_name("_gpt2.py")))
    model = names["GPT"](names["GPTConfig"](**json.loads(Path(config).read_text(encoding="utf-8"))))
    model.load_state_dict(torch.load(checkpoint))
    with torch.no_grad():
        torch.save(model.eval()(torch.load(tokens)), logits)
    if found := {"spmd", "mesh", "jax"} & set(sys.modules):
        raise SystemExit(f"reading the checkpoint needed {found}")


if __name__ == "__main__":
    main(*sys.argv[1:])
