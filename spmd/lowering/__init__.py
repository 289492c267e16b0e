"""Lowerings: what each ATen overload means in jax, by domain. Importing this package fills the table."""

import importlib

from spmd.lowering._registry import Lowering as Lowering
from spmd.lowering._registry import lookup as lookup
from spmd.lowering._registry import lower as lower
from spmd.lowering._registry import lowerings as lowerings
from spmd.lowering._registry import num_lowerings as num_lowerings

DOMAINS = (
    "activation",
    "attention",
    "bessel",
    "complex",
    "conv",
    "create",
    "ctc",
    "cumulative",
    "distance",
    "embedding",
    "fft",
    "grouped",
    "index",
    "ldl",
    "linalg",
    "loss",
    "lu",
    "matmul",
    "norm",
    "pointwise",
    "pool",
    "random",
    "reduce",
    "resample",
    "rnn",
    "scatter",
    "segment",
    "shape",
    "softmax",
    "sort",
    "special",
    "statistics",
    "unique",
)
for _domain in DOMAINS:
    importlib.import_module(f"{__name__}.{_domain}")

__all__ = ["DOMAINS", "Lowering", "lookup", "lower", "lowerings", "num_lowerings"]
