"""`train_on`: what Accelerate and the Trainer find as their device is a mesh, from the call on.

    training = train_on(spmd.Mesh(range(8), (4, 2), ("data", "model")), rules="megatron")
    Trainer(model, args, train_dataset=data).train()
    training.lazy.num_executables
    training.stop()                  # from here on they find what they would have found without it

It knows nothing of what they do in a step: that is in `_accelerate` and `_trainer`.
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


class Training:
    """Made by `train_on`; leaving it as a context is `stop()`.

    Attributes:
        mesh: where models and batches lie.
        lazy: the operations that wait: `num_executables`, `retraces`, `program`.
    """

    def __init__(self, layouts: Layouts, operations: Lazy) -> None:
        self.mesh: Mesh = layouts.mesh
        self.lazy = operations
        self._undo = ExitStack()
        with ExitStack() as undo:
            undo.callback(_forget_states)
            replace_all(undo, layouts)
            undo.enter_context(operations)
            self._undo = undo.pop_all()

    def stop(self) -> None:
        """Run what waits; Accelerate and the Trainer are as they were."""
        self._undo.close()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


def replace_all(undo: ExitStack, layouts: Layouts) -> None:
    """Put ours in the place of what they do for a device, until `undo` is closed."""
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
    """Accelerate's `prepare` and the Trainer train over `mesh`, from here on: call it before either is made.

    A model is laid out by `rules` when it is prepared, a batch of their loaders is split along dim 0, and the operations of this
    thread run a step at a time (`spmd.lazy`). This process is one of theirs, whatever the number of its devices: a loader's batch size, and
    `per_device_train_batch_size`, are of the global batch, and `num_processes` is 1.

    Args:
        mesh: a `mesh.Mesh`, a `jax.sharding.Mesh` or a torch `DeviceMesh`.
        rules: what `spmd.shard_module` takes.
        batch: the axis or axes that split a batch; default: all that are not named as those of a model, of experts, of the
            sequence or of a pipeline are.
        strict: of `spmd.shard_module`.
        max_programs, max_retraces: of `spmd.lazy`.

    Returns:
        The training: its `lazy` says what was compiled, `stop()` ends it; as a context it ends with its block.

    Raises:
        SpmdError: accelerate is not installed, an `Accelerator` was made before, torch_xla's names are installed, the job has several
            processes, `train_on` was called before, or the mesh has no such axis.
    """
    _require_room()
    return Training(Layouts(as_mesh(mesh), rules, batch, strict), lazy(max_programs=max_programs, max_retraces=max_retraces))


def _require_room() -> None:
    if find_spec("accelerate") is None:
        raise SpmdError(message("spmd.huggingface needs accelerate", fix="pip install 'spmd-mesh[hf]'"))
    if "torch_xla" in sys.modules:
        what = "torch_xla's names are installed, by which the Trainer finds its devices itself"
        raise SpmdError(message(what, fix="spmd.compat.torch_xla.uninstall(), or TrainingArguments(fsdp_config={'xla': True, ...})"))
    processes = current_gang().size
    if processes > 1:
        what = f"train_on works in a job of one process, this one has {processes}"
        raise SpmdError(message(what, "Accelerate would split the data among them", fix="compile the step: spmd.compile"))
    from accelerate.state import PartialState

    if PartialState._shared_state:
        what = f"Accelerate has its device already: {PartialState().device}"
        why = "an Accelerator, a TrainingArguments or another train_on was made before"
        raise SpmdError(message(what, why, fix="call train_on first; training.stop() ends another"))


def _forget_states() -> None:
    """Accelerate's states are one of each for the process: the next Accelerator makes them anew."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


__all__ = ["Training", "train_on"]
