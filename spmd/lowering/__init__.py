"""Lowerings of ATen overloads to jax functions, one module per domain. Importing this package fills the table."""

import importlib

from spmd.base._torch import UNTRIED, torch_at_least, untried
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


def _fill() -> None:
    for domain in DOMAINS:
        try:
            importlib.import_module(f"{__name__}.{domain}")
        except ValueError as error:  # in a tested version of torch, this is our own mistake
            if torch_at_least(UNTRIED):
                raise untried(str(error).splitlines()[0]) from error
            raise


_fill()

__all__ = ["DOMAINS", "Lowering", "lookup", "lower", "lowerings", "num_lowerings"]
