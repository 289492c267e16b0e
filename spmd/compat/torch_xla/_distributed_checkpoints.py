"""`torch_xla.experimental.distributed_checkpoint`'s `CheckpointManager` and `prime_optimizer`, over torch's distributed checkpoints.

    manager = CheckpointManager("gs://bucket/run", save_interval=100)
    if manager.save_async(step, state): ...                 # in every step
    manager.restore(max(manager.all_steps()), state)        # in place; `prime_optimizer` first

`spmd.checkpoint` is this package's own format: it saves in the background without a copy on the host, and verifies what it reads.
"""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from spmd.base._errors import CheckpointError, message
from spmd.base._torch_late import fsspec_filesystem
from spmd.compat.torch_xla import _preemption_sync
from spmd.compat.torch_xla._distributed_planners import SPMDLoadPlanner, SPMDSavePlanner, _sharded_cpu_state_dict
from spmd.compat.torch_xla._step_ends import mark_step

_METADATA = ".manager_metadata"


@dataclass
class _Saved:
    """A checkpoint's step and time."""

    step: int
    ts: datetime


class CheckpointManager:
    """Checkpoints by step in one folder, on any file system of fsspec.

    Args:
        path: the folder.
        save_interval: number of steps between two checkpoints.
        max_to_keep: number of checkpoints to keep, deleting the oldest; 0 keeps all.
        max_pending_async: maximum number of pending saves; `save_async` waits for a free place.
        num_of_threads: number of writer threads.
        process_group: None: a new group of all processes. The default process group must exist.
        chkpt_on_preemption: SIGTERM requests a checkpoint at the next step instead of ending the process.

    Raises:
        CheckpointError: there is no process group, or a number is out of range.
    """

    def __init__(
        self,
        path: str,
        save_interval: int,
        max_to_keep: int = 0,
        max_pending_async: int = 1,
        num_of_threads: int = 1,
        process_group: Any = None,
        chkpt_on_preemption: bool = True,
    ) -> None:
        if not dist.is_initialized():
            fix = "torch.distributed.init_process_group('gloo', init_method='xla://')"
            raise CheckpointError(message("CheckpointManager needs a process group", fix=fix))
        if save_interval < 1 or max_pending_async < 1 or max_to_keep < 0:
            given = f"save_interval={save_interval}, max_pending_async={max_pending_async}, max_to_keep={max_to_keep}"
            raise CheckpointError(
                message(f"CheckpointManager got invalid options: {given}", fix="use save_interval and max_pending_async of 1 or more")
            )
        self.base_path = os.path.join(path, "")
        self.save_interval, self.max_to_keep = save_interval, max_to_keep
        self.num_of_threads, self.chkpt_on_preemption = num_of_threads, chkpt_on_preemption
        self.pg: Any = process_group or dist.new_group()
        self._pool = ThreadPoolExecutor(1, "torch_xla.CheckpointManager")
        self._places = threading.Semaphore(max_pending_async)
        self._futures: list[Future[None]] = []
        self._one_writer = threading.Lock()
        self._tracked = self._found()
        if chkpt_on_preemption:
            _preemption_sync.activate()

    def _found(self) -> list[_Saved]:
        """The checkpoints in the folder, oldest first."""
        fs, root = _file_system(self.base_path)
        fs.makedirs(root, exist_ok=True)
        found: list[_Saved] = []
        for folder in fs.ls(root, detail=False):
            try:
                with fs.open(os.path.join(folder, _METADATA), "rb") as stream:
                    found.append(pickle.load(stream))
            except (OSError, pickle.UnpicklingError, EOFError):
                warnings.warn(f"{folder} is not a complete checkpoint and is ignored", stacklevel=3)
        return sorted(found, key=lambda saved: saved.ts)

    def should_save(self, step: int) -> bool:
        """Whether this step is a multiple of the interval, or the process was asked to stop."""
        return step % self.save_interval == 0 or (self.chkpt_on_preemption and self.reached_preemption(step))

    def save(self, step: int, state_dict: Any, force: bool = False) -> bool:
        """Write the state if `should_save(step)` or `force`. Returns whether it was written."""
        if not (force or self.should_save(step)):
            return False
        mark_step(wait=True)
        self._save(step, state_dict)
        return True

    def save_async(self, step: int, state_dict: Any, force: bool = False) -> bool:
        """Like `save`, from a copy of the state on the host in another thread. `join` waits, and raises errors of the thread."""
        if not (force or self.should_save(step)):
            return False
        mark_step(wait=True)
        on_host = _sharded_cpu_state_dict(state_dict)
        self._places.acquire()
        future = self._pool.submit(self._save, step, on_host)
        future.add_done_callback(lambda _: self._places.release())
        self._futures.append(future)
        return True

    def _save(self, step: int, state_dict: Any) -> None:
        with self._one_writer:
            path = os.path.join(self.base_path, str(step))
            self._remove(step)
            writer = fsspec_filesystem().FsspecWriter(path, thread_count=self.num_of_threads, per_thread_copy_ahead=0)
            save_state(state_dict, storage_writer=writer, planner=SPMDSavePlanner(), process_group=self.pg)
            saved = _Saved(step, datetime.now())
            self._tracked = [*(old for old in self._tracked if old.step != step), saved]
            fs, root = _file_system(path)
            if dist.get_rank(self.pg) == 0:
                with fs.open(os.path.join(root, _METADATA), "wb") as stream:
                    pickle.dump(saved, stream)
            while self.max_to_keep and len(self._tracked) > self.max_to_keep:
                self._remove(self._tracked.pop(0).step)

    def _remove(self, step: int) -> None:
        fs, folder = _file_system(os.path.join(self.base_path, str(step)))
        if dist.get_rank(self.pg) == 0 and fs.exists(folder):
            fs.rm(folder, recursive=True)

    def restore(self, step: int, state_dict: Any) -> None:
        """Load a tracked step into the state; tensors are loaded in place.

        Raises:
            CheckpointError: the step is not tracked.
        """
        if step not in self.all_steps():
            raise CheckpointError(message(f"step {step} is not tracked", f"tracked: {self.all_steps()}", fix="restore one of these"))
        reader = fsspec_filesystem().FsspecReader(os.path.join(self.base_path, str(step)))
        load_state(state_dict, storage_reader=reader, planner=SPMDLoadPlanner(), process_group=self.pg)

    def all_steps(self) -> list[int]:
        """The tracked steps in order."""
        return sorted(saved.step for saved in self._tracked)

    def join(self) -> None:
        """Wait for pending saves of `save_async`."""
        pending, self._futures = self._futures, []
        wait(pending)
        for future in pending:
            future.result()

    def reached_preemption(self, step: int) -> bool:
        """Whether the process was asked to stop.

        Raises:
            CheckpointError: `chkpt_on_preemption` is False.
        """
        if not self.chkpt_on_preemption:
            raise CheckpointError(message("this CheckpointManager does not watch for preemption", fix="chkpt_on_preemption=True"))
        return _asked(step)


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Create an optimizer's state, as its first step would, by a step with zero gradients.

    Needed before a checkpoint is loaded into it in place. Parameters and gradients are restored afterwards, but a step counter has
    advanced by one.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    before = [(p, p.detach().clone(), p.grad) for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter.detach())
        optimizer.step()
    finally:
        with torch.no_grad():
            for parameter, value, grad in before:
                parameter.copy_(value)
                parameter.grad = grad
    return optimizer


def _asked(step: int) -> bool:
    """The query through the program's module, where tests may replace it."""
    import sys

    extension = sys.modules.get("torch_xla._XLAC")
    query: Callable[[int], bool] = getattr(extension, "_sync_point_reached", _preemption_sync.sync_point_reached)
    return query(step)


def _file_system(path: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    return url_to_fs(path)
