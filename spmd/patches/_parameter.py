"""Parameters made of marked ones, with the same sharding: by `nn.Parameter(p)`, as `weight_norm` does, and by `copy.deepcopy(p)`."""

from __future__ import annotations

from typing import Any

import torch

from spmd.device._layout import hand_over
from spmd.patches._table import replace
from spmd.sharding._tensor import XLAShardedParameter, XLAShardedTensor, become_sharded

_NEW, _COPY = "torch.nn.Parameter.__new__", "torch.nn.Parameter.__deepcopy__"


def register() -> None:
    """Make a parameter of a marked tensor or parameter an ordinary marked parameter.

    Of a tensor of another class torch makes a tensor with an attribute that says it is a parameter, which copies lose. Of a marked
    parameter it makes none: it requires that `detach()` returns the same class, but that is a plain tensor.
    """

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) in (XLAShardedTensor, XLAShardedParameter):
            return become_sharded(original(cls, data.detach().as_subclass(torch.Tensor), requires_grad))
        return original(cls, data, requires_grad)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        is_new = id(self) not in memo
        made = original_copy(self, memo)
        if is_new:
            hand_over(self, made)
        return made

    original = replace(_NEW, staticmethod(new))
    original_copy = replace(_COPY, deepcopy)
