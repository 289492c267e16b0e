"""Lowerings: what each ATen overload means in jax, by domain. Importing this package fills the table."""

from spmd.lowering import activation as _activation
from spmd.lowering import attention as _attention
from spmd.lowering import bessel as _bessel
from spmd.lowering import complex as _complex
from spmd.lowering import conv as _conv
from spmd.lowering import create as _create
from spmd.lowering import index as _index
from spmd.lowering import loss as _loss
from spmd.lowering import matmul as _matmul
from spmd.lowering import norm as _norm
from spmd.lowering import pointwise as _pointwise
from spmd.lowering import pool as _pool
from spmd.lowering import random as _random
from spmd.lowering import reduce as _reduce
from spmd.lowering import scan as _scan
from spmd.lowering import shape as _shape
from spmd.lowering import softmax as _softmax
from spmd.lowering import special as _special
from spmd.lowering import statistics as _statistics
from spmd.lowering._registry import Lowering as Lowering
from spmd.lowering._registry import lookup as lookup
from spmd.lowering._registry import lower as lower
from spmd.lowering._registry import lowerings as lowerings

_DOMAINS = (_activation, _attention, _bessel, _complex, _conv, _create, _index, _loss, _matmul, _norm, _pointwise, _pool, _random, _reduce, _scan, _shape, _softmax, _special, _statistics)

__all__ = ["Lowering", "lookup", "lower", "lowerings"]
