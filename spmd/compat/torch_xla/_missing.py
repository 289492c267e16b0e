"""Errors for what torch_xla has and this package lacks: they name a replacement, unlike a bare `ModuleNotFoundError`."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from spmd.base._errors import message

_GUIDE = "docs/migration.md lists what there is and what to use instead"
# By module, or by full path of a name. The longest match is shown.
_INSTEAD = {
    "torch_xla.stablehlo": "step.hlo() shows the compiled program",
    "torch_xla.core.xla_model.send": "inside xs.enable_manual_sharding: xm.collective_permute(t, [[source, target]])",
    "torch_xla.core.xla_model.recv": "inside xs.enable_manual_sharding: xm.collective_permute(t, [[source, target]])",
    "torch_xla.core.xla_model.get_stablehlo": "step = torch_xla.compile(fn); step(x); step.spmd_step.hlo()",
    "torch_xla.core.xla_builder": "write the function with jax.numpy and call it by xb.call_jax(fn, args)",
    "torch_xla.core.xla_op_registry": "write the function with jax.numpy and call it by xb.call_jax(fn, args)",
    "torch_xla.distributed.data_parallel": "mark the batch: xs.mark_sharding(x, mesh, ('data', None)); one process drives all devices",
    "torch_xla.distributed.zero_redundancy_optimizer": "mark the parameters: optimizer state lies as its parameter does",
    "torch_xla.distributed.fsdp": "SpmdFullyShardedDataParallel, or spmd.fully_shard",
    "torch_xla.experimental.pallas_kernels": "call a Pallas kernel by spmd.call_jax",
    "torch_xla.experimental.fori_loop": "torch.while_loop, inside a compiled function",
    "torch_xla._XLAC": "a compiled step's hlo(), collectives() and memory() say what the queries of torch_xla's extension said",
    "torch_xla._XLAC.lowering": "step = torch_xla.compile(fn); step(x); step.spmd_step.hlo()",
}


def way_on(name: str) -> str:
    """The fix line for a module or name that does not exist."""
    known = max((path for path in _INSTEAD if name == path or name.startswith(path + ".")), key=len, default="")
    return f"{_INSTEAD[known]}; {_GUIDE}" if known else _GUIDE


def missing(name: str) -> str:
    """The complete error message."""
    return message(f"{name} does not exist under spmd.compat.torch_xla", fix=way_on(name))


def refusal(module: str) -> Callable[[str], Any]:
    """A `__getattr__` for a module, which raises the error."""

    def refuse(name: str) -> Any:
        raise AttributeError(missing(f"{module}.{name}"))

    return refuse


class Finder:
    """A finder for `sys.meta_path` that raises when an import statement names a module of torch_xla that does not exist.

    For `importlib.util.find_spec` and similar calls it returns None, as for any module that does not exist.
    """

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "torch_xla":
            return None
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_name == "_find_spec":
            frame = frame.f_back
        if frame is not None and frame.f_code.co_name == "_find_and_load_unlocked":
            # without name=: `from module import name` replaces an error that has it by a shorter one
            raise ModuleNotFoundError(missing(name))
        return None


def enter(stack: ExitStack) -> None:
    """Install the finder until `stack` closes."""
    finder: Any = Finder()
    sys.meta_path.append(finder)
    stack.callback(sys.meta_path.remove, finder)
