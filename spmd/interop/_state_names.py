"""Names of a program's state and numbers in an exported file."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.program.find._discover import Reachable
from spmd.program.optim._lifted_numbers import LiftedNumbers


def state_names(found: Reachable, buffers: Sequence[Buffer]) -> dict[int, str]:
    """A unique name for each buffer, by id: "model.up.weight", "optimizer.model.up.weight.exp_avg"; "state.3" as a last resort."""
    wanted = {id(buffer) for buffer in buffers}
    names: dict[int, str] = {}
    used: set[str] = set()

    def take(tensor: torch.Tensor, name: str) -> None:
        if is_device_tensor(tensor) and id(buffer_of(tensor)) in wanted and id(buffer_of(tensor)) not in names and name not in used:
            names[id(buffer_of(tensor))] = name
            used.add(name)

    called: dict[int, str] = {}
    for name, tensor in found.named_tensors():
        called.setdefault(id(tensor), name)
        take(tensor, name)
    for position, optimizer in enumerate(found.optimizers):
        title = _title(found, position)
        for parameter, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    take(value, f"{title}.{called.get(id(parameter), 'parameter')}.{key}")
    for position, buffer in enumerate(buffers):
        names.setdefault(id(buffer), f"state.{position}")
    return names


def number_names(found: Reachable, numbers: LiftedNumbers) -> list[str]:
    """Names of a program's lifted numbers: "optimizer.lr", "optimizer.betas[0]"; with "param_groups[1]" for groups after the first."""
    names: list[str] = []
    groups = {
        id(group): _title(found, i) + (f".param_groups[{k}]" if k else "")
        for i, optimizer in enumerate(found.optimizers)
        for k, group in enumerate(optimizer.param_groups)
    }
    for holder, key, position in numbers.slots:
        name = f"{groups.get(id(holder), 'state')}.{key}" + ("" if position is None else f"[{position}]")
        names.append(f"{name}#{len(names)}" if name in names else name)
    return names


def _title(found: Reachable, position: int) -> str:
    return "optimizer" if len(found.optimizers) == 1 else f"optimizers[{position}]"


__all__ = ["number_names", "state_names"]
