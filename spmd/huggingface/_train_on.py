"""`train_on`: from the call on, Accelerate and the Trainer find a mesh as their device.

    training = train_on(spmd.Mesh(range(8), (4, 2), ("data", "model")), rules="megatron")
    Trainer(model, args, train_dataset=data).train()
    training.lazy.num_executables
    training.stop()                  # restores their own devices

This module does not know what they do in a step; that is in `_accelerate` and `_trainer`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from mesh import Mesh
from spmd.base._errors import SpmdError, message
from spmd.checkpoint._coordination import current_gang
from spmd.program.lazy._session import Lazy, lazy
from spmd.rules._shard_module import RulesLike
from spmd.rules._training_layouts import Layouts
from spmd.sharding._annotate import as_mesh

_active: list[Training] = []  # at most one. It lives until `stop()`, also if the program does not keep it.


class Training:
    """Returned by `train_on`. Leaving it as a context manager calls `stop()`.

    Attributes:
        mesh: the mesh of models and batches.
        lazy: the deferred operations, with `num_executables`, `retraces` and `program`.
    """

    def __init__(self, layouts: Layouts, operations: Lazy) -> None:
        self.mesh: Mesh = layouts.mesh
        self.lazy = operations
        self._undo = ExitStack()
        with ExitStack() as undo:
            _active.append(self)
            undo.callback(_active.remove, self)
            undo.callback(_forget_states)
            replace_all(undo, layouts)
            undo.enter_context(operations)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Run pending operations and restore Accelerate and the Trainer."""
        self._undo.close()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def replace_all(undo: ExitStack, layouts: Layouts) -> None:
    """Replace what they do for a device by our functions, until `undo` is closed."""
    from spmd.huggingface import _accelerate

    undo.enter_context(_accelerate.placing(layouts))
    if find_spec("transformers") is not None:
        from spmd.huggingface import _from_pretrained, _trainer

        undo.enter_context(_trainer.placing(layouts))
        undo.enter_context(_from_pretrained.placing(layouts))


def train_on(
    mesh: Any,
    rules: RulesLike = "fsdp",
    *,
    batch: str | Sequence[str] | None = None,
    strict: bool = True,
    max_programs: int = 32,
    max_retraces: int = 16,
) -> Training:
    """Make Accelerate's `prepare` and the Trainer train over `mesh` from now on. Call it before either is created.

    A model is laid out by `rules` when it is prepared, a batch of their loaders is split along dim 0, and the operations of this
    thread run one step at a time (`spmd.lazy`). To both libraries this is one process, whatever the number of its devices: a loader's
    batch size and `per_device_train_batch_size` are the size of the global batch, and `num_processes` is 1. The training lasts until
    it is stopped; a program need not keep the result.

    Args:
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`.
        rules: rules for `spmd.shard_module`.
        batch: the axis or axes that split a batch; default: all axes except those with the name of a model, expert, sequence or
            pipeline axis.
        strict: as for `spmd.shard_module`.
        max_programs, max_retraces: as for `spmd.lazy`.

    Returns:
        The training: `lazy` describes what was compiled, `stop()` ends it. As a context manager it ends with its block.

    Raises:
        SpmdError: accelerate is not installed, an `Accelerator` already exists, torch_xla's names are installed, the job has several
            processes, another `train_on` is active, or the mesh has no such axis.
    """
    _require_room()
    return Training(Layouts(as_mesh(mesh), rules, batch, strict), lazy(max_programs=max_programs, max_retraces=max_retraces))


def _require_room() -> None:
    if find_spec("accelerate") is None:
        raise SpmdError(message("spmd.huggingface needs accelerate", fix="pip install 'spmd-mesh[hf]'"))
    if "torch_xla" in sys.modules:
        what = "torch_xla's names are installed, and the Trainer finds its devices by them"
        raise SpmdError(message(what, fix="spmd.compat.torch_xla.uninstall(), or TrainingArguments(fsdp_config={'xla': True, ...})"))
    processes = current_gang().size
    if processes > 1:
        what = f"train_on needs a job of one process, but this one has {processes}"
        raise SpmdError(message(what, "Accelerate would split the data among the processes", fix="compile the step: spmd.compile"))
    from accelerate.state import PartialState

    if PartialState._shared_state:
        what = f"Accelerate already has a device: {PartialState().device}"
        why = "an Accelerator, a TrainingArguments or another train_on was created before"
        raise SpmdError(message(what, why, fix="call train_on first; training.stop() ends another training"))
    if _active:
        what = f"another train_on is active, over {_active[0].mesh}"
        raise SpmdError(message(what, fix="keep its result, training = train_on(...), and call training.stop() before the next"))


def _forget_states() -> None:
    """Reset Accelerate's global states, so that the next Accelerator creates them again."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


__all__ = ["Training", "train_on"]
