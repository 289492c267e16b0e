"""torchax: the PyTorch script's loss through torchax, everything else (shardings, donation, optimizer) as in JAX by hand.

Runs in an environment of its own: torchax claims PyTorch's out-of-tree device slot, as `spmd` does.
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
    """See `spmd.bench._peer` for what each method means."""

    def __init__(self, job: Any) -> None:
        self.env = torchax.default_env()
        self.model = job.model()
        buffers = tuple({name.rpartition(".")[2] for name, _ in self.model.named_buffers()})
        super().__init__(job, SimpleNamespace(OPTIMIZER=job.by_hand.OPTIMIZER, BUFFERS=buffers, loss=self.loss_of))

    def loss_of(self, params: Any, buffers: Any, config: Any, *rest: Any) -> Any:
        """The script's loss with these parameters in the model's place, and the buffers it leaves."""
        *batch, _ = rest
        views = self.env.j2t_iso((params, buffers, batch))
        params, buffers, batch = views
        with self.env, stateless._reparametrize_module(self.model, {**params, **buffers}, tie_weights=True):
            for name, module in self.model.named_modules():
                self._hold(name, module)
            loss = self.job.script.loss(self.model, *batch)
            buffers = dict(self.model.named_buffers())
        return self.env.t2j_iso(loss), self.env.t2j_iso(buffers)

    def _hold(self, name: str, module: torch.nn.Module) -> None:
        """Hold results to their sharding, once per module."""
        import fnmatch

        if hasattr(module, "_bench_held"):
            return
        module._bench_held = True  # pyright: ignore[reportArgumentType]
        for pattern, spec in self.job.activations().items():
            if name and fnmatch.fnmatchcase(name, pattern):
                where = self.place(spec)
                constrain = torchax.interop.torch_view(lambda x, where=where: jax.lax.with_sharding_constraint(x, where))
                module.register_forward_hook(lambda _module, _args, result, constrain=constrain: constrain(result))
