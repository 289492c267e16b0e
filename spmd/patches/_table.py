"""The table of all objects of other packages that this package replaces (monkey patches), with reasons.

    replace("torch.nn.functional.embedding_bag", embedding_bag)                   # until the process ends
    with replaced("torch.compiler.is_compiling", is_compiling):                   # inside the block
        ...

Nothing is replaced by other means. A target that is not listed is refused, and so is one that the installed torch does not have. A
replacement inside a block is visible to the whole process, so only one thread traces at a time.

Two things are extended through public registries and not replaced: `copyreg` and `torch.serialization` get reducers for tensors of
the device (`device/_serialize`), and the operator `transformers::grouped_mm_fallback` gets kernels (`device/_experts`).
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
        target: dotted name of the object.
        why: the reason, or what the replacement does.
        file: the file that replaces it.
        undone_by: the context manager or function at whose end the original is restored; empty if it stays replaced.
        parameters: expected parameter names by `inspect.signature`, separated by commas; None for C++ functions and for values.
        since: the first version of torch that has the object.
        until: the first version of torch in which it is not replaced.
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
        """Whether the object is replaced in the installed version of torch, which must therefore have it."""
        return torch_at_least(self.since) and not torch_at_least(self.until)


_ADDRESSES, _DLPACK, _DEVICE_NAMES = "spmd/device/_addresses.py", "spmd/device/_dlpack.py", "spmd/compat/torch_xla/_device_names.py"
_STORAGE_BYTES, _AVERAGES = "spmd/device/_storage_bytes.py", "spmd/patches/_running_averages.py"
_CONTROL_FLOW, _REMAT = "spmd/program/flow/_control_flow.py", "spmd/program/flow/_remat.py"
_PREPARATION, _TRACEABLE = "spmd/program/optim/_preparation.py", "spmd.program.optim._preparation.traceable"
_SIZE_READS, _SIZES_READ = "spmd/program/sizes/_size_reads.py", "spmd.program.sizes._size_reads.sizes_read"
_RECOMPUTE = "spmd.program.flow._remat.barrier_on_recompute"
_CONSTRAINTS, _WITHOUT_BRANCHES = "spmd/patches/_constraints.py", "spmd.patches._constraints.without_branches"
_TRAIN_ON, _ACCELERATE, _TRAINER = "spmd.huggingface.train_on", "spmd/huggingface/_accelerate.py", "spmd/huggingface/_trainer.py"
_UNINSTALL, _LOADED = "spmd.compat.torch_xla.uninstall", "spmd/huggingface/_from_pretrained.py"
_BAGS = (
    "input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights, include_last_offset, padding_idx"
)
_DISTRIBUTED, _STYLE = "spmd/compat/torch_distributed/_dispatch.py", "self, module, device_mesh"
_NUMBERS = "spmd/device/_number_arithmetic.py"
_BORDER_STYLES = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")
_DLPACK_PARAMETERS = "self, stream, max_version, dl_device, copy"
_FRAME = "self, recompute_fn, early_stop, unpack_error_cb, metadata_fn"

PATCHES: tuple[Patch, ...] = (
    # programs
    Patch(
        "jax._src.compilation_cache.get_file_cache",
        "compiled programs are cached in files with checksums and a size limit, in folders that only one user can write to",
        "spmd/base/_program_files.py",
        parameters="path",
    ),
    Patch(
        "jax._src.compilation_cache.put_executable_and_time",
        "programs for several CPU devices that could hang when they are read from a file are not cached",
        "spmd/base/_program_files.py",
        parameters="cache_key, module_name, executable, backend, compile_time",
    ),
    # modules and functions
    Patch(
        "torch.nn.Module._apply",
        "a move of a module keeps its Parameter objects, as between CPU and CUDA, and their shardings",
        "spmd/patches/_module_apply.py",
        parameters="self, fn, recurse",
    ),
    Patch(
        "torch.nn.Parameter.__new__",
        "a parameter created from a marked one has its sharding; torch would refuse it, as its `detach()` is a plain tensor",
        "spmd/patches/_parameter.py",
        parameters="cls, data, requires_grad",
    ),
    Patch(
        "torch.nn.Parameter.__deepcopy__",
        "a copy of a marked parameter of a user's own class is marked alike",
        "spmd/patches/_parameter.py",
        parameters="self, memo",
    ),
    Patch(
        "torch.nn.functional.embedding_bag",
        "bags of equal size keep their batch dim, which is sharded",
        "spmd/patches/_embedding_bag.py",
        parameters=_BAGS,
    ),
    Patch(
        "torch.optim.swa_utils.AveragedModel.update_parameters",
        "the count of a running average stays on the device",
        _AVERAGES,
        "spmd.patches._running_averages.counting_on_device",
        "self, model",
    ),
    Patch("torch.optim.swa_utils._get_foreach_kernels_supported_devices", "averages as on the CPU", _AVERAGES, parameters=""),
    Patch(
        "torch.nn.modules.batchnorm._BatchNorm.forward",
        "the count of a cumulative batch norm stays on the device",
        _AVERAGES,
        "spmd.patches._running_averages.counting_on_device",
        "self, input",
    ),
    Patch(
        "torch.compiler.is_compiling",
        "libraries check this before they read values of tensors, which a trace does not have",
        "spmd/program/trace/_module_calls.py",
        "spmd.program.trace._module_calls.report_compiling",
        "",
    ),
    Patch(
        "torch.distributions.constraints._PositiveDefinite.check",
        "the original branches on whether a matrix is symmetric",
        _CONSTRAINTS,
        _WITHOUT_BRANCHES,
        "self, value",
    ),
    Patch("torch.distributions.constraints._PositiveSemidefinite.check", "the same", _CONSTRAINTS, _WITHOUT_BRANCHES, "self, value"),
    Patch(
        "torch.nn.modules.transformer._detect_is_causal_mask",
        "the original branches on the values of a mask, to choose a faster kernel",
        "spmd/patches/_causal_masks.py",
        "spmd.patches._causal_masks.without_mask_reads",
        "mask, is_causal, size",
    ),
    Patch(
        "torch._tensor_str._str",
        "a tensor that is printed in a trace is refused as that, and not as an operation of torch's printing",
        "spmd/patches/_printed_tensors.py",
        "spmd.patches._printed_tensors.printing_refused_by_name",
        "self, tensor_contents",
    ),
    # optimizers
    Patch(
        "torch.optim.optimizer._foreach_supported_types",
        "the foreach form also updates marked parameters, with a tenth of the calls",
        "spmd/device/_backend.py",
    ),
    Patch("torch.utils._foreach_utils._foreach_supported_types", "the same", "spmd/device/_backend.py"),
    Patch("torch.optim._adafactor.min", "the minimum of a device number is computed without a branch", _PREPARATION, _TRACEABLE),
    Patch("torch.optim._adafactor.max", "the same", _PREPARATION, _TRACEABLE),
    Patch("torch.optim.rprop.rprop", "a 0-dim mask is a branch on its value", _PREPARATION, _TRACEABLE),
    Patch("torch.optim.radam.radam", "its branchless form loses precision with 32-bit step counts", _PREPARATION, _TRACEABLE),
    *(
        Patch(
            f"torch._fused_{name}_",
            "learning rates stay inputs of the program; the C++ function needs their values on the host",
            "spmd/device/_fused_steps.py",
            "spmd.device._fused_steps.called_directly",
        )
        for name in ("sgd", "adam", "adamw", "adagrad")
    ),
    Patch(
        "torch.amp.grad_scaler.GradScaler._lazy_init_scale_growth_tracker",
        "the scale is state, so it is created outside of the trace",
        "spmd/patches/_grad_scaler.py",
        "spmd.patches._grad_scaler.traceable_grad_scaler",
        "self, dev",
    ),
    Patch(
        "torch.amp.grad_scaler.GradScaler._maybe_opt_step",
        "the original branches on values; the error names a fused optimizer, which does not",
        "spmd/patches/_grad_scaler.py",
        "spmd.patches._grad_scaler.traceable_grad_scaler",
        "self, optimizer, optimizer_state, args, kwargs",
    ),
    Patch(
        "torch.amp.grad_scaler.GradScaler._check_scale_growth_tracker",
        "what `unscale_`, `step` and `update` write after it is put back where a trace fails",
        "spmd/patches/_grad_scaler.py",
        "spmd.patches._grad_scaler.traceable_grad_scaler",
        "self, funcname",
    ),
    # random numbers
    Patch(
        "torch._opaque_base.OpaqueBaseMeta.__call__",
        "C++ cannot create a generator for a device written in Python: torch.Generator(device='jax') returns this package's class",
        "spmd/device/_backend.py",
        parameters="self, args, kwargs",
        since="2.13",
        until="2.14",
    ),
    Patch(
        "torch._custom_class_base.CustomClassBaseMeta.__call__",
        "the same; torch renamed the class",
        "spmd/device/_backend.py",
        parameters="self, args, kwargs",
        since="2.14",
    ),
    # storages, which have no memory of their own
    Patch("torch.UntypedStorage.clone", "copies the array", "spmd/device/_serialize.py", parameters="self"),
    Patch("torch.UntypedStorage.data_ptr", "returns a unique number for each storage", _ADDRESSES),
    Patch("torch.UntypedStorage.nbytes", "returns the size of the array", _ADDRESSES),
    Patch("torch.UntypedStorage.size", "the same", _ADDRESSES, parameters="self"),
    Patch("torch.UntypedStorage.__len__", "the same", _ADDRESSES, parameters="self"),
    Patch("torch.UntypedStorage.cpu", "copies the bytes to the host", _ADDRESSES, parameters="self"),
    Patch("torch.UntypedStorage.is_shared", "returns False: no other process can read it", _ADDRESSES),
    Patch("torch.UntypedStorage.__new__", "creates an array", _STORAGE_BYTES),
    *(
        Patch(f"torch.UntypedStorage.{name}", f"{does}, where C++ would read memory", _STORAGE_BYTES, parameters=parameters)
        for name, does, parameters in (
            ("__getitem__", "reads the array", None),
            ("__setitem__", "writes the array", None),
            ("fill_", "writes the array", None),
            ("copy_", "writes the array", None),
            ("_byteswap", "writes the array", None),
        )
    ),
    Patch("torch.UntypedStorage.share_memory_", "raises an error", _ADDRESSES, parameters="self, args, kwargs"),
    Patch("torch.UntypedStorage._share_fd_cpu_", "raises an error; queues share by it", _ADDRESSES, parameters="self, args, kwargs"),
    Patch("torch.UntypedStorage._share_filename_cpu_", "the same", _ADDRESSES, parameters="self, args, kwargs"),
    Patch("torch.Tensor.data_ptr", "returns the number of the storage plus an offset", _ADDRESSES),
    Patch("torch.Tensor.__dlpack__", "exports a copy on the host", _DLPACK, parameters=_DLPACK_PARAMETERS, until="2.14"),
    Patch("torch.Tensor.__dlpack__", "the same", _DLPACK, parameters=f"{_DLPACK_PARAMETERS}, read_only", since="2.14"),
    Patch("torch.Tensor.__dlpack_device__", "returns the device of this copy", _DLPACK, parameters="self"),
    Patch("torch.to_dlpack", "exports a copy on the host", _DLPACK),
    Patch("torch.utils.dlpack.to_dlpack", "the same", _DLPACK),
    Patch("torch._C._to_dlpack", "the same", _DLPACK),
    Patch("torch._C._to_dlpack_versioned", "the same", _DLPACK),
    # autograd
    Patch(
        "torch.autograd.Variable._execution_engine",
        "an exception in a gradient hook is raised to the caller of backward",
        "spmd/device/_engine.py",
    ),
    Patch(
        "torch.utils.checkpoint._CheckpointFrame.__init__",
        "a module is recomputed with the precision of its first computation",
        "spmd/sharding/_precision.py",
        parameters=_FRAME,
    ),
    Patch("torch.utils.checkpoint._CheckpointFrame.__init__", "a recomputation draws the same random numbers", _REMAT, _RECOMPUTE),
    Patch("torch.utils.checkpoint.detach_variable", "XLA would merge both computations (CSE)", _REMAT, _RECOMPUTE, "inputs"),
    Patch("torch.utils.checkpoint._CheckpointFrame.get_inputs", "the same", _REMAT, _RECOMPUTE, "self", since="2.12"),
    Patch("torch.utils.checkpoint._NoopSaveInputs.setup_context", "the same", _REMAT, _RECOMPUTE, "ctx, inputs, output", until="2.12"),
    Patch(
        "torch.accelerator.synchronize",
        "C++ has no streams for a device written in Python",
        "spmd/device/_backend.py",
        parameters="device",
    ),
    Patch(
        "torch.accelerator.set_device_index",
        "C++ accepts any index for such a device",
        "spmd/device/_backend.py",
        parameters="device",
    ),
    *(
        Patch(
            f"torch.accelerator.memory.{name}",
            "C++ has no allocator for such a device: the original fails an internal assertion or aborts the process",
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
        'inductor generates no code for the device: backend "spmd" compiles its graphs',
        "spmd/patches/_unsupported_features.py",
    ),
    Patch(
        "torch._dynamo.eval_frame.OptimizeContext.__call__",
        'Dynamo splits a training step into several graphs; with backend "spmd" it is compiled to one program',
        "spmd/dynamo/_whole_step.py",
        parameters="self, fn",
    ),
    Patch(
        "torch.nn.parallel.DataParallel.__init__",
        "a batch cannot be split over one device: the error names what to use",
        "spmd/patches/_unsupported_features.py",
        parameters="self, module, device_ids, output_device, dim",
    ),
    # control flow, which torch compiles with Dynamo; replaced in every module of torch._higher_order_ops that imports the function
    Patch(
        "torch._higher_order_ops.utils._hop_compile_and_call",
        "operators on the device call their kernels directly",
        _CONTROL_FLOW,
        parameters="fn, args, kwargs",
        since="2.12",
    ),
    Patch("torch._higher_order_ops.utils._maybe_compile_and_run_fn", "the same", _CONTROL_FLOW, parameters="fn, args"),
    Patch("torch._higher_order_ops.cond.torch", "the same; these versions call `torch.compile` in it", _CONTROL_FLOW, until="2.12"),
    Patch("torch._higher_order_ops.while_loop.torch", "the same", _CONTROL_FLOW, until="2.12"),
    Patch(
        "torch._higher_order_ops.associative_scan.associative_scan",
        "its default mode supports only two device types",
        _CONTROL_FLOW,
        parameters="combine_fn, xs, dim, reverse, combine_mode",
    ),
    *(
        Patch(f"torch.SymFloat.__{form}{name}__", "arithmetic of an integer of the device and an int gives an integer", _NUMBERS)
        for form, names in {
            "": ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min"),
            "r": ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
        }.items()
        for name in names
    ),
    # functions of torch.distributed, on meshes of device type "jax"
    Patch(
        "torch.distributed.device_mesh.DeviceMesh.__init__",
        "a mesh of this process's devices needs no process per device",
        "spmd/compat/torch_distributed/_dispatch.py",
    ),
    *(
        Patch(target, "tensors of one program are global: they are marked, and no rank has a shard", _DISTRIBUTED, parameters=parameters)
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
        Patch(f"torch.distributed.tensor.parallel.{name}._apply", "the same; a style becomes a sharding", _DISTRIBUTED, parameters=_STYLE)
        for name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel", *_BORDER_STYLES)
    ),
    # sizes that vary
    *(
        Patch(f"torch.Tensor.{name}", "reads of sizes in Python determine the sizes for which a trace is valid", _SIZE_READS, _SIZES_READ)
        for name in ("shape", "nbytes", "size", "numel", "nelement", "stride", "storage_offset", "__len__")
    ),
    # device "xla" in programs written for torch_xla, while its names are installed
    Patch("threading.Thread.run", "the mode that translates devices is thread-local", _DEVICE_NAMES, _UNINSTALL, "self"),
    Patch(
        "torch.autograd._engine_run_backward", "the mode is active in backward too", _DEVICE_NAMES, _UNINSTALL, "t_outputs, args, kwargs"
    ),
    Patch("torch.autograd.graph._engine_run_backward", "the same", _DEVICE_NAMES, _UNINSTALL, "t_outputs, args, kwargs"),
    Patch("torch.utils._device.DeviceContext.__init__", 'for `with torch.device("xla")`', _DEVICE_NAMES, _UNINSTALL, "self, device"),
    Patch(
        "torch.amp.autocast_mode.autocast.__init__",
        'for `torch.autocast("xla")`',
        _DEVICE_NAMES,
        _UNINSTALL,
        "self, device_type, dtype, enabled, cache_enabled",
    ),
    Patch("torch.get_default_device", 'returns "xla" if that was set as the default', _DEVICE_NAMES, _UNINSTALL, ""),
    # transformers
    Patch(
        "transformers.generation.utils.GenerationMixin.generate",
        "a model on the device generates with compiled programs",
        "spmd/huggingface/_generate.py",
    ),
    # Accelerate and the Trainer, while `train_on` is active
    Patch("accelerate.state.PartialState.default_device", "Accelerate has no registry of devices", _ACCELERATE, _TRAIN_ON),
    Patch(
        "accelerate.accelerator.Accelerator.prepare_model",
        "a model is sharded before it moves to the devices",
        _ACCELERATE,
        _TRAIN_ON,
        "self, model, device_placement, evaluation_mode",
    ),
    Patch(
        "accelerate.data_loader.send_to_device",
        "a batch is sharded over the devices, and a step ends before the next one begins",
        _ACCELERATE,
        _TRAIN_ON,
        "tensor, device, non_blocking, skip_keys",
    ),
    Patch(
        "transformers.modeling_utils.check_and_set_device_map",
        '"auto" recognizes only CUDA and a fixed list of devices, and would choose the CPU',
        _LOADED,
        _TRAIN_ON,
        "device_map",
    ),
    Patch("transformers.modeling_utils.PreTrainedModel.from_pretrained", "a loaded model is sharded", _LOADED, _TRAIN_ON),
    Patch("transformers.training_args.is_torch_bf16_gpu_available", "recognizes only a fixed list of devices", _TRAINER, _TRAIN_ON, ""),
    Patch("transformers.training_args.TrainingArguments._setup_devices", "the Trainer selects devices itself", _TRAINER, _TRAIN_ON),
    *(
        Patch(f"transformers.trainer.Trainer.{name}", why, _TRAINER, _TRAIN_ON, parameters)
        for name, why, parameters in (
            ("_move_model_to_device", "a model is sharded before it moves to the devices", "self, model, device"),
            ("_prepare_inputs", "a batch that Accelerate has not sharded is sharded over the devices", "self, inputs"),
            ("training_step", "the NaN filter would read every loss in the middle of a step", "self, model, inputs, num_items_in_batch"),
            ("floating_point_ops", "the same; it is called after the filter", "self, inputs"),
            ("_save_rng_state", "the device's random state is saved with the others", "self, output_dir"),
            ("_load_rng_state", "the device's random state is restored with the others", "self, checkpoint"),
        )
    ),
)
_ABSENT = object()


def owner_of(target: str) -> tuple[Any, str]:
    """The object that has the target as an attribute, and the attribute's name.

    Raises:
        ImportError: the object does not exist in this version of torch.
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
    """The present value of a target.

    Raises:
        ImportError: the target does not exist in this version of torch.
    """
    owner, name = owner_of(target)
    found = getattr(owner, name, _ABSENT)
    if found is _ABSENT:
        raise missing(target)
    return found


def is_expected(target: str) -> bool:
    """Whether a target is listed for the installed version of torch. (Some have other names in other versions.)"""
    return any(patch.target == target and patch.is_expected for patch in PATCHES)


def replace(target: str, by: Any) -> Any:
    """Replace a target by `by` until the process ends, and return the original."""
    assert any(patch.target == target for patch in PATCHES), f"{target} is not listed in spmd/patches/_table.py"
    before = current(target)
    owner, name = owner_of(target)
    setattr(owner, name, by)
    return before


def replace_code(target: str, by: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function run the code of `by` until the process ends, and return a function with the original code.

    The function object stays the same, since programs often import it before this package. `by` runs with the globals of the
    function's module, so it must import the names that it needs.
    """
    assert any(patch.target == target for patch in PATCHES), f"{target} is not listed in spmd/patches/_table.py"
    function = current(target)
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__signature__ = signature(function)
    function.__code__ = by.__code__
    return original


def replace_everywhere(target: str, by: Any, package: str) -> None:
    """`replace`, and do the same in every loaded module of a package that has imported the object by name."""
    before, name = replace(target, by), target.rpartition(".")[2]
    for module in [m for n, m in sys.modules.items() if n.startswith(package) and vars(m).get(name) is before]:
        setattr(module, name, by)


@contextmanager
def replaced(target: str, by: Any) -> Generator[None]:
    """While active, a target is replaced by `by`. The original is restored afterwards; if it was inherited, `by` is deleted."""
    assert any(patch.target == target for patch in PATCHES), f"{target} is not listed in spmd/patches/_table.py"
    owner, name = owner_of(target)
    before = vars(owner).get(name, _ABSENT)  # from `vars`, which returns a static method and not its function
    setattr(owner, name, by)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


__all__ = ["PATCHES", "Patch", "current", "owner_of", "replace", "replace_code", "replace_everywhere", "replaced"]
