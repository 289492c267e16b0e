"""`spmd demo`: a character-level GPT-2 trained on Python's own source files, sharded over a mesh.

    spmd demo
    spmd demo --mesh data=8 --steps 200 --out model.pt

The files in reading order: `_train` is the program, `_training` contains the functions that it compiles, `_gpt2` is the model, `_text`
loads the training data, `_screens` formats the output.
"""

from spmd.demo._gpt2 import GPT as GPT
from spmd.demo._gpt2 import SHARDINGS as SHARDINGS
from spmd.demo._gpt2 import GPTConfig as GPTConfig
from spmd.demo._text import standard_library as standard_library
from spmd.demo._train import DemoArgs as DemoArgs
from spmd.demo._train import main as main
from spmd.demo._training import Training as Training

__all__ = ["GPT", "SHARDINGS", "DemoArgs", "GPTConfig", "Training", "main", "standard_library"]
