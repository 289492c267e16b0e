"""Parameters made of marked ones, with the same sharding: by `nn.Parameter(p)`, as `weight_norm` does, and by `copy.deepcopy(p)`."""

from __future__ import annotations

from typing import Any

from spmd.device._layout import hand_over
from spmd.patches._table import replace
from spmd.sharding._tensor import XLAShardedParameter, become_sharded

_NEW, _COPY = "torch.nn.Parameter.__new__", "torch.nn.Parameter.__deepcopy__"


def register() -> None:
    """Make `nn.Parameter` accept a marked parameter. Torch requires its `detach()` to return its class, but that is a plain tensor."""

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if type(data) is XLAShardedParameter:
            return become_sharded(original(cls, data.detach(), requires_grad))
        return original(cls, data, requires_grad)

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        is_new = id(self) not in memo
        made = original_copy(self, memo)
        if is_new:
            hand_over(self, made)
        return made

    original = replace(_NEW, staticmethod(new))
    original_copy = replace(_COPY, deepcopy)
