"""Converts programs of `torch.export` to modules on device 'jax', including devices that are named in their graphs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn

from spmd.base._torch import pytree


def module_on_device(program: torch.export.ExportedProgram) -> nn.Module:
    """A new module that computes the program, which is not changed. It asserts the sizes that the program allows."""
    module = program.module()
    for name, part in list(module.named_children()):
        if isinstance(part, fx.GraphModule):  # a branch or loop body, shared with the program
            setattr(module, name, copy.deepcopy(part))
    for part in module.modules():
        for name, value in list(vars(part).items()):  # constants of the graph are plain attributes
            if isinstance(value, torch.Tensor):
                setattr(part, name, value.to("jax"))
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.args, node.kwargs = pytree.tree_map(_moved, (node.args, node.kwargs))
            part.recompile()
    return module.to("jax")


def _moved(value: Any) -> Any:
    return torch.device("jax") if isinstance(value, torch.device) and value.type != "meta" else value


__all__ = ["module_on_device"]
