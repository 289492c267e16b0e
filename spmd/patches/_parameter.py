"""`nn.Parameter(p)` of a marked parameter: a parameter on the same memory, marked alike, as `weight_norm` makes them."""

from __future__ import annotations

from typing import Any

from spmd.patches._table import replace
from spmd.sharding._tensor import XLAShardedParameter, become_sharded

_TARGET = "torch.nn.Parameter.__new__"


def register() -> None:
    """Take marked parameters for parameters; torch would ask `detach` for one, which is a plain tensor."""

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is XLAShardedParameter:
            return become_sharded(original(cls, data.detach(), requires_grad))
        return original(cls, data, requires_grad)

    original = replace(_TARGET, staticmethod(new))
