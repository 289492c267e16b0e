"""A library that the first test imports which uses it, and not collection: a trace swaps every function that this process has
outside torch and jax (`spmd/program/reads/_swap.py`), and those of transformers, peft, accelerate and flax are half of them."""

from __future__ import annotations

import importlib
from typing import Any


class Later:
    """The module `name`, imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks of everything in a module whether it is a mock, a fixture or a test
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


accelerate, peft, transformers = Later("accelerate"), Later("peft"), Later("transformers")
nnx, optax = Later("flax.nnx"), Later("optax")
jsonschema, nbformat = Later("jsonschema"), Later("nbformat")
