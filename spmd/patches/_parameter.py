"""`nn.Parameter(p)` of a marked parameter `p`: a parameter with the same storage and sharding. `weight_norm` creates them."""

from __future__ import annotations

from typing import Any

from spmd.patches._table import replace
from spmd.sharding._tensor import XLAShardedParameter, become_sharded

_TARGET = "torch.nn.Parameter.__new__"


def register() -> None:
    """Make `nn.Parameter` accept a marked parameter. Torch requires its `detach()` to return its class, but that is a plain tensor."""

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is XLAShardedParameter:
            return become_sharded(original(cls, data.detach(), requires_grad))
        return original(cls, data, requires_grad)

    original = replace(_TARGET, staticmethod(new))
