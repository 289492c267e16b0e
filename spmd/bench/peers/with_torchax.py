"""torchax: the PyTorch script's loss through torchax, with shardings, donation and optimizer as in JAX by hand.

It runs in its own environment, because torchax occupies PyTorch's slot for out-of-tree devices, as `spmd` does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import by_hand  # pyright: ignore[reportMissingImports]
import jax
import torch
import torchax  # pyright: ignore[reportMissingImports]
from torch.nn.utils import stateless

prepare = by_hand.prepare


class Contender(by_hand.Contender):
    """The PyTorch loss in a JAX step. See `spmd.bench._peer` for the methods."""

    def __init__(self, job: Any) -> None:
        self.env = torchax.default_env()
        self.model = job.model()
        buffers = tuple({name.rpartition(".")[2] for name, _ in self.model.named_buffers()})
        super().__init__(job, SimpleNamespace(OPTIMIZER=job.by_hand.OPTIMIZER, BUFFERS=buffers, loss=self.loss_of))

    def loss_of(self, params: Any, buffers: Any, config: Any, *rest: Any) -> Any:
        """The script's loss with these parameters and buffers in the model, and the buffers after the call."""
        *batch, _ = rest
        views = self.env.j2t_iso((params, buffers, batch))
        params, buffers, batch = views
        with self.env, stateless._reparametrize_module(self.model, {**params, **buffers}, tie_weights=True):
            for name, module in self.model.named_modules():
                self._constrain(name, module)
            loss = self.job.script.loss(self.model, *batch)
            buffers = dict(self.model.named_buffers())
        return self.env.t2j_iso(loss), self.env.t2j_iso(buffers)

    def _constrain(self, name: str, module: torch.nn.Module) -> None:
        """Add a hook to the module, once, that constrains the sharding of its output."""
        import fnmatch

        if hasattr(module, "_bench_constrained"):
            return
        module._bench_constrained = True  # pyright: ignore[reportArgumentType]
        for pattern, spec in self.job.activations().items():
            if name and fnmatch.fnmatchcase(name, pattern):
                where = self.place(spec)
                constrain = torchax.interop.torch_view(lambda x, where=where: jax.lax.with_sharding_constraint(x, where))
                module.register_forward_hook(lambda _module, _args, result, constrain=constrain: constrain(result))
