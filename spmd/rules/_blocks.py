"""The repeated blocks of a model: the units of FSDP, and the modules whose outputs are laid out."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.tensor.placement_types import Replicate

from mesh import Mesh
from spmd.rules._families import is_table
from spmd.rules._parallel_plan import Border


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that are children of a list in which all modules have the same class."""
    return list(dict.fromkeys(_blocks(model)))


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    children = list(module.children())
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    if is_list and len({type(c) for c in children}) == 1 and any(True for _ in module.parameters()) and not _is_list(children[0]):
        yield from children
        return
    for child in children:
        yield from _blocks(child)


def _is_list(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def activation_borders(model: nn.Module, mesh: Mesh, batch: tuple[str, ...]) -> tuple[tuple[nn.Module, Border], ...]:
    """Layouts for the outputs of token embeddings and blocks: dim 0 split over the axes of the batch, the rest replicated.

    Without them the compiler lays activations out like parameters: over the axes of FSDP, which should split the batch.
    """
    border = Border(mesh, (), outputs=(Replicate(),), batch=batch)
    return tuple((module, border) for module in dict.fromkeys([*_tables(model), *blocks_of(model)]))


def remove_borders(model: nn.Module) -> None:
    """Remove the hooks of `activation_borders` from a model."""
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            border = getattr(hook, "__self__", None)
            if isinstance(border, Border) and border.batch is not None:
                del module._forward_hooks[key]


def _tables(model: nn.Module) -> Iterator[nn.Module]:
    return (module for name, module in model.named_modules() if isinstance(module, nn.Embedding) and is_table(name))


__all__ = ["activation_borders", "blocks_of", "remove_borders"]
