"""Every object of another package that this one replaces: its name, why, for how long, and the parameters that it should have.

    replace("torch.nn.functional.embedding_bag", embedding_bag)                   # while the process lives
    with replaced("torch.compiler.is_compiling", is_compiling):                   # inside the block
        ...

Nothing is replaced in another way: a target that is not listed is refused, and so is one that this torch does not have. What is
replaced inside a block is replaced for the whole process, so functions are traced on one thread at a time.

Two things are not replaced but extended by torch's own means: `copyreg` and `torch.serialization` know how tensors of the
device are stored (`device/_serialize`), and `transformers::grouped_mm_fallback` has kernels of ours (`device/_experts`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from types import FunctionType
from typing import Any

from spmd.base._torch import missing, torch_at_least


@dataclass(frozen=True)
class Patch:
    """One object that is replaced.

    Attributes:
        target: its dotted name.
        why: what would go wrong otherwise.
        file: the file that replaces it.
        undone_by: after what it is as before: a context or function of ours; empty if it stays while the process lives.
        parameters: names of its parameters, as `inspect.signature` has them; None for functions of C++ and for values.
        since: the first version of torch that has it.
        until: the first version of torch in which it is not replaced any more.
    """

    target: str
    why: str
    file: str
    undone_by: str = ""
    parameters: str | None = None
    since: str = "0"
    until: str = "999"

    @property
    def is_expected(self) -> bool:
        """Whether it is replaced in this version of torch, and so has to be there."""
        return torch_at_least(self.since) and not torch_at_least(self.until)


_ADDRESSES, _DLPACK, _DEVICE_NAMES = "spmd/device/_addresses.py", "spmd/device/_dlpack.py", "spmd/compat/torch_xla/_device_names.py"
_STORAGE_BYTES = "spmd/device/_storage_bytes.py"
_CONTROL_FLOW, _REMAT = "spmd/program/flow/_control_flow.py", "spmd/program/flow/_remat.py"
_PREPARATION, _TRACEABLE = "spmd/program/optim/_preparation.py", "spmd.program.optim._preparation.traceable"
_SIZE_READS, _SIZES_READ = "spmd/program/sizes/_size_reads.py", "spmd.program.sizes._size_reads.sizes_read"
_RECOMPUTE = "spmd.program.flow._remat.barrier_on_recompute"
_CONSTRAINTS, _WITHOUT_BRANCHES = "spmd/patches/_constraints.py", "spmd.patches._constraints.without_branches"
_UNINSTALL = "spmd.compat.torch_xla.uninstall"
_TRAIN_ON, _ACCELERATE, _TRAINER = "spmd.huggingface.train_on", "spmd/huggingface/_accelerate.py", "spmd/huggingface/_trainer.py"
_LOADED = "spmd/huggingface/_from_pretrained.py"
_BAGS = (
    "input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx"
)
_WORDS, _STYLE = "spmd/compat/torch_distributed/_dispatch.py", "self, module, device_mesh"
_BORDER_STYLES = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
_DLPACK_PARAMETERS = "self, stream, max_version, dl_device, copy"
_FRAME = "self, recompute_fn, early_stop, unpack_error_cb, metadata_fn"

PATCHES: tuple[Patch, ...] = (
    # programs
    Patch(
        "jax._src.compilation_cache.get_file_cache",
        "compiled programs are kept in files that are checked, limited and one user's, in the folders of ours",
        "spmd/base/_program_files.py",
        parameters="path",
    ),
    # modules and functions
    Patch(
        "torch.nn.Module._apply",
        "a module that moves keeps its parameter objects, as between CPU and CUDA, and shows their layouts",
        "spmd/patches/_module_apply.py",
        parameters="self, fn, recurse",
    ),
    Patch(
        "torch.nn.Parameter.__new__",
        "a parameter made of a marked one is marked alike; torch asks its `detach` for a parameter, which it is not",
        "spmd/patches/_parameter.py",
        parameters="cls, data, requires_grad",
    ),
    Patch(
        "torch.nn.functional.embedding_bag",
        "bags of one size keep their batch dim, along which they are split",
        "spmd/patches/_embedding_bag.py",
        parameters=_BAGS,
    ),
    Patch(
        "torch.optim.swa_utils.AveragedModel.update_parameters",
        "the count of a running average stays on the device",
        "spmd/patches/_running_averages.py",
        "spmd.patches._running_averages.counting_on_device",
        "self, model",
    ),
    Patch(
        "torch.nn.modules.batchnorm._BatchNorm.forward",
        "so does that of a cumulative batch norm",
        "spmd/patches/_running_averages.py",
        "spmd.patches._running_averages.counting_on_device",
        "self, input",
    ),
    Patch(
        "torch.compiler.is_compiling",
        "libraries ask before they look at values, which a trace does not have",
        "spmd/program/trace/_module_calls.py",
        "spmd.program.trace._module_calls.report_compiling",
        "",
    ),
    Patch(
        "torch.distributions.constraints._PositiveDefinite.check",
        "it branches on whether a matrix is symmetric",
        _CONSTRAINTS,
        _WITHOUT_BRANCHES,
        "self, value",
    ),
    Patch("torch.distributions.constraints._PositiveSemidefinite.check", "the same", _CONSTRAINTS, _WITHOUT_BRANCHES, "self, value"),
    # optimizers
    Patch(
        "torch.optim.optimizer._foreach_supported_types",
        "marked parameters are updated in foreach form too: a tenth of the calls",
        "spmd/device/_backend.py",
    ),
    Patch("torch.utils._foreach_utils._foreach_supported_types", "the same", "spmd/device/_backend.py"),
    Patch(
        "torch.optim._adafactor.min",
        "of a number on the device without a branch",
        _PREPARATION,
        "spmd.program.optim._preparation.traceable",
    ),
    Patch("torch.optim._adafactor.max", "the same", _PREPARATION, _TRACEABLE),
    Patch("torch.optim.radam.radam", "counts in 64 bits where it does not branch on them", _PREPARATION, _TRACEABLE),
    *(
        Patch(
            f"torch._fused_{name}_",
            "learning rates stay inputs of the program: C++ wants numbers that the host knows",
            "spmd/device/_fused_steps.py",
            "spmd.device._fused_steps.called_directly",
        )
        for name in ("sgd", "adam", "adamw", "adagrad")
    ),
    Patch(
        "torch.amp.grad_scaler.GradScaler._lazy_init_scale_growth_tracker",
        "the scale is made before the trace, not by it: it is state",
        "spmd/patches/_grad_scaler.py",
        "spmd.patches._grad_scaler.scale_of_before",
        "self, dev",
    ),
    Patch(
        "torch.amp.grad_scaler.GradScaler._maybe_opt_step",
        "it branches on values, and says what does not",
        "spmd/patches/_grad_scaler.py",
        "spmd.patches._grad_scaler.scale_of_before",
        "self, optimizer, optimizer_state, args, kwargs",
    ),
    # random numbers
    Patch(
        "torch._opaque_base.OpaqueBaseMeta.__call__",
        "C++ makes no generator for a device written in Python: torch.Generator(device='jax') makes one of ours",
        "spmd/device/_backend.py",
        parameters="self, args, kwargs",
        since="2.13",
        until="2.14",
    ),
    Patch(
        "torch._custom_class_base.CustomClassBaseMeta.__call__",
        "the same: it was renamed",
        "spmd/device/_backend.py",
        parameters="self, args, kwargs",
        since="2.14",
    ),
    # storages, which have no memory
    Patch("torch.UntypedStorage.clone", "copies the array", "spmd/device/_serialize.py", parameters="self"),
    Patch("torch.UntypedStorage.data_ptr", "tells storages apart, by a number of their own", _ADDRESSES),
    Patch("torch.UntypedStorage.nbytes", "is the size of the array", _ADDRESSES),
    Patch("torch.UntypedStorage.size", "the same", _ADDRESSES, parameters="self"),
    Patch("torch.UntypedStorage.__len__", "the same", _ADDRESSES, parameters="self"),
    Patch("torch.UntypedStorage.cpu", "copies the bytes to the host", _ADDRESSES, parameters="self"),
    Patch("torch.UntypedStorage.is_shared", "is false: no other process can read it", _ADDRESSES),
    Patch("torch.UntypedStorage.__new__", "makes an array", _STORAGE_BYTES),
    *(
        Patch(f"torch.UntypedStorage.{name}", f"{does}, where C++ would read memory", _STORAGE_BYTES, parameters=parameters)
        for name, does, parameters in (
            ("__getitem__", "reads the array", None),
            ("__setitem__", "writes it", None),
            ("fill_", "the same", None),
            ("copy_", "the same", None),
            ("_byteswap", "the same", None),
        )
    ),
    Patch("torch.UntypedStorage.share_memory_", "is refused", _ADDRESSES, parameters="self, args, kwargs"),
    Patch("torch.UntypedStorage._share_fd_cpu_", "is refused: this is how a queue shares", _ADDRESSES, parameters="self, args, kwargs"),
    Patch("torch.UntypedStorage._share_filename_cpu_", "is refused: so is this", _ADDRESSES, parameters="self, args, kwargs"),
    Patch("torch.Tensor.data_ptr", "is that of the storage plus an offset", _ADDRESSES),
    Patch("torch.Tensor.__dlpack__", "hands out a copy on the host", _DLPACK, parameters=_DLPACK_PARAMETERS, until="2.14"),
    Patch("torch.Tensor.__dlpack__", "the same", _DLPACK, parameters=f"{_DLPACK_PARAMETERS}, read_only", since="2.14"),
    Patch("torch.Tensor.__dlpack_device__", "is the copy's device", _DLPACK, parameters="self"),
    Patch("torch.to_dlpack", "hands out a copy on the host", _DLPACK),
    Patch("torch.utils.dlpack.to_dlpack", "the same", _DLPACK),
    Patch("torch._C._to_dlpack", "the same", _DLPACK),
    Patch("torch._C._to_dlpack_versioned", "the same", _DLPACK),
    # autograd
    Patch(
        "torch.autograd.Variable._execution_engine",
        "an exception in a gradient hook comes out where backward was called",
        "spmd/device/_engine.py",
    ),
    Patch(
        "torch.utils.checkpoint._CheckpointFrame.__init__",
        "a module recomputes under the precision that it had the first time",
        "spmd/sharding/_precision.py",
        parameters=_FRAME,
    ),
    Patch("torch.utils.checkpoint._CheckpointFrame.__init__", "a recomputation draws the same numbers again", _REMAT, _RECOMPUTE),
    Patch("torch.utils.checkpoint.detach_variable", "XLA would merge it with the first computation", _REMAT, _RECOMPUTE, "inputs"),
    Patch("torch.utils.checkpoint._CheckpointFrame.get_inputs", "the same", _REMAT, _RECOMPUTE, "self", since="2.12"),
    Patch("torch.utils.checkpoint._NoopSaveInputs.setup_context", "the same", _REMAT, _RECOMPUTE, "ctx, inputs, output", until="2.12"),
    Patch(
        "torch.accelerator.synchronize",
        "C++ knows no streams of a device written in Python",
        "spmd/device/_backend.py",
        parameters="device",
    ),
    Patch(
        "torch.accelerator.set_device_index",
        "C++ takes any index for such a device",
        "spmd/device/_backend.py",
        parameters="device",
    ),
    *(
        Patch(
            f"torch.accelerator.memory.{name}",
            "C++ knows no allocator of such a device: it ends in an internal assertion, or with the process",
            "spmd/device/_memory_statistics.py",
            parameters="device_index",
        )
        for name in (
            *("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
            *("get_memory_info", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
        )
    ),
    Patch("torch.accelerator.memory.empty_cache", "the same", "spmd/device/_memory_statistics.py", parameters=""),
    Patch("torch.accelerator.memory.empty_host_cache", "the same", "spmd/device/_memory_statistics.py", parameters="", since="2.12"),
    Patch(
        "torch._TorchCompileInductorWrapper.__call__",
        "inductor writes no code for the device: it says what to use",
        "spmd/patches/_refused_ways.py",
    ),
    Patch(
        "torch._dynamo.eval_frame.OptimizeContext.__call__",
        "Dynamo makes several graphs of a training step: with our backend it is one program",
        "spmd/dynamo/_whole_step.py",
        parameters="self, fn",
    ),
    Patch(
        "torch.nn.parallel.DataParallel.__init__",
        "one device has nothing to split a batch over: it says what to use",
        "spmd/patches/_refused_ways.py",
        parameters="self, module, device_ids, output_device, dim",
    ),
    # control flow, which torch hands to Dynamo; replaced in every module of torch._higher_order_ops that has the function
    Patch(
        "torch._higher_order_ops.utils._hop_compile_and_call",
        "operators on the device go straight to their kernels",
        _CONTROL_FLOW,
        parameters="fn, args, kwargs",
        since="2.12",
    ),
    Patch("torch._higher_order_ops.utils._maybe_compile_and_run_fn", "the same", _CONTROL_FLOW, parameters="fn, args"),
    Patch("torch._higher_order_ops.cond.torch", "the same: there they call `torch.compile` themselves", _CONTROL_FLOW, until="2.12"),
    Patch("torch._higher_order_ops.while_loop.torch", "the same", _CONTROL_FLOW, until="2.12"),
    Patch(
        "torch._higher_order_ops.associative_scan.associative_scan",
        "its default mode exists for two devices only",
        _CONTROL_FLOW,
        parameters="combine_fn, xs, dim, reverse, combine_mode",
    ),
    *(
        Patch(f"torch.SymFloat.__{form}{name}__", "a number of the device beside an int stays an int", "spmd/device/_number_arithmetic.py")
        for form, names in {
            "": ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min"),
            "r": ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
        }.items()
        for name in names
    ),
    # torch's distributed words, on meshes of device type "jax"
    Patch(
        "torch.distributed.device_mesh.DeviceMesh.__init__",
        "a mesh of this process's devices needs no process for each",
        "spmd/compat/torch_distributed/_dispatch.py",
    ),
    *(
        Patch(target, "one program's tensors are whole: they are marked, and no rank has a piece", _WORDS, parameters=parameters)
        for target, parameters in (
            ("torch.distributed.tensor.distribute_tensor", "tensor, device_mesh, placements, src_data_rank"),
            ("torch.distributed.tensor.distribute_module", "module, device_mesh, partition_fn, input_fn, output_fn"),
            ("torch.distributed.tensor._api._dtensor_init_helper", "init_op, size, device_mesh, placements, kwargs"),
            ("torch.distributed.tensor.DTensor.from_local", None),
            ("torch.distributed.fsdp.fully_shard.__wrapped__", None),
            ("torch.distributed.fsdp.FullyShardedDataParallel.__init__", None),
            ("torch.nn.parallel.DistributedDataParallel.__new__", None),
        )
    ),
    *(
        Patch(f"torch.distributed.tensor.parallel.{name}._apply", "the same: the style says a layout", _WORDS, parameters=_STYLE)
        for name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel", *_BORDER_STYLES)
    ),
    # sizes that vary
    *(
        Patch(f"torch.Tensor.{name}", "what Python asks of a size decides for which sizes a trace holds", _SIZE_READS, _SIZES_READ)
        for name in ("shape", "nbytes", "size", "numel", "nelement", "stride", "storage_offset", "__len__")
    ),
    # device "xla" in programs written for torch_xla, while its names are installed
    Patch("threading.Thread.run", "the mode that translates devices is one thread's", _DEVICE_NAMES, _UNINSTALL, "self"),
    Patch("torch.autograd._engine_run_backward", "the mode is on in backward too", _DEVICE_NAMES, _UNINSTALL, "t_outputs, args, kwargs"),
    Patch("torch.autograd.graph._engine_run_backward", "the same", _DEVICE_NAMES, _UNINSTALL, "t_outputs, args, kwargs"),
    Patch("torch.utils._device.DeviceContext.__init__", 'with torch.device("xla")', _DEVICE_NAMES, _UNINSTALL, "self, device"),
    Patch(
        "torch.amp.autocast_mode.autocast.__init__",
        'torch.autocast("xla")',
        _DEVICE_NAMES,
        _UNINSTALL,
        "self, device_type, dtype, enabled, cache_enabled",
    ),
    Patch("torch.get_default_device", 'the device "xla" is the one that was set', _DEVICE_NAMES, _UNINSTALL, ""),
    # transformers
    Patch(
        "transformers.generation.utils.GenerationMixin.generate",
        "a model on the device generates by programs",
        "spmd/huggingface/_generate.py",
    ),
    # Accelerate and the Trainer, while `train_on` is on
    Patch("accelerate.state.PartialState.default_device", "it has no registry of devices", _ACCELERATE, _TRAIN_ON),
    Patch(
        "accelerate.accelerator.Accelerator.prepare_model",
        "a model is laid out before it moves to the devices",
        _ACCELERATE,
        _TRAIN_ON,
        "self, model, device_placement, evaluation_mode",
    ),
    Patch(
        "accelerate.data_loader.send_to_device",
        "each device gets its part of a batch, and a step ends before the next",
        _ACCELERATE,
        _TRAIN_ON,
        "tensor, device, non_blocking, skip_keys",
    ),
    Patch(
        "transformers.modeling_utils.check_and_set_device_map",
        '"auto" looks for CUDA\'s devices and those it names, and takes the CPU',
        _LOADED,
        _TRAIN_ON,
        "device_map",
    ),
    Patch("transformers.modeling_utils.PreTrainedModel.from_pretrained", "a model that is loaded is laid out", _LOADED, _TRAIN_ON),
    Patch("transformers.training_args.is_torch_bf16_gpu_available", "it knows CUDA's devices and those it names", _TRAINER, _TRAIN_ON, ""),
    Patch("transformers.training_args.TrainingArguments._setup_devices", "the Trainer looks for devices itself", _TRAINER, _TRAIN_ON),
    *(
        Patch(f"transformers.trainer.Trainer.{name}", why, _TRAINER, _TRAIN_ON, parameters)
        for name, why, parameters in (
            ("_move_model_to_device", "a model is laid out before it moves to the devices", "self, model, device"),
            ("_prepare_inputs", "each device gets its part of a batch that Accelerate has not sent", "self, inputs"),
            ("training_step", "the filter of NaN would read every loss in the middle of a step", "self, model, inputs, num_items_in_batch"),
            ("floating_point_ops", "the same: it is what comes after the filter", "self, inputs"),
            ("_save_rng_state", "the device's random state is saved with the others", "self, output_dir"),
            ("_load_rng_state", "and is there again", "self, checkpoint"),
        )
    ),
)
_ABSENT = object()


def owner_of(target: str) -> tuple[Any, str]:
    """The object on which the target is an attribute, and the attribute.

    Raises:
        ImportError: this torch does not have it.
    """
    *path, name = target.split(".")
    loaded = max(i for i in range(1, len(path) + 1) if ".".join(path[:i]) in sys.modules)
    owner: Any = sys.modules[".".join(path[:loaded])]
    for part in path[loaded:]:
        owner = getattr(owner, part, _ABSENT)
        if owner is _ABSENT:
            raise missing(target)
    return owner, name


def current(target: str) -> Any:
    """What stands at the target now.

    Raises:
        ImportError: this torch does not have it.
    """
    owner, name = owner_of(target)
    found = getattr(owner, name, _ABSENT)
    if found is _ABSENT:
        raise missing(target)
    return found


def is_expected(target: str) -> bool:
    """Whether a target that goes by several names in several versions of torch goes by this one in this version."""
    return any(patch.target == target and patch.is_expected for patch in PATCHES)


def replace(target: str, by: Any) -> Any:
    """Put `by` at a target while the process lives; returns what stood there."""
    assert any(patch.target == target for patch in PATCHES), f"{target} is not listed in spmd/patches/_table.py"
    before = current(target)
    owner, name = owner_of(target)
    setattr(owner, name, by)
    return before


def replace_code(target: str, by: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of theirs run the code of `by` while the process lives; returns a function that does what it did.

    Programs import the function itself, and often before this package: it stays the object that it is. `by` finds the names of
    their module, so it imports what it needs.
    """
    assert any(patch.target == target for patch in PATCHES), f"{target} is not listed in spmd/patches/_table.py"
    theirs = current(target)
    before = FunctionType(theirs.__code__, theirs.__globals__, theirs.__name__, theirs.__defaults__, theirs.__closure__)
    before.__kwdefaults__ = theirs.__kwdefaults__
    theirs.__signature__ = signature(theirs)
    theirs.__code__ = by.__code__
    return before


def replace_everywhere(target: str, by: Any, package: str) -> None:
    """`replace`, also in every loaded module of a package that imported the same object by its name."""
    before, name = replace(target, by), target.rpartition(".")[2]
    for module in [m for n, m in sys.modules.items() if n.startswith(package) and vars(m).get(name) is before]:
        setattr(module, name, by)


@contextmanager
def replaced(target: str, by: Any) -> Generator[None]:
    """While active, `by` stands at a target; afterwards what stood there, or nothing."""
    assert any(patch.target == target for patch in PATCHES), f"{target} is not listed in spmd/patches/_table.py"
    owner, name = owner_of(target)
    before = vars(owner).get(name, _ABSENT)  # as it is stored: a static method too
    setattr(owner, name, by)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


__all__ = ["PATCHES", "Patch", "current", "owner_of", "replace", "replace_code", "replace_everywhere", "replaced"]
