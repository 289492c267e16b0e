"""The backend itself: `torch.compile(..., backend="spmd")` calls it with each graph that Dynamo captured.

It is found through its entry point (`torch_dynamo_backends` in pyproject.toml). Importing this module imports Dynamo; importing spmd does
not.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from spmd.base._errors import SpmdError, message
from spmd.dynamo import _device_interface, _shape_functions, _skip_rules, _whole_step
from spmd.dynamo._graph_program import GraphProgram
from spmd.dynamo._whole_step import checked_options
from spmd.interop import _jax_in_graphs

_numbers = itertools.count()
_made: weakref.WeakSet[GraphProgram] = weakref.WeakSet()


def compile_graph(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **given: Any) -> GraphProgram:
    """A callable that runs the graph as compiled programs, which are made when it is first called.

    Args:
        graph: torch-level calls, as Dynamo captured them.
        example_inputs: unused; the first call has tensors with values and layouts.
        given: `options` of torch.compile, which apply to training steps, and `mode`, which is not supported.

    Raises:
        SpmdError: a mode or an unknown option is given.
    """
    if given.get("mode") is not None:
        raise SpmdError(message("backend='spmd' supports no modes", f"mode={given['mode']!r}", fix='torch.compile(fn, backend="spmd")'))
    checked_options(given.get("options") or {})
    program = GraphProgram(graph, f"graph_{next(_numbers)}")
    _made.add(program)
    return program


def graphs() -> list[GraphProgram]:
    """All live graphs in order of capture. Each shows its number of programs, or why it has none."""
    return sorted(_made, key=lambda program: int(program.name.rpartition("_")[2]))


_device_interface.register()
_shape_functions.register()
_skip_rules.register()
_jax_in_graphs.register()
_whole_step.register(compile_graph)

__all__ = ["compile_graph", "graphs"]
