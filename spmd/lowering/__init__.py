"""Lowerings: what each ATen overload means in jax, by domain. Importing this package fills the table."""

from spmd.lowering import attention as _attention
from spmd.lowering import create as _create
from spmd.lowering import loss as _loss
from spmd.lowering import matmul as _matmul
from spmd.lowering import norm as _norm
from spmd.lowering import pointwise as _pointwise
from spmd.lowering import random as _random
from spmd.lowering import reduce as _reduce
from spmd.lowering import index as _index
from spmd.lowering import shape as _shape
from spmd.lowering import softmax as _softmax
from spmd.lowering._registry import Lowering as Lowering
from spmd.lowering._registry import lookup as lookup
from spmd.lowering._registry import lower as lower
from spmd.lowering._registry import lowerings as lowerings

_DOMAINS = (_attention, _create, _index, _loss, _matmul, _norm, _pointwise, _random, _reduce, _shape, _softmax)

__all__ = ["Lowering", "lookup", "lower", "lowerings"]
