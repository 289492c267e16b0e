"""The content of a Dynamo graph: its calls, the tensors that it contains, and its execution while jax traces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from spmd.base._torch import set_grad_enabled
from spmd.base._torch_late import activation_checkpoint
from spmd.dynamo._graph_sizes import GraphSizes
from spmd.program.flow._remat import remat


class Calls:
    """A graph module and its properties that matter for a program.

    Attributes:
        graph: the graph module from Dynamo.
        held: device tensors among its attributes; they are inputs of its programs, after the arguments.
        held_hosts: tensors on other devices among its attributes.
        numbers: positions of CPU tensors that represent Python floats.
        sizes: the symbolic sizes.
        makes_device_tensors: whether a node names the device.
        enables_gradients: whether a node turns autograd on, whatever the mode around the graph.
    """

    def __init__(self, graph: fx.GraphModule) -> None:
        self.graph = graph
        nodes = list(graph.graph.nodes)
        names = dict.fromkeys(n.target for n in nodes if n.op == "get_attr")
        tensors = {name: value for name in names if isinstance(value := _attribute(graph, name), torch.Tensor)}
        self._names = sorted(tensors, key=lambda name: tensors[name].device.type != "jax")
        self.held = [t for t in tensors.values() if t.device.type == "jax"]
        self.held_hosts = [t for t in tensors.values() if t.device.type != "jax"]
        placeholders = [n for n in nodes if n.op == "placeholder"]
        inputs = [n.meta.get("example_value", n.meta.get("val")) for n in placeholders]  # AOTAutograd uses the second key
        self.numbers = [i for i, n in enumerate(placeholders) if n.users and all(u.target == "item" for u in n.users)]
        self.sizes = GraphSizes(inputs, [n.meta.get("example_value", n.meta.get("val")) for n in nodes])
        self.makes_device_tensors = any("jax" in map(_device, (*n.args, *n.kwargs.values())) for n in nodes)

        self.enables_gradients = any(n.target is set_grad_enabled and n.args[0] for n in nodes)

    def run(self, args: Sequence[Any], held: Sequence[torch.Tensor]) -> Sequence[Any]:
        """Run the graph call by call. `held`: replacements for `held`, then for `held_hosts`."""
        return _Run(self.graph, dict(zip(self._names, held, strict=True))).run(*args)


class _Run(fx.Interpreter):
    """Runs the calls of a graph in order, with its tensors replaced."""

    def __init__(self, graph: fx.GraphModule, held: dict[str, torch.Tensor]) -> None:
        super().__init__(graph)
        self._held = held

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = self._held.get(target)
        return super().get_attr(target, args, kwargs) if found is None else found

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is activation_checkpoint():
            body, *rest = args
            return remat()(lambda *given: body(*given))(*rest)
        return super().call_function(target, args, kwargs)


def _attribute(graph: fx.GraphModule, name: str) -> Any:
    value: Any = graph
    for part in name.split("."):
        value = getattr(value, part)
    return value


def _device(value: Any) -> str | None:
    if isinstance(value, torch.device):
        return value.type
    return value.partition(":")[0] if isinstance(value, str) else None


__all__ = ["Calls"]
