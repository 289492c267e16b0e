"""The objects that the statements of `benchmarks/statements.py` use."""

from __future__ import annotations

import array
import asyncio
import collections
import contextlib
import copy
import dataclasses
import decimal
import enum
import fractions
import functools
import itertools
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

Space = dict[str, Any]
_MODULES = (array, asyncio, collections, contextlib, copy, dataclasses, decimal, enum, fractions, functools, itertools, math, operator)


class L(list[Any]):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.steps = linear(4, 3, "cpu"), 0
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.l(x))


def linear(inputs: int, outputs: int, device: str) -> nn.Linear:
    """A linear layer whose weights are the same in every process."""
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).reshape(p.shape))
    return layer.to(device)


def space(device: str) -> Space:
    """The variables of the module in which a text runs."""
    made: Space = {module.__name__: module for module in _MODULES}
    made |= {"torch": torch, "nn": nn, "F": F, "np": np, "types": types, "L": L, "device": device, "__name__": "__main__", "g": 2, "G": 0}
    made["z"] = lambda: torch.ones(2).to(device)
    made["ctx"] = lambda value: contextlib.nullcontext(value + 1)
    exec("def bump(o):\n    o.k += 1\ndef bump_item(c):\n    c[1] += 1\ndef helper(c):\n    return float(c[1])", made)
    return made


def for_expressions(device: str) -> types.SimpleNamespace:
    """Tensors, and two numbers that change between calls."""
    return types.SimpleNamespace(
        n=1,
        p=0.25,
        t=torch.linspace(-2, 3, 16).reshape(4, 4).to(device),
        i=torch.arange(-2, 4).to(device),
        h=torch.linspace(0.1, 2, 4).to(torch.bfloat16).to(device),
        c=torch.tensor([1 + 1j, 2 - 1j]).to(device),
        w=nn.Parameter(torch.ones(2).to(device)),
    )


def for_programs(device: str) -> types.SimpleNamespace:
    """Numbers, containers, tensors and modules."""

    def tensor(*values: float) -> torch.Tensor:
        return torch.tensor(values).to(device)

    return types.SimpleNamespace(
        **{"n": 1, "items": [1, 2, 3], "table": {"a": 1, "b": 2}, "name": "nm", "d": collections.deque([1, 2, 3])},
        **{"t": tensor(1.0, 2.0), "u": tensor(3.0, 4.0), "ts": [tensor(1.0, 1.0)], "td": {}, "nest": [{"z": 1}], "flags": {1}},
        **{"bits": 5, "f": 1.5, "b": False, "s": "AB", "bts": b"ab", "z": 1 + 1j, "drop": nn.Dropout(0.0)},
        lin=linear(2, 2, device),
        mods=nn.ModuleList([linear(2, 2, device), linear(2, 2, device)]),
    )


def for_training(device: str) -> tuple[types.SimpleNamespace, Callable[[torch.Tensor], torch.Tensor]]:
    """The state of a training loop, and a function that computes the gradients of its parameters."""
    ps = [nn.Parameter(torch.linspace(-1, 1, 4).to(device)), nn.Parameter(torch.linspace(0, 1, 3).to(device))]
    net = Net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    zeros = {name: torch.zeros(shape).to(device) for name, shape in (("mean", 4), ("m2", 4), ("h", 4), ("hist_t", 3))}
    state = types.SimpleNamespace(
        **{"ps": ps, "net": net, "target": copy.deepcopy(net), "opt": optimizer, "lr": 0.1, "mom": 0.9, "b1": 0.9, "b2": 0.99, "t": 0},
        **{name: [torch.zeros_like(p) for p in ps] for name in ("bufs", "vs")},
        **{name: [p.detach().clone() for p in ps] for name in ("ema", "slow")},
        **zeros,
        **{"norms": [], "wd": 0.1, "gamma": 0.5, "ptr": 0, "full": False, "count": 0, "temp": 1.0, "hist": [], "accum": 2, "best": None},
        **{"bad": 0, "lrs": [], "tau": 0.5, "sigma": 0.5, "ks": [1, 2, 3], "q": collections.deque[Any](), "logs": {}, "decay": 0.9},
        **{"ws": [1.0, 2.0, 3.0], "stats": {}, "alpha": 0.1, "da": 0.2, "perm": [0, 1, 2, 3], "window": [0], "inner": 1, "prox": 0.5},
        ring=torch.zeros(3, 4).to(device),
        mask=torch.tensor([True, False, True, False]).to(device),
        table=torch.zeros(5, 2).to(device),
        lr_t=torch.tensor(0.1).to(device),
        sched=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        sched2=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    )

    def grads(x: torch.Tensor) -> torch.Tensor:
        for p in ps:
            p.grad = None
        loss = (x * ps[0]).sum(1).sin().pow(2).mean() + (ps[1] * x[:, :3]).sum().cos()
        loss.backward()
        return loss.detach()

    return state, grads


__all__ = ["Space", "for_expressions", "for_programs", "for_training", "space"]
